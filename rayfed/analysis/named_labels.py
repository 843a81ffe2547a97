"""Labels that attacks name right, beside what guesses name.

An attack is judged by all labels that it names of a batch size, and by the updates of which it names most. Of many
attackers who guess, one is right about any given sample, and the best of them is above the mean of a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp
from statistics import fmean
from typing import Any

from rayfed.analysis.summary import Row, labels_given, measured
from rayfed.metrics.chance import evidence

LUCK = 0.05
"""Probability up to which what is found is told from luck."""


@dataclass(frozen=True)
class Guesses:
    """Mean shares of the labels that are found by three guesses, which know how often labels are."""

    commonest: float
    """By naming the commonest label for every sample; 0 if no label is known."""
    evenly: float
    """By naming every label equally often; 0 if it is not known."""
    in_proportion: float
    """By naming of each update the labels as often as all other clients have them; 0 without others."""
    by_update: tuple[Mapping[tuple[Any, ...], float], ...]
    """The shares of each update that these find."""

    @property
    def best(self) -> float:
        """The largest of these."""
        return max(self.commonest, self.evenly, self.in_proportion)


@dataclass(frozen=True)
class Named:
    """Labels that an attack names right, and what guesses find of the same samples."""

    attack: str
    updates: Mapping[tuple[Any, ...], float]
    """Share of each update's labels, as a multiset."""
    labels: Mapping[tuple[Any, ...], Sequence[int]]
    """Labels of each update; the first entry of its key is the client."""
    guesses: Guesses
    attempts: int
    """Answers of which this may be the best: attackers, and their repeats."""

    @property
    def share(self) -> float:
        """Mean share of the labels."""
        return fmean(self.updates.values())

    @property
    def luck(self) -> float:
        """Bound on the probability of one guess naming as large a share (Hoeffding); 1 where nothing is known of it.

        A label that a client has several times counts once: who guesses that has guessed them all.
        """
        return self._probability(self.share, self.guesses.best, sum(map(len, self._distinct().values())))

    @property
    def lucky(self) -> bool:
        """Whether the best of as many guesses may name as large a share, corrected for their number (Bonferroni)."""
        return self.attempts * self.luck > LUCK

    def reaching(self, least: float) -> int:
        """Return the number of updates of several samples whose share is at least this."""
        return sum(share >= least and len(self.labels[update]) > 1 for update, share in self.updates.items())

    def luck_of(self, least: float) -> float:
        """Return a bound on the probability of one guess reaching this share of as many updates."""
        by_chance = fmean(self._chance(labels, least) for labels in self.labels.values())
        return self._probability(self.reaching(least) / len(self.updates), by_chance, len(self._distinct()))

    def may_reach(self, least: float) -> bool:
        """Whether single updates may be read although all of it may be luck: then nothing passes a bound.

        That is so where one guess would do as well in less than one case of twenty: name as large a share in all, if
        updates are taken by themselves; or reach this one, or all labels, on more updates than guesses do. It does not
        depend on how many other attackers there are.
        """
        if not self.reaching(least):
            return False
        each = sum(len(set(labels)) for labels in self.labels.values())
        lucks = [self._probability(self.share, self.guesses.best, each), self.luck_of(least)]
        for one in (least, 1.0):
            reached = max(sum(share >= one for share in guess.values()) for guess in self.guesses.by_update)
            by_chance = (reached + 1) / (len(self.updates) + 1)
            lucks.append(self._probability(self.reaching(one) / len(self.updates), by_chance, len(self.updates)))
        return min(lucks) <= LUCK or self.whole > 0

    @property
    def whole(self) -> int:
        """Number of updates of several samples of which all labels are named, beyond luck; 0 if that may be luck."""
        return self.reaching(1.0) if self.attempts * self.luck_of(1.0) <= LUCK else 0

    def _probability(self, share: float, by_chance: float, independent: int) -> float:
        known = self.guesses.commonest > 0 and share > by_chance
        return exp(-evidence(share, by_chance, independent)) if known else 1.0

    def _chance(self, labels: Sequence[int], least: float) -> float:
        """Return the most that is the probability of a guess reaching a share of these labels."""
        needed = ceil(least * len(labels)) / max(len(labels), 1)
        guessed = self.guesses.best
        return exp(-evidence(needed, guessed, len(set(labels)))) if needed > guessed else 1.0

    def _distinct(self) -> dict[Any, set[int]]:
        """Return each client's labels."""
        found: dict[Any, set[int]] = {}
        for update, labels in self.labels.items():
            found.setdefault(update[0], set()).update(labels)
        return found


def named(rows: Sequence[Row]) -> list[Named]:
    """Return what each attack that was not given the labels names, in each repeat, in one arm and batch size."""
    sought: dict[tuple[str, Any], dict[tuple[Any, ...], float]] = {}
    for row in rows:
        if measured(row.get("label_accuracy")) and not labels_given(row):
            found = sought.setdefault((row["attack"], row.get("repeat")), {})
            found[_update(row)] = row["label_accuracy"]  # one value for each batch
    labels, guesses = _labels(rows), _guesses(rows)
    return [
        Named(attack, updates, {update: labels.get(update, ()) for update in updates}, guesses, len(sought))
        for (attack, _), updates in sought.items()
    ]


def foremost(found: Iterable[Named]) -> Named | None:
    """Return what is said of some: the one furthest beyond luck, or else with the largest share; None without any."""
    return max(found, key=lambda one: (not one.lucky or one.whole > 0, -one.luck, one.share), default=None)


def _labels(rows: Sequence[Row]) -> dict[tuple[Any, ...], Sequence[int]]:
    """Return the labels of each update, as far as they are known."""
    samples = {(_update(row), row["sample"]): row["true_label"] for row in rows if row.get("true_label") is not None}
    found: dict[tuple[Any, ...], list[int]] = {}
    for (update, _), label in samples.items():
        found.setdefault(update, []).append(label)
    return dict(found)


def _guesses(rows: Sequence[Row]) -> Guesses:
    by_update = _labels(rows)
    pooled = Counter(label for labels in by_update.values() for label in labels)
    evenly = {_update(row): row["label_guess_accuracy"] for row in rows if measured(row.get("label_guess_accuracy"))}
    commonest = max(pooled, key=lambda label: pooled[label], default=None)
    named_commonest = {update: labels.count(commonest) / len(labels) for update, labels in by_update.items()}
    alike = {}
    for update, labels in by_update.items():
        others = Counter(x for other, each in by_update.items() if other[0] != update[0] for x in each)
        if others:
            alike[update] = (Counter(labels) & _in_proportion(others, len(labels))).total() / len(labels)
    return Guesses(
        commonest=max(pooled.values(), default=0) / max(pooled.total(), 1),
        evenly=fmean(evenly.values()) if evenly else 0.0,
        in_proportion=fmean(alike.values()) if alike else 0.0,
        by_update=(named_commonest, evenly, alike),
    )


def _in_proportion(counts: Counter[int], size: int) -> Counter[int]:
    """Return `size` labels in the proportion of some counts: rounded down, and the largest remainders up."""
    shares = {label: size * count / counts.total() for label, count in counts.items()}
    found = Counter({label: int(share) for label, share in shares.items()})
    for label in sorted(shares, key=lambda each: int(shares[each]) - shares[each])[: size - found.total()]:
        found[label] += 1
    return found


def _update(row: Row) -> tuple[Any, ...]:
    return row["victim"], row.get("round")
