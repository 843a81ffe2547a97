"""Errors of normalisation layers that get only one value per channel, as in a batch of one sample."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType

from torch import nn

_NORMS = {"batch_norm": "batch norm", "group_norm": "group norm", "instance_norm": "instance norm"}
"""Function of `torch.nn.functional` that raises such an error -> name of the layer."""
_SAID = "Expected more than 1"


def norm_of(error: BaseException) -> str | None:
    """Return the normalisation layer's kind if an error is about one value per channel; None for other errors."""
    if not isinstance(error, ValueError) or _SAID not in str(error):
        return None
    names = [frame.f_code.co_name for frame in _frames(error.__traceback__)]
    return next((_NORMS[name] for name in reversed(names) if name in _NORMS), None)


def layer_of(error: BaseException) -> str:
    """Return the name of the innermost layer that raised an error; empty for the model itself."""
    owners = [frame.f_locals.get("self") for frame in _frames(error.__traceback__)]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    names = {module: name for name, module in modules[0].named_modules()} if modules else {}
    return next((names[module] for module in reversed(modules) if module in names), "")


def advice(norm: str) -> str:
    """Return advice (text of a message) on how to give a normalisation layer several values per channel."""
    fixed = ", or set model.batch_norm to eval" if norm == "batch norm" else ""
    return (
        f"{norm} cannot train on a batch of one sample; set training.batch_size (for an attack: batch_size) so that no "
        f"batch has one sample{fixed}"
    )


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
