"""Samples that attacks find in part, by more than chance: columns of records, and tokens of texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean
from typing import Any

from rayfed.analysis.summary import Row, measured

LEVEL = 1e-3
"""Most that the probability of so many parts by chance may be, for each of some dozens of attackers."""


@dataclass(frozen=True)
class Part:
    """What the reconstructions of one attack find of samples."""

    attack: str
    found: float
    """Share of the parts that are found, mean over the samples."""
    guessed: float
    """Mean share that is found without the update (`rayfed.metrics.parts.parts`)."""
    samples: int
    columns: tuple[tuple[str, float, float], ...] = ()
    """Columns of records found more often than by the best constant, the most so first: name, share, constant's."""


def beyond_chance(rows: Sequence[Row]) -> Part | None:
    """Return what the attack that finds most parts finds, of those that find more than by chance; None without any.

    `rows` are of one arm and batch size. Tables of earlier versions say nothing of parts.
    """
    attacks: dict[str, list[Row]] = {}
    for row in rows:
        if measured(row.get("parts_found")):
            attacks.setdefault(row["attack"], []).append(row)
    told = (_part(attack, own) for attack, own in attacks.items())
    return max((part for part in told if part), key=lambda part: part.found, default=None)


def _part(attack: str, rows: Sequence[Row]) -> Part | None:
    """Return what one attack finds; None where chance may find as much.

    Repeats, and what is seen of a sample in several rounds, count once. The probability is bounded as that of a sum of
    independent hits whose mean probability is known (Hoeffding 1963, theorem 1).
    """
    of: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        of.setdefault((row["victim"], row["sample"]), []).append(row)
    found, guessed, count = (
        [fmean(row[name] for row in same) for same in of.values()]
        for name in ("parts_found", "parts_guessed", "parts_independent")
    )
    total = sum(count)
    high = sum(n * share for n, share in zip(count, found, strict=True)) / total
    low = sum(n * share for n, share in zip(count, guessed, strict=True)) / total
    if high <= low or total * _divergence(high, low) < -log(LEVEL):
        return None
    return Part(attack, fmean(found), fmean(guessed), len(of), _columns(of.values()))


def _divergence(share: float, by_chance: float) -> float:
    """Return the divergence (nats) of hits of this probability from those of another, both in [0, 1]."""
    pairs = (share, by_chance), (1 - share, 1 - by_chance)
    return sum(p * log(p / q) if q else float("inf") for p, q in pairs if p)


def _columns(samples: Iterable[Sequence[Row]]) -> tuple[tuple[str, float, float], ...]:
    """Return the columns that are found more often than by the best constant; `samples` are the rows of each."""
    hits: dict[str, list[float]] = {}
    guesses: dict[str, float] = {}
    for rows in samples:
        for same in zip(*(row.get("columns") or () for row in rows), strict=True):
            hits.setdefault(same[0]["name"], []).append(fmean(column["found"] for column in same))
            guesses[same[0]["name"]] = same[0]["guess"]
    shares = ((name, fmean(own), guesses[name]) for name, own in hits.items())
    return tuple(sorted((one for one in shares if one[1] > one[2]), key=lambda one: one[2] - one[1]))
