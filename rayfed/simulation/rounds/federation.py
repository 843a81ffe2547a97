"""State that the rounds of a run share: arms, states of the server and of clients, and the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.crypto.masking import Transcript
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import Arm, aggregation_of
from rayfed.simulation.client.malicious import Malicious
from rayfed.simulation.client.server_message import State
from rayfed.simulation.executors.base import Call, Executor, Ref, limit_time
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.progress import NoteOnce, Progress
from rayfed.simulation.rounds.attacks import Attacks, LoadStates
from rayfed.simulation.server import ArmState, ServerRole
from rayfed.simulation.virtual_time.clock import Clock


class RoundStart(NamedTuple):
    """References to the server's values at the start of a round: the message to clients, and the server's state."""

    sent: Ref
    """The part for clients (`Sent`)."""
    kept: Ref
    """The part for the checkpoint only (`Kept`)."""


class Federation:
    """State that the rounds of a run share: arms, the server's and clients' states, and the executor."""

    def __init__(
        self,
        inputs: Inputs,
        executor: Executor,
        progress: Progress,
        saved: Mapping[str, ArmState],
        load_states: LoadStates,
    ) -> None:
        """Start from the server's part of a checkpoint, `saved`, or from untrained arms if `saved` is empty.

        `load_states` reads clients' states of a checkpoint; the caller stores the `changed` ones after each round.
        """
        self.scenario, self.data, self.samples = inputs.scenario, inputs.data, inputs.parts.sizes
        self.arms = {account.name: account.arm for account in inputs.accounts}
        self.rules = {name: aggregation_of(arm.spec) for name, arm in self.arms.items()}
        """Aggregation rules, without protections such as encryption."""
        self.malicious = {name: Malicious.of(inputs.scenario, arm.spec) for name, arm in self.arms.items()}
        self.executor, self.progress, self.load_states = executor, progress, load_states
        self.note_once = NoteOnce(progress.note)
        self.saved = {name: _untrained(arm) | saved.get(name, {}) for name, arm in self.arms.items()}
        """The server's state after the last finished round."""
        self.changed: dict[str, dict[int, State]] = {}
        """Arm -> client -> state, of the clients of the last finished round."""
        self.aborted: list[str] = []
        """Messages on arms whose last round was not applied, with the reason."""
        self.served: dict[str, RoundStart] = {}
        """The server's values for the next round, by arm; empty after a restart of the server."""
        self.transcripts: dict[tuple[str, int, int], Transcript] = {}
        """(Arm, round, client) -> transcript of questions. It is needed if a restarted server asks again."""
        self.run_clients = limit_time(executor.run_clients, self.scenario.resources.timeout)
        """Run client calls other than local rounds, with a time limit."""
        self.attacks = Attacks(
            self.scenario,
            {name: arm.spec for name, arm in self.arms.items()},
            self.samples,
            load_states,
            self.run_clients,
            executor.run_attackers,
            progress,
            {name: sum(w.nbytes for w in (arm.weights | arm.buffers).values()) for name, arm in self.arms.items()},
        )
        self._inputs = inputs
        self.held: dict[str, dict[tuple[int, int], Ref]] = {}
        """Arm -> (round, client) -> update in flight, if this process has it."""
        self._keys: dict[str, bytes] = {}
        executor.start(inputs, self._roles(), self.saved)

    @cached_property
    def clock(self) -> Clock | None:
        """Return the virtual clock, or None if the scenario has no devices; count the clients' work on first use."""
        return Clock.from_inputs(self._inputs)

    def make_keys(self) -> None:
        """Let one client create the keys of all clients that encrypt; the server relays the keys in locked form."""
        making = [Call("make_keys", (name,), name) for name, arm in self.arms.items() if arm.spec.protection]
        self._keys = {done.call.tag: done.result for done in self.run_clients(making)}
        for name, locked in self._keys.items():
            self.executor.serve("relay", name, locked)  # a restarted server receives them with its role

    def restart_server(self) -> None:
        """Replace the server by a new one with the state of the last finished round."""
        self.executor.restart_server(self._roles(), self.saved)
        self.served, self.held = {}, {}

    def forget_transcripts(self, round: int) -> None:
        """Delete the stored transcripts of questions of all rounds except `round`."""
        self.transcripts = {key: known for key, known in self.transcripts.items() if key[1] == round}

    def ask_server(self, method: str, *args: Any) -> RoundStart:
        """Call a server method that returns the values of `Server.sent`, and return references to the values."""
        return RoundStart(*self.executor.serve(method, *args, returns=2))

    def wait_for(self, refs: Sequence[Ref], calls: int) -> list[Any]:
        """Wait until `calls` server calls have ended, and return the values of `refs`.

        Raises `OverdueError` if they take longer than `calls` times `resources.timeout`.
        """
        limit = self.scenario.resources.timeout
        return self.executor.get(refs, None if limit is None else limit * calls)

    def _roles(self) -> dict[str, ServerRole]:
        """Return the server's task in each arm, without the seed, which would reveal every client's noise."""
        roles = {}
        for name, arm in self.arms.items():
            server = arm.spec.server
            optimiser = ServerOptimiser(server.optimiser, arm.spec.server_lr, server.momentum)
            protecting = plan.protecting(self.scenario, arm.spec, self.samples)
            roles[name] = ServerRole(arm.spec.published(), optimiser, protecting, self._keys.get(name, b""))
        return roles


def _untrained(arm: Arm) -> ArmState:
    return {"weights": arm.weights, "buffers": arm.buffers, "state": {}, "memory": {}, "earlier": {}}
