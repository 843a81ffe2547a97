"""Helpers for tests of whole runs: shared actors, killed actors, and recorded messages between processes."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorClass, ActorMethod
from ray.exceptions import RayActorError

from actors import executor
from actors import sweep as sweeps
from actors.actor_pool import Acquired, ActorPool
from actors.executor import RayExecutor, on_ray
from actors.process import ResourceShare
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.simulation.progress import Progress
from rayfed.store import checkpoint
from rayfed.store.folder import RunFolder
from tests.helpers.progress_fixtures import Noting

CPUS = 4
"""Number of CPUs that the tests' Ray assumes."""

BIG = """
name: big
data: {name: digits, size: 8, train_samples: 64, test_samples: 20}
model: {name: mlp, hidden: [2000, 2000]}
training: {batch_size: 8}
federation: {rounds: 2, clients: 8, cohort_size: 1, aggregation: median}
resources: {clients: {actors: 2}}
"""
"""A scenario whose rounds' updates are 8 x 17 MB."""


class SharedActorPool(ActorPool):
    """A pool that keeps actors between runs, and ends idle ones if another kind needs their CPUs."""

    def acquire(self, kind: type, share: ResourceShare, *arguments: Any) -> Acquired:
        if not self._idle[kind.__name__, share]:
            while self._taken() + share.num_cpus > CPUS and self._end_one():
                pass
        return super().acquire(kind, share, *arguments)

    def end_idle(self) -> None:
        """End all idle actors."""
        while self._end_one():
            pass

    def _taken(self) -> float:
        return sum(share.num_cpus for _, share in self._kinds.values())

    def _end_one(self) -> bool:
        for idle in self._idle.values():
            if idle:
                self.release(idle.pop(), keep=False)
                return True
        return False


ACTORS = SharedActorPool()


@contextmanager
def sharing_actors() -> Iterator[None]:
    """Make runs of this process share the actors of `ACTORS`, as the trials of a sweep do."""
    closing, connected = executor._closing, sweeps.connected

    def alone(*arguments: Any) -> Any:
        ACTORS.end_idle()  # trials start other actors
        return connected(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweeps, "connected", alone)
        patched.setattr(executor, "ActorPool", lambda: ACTORS)
        patched.setattr(executor, "_closing", lambda opened, keep: closing(opened, keep=True))
        patched.setattr(executor, "reserving", lambda *_: nullcontext(None))  # kept actors hold the room
        yield
    ACTORS.end_idle()


def weights(folder: RunFolder) -> dict[str, Any]:
    saved = checkpoint.load(folder)
    assert saved is not None
    return saved.server


