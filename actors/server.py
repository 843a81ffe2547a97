"""ServerActor: the global weights of every arm and the fold of what clients send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.process import Share, set_up
from rayfed.aggregation.server import GlobalModel, TreeFold
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.scenario import AggregationSpec, DefenceSpec
from rayfed.seeds import torch_generator
from rayfed.training.arm import Protecting, aggregation_of
from rayfed.training.host import Sent
from rayfed.update import Named

Optimiser = dict[str, Named]
"""The server optimiser's state."""

ArmState = dict[str, Any]
"""`weights`, `buffers` and the optimiser's `state`: what the checkpoint keeps of an arm."""


@dataclass(frozen=True)
class ServerRole:
    """What the server does in one arm."""

    aggregation: AggregationSpec
    stack: Sequence[DefenceSpec]
    """The arm's defences, some of which change how updates are added."""
    clients: int
    """Of a round; their expected number where they are drawn."""
    optimiser: ServerOptimiser
    protecting: Protecting | None = None
    """Where clients encrypt what they send."""
    keys: bytes = b""
    """Their key pair, locked for them: it is passed on."""


class ServerActor:
    """Sees updates (or what the aggregation makes of them) and weights; never data, seed, keys or client state.

    It adds and does not train, so its model stays on the CPU, where partial results arrive.
    """

    def __init__(self, roles: dict[str, ServerRole], share: Share, saved: dict[str, ArmState]) -> None:
        """`saved` holds every arm as it is to go on: untrained, or from a checkpoint."""
        set_up(share)
        self._aggregations = {arm: aggregation_of(r.aggregation, r.stack, r.clients) for arm, r in roles.items()}
        for arm, role in roles.items():
            if role.protecting:
                self._aggregations[arm] = role.protecting.wrap(self._aggregations[arm])
        self._keys = {arm: role.keys for arm, role in roles.items()}
        self._folds: dict[str, TreeFold] = {}
        self._totals: dict[str, Any] = {}
        self._models = {arm: GlobalModel(optimiser=roles[arm].optimiser, **state) for arm, state in saved.items()}

    def relay(self, arm: str, keys: bytes) -> None:
        """Send clients from now on this key pair, which is locked for them."""
        self._keys[arm] = keys

    def sent(self, arm: str, round: int) -> tuple[Sent, Optimiser]:
        """What clients are sent in a round, and beside it the optimiser's state, which stays with the server."""
        model = self._models[arm]
        return Sent(round, model.weights, model.buffers, self._keys[arm]), model.state

    def add(self, arm: str, index: int, cohorts: int, partial: Any) -> None:
        """Take the partial result of cohort `index` of so many, in any order, each once."""
        if arm not in self._folds:
            self._folds[arm] = TreeFold(self._aggregations[arm], cohorts)
        self._folds[arm].add(index, partial)

    def ask(self, arm: str) -> tuple[str | None, Any]:
        """Whom the rule asks before it can step, once all has been added, and what; None: nobody (any more)."""
        if arm in self._folds:
            self._totals[arm] = self._folds.pop(arm).total()
        question = self._aggregations[arm].asks(self._totals[arm]) if arm in self._totals else None
        return (question.of, question.payload) if question else (None, None)

    def hear(self, arm: str, clients: Sequence[int], *answers: Any) -> None:
        """Take the clients' answers to what was asked last."""
        heard = dict(zip(clients, answers, strict=True))
        self._totals[arm] = self._aggregations[arm].hears(self._totals[arm], heard)

    def finish(self, arm: str, round: int, key: int) -> tuple[Sent, Optimiser]:
        """Step on what was added and heard; what clients are sent in the next round, as `sent` gives it.

        `key` seeds the server's own randomness of the round.
        """
        aggregation, model, generator = self._aggregations[arm], self._models[arm], torch_generator(key)
        if arm in self._totals:
            model.apply(*aggregation.combine(self._totals.pop(arm), generator))
        else:
            model.apply(aggregation.idle(model.weights, generator), {})
        return self.sent(arm, round + 1)
