"""The contract of a defence: middleware around the places where a client's data meets its update.

A defence is a frozen dataclass whose fields are the scenario's parameters. It overrides the hooks that it needs; every
hook takes the next inner function and returns a new one, so defences compose in the order written: the first one
in the scenario is the innermost, the last one sees the update last before it is sent.

An update has two parts, its tensors and its buffers (the statistics of batch norm). Defences of the update, noise among
them, change the tensors alone: the buffers are sent as they are, and attackers see them.
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
from rayfed.privacy.spending import Setting, Spending
from rayfed.update import Named, Update

NEEDS_PUBLIC = (
    "works with samples that no client owns, and there are none: set a share of the training samples aside with "
    "`data.public`, such as 0.1"
)


class Batch(NamedTuple):
    """Samples with their labels, and a mask of those that count."""

    inputs: Tensor
    """(N, *shape) as the data's `SampleSpec` says: images (N, C, H, W) and records (N, 1, 1, F) float in [0, 1], texts
    (N, L) int64."""
    labels: Tensor
    """(N,) int64, or (N, K) probabilities where a defence mixed them."""
    mask: Tensor | None = None
    """(N,), 1 for a sample, 0 for padding; None when all count."""
    places: Tensor | None = None
    """(N,) int64, place of each among all of the client's own samples; None where a defence has made them anew."""

    def rows(self, index: Tensor) -> Batch:
        """Return the samples at these rows as a batch."""
        return Batch(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Task:
    """A client's task in one round, as its defences receive it.

    `weights`, `buffers`, `data` and `state` are the client's own copies. `model` and `public` are one object for all
    clients of a process: they are read, never written on, or results would depend on who works where.
    """

    client: int
    round: int
    model: nn.Module
    """The architecture, as adapted by `adapt_model`; its stored weights carry no meaning."""
    weights: Named
    """The global weights that the client was sent."""
    buffers: Named
    """The buffers, and the frozen parameters, that the client was sent."""
    data: Batch
    """The client's own data: all of them, or the batch behind an observed gradient."""
    generator: torch.Generator
    """The defences' only source of randomness, seeded by (seed, round, client)."""
    order: int
    """Seed of the order in which the data are batched, from (seed, round, client) too: the same in a round and in what
    is observed of it, where `generator` is another for every answer."""
    public: Batch | None = None
    """Data that no client owns (the scenario's `data.public`); None where there are none."""
    others: Batch | None = None
    """The rest of the client's own data, for defences that mix them in; None where `data` are all."""
    classes: int = 1
    """Number of classes: the columns of labels that are probabilities."""
    step: int = 0
    """Number of local steps of this round that came before."""
    batch_size: int = 1
    """Number of samples of one local step, expected where they are drawn at random."""
    clients_per_round: int = 1
    """Number of clients of one round, expected where they are drawn at random."""
    private: frozenset[str] = frozenset()
    """Names among `weights` and `buffers` that never leave the client (`rayfed.models.private`)."""
    state: dict[str, Any] = field(default_factory=dict)
    """The client's state across rounds (keys, error feedback). A hook may write to it; it never leaves the client's
    side, and survives the death of an actor and a resume. Tensors, numbers, strings, containers of them."""

    @property
    def everything(self) -> Batch:
        """Return all of the client's samples in their own order, not only those of this task."""
        own = [part for part in (self.data, self.others) if part is not None]
        order = torch.cat([part.places for part in own if part.places is not None]).argsort()
        return Batch(torch.cat([part.inputs for part in own]), torch.cat([part.labels for part in own])).rows(order)

    def public_for(self, defence: str) -> Batch:
        """Return the public data; raises `UserError`, naming the defence, if there are none."""
        if self.public is None:
            raise UserError(f"{defence} {NEEDS_PUBLIC}")
        return self.public

    def replace(self, **changes: Any) -> Task:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


DataMethod = Callable[[Task], Batch]
"""Returns the data that a client trains on this round."""
GradientMethod = Callable[[Task, Named, Batch], tuple[Named, Tensor]]
"""Returns the gradient at some weights for one batch, by name, and the batch's loss (a scalar)."""
UpdateMethod = Callable[[Task], Update]
"""Does the whole local round and returns the update that is sent."""


class Defence:
    """Base of every defence; its hooks change nothing."""

    vectorises: ClassVar[bool] = False
    """Whether `wrap_gradient` works inside `torch.func.vmap` (no generator, no data-dependent branch, nothing of the
    task but its model and buffers) and `wrap_update` calls `next` exactly once with the task that it was given. A
    defence that can promise it says True; one that has a hook of these and does not is played client by client."""
    samplewise: ClassVar[bool] = False
    """Whether `wrap_gradient` calls `next` inside vmap itself, sample by sample."""
    post_processes: ClassVar[bool] = False
    """Whether it changes what is sent from that alone, never looking at the data again, so that a guarantee which an
    earlier defence of the pipeline gives still holds behind it. A defence that can promise it says True."""
    nothing_to_undo: ClassVar[bool] = False
    """Whether what it sends follows from the update and fresh randomness alone, which is on all values or on none, and
    who has its code can take nothing off it: then an attacker need not run it to find out. Counts for rayfed's own
    defences, of which tests show it."""
    private_epochs: int = 0
    """Passes over a client's data in which its private part alone learns, whenever new weights have arrived."""

    @property
    def least_samples(self) -> int:
        """Fewest samples that a client has to hold."""
        return 1

    @property
    def least_public(self) -> int:
        """Fewest public samples (the scenario's `data.public`) that the defence needs."""
        return 0

    @property
    def keeps_state(self) -> bool:
        """Whether the defence writes to the client's state, so that earlier answers cannot be repeated."""
        return False

    @property
    def needs_all(self) -> str | None:
        """Return why no client of a round may be left out unplanned, in words; None if clients may."""
        return None

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture, before any weights are drawn."""
        return model

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if the defence is incompatible with the model in the clients' mode."""

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the defence cannot compute what it needs from the model's gradient.

        `task` has a few samples of a client. Called before the first round, after `check`.
        """

    def refuses(self, later: Sequence[Defence]) -> str | None:
        """Return why these defences are meaningless after this one, in words; None if they are not."""
        return None

    def overrides(self, *hooks: str) -> bool:
        """Return whether the defence overrides one of these hooks, given by the methods' names."""
        return any(getattr(type(self), hook) is not getattr(Defence, hook) for hook in hooks)

    def calibrated(self, setting: Setting, accountant: Method | None) -> Defence:
        """Return a copy with the noise for its epsilon in this run; itself if no epsilon is set.

        Raises `UserError` where no noise gives it.
        """
        return self

    def spends(self, setting: Setting) -> Spending | None:
        """Return the releases of a run for the accountant; None without a guarantee (empirical)."""
        return None

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Change the client's data of a round."""
        return next

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Change the gradient of one batch."""
        return next

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Change the update that is sent."""
        return next

    def wrap_aggregation(self, next: AnyAggregation, clients: int) -> AnyAggregation:
        """Change the server's sum; `clients` is the actual or expected number of updates in a round."""
        return next

    def exposed(self, update: Update) -> Named | None:
        """Return a mask of the sent values that an informed attacker knows to carry the plain gradient.

        Name -> bool of the tensor's shape, some names or all; None: every value does. `knowledge: [defence]` grants it.
        """
        return None

    def exposed_in_mean(self, mean: Update, error: Named) -> Named | None:
        """Return the same mask as `exposed`, for the mean of several answers to the same samples.

        `error` is the standard error of each of its values: 0 where all answers agreed.
        """
        return self.exposed(mean)
