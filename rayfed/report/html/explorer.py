"""Data of a report's interactive plot and table: the measures of each setting (arm and swept values) per attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfed.evidence.guarantee_compat import mixed_guarantees
from rayfed.evidence.rows import Row
from rayfed.evidence.settings import MeanEstimate, Setting, estimate_mean, group_by_values
from rayfed.metrics.measures import MEASURES
from rayfed.report.html.svg import SERIES
from rayfed.report.text.formats import format_measure
from rayfed.report.text.settings import setting_note
from rayfed.report.text.tables import short_names
from rayfed.store.finding import State

PREFERRED = ("psnr", "test_accuracy")
"""Measures of the first axes by default."""
UNFOLDED = 5
"""Maximum number of columns of measures that are shown by default."""


@dataclass(frozen=True)
class Entry:
    """Row of the report's table for one setting and attack; if the trial finished, also a point of the plot."""

    id: int
    group: int
    """Number of the setting, the same for all attacks."""
    setting: Setting
    status: str
    """State of the trial: 'finished', or 'stopped' or 'failed' for rows that are not in the plot."""
    error: str | None

    @property
    def values(self) -> dict[str, MeanEstimate]:
        """Return the estimate of each measure by name."""
        return self.setting.measures

    @property
    def title(self) -> str:
        """Return the title of the setting."""
        return self.setting.title

    @property
    def tag(self) -> str:
        """Return the verdict on the arm; empty if the arm leaks only to another attack."""
        verdicts = {row.get("verdict") for row in self.setting.rows}
        state = next((state for state in State if state in verdicts), "")
        results = {row.get("result") for row in self.setting.rows}
        only_others = state == State.LEAKS and self.setting.attack and not results & {State.LEAKS, None}
        return "" if only_others else state


@dataclass(frozen=True)
class Explorer:
    """Rows and columns of the report's table of settings, and the initial axes of the interactive plot."""

    entries: list[Entry]
    fields: list[str]
    """Swept fields, one column each."""
    columns: list[str]
    """Available measures: those of the first axes, then the others in the order of `MEASURES`."""
    x: str | None
    """Measure of leakage on the x-axis; None, without a plot, if no setting has both measures."""
    y: str | None
    """Measure of utility or cost on the y-axis."""

    @property
    def folded(self) -> list[str]:
        """Return the measures whose columns are hidden by default, because all columns exceed the screen width."""
        return self.columns[UNFOLDED:]

    @property
    def arms(self) -> list[str]:
        """Return the arms in the order of their first rows in the table."""
        return list(dict.fromkeys(entry.setting.arm for entry in self.entries))

    @property
    def attacks(self) -> list[str]:
        """Return the attacks in the order of their first rows in the table."""
        return list(dict.fromkeys(entry.setting.attack for entry in self.entries if entry.setting.attack))

    @property
    def plotted(self) -> list[str]:
        """Return the attacks with points on the plot's initial axes, in the order of their marker symbols."""
        shown = {e.setting.attack for e in self.entries if self.x in e.values and self.y in e.values}
        return [attack for attack in self.attacks if attack in shown]

    @property
    def leakages(self) -> list[str]:
        """Return the available measures of leakage; epsilon only if all guarantees are of one kind."""
        return [name for name in _comparable(self.columns, self.entries) if MEASURES[name].kind == "leakage"]

    @property
    def others(self) -> list[str]:
        """Return the available measures of utility or cost."""
        return [name for name in self.columns if MEASURES[name].kind != "leakage"]

    def heading(self, field: str) -> str:
        """Return the heading of the table column for a swept field."""
        return short_names(self.fields)[self.fields.index(field)]

    def data(self, arms: Sequence[str]) -> dict[str, Any]:
        """Return the data for the page's script; `arms` are all arms in the order of their colours."""
        return {
            "measures": {
                name: {
                    "title": MEASURES[name].title,
                    "unit": MEASURES[name].unit,
                    "higher": MEASURES[name].higher_is_better,
                    "share": MEASURES[name].share,
                }
                for name in self.columns
            },
            "attacks": [*self.plotted, *(attack for attack in self.attacks if attack not in self.plotted)],
            "arms": list(arms),
            "series": SERIES,
            "x": self.x,
            "y": self.y,
            "entries": [self._entry(entry) for entry in self.entries],
        }

    def _entry(self, entry: Entry) -> dict[str, Any]:
        return {
            "id": entry.id,
            "group": entry.group,
            "title": entry.title,
            "arm": entry.setting.arm,
            "attack": entry.setting.attack,
            "note": setting_note(entry.setting, entry.status, entry.error),
            "finished": entry.status == "finished",
            "compared": not entry.setting.weaknesses,
            "values": {
                name: [e.mean, *(e.interval or (None, None)), interval(name, e)] for name, e in entry.values.items()
            },
        }


