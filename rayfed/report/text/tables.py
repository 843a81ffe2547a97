"""Tables of settings as text, with a note on the intervals and marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rayfed.errors import UserError, nearest
from rayfed.evidence.figures import SHOWN, best_rows, seeds_differ
from rayfed.evidence.settings import MeanEstimate, Setting, describes_attacks
from rayfed.metrics.measures import MEASURES
from rayfed.report.text.figures import (
    FAILED_LEGEND,
    OUTDONE,
    PARTLY,
    UNPROVEN,
    USELESS,
    heading,
    marked_cell,
    useless_mark,
)
from rayfed.report.text.formats import NONE
from rayfed.report.text.guarantees import mixed_guarantees_text
from rayfed.report.text.settings import UNFINISHED

OF_TWO = "For two {}, both values follow the mean in brackets, as they are too few for an interval."
SINGLE = "Every setting was run once, so the spread over seeds is unknown."
CUT = "Intervals are clipped to possible values: shares to 0 and 1, times and sizes to 0."
TIME = "Training time is that of all rounds; rounds with a warm-up of processes count as the mean of the others."
UNLIKE = "Settings that were run with different seeds are not compared, and no best value is marked among them."


@dataclass(frozen=True)
class Grid:
    """Table of text with one row per setting (arm and swept values)."""

    headings: list[str]
    words: int
    """Number of leading columns with text; the others have numbers."""
    rows: list[list[str]]
    note: str
    """Explanation of the intervals and marks."""
    best: frozenset[tuple[int, int]] = frozenset()
    """Positions (row, column) of the best values of each column, including ties."""


def grid(settings: Sequence[Setting], columns: Mapping[str, str | None] | None = None) -> Grid:
    """Return a table of text with one row per setting.

    `columns` maps names to headings, in order; None for the default heading. Names are `run`, `arm`, `attack`, swept
    fields and measures. By default all columns with a known value are included. If an attack does not apply to an arm
    and another attack does, it has no row and is listed in the note. Raises `UserError` for an unknown column.
    """
    settings, silent = _split_silent(settings)
    words, measures = _text_columns(settings), _known_measures(settings)
    if columns is None:
        columns = dict.fromkeys([*words, *(name for name in SHOWN if name in measures)])
    shown = [name for name in columns if name in measures]
    headings, cells = [], []
    best: set[tuple[int, int]] = set()
    for place, (name, given) in enumerate(columns.items()):
        if name in words:
            headings.append(given or name)
            cells.append(list(map(words[name], settings)))
        elif name in shown:
            headings.append(given or heading(name))
            cells.append([marked_cell(name, one) for one in settings])
            best.update((row, place) for row in best_rows(name, settings))
        else:
            raise UserError(f"no column is called '{name}': {nearest(name, [*words, *measures])}")
    leading = next((place for place, name in enumerate(columns) if name in shown), len(columns))
    rows = [[column[row] for column in cells] for row in range(len(settings))]
    return Grid(headings, leading, rows, f"{_note(settings, shown)}{_silent_note(silent)}".strip(), frozenset(best))


def _known_measures(settings: Sequence[Setting]) -> list[str]:
    return [name for name in MEASURES if any(name in one.measures for one in settings)]


def _silent_note(silent: Sequence[Setting]) -> str:
    attacks = "; ".join(f"{one.attack} on {one.title}" for one in silent)
    return f" Omitted, because the attack does not apply: {attacks}." if silent else ""


def _split_silent(settings: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Return the settings with a row, and those whose attack does not apply although another attack does."""
    attacked = {one.identity for one in settings if one.applies}
    silent = [one for one in settings if not one.applies and one.identity in attacked]
    return [one for one in settings if one not in silent], silent


def _text_columns(settings: Sequence[Setting]) -> dict[str, Callable[[Setting], str]]:
    """Return the columns without a measure, with the functions that return their cells."""
    columns: dict[str, Callable[[Setting], str]] = {}
    if any(one.source for one in settings):
        columns["run"] = lambda one: one.source
    columns["arm"] = lambda one: one.arm + useless_mark(one)
    fields = list(dict.fromkeys(path for one in settings for path in one.fields))
    for name, path in zip(short_names(fields), fields, strict=True):
        columns[name] = _field_column(path)
    columns["attack"] = lambda one: one.attack or NONE
    return columns


def _field_column(path: str) -> Callable[[Setting], str]:
    def text(one: Setting) -> str:
        value = one.fields.get(path)
        if value is None:
            return NONE
        return f"{value:g}" if isinstance(value, float) else str(value)

    return text


def short_names(fields: Sequence[str]) -> list[str]:
    """Shorten paths of fields to their last key, unless two shortened paths would be equal."""
    last = [path.rpartition(".")[2] for path in fields]
    return [name if last.count(name) == 1 else path for name, path in zip(last, fields, strict=True)]


