"""Formatting of measured figures for tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import floor, isinf, log10

from rayfed.analysis.formats import NONE, duration, size
from rayfed.analysis.promises import mixed
from rayfed.analysis.settings import UNFINISHED, Estimate, Setting, of_attacks, of_rebuilt
from rayfed.analysis.unanswered import BROKEN, MEANING, of_so_many
from rayfed.errors import UserError, nearest
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.measures import JUDGED, MEASURES, worst_of
from rayfed.privacy.printing import at_most

SHOWN = (
    "test_accuracy",
    "pmm",
    *(
        name
        for metric in JUDGED
        if "settings" in metric.tables
        for name in (metric.name, worst_of(metric.name))[: 1 + metric.worst_in_tables]
    ),
    "inferred",
    "epsilon",
    "rero",
    "train_seconds",
    "simulated_seconds",
    "bytes_up",
)
"""Measures that tables of settings show, where they are known."""
OF_TWO = "Of two {} both values stand in brackets behind the mean: they are too few for an interval."
SINGLE = "Every setting was played once: nothing is known of the spread over seeds."
CUT = "Intervals are cut at what is possible: shares at 0 and 1, times and sizes at 0."
TIME = "Training time is of all rounds; the first, in which processes warm up, counts as the mean of the others."
UNLIKE = "Settings that were not played on the same seeds are not compared: none of theirs is the best value."
USELESS = "§"
"""Mark of an arm whose model nobody would use, in some repeats or all."""
UNPROVEN, PARTLY, OUTDONE = "†", "¶", "‖"
"""Marks of a figure of leakage that is no evidence of protection: for the arm's verdict; for its verdict in some of the
repeats; as an attacker that knew less got more."""
_SCALES = {"bytes": ("MB", 1e-6)}
"""Unit in tables, and how many of it one is, by unit."""


def heading(measure: str) -> str:
    """Return a column's title with its unit: `PSNR (dB)`."""
    title, unit = MEASURES[measure].title, MEASURES[measure].unit
    title = title.replace("bytes sent", "sent") if unit == "bytes" else title
    unit = _SCALES.get(unit, (unit, 1))[0]
    return f"{title} ({unit})" if unit else title


def cell(measure: str, estimate: Estimate | None) -> str:
    """Format an estimate as a table cell: `12.3`, or `12.34 ± 0.56` with half its 95 % interval.

    Both are told to the interval's second digit; one that is not symmetric is told by its ends. Two values have none,
    and stand behind their mean, to the first digit in which they are apart from it: `12.3 (11.8, 12.9)`. Nor have a
    single value, and values that are all alike.
    """
    if estimate is None:
        return NONE
    if MEASURES[measure].proved:  # the weakest of the repeats, and no mean
        return at_most(estimate.mean)
    factor = _factor(measure)
    if MEASURES[measure].unit == "dB" and estimate.mean >= PSNR_CEILING:
        return f"≥{PSNR_CEILING:g}"
    mean = estimate.mean * factor
    if estimate.spread is None:
        return _plain(mean)
    low, high = (end * factor for end in estimate.pair or estimate.spread)
    half = max(high - mean, mean - low)
    decimals = max(0, (0 if estimate.pair else 1) - floor(log10(half)))
    if estimate.pair:
        return f"{mean:.{decimals}f} ({low:.{decimals}f}, {high:.{decimals}f})"
    if abs((high - mean) - (mean - low)) > 0.01 * half:
        return f"{mean:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"
    return f"{mean:.{decimals}f} ± {half:.{decimals}f}"


def _factor(measure: str) -> float:
    """Return how many of a table's unit one of a measure's is."""
    return _SCALES.get(MEASURES[measure].unit, ("", 1.0))[1]


def said(measure: str, value: float) -> str:
    """Return a value with its unit: `12.3 dB`, `0.972`, `3 min 05 s`."""
    unit = MEASURES[measure].unit
    if MEASURES[measure].proved:
        return at_most(value)
    if unit == "dB":
        return "exact" if isinf(value) else f"{_plain(value)} dB"
    if unit == "s":
        return duration(value)
    if unit == "bytes":
        return size(value)
    return f"{_plain(value)} {unit}".strip()


def said_with_interval(measure: str, estimate: Estimate) -> str:
    """Return a mean with its unit and 95 % interval, `12.3 dB (11.8 dB to 12.9 dB)`, or with both of two values.

    The value stands alone where there is no spread.
    """
    if estimate.spread is None:
        return said(measure, estimate.mean)
    low, high = (said(measure, end) for end in estimate.pair or estimate.spread)
    return f"{said(measure, estimate.mean)} ({low}{', ' if estimate.pair else ' to '}{high})"


