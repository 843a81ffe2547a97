"""Formatting of measured values for tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context
from math import floor, isfinite, isinf, log10

from rayfed.analysis.formats import NONE, duration, size
from rayfed.analysis.promises import mixed
from rayfed.analysis.settings import UNFINISHED, Estimate, Setting, of_attacks, of_rebuilt
from rayfed.errors import UserError, nearest
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.measures import JUDGED, MEASURES, extreme_of
from rayfed.privacy.printing import at_most, raised
from rayfed.report.text.marks import FAILED, FAILED_LEGEND, count_text

SHOWN = (
    "test_accuracy",
    "pmm",
    *(
        name
        for metric in JUDGED
        if "settings" in metric.tables
        for name in (metric.name, extreme_of(metric.name))[: 1 + metric.worst_in_tables]
    ),
    "inferred",
    "epsilon",
    "rero",
    "train_seconds",
    "simulated_seconds",
    "bytes_up",
)
"""Measures in tables of settings, if they are known."""
OF_TWO = "For two {}, both values follow the mean in brackets, as they are too few for an interval."
SINGLE = "Every setting was run once, so the spread over seeds is unknown."
CUT = "Intervals are clipped to possible values: shares to 0 and 1, times and sizes to 0."
TIME = "Training time is that of all rounds; rounds with a warm-up of processes count as the mean of the others."
UNLIKE = "Settings that were run with different seeds are not compared, and no best value is marked among them."
USELESS = "§"
"""Mark of an arm whose model is useless, in some or all repeats."""
UNPROVEN, PARTLY, OUTDONE = "†", "¶", "‖"
"""Marks of a leakage value that is no evidence of protection: because of the arm's verdict, because of its verdict in
some repeats, or because an attacker that knew less reconstructed more."""
_SCALES = {"bytes": ("MB", 1e-6)}
"""Unit in tables and conversion factor, by unit."""


def heading(measure: str) -> str:
    """Return the column heading of a measure with the unit: `PSNR (dB)`."""
    title, unit = MEASURES[measure].title, MEASURES[measure].unit
    title = title.replace("bytes sent", "sent") if unit == "bytes" else title
    unit = _SCALES.get(unit, (unit, 1))[0]
    return f"{title} ({unit})" if unit else title


@dataclass(frozen=True)
class Cell:
    """Rounded number of a table, in the unit of tables, with the ends of its interval."""

    value: float
    """Mean before rounding. A proved bound is rounded up already, and a value at the ceiling is the ceiling."""
    digits: int = 4
    """Number of significant digits of a value without an interval."""
    at_ceiling: bool = False
    """Whether the mean is at least the ceiling of its measure."""
    ends: tuple[float, float] | None = None
    pair: bool = False
    """Whether the ends are both of two values instead of the ends of an interval."""

    @property
    def decimals(self) -> int:
        """Return the number of decimals, negative if digits before the point are rounded."""
        if self.ends is None:
            return _count_decimals(self.value, self.digits)
        return max(0, (0 if self.pair else 1) - floor(log10(self._half)))

    def equals(self, other: Cell) -> bool:
        """Return whether both values are equal to the number of decimals that both cells have."""
        decimals = min(self.decimals, other.decimals)
        return round(self.value, decimals) == round(other.value, decimals)

    def __str__(self) -> str:
        if self.ends is None:
            return f"{'≥' * self.at_ceiling}{self.value:.{self.digits}g}"
        mean, low, high = (f"{one:.{self.decimals}f}" for one in (self.value, *self.ends))
        below, above = self._halves
        if self.pair:
            return f"{mean} ({low}, {high})"
        if abs(above - below) > 0.01 * self._half:
            return f"{mean} ({low} to {high})"
        return f"{mean} ± {self._half:.{self.decimals}f}"

    @property
    def _halves(self) -> tuple[float, float]:
        low, high = self.ends or (self.value, self.value)
        return self.value - low, high - self.value

    @property
    def _half(self) -> float:
        return max(self._halves)


def round_estimate(measure: str, estimate: Estimate) -> Cell:
    """Return the number that tables show for an estimate, in their unit.

    Means with an interval are rounded to the second significant digit of the interval, others to the fourth of the
    mean.
    """
    if MEASURES[measure].proved:  # the weakest bound of the repeats, not a mean
        return Cell(raised(estimate.mean), digits=3)
    if MEASURES[measure].unit == "dB" and estimate.mean >= PSNR_CEILING:
        return Cell(PSNR_CEILING, at_ceiling=True)
    factor = _SCALES.get(MEASURES[measure].unit, ("", 1.0))[1]
    if estimate.spread is None:
        return Cell(estimate.mean * factor)
    low, high = estimate.pair or estimate.spread
    return Cell(estimate.mean * factor, ends=(low * factor, high * factor), pair=estimate.pair is not None)


def _count_decimals(value: float, digits: int) -> int:
    """Return the number of decimals of a value that is rounded to some significant digits, without trailing zeros."""
    if not isfinite(value):
        return 0
    rounded = Context(prec=digits).create_decimal(value).normalize()
    exponent = int(rounded.as_tuple().exponent)
    return -exponent if exponent < 0 or rounded.adjusted() >= digits else 0  # large ones print in powers of ten


def cell(measure: str, estimate: Estimate | None) -> str:
    """Format an estimate as a table cell: `12.3`, or `12.34 ± 0.56` with half the 95 % interval.

    An asymmetric interval is given by its ends. Two values have no interval and follow their mean, as in
    `12.3 (11.8, 12.9)`. A single value and equal values have only a mean.
    """
    return NONE if estimate is None else str(round_estimate(measure, estimate))


def said(measure: str, value: float) -> str:
    """Format the value of a measure with the unit: `12.3 dB`, `0.972`, `3 min 05 s`."""
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
    """Format a mean with unit and 95 % interval, `12.3 dB (11.8 dB to 12.9 dB)`, or with both of two values.

    Without an interval, return only the mean.
    """
    if estimate.spread is None:
        return said(measure, estimate.mean)
    low, high = (said(measure, end) for end in estimate.pair or estimate.spread)
    return f"{said(measure, estimate.mean)} ({low}{', ' if estimate.pair else ' to '}{high})"


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
        note = f"{note} Omitted, because the attack does not apply: {'; '.join(silent)}.".strip()
    return Grid(headings, leading, rows, note, frozenset(best))


def mark(one: Setting) -> str:
    """Return the mark to append to a setting's name if the setting's model is useless, otherwise an empty string."""
    return USELESS * bool(one.useless or one.collapsed)


def marked(name: str, one: Setting) -> str:
    """Format the value of a measure, with a mark if the value is no evidence of protection."""
    estimate = one.measures.get(name)
    text = cell(name, estimate)
    if estimate is None or not of_attacks(name):
        return text
    known = OUTDONE if name in one.outdone else UNPROVEN * one.doubted(name)
    return f"{text}{known}{PARTLY * _doubted_in_part(name, one)}{FAILED * bool(one.unanswered[0])}"


def _doubted_in_part(name: str, one: Setting) -> bool:
    return of_rebuilt(name) and bool(one.inconclusive)


def _best(name: str, settings: Sequence[Setting]) -> set[int]:
    """Return the rows with the best mean for the data's owner: for leakage per attack, else over all rows.

    Useless models and values that are no evidence are not compared. No row is best if all values are equal, or if the
    settings were run with different seeds.
    """
    best: set[int] = set()
    for means in _compared(name, settings):
        if _unlike(settings[row].seeds(name) for row in means):
            continue
        leading = (max if MEASURES[name].higher_is_better else min)(means, key=means.__getitem__)
        shown = {row: round_estimate(name, settings[row].measures[name]) for row in means}
        ties = {row for row in means if shown[row].equals(shown[leading])}
        best |= ties if len(ties) < len(means) else set()
    return best


def _compared(name: str, settings: Sequence[Setting]) -> list[dict[int, float]]:
    """Return groups of means that are compared, by row; for leakage, one group per attack."""
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


def _note(settings: Sequence[Setting], shown: Sequence[str]) -> str:
    """Return the note under a table: the meaning of its intervals and marks, and caveats."""
    known = [(name, found) for each in settings for name in shown if (found := each.measures.get(name))]
    notes = []
    for over, what, how in (
        ("repeats", "repeats", "(Student's t)"),
        ("victims", "attacked clients of one training run", "(Student's t, or exact for hits)"),
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
        notes.append("A mean without an interval is that of a single value or of equal values.")
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
    """Return explanations of the marks on the shown settings and on the values of the shown measures."""
    notes = []
    if any(each.useless for each in settings):
        notes.append(f"{USELESS}: its accuracy does not beat the majority class, so it is not compared.")
    if some := dict.fromkeys(f"{o.title} in {o.collapsed} of {len(o.rows)}" for o in settings if o.collapsed):
        notes.append(f"{USELESS}: in some repeats its accuracy does not beat the majority class: {'; '.join(some)}.")
    doubted = [(each, name) for each in settings for name in shown if name in each.measures and each.doubted(name)]
    if any(name not in each.outdone for each, name in doubted):
        notes.append(
            f"{UNPROVEN}: no evidence of protection, because the arm's verdict is inconclusive or not measured."
        )
    partly = [o for o in settings if any(name in o.measures and _doubted_in_part(name, o) for name in shown)]
    if some := dict.fromkeys(f"{o.title} in {o.inconclusive} of {len(o.rows)}" for o in partly):
        notes.append(f"{PARTLY}: the verdict is inconclusive in some repeats: {'; '.join(some)}.")
    if less := dict.fromkeys(
        f"{o.attack} than {o.outdone[name]} on {o.title}" for o, name in doubted if name in o.outdone
    ):
        notes.append(
            f"{OUTDONE}: an attacker with more knowledge reconstructed less, so that attack failed: {'; '.join(less)}."
        )
    if any(of_attacks(name) for name in shown):
        broken = {f"{each.title} under {each.attack} on {count_text(*each.unanswered)}": each for each in settings}
        if named := [words for words, each in broken.items() if each.unanswered[0]]:
            notes.append(f"{FAILED_LEGEND}: {'; '.join(named)}.")
    return notes


def short_names(fields: Sequence[str]) -> list[str]:
    """Shorten paths of fields to their last key, unless two shortened paths would be equal."""
    last = [path.rpartition(".")[2] for path in fields]
    return [name if last.count(name) == 1 else path for name, path in zip(last, fields, strict=True)]


def _value(value: object) -> str:
    return NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: float) -> str:
    return f"{value:.4g}"
