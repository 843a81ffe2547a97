"""Setup of an actor's process: threads, device, and the serialisation of tensors."""

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
from ray.util.placement_group import PlacementGroup

from actors import transport
from rayfed.core.memory import keep_within
from rayfed.core.simulated_gpus import simulated_gpus
from rayfed.core.user_exits import exits_refused
from rayfed.simulation.machine import Machine, check_arithmetic, device_for, set_gpu_arithmetic, this_machine


@dataclass(frozen=True)
class ResourceShare:
    """Share of a node (CPUs, GPUs) that one actor may use."""

    num_cpus: float
    num_gpus: float
    search_path: tuple[str, ...] = ()
    """The driver's folders of modules, so that the actor can import a scenario's dotted paths."""
    deterministic: str = "machine"
    """`resources.deterministic` of the scenario."""
    tf32: bool = False
    """Whether a GPU may round to TF32."""
    node: str = ""
    """Ray's identifier of the preferred node. Empty: any node."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that the node must have. It must not have a value that is written with `!`."""
    place: tuple[PlacementGroup, int] | None = None
    """Placement group with the reserved room, and the index of the bundle. None: any free room."""

    def __str__(self) -> str:
        return f"{self.num_cpus:g} CPU" + (f" and {self.num_gpus:g} GPU" if self.num_gpus else "")

    @property
    def threads(self) -> int:
        """Return the number of PyTorch threads of the actor, which affects the order of sums in convolutions."""
        return max(1, ceil(self.num_cpus))

    @property
    def resources(self) -> dict[str, float]:
        """Return the CPUs and GPUs, as Ray names them, without those that are 0."""
        return {name: value for name, value in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if value}

    def may_be_on(self, labels: Mapping[str, str]) -> bool:
        """Return whether the actor may be placed on a node with the given labels."""
        return all((labels.get(name) == value.strip("!")) != value.startswith("!") for name, value in self.labels)


def set_up(share: ResourceShare) -> torch.device:
    """Apply a share of a node to this process (threads, GPU memory), and return the device to compute on.

    The number of threads depends on the scenario and not on the machine, because it changes the order of sums in
    convolutions. Ray uses a fraction of a GPU only for scheduling, so the memory is limited here.
    """
    transport.register()
    keep_freed_memory()
    sys.path += [folder for folder in share.search_path if folder not in sys.path]
    torch.set_num_threads(share.threads)
    set_gpu_arithmetic(share.tf32)
    if not share.num_gpus or simulated_gpus():
        return torch.device("cpu")
    if share.num_gpus < 1 and torch.cuda.is_available():  # if it is not, `Renewable.machine` raises
        keep_within(share.num_gpus)
    return torch.device("cuda")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations, as all training steps allocate the same amounts.

    This avoids 400 to 700 page faults per step of LeNet-5, and saves a third of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # glibc's maximum
        mallopt(_TRIM_THRESHOLD, 512 << 20)


class Arrival(NamedTuple):
    """Machine and node on which an actor has started."""

    machine: Machine
    node: str
    """Ray's identifier of the node."""


class Renewable:
    """Base class of Ray actors that report their machine and can be reused by the next run."""

    computes = True
    """Whether the actor computes on the GPU of its share."""

    def __init_subclass__(cls) -> None:
        """Convert exits in calls into errors; otherwise Ray would end the actor and repeat the call."""
        super().__init_subclass__()
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                setattr(cls, name, exits_refused()(method))

    def machine(self, share: ResourceShare) -> Machine:
        """Return the machine of this process. Raises `ResourceError` if the scenario requires other arithmetic."""
        check_arithmetic(share.deterministic)
        return this_machine(type(self).__name__, device_for(share.num_gpus if self.computes else 0))

    def arrive(self, share: ResourceShare) -> Arrival:
        """Return the machine and the node of this process. Raises the errors of `machine`."""
        return Arrival(self.machine(share), ray.get_runtime_context().get_node_id())

    def renew(self, share: ResourceShare, *arguments: Any) -> Arrival:
        """Initialise a reused actor again with a share and constructor arguments, and return the result of `arrive`."""
        self.__dict__.clear()
        self.__init__(share, *arguments)  # type: ignore[misc]
        return self.arrive(share)
