"""The section `sweep`: varied fields of the scenario, and the choice of their values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rayfed.scenario.components import Section


class Range(Section):
    """Interval of a swept value."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    scale: Literal["linear", "log"] = "linear"
    """Distribution of draws: even over the values, or over their logarithms."""
    whole: bool = False
    """Draw whole numbers only."""


class Sweep(Section):
    """Settings of a sweep: many runs of one scenario, each with one arm and one set of values."""

    fields: dict[str, Annotated[list[Any], Field(min_length=1)] | Range] = {}
    """Path of a field, such as `training.batch_size` or `arms.noise.defences.gaussian.sigma` -> its values in a list,
    or the `low` and `high` that they are drawn between. A field of one arm varies that arm alone, any other all. None:
    `repeats` varies the seed alone."""
    search: Literal["grid", "random", "optuna"] = "grid"
    """`grid`: every combination of the lists, arm by arm. `random`: draws, to the arms in turn. `optuna`: Optuna looks
    for the front of `objectives`."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Number of settings that `random` and `optuna` try."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """Number of seeds that every setting is played with: the scenario's and those that follow it."""
    objectives: Annotated[list[str], Field(min_length=1)] = ["psnr", "test_accuracy"]
    """Columns of the outcomes that `optuna` improves: of leakage the mean over images, or the worst image with
    `psnr_worst`, by the attack that gets most."""
    scheduler: Literal["asha", "median"] | None = None
    """Scheduler that stops trials early whose test accuracy falls behind: asynchronous successive halving (Li 2020), or
    below the median of the others. Null: none."""
    grace: Annotated[int, Field(ge=1)] = 1
    """Number of rounds that every trial plays before a scheduler may stop it."""
    trackers: dict[Literal["tensorboard", "mlflow", "wandb"], dict[str, Any]] = {}
    """Experiment trackers that every round is logged to, with the settings of Tune's callback for each; `{}` for none.
    TensorBoard's files lie in the sweep's folder, under `tune`."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Number of trials at once; null: as many as the cluster has room for."""