@dataclass(frozen=True)
class Grid:
    """Table of text with settings as rows."""

    headings: list[str]
    words: int
    """Number of columns, from the left, that are words; the others are figures."""
    rows: list[list[str]]
    note: str
    """Note on what stands behind the figures."""
    best: frozenset[tuple[int, int]] = frozenset()
    """Places, (row, column), of the best figures of a column; ties among them."""


def grid(settings: Sequence[Setting], columns: Mapping[str, str | None] | None = None) -> Grid:
    """Return a table with a row for each setting.

    `columns` are their headings by name, in their order; None for the usual heading. Names are `run`, `arm`, `attack`,
    those of swept fields and of measures. By default all are told in which something is known. Raises `UserError` for a
    name that is none. Attacks that do not apply have no row where another one does, and are named in the note.
    """
    met = {each.identity for each in settings if each.applies}
    silent = [f"{each.attack} on {each.title}" for each in settings if not each.applies and each.identity in met]
    settings = [each for each in settings if each.applies or each.identity not in met]
    fields = list(dict.fromkeys(path for each in settings for path in each.fields))
    words: dict[str, Callable[[Setting], str]] = {
        **({"run": lambda one: one.source} if any(each.source for each in settings) else {}),
        "arm": lambda one: one.arm + mark(one),
        **{
            name: lambda one, path=path: _value(one.fields.get(path))  # type: ignore[misc]
            for name, path in zip(short_names(fields), fields, strict=True)
        },
        "attack": lambda one: one.attack or NONE,
    }
    measures = [name for name in MEASURES if any(name in each.measures for each in settings)]
    if columns is None:
        columns = dict.fromkeys([*words, *(name for name in SHOWN if name in measures)])
    for name in columns:
        if name not in words and name not in measures:
            raise UserError(f"no column is called '{name}': {nearest(name, [*words, *measures])}")
    shown = [name for name in columns if name in measures]
    rows = [[words[name](each) if name in words else marked(name, each) for name in columns] for each in settings]
    best = {(row, place) for place, name in enumerate(columns) if name in measures for row in _best(name, settings)}
    headings = [given or (name if name in words else heading(name)) for name, given in columns.items()]
    leading = next((place for place, name in enumerate(columns) if name in measures), len(columns))
    note = _note(settings, shown)
    if silent:
        note = f"{note} Left out, as the attack does not apply: {'; '.join(silent)}.".strip()
    return Grid(headings, leading, rows, note, frozenset(best))


def mark(one: Setting) -> str:
    """Return the mark of a setting's name, if nobody would use its model."""
    return USELESS * bool(one.useless or one.collapsed)


def marked(name: str, one: Setting) -> str:
    """Return a formatted figure, with a mark if it is no evidence of protection."""
    text = cell(name, one.measures.get(name))
    if text == NONE or not of_attacks(name):
        return text
    known = OUTDONE if name in one.outdone else UNPROVEN * one.doubted(name)
    return f"{text}{known}{PARTLY * _doubted_in_part(name, one)}{BROKEN * bool(one.unanswered[0])}"


def _doubted_in_part(name: str, one: Setting) -> bool:
    return of_rebuilt(name) and bool(one.inconclusive)


def _best(name: str, settings: Sequence[Setting]) -> set[int]:
    """Return the rows with the best mean for the data's owner: for leakage by attack, else over all rows.

    Settings that nobody would use, and figures that prove nothing, are not compared; none is best where all are alike,
    or where they are of unlike seeds.
    """
    best: set[int] = set()
    for means in _compared(name, settings):
        if _unlike(settings[row].seeds(name) for row in means):
            continue
        leading = (max if MEASURES[name].higher_is_better else min)(means, key=means.__getitem__)
        printed = {row: _printed(name, settings[row].measures[name]) for row in means}
        ties = {row for row in means if _alike(printed[row], printed[leading])}
        best |= ties if len(ties) < len(means) else set()
    return best


def _compared(name: str, settings: Sequence[Setting]) -> list[dict[int, float]]:
    """Return the means that are compared with one another, by row: of leakage those of each attack."""
    if mixed(settings, name):
        return []
    by_attack: dict[str | None, dict[int, float]] = {}
    for row, one in enumerate(settings):
        apart = (of_attacks(name) and one.unanswered[0]) or _doubted_in_part(name, one)
        if not mark(one) and not apart and (known := one.evidence(name)):
            attack = one.attack if MEASURES[name].kind == "leakage" else None
            by_attack.setdefault(attack, {})[row] = known.mean
    return list(by_attack.values())


def _unlike(seeds: Iterable[frozenset[int]]) -> bool:
    return len(set(seeds)) > 1


