"""Audit of privacy accounts with canaries: empirical lower bounds on the epsilon of each mechanism.

The defences of an arm are run by the code of ordinary runs: sampling of clients and samples, local steps, clipping,
noise and sums. Only the samples differ. Each unit that the account protects (a sample, or a client with all its
samples) is a canary. Its gradient is orthogonal to all other gradients and far beyond the clip bound, so it changes the
observation as much as the account allows. Each canary is present with probability 1/2. An absent canary contributes
nothing under zero-out adjacency, and the opposite gradient under replace-one adjacency. The score of a canary is the
projection of all observations on its gradient. Under Laplace noise the projection of each round is clipped to the
contribution of one canary, which gives the likelihood ratio. The observation is that of the account's adversary: the
updates of a client, or the noisy sums of all clients.

The adversary knows all other units, and canaries are orthogonal. Therefore the scores are almost independent, and one
run has as many trials as canaries (Steinke, Nasr and Jagielski 2023, section 4; canary clients: Andrew et al. 2023,
algorithm 1). A run with too few canaries is repeated with other random numbers.

The gradients of canaries change their sign from round to round, as gradients of records may. Noise that is sampled once
and reused in every round cancels then, and is detected.
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
from rayfed.core import seeds
from rayfed.core.documents import dump_yaml, load_yaml
from rayfed.data.base import Dataset
from rayfed.data.partitions.base import Parts
from rayfed.defences.base import Defence
from rayfed.errors import UserError
from rayfed.evidence.empirical_epsilon import EmpiricalEpsilon, bound_epsilon
from rayfed.gradients import buffers_of, weights_of
from rayfed.privacy.sampling import make_generator
from rayfed.privacy.spending import Spending
from rayfed.scenario import DefenceSpec, Scenario, resolve
from rayfed.simulation.account import Account
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import aggregation_of
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.inputs import Inputs
from rayfed.update import Named

_ARM = "audited"
_MOST = 1000
"""Maximum number of canaries per client. Each needs one coordinate of the update."""
_FEWEST = 256
"""Minimum number of coordinates, from which the standard deviation of the noise is estimated."""
_BEYOND = 1e6
"""Length of a canary's gradient, far beyond any clip bound."""


class Canaries(nn.Module):
    """Model whose gradient has one nonzero coordinate per layer; the input selects the coordinate and the sign.

    Inputs (N, 1, 1, 4) in [0, 1] are bytes: three for the index of the coordinate, and one for the sign (0: negative,
    1: zero, 2: positive). Outputs (N, 2) are linear in the weights, so the gradient does not depend on the weights.
    """

    def __init__(self, coordinates: int, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(coordinates)) for _ in range(layers)])
        self.sign: Tensor
        self.register_buffer("sign", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs (N, 2); the sum of a sample's outputs is its loss."""
        parts = (inputs.flatten(1) * 255).round()
        place = parts[:, :3] @ torch.tensor([1.0, 256.0, 65536.0], device=parts.device)
        places = torch.arange(len(self.weights[0]), device=parts.device)
        way = (parts[:, 3:] - 1) * (place[:, None] == places) * (self.sign * _BEYOND)
        total = sum(way @ weight for weight in self.weights)
        return torch.stack([total, torch.zeros_like(total)], 1)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a batch: the sum of each sample's outputs, averaged over the batch."""
    return outputs.sum(1).mean()


@dataclass(frozen=True)
class CanaryAudit:
    """Result of a canary audit for one privacy mechanism of an arm: an empirical lower bound on epsilon."""

    arm: str
    defence: str
    unit: str
    adjacency: str
    delta: float
    canaries: int
    runs: int
    seconds: float
    """CPU seconds of the process."""
    found: EmpiricalEpsilon


@dataclass
class _Scores:
    present: list[float] = field(default_factory=list)
    absent: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.present) + len(self.absent)


def audit_canaries(inputs: Inputs, canaries: int) -> Iterator[CanaryAudit]:
    """Yield the result of an audit with at least `canaries` canaries for each privacy mechanism that has an account.

    Raises `UserError` if no arm has a finite epsilon.
    """
    there = False
    for account in inputs.accounts:
        rounds = inputs.limits[account.name]
        for place, (spec, spent, promised) in account.mechanisms(rounds).items():
            there = True
            if promised.epsilon == float("inf"):
                raise UserError(
                    f"arm '{account.name}': {spec.name} has no noise, so its epsilon is infinite: add noise"
                )
            began, scores, runs = process_time(), _Scores(), 0
            while len(scores) < canaries:
                _Run(inputs, account, place, spent, runs).run(rounds, scores)
                runs += 1
            found = bound_epsilon(scores.present, scores.absent, spent, inputs.scenario.privacy.accountant)
            about = (account.name, spec.name, spent.unit, spent.adjacency, spent.delta)
            yield CanaryAudit(*about, len(scores), runs, process_time() - began, found)
    if not there:
        raise UserError("no arm has an (epsilon, delta) guarantee: add a defence that gives one, such as dp_sgd")


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
        # The largest change under an L1 bound is in one value; under L2 bounds per layer it is in all layers.
        noises = [release for release in spent.releases if release.noise == "laplace"]
        self.reach = min((1 / (sqrt(8) * release.multiplier) for release in noises), default=inf)
        """Maximum score of one round, in standard deviations of its noise: sqrt(2) times the Laplace scale."""
        model = {"coordinates": max(units, _FEWEST), "layers": 1 if noises else account.setting(1).layers}
        self.scenario = _scenario(inputs.scenario, account, account.arm.spec.defences[place], model, number)
        data, parts = self._dealt()
        self.runtime = ClientRuntime(self.scenario, data, parts, torch.device("cpu"))
        self.found: dict[tuple[int, int], float] = {}
        """(Client, index of the canary) -> score so far."""

    def _dealt(self) -> tuple[Dataset, Parts]:
        """Return the canaries as samples, and the indices of each client; samples beyond `_MOST` are not canaries."""
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
        return data, Parts.from_indices([np.flatnonzero(owner == client) for client in range(len(self.sizes))])

    def run(self, rounds: int, scores: _Scores) -> None:
        """Run the training rounds, and add the scores of all present and absent canaries to `scores`."""
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
        draws = make_generator(key, self.scenario.privacy.secure)
        if drawn := plan.drawn_clients(self.scenario, sent.round):
            partial, _ = self.runtime.cohort(_ARM, sent, drawn, {})
            yield list(self.there), rule.combine(partial, draws)[0]
        else:
            yield list(self.there), rule.idle(sent.weights, draws)


def _scenario(
    given: Scenario, account: Account, mechanism: DefenceSpec, model: dict[str, int], number: int
) -> Scenario:
    """Return the scenario of a canary run: training and aggregation of the arm, with one of its mechanisms."""
    document: dict[str, Any] = load_yaml(given.dump())
    arm = given.played[account.name].model_dump(mode="json") if given.arms else {}
    kept = {name: value for name, value in arm.items() if name in ("training", "server", "aggregation")}
    document["arms"] = {_ARM: kept | {"defences": [mechanism.model_dump(mode="json")]}}
    document |= {"defences": [], "opponents": {}, "attacks": [], "sweep": None, "seed": given.seed + number}
    document |= {"model": {"name": f"{__name__}:Canaries", **model}, "loss": {"name": f"{__name__}:total"}}
    document["federation"] |= {"malicious": None, "protection": None, "validation": 0}
    document["data"].pop("public", None)
    return scenarios.parse(dump_yaml(document))
