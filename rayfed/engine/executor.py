"""The executor: contract between a run's rounds and the processes, or the one process, that do the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

from rayfed.attacks.telling import Standing
from rayfed.engine.inputs import Inputs
from rayfed.engine.machine import Machine
from rayfed.engine.progress import Progress
from rayfed.engine.server import ArmState, ServerRole
from rayfed.errors import OverdueError
from rayfed.scenario import Scenario

Ref = Any
"""A value, or the place where an executor keeps it: rounds pass it on and never look inside."""


@dataclass(frozen=True)
class Call:
    """One method call for any free client worker or attacker."""

    method: str
    args: tuple[Any, ...]
    """Arguments of the method; in place of a `Ref` it gets the value."""
    tag: Any = None
    """Label of the result, for the caller alone."""
    returns: int = 1
    """Number of values that the method returns."""
    limit: float | None = None
    """Seconds that the call may take once it has begun."""
    crashes: int | None = None
    """Processes that the call may end before it comes as `Crashed`; None: one that ends several ends the run."""
    node: str = ""
    """Node on which it is best done; empty for any."""
    losable: bool = False
    """Whether it comes as `Gone` where an argument is lost; else that ends the round."""


class Overdue:
    """Marker for the result of a call that took longer than its limit."""


@dataclass(frozen=True)
class Crashed:
    """Marker for the result of a call that ended its process every time."""

    memory: bool
    """Whether it was ended from outside, for it needed more memory than there is."""


class Gone:
    """Marker for the result of a call whose arguments were lost with their machine."""


class Done(NamedTuple):
    """A finished call with its result."""

    call: Call
    result: Any
    """The first value that the method returned, or `Overdue`, `Crashed` or `Gone`."""
    rest: list[Ref]
    """References to the other values; empty where a marker is in place of the result."""
    node: str = ""
    """Node that holds the values; empty where there is one alone."""


Run: TypeAlias = Callable[[Sequence[Call]], Iterator[Done]]
"""Does calls and yields each as it ends, in any order; a call's own exception ends all."""

Hear: TypeAlias = Callable[[Call, Standing], None]
"""Is told how far the search of a call is, about once a second."""


def within(run: Run, seconds: float | None) -> Run:
    """Return a function that runs client calls with a time limit for each; raises `OverdueError` beyond it.

    `seconds` is None where any time will do.
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
    """The server died, or a value was lost with its machine, so that the round has to be played again."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Executor(Protocol):
    """Runs the clients, the attackers and the server of one run."""

    @property
    def clients(self) -> int:
        """Return the number of concurrent client calls."""

    def nodes(self) -> dict[str, int]:
        """Return the nodes that run client calls, with the number of concurrent calls on each."""

    def describe(self) -> str:
        """Return a description of what runs where."""

    def environment(self) -> dict[str, object]:
        """Return the executor's part of environment.json, which explains the run's timings."""

    def machines(self) -> list[Machine]:
        """Return the machines of all processes that have started so far."""

    def start(self, inputs: Inputs, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Start clients and server; `saved` is the state of every arm.

        Raises `ResourceError` where the machines have no place for them.
        """

    def check_server(self) -> None:
        """Wait until the server has started, or raise `Lost`, as clients would wait for its weights forever."""

    def restart_server(self, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Replace a server that died or that has added half a round."""

    def run_clients(self, calls: Sequence[Call]) -> Iterator[Done]:
        """Run calls on instances of `rayfed.engine.worker.ClientWorker`; see `Run`."""

    @property
    def attackers_apart(self) -> bool:
        """Return whether attackers slow no client down that works at the same time."""

    def run_attackers(self, calls: Sequence[Call], hear: Hear | None = None, ahead: bool = False) -> Iterator[Done]:
        """Run calls on instances of `rayfed.engine.attacker.Attacker`, started on first use; see `Run`.

        Who does not take all that is yielded leaves the calls that are not over. With `ahead` they are begun before the
        first is taken, where attackers are apart.
        """

    def serve(self, method: str, *args: Any, returns: int = 1) -> Any:
        """Call a method of `rayfed.engine.server.Server`, in order, and return one `Ref` or a list of them."""

    def get(self, refs: Sequence[Ref], limit: float | None = None) -> list[Any]:
        """Return the values behind references to the server's results.

        Raises `Lost` where one is gone, what making it has raised, and `OverdueError` where the server takes longer
        than `limit` seconds; None is any time.
        """


class Execution(Protocol):
    """Opens executors for runs."""

    def num_gpus(self, scenario: Scenario) -> Mapping[str, int]:
        """Return the number of GPUs that a run of the scenario could use, by kind of actor."""

    def __call__(self, inputs: Inputs, progress: Progress) -> AbstractContextManager[Executor]:
        """Open an executor for a run; it is closed however the run ends."""