def _printed(measure: str, found: Estimate) -> tuple[float, int]:
    """Return the mean as it is before it is rounded for its cell, and the cell's number of decimals."""
    text = cell(measure, found).split()[0]
    exponent = Decimal(text.removeprefix("≥")).as_tuple().exponent
    decimals = -exponent if isinstance(exponent, int) else 0
    if MEASURES[measure].proved or text.startswith("≥"):  # a bound, not a rounded mean
        return float(text.removeprefix("≥")), decimals
    return found.mean * _factor(measure), decimals


def _alike(one: tuple[float, int], other: tuple[float, int]) -> bool:
    """Return whether two means are equal in the digits that both cells have."""
    decimals = min(one[1], other[1])
    return round(one[0], decimals) == round(other[0], decimals)


def _note(settings: Sequence[Setting], shown: Sequence[str]) -> str:
    """Return the note under a table: what its intervals are over, and caveats."""
    known = [(name, found) for each in settings for name in shown if (found := each.measures.get(name))]
    notes = []
    for over, what, how in (
        ("repeats", "repeats", "(Student's t)"),
        ("victims", "attacked clients of one training", "(Student's t; of hits the exact one)"),
    ):
        counts = sorted({e.n for _, e in known if e.over == over and not e.pair})
        if counts[-1:] > [1]:
            span = " to ".join(str(n) for n in dict.fromkeys(counts[:1] + counts[-1:]))
            notes.append(f"Mean and half the 95 % interval {how} over {span} {what}.")
        if any(e.pair and e.spread for _, e in known if e.over == over):
            notes.append(OF_TWO.format(what))
    if any(e.over == "rounds" for _, e in known):
        notes.append("The interval of the training time is over rounds.")
    if any(e.n > 1 and e.spread is None and not MEASURES[name].proved for name, e in known):
        notes.append("A figure alone is of a single value, or of values that are all alike.")
    if any(e.cut and e.interval for _, e in known):
        notes.append(CUT)
    if "train_seconds" in shown and any("train_seconds" in each.measures for each in settings):
        notes.append(TIME)
    if {e.n for _, e in known if e.over == "repeats"} == {1}:
        notes.append(SINGLE)
    notes += notes_on_marks(settings, shown)
    if any(each.unfinished for each in settings):
        notes.append(f"{UNFINISHED}.")
    if any(
        _unlike(settings[row].seeds(name) for row in means) for name in shown for means in _compared(name, settings)
    ):
        notes.append(UNLIKE)
    notes += [f"Note that {unlike}." for name in shown if (unlike := mixed(settings, name))]
    return " ".join(notes)


def notes_on_marks(settings: Sequence[Setting], shown: Sequence[str]) -> list[str]:
    """Return what the marks on names of settings and on figures of these measures say."""
    notes = []
    if any(each.useless for each in settings):
        notes.append(f"{USELESS}: its accuracy is that of guessing, so it is compared with nothing.")
    if some := dict.fromkeys(f"{o.title} in {o.collapsed} of {len(o.rows)}" for o in settings if o.collapsed):
        notes.append(f"{USELESS}: its accuracy is that of guessing in some repeats: {'; '.join(some)}.")
    doubted = [(each, name) for each in settings for name in shown if name in each.measures and each.doubted(name)]
    if any(name not in each.outdone for each, name in doubted):
        notes.append(f"{UNPROVEN}: no evidence of protection, for the arm's verdict is inconclusive or not measured.")
    partly = [o for o in settings if any(name in o.measures and _doubted_in_part(name, o) for name in shown)]
    if some := dict.fromkeys(f"{o.title} in {o.inconclusive} of {len(o.rows)}" for o in partly):
        notes.append(f"{PARTLY}: the verdict is inconclusive in some of the repeats behind it: {'; '.join(some)}.")
    if less := dict.fromkeys(
        f"{o.attack} than {o.outdone[name]} on {o.title}" for o, name in doubted if name in o.outdone
    ):
        notes.append(f"{OUTDONE}: an attacker that knew more got less, a failure of that attack: {'; '.join(less)}.")
    if any(of_attacks(name) for name in shown):
        broken = {f"{each.title} under {each.attack} on {of_so_many(*each.unanswered)}": each for each in settings}
        if named := [words for words, each in broken.items() if each.unanswered[0]]:
            notes.append(f"{MEANING}: {'; '.join(named)}.")
    return notes


def short_names(fields: Sequence[str]) -> list[str]:
    """Return paths shortened to their last key where that is unambiguous."""
    last = [path.rpartition(".")[2] for path in fields]
    return [name if last.count(name) == 1 else path for name, path in zip(last, fields, strict=True)]


def _value(value: object) -> str:
    return NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: float) -> str:
    return f"{value:.4g}"
