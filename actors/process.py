"""Set-up of an actor's process: threads, device, and the serialisation of tensors."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import ray
import torch

from actors import transport
from rayfed.engine.machine import Machine, check_arithmetic, device_for, set_gpu_arithmetic, this_machine
from rayfed.memory import keep_within
from rayfed.simulated_gpus import simulated_gpus
from rayfed.user_exits import exits_refused


@dataclass(frozen=True)
class ResourceShare:
    """Share of a node that one actor may use."""

    num_cpus: float
    num_gpus: float
    search_path: tuple[str, ...] = ()
    """Folders in which the driver looks modules up, so that a scenario's dotted paths are found here too."""
    deterministic: str = "machine"
    """`resources.deterministic` of the scenario."""
    tf32: bool = False
    """Whether a GPU may round to TF32."""
    node: str = ""
    """Ray's number of the node to be on while that is there and has room; empty for any."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that the node has to have; a value that begins with `!` is one that it must not have."""

    def __str__(self) -> str:
        return f"{self.num_cpus:g} CPU" + (f" and {self.num_gpus:g} GPU" if self.num_gpus else "")

    @property
    def threads(self) -> int:
        """Number of threads, which affects the order of sums in convolutions."""
        return max(1, ceil(self.num_cpus))

    def may_be_on(self, labels: Mapping[str, str]) -> bool:
        """Return whether the share allows a node with these labels."""
        return all((labels.get(name) == value.strip("!")) != value.startswith("!") for name, value in self.labels)


def set_up(share: ResourceShare) -> torch.device:
    """Apply a share to this process and return its device.

    The number of threads follows the scenario and not the machine, for it changes the order of sums inside a
    convolution. A fraction of a GPU is a scheduling hint to Ray alone, so the memory is capped here.
    """
    transport.register()
    keep_freed_memory()
    sys.path += [folder for folder in share.search_path if folder not in sys.path]
    torch.set_num_threads(share.threads)
    set_gpu_arithmetic(share.tf32)
    if not share.num_gpus or simulated_gpus():
        return torch.device("cpu")
    if share.num_gpus < 1 and torch.cuda.is_available():  # where it is not, `Renewable.machine` says so
        keep_within(share.num_gpus)
    return torch.device("cuda")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next allocation: every training step allocates the same.

    Measured on LeNet-5: 400 to 700 page faults a step without, none with, and a third of the time saved.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries than glibc have none
    if mallopt:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        mallopt(_TRIM_THRESHOLD, 512 << 20)


class Arrival(NamedTuple):
    """Where an actor has started: its node, process and machine."""

    machine: Machine
    node: str
    """Ray's number of the node."""


class Renewable:
    """Base of actors: each reports where it runs, and one run can leave it to the next."""

    computes = True
    """Whether it takes a GPU of its share."""

    def __init_subclass__(cls) -> None:
        """Refuse exits in every call: Ray takes a `SystemExit` for an order, ends the actor and repeats the call."""
        super().__init_subclass__()
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                setattr(cls, name, exits_refused()(method))

    def machine(self, share: ResourceShare) -> Machine:
        """Return the machine of this process; raises `ResourceError` if it does not calculate as the scenario asks."""
        check_arithmetic(share.deterministic)
        return this_machine(type(self).__name__, device_for(share.num_gpus if self.computes else 0))

    def arrive(self, share: ResourceShare) -> Arrival:
        """Return where this process runs; raises as `machine` does."""
        return Arrival(self.machine(share), ray.get_runtime_context().get_node_id())

    def renew(self, share: ResourceShare, *arguments: Any) -> Arrival:
        """Initialise the actor again with its share and these arguments, and return where it runs, as `arrive` does."""
        self.__dict__.clear()
        self.__init__(share, *arguments)  # type: ignore[misc]
        return self.arrive(share)
