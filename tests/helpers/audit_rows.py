"""Rows of the table `attacks`, as an audit reads them."""

from __future__ import annotations

from typing import Any


def row(arm: str, batch: int, psnr: float | None, attack: str = "a", **more: Any) -> dict[str, Any]:
    usual = {
        "victim": 0,
        "sample": 0,
        "distortion": 0.0,
        "above_baseline": 5.0,
        "identified": 1.0,
        "knowledge": [],
        "fit": 1e-6,
    }
    usual |= {"status": "ok" if psnr is not None else "not applicable", "message": ""}
    return {"arm": arm, "batch_size": batch, "attack": attack, "psnr": psnr, **usual, **more}
