"""A local Ray that starts in the background, while a command imports PyTorch and reads its scenario.

Either takes seconds. Nothing here needs PyTorch or rayfed's other modules, so that it can begin at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any


def init(**options: Any) -> None:
    """Call `ray.init` without its own lines (where it runs, deprecations), which are not about the run."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


class _Background(Thread):
    """Thread that starts Ray and stays while it is needed: Ray's processes end with the thread that started them."""

    def __init__(self) -> None:
        super().__init__(name="local-ray", daemon=True)
        self.up, self.over = Event(), Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Start Ray and wait until it is not needed any more."""
        try:
            init(address="local", include_dashboard=False)
        except Exception as error:
            self.error = error
        self.up.set()
        self.over.wait()


_background: _Background | None = None


@contextmanager
def starting() -> Iterator[None]:
    """Start a Ray in the background unless there is one; it ends with this block, used or not."""
    import ray

    global _background
    if ray.is_initialized():
        yield
        return
    _background = _Background()
    _background.start()
    try:
        yield
    finally:
        _background.up.wait()
        ray.shutdown()
        _background.over.set()
        _background = None


def is_up() -> bool:
    """Return whether a Ray was started in the background; waits for it, and raises what prevented it."""
    if _background is None:
        return False
    _background.up.wait()
    if _background.error:
        raise _background.error
    return True
