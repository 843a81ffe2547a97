"""Partly recovered samples, beyond chance: columns of records, tokens of texts, pixels of images."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import fmean

from rayfed.evidence.rows import Row, Sample, get_sample_key, is_measured
from rayfed.metrics.chance import evidence
from rayfed.store.finding import Part, PartColumn

LEVEL = 1e-3
"""Significance level: maximum probability of as many hits by chance, for independent parts."""
_FIGURES = ("parts_recovered", "parts_baseline", "parts_evidence")


def beyond_chance(rows: Sequence[Row]) -> Part | None:
    """Return the largest recovered parts of samples among attacks beyond chance; None without such attacks.

    `rows` are of one arm and batch size. Tables of earlier versions have no columns on parts.
    """
    attacks: dict[str, list[Row]] = {}
    for row in rows:
        if all(is_measured(row.get(name)) for name in _FIGURES):
            attacks.setdefault(row["attack"], []).append(row)
    tests = sum(map(len, attacks.values()))
    parts: list[Part | None] = []
    for attack, own in attacks.items():
        if is_measured(own[0].get("psnr")):
            parts.append(_parts_of_images(attack, own, tests))
        else:
            parts += [_parts_of_samples(attack, own), _parts_of_columns(attack, own)]
    return max((part for part in parts if part), key=lambda part: part.recovered * part.samples, default=None)


def _parts_of_samples(attack: str, rows: Sequence[Row]) -> Part | None:
    """Return the parts recovered by one attack in the samples that it identifies; None if it may be due to chance.

    Only identified samples count, with more parts recovered than by guesses. A reconstruction that fits many samples of
    a client or class equally well identifies none of them. Repeats are averaged.
    """
    read, nats = [], 0.0
    for same in _by_sample(rows).values():
        hits = [row for row in same if row["identified"] == 1 and row["parts_evidence"] > 0]
        nats += sum(row["parts_evidence"] for row in hits) / len(same)
        read += hits[:1]
    return _part(attack, read) if nats >= -log(LEVEL) else None


def _parts_of_images(attack: str, rows: Sequence[Row], tests: int) -> Part | None:
    """Return the parts recovered by one attack in images that it recovers significantly; None if there are none.

    Each image must be significant by itself, corrected for the number of `tests`, because images of a class or client
    resemble each other. The image need not be identified as a whole, because the parts that are not recovered carry no
    information.
    """
    read = [row for row in rows if row["parts_evidence"] >= log(tests / LEVEL)]
    return _part(attack, [same[0] for same in _by_sample(read).values()]) if read else None


def _parts_of_columns(attack: str, rows: Sequence[Row]) -> Part | None:
    """Return the columns recovered by one attack over all records; None if they may be due to chance.

    Records of one client resemble each other, so each client counts once.
    """
    victims = {row["victim"] for row in rows}
    tests = len(rows[0].get("columns") or ())
    columns = [column for column in _columns(rows) if _is_significant(column, len(victims), tests)]
    if not columns:
        return None
    share, baseline = fmean(one.share for one in columns), fmean(one.baseline or 0.0 for one in columns)
    return Part(
        attack=attack,
        recovered=share * len(columns) / tests,
        baseline=baseline * len(columns) / tests,
        samples=len(_by_sample(rows)),
        columns=tuple(columns),
        rows=tuple(rows),
    )


def _is_significant(column: PartColumn, clients: int, tests: int) -> bool:
    """Return whether a column is recovered from more clients than by chance, corrected for the number of `tests`."""
    if column.baseline is None:
        return False
    return evidence(column.share, column.baseline, clients) >= log(tests / LEVEL)


def _part(attack: str, read: Sequence[Row]) -> Part:
    recovered, baseline = (fmean(row[name] for row in read) for name in _FIGURES[:2])
    return Part(attack, recovered, baseline, len(read), _columns(read), tuple(read))


def _by_sample(rows: Sequence[Row]) -> dict[Sample, list[Row]]:
    by_sample: dict[Sample, list[Row]] = {}
    for row in rows:
        by_sample.setdefault(get_sample_key(row), []).append(row)
    return by_sample


def _columns(rows: Sequence[Row]) -> tuple[PartColumn, ...]:
    """Return the columns recovered more often than by the best constant, sorted by difference, largest first."""
    hits: dict[str, list[bool]] = {}
    guesses: dict[str, float | None] = {}
    for row in rows:
        for column in row.get("columns") or ():
            hits.setdefault(column["name"], []).append(column["found"])
            guesses[column["name"]] = column["guess"]
    columns = [PartColumn(name, fmean(recovered), guesses[name]) for name, recovered in hits.items()]
    above = [column for column in columns if column.share > (column.baseline or 0.0)]
    return tuple(sorted(above, key=lambda column: (column.baseline or 0.0) - column.share))
