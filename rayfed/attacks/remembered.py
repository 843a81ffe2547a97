"""What an attacker finds of a model alone, kept for its later attacks on the same model at the same weights."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rayfed.update import Observation

Found = TypeVar("Found")
_MOST = 16
"""Findings of a kind that are kept: those of more weights, such as of many earlier rounds, would fill memory."""


class Memory:
    """Findings of a model, by kind, by what they are and the weights that they are of."""

    def __init__(self) -> None:
        self._found: defaultdict[str, OrderedDict[Hashable, Any]] = defaultdict(OrderedDict)

    def once(self, kind: str, what: Hashable, find: Callable[[], Found], most: int = _MOST) -> Found:
        """Return what is known, or find it; of a kind the `most` that were asked for last are kept."""
        known = self._found[kind]
        if what not in known:
            while len(known) >= most:
                known.popitem(last=False)
            known[what] = find()
        known.move_to_end(what)
        found: Found = known[what]
        return found


_MEMORY: ContextVar[Memory | None] = ContextVar("memory", default=None)
_ALONE: WeakKeyDictionary[nn.Module, Memory] = WeakKeyDictionary()
"""What was found of models outside of `remembering`."""


@contextmanager
def remembering(memory: Memory) -> Iterator[None]:
    """Keep what attacks find in the block of a model, which has to be the same for all of a memory's blocks."""
    token = _MEMORY.set(memory)
    try:
        yield
    finally:
        _MEMORY.reset(token)


def once(kind: str, what: Hashable, observation: Observation, find: Callable[[], Found], most: int = _MOST) -> Found:
    """Return what is found of a model at an observation's weights, and with the public samples that it grants.

    `what` is all else of the observation that a finding of this kind depends on. Outside of `remembering` it is found
    anew.
    """
    memory = _MEMORY.get()
    if memory is None:
        return find()
    return memory.once(kind, (what, _digest(observation)), find, most)


def once_for(model: nn.Module, kind: str, what: Hashable, find: Callable[[], Found]) -> Found:
    """Return what is found of a model at its own weights, whatever the observation."""
    memory = _MEMORY.get()
    if memory is None:
        memory = _ALONE.setdefault(model, Memory())
    return memory.once(kind, what, find)


def _digest(observation: Observation) -> bytes:
    """Return a digest of an observation's weights, buffers and public samples."""
    digest = blake2b()
    parts = {"weights": observation.weights, "buffers": observation.buffers}  # a private weight is among the buffers
    parts["public"] = {str(place): tensor for place, tensor in enumerate(observation.extra.get("public", ()))}
    for part, name, tensor in ((part, *item) for part, tensors in parts.items() for item in tensors.items()):
        digest.update(f"{part} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
