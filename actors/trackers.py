"""Experiment trackers (TensorBoard, MLflow, Weights & Biases) that a sweep names, as callbacks of Tune."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from ray import tune

from rayfed.errors import UserError, require_extra
from rayfed.results.sweep_folder import SweepFolder
from rayfed.scenario import Sweep


def trackers(sweep: Sweep, folder: SweepFolder) -> list[tune.Callback]:
    """Return Tune callbacks for the experiment trackers that a sweep names, with the sweep's options.

    Raises `UserError` if a tracker's package is not installed, or if Weights & Biases has no key.
    """
    for name in sweep.trackers:
        _check(name)
    return [_tracker(name, settings, folder) for name, settings in sweep.trackers.items()]


def _check(name: str) -> None:
    package = {"tensorboard": "tensorboardX"}.get(name, name)
    require_extra("trackers", f"sweep.trackers.{name}", package)
    if name == "wandb" and not (os.environ.get("WANDB_API_KEY") or import_module(package).api.api_key):
        advice = "set WANDB_API_KEY or run `wandb login`. With `mode: offline`, any 40 characters are accepted"
        raise UserError(f"sweep.trackers.wandb: Tune needs an API key: {advice}")


def _tracker(name: str, settings: dict[str, Any], folder: SweepFolder) -> tune.Callback:
    try:
        match name:
            case "tensorboard":
                from ray.tune.logger import TBXLoggerCallback

                return TBXLoggerCallback(**settings)
            case "mlflow":
                from ray.air.integrations.mlflow import MLflowLoggerCallback

                return MLflowLoggerCallback(**({"experiment_name": folder.files.name} | settings))
            case _:
                from ray.air.integrations.wandb import WandbLoggerCallback

                return WandbLoggerCallback(**({"project": "rayfed", "group": folder.files.name} | settings))
    except TypeError as error:
        raise UserError(f"sweep.trackers.{name}: {error}; use the arguments of Tune's callback") from error
