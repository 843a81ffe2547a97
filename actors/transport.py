"""How values travel between actors: tensors as flat numpy memory that Ray maps without a copy.

Measured on 44 MB: 0.3 ms to read a numpy array from the object store, 177 ms to unpickle the same torch tensor. The
copy on arrival is deliberate: the store's memory is read-only, and a defence that writes to it would crash the process.
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
from rayfed.client.sent import Sent
from rayfed.memory import on_host


def register() -> None:
    """Register the serialiser of tensors in this process; tensors on a GPU arrive on the CPU."""
    ray.util.register_serializer(Tensor, serializer=_to_numpy, deserializer=_to_tensor)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return on_host(tensor).numpy()


def _to_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy())


class Held:
    """A value in the driver's process, of which most never leave it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @cached_property
    def argument(self) -> Any:
        """The value as a call's argument: small weights as they are, all else as a reference to the object store."""
        small = isinstance(self.value, Sent) and self.value.broadcast is None
        return self.value if small and self.value.nbytes <= most_in_a_message() else ray.put(self.value)


def fetched(values: Iterable[Any]) -> list[Any]:
    """Return the values, with what is behind it in place of each `Held` and each reference."""
    known = [value.value if isinstance(value, Held) else value for value in values]
    references = [value for value in known if isinstance(value, ray.ObjectRef)]
    got = iter(ray.get(references) if references else ())  # Ray starts a cluster where there is none, to get nothing
    return [next(got) if isinstance(value, ray.ObjectRef) else value for value in known]
