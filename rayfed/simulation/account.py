"""Privacy account of an arm (one tested variant): the guarantees of its defences over a run, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from rayfed import registry
from rayfed.defences.base import Defence
from rayfed.defences.dp_fedavg import DpFedAvg, counted
from rayfed.defences.order import broken_by
from rayfed.errors import UserError
from rayfed.models.build import moves_buffers
from rayfed.privacy.accountant import CONVERSIONS, Guarantee, compute_guarantee
from rayfed.privacy.printing import format_lower, format_upper
from rayfed.privacy.spending import ClientWork, PrivacySetting, Spending
from rayfed.privacy.tradeoff import PRIORS, TradeOff
from rayfed.protections.base import Protection
from rayfed.samples import SampleSpec
from rayfed.scenario import AttackSpec, DefenceSpec, Scenario
from rayfed.scenario.system import System
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import Arm, aggregation_of
from rayfed.simulation.client.local import local_training

_COVERED_VIEWS = ("update", "gradient")
"""Views that show one client's updates or gradients after its defences."""
_COVERED_GRANTS = {"labels", "public", "defence", "code", "candidates"}
"""Grants that reveal only a victim's defences and its candidate samples or labels."""
_CHANCES = np.geomspace(1e-4, 1, 97).tolist()
"""Prior probabilities at which trade-off curves are evaluated."""


