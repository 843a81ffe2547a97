"""Who does the work of a run: the contract between its rounds and the processes, or the one process, behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from rayfed.engine.inputs import Inputs
from rayfed.engine.progress import Progress
from rayfed.engine.server import ArmState, ServerRole

Ref = Any
"""A value, or where an executor keeps it: rounds pass it on and never look inside."""


@dataclass(frozen=True)
class Call:
    """One call of a method on whichever client worker, or attacker, is free."""

    method: str
    args: tuple[Any, ...]
    """Among them `Ref`s, in whose place the method gets their values."""
    tag: Any = None
    """Whose result it is; for the caller alone."""
    returns: int = 1
    """How many values it returns."""
    limit: float | None = None
    """Seconds that it may take once it has begun."""


class Overdue:
    """In place of the result of a call that took longer than its limit."""


class Done(NamedTuple):
    """A call that has ended."""

    call: Call
    result: Any
    """The first value that it returned, or `Overdue`."""
    rest: list[Ref]
    """The others; none of a call that was overdue."""


Run: TypeAlias = Callable[[Sequence[Call]], Iterator[Done]]
"""Does calls, and gives each as it ends, in any order; a call's own exception ends all."""


class Lost(Exception):
    """The server died, or a value was lost with the machine that held it: the round has to be played again."""

    def __init__(self, what: str, error: Exception) -> None:
        super().__init__(str(error))
        self.what = what
        """What happened, in words."""


class Executor(Protocol):
    """Clients, attackers and the server of one run."""

    @property
    def clients(self) -> int:
        """How many client calls go on at once."""

    def describe(self) -> str:
        """What runs where, in words."""

    def environment(self) -> dict[str, object]:
        """What it takes to read the run's timings."""

    def start(self, inputs: Inputs, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Bring up clients and server; `saved` is where every arm stands.

        Raises `ResourceError` where there is no place for them.
        """

    def check_server(self) -> None:
        """Wait until the server is up, else clients would wait for its weights without end; raises `Lost`."""

    def restart_server(self, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Put a new server in the place of one that is dead, or has half a round."""

    def run_clients(self, calls: Sequence[Call]) -> Iterator[Done]:
        """`Run` on `rayfed.client.worker.ClientWorker`."""

    def run_attackers(self, calls: Sequence[Call]) -> Iterator[Done]:
        """`Run` on `rayfed.engine.attacker.Attacker`, which are brought up when they are first asked for."""

    def serve(self, method: str, *args: Any, returns: int = 1) -> Any:
        """Call `rayfed.engine.server.Server`; calls are done in their order. One `Ref`, or a list of several."""

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        """The values behind these; raises `Lost` where one is gone, and what making it has raised."""


Execution: TypeAlias = Callable[[Inputs, Progress], AbstractContextManager[Executor]]
"""Opens an executor for a run, and closes it however the run ends."""
