"""Transfer of tensors between actors as NumPy arrays, which Ray reads without a copy.

Reading 44 MB from the object store takes 0.3 ms as a NumPy array, and 177 ms as a pickled tensor. Arrays are copied on
arrival, because the store's memory is read-only and a defence that writes to it would crash the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import ray
import ray.util
import torch
from torch import Tensor

from actors.local_ray import most_in_a_message
from rayfed.core.memory import copy_to_host
from rayfed.simulation.client.server_message import Sent


def register() -> None:
    """Register the serialiser of tensors for Ray in this process. Tensors on a GPU arrive on the CPU."""
    ray.util.register_serializer(Tensor, serializer=_to_numpy, deserializer=_to_tensor)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return copy_to_host(tensor).numpy()


def _to_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy())


class Held:
    """Value in the driver's process, which is put into Ray's object store only when a call needs the value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @cached_property
    def argument(self) -> Any:
        """Return the value as an argument of a call: small weights directly, other values as object references."""
        small = isinstance(self.value, Sent) and self.value.broadcast is None
        return self.value if small and self.value.nbytes <= most_in_a_message() else ray.put(self.value)


def fetched(values: Iterable[Any]) -> list[Any]:
    """Return `values` with each `Held` and each object reference replaced by its value."""
    known = [value.value if isinstance(value, Held) else value for value in values]
    references = [value for value in known if isinstance(value, ray.ObjectRef)]
    got = iter(ray.get(references) if references else ())  # `ray.get([])` would start Ray if it is not connected
    return [next(got) if isinstance(value, ray.ObjectRef) else value for value in known]
