"""Runs made from rows, without training, that together have every state and every reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from rayfed.core.reasons import Reason
from rayfed.metrics.known import default_names
from rayfed.store.folder import RunFolder
from rayfed.store.images import encode_png
from rayfed.update import Encrypted, Masked
from tests.helpers.result_fixtures import attacked, small_run

NOISE = [{"name": "gaussian", "sigma": 0.1}]
METRICS = {"names": ["psnr", "ssim", "lpips_alex", "label_accuracy"], "success": {"psnr": 15.0}}
DATA = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "metrics": METRICS}
TEXTS = DATA | {"data": {"name": "text"}, "metrics": {"names": default_names("tokens")}}
RECORDS = DATA | {"data": {"name": "diabetes"}, "metrics": {"names": default_names("records")}}
IMAGE: dict[str, Any] = {
    "above_baseline": 5.0,
    "identified": 1.0,
    "distortion": 0.0,
    "true_label": 3,
    "message": "",
    "ssim": 0.5,
}
REPLAY = [{"name": "rayfed.audits.replay:Recorded", "folder": "recording"}]
GUARANTEE = {
    "rounds": 5, "defence": "dp_sgd", "delta": 1e-5, "unit": "sample", "adjacency": "one sample added",
    "against": "the server", "mechanism": "noise", "accountant": "pld", "conversion": "exact",
}  # fmt: skip
BOUNDS = {"rero_10": 0.39, "rero_100": 0.0924, "rero_1000": 0.0183, "advantage": 0.38}


@dataclass(frozen=True)
class Case:
    """Run of a snapshot."""

    name: str
    folder: RunFolder
    bounds: tuple[str, ...]
    """Bounds of the gate on this run."""


def make_cases(folder: str) -> list[Case]:
    """Make the folders of all runs."""
    image_bounds = ("psnr=15", "labels=0.5", "lpips=0.3")
    record_bounds = ("features=0.9",)
    return [
        Case("images", _images(folder), image_bounds),
        Case("nothing leaks without a defence", _nothing_leaks(folder), image_bounds),
        Case("no undefended arm", _defended(folder), image_bounds),
        Case("every arm leaks", _all_leak(folder), image_bounds),
        Case("texts", _texts(folder), ("tokens=0.9",)),
        Case("records", _records(folder), record_bounds),
        Case("membership", _membership(folder), ("membership.auc=0.6", "membership.tpr=0.1")),
        Case("interrupted", _interrupted(folder), image_bounds),
        Case("not attacked", _not_attacked(folder), image_bounds),
        Case("failed", _failed(folder), image_bounds),
    ]


def _image(arm: str, psnr: float | None, attack: str = "dlg", **columns: Any) -> dict[str, Any]:
    return attacked(arm, attack, psnr=psnr, **(IMAGE | columns))


def _hidden(arm: str, update: type[Masked] | type[Encrypted]) -> dict[str, Any]:
    return _image(arm, None, status="not applicable", reason=update.reason, message=update.unreadable)


def _images(folder: str) -> RunFolder:
    without_code: dict[str, Any] = {"knowledge": ["defence"]}
    rows = [
        _image("bare", 30.0, top1=1.0, people=10),
        _image("bare", 9.0, sample=1),
        _image("noise", 9.0, top1=0.0, people=10),
        _image("noise", 8.0, sample=1),
        _hidden("masked", Masked),
        _hidden("sealed", Encrypted),
        _image("not tested", 9.0, reason=Reason.DECLARATION_NOT_TESTED, message="Mine: KeyError: 3"),
        _image("undeclared", 9.0, reason=Reason.UNDECLARED, message="Mine"),
        _image("wrong", 9.0, reason=Reason.DECLARATION_WRONG, message="Mine: values"),
        _image("unlikely", 9.0, fit=1.0, log_likelihood=-5200.0, true_log_likelihood=-4800.0),
        _image("buffers", 9.0, reason=Reason.BUFFERS_NOT_SOLVED),
        _image("closer", 17.0, identified=0.0),
        _image("public", 20.0, above_public=-1.0),
        _image("unfit", 9.0, fit=0.9),
        _image("not compared", 9.0, fit=None),
        _image("few", 9.0, between=0.9),
        _image("not adaptive", 9.0, **without_code),
        _image("weak", 9.0, **without_code),
        _image("weak", 9.0, "idlg"),
        _image("recorded", 9.0, **without_code, distortion=0.9),
        _image("late", None, status="not played", message="not enough time (about 2 s)"),
        _image("broken", None, status="failed", message="KeyError: 3"),
        _image("not finite", None),
        _image("no baseline", 9.0, above_baseline=None),
        _image("no such layer", None, "imprint", status="not applicable", message="no such layer"),
    ]
    arms: dict[str, Any] = {row["arm"]: NOISE for row in rows} | {"bare": [], "recorded": REPLAY, "alone": NOISE}
    arms["masked"] = {"protection": "secure_aggregation"}
    arms["sealed"] = {"protection": {"name": "paillier", "key_bits": 512, "insecure": True}}
    arms["alone"] = {"defences": NOISE, "training": {"batch_size": 64}, "model": {}}
    attacks = [{"name": "dlg", "iterations": 300, "victims": 2, "knowledge": ["defence", "code"]}, {"name": "idlg"}]
    private = DATA | {"data": {"name": "image_folder", "root": "photos"}, "federation": {"clients": 8, "rounds": 1}}
    made = small_run(folder, {"arms": arms, "attacks": attacks, **private}, "images")
    sums = {"clients": 6, "advertised": 6, "shared": 5, "sent": 4, "revealed": 2, "protocol_bytes": 12_345}
    made.write_part("secure_sums", 0, [{"arm": "masked", "round": 0, "aborted": "2 of 4 needed revealed", **sums}])
    made.write_part("attacks", 0, rows)
    privacy = [
        {"arm": "noise", **GUARANTEE, "epsilon": 2.9555, "note": None},
        {"arm": "weak", **GUARANTEE, "epsilon": 200.0, "note": "seeded noise"},
        {"arm": "not tested", **GUARANTEE, "epsilon": None, "note": "no guarantee: private layers"},
        {"arm": "few", "rounds": 5, "note": "empirical: no defence of this arm has a guarantee"},
    ]
    made.write_part("privacy", 0, privacy)
    key = {"arm": "bare", "round": 0, "attack": "dlg", "victim": 1, "repeat": 0, "sample": 0}
    image = encode_png(torch.zeros(1, 8, 8))
    made.write_part("images", 0, [key | {"true": image, "reconstructed": image}])
    return made


def _nothing_leaks(folder: str) -> RunFolder:
    rows = [
        _image("bare", 9.0), _image("unfit", 9.0, fit=0.9), _image("not compared", 9.0, fit=None),
        _image("noise", 8.0), _image("overtaking", 20.0, "idlg"),
    ]  # fmt: skip
    arms: dict[str, Any] = {"bare": [], "unfit": [], "not compared": [], "noise": NOISE, "overtaking": NOISE}
    made = small_run(folder, {"arms": arms, "attacks": [{"name": "dlg"}], **DATA}, "weak")
    made.write_part("attacks", 0, rows)
    return made


def _defended(folder: str) -> RunFolder:
    made = small_run(folder, {"arms": {"noise": NOISE}, **DATA}, "defended")
    made.remove("rounds/part-00000.parquet")
    made.write_part("attacks", 0, [_image("noise", 9.0)])
    return made


def _all_leak(folder: str) -> RunFolder:
    scenario = {"arms": {"bare": [], "noise": NOISE}, "privacy": {"secure": True}, **DATA}
    made = small_run(folder, scenario, "leaks")
    made.write_part("privacy", 0, [{"arm": "noise", **GUARANTEE, **BOUNDS, "epsilon": 2.9555, "note": None}])
    labels = [_image("noise", 9.0, victim=victim, true_label=victim % 2) for victim in range(8)]
    pixels: dict[str, Any] = {"parts_recovered": 0.3, "parts_baseline": 0.05, "parts_evidence": 30.0}
    made.write_part("attacks", 0, [_image("bare", 30.0, batch_size=2), *labels, _image("noise", 9.0, **pixels)])
    return made


def _texts(folder: str) -> RunFolder:
    usual: dict[str, Any] = {
        "psnr": None,
        "above_baseline": 0.5,
        "true_label": None,
        "label_accuracy": None,
        "message": "",
    }
    parts: dict[str, Any] = {"parts_recovered": 0.6, "parts_baseline": 0.1, "parts_evidence": 30.0}
    rows = [
        attacked("bare", "dager", token_accuracy=1.0, rouge1=1.0, rougeL=1.0, **usual),
        attacked("shuffled", "dager", token_accuracy=0.2, rouge1=1.0, rougeL=0.2, **usual),
        attacked("in part", "dager", token_accuracy=0.6, rouge1=0.6, rougeL=0.6, **usual, **parts),
    ]
    arms: dict[str, Any] = {"bare": [], "shuffled": NOISE, "in part": NOISE}
    made = small_run(folder, {"arms": arms, "attacks": [{"name": "dager"}], **TEXTS}, "texts")
    made.write_part("attacks", 0, rows)
    key = {"arm": "bare", "round": 0, "attack": "dager", "victim": 1, "repeat": 0, "sample": 0}
    made.write_part("texts", 0, [key | {"true": ["a", "b"], "reconstructed": ["a", "c"], "right": [True, False]}])
    return made


def _records(folder: str) -> RunFolder:
    usual: dict[str, Any] = {
        "psnr": None,
        "true_label": None,
        "label_accuracy": None,
        "target_baseline": 0.5,
        "message": "",
    }
    parts: dict[str, Any] = {"parts_recovered": 0.8, "parts_baseline": 0.2, "parts_evidence": 30.0}
    columns = [{"name": "age", "found": True, "guess": 0.2}, {"name": "sex", "found": False, "guess": 0.5}]
    rows = [
        attacked("bare", "analytic", feature_accuracy=1.0, target_error=0.1, **usual),
        attacked("noise", "analytic", feature_accuracy=0.2, target_error=0.1, **usual),
        attacked("in part", "analytic", feature_accuracy=0.8, target_error=0.6, columns=columns, **usual, **parts),
    ]
    arms: dict[str, Any] = {"bare": [], "noise": NOISE, "in part": NOISE}
    scenario = {"arms": arms, "attacks": [{"name": "analytic"}], **RECORDS}
    made = small_run(folder, scenario, "records")
    made.write_part("attacks", 0, rows)
    key = {"arm": "bare", "round": 0, "attack": "analytic", "victim": 1, "repeat": 0, "sample": 0}
    record = ["age 24", "stage B"]
    made.write_part("texts", 0, [key | {"true": record, "reconstructed": record, "right": [True, True]}])
    return made


def _membership(folder: str) -> RunFolder:
    arms: dict[str, Any] = {"bare": [], "noise": NOISE}
    knowledge = ["candidates", "defence", "code"]
    attacks = [{"name": "membership", "label": "loss", "knowledge": knowledge}]
    made = small_run(folder, {"arms": arms, "attacks": attacks, **DATA}, "members")
    usual: dict[str, Any] = {
        "round": 0,
        "attack": "loss",
        "victim": 0,
        "repeat": 0,
        "status": "ok",
        "message": "",
        "metric": "auc",
    }
    rows = []
    for arm, shift in (("bare", 9.0), ("noise", 0.0)):
        scores = [
            {"kind": kind, "sample": i, "score": shift * (kind == "member") + i % 7, "control": float(i % 7)}
            for kind in ("member", "non-member")
            for i in range(50)
        ]
        values = {"value": 0.8, "chance": 0.5, "control": 0.5, "candidates": 100, "scores": scores}
        rows.append({"arm": arm, **usual, **values})
    accuracy = {"metric": "accuracy", "value": 1.0, "chance": 0.5, "candidates": 4}
    rows.append({"arm": "bare", **usual, "attack": "property", **accuracy})
    rows.append({"arm": "noise", **usual, "attack": "property", "status": "failed", "message": "KeyError: 3"})
    made.write_part("inferences", 0, rows)
    return made


def _interrupted(folder: str) -> RunFolder:
    made = small_run(folder, {"arms": {"bare": [], "noise": NOISE}, "attacks": [{"name": "dlg"}], **DATA}, "stopped")
    made.write_part("attacks", 0, [_image("bare", 30.0), _image("noise", 9.0)])
    status = {"kind": "training", "state": "interrupted", "rounds_done": 1, "rounds": 9, "error": "interrupted"}
    made.write_text("status.json", json.dumps(status))
    return made


def _not_attacked(folder: str) -> RunFolder:
    made = small_run(folder, {"arms": {"none": []}} | DATA, "unattacked")
    status = {"kind": "attack", "state": "interrupted", "rounds_done": 0, "rounds": 0, "error": "interrupted"}
    made.write_text("status.json", json.dumps(status))
    return made


def _failed(folder: str) -> RunFolder:
    made = small_run(folder, {"arms": {"bare": []}, **DATA}, "failed")
    made.write_part("attacks", 0, [_image("bare", None, status="diverged", message="objective is not finite")])
    status = {"kind": "training", "state": "failed", "rounds_done": 1, "rounds": 5, "error": "ResourceError: no GPU"}
    made.write_text("status.json", json.dumps(status))
    return made
