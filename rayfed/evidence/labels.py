"""Comparison of the labels that attacks recover with the labels that guesses recover.

An attack is assessed by all labels of a batch size, and by the updates with the most recovered labels. The best of many
guessing attackers exceeds the mean of a guess, so the number of attackers is corrected for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp
from statistics import fmean
from typing import Any

from rayfed.evidence.rows import Row, is_measured, labels_given
from rayfed.metrics.chance import evidence
from rayfed.store.finding import RecoveredLabels

LUCK = 0.05
"""Maximum probability of a result by chance at which it is significant."""


@dataclass(frozen=True)
class Guesses:
    """Mean shares of the labels recovered by three guesses, which use only label frequencies."""

    commonest: float
    """By guessing the most common label for every sample; 0 if no label is known."""
    evenly: float
    """By guessing all labels equally often; 0 if unknown."""
    in_proportion: float
    """By guessing, for each update, labels in the proportions of all other clients; 0 without other clients."""
    by_update: tuple[Mapping[tuple[Any, ...], float], ...]
    """Shares recovered by each guess, by update."""

    @property
    def best(self) -> float:
        """Return the share of labels recovered by the best of the three guesses."""
        return max(self.commonest, self.evenly, self.in_proportion)


@dataclass(frozen=True)
class LabelInference:
    """Labels recovered by an attack, with the results of guesses on the same samples."""

    attack: str
    updates: Mapping[tuple[Any, ...], float]
    """Share of each update's labels that is recovered, as a multiset."""
    labels: Mapping[tuple[Any, ...], Sequence[int]]
    """Labels of each update; the first entry of its key is the client."""
    guesses: Guesses
    attempts: int
    """Number of attackers times repeats, among which this result may be the best."""

    @property
    def share(self) -> float:
        """Return the mean share of the labels that the attack recovers."""
        return fmean(self.updates.values())

    @property
    def luck(self) -> float:
        """Return a bound (Hoeffding) on the probability that a guess recovers as large a share; 1 if unknown.

        A label that a client has several times counts once, because one correct guess covers all its occurrences.
        """
        return self._probability(self.share, self.guesses.best, sum(map(len, self._distinct().values())))

    @property
    def lucky(self) -> bool:
        """Return whether the share may be due to chance, corrected for the number of attempts (Bonferroni)."""
        return self.attempts * self.luck > LUCK

    @property
    def summary(self) -> RecoveredLabels:
        """Return the figures of the result that findings and verdicts need."""
        guesses = self.guesses
        return RecoveredLabels(
            attack=self.attack,
            share=self.share,
            commonest=guesses.commonest,
            evenly=guesses.evenly,
            in_proportion=guesses.in_proportion,
            updates=len(self.updates),
            whole=self.whole,
            attempts=self.attempts,
            share_by_chance=self.lucky,
        )

    def reaching(self, least: float) -> int:
        """Return the number of updates of several samples with a share of recovered labels of at least `least`."""
        return sum(share >= least and len(self.labels[update]) > 1 for update, share in self.updates.items())

    def luck_by_update(self, least: float) -> float:
        """Return a bound on the probability that a guess reaches the share `least` in as many updates as the attack."""
        by_chance = fmean(self._chance(labels, least) for labels in self.labels.values())
        return self._probability(self.reaching(least) / len(self.updates), by_chance, len(self._distinct()))

    def may_reach(self, least: float) -> bool:
        """Return whether labels of single updates may be recovered, although the total may be due to chance.

        This is the case if one guess does as well with a probability below 5 %. It recovers as large a share of all
        updates, taken separately, or reaches `least` or all labels on as many updates. The number of other attackers
        does not matter.
        """
        if not self.reaching(least):
            return False
        each = sum(len(set(labels)) for labels in self.labels.values())
        lucks = [self._probability(self.share, self.guesses.best, each), self.luck_by_update(least)]
        for one in (least, 1.0):
            reached = max(sum(share >= one for share in guess.values()) for guess in self.guesses.by_update)
            by_chance = (reached + 1) / (len(self.updates) + 1)
            lucks.append(self._probability(self.reaching(one) / len(self.updates), by_chance, len(self.updates)))
        return min(lucks) <= LUCK or self.whole > 0

    @property
    def whole(self) -> int:
        """Return the number of updates of several samples with all labels recovered; 0 if maybe due to chance."""
        return self.reaching(1.0) if self.attempts * self.luck_by_update(1.0) <= LUCK else 0

    def _probability(self, share: float, by_chance: float, independent: int) -> float:
        known = self.guesses.commonest > 0 and share > by_chance
        return exp(-evidence(share, by_chance, independent)) if known else 1.0

    def _chance(self, labels: Sequence[int], least: float) -> float:
        """Return a bound on the probability that a guess reaches a share of these labels."""
        needed = ceil(least * len(labels)) / max(len(labels), 1)
        guessed = self.guesses.best
        return exp(-evidence(needed, guessed, len(set(labels)))) if needed > guessed else 1.0

    def _distinct(self) -> dict[Any, set[int]]:
        """Return each client's labels."""
        by_client: dict[Any, set[int]] = {}
        for update, labels in self.labels.items():
            by_client.setdefault(update[0], set()).update(labels)
        return by_client