def assert_same_bits(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_bits(a[key], b[key])
    else:
        assert torch.equal(a, b)


class Killer(Noting):
    """Kill an actor of one class in the middle of a round."""

    def __init__(self, name: str, round: int) -> None:
        super().__init__()
        ACTORS.end_idle()  # so that the killed actor belongs to the run
        self.name, self.round, self.killed = name, round, 0

    def clients_done(self, round: int, done: int, total: int) -> None:
        if round != self.round or self.killed:
            return
        os.kill(_process_of(self.name), signal.SIGKILL)
        self.killed += 1


def _process_of(actor: str) -> int:
    """Return the process of a live actor of this Ray, by its title. Actors of another Ray are ignored."""
    session = ray._private.worker._global_node.get_session_dir_path().encode()
    titles = dict[int, bytes]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            titles[int(process.name)] = (process / "cmdline").read_bytes()
    found = [pid for pid, title in titles.items() if title.startswith(f"ray::{actor}".encode())]
    return next(pid for pid in found if session in titles[_parent(pid)])


def _parent(process: int) -> int:
    status = Path(f"/proc/{process}/stat").read_text()
    return int(status.rpartition(")")[2].split()[1])


def kill(actor: Any) -> None:
    """End an actor and wait until it is dead, because `ray.kill` only sends a message."""
    ray.kill(actor)
    with suppress(RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote())


def type_of(actor: Any) -> str:
    return str(actor._ray_actor_creation_function_descriptor.class_name).rpartition(".")[2]


@dataclass
class Spied:
    """A run, all values sent to actors and the object store, and the actors' memory at the end."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    """The actor's class, or class and method, with the arguments of each call."""
    put: list[Any] = field(default_factory=list)
    held: dict[str, tuple[list[bytes], list[int]]] = field(default_factory=dict)
    """All strings, bytes and large numbers in the memory of the server and of an attacker."""
    folder: RunFolder = field(init=False)

    def assert_without(self, secrets: Mapping[str, bytes], numbers: set[int]) -> None:
        """Check that no secret was sent, and that server and attacker have neither secrets nor numbers."""
        everything = pickle.dumps([self.put, [arguments for _, arguments in self.calls]])
        assert not [name for name, secret in secrets.items() if secret in everything]
        for process, (texts, known) in self.held.items():
            assert len(texts) > 1000, process
            for name, secret in secrets.items():
                assert not any(secret in text for text in texts), f"{process} holds {name}"
            assert not numbers & set(known), process


def spied_launch(scenario: Scenario, folder: Path, progress: Progress | None = None) -> Spied:
    """Launch a scenario with attacks and record all messages to actors."""
    spied = Spied()
    ACTORS.end_idle()  # new processes have only this run in memory
    create, call, into_store, close = ActorClass._remote, ActorMethod._remote, ray.put, RayExecutor.close

    def note(name: str, args: Any, kwargs: Any) -> None:
        spied.calls.extend((name, given) for given in (args, kwargs) if given)

    def spied_create(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        handle = create(self, args, kwargs, **options)
        note(type_of(handle), args, kwargs)
        return handle

    def spied_call(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        note(f"{type_of(self._actor)}.{self._method_name}", args, kwargs)
        return call(self, args, kwargs, **options)

    def spied_put(value: Any, **options: Any) -> Any:
        spied.put.append(value)
        return into_store(value, **options)

    def inspected(self: RayExecutor, keep: bool = False) -> None:
        assert self._attackers is not None
        for name, actor in (("server", self._server.actor), ("attacker", self._attackers._actors[0])):
            spied.held[name] = ray.get(actor.__ray_call__.remote(_held))
        close(self, keep)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ActorClass, "_remote", spied_create)
        patched.setattr(ActorMethod, "_remote", spied_call)
        patched.setattr(ray, "put", spied_put)
        patched.setattr(RayExecutor, "close", inspected)
        spied.folder = runner.launch(scenario, str(folder), on_ray(), progress or Progress())
    spied.calls = [(name, _resolved(given)) for name, given in spied.calls]
    return spied


def _resolved(value: Any) -> Any:
    if isinstance(value, ray.ObjectRef):
        return ray.get(value)
    if isinstance(value, list | tuple):
        return [_resolved(item) for item in value]
    return value


def _held(actor: Any) -> tuple[list[bytes], list[int]]:
    """Return all strings, bytes and large numbers in an actor's process."""
    texts, numbers = set[bytes](), set[int]()
    for owner in gc.get_objects():
        for value in gc.get_referents(owner):
            if isinstance(value, bytes | bytearray):
                texts.add(bytes(value))
            elif isinstance(value, str):
                texts.add(value.encode(errors="replace"))
            elif (type(value) is int and value > 1 << 28) or type(value).__name__ == "mpz":
                numbers.add(int(value))
    return list(texts), list(numbers)


def arm_weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Return the weights of the arm `none` in the checkpoint."""
    found: dict[str, torch.Tensor] = weights(folder)["none"]["weights"]
    return found


def rows(folder: RunFolder, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table."""
    found: list[dict[str, Any]] = folder.read_table(table).to_pylist()
    return found