def _note(settings: Sequence[Setting], shown: Sequence[str]) -> str:
    """Return the note under a table: the meaning of its intervals and marks, and caveats."""
    notes = [*_notes_on_intervals(settings, shown), *notes_on_marks(settings, shown)]
    if any(one.unfinished for one in settings):
        notes.append(f"{UNFINISHED}.")
    if any(seeds_differ(name, settings) for name in shown):
        notes.append(UNLIKE)
    for name in shown:
        if mixed := mixed_guarantees_text(settings, name):
            notes.append(f"Note that {mixed}.")
    return " ".join(notes)


def _notes_on_intervals(settings: Sequence[Setting], shown: Sequence[str]) -> list[str]:
    """Return the meaning of the intervals, and of values without an interval."""
    known = _estimates(settings, shown)
    measured = _estimates(settings, [name for name in shown if not MEASURES[name].proved])
    notes = _notes_on_unit(known, "repeats", "repeats", "(Student's t)")
    notes += _notes_on_unit(
        known, "victims", "attacked clients of one training run", "(Student's t, or exact for hits)"
    )
    if any(value.over == "rounds" for value in known):
        notes.append("The interval of the training time is over rounds.")
    if any(value.n > 1 and value.spread is None for value in measured):
        notes.append("A mean without an interval is that of a single value or of equal values.")
    if any(value.cut and value.interval for value in known):
        notes.append(CUT)
    if "train_seconds" in shown and _estimates(settings, ["train_seconds"]):
        notes.append(TIME)
    if {value.n for value in known if value.over == "repeats"} == {1}:
        notes.append(SINGLE)
    return notes


def _estimates(settings: Sequence[Setting], measures: Sequence[str]) -> list[MeanEstimate]:
    return [one.measures[name] for one in settings for name in measures if name in one.measures]


def _notes_on_unit(known: Sequence[MeanEstimate], over: str, unit: str, test: str) -> list[str]:
    """Return the numbers of values of the intervals over repeats or over victims."""
    notes = []
    values = [value for value in known if value.over == over]
    counts = sorted({value.n for value in values if not value.pair})
    if counts and counts[-1] > 1:
        span = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
        notes.append(f"Mean and half the 95 % interval {test} over {span} {unit}.")
    if any(value.pair and value.spread for value in values):
        notes.append(OF_TWO.format(unit))
    return notes


def notes_on_marks(settings: Sequence[Setting], shown: Sequence[str]) -> list[str]:
    """Return explanations of the marks on the shown settings and on the values of the shown measures."""
    return [
        *_notes_on_useless(settings),
        *_notes_on_verdicts(settings, shown),
        *_notes_on_outdone(settings, shown),
        *_notes_on_failed(settings, shown),
    ]


def _notes_on_useless(settings: Sequence[Setting]) -> list[str]:
    notes = []
    if any(one.useless for one in settings):
        notes.append(f"{USELESS}: its accuracy does not beat the majority class, so it is not compared.")
    some = dict.fromkeys(f"{one.title} in {one.collapsed} of {len(one.rows)}" for one in settings if one.collapsed)
    if some:
        notes.append(f"{USELESS}: in some repeats its accuracy does not beat the majority class: {'; '.join(some)}.")
    return notes


def _notes_on_verdicts(settings: Sequence[Setting], shown: Sequence[str]) -> list[str]:
    notes = []
    some: dict[str, None] = {}
    unproven = False
    for one in settings:
        known = [name for name in shown if name in one.measures]
        unproven |= any(one.doubted(name) and name not in one.outdone for name in known)
        if any(one.partly_doubted(name) for name in known):
            some[f"{one.title} in {one.inconclusive} of {len(one.rows)}"] = None
    if unproven:
        notes.append(
            f"{UNPROVEN}: no evidence of protection, because the arm's verdict is inconclusive or not measured."
        )
    if some:
        notes.append(f"{PARTLY}: the verdict is inconclusive in some repeats: {'; '.join(some)}.")
    return notes


def _notes_on_outdone(settings: Sequence[Setting], shown: Sequence[str]) -> list[str]:
    less: dict[str, None] = {}
    for one in settings:
        for name in shown:
            if name in one.measures and name in one.outdone:
                less[f"{one.attack} than {one.outdone[name]} on {one.title}"] = None
    if not less:
        return []
    failed = "; ".join(less)
    return [f"{OUTDONE}: an attacker with more knowledge reconstructed less, so that attack failed: {failed}."]


def _notes_on_failed(settings: Sequence[Setting], shown: Sequence[str]) -> list[str]:
    if not any(describes_attacks(name) for name in shown):
        return []
    broken: dict[str, None] = {}
    for one in settings:
        if one.unanswered[0]:
            failed, attacked = one.unanswered
            broken[f"{one.title} under {one.attack} on {failed} of {attacked}"] = None
    return [f"{FAILED_LEGEND}: {'; '.join(broken)}."] if broken else []
