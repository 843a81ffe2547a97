"""Federated learning that measures its own leaks: attacks, defences, aggregation and the engine that runs them.

Everything below this package is plain PyTorch and works without Ray; `actors` adds Ray.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayfed.analysis.loading import Run, Sweep

__all__ = ["__version__", "load"]
__version__ = "0.2.0.dev0"


def load(path: str | PathLike[str]) -> Run | Sweep:
    """The run or sweep at a local path or fsspec URL, to look at: tables, images, settings, fronts.

    Raises `rayfed.errors.RunError` where there is none.
    """
    from rayfed.analysis import loading  # `import rayfed` stays light

    return loading.load(fspath(path))
