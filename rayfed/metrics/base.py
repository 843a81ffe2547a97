"""The contract of a metric: how it scores reconstructions, and its unit, title and thresholds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rayfed.samples import Modality


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure for scoring reconstructions, declared once for tables, reports and scenarios.

    Scenarios are checked against these without PyTorch: the module that declares one imports it in functions, if at
    all. Names are columns, so a name that has stood in somebody's tables is not given to anything else.
    """

    name: str
    """Column in the table `attacks`, and in the outcomes; an identifier."""
    description: str
    """Description of the column, with its range or unit."""
    title: str
    """Name in tables and sentences."""
    function: Callable[..., Any]
    """Function that measures it; its arguments are those of `compares`. Where it `needs` something, it is called with
    that first, once a process, and returns what measures; it may raise `UserError` then, and the column stays empty."""
    higher_is_closer: bool
    """Whether a higher value is nearer to the truth, or a lower one."""
    modalities: tuple[Modality, ...] = ("pixels",)
    """Modalities of samples of which it means something, the one that it was made for first."""
    compares: Literal["samples", "class", "masks", "labels"] = "samples"
    """`samples`: true ones (N, C, H, W) with the reconstructions matched to them, to (N,). `class`: the true labels
    (N,) with the reconstructions, to (N,). `masks`: the true ones (N, H, W) with those that the
    attack states beside the images matched to them, to (N,). `labels`: those of a batch (N,) with those that the attack
    states, in any order, to one number for the batch."""
    needs: tuple[Literal["lpips_weights", "evaluator", "recogniser", "people", "sample", "others"], ...] = ()
    """Fields of `Scorer` that the function is made with."""
    unit: str = ""
    ceiling: float = inf
    """Largest value that is told apart: those above it count as equal to it, as those of exact copies."""
    bounds: tuple[float, float] = (-inf, inf)
    """Least and largest value that is possible, at which intervals are cut; those of shares and hits are 0 and 1."""
    format: Literal["number", "error", "share", "hit"] = "number"
    """Format of values: with three decimals, or with three significant digits on a logarithmic scale; as per cent; as
    per cent of samples of which each is a hit (1) or not (0)."""
    heading: str = ""
    """Name in the report's table; the title where nothing is said."""
    short: str = ""
    """Name in narrow tables; the heading where nothing is said."""
    tables: tuple[Literal["settings", "run", "sweep"], ...] = ("settings", "run", "sweep")
    """Small tables that it stands in where it was measured: that of settings, which notebooks, comparisons and
    exports show, and those in the terminal at the end of a run and of a sweep. Reports and rows have all metrics."""
    worst_in_tables: bool = False
    """Whether the value of the worst sample stands beside the mean in the table of settings."""
    outcome: bool = True
    """Whether the outcomes have its mean and worst value, so that settings can be judged by it."""
    default_of: tuple[Modality, ...] = ()
    """Modalities of samples of which it is measured unless the scenario says what is."""
    leads: bool = False
    """Whether samples of its first modality are ranked by it."""
    success: Literal["curve", "threshold"] | None = "curve"
    """Whether a scenario may set a threshold from which on a reconstruction counts, and whether the report draws how
    many pass each threshold and can order the images by it."""
    threshold: float | None = None
    """Threshold of success for samples of its first modality, unless the scenario says one."""
    chart: tuple[float, float] | None = None
    """The easiest threshold that a chart begins with where all samples pass the hardest, and the hardest one that it
    shows: what is nearer is the same to any eye. None: those that were measured."""

    @property
    def of_labels(self) -> bool:
        """Whether it says what attacks found of labels, and so nothing where these were given."""
        return self.compares in ("masks", "labels")

    def __post_init__(self) -> None:
        """Write the docstring that `rayfed list` and `rayfed describe` show."""
        facts = (
            f"Of {', '.join(self.modalities)}; {'more' if self.higher_is_closer else 'less'} is nearer to the truth."
        )
        if self.default_of:
            facts += f" Measured by default of {', '.join(self.default_of)}."
        if self.threshold is not None:
            facts += f" By default a success from {self.threshold:g} on."
        object.__setattr__(self, "__doc__", f"{self.description[0].upper()}{self.description[1:]}.\n\n{facts}")

    @property
    def table_heading(self) -> str:
        """Heading of the metric's table column."""
        return self.heading or f"{self.title[0].upper()}{self.title[1:]}"

    @property
    def short_name(self) -> str:
        """Abbreviated name."""
        return self.short or self.table_heading

    def passes(self, value: float, threshold: float) -> bool:
        """Return whether a value reaches a threshold or is nearer to the truth."""
        return value >= threshold if self.higher_is_closer else value <= threshold
