"""Schema of a reproduction: a scenario with a paper's results as data.

A reproduction has no code: the ordinary engine plays its scenario, and `rayfed.reproductions.judging` compares.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, model_validator

from rayfed.documents import read_yaml
from rayfed.errors import ScenarioError, UserError, nearest
from rayfed.scenario import with_changes
from rayfed.scenario.components import Section
from rayfed.scenario.paths import put
from rayfed.store.schemas import OUTCOME_COLUMNS, TABLES

Scale = Literal["reduced", "full"]
Convention = Literal["root_psnr", "root_mse"]


class Figure(Section):
    """One number of the paper, with a selection of the rows to compare."""

    label: str
    """Name of the row in the paper."""
    paper: float
    """Number that the paper prints."""
    where: dict[str, str | int | float | bool | dict[str, str | int | float | bool | None] | None] = {}
    """Columns of the table, or swept fields, and the values that the rows have there; of a swept section (`data`) some
    of what it sets."""
    full_only: bool = False
    """Whether the reduced version leaves it out."""


class Group(Section):
    """Figures of one measure with a meaningful order."""

    title: str
    """What is measured, as a heading: `PSNR (dB)`."""
    measure: str
    """A column of the table."""
    table: str = "outcomes"
    """Name of the table: `outcomes`, or a table of the trials' runs."""
    take: Literal["mean", "first", "last", "min", "max"] = "mean"
    """Reduction of several rows of one seed; `first` and `last` go by the column `round`."""
    at_least: float | None = None
    """Count the share of rows whose value is no less, 0..1, not the value; rows without a value do not count."""
    at_most: float | None = None
    """Count the share of rows whose value is no more, 0..1, not the value."""
    scale: float = 1.0
    """Factor of our values: 100 where the paper has percent."""
    tolerance: Annotated[float, Field(gt=0)]
    """Largest difference at which ours agrees, and from which on the order of two of the paper's figures counts. In the
    unit that is compared, the true measure or the ratio."""
    convention: Convention | None = None
    """`root_psnr`: the paper puts the root of the mean squared error into the PSNR's formula, `root_mse`: it calls that
    root the MSE; both of pixels of 0 to 255. What it printed is turned into the true measure before it is compared."""
    ranked: bool = False
    """Whether the paper has an order and no numbers: `paper` is a figure's place in it, the lowest 1, and the order is
    all that is compared."""
    relative_to: str | None = None
    """Label of the figure that all of them are divided by, the paper's and ours."""
    figures: Annotated[list[Figure], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Group:
        tables = {name: tuple(schema.names) for name, schema in TABLES.items()} | {"outcomes": OUTCOME_COLUMNS}
        columns = tables.get(self.table, ())
        if not columns:
            raise ValueError(f"there is no table '{self.table}': {nearest(self.table, ['outcomes', *TABLES])}")
        if self.measure not in columns:
            raise ValueError(f"table '{self.table}' has no column '{self.measure}': {nearest(self.measure, columns)}")
        labels = [figure.label for figure in self.figures]
        if len(set(labels)) < len(labels):
            raise ValueError("two figures have the same label")
        if self.relative_to is not None and self.relative_to not in labels:
            raise ValueError(f"`relative_to` names no figure: {nearest(self.relative_to, labels)}")
        if any(figure.label == self.relative_to and not figure.paper for figure in self.figures):
            raise ValueError(f"`relative_to` '{self.relative_to}' is 0 in the paper: nothing can be divided by it")
        if self.at_least is not None and self.at_most is not None:
            raise ValueError("give `at_least` or `at_most`, not both")
        if self.ranked and (self.relative_to or self.convention):
            raise ValueError("places in an order have no `relative_to` and no `convention`")
        return self

    def with_figures(self, full_only: bool) -> list[Figure]:
        """Return the group with the figures of the full size only, or with all others."""
        return [figure for figure in self.figures if figure.full_only == full_only]


class Absent(Section):
    """A part of the paper's table that is not reproduced."""

    what: str
    """Name of the part."""
    why: str
    """Reason why it is not played."""


class Paper(Section):
    """Source of the figures: publication and place in it."""

    name: str
    """Authors and year, or title."""
    place: str
    """Place in the paper: `table 3.4`."""


class Reproduction(Section):
    """A reproduction of a paper's table or figure."""

    title: str
    """Title in one line."""
    paper: Paper
    """Source of the figures."""
    claim: str
    """The paper's claim, in our words."""
    remarks: str = ""
    """Remarks: where ours differs, and why."""
    prepare: dict[str, str] = {}
    """File -> the `rayfed` command, without the word `rayfed`, that makes it where it is missing."""
    scenario: dict[str, Any] | None = None
    """A scenario with a `sweep`, in the paper's size; null where nothing of it can be played."""
    reduced: dict[str, Any] = {}
    """Path -> value: the changes that make it fit two cores and a quarter of an hour."""
    groups: list[Group] = []
    """Groups of figures that are compared."""
    absent: list[Absent] = []
    """Parts that are not compared, and why."""

    @model_validator(mode="after")
    def _whole(self) -> Reproduction:
        if self.scenario is None and (self.groups or not self.absent):
            raise ValueError("without a scenario nothing can be compared: say under `absent` why")
        if self.scenario is not None and not self.groups:
            raise ValueError("there are no `groups`: nothing to compare")
        if self.scenario is not None and not self.scenario.get("sweep"):
            raise ValueError("add a `sweep`, at least `sweep: {repeats: 3}`: intervals are over seeds")
        for group in self.groups:
            if group.relative_to in [figure.label for figure in group.with_figures(full_only=True)]:
                raise ValueError(f"`relative_to` '{group.relative_to}' is not in the reduced version")
        return self

    def compared(self, scale: Scale) -> list[Group]:
        """Return the groups with the figures of a scale, without empty groups."""
        if scale == "full":
            return self.groups
        parts = [(group, group.with_figures(full_only=False)) for group in self.groups]
        return [group.model_copy(update={"figures": figures}) for group, figures in parts if figures]

    def not_compared(self, scale: Scale) -> list[Absent]:
        """Return the parts that a scale omits, with reasons."""
        parts = [(group.title, group.with_figures(full_only=True)) for group in self.groups if scale == "reduced"]
        return self.absent + [
            Absent(what=f"{title}: {', '.join(figure.label for figure in figures)}", why="in the full size alone")
            for title, figures in parts
            if figures
        ]

    def document(self, scale: Scale, changes: Sequence[str] = ()) -> dict[str, Any]:
        """Return a scale's scenario as a mapping, with changes as in `--set`.

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
    """Return the names of a folder's reproductions in order; raises `UserError` if there are none."""
    found = sorted(path.stem for path in Path(folder).glob("*.yaml"))
    if not found:
        raise UserError(f"no reproductions in '{folder}': give their folder by --folder")
    return found


def find(name: str, folder: str) -> Path:
    """Return the file of a reproduction by name or path; raises `UserError` if there is none."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else Path(folder, f"{name}.yaml")
    if not path.is_file():
        known = names(folder)
        raise UserError(f"no reproduction is called '{name}': {nearest(name, known)}; `rayfed reproduce list` has all")
    return path


def load(path: Path) -> Reproduction:
    """Load the reproduction in a file; raises `UserError` naming all that is wrong with it."""
    try:
        document, _ = read_yaml(path.read_text(encoding="utf-8"))
        return Reproduction.model_validate(document)
    except pydantic.ValidationError as error:
        problems = [f"  {'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()]
        raise UserError("\n".join([f"{path}: not a reproduction:", *problems])) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
