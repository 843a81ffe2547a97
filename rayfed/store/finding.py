"""Finding on one arm at one batch size: a row of the table `verdicts`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rayfed.core.reasons import Reason
from rayfed.store.typed import column, inlined, key, unstored


class State(StrEnum):
    """Result for an arm or batch size, from worst to best: the worst over all batch sizes counts for an arm."""

    LEAKS = "leaks"
    NOT_MEASURED = "not measured"
    INCONCLUSIVE = "inconclusive"
    NOT_RECONSTRUCTED = "not reconstructed"
    NOTHING_TO_ATTACK = "nothing to attack"

    def __repr__(self) -> str:
        return repr(self.value)


class Missing(StrEnum):
    """Reason why a finished attack has no usable result."""

    RECONSTRUCTION = "reconstruction"
    """The attack returned no finite reconstruction."""
    COMPARISON = "comparison"
    """Metrics that the criterion needs in addition were not computed."""
    METRIC = "metric"
    """The bounded metric was not computed."""
    LABELS_GIVEN = "labels_given"
    """The attacker was given the labels."""
    LABELS = "labels"
    """The attack returned no valid labels."""


class Elsewhere(StrEnum):
    """Result on an undefended arm of an attack that succeeded against a defence."""

    NOT_IN_RUN = "not_in_run"
    NO_TIME = "no_time"
    NO_RESULT = "no_result"
    NO_LEAK = "no_leak"


class Gap(NamedTuple):
    """How far the best reconstruction is from explaining the update as well as the true samples do."""

    best: float
    """Largest log-likelihood of a reconstruction, or smallest distance of its gradient (`fit`)."""
    needed: float
    """Log-likelihood of the true samples, or largest distance that counts as equal."""
    of_likelihood: bool
    """Whether the numbers are log-likelihoods."""


class Doubt(NamedTuple):
    """Reason why results do not show that an arm holds, with the attack's message if an attack gave the reason."""

    reason: Reason
    message: str = ""
    gap: Gap | None = None


class Attacker(NamedTuple):
    """Attack with the knowledge of its attacker."""

    attack: str
    """Name of the attack in results: its family, or its title without a family."""
    knowledge: tuple[str, ...]


class Closest(NamedTuple):
    """Maximum of the leading metric that attackers with some knowledge reach."""

    knowledge: tuple[str, ...]
    value: float


class NoResult(NamedTuple):
    """Attack without a usable result, with the reason."""

    attack: str
    status: str
    message: str
    missing: Missing | None
    """Set if the attack finished (status ok)."""


class NotRun(NamedTuple):
    """Attack that was not run for lack of time."""

    attack: str
    with_knowledge: tuple[tuple[str, ...], ...]
    """Attackers that did not run it; empty if no attacker ran it."""
    only: tuple[tuple[str, ...], ...] = ()
    """Attackers that ran it."""


class Pending(NamedTuple):
    """Attack whose missing result would decide."""

    attack: str
    works: bool
    """Whether the attack succeeds without a defence; otherwise it was not run there."""


class Overtaken(NamedTuple):
    """Attack that succeeded against a defence, but not on the undefended arm of the finding."""

    by: Attacker
    arm: str
    batch: int
    here: Elsewhere


class PartColumn(NamedTuple):
    """Column of records that an attack recovers more often than the best constant does."""

    name: str
    share: float
    """Share of the records whose value was recovered."""
    baseline: float | None
    """Share for which the best constant is right; None in a redacted copy."""


@dataclass(frozen=True)
class Part:
    """Parts of samples (columns, tokens or pixels) that one attack recovers."""

    attack: str
    """Title of the attack in the scenario."""
    recovered: float
    """Share of the parts recovered, mean over the partly recovered samples."""
    baseline: float | None
    """Mean share of these samples' parts recovered without the update (`rayfed.metrics.parts.parts`); None for columns
    in a redacted copy."""
    samples: int
    """Number of partly recovered samples."""
    columns: tuple[PartColumn, ...] = ()
    """Columns recovered more often than by the best constant, sorted by difference, largest first."""
    rows: tuple[Any, ...] = unstored(())
    """Rows of these samples in the table `attacks`."""


@dataclass(frozen=True)
class RecoveredLabels:
    """Labels that the best attack recovers that was not given them, compared with guesses by label frequencies."""

    attack: str
    """Title of the attack in the scenario."""
    share: float
    """Share of the labels recovered."""
    commonest: float
    """Share recovered by guessing the most common label for every sample; 0 if no label is known."""
    evenly: float
    """Share recovered by guessing all labels equally often; 0 if unknown."""
    in_proportion: float
    """Share recovered by guessing labels in the proportions of all other clients; 0 without other clients."""
    updates: int
    """Number of attacked updates."""
    whole: int
    """Updates of several samples with all labels recovered; 0 if this may be due to chance."""
    attempts: int
    """Number of attackers times repeats, among which this result may be the best."""
    share_by_chance: bool
    """Whether the share may be due to chance, as the best of all attempts."""

    @property
    def best_guess(self) -> float:
        """Return the share of labels recovered by the best of the three guesses."""
        return max(self.commonest, self.evenly, self.in_proportion)

    @property
    def by_chance(self) -> bool:
        """Return whether the result may be due to chance: as a share, and on every single update."""
        return self.share_by_chance and not self.whole

    @property
    def beyond(self) -> bool:
        """Return whether more labels were recovered than by the best guess."""
        return self.commonest > 0 and (self.best_guess < self.share or self.whole > 0)


