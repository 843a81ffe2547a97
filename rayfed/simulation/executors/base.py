"""Interface of executors, which run the calls of a round in other processes or in the present process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

from rayfed.attacks.progress import Standing
from rayfed.errors import OverdueError
from rayfed.scenario import Scenario
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.machine import Machine
from rayfed.simulation.progress import Progress
from rayfed.simulation.server import ArmState, ServerRole

Ref = Any
"""A value, or an executor's reference to a value. Rounds pass it on without reading it."""


@dataclass(frozen=True)
class Call:
    """One method call for any free client worker or attacker."""

    method: str
    args: tuple[Any, ...]
    """Arguments of the method, which receives the value of each `Ref`."""
    tag: Any = None
    """Label of the result, used only by the caller."""
    returns: int = 1
    """Number of values that the method returns."""
    limit: float | None = None
    """Maximum seconds of the call after its start."""
    crashes: int | None = None
    """Number of processes that the call may end before its result is `Crashed`; None: repeated crashes end the run."""
    node: str = ""
    """Preferred node; empty for any."""
    losable: bool = False
    """Whether the result is `Gone` if an argument is lost; otherwise the round ends."""


class Overdue:
    """Result marker of a call that exceeded its time limit."""


@dataclass(frozen=True)
class Crashed:
    """Result marker of a call that ended its process every time."""

    memory: bool
    """Whether the process was killed because memory ran out."""


class Gone:
    """Result marker of a call whose arguments were lost with their machine."""


class Done(NamedTuple):
    """A finished call with its result."""

    call: Call
    result: Any
    """The first value that the method returned, or `Overdue`, `Crashed` or `Gone`."""
    rest: list[Ref]
    """References to the other values; empty if the result is a marker."""
    node: str = ""
    """Node that holds the values; empty if there is only one node."""


Run: TypeAlias = Callable[[Sequence[Call]], Iterator[Done]]
"""Run calls and yield each as it ends, in any order. An exception of a call ends all calls."""

Hear: TypeAlias = Callable[[Call, Standing | None], None]
"""Receive the progress of a running call's search, None without a report, about once a second.

An exception that it raises ends all calls. In one process, it is called only when a search reports its progress."""


def limit_time(run: Run, seconds: float | None) -> Run:
    """Return a function that runs client calls, and raises `OverdueError` if a call takes longer than `seconds`.

    If `seconds` is None, there is no limit.
    """
    if seconds is None:
        return run

    def limited(calls: Sequence[Call]) -> Iterator[Done]:
        for done in run([replace(call, limit=seconds) for call in calls]):
            if isinstance(done.result, Overdue):
                raise OverdueError(f"a client actor's `{done.call.method}`", seconds)
            yield done

    return limited


class Lost(Exception):
    """Raised if the server died or a value was lost with its machine, so that the round must be rerun."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Executor(Protocol):
    """Interface of executors, which run the clients, the attackers and the server of one run."""

    @property
    def clients(self) -> int:
        """Return how many client calls run at the same time."""

    def nodes(self) -> dict[str, int]:
        """Return the nodes that run client calls, with the number of concurrent calls on each."""

    def describe(self) -> str:
        """Return a text that describes the executor's processes and their resources."""

    def environment(self) -> dict[str, object]:
        """Return the executor's part of environment.json, which is needed to interpret the run's timings."""

    def machines(self) -> list[Machine]:
        """Return the machines of all processes that have started so far."""

    def start(self, inputs: Inputs, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Start the client workers and the server; `saved` is the state of every arm.

        Raises `ResourceError` if the machines do not have the resources.
        """

    def check_server(self) -> None:
        """Wait until the server has started. Raises `Lost` if the server died."""

    def restart_server(self, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Replace a server that died or that aggregated only some of a round's updates."""

    def run_clients(self, calls: Sequence[Call]) -> Iterator[Done]:
        """Run calls on client workers (`rayfed.simulation.executors.worker.ClientWorker`), and yield each result as the
        call ends."""

    @property
    def attackers_apart(self) -> bool:
        """Return whether attackers and clients can run at the same time without slowing each other down."""

    def run_attackers(self, calls: Sequence[Call], hear: Hear | None = None, ahead: bool = False) -> Iterator[Done]:
        """Run calls on attackers (`rayfed.simulation.executors.attacker.AttackWorker`), and yield results as calls end.

        If the iterator is closed early, unfinished calls are cancelled. With `ahead`, and if attackers are apart, calls
        start before the first result is requested.
        """

    def serve(self, method: str, *args: Any, returns: int = 1) -> Any:
        """Call a method of `rayfed.simulation.server.Server`, and return references to the method's `returns`
        results."""

    def get(self, refs: Sequence[Ref], limit: float | None = None) -> list[Any]:
        """Wait for the values of references to the server's results, and return the values.

        Raises `Lost` if a value is lost, `OverdueError` if the server takes longer than `limit` seconds (None: no
        limit), and exceptions of the server's method.
        """


class Execution(Protocol):
    """Interface that opens executors for runs."""

    def num_gpus(self, scenario: Scenario) -> Mapping[str, int]:
        """Return the number of GPUs that a run of the scenario could use, by kind of actor."""

    def __call__(self, inputs: Inputs, progress: Progress) -> AbstractContextManager[Executor]:
        """Open an executor for a run; the executor is closed when the block ends, also after an error."""
