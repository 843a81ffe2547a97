"""A local Ray, which can start in the background while a command imports PyTorch and reads its scenario.

Either takes seconds. Nothing here needs PyTorch or rayfed's other modules, so that it can begin at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from typing import Any

from actors import ray_files
from rayfed.simulated_gpus import simulated_gpus

_LIMIT = "RAY_max_direct_call_object_size"
_OWN_LIMIT, _RAYS_LIMIT = 1 << 20, 100 << 10


def connect(**options: Any) -> None:
    """Call `ray.init` without the lines that Ray prints about itself."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def start() -> None:
    """Start a Ray on this machine that listens on 127.0.0.1 only, and remove the files of dead ones."""
    ray_files.guard_token()
    # of memory that is short, one actor at a time dies and the youngest first: not the server beside those that took it
    os.environ.setdefault("RAY_worker_killing_policy_by_group", "true")
    os.environ.setdefault(_LIMIT, str(_OWN_LIMIT))  # the way through the object store takes a millisecond each time
    with _on_loopback(), _without_what_nobody_asks():
        connect(address="local", include_dashboard=False, num_gpus=simulated_gpus() or None)
    ray_files.claim_session()


def most_in_a_message() -> int:
    """Return the bytes up to which an argument travels in the call's own message and not by the object store."""
    return int(os.environ.get(_LIMIT, _RAYS_LIMIT))


@contextmanager
def ending() -> Iterator[None]:
    """Disconnect from Ray after the block, and stop a Ray that `start` has started.

    Where the block fails its logs stay until another is started.
    """
    import ray

    well = False
    try:
        yield
        well = True
    finally:
        ray.shutdown()
        ray_files.leave_session(remove=well)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1 only, as it does by default on macOS and Windows.

    It has no option for that: what `_node_ip_address` says of this machine it replaces by an address that others reach.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _without_what_nobody_asks() -> Iterator[None]:
    """Start Ray without three processes: its API server, the autoscaler's monitor, and the monitor of logs.

    A run asks none of them: its logs go to no driver, one machine does not grow. Each imports for a second, and Ray
    waits for the first. `ray.init` has no option for it: without a dashboard, the API server starts all the same.
    """
    from ray._private import node, parameter

    made, serve = parameter.RayParams, node.Node.start_api_server
    none: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
    parameter.RayParams = partial(made, **none)  # type: ignore[assignment, misc]
    node.Node.start_api_server = lambda self, **how: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_api_server = made, serve  # type: ignore[misc, method-assign]


class _Background(Thread):
    """Thread that starts Ray and outlives its use: Ray's processes end with the thread that started them."""

    def __init__(self) -> None:
        super().__init__(name="local-ray", daemon=True)
        self.up, self.over = Event(), Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Start Ray and wait until it is no longer needed."""
        try:
            start()
        except Exception as error:
            self.error = error
        self.up.set()
        self.over.wait()


_background: _Background | None = None


@contextmanager
def starting() -> Iterator[None]:
    """Start a local Ray in the background unless one runs; it stops when the block ends."""
    import ray

    global _background
    if ray.is_initialized():
        yield
        return
    _background = _Background()
    _background.start()
    try:
        with ending():
            try:
                yield
            finally:
                _background.up.wait()
    finally:
        _background.over.set()
        _background.join()  # what Ray's C++ keeps for a thread is gone before the interpreter is
        _background = None


def is_up() -> bool:
    """Return whether a Ray was started in the background; waits for it, and raises what prevented it."""
    if _background is None:
        return False
    _background.up.wait()
    if _background.error:
        raise _background.error
    return True
