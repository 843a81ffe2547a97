"""Samples that attacks find in part, by more than chance: columns of records, tokens of texts, pixels of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean
from typing import Any

from rayfed.analysis.summary import Row, measured
from rayfed.metrics.chance import evidence

LEVEL = 1e-3
"""Probability of as many hits by chance below which an attack has found them, were the parts independent."""
_FIGURES = ("parts_found", "parts_guessed", "parts_evidence")


@dataclass(frozen=True)
class Part:
    """What the reconstructions of one attack find of samples."""

    attack: str
    found: float
    """Share of the parts that are found, mean over the samples that are read."""
    guessed: float
    """Mean share of theirs that is found without the update (`rayfed.metrics.parts.parts`)."""
    samples: int
    """Number of samples that are read."""
    rows: tuple[Row, ...] = ()
    """Their rows."""
    columns: tuple[tuple[str, float, float | None], ...] = ()
    """Columns of records that are found more often than by the best constant, the most so first: name, share, that of
    the constant, which a redacted copy does not say."""


def beyond_chance(rows: Sequence[Row]) -> Part | None:
    """Return what the attack that finds most parts finds, of those that find more than by chance; None without any.

    `rows` are of one arm and batch size. Tables of earlier versions say nothing of parts.
    """
    attacks: dict[str, list[Row]] = {}
    for row in rows:
        if all(measured(row.get(name)) for name in _FIGURES):
            attacks.setdefault(row["attack"], []).append(row)
    tests = sum(map(len, attacks.values()))
    told = [
        part
        for attack, own in attacks.items()
        for part in (
            (_of_images(attack, own, tests),)
            if measured(own[0].get("psnr"))
            else (_of_samples(attack, own), _of_columns(attack, own))
        )
    ]
    return max((part for part in told if part), key=lambda part: part.found * part.samples, default=None)


def _of_samples(attack: str, rows: Sequence[Row]) -> Part | None:
    """Return what one attack finds of the samples that it reads; None where chance may find as much.

    Read are those that are told apart from all others, and of which more is found than guesses find: an answer that
    fits many samples alike, as one for a client or a class, reads none of them. Repeats count as their mean.
    """
    read, told = [], 0.0
    for same in _by_sample(rows).values():
        hits = [row for row in same if row["told_apart"] == 1 and row["parts_evidence"] > 0]
        told += sum(row["parts_evidence"] for row in hits) / len(same)
        read += hits[:1]
    return _part(attack, read) if told >= -log(LEVEL) else None


def _of_images(attack: str, rows: Sequence[Row], tests: int) -> Part | None:
    """Return what one attack finds of the images that it reads; None if there are none.

    Each has to be beyond chance by itself, of so many `tests`: images of a class or of a client are alike, and among
    many answers some fit better than they do others. They need not be told apart as a whole, for of an image of which a
    part is read the rest says nothing.
    """
    read = [row for row in rows if row["parts_evidence"] >= log(tests / LEVEL)]
    return _part(attack, [same[0] for same in _by_sample(read).values()]) if read else None


def _of_columns(attack: str, rows: Sequence[Row]) -> Part | None:
    """Return what one attack finds of columns that it reads in all records; None where chance may find as much.

    Clients' records are alike, so that each counts as one.
    """
    victims: dict[Any, list[Row]] = {}
    for row in rows:
        victims.setdefault(row["victim"], []).append(row)
    tests = len(rows[0].get("columns") or ())
    found = [
        (name, share, guess)
        for name, share, guess in _columns(rows)
        if guess is not None and evidence(share, guess, len(victims)) >= log(tests / LEVEL)
    ]
    if not found:
        return None
    count = len(_by_sample(rows))
    share, guess = fmean(one[1] for one in found), fmean(one[2] or 0.0 for one in found)
    return Part(attack, share * len(found) / tests, guess * len(found) / tests, count, tuple(rows), tuple(found))


def _part(attack: str, read: Sequence[Row]) -> Part:
    found, guessed = (fmean(row[name] for row in read) for name in _FIGURES[:2])
    return Part(attack, found, guessed, len(read), tuple(read), _columns(read))


def _by_sample(rows: Sequence[Row]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row.get("round"), row["victim"], row["sample"]), []).append(row)
    return found


def _columns(rows: Sequence[Row]) -> tuple[tuple[str, float, float | None], ...]:
    """Return the columns of some rows that are found more often than by the best constant, the most so first."""
    hits: dict[str, list[bool]] = {}
    guesses: dict[str, float | None] = {}
    for column in (column for row in rows for column in row.get("columns") or ()):
        hits.setdefault(column["name"], []).append(column["found"])
        guesses[column["name"]] = column["guess"]
    shares = ((name, fmean(own), guesses[name]) for name, own in hits.items())
    return tuple(sorted((one for one in shares if one[1] > (one[2] or 0.0)), key=lambda one: (one[2] or 0.0) - one[1]))
