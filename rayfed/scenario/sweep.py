"""The section `sweep`: fields of the scenario to vary, and their values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from rayfed.metrics.renamed import present
from rayfed.scenario.components import Section

_Column = Annotated[str, AfterValidator(present)]


class Range(Section):
    """Interval from which values of a field are sampled."""

    low: float
    """Minimum value."""
    high: float
    """Maximum value."""
    scale: Literal["linear", "log"] = "linear"
    """Scale of the uniform distribution: the values or their logarithms."""
    whole: bool = False
    """Sample only whole numbers."""


class Sweep(Section):
    """Settings of a sweep: many runs of a scenario, each with one arm and one set of values."""

    fields: dict[str, Annotated[list[Any], Field(min_length=1)] | Range] = {}
    """Fields to vary: paths such as `training.batch_size` or `arms.noise.defences.gaussian.sigma`, each with a list of
    values, or `low` and `high` to sample between. The field of an arm varies only in this arm. Default: none, vary only
    the seed (`repeats`)."""
    search: Literal["grid", "random", "optuna"] = "grid"
    """Search. `grid`: all combinations of the lists, in each arm. `random`: random samples, for one arm after another.
    `optuna`: the Pareto front of `objectives`, with Optuna."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Number of settings to try with `random` and `optuna`."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """Number of seeds per setting: the scenario's `seed` and the numbers after it. Default: 1."""
    objectives: Annotated[list[_Column], Field(min_length=1)] = ["psnr", "test_accuracy"]
    """Columns that `optuna` optimises. Leakage is the mean over images (`max_psnr`: the image that leaked most), by
    the strongest attack."""
    scheduler: Literal["asha", "median"] | None = None
    """Early stopping of trials with a low test accuracy. `asha`: asynchronous successive halving (Li 2020). `median`:
    stop trials below the median. Default: null, none."""
    grace: Annotated[int, Field(ge=1)] = 1
    """Minimum number of rounds before a scheduler may stop a trial. Default: 1."""
    trackers: dict[Literal["tensorboard", "mlflow", "wandb"], dict[str, Any]] = {}
    """Experiment trackers for the values of each round, each with the settings of its Ray Tune callback (`{}` for the
    defaults). TensorBoard files are written to `tune` in the sweep's folder. Default: none."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of concurrent trials. Default: as many as the cluster has room for."""
