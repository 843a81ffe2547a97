"""Server of a run, with every arm's global weights and the sums of clients' updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfed.aggregation.asynchronous import AsynchronousRule, Model
from rayfed.aggregation.base import InteractiveAggregation
from rayfed.aggregation.server import GlobalModel, TreeFold
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.core.questions import Memory, RoundSession, Tables
from rayfed.privacy.sampling import make_generator
from rayfed.scenario import ResolvedArm
from rayfed.simulation.client.arm import Protecting, protected_aggregation
from rayfed.simulation.client.server_message import Sent
from rayfed.update import Named

ArmState = dict[str, Any]
"""An arm in a checkpoint: its `weights`, `buffers`, the optimiser's `state` and the aggregation's `memory`.

`earlier` maps the rounds that later attacks need to the weights and buffers that were sent. In virtual time it also has
the end of the last round in seconds (`ended`). Under an asynchronous rule it also has the updates in flight (`flying`,
see `rayfed.simulation.virtual_time.flights`).
"""
_MODEL = ("weights", "buffers", "state", "memory")


@dataclass(frozen=True)
class ArmServerState:
    """State of an arm at the start of a round that stays with the server and is not sent to clients."""

    state: dict[str, Named]
    """State of the server's optimiser."""
    memory: Memory
    """State of the aggregation."""
    rows: Tables = field(default_factory=dict)
    """Rows of the aggregation for the previous round, by table."""
    aborted: str | None = None
    """Why the previous round was not applied; None if it was."""


@dataclass(frozen=True)
class ServerRole:
    """Task of the server in one arm: aggregation, optimiser, and protection of the updates."""

    arm: ResolvedArm
    optimiser: ServerOptimiser
    protecting: Protecting | None = None
    """Protection of the clients' updates, if any."""
    keys: bytes = b""
    """The clients' key pair, locked so that only clients can read it; the server passes it on."""


class Server:
    """Server of all arms, which receives updates or their sums, but never data, seeds, secret keys or client states.

    It does not train, so its models stay on the CPU, where partial results arrive.
    """

    def __init__(self, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Start from the state of every arm, `saved`: untrained, or from a checkpoint."""
        self._aggregations = {name: protected_aggregation(r.arm, r.protecting) for name, r in roles.items()}
        self._keys = {arm: role.keys for arm, role in roles.items()}
        self._sessions: dict[str, RoundSession] = {}
        self._folds: dict[str, TreeFold] = {}
        self._models = {
            arm: GlobalModel(optimiser=roles[arm].optimiser, **{part: state[part] for part in _MODEL})
            for arm, state in saved.items()
        }

    def relay(self, arm: str, keys: bytes) -> None:
        """Set the clients' locked key pair, which the server sends to the arm's clients from now on."""
        self._keys[arm] = keys

    def sent(self, arm: str, round: int) -> tuple[Sent, ArmServerState]:
        """Return the message that the clients of a round receive, and the state that stays with the server."""
        model, session = self._models[arm], self._sessions.get(arm)
        known = session.broadcast() if session else None
        return Sent(round, model.weights, model.buffers, self._keys[arm], known), ArmServerState(
            model.state, model.memory
        )

    def begin_round(self, arm: str, round: int, clients: Sequence[int]) -> bool:
        """Begin a round of an interactive rule, and return whether the rule queries clients before training."""
        aggregation = self._aggregations[arm]
        assert isinstance(aggregation, InteractiveAggregation)
        self._sessions[arm] = aggregation.begin_round(clients, self._models[arm].memory)
        return self._sessions[arm].request() is not None

    def add(self, arm: str, cohorts: int, partials: Mapping[tuple[int, int], Any]) -> None:
        """Add partial sums of the round's updates, in any order; keys are positions in the summation tree."""
        for (level, index), partial in partials.items():
            self._fold(arm, cohorts).add(index, partial, level)

    def apply_async_update(
        self, arm: str, count: int, place: int, staleness: int, sent: Named, partials: Mapping[tuple[int, int], Any]
    ) -> None:
        """Add the update of one client of an asynchronous arm, the `place`-th of `count` updates to arrive.

        The update was computed from weights that are `staleness` rounds old. `sent` has these weights, or is empty if
        the rule does not mix models.
        """
        rule, model = self._aggregations[arm], self._models[arm]
        assert isinstance(rule, AsynchronousRule)
        [update] = partials.values()
        aged = rule.aged(update, staleness, sent, Model(model.weights, model.buffers))
        self._fold(arm, count).add(place, aged)

    def _fold(self, arm: str, count: int) -> TreeFold:
        if arm not in self._folds:
            self._folds[arm] = TreeFold(self._aggregations[arm], count)
        return self._folds[arm]

    def request(self, arm: str) -> tuple[str | None, Any]:
        """Return the rule's next question as (clients to ask, payload), or (None, None) if no question is left.

        Before updates are added, the question is about the session; afterwards it is about the sums.
        """
        if arm in self._folds:
            total, session = self._folds.pop(arm).total(), self._sessions.pop(arm)
            if total is None:  # all clients failed, so the round is as without clients
                return None, None
            self._sessions[arm] = session.finalise(total)
        question = self._sessions[arm].request() if arm in self._sessions else None
        return (question.of, question.payload) if question else (None, None)

    def receive(self, arm: str, clients: Sequence[int], *answers: Any) -> None:
        """Pass the clients' replies to the last question on to the aggregation rule."""
        self._sessions[arm] = self._sessions[arm].receive(dict(zip(clients, answers, strict=True)))

    def finish(self, arm: str, round: int, key: bytes, secure: bool) -> tuple[Sent, ArmServerState]:
        """Update the global model with the round's aggregate, and return the values of `sent` for the next round.

        The values include the aggregation rule's rows. `key` and `secure` determine the server's noise in the round.
        """
        aggregation, model = self._aggregations[arm], self._models[arm]
        draws = make_generator(key, secure)
        if session := self._sessions.pop(arm, None):
            if session.aborted is None:
                model.apply(*aggregation.combine(session, draws))
                model.memory = session.remembered()
            sent, kept = self.sent(arm, round + 1)
            return sent, replace(kept, rows=session.rows(), aborted=session.aborted)
        total = self._folds.pop(arm).total() if arm in self._folds else None
        if total is None:
            model.apply(aggregation.idle(model.weights, draws), {})
        else:
            model.apply(*aggregation.combine(total, draws))
        return self.sent(arm, round + 1)
