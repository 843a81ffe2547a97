"""Content of the interactive plot and its table: every setting under every attack, with its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfed.analysis.figures import short_names
from rayfed.analysis.formats import in_words
from rayfed.analysis.promises import mixed
from rayfed.analysis.settings import Estimate, Setting, by_values, estimate
from rayfed.analysis.summary import Row, setting
from rayfed.analysis.verdicts import WEIGHT
from rayfed.metrics.measures import MEASURES
from rayfed.report.svg import SERIES

PREFERRED = ("psnr", "test_accuracy")
"""Measures to show first where nothing else is asked for and both were measured."""
UNFOLDED = 5
"""Most measures of a setting that are shown without being asked for."""


@dataclass(frozen=True)
class Entry:
    """Row of the table, of one setting under one attack; of a setting that finished also a mark of the plot."""

    id: int
    group: int
    """Number that one setting has under all attacks."""
    setting: Setting
    status: str
    """State of the trial: 'finished'; 'stopped' or 'failed' for one that is not in the plot."""
    error: str | None

    @property
    def values(self) -> dict[str, Estimate]:
        """Estimates by measure."""
        return self.setting.measures

    @property
    def title(self) -> str:
        """The setting in words."""
        return self.setting.title

    @property
    def tag(self) -> str:
        """The arm's verdict on this row; empty if the arm leaks by another attack."""
        rows = self.setting.rows
        told = [row.get("verdict") for row in rows]
        state = next((state for state in WEIGHT if state in told), "")
        answers = {row.get("answer") for row in rows}
        return "" if state == "leaks" and self.setting.attack and not answers & {"leaks", None} else state

    @property
    def note(self) -> str:
        """Further remarks on the entry."""
        first = self.setting.rows[0]
        parts = [f"Defences: {first.get('defences') or 'none'}."]
        if self.setting.attack and first.get("observes"):
            parts.append(f"{self.setting.attack} was given {setting([first])}.")
        if first.get("trial") is not None:
            runs = ", ".join(row["run"] for row in self.setting.rows if row.get("run"))
            parts.append(f"Trials: {runs or first['trial']}.")
        parts += [f"Not on the front: {why}." for why in (self.setting.useless, self.setting.unproven) if why]
        count = len(self.setting.rows)
        if self.setting.collapsed:
            parts.append(f"Its accuracy is that of guessing in {self.setting.collapsed} of {count} repeats.")
        if self.setting.inconclusive:
            parts.append(f"Its verdict is inconclusive in {self.setting.inconclusive} of {count} repeats.")
        if self.error:
            parts.append(f"{self.status.capitalize()}: {self.error}")
        return " ".join(parts)


@dataclass(frozen=True)
class Explorer:
    """Rows and columns of the table, and the plot's first axes."""

    entries: list[Entry]
    fields: list[str]
    """Swept fields, which are columns of their own."""
    columns: list[str]
    """Measures that were measured: those of the first axes, then the others in the order of `MEASURES`."""
    x: str | None
    """A measure of leakage, where there is a setting that was measured in both; else None, and there is no plot."""
    y: str | None
    """Measure of utility or cost on the other axis."""

    def ends(self, name: str, value: Estimate) -> str:
        """Return what a cell says under its figure."""
        return ends(name, value)

    @property
    def folded(self) -> list[str]:
        """Measures that the page shows when it is asked to: a table of all is wider than a screen."""
        return self.columns[UNFOLDED:]

    @property
    def arms(self) -> list[str]:
        """Arms in the order of their first entry."""
        return list(dict.fromkeys(entry.setting.arm for entry in self.entries))

    @property
    def attacks(self) -> list[str]:
        """Attacks in the order of their first entry."""
        return list(dict.fromkeys(entry.setting.attack for entry in self.entries if entry.setting.attack))

    @property
    def plotted(self) -> list[str]:
        """Attacks of the plot's first points, in the order of their symbols."""
        met = {e.setting.attack for e in self.entries if self.x in e.values and self.y in e.values}
        return [attack for attack in self.attacks if attack in met]

    @property
    def leakages(self) -> list[str]:
        """Measures for the one axis: epsilon only where all are of one kind of guarantee."""
        return [name for name in _comparable(self.columns, self.entries) if MEASURES[name].kind == "leakage"]

    @property
    def others(self) -> list[str]:
        """Measures for the other axis."""
        return [name for name in self.columns if MEASURES[name].kind != "leakage"]

    def heading(self, field: str) -> str:
        """Return the heading of a swept field's column."""
        return short_names(self.fields)[self.fields.index(field)]

    def data(self, arms: Sequence[str]) -> dict[str, Any]:
        """Return the data of the page's script; `arms` are all in the order of their colours."""
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
            "note": entry.note,
            "finished": entry.status == "finished",
            "compared": not entry.setting.useless and not entry.setting.unproven,
            "values": {
                name: [e.mean, *(e.interval or (None, None)), interval(name, e)] for name, e in entry.values.items()
            },
        }


def answered(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings under the attacks that measured leakage; under none, once, where no attack did."""
    kept = []
    for group in by_values(settings):
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
    """Return an explorer of settings, then of trials that failed or were stopped; `preferred` measures come first."""
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
    return [name for name in columns if not mixed(shown, name)]


def interval(name: str, value: Estimate) -> str:
    """Return an estimate in words: `21.3 dB (18.0 dB to 24.6 dB, n = 3)`, or with both of two values."""
    said, between = in_words(name, value.mean), ends(name, value)
    return f"{said} ({between})" if between else said


def ends(name: str, value: Estimate) -> str:
    """Return what an estimate lies between, in words, and of how many values; empty for one value."""
    if value.low is None or value.high is None or (value.n == 1 and value.over == "repeats"):
        return ""
    if value.pair:
        return f"{in_words(name, value.pair[0])}, {in_words(name, value.pair[1])}"
    of = f", n = {value.n}" if value.over == "repeats" else f" over its {value.over}"
    return f"{in_words(name, value.low)} to {in_words(name, value.high)}{of}"


def _alone(row: Row, fields: Sequence[str]) -> Setting:
    """Return one trial that did not finish, as a setting of its own."""
    measures = {name: e for name in MEASURES if (e := estimate([row.get(name)])) is not None}
    values = {field: row[field] for field in fields if row.get(field) is not None}
    return Setting("", row["arm"], row["attack"], values, measures, [row])


def _axes(
    entries: Sequence[Entry], columns: Sequence[str], preferred: Sequence[str]
) -> tuple[str, str] | tuple[None, None]:
    """Return the first pair of a leakage and another measure that some setting has both of, preferred ones first.

    The time that an attack takes is no price of a defence, and makes no trade-off.
    """
    order = sorted(columns, key=lambda name: preferred.index(name) if name in preferred else len(preferred))
    for x in (name for name in order if MEASURES[name].kind == "leakage"):
        for y in (name for name in order if MEASURES[name].kind != "leakage" and name != "attack_seconds"):
            if any(x in entry.values and y in entry.values for entry in entries):
                return x, y
    return None, None
