"""Cache for facts that attacks compute from a model, shared by attacks on the same model at the same weights."""

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
"""Maximum number of cached results of one kind, which limits memory when many rounds are attacked."""


class Memory:
    """Cache of attack results for one model, by kind and key."""

    def __init__(self) -> None:
        self._found: defaultdict[str, OrderedDict[Hashable, Any]] = defaultdict(OrderedDict)

    def once(self, kind: str, what: Hashable, find: Callable[[], Found], most: int = _MOST) -> Found:
        """Return the result cached under `kind` and `what`, or compute and cache the result of `find`.

        The cache keeps the `most` recently used results of a kind.
        """
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
"""Cached results for models used outside `remembering`."""


@contextmanager
def remembering(memory: Memory) -> Iterator[None]:
    """Cache results of attacks within the `with` block in `memory`.

    All blocks with the same `memory` must attack the same model.
    """
    token = _MEMORY.set(memory)
    try:
        yield
    finally:
        _MEMORY.reset(token)


def once(kind: str, what: Hashable, observation: Observation, find: Callable[[], Found], most: int = _MOST) -> Found:
    """Return the result of `find`, cached by an observation's weights and public samples inside `remembering`.

    `what` holds everything else in the observation on which the result depends. Outside `remembering`, `find` is called
    every time.
    """
    memory = _MEMORY.get()
    if memory is None:
        return find()
    return memory.once(kind, (what, _digest(observation)), find, most)


def once_for(model: nn.Module, kind: str, what: Hashable, find: Callable[[], Found]) -> Found:
    """Return the result of `find`, cached for a model; the result must depend only on the model's current weights."""
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