@dataclass(frozen=True)
class Finding:
    """Result of all attacks on gradients of one batch size in one arm: a row of the table `verdicts`.

    An arm on which no attack that reconstructs samples was run has one row without a batch size.
    """

    arm: str = key("name of the arm")
    batch: int = column(
        "number of samples in an attacked update; null if no attack that reconstructs samples was run", "batch_size"
    )
    state: State = column(
        "'leaks', 'not measured', 'inconclusive', 'not reconstructed' or 'nothing to attack'; for an arm, the first of "
        "these over its batch sizes counts",
        "verdict",
    )
    doubt: Doubt | None = inlined(
        reason="why the results do not decide, such as 'not_converged' (`rayfed.core.reasons.Reason`)",
        message="message of that attack, if any",
    )
    unfinished: bool = column("whether the run did not finish, so that only leaks are known", default=False)
    metric: str | None = column("name of the leading metric of the samples")
    best: float | None = column(
        "maximum of the leading metric among leaks, or among all reconstructions if nothing leaked", "max_similarity"
    )
    mean: float | None = column(
        "mean of the leading metric over the samples, of the best reconstruction of each", "mean_similarity"
    )
    gain: float | None = column("difference of `max_similarity` to the baseline", "above_baseline")
    by: Attacker | None = inlined(
        attack="attack with the value `max_similarity`: its family, or its title without one",
        knowledge="grants of that attack's threat model",
    )
    leaked: int = column("number of samples that leaked to at least one attack", default=0)
    samples: int = column("number of attacked samples", default=0)
    most: float | None = column("maximum difference of a leak to the baseline", "max_above_baseline")
    alike: int = column(
        "number of samples that did not leak because a public sample is as close as the reconstruction",
        "as_close_to_public",
        default=0,
    )
    shown: int | None = column(
        "number of samples that leak without a defence, to an adaptive attack if any was run on the arm; null for an "
        "arm without a defence",
        "leaked_undefended",
    )
    closest: tuple[Closest, ...] = column("maximum of the leading metric by the attacker's knowledge", default=())
    part: Part | None = inlined(
        "parts_",
        recovered="share of the samples' parts (columns, tokens or pixels) that one attack recovers; null if this may "
        "be due to chance",
        baseline="share of these parts recovered without the update",
        samples="number of partly recovered samples",
        attack="title of the attack that recovers the parts",
        columns="columns recovered more often than by the best constant",
    )
    part_by: Attacker | None = column("attack that recovers the parts, with its knowledge", "parts_by")
    labels: RecoveredLabels | None = inlined(
        "labels_",
        share="share of labels recovered by the best attack that was not given the labels",
        commonest="share recovered by guessing the most common label for every sample",
        evenly="share recovered by guessing all labels equally often",
        in_proportion="share recovered by guessing labels in the proportions of all other clients",
        updates="number of updates from which labels were recovered",
        whole="number of updates of several samples with all labels recovered; 0 if this may be due to chance",
        attempts="number of attackers times repeats, among which this attack is the best",
        share_by_chance="whether the share may be due to chance, as the best of all attempts",
        attack="title of the attack that recovers the labels",
    )
    targets: float | None = column(
        "mean absolute error of the targets recovered by the best attack that was not given them; regression only",
        "target_error",
    )
    guessed: float | None = column("mean absolute error of guessing the median; regression only", "target_baseline")
    no_results: tuple[NoResult, ...] = column(
        "attacks that returned no result, with the reasons; if none did, also attacks that did not apply", default=()
    )
    not_run: tuple[NotRun, ...] = column("attacks that were not run for lack of time", default=())
    short_searches: tuple[str, ...] = column("searches that ran the minimum of evaluations", default=())
    failed: tuple[str, ...] = column("attacks that raised an error on some victim", default=())
    pending_attacks: tuple[Pending, ...] = column("attacks whose missing result would decide", default=())
    overtaken: Overtaken | None = column(
        "for an undefended arm without a leak: an attack that succeeded against a defence, and its result on this arm"
    )
    code_of_user: bool = column(
        "whether nothing was reconstructed and the attacker ran code of a user's defence on its own gradients only",
        default=False,
    )

    @property
    def reason(self) -> Reason | None:
        """Return the reason why the results do not decide; None if they do, or for another reason."""
        return self.doubt.reason if self.doubt else None

    @property
    def baseline(self) -> float | None:
        """Return the leading metric of the best guess for the sample of `best`, without the update."""
        if self.best is None or self.gain is None:
            return None
        baseline = self.best - self.gain
        return baseline if self.metric == "psnr" else max(baseline, 0.0)  # a share is at least 0, but for rounding

    @property
    def targets_beyond(self) -> bool:
        """Return whether targets were recovered with a smaller error than by guessing the median."""
        return self.targets is not None and self.guessed is not None and self.targets < self.guessed
