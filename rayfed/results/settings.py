"""Settings and what they come to: outcomes gathered over repeats, each figure with its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t

from rayfed.results.outcomes import MEASURES
from rayfed.results.summary import PSNR_CEILING, Row

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of one figure over repeats."""

    mean: float
    low: float | None
    """Lower end of the 95 % interval of the mean (Student's t); None for a single repeat."""
    high: float | None
    n: int


@dataclass(frozen=True)
class Setting:
    """One arm with one set of values of the swept fields, met by one attack or none."""

    source: str
    """Whose row it is where several runs are looked at; empty otherwise."""
    arm: str
    attack: str | None
    fields: dict[str, Any]
    """Swept field -> value; without those that are another arm's."""
    measures: dict[str, Estimate]
    """Column of `outcomes.MEASURES` -> its estimate, where it was measured."""
    rows: list[Row]
    """The repeats' outcomes."""

    @property
    def title(self) -> str:
        """The setting in words: `noise, sigma 0.1`."""
        values = [f"{path.rpartition('.')[2]} {_short(value)}" for path, value in self.fields.items()]
        return ", ".join([*filter(None, [self.source]), self.arm, *values])


def settings(rows: Sequence[Row], fields: Sequence[str] = (), source: str = "") -> list[Setting]:
    """Outcomes by arm, attack and values of the fields; failed and stopped trials are left out."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("status", "finished") == "finished":
            groups.setdefault((row["arm"], row["attack"], *(repr(row.get(f)) for f in fields)), []).append(row)
    return [
        Setting(
            source,
            group[0]["arm"],
            group[0]["attack"],
            {f: group[0][f] for f in fields if group[0].get(f) is not None},
            {name: e for name in MEASURES if (e := estimate([row.get(name) for row in group])) is not None},
            group,
        )
        for group in groups.values()
    ]


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """The mean of what was measured, with its interval; None where nothing was. An infinite PSNR counts as 100 dB."""
    known = [min(float(v), PSNR_CEILING) if v == float("inf") else float(v) for v in values if v is not None]
    known = [v for v in known if isfinite(v)]
    if not known:
        return None
    mean = fmean(known)
    if len(known) == 1:
        return Estimate(mean, None, None, 1)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(known) - 1)) * stdev(known) / sqrt(len(known))
    return Estimate(mean, mean - half, mean + half, len(known))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
