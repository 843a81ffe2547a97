"""A defence that only some clients use, as in evaluations of papers in which one of ten clients defends itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rayfed.defences.base import Batch, DataMethod, Defence, GradientMethod, Task, UpdateMethod
from rayfed.errors import UserError
from rayfed.privacy.spending import PrivacySetting, Spending
from rayfed.update import Named, Update

_ALL_CLIENTS = "adapt_model", "calibrated", "wrap_aggregation"
"""Hooks that act on the model of all clients, their noise or the server."""
_NOT_PASSED_ON = (*_ALL_CLIENTS, "spends")


class OnSomeClients(Defence):
    """Defence that acts in the tasks of some clients. Updates of other clients are undefended.

    It has no guarantee, because it does not protect all clients. Attackers know which clients it defends.
    """

    def __init__(self, defence: Defence, clients: int | Sequence[int], name: str) -> None:
        """Wrap a defence: `clients` is the number of the first clients, or a list of client numbers.

        Raises `UserError` if the defence cannot be limited to some clients.
        """
        if defence.overrides(*_ALL_CLIENTS) or defence.private_epochs:
            raise UserError(
                f"{name} changes the model, the privacy account or the server of all clients, so it cannot be limited "
                "to some clients: remove its `on_clients`"
            )
        self.defence = defence
        self.clients = frozenset(range(clients) if isinstance(clients, int) else clients)
        self.samplewise, self.post_processes = defence.samplewise, defence.post_processes  # type: ignore[misc]
        self.needs_classes = getattr(defence, "needs_classes", False)

    def __repr__(self) -> str:
        """Return the defence and its clients."""
        return f"{self.defence!r} for clients {sorted(self.clients)}"

    @property
    def least_samples(self) -> int:
        """Return the minimum number of samples of a client that uses the defence."""
        return self.defence.least_samples

    @property
    def least_public(self) -> int:
        """Return the minimum number of public samples."""
        return self.defence.least_public

    @property
    def keeps_state(self) -> bool:
        """Return whether the defence writes to the state of its clients."""
        return self.defence.keeps_state

    @property
    def needs_all(self) -> str | None:
        """Return why no client of a round may drop out, in words; None if clients may drop out."""
        return self.defence.needs_all

    def overrides(self, *hooks: str) -> bool:
        """Return whether the defence overrides any of the given hooks; a guarantee is not passed on."""
        return self.defence.overrides(*(hook for hook in hooks if hook not in _NOT_PASSED_ON))

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if the defence does not support the model."""
        self.defence.check(model)

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the defence cannot compute the derivatives that it needs from the model."""
        self.defence.check_gradient(task)

    def refuses(self, later: Sequence[Defence]) -> str | None:
        """Return why the given later defences cannot follow this one, in words; None if they can."""
        return self.defence.refuses(later)

    def spends(self, setting: PrivacySetting) -> Spending | None:
        """Return None: there is no guarantee for all clients."""
        return None

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Change the data of the clients that use the defence."""
        defended = self.defence.wrap_data(next)

        def data(task: Task) -> Batch:
            return (defended if task.client in self.clients else next)(task)

        return data

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Change the gradients of the clients that use the defence."""
        defended = self.defence.wrap_gradient(next)

        def gradient(task: Task, weights: Named, batch: Batch) -> Any:
            return (defended if task.client in self.clients else next)(task, weights, batch)

        return gradient

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Change the updates of the clients that use the defence."""
        defended = self.defence.wrap_update(next)

        def update(task: Task) -> Update:
            return (defended if task.client in self.clients else next)(task)

        return update


def defences_at(defences: Sequence[Defence], client: int) -> tuple[Defence, ...]:
    """Return the defences that a client uses, without the wrappers of `OnSomeClients`."""
    used = []
    for defence in defences:
        if not isinstance(defence, OnSomeClients):
            used.append(defence)
        elif client in defence.clients:
            used.append(defence.defence)
    return tuple(used)
