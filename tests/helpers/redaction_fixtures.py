"""Data planted in a run's tables, and the search for them in pages."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import torch
import yaml

from rayfed.store.folder import RunFolder
from rayfed.store.images import encode_png
from tests.helpers.report_fixtures import make_run

SECRET = "Ms-Planted-Patient-1947"


COLUMN = "planted_column_of_patients"


TRUE, REBUILT, ON_THE_WAY = (encode_png(torch.full((1, 8, 8), level)) for level in (0.111, 0.444, 0.777))


ON_PAGE = {"true": TRUE, "reconstructed": REBUILT, "snapshot": ON_THE_WAY}


KEY = {"arm": "none", "round": 7, "attack": "idlg", "victim": 1, "repeat": 0, "sample": 0}


ROW = KEY | {"status": "ok", "batch_size": 1, "psnr": 60.0, "mse": 1e-6, "true_label": 3, "label": 3, "iterations": 5}


def plant(folder: RunFolder, images: str | None = None) -> RunFolder:
    """Plant a client's data wherever a run may have any."""
    scenario: dict[str, Any] = folder.read_mapping("scenario.yaml")
    scenario |= {
        "data": {"name": "image_folder", "root": f"/clinic/{SECRET}", "size": 8},
        "model": {"name": f"{SECRET.replace('-', '_')}:Net", SECRET: 1947, "codes": [471147]},
        "output": {"folder": f"/home/{SECRET}", "images": images},
        "attacks": [{"name": "ggl", "prior": f"{SECRET}.pt", "label": "idlg"}],
    }
    scenario["arms"]["gaussian"] = [{"name": "gaussian", "sigma": 0.01, "path": f"/x/{SECRET}"}]
    folder.write_text("scenario.yaml", yaml.safe_dump(scenario))
    folder.write_text("environment.json", json.dumps({"host": SECRET}))
    folder.write_text("status.json", json.dumps({"state": "failed", "error": f"ValueError: {SECRET}"}))
    folder.write_part("partition", 0, [{"client": 1, "label": 3, "class_name": SECRET, "count": 9}])
    columns = [{"name": COLUMN, "found": True, "guess": 0.1}]
    scored = {"above_baseline": 20.0, "identified": 1.0, "columns": columns}
    failed = KEY | {"sample": 1, "status": "failed", "message": f"ValueError: {SECRET}", "batch_size": 1}
    folder.write_part("attacks", 7, [ROW | scored, failed])
    told = {"metric": "auc", "status": "failed", "message": f"KeyError: {SECRET}"}
    folder.write_part("inferences", 7, [{k: v for k, v in KEY.items() if k != "sample"} | told])
    folder.write_part("images", 7, [KEY | {"true": TRUE, "reconstructed": REBUILT}])
    folder.write_part("snapshots", 7, [KEY | {"iteration": 10, "image": ON_THE_WAY}])
    return folder


def planted(out: Path, images: str | None = None) -> RunFolder:
    return plant(make_run(str(out), {"none": [], "gaussian": []}, {}), images)


def decoded(page: str) -> bytes:
    """A page, and all that is base64 in it."""
    pieces = (b64decode(found) for found in re.findall(r"base64,([A-Za-z0-9+/]{24,}=*)", page))
    return page.encode() + b"".join(pieces)


def on(page: str) -> set[str]:
    """Which of the planted images a page has."""
    return {name for name, png in ON_PAGE.items() if png in decoded(page)}