def select_answered(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings whose attack measured leakage; keep a setting without such an attack once."""
    kept = []
    for group in group_by_values(settings):
        found = [one for one in group if any(_of_attacks(name) for name in one.measures)]
        others = {name: value for name, value in group[0].measures.items() if name != "attack_seconds"}
        kept += found or [replace(group[0], attack=None, measures=others)]
    return kept


def _of_attacks(measure: str) -> bool:
    return MEASURES[measure].kind == "leakage" and not MEASURES[measure].proved


def explore(
    settings: Sequence[Setting],
    unfinished: Sequence[Row] = (),
    fields: Sequence[str] = (),
    preferred: Sequence[str] = PREFERRED,
) -> Explorer:
    """Return the table of settings and `unfinished` trials; the `preferred` measures become the initial axes."""
    groups: dict[tuple[str, str], int] = {}
    rows = [(s, "finished", None) for s in settings]
    rows += [(_alone(row, fields), row["status"], row["error"]) for row in unfinished]
    entries = [
        Entry(place, groups.setdefault((one.arm, repr(one.fields)), len(groups)), one, status, error)
        for place, (one, status, error) in enumerate(rows)
    ]
    columns = [name for name in MEASURES if any(name in entry.values for entry in entries)]
    x, y = _axes([e for e in entries if e.status == "finished"], _comparable(columns, entries), preferred)
    first = [name for name in (x, y) if name]
    return Explorer(entries, list(fields), first + [name for name in columns if name not in first], x, y)


def _comparable(columns: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    shown = [entry.setting for entry in entries]
    return [name for name in columns if not mixed_guarantees(shown, name)]


def interval(name: str, value: MeanEstimate) -> str:
    """Format an estimate with the interval: `21.3 dB (18.0 dB to 24.6 dB, n = 3)`, or with both values of a pair."""
    mean, between = format_measure(name, value.mean), format_interval(name, value)
    return f"{mean} ({between})" if between else mean


def format_interval(name: str, value: MeanEstimate) -> str:
    """Format the interval of an estimate and the number of values; empty for a single value."""
    if value.low is None or value.high is None or (value.n == 1 and value.over == "repeats"):
        return ""
    if value.pair:
        return f"{format_measure(name, value.pair[0])}, {format_measure(name, value.pair[1])}"
    number = f", n = {value.n}" if value.over == "repeats" else f" over its {value.over}"
    return f"{format_measure(name, value.low)} to {format_measure(name, value.high)}{number}"


def _alone(row: Row, fields: Sequence[str]) -> Setting:
    """Return a trial that did not finish as a setting."""
    measures = {name: e for name in MEASURES if (e := estimate_mean([row.get(name)])) is not None}
    values = {field: row[field] for field in fields if row.get(field) is not None}
    return Setting("", row["arm"], row["attack"], values, measures, [row])


def _axes(
    entries: Sequence[Entry], columns: Sequence[str], preferred: Sequence[str]
) -> tuple[str, str] | tuple[None, None]:
    """Return the first pair of a leakage measure and another measure that some setting has, preferred ones first.

    Attack time is not a cost of a defence, so it is not used.
    """
    order = sorted(columns, key=lambda name: preferred.index(name) if name in preferred else len(preferred))
    for x in (name for name in order if MEASURES[name].kind == "leakage"):
        for y in (name for name in order if MEASURES[name].kind != "leakage" and name != "attack_seconds"):
            if any(x in entry.values and y in entry.values for entry in entries):
                return x, y
    return None, None
