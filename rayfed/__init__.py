"""Federated learning that measures its own leaks: attacks, defences, aggregation and the engine that runs them.

Everything below this package is plain PyTorch and works without Ray; `actors` adds Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from rayfed.analysis.loading import Run, Sweep
    from rayfed.recording import Recorder
    from rayfed.update import LocalTraining

__all__ = ["__version__", "load", "record"]
__version__ = "0.2.0.dev0"


def load(path: str | PathLike[str]) -> Run | Sweep:
    """The run or sweep at a local path or fsspec URL, to look at: tables, images, settings, fronts.

    Raises `rayfed.errors.RunError` where there is none.
    """
    from rayfed.analysis import loading  # `import rayfed` stays light

    return loading.load(fspath(path))


def record(
    model: nn.Module,
    folder: str | PathLike[str],
    local: LocalTraining | None = None,
    *,
    truth: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    classes: int | None = None,
    shape: Sequence[int] | None = None,
) -> Recorder:
    """Record what a server sees of a federation's updates into a folder, for `rayfed replay`.

    In ``with record(model, "updates", LocalTraining(steps=5, lr=0.1)) as r:`` call, for each client of each round,
    ``r.round(sent, returned, (images, labels))``.

    `local` are the steps behind a state that is returned; without it gradients are. With `truth` the samples themselves
    are written, too, so that reconstructions can be scored: never by default. `mean` and `std` (per channel) are those
    by which your transform normalises images that were in [0, 1]; `classes` is found by a forward pass unless given,
    `shape` (C, H, W) from the images; a server that has none says it, and gives their number in place of a batch.
    """
    from rayfed import recording  # `import rayfed` stays light

    return recording.Recorder(model, folder, local, truth=truth, mean=mean, std=std, classes=classes, shape=shape)
