"""A scenario and rows of the table `attacks`, as a gate reads them."""

from __future__ import annotations

from typing import Any

SCENARIO = {
    "seed": 0,
    "metrics": {"names": ["psnr", "ssim", "mse", "lpips_alex", "label_accuracy"], "success": {"psnr": 15.0}},
    "arms": {"none": [], "x": [{"name": "gaussian"}], "y": [{"name": "prune"}]},
    "federation": {},
    "attacks": [{"name": "membership", "label": "m", "knowledge": ["candidates", "defence", "code"]}],
}


def row(arm: str, psnr: float | None = None, attack: str = "a", batch: int = 1, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"round": 0, "victim": 0, "sample": 0, "repeat": 0, "true_label": 1}
    usual |= {"knowledge": ["defence", "code"], "fit": 1e-6}
    usual |= {"above_baseline": 5.0, "identified": 1.0, "status": "ok", "message": "", "observes": "gradient"}
    return usual | {"arm": arm, "attack": attack, "batch_size": batch, "psnr": psnr} | more
