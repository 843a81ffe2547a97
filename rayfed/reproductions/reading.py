"""Schema of a reproduction: a scenario and the paper's results, as data.

The ordinary engine runs the scenario, and `rayfed.reproductions.judging` compares the results.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, model_validator

from rayfed.core.documents import read_yaml
from rayfed.errors import ScenarioError, UserError, nearest
from rayfed.scenario import with_changes
from rayfed.scenario.components import Section
from rayfed.scenario.paths import put
from rayfed.store.schemas import OUTCOME_COLUMNS, TABLES

Scale = Literal["reduced", "full"]


class Figure(Section):
    """Value that the paper prints, with a selection of the rows to compare."""

    label: str
    """Name of the row in the paper."""
    paper: float
    """Number that the paper prints."""
    where: dict[str, str | int | float | bool | dict[str, str | int | float | bool | None] | None] = {}
    """Column or swept field -> value of the compared rows. For a swept section such as `data`, some of its fields."""
    default_attack: dict[str, str | int | float | bool | dict[str, str | int | float | bool | None] | None] = {}
    """Columns of `where` with other values. They select the rows of the attack with its default options, if `where`
    selects the attack as published. Its value is shown with ours and not compared."""
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
    ranked: bool = False
    """Whether the paper gives only an order. Then `paper` is the rank of the figure, 1 for the lowest."""
    relative_to: str | None = None
    """Label of the figure by which all figures are divided, in the paper and here."""
    figures: Annotated[list[Figure], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Group:
        tables = {name: tuple(schema.names) for name, schema in TABLES.items()} | {"outcomes": OUTCOME_COLUMNS}
        columns = tables.get(self.table, ())
        if not columns:
            raise ValueError(f"there is no table '{self.table}': {nearest(self.table, ['outcomes', *TABLES])}")
        for measure in (self.measure, *([self.true_measure] if self.true_measure else [])):
            if measure not in columns:
                raise ValueError(f"table '{self.table}' has no column '{measure}': {nearest(measure, columns)}")
        labels = [figure.label for figure in self.figures]
        if len(set(labels)) < len(labels):
            raise ValueError("two figures have the same label: rename one")
        if self.relative_to is not None and self.relative_to not in labels:
            raise ValueError(f"`relative_to` names no figure: {nearest(self.relative_to, labels)}")
        if any(figure.label == self.relative_to and not figure.paper for figure in self.figures):
            raise ValueError(f"`relative_to` '{self.relative_to}' is 0 in the paper: choose another figure")
        if self.at_least is not None and self.at_most is not None:
            raise ValueError("give `at_least` or `at_most`, not both")
        if self.ranked and self.relative_to:
            raise ValueError("`ranked` excludes `relative_to`: remove one of them")
        if self.true_measure and (self.relative_to or self.at_least is not None or self.at_most is not None):
            raise ValueError("`true_measure` excludes `relative_to`, `at_least` and `at_most`: remove them")
        return self

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
    """Path -> value of the changes for the reduced size: about 15 minutes on two cores."""
    groups: list[Group] = []
    """Compared groups of figures."""
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
        for group in self.groups:
            if group.relative_to in [figure.label for figure in group.with_figures(full_only=True)]:
                raise ValueError(f"`relative_to` '{group.relative_to}' is not in the reduced version")
        return self

    def compared(self, scale: Scale) -> list[Group]:
        """Return the non-empty groups of values that are compared at a scale (full or reduced)."""
        if scale == "full":
            return self.groups
        parts = [(group, group.with_figures(full_only=False)) for group in self.groups]
        return [group.model_copy(update={"figures": figures}) for group, figures in parts if figures]

    def not_compared(self, scale: Scale) -> list[Absent]:
        """Return the parts of the paper that a scale omits, with reasons."""
        parts = [(group.title, group.with_figures(full_only=True)) for group in self.groups if scale == "reduced"]
        return self.absent + [
            Absent(what=f"{title}: {', '.join(figure.label for figure in figures)}", why="in the full size only")
            for title, figures in parts
            if figures
        ]

    def document(self, scale: Scale, changes: Sequence[str] = ()) -> dict[str, Any]:
        """Return the scenario of a scale (full or reduced) as a mapping, with changes as in `--set`.

        Raises `ScenarioError` for a change that cannot be made.
        """
        document = copy.deepcopy(self.scenario or {})
        for path, value in self.reduced.items() if scale == "reduced" else ():
            try:
                put(document, path, value)
            except KeyError as error:
                said = f"there is no '{path}' in the scenario: {error.args[0]}"
                raise ScenarioError(f"{self.title}: `reduced`: {said}") from None
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
