"""Audit of privacy accounts with canaries: empirical lower bounds on the epsilon of each mechanism.

What an arm's defence does is played as a run plays it: draws of clients and samples, local steps, clip, noise, sums, by
the same code. Only the samples are others: each unit that the account hides (a sample; a client with all its samples)
is a canary with a gradient of its own, orthogonal to all others' and far beyond the clip bound, so that it moves what
is seen as far as the account allows. A coin says of each whether it is there: under zero-out adjacency it contributes
nothing otherwise, under replace-one adjacency the opposite. Its score is how far what is seen of all rounds goes its
way; under Laplace noise no further, in each round, than one canary moves it, which is the likelihood ratio.
What is seen is what the account is against: the client's updates, or the sums of all clients' with the server's noise.

All other units are known to the adversary, and their canaries orthogonal, so the scores of many canaries are as good as
independent, and one run has as many trials as canaries (Steinke, Nasr and Jagielski 2023, section 4; canary clients:
Andrew et al. 2023, algorithm 1). Where it has too few, the run is played again with other randomness.

The canaries' gradients change their sign from round to round, as a record's gradients may: noise that is drawn once and
used in every round cancels then, and is caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, sqrt
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed import scenario as scenarios
from rayfed import seeds
from rayfed.analysis.shown import Shown, shown
from rayfed.client import plan
from rayfed.client.arm import aggregation_of
from rayfed.client.runtime import ClientRuntime
from rayfed.client.sent import Sent
from rayfed.data.base import Dataset
from rayfed.data.partitions.base import Parts
from rayfed.defences.base import Defence
from rayfed.documents import dump_yaml, load_yaml
from rayfed.engine.account import Account
from rayfed.engine.inputs import Inputs
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, weights_of
from rayfed.privacy.sampling import generator
from rayfed.privacy.spending import Spending
from rayfed.scenario import DefenceSpec, Scenario, resolve
from rayfed.update import Named

_ARM = "audited"
_MOST = 1000
"""Most canaries of one client: a coordinate of every update for each."""
_FEWEST = 256
"""Fewest coordinates, by which the width of the noise is estimated."""
_BEYOND = 1e6
"""Length of a canary's gradient, far beyond any clip bound."""


class Canaries(nn.Module):
    """Model whose gradient is the coordinate, in every layer, and the sign that its input names.

    Inputs (N, 1, 1, 4) in [0, 1] are bytes: three of the coordinate's number, and 0, 1 or 2 for the other way, nothing
    and its way. Outputs (N, 2) are linear in the weights, so the gradient is the same at all weights.
    """

    def __init__(self, coordinates: int, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(coordinates)) for _ in range(layers)])
        self.sign: Tensor
        self.register_buffer("sign", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs (N, 2), whose sum is the loss."""
        parts = (inputs.flatten(1) * 255).round()
        place = parts[:, :3] @ torch.tensor([1.0, 256.0, 65536.0], device=parts.device)
        places = torch.arange(len(self.weights[0]), device=parts.device)
        way = (parts[:, 3:] - 1) * (place[:, None] == places) * (self.sign * _BEYOND)
        total = sum(way @ weight for weight in self.weights)
        return torch.stack([total, torch.zeros_like(total)], 1)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over a batch of the sum of each sample's outputs, as a loss."""
    return outputs.sum(1).mean()


@dataclass(frozen=True)
class Audited:
    """Result of the canaries for one mechanism of an arm."""

    arm: str
    defence: str
    unit: str
    adjacency: str
    delta: float
    canaries: int
    runs: int
    seconds: float
    """Seconds of the process, whatever else the machine does."""
    found: Shown


@dataclass
class _Scores:
    present: list[float] = field(default_factory=list)
    absent: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.present) + len(self.absent)


def audited(inputs: Inputs, canaries: int) -> Iterator[Audited]:
    """Yield the result of at least this many canaries for each accounted mechanism; raises `UserError` without one."""
    there = False
    for account in inputs.accounts:
        rounds = inputs.limits[account.name]
        for place, (spec, spent, promised) in account.mechanisms(rounds).items():
            there = True
            if promised.epsilon == float("inf"):
                raise UserError(f"arm '{account.name}': {spec.name} has no noise, and its epsilon no bound to audit")
            began, scores, runs = process_time(), _Scores(), 0
            while len(scores) < canaries:
                _Run(inputs, account, place, spent, runs).play(rounds, scores)
                runs += 1
            found = shown(scores.present, scores.absent, spent, inputs.scenario.privacy.accountant)
            about = (account.name, spec.name, spent.unit, spent.adjacency, spent.delta)
            yield Audited(*about, len(scores), runs, process_time() - began, found)
    if not there:
        raise UserError("no arm has an (epsilon, delta) to audit: add a defence that has one, such as dp_sgd")


