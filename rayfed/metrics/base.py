"""Interface of metrics: the scoring function of a metric, and its unit, title and thresholds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rayfed.samples import Modality


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Declaration of a metric of reconstructions, used by tables, reports and scenarios.

    Scenarios are checked against declarations without PyTorch, so modules that declare metrics import it inside
    functions. Names are table columns: do not reuse a name that is in existing tables.
    """

    name: str
    """Column of the table `attacks` and of the outcomes. Must be an identifier."""
    description: str
    """Description of the column, with range or unit."""
    title: str
    """Name in tables and sentences."""
    function: Callable[..., Any]
    """Function that computes the metric, with the arguments listed under `compares`. If the metric `needs` something,
    the function takes that instead, once per process, and returns the function that computes the metric. It may raise
    `UserError`, and the column then stays empty."""
    higher_is_closer: bool
    """Whether a higher value means a better reconstruction."""
    modalities: tuple[Modality, ...] = ("pixels",)
    """Modalities for which the metric is defined, the main one first."""
    compares: Literal["samples", "class", "masks", "labels"] = "samples"
    """Arguments of the function. `samples`: true samples (N, C, H, W) and matched reconstructions, returns (N,).
    `class`: true labels (N,) and reconstructions, returns (N,). `masks`: true masks (N, H, W) and the attack's masks
    for the matched images, returns (N,). `labels`: true labels (N,) and the attack's labels in any order, returns one
    number."""
    needs: tuple[Literal["lpips_weights", "evaluator", "recogniser", "people", "sample", "others"], ...] = ()
    """Fields of `Scorer` to pass to the function."""
    unit: str = ""
    ceiling: float = inf
    """Largest distinct value. Higher values, as for exact copies, count as equal to the ceiling."""
    bounds: tuple[float, float] = (-inf, inf)
    """Minimum and maximum of the metric, at which intervals are clipped. Those of shares and hits are 0 and 1."""
    format: Literal["number", "error", "share", "hit"] = "number"
    """Format of values. `number`: three decimals. `error`: three significant digits, on a logarithmic scale. `share`:
    per cent. `hit`: per cent of samples with value 1 instead of 0."""
    heading: str = ""
    """Heading in the report's table. Default: the title."""
    short: str = ""
    """Heading in narrow tables. Default: `heading`."""
    tables: tuple[Literal["settings", "run", "sweep"], ...] = ("settings", "run", "sweep")
    """Small tables that show the metric if it was measured. `settings`: in notebooks, comparisons and exports. `run`
    and `sweep`: in the terminal at the end of a run or sweep. Reports and rows contain all metrics."""
    worst_in_tables: bool = False
    """Whether the table of settings also shows the value of the worst sample."""
    outcome: bool = True
    """Whether outcomes contain the metric's mean and worst value, to compare settings."""
    default_of: tuple[Modality, ...] = ()
    """Modalities for which the metric is computed by default."""
    leads: bool = False
    """Whether samples of the main modality are ranked by this metric."""
    success: Literal["curve", "threshold"] | None = "curve"
    """Whether a scenario may set a threshold of success. With `curve`, the report also draws the share of samples per
    threshold and can sort images by the metric."""
    threshold: float | None = None
    """Default threshold of success for samples of the main modality."""
    chart: tuple[float, float] | None = None
    """Range of thresholds on the chart: the start if all samples pass the hardest threshold, and the end, beyond which
    differences are invisible. None: the range of the measured values."""

    @property
    def of_labels(self) -> bool:
        """Return whether the metric compares labels, in which case attacks with granted labels are not measured."""
        return self.compares in ("masks", "labels")

    def __post_init__(self) -> None:
        """Write the metric's docstring, which `rayfed list` and `rayfed describe` show."""
        facts = (
            f"For {', '.join(self.modalities)}. "
            f"{'Higher' if self.higher_is_closer else 'Lower'} is closer to the truth."
        )
        if self.default_of:
            facts += f" Computed by default for {', '.join(self.default_of)}."
        if self.threshold is not None:
            facts += f" Default threshold of success: {self.threshold:g}."
        object.__setattr__(self, "__doc__", f"{self.description[0].upper()}{self.description[1:]}.\n\n{facts}")

    @property
    def table_heading(self) -> str:
        """Return the heading of the metric's column in tables."""
        return self.heading or f"{self.title[0].upper()}{self.title[1:]}"

    @property
    def short_name(self) -> str:
        """Return the metric's abbreviated name, for narrow tables."""
        return self.short or self.table_heading

    def passes(self, value: float, threshold: float) -> bool:
        """Return whether a metric's value reaches a threshold, or is closer to the true sample than the threshold."""
        return value >= threshold if self.higher_is_closer else value <= threshold
