"""Watch on the local raylet (Ray's node process): if the raylet dies, the run ends with a report."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread, current_thread, main_thread
from types import FrameType

import ray

from actors.ray_errors import raylet_died


@contextmanager
def watched() -> Iterator[None]:
    """Interrupt the block with a `ResourceError` if the raylet (Ray's node process) dies, and disconnect from Ray.

    Does nothing in other threads than the main thread, which cannot be interrupted.
    """
    if current_thread() is not main_thread():
        yield
        return
    watch, before = _Watch(), signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if watch.died or before is signal.SIG_DFL:
            raise KeyboardInterrupt
        if callable(before):  # it is not if the signal is ignored, as in background jobs of a shell
            before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    watch.start()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not watch.died:
            raise
        ray.shutdown()
        raise raylet_died() from error
    finally:
        watch.end()
        signal.signal(signal.SIGINT, before)


class _Watch(Thread):
    """Thread that waits for the end of a connection to the raylet."""

    def __init__(self) -> None:
        super().__init__(name="raylet-watch", daemon=True)
        self.died = self._over = False
        node = ray._private.worker.global_worker.node
        assert node is not None
        self._name, self._socket = node.raylet_socket_name, socket.socket(socket.AF_UNIX)

    def run(self) -> None:
        """Interrupt the main thread when the connection ends or fails."""
        with suppress(OSError):
            self._socket.connect(self._name)
            self._socket.recv(1)
        if not self._over:
            self.died = True
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    def end(self) -> None:
        """Close the connection and stop the thread."""
        self._over = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