class _Run:
    """One run of a mechanism on canaries."""

    def __init__(self, inputs: Inputs, account: Account, place: int, spent: Spending, number: int) -> None:
        self.account, self.spent, sizes = account, spent, inputs.parts.sizes
        self.signed = "replace-one" in spent.adjacency
        self.by_client = spent.unit == "client"
        self.draws = seeds.numpy_generator(inputs.scenario.seed, "canaries", account.name, place, number)
        self.sizes = np.ones_like(sizes) if self.by_client else sizes
        units = len(sizes) if self.by_client else min(int(sizes.max()), _MOST)
        self.defence: Defence = account.arm.defences[place]
        # An L1 norm is best spent on one value; an L2 norm on any, and one that bounds each layer on all of them.
        noises = [release for release in spent.releases if release.noise == "laplace"]
        self.reach = min((1 / (sqrt(8) * release.multiplier) for release in noises), default=inf)
        """Most that one answer counts, in standard deviations of its noise: sqrt(2) of a Laplace scale."""
        model = {"coordinates": max(units, _FEWEST), "layers": 1 if noises else account.setting(1).layers}
        self.scenario = _scenario(inputs.scenario, account, account.arm.spec.defences[place], model, number)
        data, parts = self._dealt()
        self.runtime = ClientRuntime(self.scenario, data, parts, torch.device("cpu"))
        self.found: dict[tuple[int, int], float] = {}
        """By client, and number of its canary, the score so far."""

    def _dealt(self) -> tuple[Dataset, Parts]:
        """Return the canaries as samples, and each client's indices; a client's canaries beyond `_MOST` are blank."""
        count = int(self.sizes.sum())
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        own = np.arange(count) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        place = owner if self.by_client else own
        there = self.draws.random(count) < 0.5
        way = np.where(there, 2, 0 if self.signed else 1)
        self.there = dict(zip(zip(owner.tolist(), place.tolist(), strict=True), there.tolist(), strict=True))
        if not self.by_client:
            way[place >= _MOST] = 1
            self.there = {key: value for key, value in self.there.items() if key[1] < _MOST}
        images = np.stack([place & 255, place >> 8 & 255, place >> 16 & 255, way], 1).astype(np.uint8)
        labels = np.zeros(count, np.int64)
        data = Dataset(images.reshape(-1, 1, 1, 4), labels, images[:2].reshape(-1, 1, 1, 4), labels[:2], ("0", "1"))
        return data, Parts.of([np.flatnonzero(owner == client) for client in range(len(self.sizes))])

    def play(self, rounds: int, scores: _Scores) -> None:
        """Play the rounds and add all canaries' scores."""
        self.found = dict.fromkeys(self.there, 0.0)
        seen = self._sums if self.defence.overrides("wrap_aggregation") else self._updates
        for round in range(rounds):
            sign = 1.0 - 2.0 * (round % 2)
            for keys, update in seen(self._sent(round, sign)):
                moved = torch.stack(list(update.values())).double().sum(0).numpy() / sqrt(len(update))
                width = float(moved.std()) or 1.0
                for key in keys:
                    self.found[key] += float(np.clip(sign * moved[key[1]] / width, -self.reach, self.reach))
        for key, score in self.found.items():
            (scores.present if self.there[key] else scores.absent).append(score)

    def _sent(self, round: int, sign: float) -> Sent:
        model = self.runtime.arm(_ARM).model
        return Sent(round, weights_of(model), {**buffers_of(model), "sign": torch.tensor(sign)})

    def _updates(self, sent: Sent) -> Iterator[tuple[list[tuple[int, int]], Named]]:
        """Yield each client's update of a round, with the keys of its canaries."""
        for client in plan.drawn_clients(self.scenario, sent.round):
            [update] = self.runtime.updates(_ARM, sent, [client], {})
            yield [key for key in self.there if key[0] == client], update.tensors

    def _sums(self, sent: Sent) -> Iterator[tuple[list[tuple[int, int]], Named]]:
        """Yield the server's noisy sum of a round's updates, with the keys of all canaries."""
        rule = aggregation_of(resolve(self.scenario)[_ARM])
        key = plan.server_key(self.scenario, _ARM, sent.round, [])
        draws = generator(key, self.scenario.privacy.secure)
        if drawn := plan.drawn_clients(self.scenario, sent.round):
            partial, _ = self.runtime.cohort(_ARM, sent, drawn, {})
            yield list(self.there), rule.combine(partial, draws)[0]
        else:
            yield list(self.there), rule.idle(sent.weights, draws)


def _scenario(
    given: Scenario, account: Account, mechanism: DefenceSpec, model: dict[str, int], number: int
) -> Scenario:
    """Return the scenario of a canary run: the arm's training and sums with one mechanism alone."""
    document: dict[str, Any] = load_yaml(given.dump())
    arm = given.played[account.name].model_dump(mode="json") if given.arms else {}
    kept = {name: value for name, value in arm.items() if name in ("training", "server", "aggregation")}
    document["arms"] = {_ARM: kept | {"defences": [mechanism.model_dump(mode="json")]}}
    document |= {"defences": [], "opponents": {}, "attacks": [], "sweep": None, "seed": given.seed + number}
    document |= {"model": {"name": f"{__name__}:Canaries", **model}, "loss": {"name": f"{__name__}:total"}}
    document["federation"] |= {"malicious": None, "protection": None, "validation": 0}
    document["data"].pop("public", None)
    return scenarios.parse(dump_yaml(document))