@dataclass(frozen=True)
class Account:
    """Privacy accountant of one arm (one tested variant of the federation) over a run."""

    scenario: Scenario
    arm: Arm
    samples: np.ndarray
    """(clients,) int64, number of samples of each client."""
    sample: SampleSpec

    @property
    def name(self) -> str:
        """Return the name of the arm that the account belongs to."""
        return self.arm.spec.name

    def setting(self, rounds: int) -> PrivacySetting:
        """Return the accountants' setting (clients, sampling, local steps) for the first `rounds` rounds."""
        s, training = self.scenario, self.arm.spec.training
        drawn = np.zeros_like(self.samples)
        for round in range(rounds):
            drawn[plan.drawn_clients(s, round)] += 1
        alike, which = np.unique(np.stack([self.samples, drawn]), axis=1, return_inverse=True)
        works, protection = [], self._protection
        trained = {name: p.numel() for name, p in self.arm.model.named_parameters() if p.requires_grad}
        for n, times in alike.T.tolist():
            local = local_training(n, training)
            works.append(ClientWork(n, local.batch_size or n, local.steps, times))
        return PrivacySetting(
            clients=tuple(works[i] for i in which.reshape(-1)),
            clients_per_round=s.clients_per_round,
            rounds=rounds,
            client_sampling=s.federation.sampling,
            sample_sampling=training.sampling,
            layers=len(trained),
            values=sum(count for name, count in trained.items() if name not in self.arm.private),
            missing=protection.missing if protection else 0,
            masked=protection is not None and protection.masks,
        )

    def calibrated(self, rounds: int) -> Account:
        """Return a copy with the noise calibrated to the target epsilons of the arm's defences over `rounds` rounds."""
        if not self._accounted:
            return self
        setting, accountant = self.setting(rounds), self.scenario.privacy.accountant
        defences = tuple(defence.calibrated(setting, accountant) for defence in self.arm.defences)
        before = zip(self.arm.spec.defences, self.arm.defences, defences, strict=True)
        spec = replace(self.arm.spec, defences=[_respecified(*each) for each in before])
        return replace(self, arm=replace(self.arm, spec=spec, defences=defences))

    def epsilon(self, rounds: int) -> float:
        """Return the largest epsilon of an arm's privacy guarantees after `rounds` rounds; 0 without a guarantee."""
        return max((found.epsilon for _, _, found in self._guarantees(rounds)), default=0.0)

    def rounds_within(self, budget: float) -> int:
        """Return how many rounds fit into a privacy budget (epsilon); all rounds if the arm has no privacy mechanism.

        Raises `UserError` if the first round exceeds the budget, or if a mechanism has no valid guarantee.
        """
        if self._broken:
            raise UserError(
                f"privacy.budget: arm '{self.name}' cannot have a budget: {next(iter(self._broken.values()))}"
            )
        low, high = 0, self.scenario.federation.rounds
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.epsilon(middle) <= budget else (low, middle - 1)
        if low == 0:
            raise UserError(
                f"privacy.budget: the first round of arm '{self.name}' spends an epsilon of "
                f"{format_upper(self.epsilon(1))}, more than {budget:g}: raise the budget, or add more noise"
            )
        return low

    def rows(self, rounds: int) -> list[dict[str, Any]]:
        """Return an arm's rows of the table `privacy`: its privacy guarantees, or the reason why it has none."""
        row: dict[str, Any] = {"arm": self.name, "rounds": rounds}
        guaranteed = [
            row
            | {"defence": defence, "epsilon": found.epsilon, "delta": found.delta, "accountant": found.accountant}
            | {name: getattr(spent, name) for name in ("unit", "adjacency", "against", "mechanism")}
            | {"conversion": CONVERSIONS[found.accountant], "note": self._caveat(spent)}
            | self._bounds(spent)
            for defence, spent, found in self._guarantees(rounds)
        ]
        broken = [row | {"defence": self._named[place][0], "note": note} for place, note in self._broken.items()]
        if guaranteed or broken:
            return guaranteed + broken
        return [row | {"note": "empirical: no defence of this arm has a guarantee" if self.arm.defences else None}]

    def _bounds(self, spent: Spending) -> dict[str, float]:
        """Return the bounds on reconstruction and membership inference that the releases imply, as shares."""
        curve = TradeOff.from_releases(spent.releases, self.scenario.privacy.accountant)
        return {f"rero_{n}": curve.at_most(1 / n) for n in PRIORS} | {"advantage": curve.advantage}

    def proved(self, attack: AttackSpec, trained: int) -> list[dict[str, Any]]:
        """Return an arm's rows of the table `proved`: trade-off curves of all that one attack observes of a victim.

        An attack sees `trained` rounds of training, and the further updates or gradients that it observes. The list is
        empty if no account covers the attack's view or grants.
        """
        covered = attack.observes in _COVERED_VIEWS and set(attack.knowledge) <= _COVERED_GRANTS
        if not covered or self.arm.spec.protection:
            return []
        beside = len(attack.rounds) * attack.averages * (1 + attack.earlier)
        rows = []
        for place, (name, defence) in enumerate(self._named):
            if place in self._broken or defence.overrides("wrap_aggregation"):
                continue
            curve = self._seen(defence, attack, trained, beside)
            if curve is None:
                continue
            found, spent = curve
            drawn = found.taking_part  # reconstructions are scored against samples that were in the batch
            key = {"arm": self.name, "attack": attack.title, "defence": name, "unit": spent.unit}
            for chance in _CHANCES:
                present = found.at_most(chance)
                another = drawn.at_most(chance)
                if "replace-one" not in spent.adjacency:
                    another = drawn.at_most(another)
                rows.append(key | {"chance": chance, "present": present, "another": another})
        return rows

    def _seen(
        self, defence: Defence, attack: AttackSpec, trained: int, beside: int
    ) -> tuple[TradeOff, Spending] | None:
        """Return the trade-off curve of training and further observations, with its spending.

        Returns None without a guarantee.
        """
        setting, used = self.setting(trained), self.scenario.privacy.accountant
        if attack.observes == "gradient":
            one = replace(
                setting, clients=(ClientWork(attack.batch_size, attack.batch_size, 1, 1),), sample_sampling="shuffle"
            )
            answer, spent = defence.spends(one), defence.spends(setting)
            if answer is None or spent is None:
                return None
            [release] = answer.releases
            extra = replace(release, count=release.count * beside)
            return TradeOff.from_releases(spent.releases, used).after([extra]), spent
        own = trained and attack.averages == 1 and not hasattr(registry.find("attacks", attack.name), "tamper")
        works = tuple(replace(work, rounds=work.rounds + (0 if own else beside)) for work in setting.clients)
        spent = defence.spends(replace(setting, clients=works))
        return None if spent is None else (TradeOff.from_releases(spent.releases, used), spent)

    def _caveat(self, spent: Spending) -> str | None:
        """Return a warning if a valid guarantee's delta is too large, else None."""
        units = int(self.samples.sum()) if spent.unit == "sample" else len(self.samples)
        if spent.delta * units < 1:
            return None
        return (
            f"delta {format_upper(spent.delta)} is at least 1/{units}, one over the number of {spent.unit}s: even a "
            f"mechanism that publishes each {spent.unit} with probability delta satisfies this; set delta well below "
            f"{format_lower(1 / units, 2)}"
        )

    def check(self) -> None:
        """Raise `UserError` if the account of a privacy mechanism is undefined for the run's settings."""
        _ = self._broken

    def mechanisms(self, rounds: int) -> dict[int, tuple[DefenceSpec, Spending, Guarantee]]:
        """Return the privacy mechanisms that have a valid guarantee, by position in the defence pipeline."""
        if not self._accounted:
            return {}
        setting, accountant = self.setting(rounds), self.scenario.privacy.accountant
        found = {}
        for place, (spec, defence) in enumerate(zip(self.arm.spec.defences, self.arm.defences, strict=True)):
            spent = None if place in self._broken else defence.spends(setting)
            if spent is not None:
                found[place] = (spec, spent, compute_guarantee(spent.releases, spent.delta, accountant))
        return found

    def _guarantees(self, rounds: int) -> list[tuple[str, Spending, Guarantee]]:
        """Return the valid guarantees with the names of their defences."""
        return [(spec.name, spent, found) for spec, spent, found in self.mechanisms(rounds).values()]

    @cached_property
    def _protection(self) -> Protection | None:
        spec = self.arm.spec.protection
        return spec.build() if spec else None

    @cached_property
    def _named(self) -> list[tuple[str, Defence]]:
        return [(spec.name, defence) for spec, defence in zip(self.arm.spec.defences, self.arm.defences, strict=True)]

    @property
    def _accounted(self) -> bool:
        """Return whether a defence may have a guarantee. Only then does an account sample the clients of all rounds."""
        return any(defence.overrides("spends", "calibrated") for defence in self.arm.defences)

    @cached_property
    def _broken(self) -> dict[int, str]:
        """Return why a mechanism's guarantee does not apply to the arm, by position in the pipeline."""
        if not self._accounted:
            return {}
        setting = self.setting(1)
        spending = enumerate(defence.spends(setting) for defence in self.arm.defences)
        found = [(place, self._obstacle(place, spent)) for place, spent in spending if spent is not None]
        return {place: f"no guarantee: {obstacle}" for place, obstacle in found if obstacle is not None}

    def _obstacle(self, place: int, spent: Spending) -> str | None:
        rule = aggregation_of(self.arm.spec)
        if rule.asynchronous:
            name = self.arm.spec.aggregation.name
            return (
                f"there is no account for {name}, because its clients are not sampled uniformly: "
                "each one replaces a client that has finished"
            )
        if rule.reveals:
            return f"under aggregation {type(rule).__name__}, clients send {rule.reveals} without noise"
        if moves_buffers(self.arm.model, self.sample):
            return "batch norm statistics are sent without noise; set model.batch_norm: eval to keep them fixed"
        if spent.unit == "client" and self.arm.defences[place].overrides("wrap_aggregation"):
            if chosen := _chosen_by_devices(self.scenario.federation.system):
                return f"there is no account, because clients are not sampled uniformly: {chosen}"
            if protection := self._protection:
                uncovered = _uncovered(self.arm.defences[place], protection, self.scenario.clients_per_round)
                if uncovered:
                    return uncovered
            if self.arm.spec.malicious:
                return "malicious clients may omit their part of the noise and exceed the clip bound"
        return broken_by(self._named, place, spent)