def collect_label_inferences(rows: Sequence[Row]) -> list[LabelInference]:
    """Return the labels recovered by each attack not given the labels, by repeat, on one arm and batch size."""
    shares: dict[tuple[str, Any], dict[tuple[Any, ...], float]] = {}
    for row in rows:
        if is_measured(row.get("label_accuracy")) and not labels_given(row):
            by_update = shares.setdefault((row["attack"], row.get("repeat")), {})
            by_update[_update(row)] = row["label_accuracy"]  # one value per batch
    labels, guesses = _labels(rows), _guesses(rows)
    inferences = []
    for (attack, _), by_update in shares.items():
        own = {update: labels.get(update, ()) for update in by_update}
        inferences.append(LabelInference(attack, by_update, own, guesses, len(shares)))
    return inferences


def best_label_inference(inferences: Iterable[LabelInference]) -> LabelInference | None:
    """Return the most significant result, or the result with the largest share if none is; None without results."""
    return max(inferences, key=lambda one: (not one.lucky or one.whole > 0, -one.luck, one.share), default=None)


def _labels(rows: Sequence[Row]) -> dict[tuple[Any, ...], Sequence[int]]:
    """Return the known labels of each update."""
    samples = {(_update(row), row["sample"]): row["true_label"] for row in rows if row.get("true_label") is not None}
    by_update: dict[tuple[Any, ...], list[int]] = {}
    for (update, _), label in samples.items():
        by_update.setdefault(update, []).append(label)
    return dict(by_update)


def _guesses(rows: Sequence[Row]) -> Guesses:
    by_update = _labels(rows)
    pooled = Counter(label for labels in by_update.values() for label in labels)
    evenly = {_update(row): row["label_baseline"] for row in rows if is_measured(row.get("label_baseline"))}
    commonest = max(pooled, key=lambda label: pooled[label], default=None)
    of_commonest = {update: labels.count(commonest) / len(labels) for update, labels in by_update.items()}
    alike = {}
    for update, labels in by_update.items():
        others = Counter(x for other, each in by_update.items() if other[0] != update[0] for x in each)
        if others:
            alike[update] = (Counter(labels) & _in_proportion(others, len(labels))).total() / len(labels)
    return Guesses(
        commonest=max(pooled.values(), default=0) / max(pooled.total(), 1),
        evenly=fmean(evenly.values()) if evenly else 0.0,
        in_proportion=fmean(alike.values()) if alike else 0.0,
        by_update=(of_commonest, evenly, alike),
    )


def _in_proportion(counts: Counter[int], size: int) -> Counter[int]:
    """Return `size` labels in the proportion of some counts (largest remainder method)."""
    shares = {label: size * count / counts.total() for label, count in counts.items()}
    rounded = Counter({label: int(share) for label, share in shares.items()})
    by_remainder = sorted(shares, key=lambda label: int(shares[label]) - shares[label])
    for label in by_remainder[: size - rounded.total()]:
        rounded[label] += 1
    return rounded


def _update(row: Row) -> tuple[Any, ...]:
    return row["victim"], row.get("round")
