"""DP-FedAvg: every client's update is clipped, and noise hides in their sum whether a client took part.

Sources: McMahan et al. 2018, 'Learning differentially private recurrent language models'; Geyer et al. 2017.

**Noise of clients.** Masks add whole numbers, so client i of N sends floor(x_i + n_i + 1/2), in units of a step s, with
n_i Gaussian of deviation z C / sqrt(N). Rounding each term is not post-processing of the sum, whose noise is not quite
Gaussian any more. It hides the victim v all the same. Let m clients be honest and present, v among them; the others'
terms are known and left out. Take any whole numbers k_i for the honest ones but v, with sum k. Rounding commutes with
whole numbers, so the sum with x_v in it is

    sum over i of round(w_i),  w_v = x_v - k + n_v,  w_i = x_i + k_i + n_i,

and the sum with zero in the place of x_v is the same function of w_v = n_v, w_i = x_i + n_i. So by the data-processing
inequality they are at least as hard to tell apart as m independent Gaussians of which v's is moved by x_v - k and the
others by k_i, that is, as one of deviation z C / sqrt(N) that is moved by the root of |x_v - k|^2 + sum of |k_i|^2.

With y = x_v / m in one coordinate and f = y - floor(y), let r of the k_i be ceil(y) and the rest floor(y), with r the
integer nearest to (m - 1) f. The shifts sum to m y, so their squares sum to m y^2 plus the squared deviations from y.
With e = r - (m - 1) f, |e| <= 1/2, those are e^2 for v and (m - 1) f (1 - f) + e (1 - 2f) for the others; in all, with
t = |1 - 2f|, at most (m - 1)(1 - t^2) / 4 + t / 2 + 1/4 <= (m + 1) / 4 for m >= 2, and 0 for m = 1. In d coordinates:

    moved^2 <= C^2 / m + d s^2 (m + 1) / 4

in the units of C: a multiplier of z sqrt(m / N) / sqrt(1 + d m (m + 1) s^2 / (4 C^2)). Nothing else may come between
noise and sum: values are neither rounded nor clipped again, and arithmetic modulo 2^64, which could as well be done to
the sum, is post-processing. As everywhere, draws of floats are taken for a Gaussian's; here they have 64 bits.
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
from rayfed.defences.noise import clipped
from rayfed.defences.private import Private
from rayfed.errors import UserError
from rayfed.privacy.accountant import Release
from rayfed.privacy.printing import at_least, at_most
from rayfed.privacy.sampling import gaussian, noised
from rayfed.privacy.spending import Setting, Spending
from rayfed.registry import component
from rayfed.update import Update


@component
class DpFedAvg(Private):
    """Hide each client's participation from everyone who sees the global weights.

    Clients clip their updates to an L2 norm; the sum, in which all clients weigh alike, gets Gaussian noise of
    deviation `noise_multiplier * clip` and is divided by the expected number of clients. Who sees single updates is not
    kept off: that is the server, unless `noise: clients` stands under `protection: secure_aggregation`. It is the last
    defence of its arm, for what comes after could undo the bound.
    """

    vectorises: ClassVar[bool] = True
    post_processes: ClassVar[bool] = True

    noise: Literal["server", "clients"] = "server"
    """Adder of the noise: the server to the sum, or every client of a fixed number its part of it, which is meant for
    `protection: secure_aggregation`: without these masks the server sees single updates. In both cases the guarantee is
    for anyone who sees only sums: anyone who sees one client's update meets a part of the noise, or none."""
    colluders: Annotated[int, Field(ge=1)] = 1
    """Number of clients that pool their knowledge with those whom the guarantee is against: which were drawn, and
    their parts of the noise. The guarantee is for the others, and holds against so many."""

    @property
    def needs_all(self) -> str | None:
        """Return a reason if clients add the noise, since each brings a part of it."""
        return "its part of the noise would be missing in the sum" if self.noise == "clients" else None

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip the update, and add this client's part of the noise."""

        def update(task: Task) -> Update:
            sent = next(task)
            if self.noise == "server":
                return replace(sent, tensors=clipped(sent.tensors, self.clip, 2), bits=32)
            tensors = clipped({n: t.double() for n, t in sent.tensors.items()}, self.clip, 2)
            part = self.deviation / sqrt(task.clients_per_round)
            step = step_of(self.clip, part)
            noisy = noised(tensors, part, partial(gaussian, dtype=torch.float64), task.generator)
            rounded = {n: (torch.floor(t / step + 0.5) * step).to(sent.tensors[n]) for n, t in noisy.items()}
            return replace(sent, tensors=rounded, bits=32)

        return update

    def refuses(self, later: Sequence[Defence]) -> str | None:
        """Return why no defence may follow this one."""
        return "it must come last, for what comes after it could undo its clip bound" if later else None

    def wrap_aggregation(self, next: AnyAggregation, clients: int) -> AnyAggregation:
        """Add all updates with equal weight, ignoring `weights`; raises `UserError` for rules other than `fedavg`."""
        if type(next) is not FedAvg:
            raise UserError(f"dp_fedavg adds noise to a mean, not to what {type(next).__name__} makes: use fedavg")
        if self.noise == "server":
            return NoisySum(clients=clients, deviation=self.deviation)
        return NoisySum(clients=clients, deviation=0.0, step=step_of(self.clip, self.deviation / sqrt(clients)))

    def released(self, setting: Setting, multiplier: float) -> tuple[Release, ...]:
        """Return one release a round: the noisy sum."""
        return (self._account(setting, multiplier)[0],)

    def spends(self, setting: Setting) -> Spending:
        """Return the account of all rounds."""
        assert self.noise_multiplier is not None
        release, adjacency, against, how = self._account(setting, self.noise_multiplier)
        return Spending(
            (release,),
            self.delta,
            unit="client",
            adjacency=adjacency,
            against=against,
            mechanism=f"Gaussian noise of {at_least(self.noise_multiplier)} times the clip bound on the sum of each "
            f"round, {len(setting.clients)} clients, {how}",
        )

    def _account(self, setting: Setting, multiplier: float) -> tuple[Release, str, str, str]:
        """Return the release with its neighbouring relation, adversary and sampling in words."""
        return (self._of_clients if self.noise == "clients" else self._of_server)(setting, multiplier)

    def _of_clients(self, setting: Setting, multiplier: float) -> tuple[Release, str, str, str]:
        """Return the account of noise added by clients, proved in the module's docstring."""
        drawn = setting.clients_per_round
        honest = drawn - setting.missing - self.colluders
        if setting.client_sampling == "poisson" or honest < 1:
            raise UserError(
                "dp_fedavg: clients can divide the noise only where two or more of them, in a fixed number, take "
                f"part, more than collude or drop out ({self.colluders} + {setting.missing}): use `noise: server`, or "
                "change federation.sampling, clients_per_round, `colluders` or the drop-outs"
            )
        step = step_of(self.clip, self.clip * multiplier / sqrt(drawn))
        # Who adds up knows who was drawn, and who takes part knows its own part of the noise.
        rest = multiplier_of_rounded(multiplier, drawn, honest, setting.values, step / self.clip)
        how = (
            f"of the {drawn} parts of which {honest} count: {self.colluders} known to colluders, {setting.missing} of "
            f"drop-outs; {setting.values} values, each rounded to steps of {at_most(step)}, which is counted"
        )
        return Release("gaussian", rest, setting.most_rounds), _ZEROED, self._who_sees_sums(setting.masked), how

    def _who_sees_sums(self, masked: bool) -> str:
        """Return the adversary for noise added by clients, and whether it includes the arm's own server."""
        known = f"up to {counted(self.colluders)} that {'takes' if self.colluders == 1 else 'take'} part"
        server = (
            "the server is one of these under secure aggregation if it follows the protocol (honest but curious)"
            if masked
            else "NOT this arm's server, which sees single updates (no `protection: secure_aggregation`)"
        )
        return f"anyone who sees sums of updates but no single update, with {known}; {server}"

    def _of_server(self, setting: Setting, multiplier: float) -> tuple[Release, str, str, str]:
        """Return the account of noise added by the server."""
        drawn, clients, rounds = setting.clients_per_round, len(setting.clients), setting.rounds
        anybody = "anyone who sees the global weights, with any number of the other clients, but not the server"
        if setting.client_sampling == "poisson":
            rate = drawn / clients
            how = f"each drawn for itself with probability {at_most(rate)}"
            return Release("gaussian", multiplier, rounds, rate), _ZEROED, anybody, how
        if drawn == clients:
            return Release("gaussian", multiplier, rounds), _ZEROED, anybody, "all of them in every round"
        honest = clients - self.colluders
        if honest < 1:
            raise UserError(
                f"dp_fedavg: colluders: {self.colluders} of {clients} clients leave nobody to hide: take fewer"
            )
        # Colluders know whether they were drawn: where j of them were, so were drawn - j of the `honest` others. The
        # bound grows with that share, so j = 0 is the worst, in every round, whatever came before. One client in
        # another's place moves the sum by up to twice the clip bound.
        release = Release("gaussian", multiplier / 2, rounds, drawn=(drawn, honest) if drawn < honest else None)
        against = f"anyone who sees the global weights, with up to {counted(self.colluders)} that pool what they know"
        adjacency = "each single client (replace-one adjacency)"
        return release, adjacency, f"{against}, but not the server", f"{drawn} drawn without replacement"


def step_of(clip: float, part: float) -> float:
    """Return the rounding step of values with noise of standard deviation `part`.

    A power of two of which 32-bit floats hold all multiples up to the clip bound and 18 deviations: secure noise, half
    the sum of four draws by Box and Muller from 53 bits, reaches 17.2 of them, other noise less.
    """
    return 2.0 ** (ceil(log2(clip + 18 * part)) - 24)


def multiplier_of_rounded(multiplier: float, parts: int, honest: int, values: int, step: float) -> float:
    """Return the noise multiplier of a sum of rounded noise parts, of which only some are honest.

    `step` is in units of the clip bound; for the proof see above.
    """
    return multiplier * sqrt(honest / parts / (1 + values * honest * (honest + 1) * step**2 / 4))


_ZEROED = "each single client (zero-out adjacency)"


def counted(colluders: int) -> str:
    """Format a number of clients."""
    return f"{colluders} client{'s' if colluders > 1 else ''}"
