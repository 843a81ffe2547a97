"""Local executor, which runs everything in this process, for debugging and fast tests.

Its results have the same bits as those of other executors. Arguments and results of clients and attackers are pickled,
as between processes: in-place changes affect only a copy, and unpicklable values raise an error. Values of the server
are not copied, so a rule that changes its arguments in place changes the driver's values.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Literal

import cloudpickle
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rayfed.attacks.progress import listening
from rayfed.core.memory import copy_to_host, explain_memory_errors
from rayfed.core.user_exits import exits_refused
from rayfed.scenario import Actors, Scenario
from rayfed.simulation.executors.attacker import AttackWorker
from rayfed.simulation.executors.base import Call, Done, Hear, Overdue, Ref
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.gpus import gpus_here
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.machine import Machine, device_for, gpu_arithmetic, this_machine
from rayfed.simulation.progress import Progress
from rayfed.simulation.server import ArmState, Server, ServerRole


@dataclass(frozen=True)
class LocalExecution:
    """Function object that opens executors in the present process (`rayfed.simulation.executors.base.Execution`)."""

    open: Callable[[Inputs], LocalExecutor] | None = None
    """Makes the executor; None: `LocalExecutor`."""

    def num_gpus(self, scenario: Scenario) -> dict[str, int]:
        """Return the number of GPUs of this process for each kind of actor (clients, attackers)."""
        return gpus_here()

    @contextmanager
    def __call__(self, inputs: Inputs, progress: Progress) -> Iterator[LocalExecutor]:
        """Open an executor in this process, and print which settings have no effect in a single process."""
        scenario = inputs.scenario
        if scenario.federation.failures.timeout is not None:
            progress.note("federation.failures.timeout has no effect: one process cannot end a call that hangs")
        if scenario.resources.timeout is not None:
            progress.note("resources.timeout ends attacks only, at their next PyTorch operation, in a single process")
        for kind in (kind for kind in ("clients", "attackers") if getattr(scenario.resources, kind).labels):
            progress.note(f"resources.{kind}.labels has no effect: everything runs in this process")
        threads = torch.get_num_threads()
        try:
            with gpu_arithmetic(scenario.resources.tf32):  # as in an actor
                yield (self.open or LocalExecutor)(inputs)
        finally:
            torch.set_num_threads(threads)


local = LocalExecution()


class LocalExecutor:
    """Executor that runs each call immediately in the present process (`rayfed.simulation.executors.base.Executor`)."""

    clients = 1
    attackers_apart = False

    def __init__(self, inputs: Inputs) -> None:
        self._resources = inputs.scenario.resources
        data = inputs.data
        client, attacker = device_for(self._resources.clients.num_gpus), device_for(self._resources.attackers.num_gpus)
        self._client = ClientWorker(inputs.scenario, data, inputs.parts, client, inputs.validation)
        self._attacker = AttackWorker(data.sample.published(), len(data.classes), attacker)
        devices = {"client": client, "attacker": attacker, "server": torch.device("cpu")}
        self._machines = [this_machine(role, device) for role, device in devices.items()]
        self._server: Server

    def nodes(self) -> dict[str, int]:
        """Return the only node, this machine, which runs one client call at a time."""
        return {"": 1}

    def describe(self) -> str:
        """Return a text that says that everything runs in this process."""
        return "all in this process"

    def environment(self) -> dict[str, object]:
        """Return the executor's part of environment.json."""
        return {"actors": "none: all in this process"}

    def machines(self) -> list[Machine]:
        """Return the present machine for every role (client, attacker, server)."""
        return self._machines

    def start(self, inputs: Inputs, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Create the server in this process; clients and attackers need no start."""
        self.restart_server(roles, saved)

    def check_server(self) -> None:
        """Do nothing, because a server in this process is always running."""

    def restart_server(self, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Create a new server from `saved`, the state of every arm."""
        self._server = Server(roles, saved)

    def run_clients(self, calls: Sequence[Call]) -> Iterator[Done]:
        """Run calls of client workers in the given order, and yield each result."""
        return self._run(self._client, "clients", calls)

    def run_attackers(self, calls: Sequence[Call], hear: Hear | None = None, ahead: bool = False) -> Iterator[Done]:
        """Run calls of attackers in the given order, and yield each result."""
        for call in calls:
            limit = nullcontext() if call.limit is None else TimeLimit(call.limit)
            done = Done(call, Overdue(), [])
            heard = listening(partial(hear, call)) if hear else nullcontext()
            with suppress(TimeLimitExceeded), limit, heard, gpu_arithmetic(tf32=False):
                [done] = self._run(self._attacker, "attackers", [call])
            yield done

    def serve(self, method: str, *args: Any, returns: int = 1) -> Any:
        """Call a method of the server, and return the result or results as values instead of references."""
        torch.set_num_threads(self._resources.server.threads)
        with exits_refused():
            return getattr(self._server, method)(*args)

    def get(self, refs: Sequence[Ref], limit: float | None = None) -> list[Any]:
        """Return the values of references, which are the references themselves in a local run."""
        return list(refs)

    def _run(
        self, worker: ClientWorker | AttackWorker, kind: Literal["clients", "attackers"], calls: Sequence[Call]
    ) -> Iterator[Done]:
        resources: Actors = getattr(self._resources, kind)
        for call in calls:
            torch.set_num_threads(resources.threads)
            where = f"the call `{call.method}` of {type(worker).__name__}"
            args = _travelled(call.args, f"to {where}")
            with explain_memory_errors(kind), exits_refused():
                made = getattr(worker, call.method)(*args)
            result = _travelled(made, f"from {where}")
            first, *rest = result if call.returns > 1 else (result,)
            yield Done(call, first, rest)


class TimeLimitExceeded(BaseException):
    """Signal that a call exceeded its time limit. It is no `Exception`, because an attack might catch those."""


class TimeLimit(TorchFunctionMode):
    """Mode that raises `TimeLimitExceeded` at the first PyTorch operation after a time limit.

    It raises only once, and never when gradients are switched on or off, because the end of a `no_grad` block must
    restore them.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._ends, self._now = now() + seconds, now

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or raise `TimeLimitExceeded`."""
        if func is not torch._C._set_grad_enabled and self._now() > self._ends:
            self._ends = inf
            raise TimeLimitExceeded
        return func(*args, **(kwargs or {}))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that serialises tensors as actors do: as CPU memory, without autograd history."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction of a tensor; use the default for all other objects."""
        if type(obj) is Tensor:
            return torch.from_numpy, (copy_to_host(obj).numpy().copy(),)
        return super().reducer_override(obj)


def _travelled(value: Any, way: str = "elsewhere") -> Any:
    """Return a value as another process would receive it; errors of serialisation have a note with the `way`."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
        return cloudpickle.loads(buffer.getvalue())
    except Exception as error:
        error.add_note(f"while pickling a value {way}")
        raise