def _chosen_by_devices(system: System | None) -> str | None:
    """Return how devices influence which updates are in a round's sum, as text; None if they do not."""
    if system is None:
        return None
    ways = {
        "only available clients are sampled (available)": system.draws_from_some,
        "a round takes the first updates to arrive (over_selection)": system.selects,
        "clients that are late or drop out are excluded (deadline)": system.deadline is not None,
    }
    return ", and ".join(way for way, used in ways.items() if used) or None


def _uncovered(defence: Defence, protection: Protection, clients: int) -> str | None:
    """Return why a noisy sum's guarantee does not cover protected sums; None if it does."""
    if not (protection.masks and isinstance(defence, DpFedAvg)):
        return "encryption rounds updates after clipping, and the decrypting party may see the sum without noise"
    if defence.noise == "server":
        return (
            "masks round updates after clipping, and clients learn which clients were sampled; the account of "
            "the server's noise does not cover this: set `noise: clients`"
        )
    if not protection.withstands(clients, defence.colluders):
        return (
            f"{counted(defence.colluders)} and the server together can unmask a single update, or the sum of a few: "
            f"set a higher threshold, more neighbours, or fewer colluders"
        )
    return None


def _respecified(spec: DefenceSpec, defence: Defence, calibrated: Defence) -> DefenceSpec:
    """Return the scenario section of a defence, with its calibrated values."""
    if calibrated is defence:
        return spec
    values = {f.name: getattr(calibrated, f.name) for f in fields(calibrated)}  # type: ignore[arg-type]
    changed = {name: value for name, value in values.items() if value != getattr(defence, name)}
    return DefenceSpec(name=spec.name, **{k: v for k, v in (spec.parameters | changed).items() if v is not None})
