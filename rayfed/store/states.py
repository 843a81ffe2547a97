"""Serialisation of states for `torch.load(weights_only=True)`: tensors, scalars, bytes, None and containers."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import torch
from torch import Tensor


def serialise_state(state: Any, where: str) -> bytes:
    """Serialise a state to bytes; raise `TypeError`, with the path to the value in `where`, for unsupported types."""
    buffer = BytesIO()
    torch.save(_plain(state, where), buffer)
    return buffer.getvalue()


def deserialise_state(data: bytes) -> Any:
    """Deserialise a state from bytes, with tensors on the CPU; no code in the bytes is executed."""
    return torch.load(BytesIO(data), map_location="cpu", weights_only=True)


def _plain(value: Any, where: str) -> Any:
    """Return a value on the CPU, with views copied so that their whole storage is not saved."""
    if isinstance(value, Tensor):
        here = value.detach().cpu()
        return here.clone() if here.untyped_storage().nbytes() > here.nbytes else here
    if isinstance(value, dict):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}, but a checkpoint can only hold tensors, numbers, strings and containers"
    )
