"""DP-FedAvg: clip every client's update and add noise to their sum, which hides whether a client took part.

Sources: McMahan et al. 2018, 'Learning differentially private recurrent language models'; Geyer et al. 2017.

**Noise added by clients.** Secure aggregation adds whole numbers, so client i of N sends floor(x_i + n_i + 1/2), in
units of a step s, with n_i Gaussian of deviation z C / sqrt(N). Rounding each term is not post-processing of the sum,
and the noise of the sum is not exactly Gaussian. The victim v is hidden all the same. Let m clients be honest and
present, including v; the terms of the other clients are known and omitted. Take any whole numbers k_i for the honest
clients except v, with sum k. Rounding commutes with adding whole numbers, so the sum with x_v in it is

    sum over i of round(w_i),  w_v = x_v - k + n_v,  w_i = x_i + k_i + n_i,

and the sum with zero instead of x_v is the same function of w_v = n_v, w_i = x_i + n_i. By the data-processing
inequality the two sums are at least as hard to distinguish as m independent Gaussians, of which v's is shifted by x_v -
k and each other one by k_i. This equals one Gaussian of deviation z C / sqrt(N), shifted by the root of |x_v - k|^2 +
sum of |k_i|^2.

With y = x_v / m in one coordinate and f = y - floor(y), let r of the k_i be ceil(y) and the rest floor(y), with r the
integer nearest to (m - 1) f. The shifts sum to m y, so their squares sum to m y^2 plus the squared deviations from y.
With e = r - (m - 1) f, |e| <= 1/2, those are e^2 for v and (m - 1) f (1 - f) + e (1 - 2f) for the other clients. In
total, with t = |1 - 2f|, at most (m - 1)(1 - t^2) / 4 + t / 2 + 1/4 <= (m + 1) / 4 for m >= 2, and 0 for m = 1. In d
coordinates:

    shift^2 <= C^2 / m + d s^2 (m + 1) / 4

in the units of C: a multiplier of z sqrt(m / N) / sqrt(1 + d m (m + 1) s^2 / (4 C^2)). Between noise and sum, values
must not be rounded or clipped again. Arithmetic modulo 2^64 is post-processing, as it could equally be applied to the
sum. Floating-point noise is treated as exactly Gaussian, as everywhere; here it has 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil, log2, sqrt
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from rayfed.aggregation.base import AnyAggregation
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.noisy_sum import NoisySum
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.defences.declarations import normal_log_likelihood
from rayfed.defences.noise import clipped
from rayfed.defences.private import Private
from rayfed.errors import UserError
from rayfed.privacy.accountant import Release
from rayfed.privacy.printing import format_lower, format_upper
from rayfed.privacy.sampling import add_noise, sample_gaussian
from rayfed.privacy.spending import PrivacySetting, Spending
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class DpFedAvg(Private):
    """Clip updates and add noise to their sum, which hides each client's participation.

    The guarantee holds against anyone who sees the global weights. Clients clip their updates to an L2 norm. The
    unweighted sum gets Gaussian noise of standard deviation `noise_multiplier * clip` and is divided by the expected
    number of clients. Single updates are not protected from the server, unless `noise: clients` is combined with
    `protection: secure_aggregation`. This must be the last defence of its arm, because a later one could exceed the
    clip bound.
    """

    vectorises: ClassVar[bool] = True
    post_processes: ClassVar[bool] = True

    noise: Literal["server", "clients"] = "server"
    """`server`: the server adds the noise to the sum. `clients`: each of a fixed number of clients adds a part of the
    noise, for use with `protection: secure_aggregation`, without which the server sees single updates. Both guarantees
    hold only against those who see sums: a single update has a part of the noise, or none."""
    colluders: Annotated[int, Field(ge=1)] = 1
    """Number of clients that may share their knowledge with the adversary: the clients sampled, and their parts of the
    noise. The guarantee protects all other clients."""

    @property
    def needs_all(self) -> str | None:
        """Return why no client may drop out if clients add the noise (each adds one part); None if the server does."""
        return "the client's part of the noise would be missing from the sum" if self.noise == "clients" else None

    @property
    def adds_noise(self) -> bool:
        """Return whether clients add noise to their updates; the server's noise is not in an update."""
        return self.noise == "clients" and self.noise_multiplier != 0

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the clipped update."""
        return clipped(tensors, self.clip, 2)

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        """Return the log density of each sent value: normal, with the variance of rounding to steps added."""
        part = self._part(task)
        return normal_log_likelihood(sent, expected, sqrt(part**2 + step_of(self.clip, part) ** 2 / 12))

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip the client's update, and add the client's part of the noise."""

        def update(task: Task) -> Update:
            sent = next(task)
            if self.noise == "server":
                return replace(sent, tensors=self.transform(task, sent.tensors), bits=32)
            tensors = self.transform(task, {n: t.double() for n, t in sent.tensors.items()})
            part = self._part(task)
            step = step_of(self.clip, part)
            noisy = add_noise(tensors, part, partial(sample_gaussian, dtype=torch.float64), task.generator)
            rounded = {n: (torch.floor(t / step + 0.5) * step).to(sent.tensors[n]) for n, t in noisy.items()}
            return replace(sent, tensors=rounded, bits=32)

        return update

    def _part(self, task: Task) -> float:
        """Return the standard deviation of one client's part of the noise."""
        return self.deviation / sqrt(task.clients_per_round)

    def refuses(self, later: Sequence[Defence]) -> str | None:
        """Return why no later defence may follow `dp_fedavg`, in words; None if there is no later defence."""
        return "this defence must come last, because a later defence could exceed the clip bound" if later else None

    def wrap_aggregation(self, next: AnyAggregation, clients: int) -> AnyAggregation:
        """Replace the rule `fedavg` by a noisy sum with equal weights. Raises `UserError` for other rules."""
        if type(next) is not FedAvg:
            raise UserError(
                f"dp_fedavg needs the mean of the updates, but {type(next).__name__} computes no mean: use fedavg"
            )
        if self.noise == "server":
            return NoisySum(clients=clients, deviation=self.deviation)
        return NoisySum(clients=clients, deviation=0.0, step=step_of(self.clip, self.deviation / sqrt(clients)))

    def released(self, setting: PrivacySetting, multiplier: float) -> tuple[Release, ...]:
        """Return the releases of a run for privacy accounting: one noisy sum of updates per round."""
        return (self._account(setting, multiplier)[0],)

    def spends(self, setting: PrivacySetting) -> Spending:
        """Return the privacy accounting of all rounds of a run."""
        assert self.noise_multiplier is not None
        release, adjacency, against, how = self._account(setting, self.noise_multiplier)
        return Spending(
            (release,),
            self.delta,
            unit="client",
            adjacency=adjacency,
            against=against,
            mechanism=f"Gaussian noise of {format_lower(self.noise_multiplier)} times the clip bound on the sum of "
            f"each round, {len(setting.clients)} clients, {how}",
        )

    def _account(self, setting: PrivacySetting, multiplier: float) -> tuple[Release, str, str, str]:
        """Return the release, with the adjacency, adversary and sampling in words."""
        return (self._of_clients if self.noise == "clients" else self._of_server)(setting, multiplier)

    def _of_clients(self, setting: PrivacySetting, multiplier: float) -> tuple[Release, str, str, str]:
        """Return the accounting of noise added by clients, proved in the module's docstring."""
        drawn = setting.clients_per_round
        honest = drawn - setting.missing - self.colluders
        if setting.client_sampling == "poisson" or honest < 1:
            raise UserError(
                "dp_fedavg: `noise: clients` needs a fixed number of clients per round, larger than the number that "
                f"collude or drop out ({self.colluders} + {setting.missing}): use `noise: server`, or change "
                "federation.sampling, clients_per_round, `colluders` or the drop-outs"
            )
        step = step_of(self.clip, self.clip * multiplier / sqrt(drawn))
        # The server knows which clients were sampled, and each client knows its own part of the noise.
        rest = multiplier_of_rounded(multiplier, drawn, honest, setting.values, step / self.clip)
        how = (
            f"in {drawn} parts, of which {honest} count ({self.colluders} known to colluders, {setting.missing} lost "
            f"by drop-outs); {setting.values} values, each rounded to steps of {format_upper(step)}, which is "
            "accounted for"
        )
        return Release("gaussian", rest, setting.most_rounds), _ZEROED, self._who_sees_sums(setting.masked), how

    def _who_sees_sums(self, masked: bool) -> str:
        """Return the adversary for noise added by clients, and whether it includes the arm's own server."""
        known = f"up to {counted(self.colluders)} colluding"
        server = (
            "this includes the server under secure aggregation if it follows the protocol (honest but curious)"
            if masked
            else "NOT this arm's server, which sees single updates (no `protection: secure_aggregation`)"
        )
        return f"anyone who sees sums of updates but no single update, with {known}; {server}"

    def _of_server(self, setting: PrivacySetting, multiplier: float) -> tuple[Release, str, str, str]:
        """Return the accounting of noise added by the server."""
        drawn, clients, rounds = setting.clients_per_round, len(setting.clients), setting.rounds
        anybody = "anyone who sees the global weights, with any number of the other clients, but not the server"
        if setting.client_sampling == "poisson":
            rate = drawn / clients
            how = f"Poisson sampling with probability {format_upper(rate)}"
            return Release("gaussian", multiplier, rounds, rate), _ZEROED, anybody, how
        if drawn == clients:
            return Release("gaussian", multiplier, rounds), _ZEROED, anybody, "all of them in every round"
        honest = clients - self.colluders
        if honest < 1:
            raise UserError(
                f"dp_fedavg: colluders: {self.colluders} of {clients} clients leaves no client to protect; set fewer"
            )
        # Colluders know whether they were sampled: if j of them were, so were drawn - j of the `honest` others. The
        # bound grows with that share, so j = 0 is the worst case in every round. Replacing one client by another
        # shifts the sum by up to twice the clip bound.
        release = Release("gaussian", multiplier / 2, rounds, drawn=(drawn, honest) if drawn < honest else None)
        against = f"anyone who sees the global weights, with up to {counted(self.colluders)} colluding"
        adjacency = "each single client (replace-one adjacency)"
        return release, adjacency, f"{against}, but not the server", f"{drawn} sampled without replacement"


def step_of(clip: float, part: float) -> float:
    """Return the step to which clients round values that have noise of standard deviation `part`.

    The step is a power of two such that 32-bit floats represent all its multiples up to the clip bound plus 18
    deviations. Secure noise (half the sum of four Box-Muller samples from 53 bits) reaches 17.2 deviations, other noise
    less.
    """
    return 2.0 ** (ceil(log2(clip + 18 * part)) - 24)


def multiplier_of_rounded(multiplier: float, parts: int, honest: int, values: int, step: float) -> float:
    """Return the noise multiplier of a sum of rounded noise parts, of which only `honest` parts are trusted.

    `step` is in units of the clip bound. The proof is in the module's docstring.
    """
    return multiplier * sqrt(honest / parts / (1 + values * honest * (honest + 1) * step**2 / 4))


_ZEROED = "each single client (zero-out adjacency)"


def counted(colluders: int) -> str:
    """Format a number of clients in words, such as '2 clients'."""
    return f"{colluders} client{'s' if colluders > 1 else ''}"
