"""Trainables for Ray Tune from scenarios, for your own search space and scheduler (docs/sweeps.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayfed.runs.executors import load_entry_point
from rayfed.scenario import Scenario


def trainable(scenario: Scenario) -> Callable[[dict[str, Any]], None]:
    """Convert a scenario to a trainable for `ray.tune.Tuner` that requests the actors which one trial needs.

    Tune's `config` maps paths of fields, such as `training.lr`, to values. Each round reports `rounds` (completed so
    far), `train_loss`, `test_loss`, `test_accuracy`, and the mean `psnr`, `ssim` and `label_accuracy` of all attacks so
    far. With several arms, names have the form `ARM/psnr`. Each report has the run folder as its checkpoint. A trial
    that Tune restores continues after the checkpoint's round. Values cannot change between rounds, so a trial fails
    with an error if `PopulationBasedTraining` changes them.
    """
    made: Callable[[dict[str, Any]], None] = load_entry_point("ray", "trainable")(scenario)
    return made
