"""Estimated shares of members or people that attacks on a run identify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rayfed.core import reasons
from rayfed.core.reasons import Reason
from rayfed.evidence.arms import arm_spec, attack_knowledge, is_recorded, is_undefended
from rayfed.evidence.attack_status import has_failed
from rayfed.evidence.bounds import Bound, BoundedShare
from rayfed.evidence.checks import GateReason, ReasonKind
from rayfed.evidence.membership import RATES, Roc, compute_roc
from rayfed.evidence.rows import Knowledge, Row, Sample, code_given, get_sample_key, group_rows
from rayfed.evidence.verdicts import RunEvidence
from rayfed.metrics.roc import Estimate, share
from rayfed.metrics.top import TOP_1
from rayfed.store.finding import Doubt
from rayfed.store.schemas import INAPPLICABLE

_IN_DOUBT = (
    reasons.UNDECIDED
    | reasons.NOT_ADAPTIVE
    | {Reason.DEFENCES_UNKNOWN, Reason.ADAPTIVE_NOT_CONVERGED, Reason.ADAPTIVE_NOT_COMPARED}
)
"""Reasons of findings for which reconstructions are no evidence that people are not identified."""


class ShareEstimate(NamedTuple):
    """Share of members or people that attacks identify; None if there are too few candidates."""

    by: tuple[str, ...]
    """Titles of the attacks that identify them together."""
    estimate: Estimate | None


@dataclass(frozen=True)
class Shares(ABC):
    """Shares that attacks on a run reach, as far as one bound limits them."""

    evidence: RunEvidence
    bound: Bound

    @abstractmethod
    def rows_by_attack(self, arm: str) -> dict[str, list[Row]]:
        """Return the rows of an arm that the shares are computed from."""

    @abstractmethod
    def has_result(self, row: Row) -> bool:
        """Return whether the attack in a row has a result."""

    @abstractmethod
    def decides(self, row: Row) -> bool:
        """Return whether an arm needs a result of the attack where this row of an undefended arm has one."""

    @abstractmethod
    def by_attack(self, arm: str) -> dict[str, Estimate | None]:
        """Return the share of each attack with a result on an arm; None if there are too few candidates."""

    @abstractmethod
    def bounded_estimates(self, arm: str, attacks: Collection[str] | None = None) -> list[ShareEstimate]:
        """Return the shares that the bound limits; only those of `attacks` if given."""

    @abstractmethod
    def chance(self, rows: Sequence[Row]) -> float:
        """Return the share that an attack would reach in some rows by guessing."""

    @abstractmethod
    def missing_reason(self, row: Row) -> ReasonKind:
        """Return the reason why a finished attack has no result in a row."""

    @abstractmethod
    def estimate_reason(self, arm: str) -> GateReason:
        """Return the reason why an attack on an arm has no estimate."""

    @abstractmethod
    def doubt_reason(self, arm: str, exceeding: Collection[str]) -> GateReason | None:
        """Return the reason why the attacks are no evidence for the defences of an arm with defences; None if they are.

        `exceeding` are the attacks that exceed the bound without a defence.
        """

    def undefended_arms(self, arm: str) -> list[str]:
        """Return the arms without defences on the same model as an arm."""
        scenario = self.evidence.scenario
        bare = [one for one in self.evidence.arms if is_undefended(scenario, one)]
        return [one for one in bare if arm_spec(scenario, one).get("model") == arm_spec(scenario, arm).get("model")]

    def working_attacks(self, arm: str) -> set[str]:
        """Return the attacks that beat chance on the arms without defences on the same model."""
        working = set()
        for bare in self.undefended_arms(arm):
            rows = self.rows_by_attack(bare)
            for attack, estimate in self.by_attack(bare).items():
                if estimate and estimate.low > self.chance(rows[attack]):
                    working.add(attack)
        return working

    def do_not_apply(self, rows: Sequence[Row]) -> bool:
        """Return whether rows of an attack are no gap, because the attack does not apply to the arm."""
        return False

    def has_defences(self, arm: str) -> bool:
        """Return whether an arm has defences; a protection such as encryption is none."""
        return bool(arm_spec(self.evidence.scenario, arm).get("defences"))


class MembershipShares(Shares):
    """AUC of membership attacks, or share of members that they identify; each attack counts for itself."""

    def rows_by_attack(self, arm: str) -> dict[str, list[Row]]:
        """Return the rows of an arm with membership scores."""
        return _by_attack(self.evidence.inferences, arm, "auc")

    def has_result(self, row: Row) -> bool:
        """Return whether the attack in a row has scores."""
        return row["status"] == "ok" and bool(row["scores"])

    def decides(self, row: Row) -> bool:
        """Return whether the attack in a row of an undefended arm has scores."""
        return self.has_result(row)

    def by_attack(self, arm: str) -> dict[str, Estimate | None]:
        """Return the AUC or the share of identified members of each attack with scores on an arm."""
        return {attack: self._estimate(curve) for attack, curve in self._curves(arm).items()}

    def bounded_estimates(self, arm: str, attacks: Collection[str] | None = None) -> list[ShareEstimate]:
        """Return the share of each attack, or of each of `attacks`."""
        estimates = self.by_attack(arm)
        return [ShareEstimate((name,), one) for name, one in estimates.items() if attacks is None or name in attacks]

    def chance(self, rows: Sequence[Row]) -> float:
        """Return the AUC, or the true positive rate, of guessing."""
        return 0.5 if self.bound.name == BoundedShare.AUC else RATES[-1]

    def missing_reason(self, row: Row) -> ReasonKind:
        """Return the reason why a finished attack has no result in a row."""
        return ReasonKind.NO_SCORES

    def estimate_reason(self, arm: str) -> GateReason:
        """Return the reason why an attack on an arm has no estimate: no scores, or too few non-members."""
        for curve in self._curves(arm).values():
            if self._estimate(curve) is None:
                return GateReason(ReasonKind.FEW_NON_MEMBERS, curve)
        return GateReason(ReasonKind.NO_MEMBERSHIP_RESULT)

    def doubt_reason(self, arm: str, exceeding: Collection[str]) -> GateReason | None:
        """Return why no attack that exceeds the bound without a defence is adaptive here; None if one is.

        With `code` an attacker undoes the deterministic part of the defences, and with `defence` it defends its shadow
        clients. Without either it may miss members that the update reveals.
        """
        if is_recorded(self.evidence.scenario, arm):
            return GateReason(ReasonKind.DOUBT, Doubt(Reason.DEFENCES_UNKNOWN))
        reason = GateReason(ReasonKind.NO_ADAPTIVE_MEMBERSHIP)
        rows = self.rows_by_attack(arm)
        for attack in sorted(exceeding):
            if not attack_knowledge(self.evidence.scenario, attack) >= {Knowledge.DEFENCE, Knowledge.CODE}:
                continue
            undecided = [row for row in rows[attack] if row.get("reason") in reasons.UNDECIDED]
            if not undecided:
                return None
            doubt = Doubt(Reason(undecided[0]["reason"]), undecided[0].get("message") or "")
            reason = GateReason(ReasonKind.DOUBT, doubt)
        return reason

    def _curves(self, arm: str) -> dict[str, Roc]:
        curves = {attack: compute_roc(rows) for attack, rows in self.rows_by_attack(arm).items()}
        return {attack: curve for attack, curve in curves.items() if curve}

    def _estimate(self, curve: Roc) -> Estimate | None:
        return curve.auc if self.bound.name == BoundedShare.AUC else curve.true_positives[RATES[-1]]


class IdentityShares(Shares):
    """Share of samples whose person a recogniser identifies; attacks on the same samples count together."""

    def rows_by_attack(self, arm: str) -> dict[str, list[Row]]:
        """Return the rows of an arm with reconstructions."""
        return _by_attack(self.evidence.attacks, arm)

    def has_result(self, row: Row) -> bool:
        """Return whether the recogniser read the reconstruction in a row."""
        return row.get(TOP_1.name) is not None and not has_failed(row, self.evidence.closed_forms)

    def decides(self, row: Row) -> bool:
        """Return whether the person is identified in a row of an undefended arm."""
        return bool(row.get(TOP_1.name))

    def by_attack(self, arm: str) -> dict[str, Estimate | None]:
        """Return the share of samples whose person each attack reveals in any repeat; no result means not revealed."""
        shares: dict[str, Estimate | None] = {}
        for attack, rows in self.rows_by_attack(arm).items():
            if any(row.get(TOP_1.name) is not None for row in rows):
                identified = {get_sample_key(row) for row in rows if row.get(TOP_1.name)}
                shares[attack] = share(len(identified), len(set(map(get_sample_key, rows))))
        return shares

    def bounded_estimates(self, arm: str, attacks: Collection[str] | None = None) -> list[ShareEstimate]:
        """Return the share of people that any attack reveals among the samples of each attack, and which attacks do.

        Shares are over the samples of one attack, so attacks on other samples do not change them.
        """
        every = self.rows_by_attack(arm)
        titles = [title for title in self.by_attack(arm) if attacks is None or title in attacks]
        samples = {title: set(map(_sample_in_batch, every[title])) for title in titles}
        identified = {title: {_sample_in_batch(row) for row in every[title] if row.get(TOP_1.name)} for title in titles}
        anyone = set[Sample]().union(*identified.values())
        found = []
        for title, attacked in samples.items():
            hits = attacked & anyone
            whole = [(one,) for one in (title, *titles) if hits <= identified[one]]
            together = tuple(one for one in titles if hits & identified[one])
            found.append(ShareEstimate(whole[0] if whole else together, share(len(hits), len(attacked))))
        return found

    def do_not_apply(self, rows: Sequence[Row]) -> bool:
        """Return whether an attack that reconstructs samples does not apply to an arm."""
        return all(row["status"] == INAPPLICABLE for row in rows)

    def chance(self, rows: Sequence[Row]) -> float:
        """Return the share of people that guessing identifies, with one guess per repeat."""
        people = max((row["people"] or 0 for row in self.evidence.attacks), default=0)
        repeats = max(Counter(map(get_sample_key, rows)).values())
        return min(1.0, repeats / people) if people else 1.0

    def missing_reason(self, row: Row) -> ReasonKind:
        """Return the reason why a finished attack has no result in a row."""
        return ReasonKind.NOT_RECOGNISED

    def estimate_reason(self, arm: str) -> GateReason:
        """Return the reason why no attack on an arm has an estimate."""
        return GateReason(ReasonKind.NO_ATTACK_APPLIES)

    def doubt_reason(self, arm: str, exceeding: Collection[str]) -> GateReason | None:
        """Return why it is no evidence that no person was identified on an arm; None if an adaptive attack shows it.

        An attack that identifies people without a defence has to know the code of the defences, and its reconstructions
        must leave no doubt.
        """
        for finding in self.evidence.findings:
            if finding.arm == arm and finding.doubt and finding.reason in _IN_DOUBT:
                return GateReason(ReasonKind.DOUBT, finding.doubt)
        rows = self.rows_by_attack(arm)
        if any(all(map(code_given, rows.get(attack, [{}]))) for attack in self.working_attacks(arm)):
            return None
        return GateReason(ReasonKind.DOUBT, Doubt(Reason.NO_ADAPTIVE_ATTACK_WORKS))


def make_shares(evidence: RunEvidence, bound: Bound) -> Shares:
    """Return the shares that a bound limits."""
    return IdentityShares(evidence, bound) if bound.name == BoundedShare.IDENTITY else MembershipShares(evidence, bound)


def _sample_in_batch(row: Row) -> Sample:
    """Return a key of the row's sample that differs between batch sizes."""
    return row["batch_size"], *get_sample_key(row)


def _by_attack(table: Sequence[Row], arm: str, metric: str | None = None) -> dict[str, list[Row]]:
    own = [row for row in table if row["arm"] == arm and (metric is None or row["metric"] == metric)]
    return {attack: rows for (attack,), rows in group_rows(own, "attack").items()}
