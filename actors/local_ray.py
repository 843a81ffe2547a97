"""Start of a local Ray, in the background while a command imports PyTorch and reads the scenario.

This module imports no PyTorch and little of rayfed, so that Ray can start at once.
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
from rayfed.core.simulated_gpus import simulated_gpus

_LIMIT = "RAY_max_direct_call_object_size"
_OWN_LIMIT, _RAYS_LIMIT = 1 << 20, 100 << 10
_own = False
"""Whether `start` has started the present Ray of this process."""


def connect(**options: Any) -> None:
    """Call `ray.init` with the given options, and suppress Ray's own output."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def start() -> None:
    """Start a local Ray that listens only on 127.0.0.1, and remove the files of dead Ray sessions."""
    global _own
    _own = True
    ray_files.guard_token()
    # If memory is short, kill one actor at a time, the youngest first, and not the server.
    os.environ.setdefault("RAY_worker_killing_policy_by_group", "true")
    os.environ.setdefault(_LIMIT, str(_OWN_LIMIT))  # each use of the object store takes a millisecond
    with _on_loopback(), _without_what_nobody_asks():
        connect(address="local", include_dashboard=False, num_gpus=simulated_gpus() or None)
    ray_files.claim_session()


def most_in_a_message() -> int:
    """Return the maximum size in bytes of an argument that Ray sends in a call's message, not by the object store."""
    return int(os.environ.get(_LIMIT, _RAYS_LIMIT))


@contextmanager
def ending() -> Iterator[None]:
    """Disconnect from Ray after the block, and stop Ray if `start` has started it.

    If the block fails, Ray's logs are kept until another Ray is started.
    """
    import ray

    global _own
    well = False
    try:
        yield
        well = True
    finally:
        _own = False
        ray.shutdown()
        ray_files.leave_session(remove=well)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1 only, as it does by default on macOS and Windows.

    Ray has no option for this: it replaces a local `_node_ip_address` by an address that other machines can reach.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _without_what_nobody_asks() -> Iterator[None]:
    """Start Ray without three processes that runs do not need: API server, autoscaler monitor and log monitor.

    Each takes a second to import, and Ray waits for the first. `ray.init` has no option for this: the API server starts
    even without a dashboard.
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
    """Thread that starts Ray and lives as long as Ray is needed, because Ray's processes end with this thread."""

    def __init__(self) -> None:
        super().__init__(name="local-ray", daemon=True)
        self.up, self.over = Event(), Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Start Ray, and wait until Ray is no longer needed."""
        try:
            start()
        except Exception as error:
            self.error = error
        self.up.set()
        self.over.wait()


_background: _Background | None = None


@contextmanager
def starting() -> Iterator[None]:
    """Start a local Ray in the background, unless Ray is already connected, and stop it when the block ends."""
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
        _background.join()  # Ray's C++ code frees the thread's data before the interpreter ends
        _background = None


def is_own() -> bool:
    """Return whether `start` has started this process's Ray, or is starting it in the background."""
    return _own or _background is not None


def is_up() -> bool:
    """Return whether Ray was started in the background. Waits for the start, and raises the error of a failed start."""
    if _background is None:
        return False
    _background.up.wait()
    if _background.error:
        raise _background.error
    return True
