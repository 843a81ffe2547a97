"""The state of a run between rounds: arms, the server's and clients' states, and the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.client import plan
from rayfed.client.arm import Arm, aggregation_of
from rayfed.client.malicious import Malicious
from rayfed.client.sent import State
from rayfed.crypto.masking import Transcript
from rayfed.engine.attacking import Attacks, LoadStates
from rayfed.engine.clock import Clock
from rayfed.engine.executor import Call, Executor, Ref, within
from rayfed.engine.inputs import Inputs
from rayfed.engine.progress import NoteOnce, Progress
from rayfed.engine.server import ArmState, ServerRole


class Served(NamedTuple):
    """References to the server's values at the start of a round."""

    sent: Ref
    """The part for clients (`Sent`)."""
    kept: Ref
    """The part for the checkpoint alone (`Kept`)."""


class Federation:
    """State that a run's rounds share."""

    def __init__(
        self,
        inputs: Inputs,
        executor: Executor,
        progress: Progress,
        saved: Mapping[str, ArmState],
        load_states: LoadStates,
    ) -> None:
        """Start from the server's part of a checkpoint, `saved`, or from untrained arms if it is empty.

        `load_states` reads the clients' side, to which the player of the rounds adds what they `changed`.
        """
        self.scenario, self.data, self.samples = inputs.scenario, inputs.data, inputs.parts.sizes
        self.arms = {account.name: account.arm for account in inputs.accounts}
        self.rules = {name: aggregation_of(arm.spec) for name, arm in self.arms.items()}
        """Aggregation rules, without the protection under which clients send."""
        self.malicious = {name: Malicious.of(inputs.scenario, arm.spec) for name, arm in self.arms.items()}
        self.executor, self.progress, self.load_states = executor, progress, load_states
        self.note_once = NoteOnce(progress.note)
        self.saved = {name: _untrained(arm) | saved.get(name, {}) for name, arm in self.arms.items()}
        """The server's state after the last finished round."""
        self.changed: dict[str, dict[int, State]] = {}
        """Arm -> client -> state, of the clients of the last finished round."""
        self.aborted: list[str] = []
        """Arms whose last round was not applied, and why, in words."""
        self.served: dict[str, Served] = {}
        """The server's values for the next round, by arm; empty where the server has to be asked."""
        self.transcripts: dict[tuple[str, int, int], Transcript] = {}
        """Clients' transcripts of questions by (arm, round, client); a server that dies asks its questions again."""
        self.run_clients = within(executor.run_clients, self.scenario.resources.timeout)
        """Does calls of clients that are no local round."""
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
        """Arm -> (round, client) -> update on its way, as far as this process has them."""
        self._keys: dict[str, bytes] = {}
        executor.start(inputs, self._roles(), self.saved)

    @cached_property
    def clock(self) -> Clock | None:
        """Virtual clock; None without devices in the scenario. Work is counted on first use."""
        return Clock.of(self._inputs)

    def make_keys(self) -> None:
        """Let one client make the keys of all encrypting clients; the server relays them unread."""
        making = [Call("make_keys", (name,), name) for name, arm in self.arms.items() if arm.spec.protection]
        self._keys = {done.call.tag: done.result for done in self.run_clients(making)}
        for name, locked in self._keys.items():
            self.executor.serve("relay", name, locked)  # one that dies of it is started again with them

    def restart_server(self) -> None:
        """Start a new server from the last finished round."""
        self.executor.restart_server(self._roles(), self.saved)
        self.served, self.held = {}, {}

    def forget_transcripts(self, round: int) -> None:
        """Drop the transcripts of all rounds but this one."""
        self.transcripts = {key: known for key, known in self.transcripts.items() if key[1] == round}

    def ask_server(self, method: str, *args: Any) -> Served:
        """Call `Server.sent`, or another method with the same two results, by reference."""
        return Served(*self.executor.serve(method, *args, returns=2))

    def settled(self, refs: Sequence[Ref], calls: int) -> list[Any]:
        """Return the values of this many server calls when they have finished.

        Raises `OverdueError` where they take longer than that many times `resources.timeout`.
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
