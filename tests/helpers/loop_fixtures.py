"""Defences and the account of a training loop."""

from __future__ import annotations

from typing import Any

GAUSSIAN = {"name": "gaussian", "clip": 1.0, "sigma": 8.0}


DP_SGD = {"name": "dp_sgd", "clip": 0.5, "noise_multiplier": 1.0}


LOOP: dict[str, Any] = {"rounds": 3, "samples": 40, "batch_size": 4, "steps": 10}
