"""Schema of a reproduction: a scenario and the paper's results, as data.

The ordinary engine runs the scenario, and `rayfed.reproductions.judging` compares the results.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, model_validator

from rayfed.core.documents import read_yaml
from rayfed.errors import ScenarioError, UserError, nearest
from rayfed.metrics.measures import MEASURES
from rayfed.reproductions.kinds import Attacker, Comparison, Direction, Size
from rayfed.scenario import with_changes
from rayfed.scenario.components import Section
from rayfed.scenario.paths import set_field
from rayfed.store.schemas import OUTCOME_COLUMNS, TABLES

Where = dict[str, str | int | float | bool | dict[str, str | int | float | bool | None] | None]
"""Column or swept field -> value of the compared rows. For a swept section such as `data`, some of its fields."""


class Figure(Section):
    """Value that the paper prints, with a selection of the rows to compare."""

    label: str
    """Name of the row in the paper."""
    paper: float
    """Number that the paper prints."""
    where: Where = {}
    """Column or swept field -> value of the compared rows. For a swept section such as `data`, some of its fields."""
    default_attack: Where = {}
    """Values of `where` for the attack with its default options, if `where` selects the attack as published. The
    figures of a group are then compared for both attackers, `paper` and `adaptive`."""
    points: list[Where] = []
    """Points of a curve, if the group has `along`: for each point the values that it has in addition to `where`."""
    full_only: bool = False
    """Whether the reduced version leaves it out."""


class Group(Section):
    """Values of one measure in a paper whose order is meaningful."""

    title: str
    """Measure as a heading: `PSNR (dB)`."""
    measure: str
    """A column of the table."""
    table: str = "outcomes"
    """Name of the table: `outcomes`, or a table of the trials' runs."""
    take: Literal["mean", "first", "last", "min", "max"] = "mean"
    """Reduction of several rows of one seed; `first` and `last` go by the column `round`."""
    at_least: float | None = None
    """Compare the share (0 to 1) of rows with at least this value, instead of the value."""
    at_most: float | None = None
    """Compare the share (0 to 1) of rows with at most this value, instead of the value."""
    scale: float = 1.0
    """Factor of our values: 100 if the paper gives percent."""
    tolerance: Annotated[float, Field(gt=0)]
    """Maximum difference that counts as agreement, in the unit of the measure, or of the ratio. Pairs that differ by
    more in the paper must have the same order here."""
    true_measure: str | None = None
    """Column with the same quantity in true arithmetic, if `measure` is in a convention of the paper. It is shown with
    our values and not compared."""
    compare: Comparison = Comparison.VALUES
    """Compared quantity: `values`, `order` (`paper` is a rank, 1 for the lowest) or `differences`."""
    better: Direction | None = None
    """Direction in which a figure is better than the paper's: for an attack a higher PSNR. Default: that of a measure
    of utility such as the accuracy, otherwise none."""
    along: str | None = None
    """Column on the horizontal axis of curves, such as `pmm`. Curves are compared at equal values of this column."""
    attackers: dict[Attacker, Where] = {}
    """Attacker (`paper`, `adaptive`) -> values that its rows have in addition to those of the figures. Each attacker
    gets its own verdict. Default: one attacker."""
    attacker: Attacker | None = None
    """Attacker of the figures, if only one is measured."""
    cause: str = ""
    """Reason why our figures do not reproduce the paper's."""
    relative_to: str | None = None
    """Label of the figure by which all figures are divided, in the paper and here."""
    figures: Annotated[list[Figure], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Group:
        tables = {name: tuple(schema.names) for name, schema in TABLES.items()} | {"outcomes": OUTCOME_COLUMNS}
        columns = tables.get(self.table, ())
        if not columns:
            raise ValueError(f"there is no table '{self.table}': {nearest(self.table, ['outcomes', *TABLES])}")
        if self.measure not in columns:
            raise ValueError(f"table '{self.table}' has no column '{self.measure}': {nearest(self.measure, columns)}")
        for column in filter(None, (self.along, self.true_measure)):
            if column not in columns:
                raise ValueError(f"table '{self.table}' has no column '{column}': {nearest(column, columns)}")
        return self

    @model_validator(mode="after")
    def _has_curves(self) -> Group:
        if self.along is not None and self.compare is Comparison.VALUES:
            raise ValueError("`along` needs `compare: order` or `compare: differences`: add it")
        if any(bool(figure.points) != bool(self.along) for figure in self.figures):
            raise ValueError("curves need both `along` and the `points` of each figure")
        if self.along and (self.relative_to or self.true_measure):
            raise ValueError("`along` excludes `relative_to` and `true_measure`: remove them")
        return self

    @model_validator(mode="after")
    def _has_labels(self) -> Group:
        labels = [figure.label for figure in self.figures]
        if len(set(labels)) < len(labels):
            raise ValueError("two figures have the same label: rename one")
        if self.attackers and any(figure.default_attack for figure in self.figures):
            raise ValueError("give `attackers` or `default_attack`, not both")
        if self.relative_to is not None and self.relative_to not in labels:
            raise ValueError(f"`relative_to` names no figure: {nearest(self.relative_to, labels)}")
        if any(figure.label == self.relative_to and not figure.paper for figure in self.figures):
            raise ValueError(f"`relative_to` '{self.relative_to}' is 0 in the paper: choose another figure")
        if self.at_least is not None and self.at_most is not None:
            raise ValueError("give `at_least` or `at_most`, not both")
        if self.true_measure and (self.relative_to or self.at_least is not None or self.at_most is not None):
            raise ValueError("`true_measure` excludes `relative_to`, `at_least` and `at_most`: remove them")
        if self.compare is Comparison.ORDER and self.relative_to:
            raise ValueError("`compare: order` excludes `relative_to`: remove one of them")
        return self

    @property
    def key(self) -> str:
        """Return the name of the group in records: title, and attacker if there is one."""
        return self.title if self.attacker is None else f"{self.title} [{self.attacker}]"

    @property
    def measures(self) -> list[str]:
        """Return the compared columns."""
        return [self.measure] if self.along is None else [self.measure, self.along]

    @property
    def direction(self) -> Direction | None:
        """Return the direction in which a figure is better than the paper's; None without one."""
        measure = MEASURES.get(self.measure)
        if self.better is not None or measure is None or measure.kind != "utility":
            return self.better
        return Direction.HIGHER if measure.higher_is_better else Direction.LOWER

    def in_true_arithmetic(self) -> Group:
        """Return the group with the values of `true_measure`."""
        return self.model_copy(update={"measure": self.true_measure, "true_measure": None, "scale": 1.0})

    def selection(self) -> dict[str, Any]:
        """Return what decides our values: column, rows and reduction, without the paper's values and texts."""
        own = {"table", "measure", "true_measure", "along", "take", "at_least", "at_most", "scale"}
        figures = {figure.label: figure.model_dump(include={"where", "points"}) for figure in self.figures}
        return {**self.model_dump(include=own), "figures": figures}

    def by_attacker(self) -> list[Group]:
        """Return one group for each attacker; only this group if there is one."""
        if any(figure.default_attack for figure in self.figures):
            defaults = [figure.default_attack for figure in self.figures]
            published: list[Where] = [{} for _ in self.figures]
            return [self._with(Attacker.PAPER, published), self._with(Attacker.ADAPTIVE, defaults)]
        if not self.attackers:
            return [self]
        return [self._with(attacker, [where] * len(self.figures)) for attacker, where in self.attackers.items()]

    def _with(self, attacker: Attacker, wheres: Sequence[Where]) -> Group:
        """Return the group for one attacker, with further values of the compared rows for each figure."""
        figures = []
        for figure, where in zip(self.figures, wheres, strict=True):
            figures.append(figure.model_copy(update={"where": {**figure.where, **where}, "default_attack": {}}))
        return self.model_copy(update={"attackers": {}, "attacker": attacker, "figures": figures})

    def with_figures(self, full_only: bool) -> list[Figure]:
        """Return the values that the reduced version omits (`full_only`), or all other values."""
        return [figure for figure in self.figures if figure.full_only == full_only]


class Absent(Section):
    """Part of the paper's table that is not reproduced."""

    what: str
    """Name of the part."""
    why: str
    """Reason why it is not reproduced."""


class Paper(Section):
    """Source of the values: the publication and the place in it."""

    name: str
    """Authors and year, or title."""
    place: str
    """Place in the paper: `table 3.4`."""


class Reproduction(Section):
    """Reproduction of a paper's table or figure."""

    title: str
    """Title in one line."""
    paper: Paper
    """Source of the figures."""
    claim: str
    """The paper's claim."""
    remarks: str = ""
    """Remarks on differences and their reasons."""
    prepare: dict[str, str] = {}
    """File -> `rayfed` command (without the word `rayfed`) that writes it if it is missing."""
    scenario: dict[str, Any] | None = None
    """Scenario with a `sweep`, in the paper's size; null if it cannot be reproduced."""
    reduced: dict[str, Any] = {}
    """Path -> value of the changes for the size `reduced`: about 15 minutes on two cores."""
    gpu: dict[str, Any] = {}
    """Path -> value of the changes for the size `gpu`. Default: none, the paper's size."""
    groups: list[Group] = []
    """Compared groups of figures."""
    cause: str = ""
    """Reason why the claim is not reproduced, if the groups do not state their own."""
    absent: list[Absent] = []
    """Parts that are not compared, with reasons."""

    @model_validator(mode="after")
    def _whole(self) -> Reproduction:
        if self.scenario is None and (self.groups or not self.absent):
            raise ValueError("there is no `scenario`: give the reason under `absent`")
        if self.scenario is not None and not self.groups:
            raise ValueError("there are no `groups`: add the figures to compare")
        if self.scenario is not None and not self.scenario.get("sweep"):
            raise ValueError("add a `sweep`, at least `sweep: {repeats: 3}`: intervals are over seeds")
        keys = [group.key for whole in self.groups for group in whole.by_attacker()]
        if len(set(keys)) < len(keys):
            raise ValueError("two groups have the same title: rename one")
        for group in self.groups:
            if group.relative_to in [figure.label for figure in group.with_figures(full_only=True)]:
                raise ValueError(f"`relative_to` '{group.relative_to}' is not in the reduced version")
        return self

    def compared(self, size: Size) -> list[Group]:
        """Return the non-empty groups of values that are compared at a size, one for each attacker."""
        groups = [group for whole in self.groups for group in whole.by_attacker()]
        if size is not Size.REDUCED:
            return groups
        parts = [(group, group.with_figures(full_only=False)) for group in groups]
        return [group.model_copy(update={"figures": figures}) for group, figures in parts if figures]

    def not_compared(self, sizes: Collection[Size]) -> list[Absent]:
        """Return the parts of the paper that none of the sizes compares, with reasons."""
        only_reduced = not set(sizes) - {Size.REDUCED}
        parts = [(group.title, group.with_figures(full_only=True)) for group in self.groups if only_reduced]
        return self.absent + [
            Absent(what=f"{title}, {len(figures)} figures", why="in the paper's size only")
            for title, figures in parts
            if figures
        ]

    def document(self, size: Size, changes: Sequence[str] = ()) -> dict[str, Any]:
        """Return the scenario of a size as a mapping, with changes as in `--set`.

        Raises `ScenarioError` for a change that cannot be made.
        """
        document = copy.deepcopy(self.scenario or {})
        changed = {Size.REDUCED: self.reduced, Size.PAPER: {}, Size.GPU: self.gpu}[size]
        for path, value in changed.items():
            try:
                set_field(document, path, value)
            except KeyError as error:
                reason = f"there is no '{path}' in the scenario: {error.args[0]}"
                raise ScenarioError(f"{self.title}: `{size}`: {reason}") from None
        return with_changes(document, changes)


def names(folder: str) -> list[str]:
    """Return the sorted names of the reproductions in a folder. Raises `UserError` if there are none."""
    found = sorted(path.stem for path in Path(folder).glob("*.yaml"))
    if not found:
        raise UserError(f"no reproductions in '{folder}': give their folder with --folder")
    return found


def find(name: str, folder: str) -> Path:
    """Return the file of a reproduction, given by name or path. Raises `UserError` if there is none."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else Path(folder, f"{name}.yaml")
    if not path.is_file():
        known = names(folder)
        raise UserError(f"unknown reproduction '{name}': {nearest(name, known)}; `rayfed reproduce list` shows all")
    return path


def load(path: Path) -> Reproduction:
    """Load a reproduction from a YAML file. Raises `UserError` that lists all errors."""
    try:
        document, _ = read_yaml(path.read_text(encoding="utf-8"))
        return Reproduction.model_validate(document)
    except pydantic.ValidationError as error:
        problems = [f"  {'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()]
        raise UserError("\n".join([f"{path}: not a reproduction:", *problems])) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
