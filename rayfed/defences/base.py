"""Base class of defences: hooks that change a client's data, gradients and update, or the server's sum.

A defence is a frozen dataclass whose fields are the scenario's parameters. It overrides the hooks that it needs. Every
hook takes the next inner function and returns a new one, so defences compose in the order written: the first one in the
scenario is the innermost, and the last one changes the update just before it is sent.

An update has two parts: tensors and buffers (the statistics of batch norm). Defences of the update, such as noise,
change only the tensors. The buffers are sent unchanged, and attackers see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rayfed.aggregation.base import AnyAggregation
from rayfed.errors import UserError
from rayfed.privacy.accountant import Method
from rayfed.privacy.spending import PrivacySetting, Spending
from rayfed.update import Named, Update

NEEDS_PUBLIC = (
    "needs public samples, and there are none: reserve a share of the training samples with `data.public`, such as 0.1"
)


MEASURED = "measured"
"""Key, in a client's state, of values for the client's row in the table `clients`, by column. Removed after the
round."""


class Batch(NamedTuple):
    """A batch of samples, their labels, and a mask that excludes padding."""

    inputs: Tensor
    """Images (N, C, H, W) and records (N, 1, 1, F): float in [0, 1]. Texts (N, L): int64."""
    labels: Tensor
    """Labels (N,) int64, or probabilities (N, K) if a defence mixed them."""
    mask: Tensor | None = None
    """Mask (N,): 1 for a sample, 0 for padding. None if there is no padding."""
    places: Tensor | None = None
    """Index of each sample among all of the client's samples, (N,) int64. None if a defence generated the samples."""

    def rows(self, index: Tensor) -> Batch:
        """Return the samples at the given row indices as a batch."""
        return Batch(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Task:
    """A client's task in one round, as its defences receive it.

    `weights`, `buffers`, `data` and `state` are the client's own copies. All clients of a process share `model` and
    `public`. Never write to these two, or results would depend on which process runs which client.
    """

    client: int
    round: int
    model: nn.Module
    """The architecture, as adapted by `adapt_model`. Its stored weights have no meaning."""
    weights: Named
    """The global weights that the server sent to the client."""
    buffers: Named
    """The buffers and frozen parameters that the server sent to the client."""
    data: Batch
    """The client's data: all of its samples, or the batch of an observed gradient."""
    generator: torch.Generator
    """The only source of randomness for defences, seeded by (seed, round, client)."""
    order: int
    """Seed of the order of batches, derived from (seed, round, client). Unlike `generator`, it is the same for the
    round and for every update observed in that round."""
    public: Batch | None = None
    """Samples that no client owns (the scenario's `data.public`); None if there are none."""
    others: Batch | None = None
    """The rest of the client's samples, for defences that mix them in; None if `data` has all of them."""
    classes: int = 1
    """Number of classes, which is the number of columns of mixed labels."""
    step: int = 0
    """Number of earlier local steps in this round."""
    batch_size: int = 1
    """Number of samples per local step; the expected number under Poisson sampling."""
    clients_per_round: int = 1
    """Number of clients per round; the expected number under Poisson sampling."""
    private: frozenset[str] = frozenset()
    """Names among `weights` and `buffers` that never leave the client (`rayfed.models.private`)."""
    state: dict[str, Any] = field(default_factory=dict)
    """The client's state across rounds, such as keys and error feedback. A hook may write to it. It is never sent, and
    it survives a crash of the actor and a resume. Allowed values: tensors, numbers, strings, and containers of them."""

    @property
    def everything(self) -> Batch:
        """Return all samples of the client in their original order, including samples that are not in `data`."""
        own = [part for part in (self.data, self.others) if part is not None]
        order = torch.cat([part.places for part in own if part.places is not None]).argsort()
        return Batch(torch.cat([part.inputs for part in own]), torch.cat([part.labels for part in own])).rows(order)

    def public_for(self, defence: str) -> Batch:
        """Return the public samples. Raises `UserError` with the defence's name if the scenario reserves none."""
        if self.public is None:
            raise UserError(f"{defence} {NEEDS_PUBLIC}")
        return self.public

    def replace(self, **changes: Any) -> Task:
        """Return a copy of the task with some fields replaced."""
        return replace(self, **changes)


DataMethod = Callable[[Task], Batch]
"""Function that returns the data that a client trains on in this round."""
GradientMethod = Callable[[Task, Named, Batch], tuple[Named, Tensor]]
"""Function that returns the gradient at given weights for one batch, by name, and the batch's loss (a scalar)."""
UpdateMethod = Callable[[Task], Update]
"""Function that runs the whole local round and returns the update to send."""


class Defence:
    """Base class of defences. The hooks of this class change nothing."""

    vectorises: ClassVar[bool] = False
    """Whether clients can be trained together with `torch.func.vmap`. `wrap_gradient` must then use no generator and no
    data-dependent branch, and read only the task's model and buffers. `wrap_update` must call `next` exactly once, with
    the task that it received. Clients run one by one if a defence overrides one of these hooks without setting this to
    True."""
    samplewise: ClassVar[bool] = False
    """Whether `wrap_gradient` itself calls `next` inside vmap, sample by sample."""
    post_processes: ClassVar[bool] = False
    """Whether the defence reads only the values to be sent and never the data. The guarantee of an earlier defence in
    the pipeline then still holds."""
    private_epochs: int = 0
    """Epochs over a client's data that train only its private layers, run whenever new global weights arrive."""

    @property
    def least_samples(self) -> int:
        """Return the minimum number of samples that a client must have."""
        return 1

    @property
    def least_public(self) -> int:
        """Return the minimum number of public samples (the scenario's `data.public`) that the defence needs."""
        return 0

    @property
    def keeps_state(self) -> bool:
        """Return whether the defence writes to the client's state, so that earlier updates cannot be recomputed."""
        return False

    @property
    def needs_all(self) -> str | None:
        """Return why no client of a round may drop out, in words; None if clients may drop out."""
        return None

    @property
    def adds_noise(self) -> bool:
        """Return whether the defence, with its parameters, adds the noise that `log_likelihood` declares."""
        return self.overrides("log_likelihood")

    @property
    def has_latents(self) -> bool:
        """Return whether the declaration ignores something that the attacker does not know.

        Examples are other samples of the client, its state, and random numbers that are not in `log_likelihood`. A
        search can then not be compared with the true samples, so the verdict is at best inconclusive.
        """
        return False

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Change the model's architecture before the weights are initialised, and return the model."""
        return model

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if the defence does not support the model in the clients' training mode."""

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the defence cannot compute the derivatives that it needs from the model.

        `task` has a few samples of a client. Called before the first round, after `check`.
        """

    def refuses(self, later: Sequence[Defence]) -> str | None:
        """Return why the given later defences cannot follow this one, in words; None if they can."""
        return None

    def overrides(self, *hooks: str) -> bool:
        """Return whether the defence overrides any of the given hooks (method names)."""
        return any(getattr(type(self), hook) is not getattr(Defence, hook) for hook in hooks)

    @property
    def is_declared(self) -> bool:
        """Return whether the defence declares its effect, in the class that defines the effect or in a subclass."""
        hooks = [hook for hook in _CHANGES if self.overrides(hook)]
        declared = _place(type(self), "transform"), _place(type(self), "transform_data")
        return all(min(declared) <= _place(type(self), hook) for hook in hooks)

    def transform(self, task: Task, tensors: Named) -> Named:
        """Declare the defence's effect on the tensors of a gradient or update, without its noise.

        The result is differentiable with respect to the tensors. A defence that rounds or removes values returns its
        exact values with the derivative of the identity (`rayfed.defences.declarations.straight_through`). `task` is
        the attacker's: `task.data` has the samples of the gradient, random numbers are its own, and there is no state.
        If the defence is `samplewise`, each tensor has the gradients of the samples along a first dimension.
        """
        return tensors

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        """Declare the noise: the log density of each sent value, given the result `expected` of `transform`.

        Terms that do not depend on `expected` may be left out. If only some parameters of the defence add noise,
        override `adds_noise`, too.
        """
        raise NotImplementedError

    def transform_data(self, task: Task, batch: Batch) -> Batch:
        """Declare the samples on which the client trains instead of a batch, differentiable with respect to them."""
        return batch

    def reveal_randomness(self, model: nn.Module, weights: Named, update: Named) -> nn.Module:
        """Return the model with the random numbers that the update of a single sample reveals, instead of new ones."""
        return model

    def calibrated(self, setting: PrivacySetting, accountant: Method | None) -> Defence:
        """Return a copy with the noise that the defence's epsilon needs in this run; the defence itself if none is set.

        Raises `UserError` if no amount of noise gives this epsilon.
        """
        return self

    def spends(self, setting: PrivacySetting) -> Spending | None:
        """Return the defence's privacy accounting of a run; None if the defence has no guarantee (empirical)."""
        return None

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Wrap the function `next` that returns the client's data in a round, to change the data."""
        return next

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Wrap the function `next` that returns the gradient of one batch, to change the gradient."""
        return next

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Wrap the function `next` that returns the client's update, to change the update before sending."""
        return next

    def wrap_aggregation(self, next: AnyAggregation, clients: int) -> AnyAggregation:
        """Wrap the aggregation rule `next`, to change the sum of the updates at the server.

        `clients` is the actual or expected number of updates in a round.
        """
        return next

    def exposed(self, update: Update) -> Named | None:
        """Return a mask of the sent values that an adaptive attacker knows to be unchanged by the defence.

        The mask maps names to bool tensors of the update's shapes. It may leave out names. None means all values.
        Attackers with `knowledge: [defence]` receive it.
        """
        return None

    def exposed_in_mean(self, mean: Update, error: Named) -> Named | None:
        """Return the mask of `exposed` for the mean of several updates computed from the same samples.

        `error` is the standard error of each value: 0 if all updates agreed.
        """
        return self.exposed(mean)


_CHANGES = "adapt_model", "wrap_data", "wrap_gradient", "wrap_update"
"""Hooks that change a client's update; a defence that overrides one of them has to declare the change."""


def _place(defence: type, hook: str) -> int:
    """Return the position, in the order of method resolution, of the class that defines a hook."""
    return next(place for place, owner in enumerate(defence.__mro__) if hook in vars(owner))
