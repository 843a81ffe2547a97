"""Make folders of runs and sweeps without running anything."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rayfed.evidence.settings import MeanEstimate, Setting
from rayfed.results.sweep_folder import SweepFolder
from rayfed.store.folder import RunFolder

NOON = datetime(2025, 3, 1, 12)
SIGMA = "arms.noise.defences.gaussian.sigma"
BATCH = "training.batch_size"


def setting(
    arm: str = "none", attack: str | None = "dlg", fields: dict[str, Any] | None = None, **means: float
) -> Setting:
    """Return a setting that was run once."""
    measures = {name: MeanEstimate(mean, None, None, 1) for name, mean in means.items()}
    return Setting("", arm, attack, fields or {}, measures, [{"arm": arm, "attack": attack}])


def outcome(arm: str = "none", attack: str | None = "dlg", **columns: Any) -> dict[str, Any]:
    return {"arm": arm, "attack": attack, "defences": "", "status": "finished", "repeat": 0, **columns}


def small_run(out: str, scenario: dict[str, Any], name: str = "small", seconds: float = 2.0) -> RunFolder:
    """Make a run with one round of every arm, and without rows of attacks."""
    folder = RunFolder.create(out, name, NOON)
    folder.write_text("scenario.yaml", yaml.safe_dump({"name": name, "seed": 0, **scenario}, sort_keys=False))
    folder.write_text("status.json", json.dumps({"state": "finished", "rounds_done": 1, "rounds": 1, "error": None}))
    arms = scenario.get("arms") or {"none": []}
    played = [
        {"arm": arm, "round": 0, "test_accuracy": max(0.9 - 0.1 * place, 0.1), "test_loss": 0.5, "clients": 2,
         "samples": 20, "actor_seconds": seconds, "bytes_up": 1000, "bytes_down": 3000}
        for place, arm in enumerate(arms)
    ]  # fmt: skip
    folder.write_part("rounds", 0, played)
    return folder


def attacked(arm: str, attack: str, sample: int = 0, **scores: Any) -> dict[str, Any]:
    """Return a row of the table `attacks`."""
    return {
        "arm": arm, "round": 0, "attack": attack, "victim": 1, "repeat": 0, "sample": sample, "batch_size": 2,
        "observes": "gradient", "knowledge": ["defence", "code"], "label_accuracy": 1.0, "seconds": 3.0, "status": "ok",
        "above_baseline": 5.0, "identified": 1.0, "fit": 1e-6, **scores,
    }  # fmt: skip


SWEPT = {
    "name": "swept",
    "seed": 0,
    "arms": {"none": {"defences": []}, "noise": {"defences": [{"name": "gaussian", "sigma": 0.1}]}},
    "sweep": {"fields": {SIGMA: [0.01, 0.1, 1.0]}, "repeats": 3},
}


def small_sweep(out: Path, rows: list[dict[str, Any]] | None = None) -> SweepFolder:
    """Make a sweep with four noise levels, three repeats and two attacks, of which `dlg` reconstructs more."""
    files = RunFolder.create(str(out), "swept", NOON)
    files.write_text("scenario.yaml", yaml.safe_dump(SWEPT, sort_keys=False))
    sweep = SweepFolder(files)
    sweep.write_outcomes(swept_rows() if rows is None else rows)
    return sweep


def swept_rows() -> list[dict[str, Any]]:
    found = []
    for place, (arm, sigma) in enumerate([("none", None), ("noise", 0.01), ("noise", 0.1), ("noise", 1.0)]):
        for repeat in range(3):
            trial = {"trial": f"{place:04d}", "repeat": repeat, "seed": repeat, "run": f"trials/{place:04d}-{repeat}"}
            told = {
                "test_accuracy": [0.98, 0.975, 0.95, 0.6][place] + 0.001 * repeat, "train_seconds": 10.0 + place,
                "bytes_up": 1000.0, "psnr": [40.0, 20.0, 11.0, 6.0][place] + 0.1 * repeat,
            }  # fmt: skip
            shared = trial | ({SIGMA: sigma} if sigma is not None else {})
            found += [outcome(arm, "dlg", **shared, **told), outcome(arm, "idlg", **shared, **told | {"psnr": 5.0})]
    return found


def trial_run(sweep: SweepFolder, run: str) -> RunFolder:
    """Make the run folder of a trial with only a scenario."""
    folder = sweep.trial(run)
    folder.write_text("scenario.yaml", yaml.safe_dump({"name": "swept", "arms": {"noise": {"defences": []}}}))
    return folder
