"""Scenarios as trainables for Ray Tune, with your own search space and scheduler (docs/sweeps.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayfed.engine.executions import brought
from rayfed.scenario import Scenario


def trainable(scenario: Scenario) -> Callable[[dict[str, Any]], None]:
    """Return a scenario as a trainable for `ray.tune.Tuner`, with the actors that one trial needs.

    Tune's `config` maps paths of fields (`training.lr`) to values. Every round is reported as `rounds` (played so far),
    `train_loss`, `test_loss`, `test_accuracy` and the mean `psnr`, `ssim` and `label_accuracy` of the attacks so far,
    each as `ARM/psnr` where the scenario has several arms. The run folder is `run` in the trial's own directory; a
    trial that Tune starts again goes on after its last complete round.
    """
    made: Callable[[dict[str, Any]], None] = brought("ray", "trainable")(scenario)
    return made
