"""Classification of Ray's exceptions: which calls to repeat, and which message to show to the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rayfed.errors import Killed, ResourceError, UserError
from rayfed.simulation.executors.base import Lost

DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError)
"""Exceptions of a call whose actor has died, including the exception of Ray's memory killer."""
_NODE_DIED = "its node has died"
"""Part of Ray's message if the actor's node is gone, as the exception has no field for this."""


class Loss(Enum):
    """Cause of an actor's death: node, memory or process."""

    NODE = auto()
    """The actor's node is gone. The call is not the cause."""
    MEMORY = auto()
    """Ray's memory killer ended the actor because memory was short. The call may not be the cause."""
    PROCESS = auto()
    """The actor's process ended: the call crashed, or the process was killed."""


def loss_of(error: Exception) -> Loss:
    """Return the cause of an actor's death, given the exception that Ray raised (one of `DEATHS`)."""
    if isinstance(error, OutOfMemoryError):
        return Loss.MEMORY
    if isinstance(error, NodeDiedError) or getattr(error, "preempted", False) or _NODE_DIED in str(error):
        return Loss.NODE
    return Loss.PROCESS


def original(error: RayTaskError) -> Exception:
    """Return the exception that an actor's call raised, or Ray's own error about an argument or the machine.

    Exceptions other than `UserError` get the actor's traceback as a note.
    """
    cause: Exception = error.cause
    if isinstance(cause, RayTaskError):
        return error
    if not isinstance(cause, UserError | RayError):
        cause.add_note(str(error))
    return cause


def brief(error: Exception) -> str:
    """Return the message of an actor's death; for Ray's memory killer only the first line, which has the numbers."""
    return str(error).partition("\n")[0] if loss_of(error) is Loss.MEMORY else str(error)


@contextmanager
def telling_losses() -> Iterator[None]:
    """Convert Ray's errors about a dead server or lost objects in the block into `Lost`."""
    try:
        yield
    except DEATHS as error:
        raise Lost("the server died", brief(error)) from error
    except ObjectLostError as error:
        raise Lost("an object was lost", str(error)) from error


@contextmanager
def in_words_for_people() -> Iterator[None]:
    """Convert Ray's errors about the machine (disk, raylet) in the block into a `ResourceError` with advice.

    A `KeyboardInterrupt` becomes `Killed` if another signal caused it, because Ray knows only Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if Killed.came is None or isinstance(error, Killed):
            raise
        raise Killed(Killed.came) from error
    except (OutOfDiskError, ObjectStoreFullError) as error:
        raise ResourceError(
            "Ray's object store is full, and so is the disk that it spills to (its temporary folder, by default "
            "/tmp/ray): free space there, or set RAY_TMPDIR to a folder on a larger disk. Complete rounds are kept and "
            "`rayfed resume` continues after them"
        ) from error
    except LocalRayletDiedError as error:
        raise raylet_died() from error


def raylet_died() -> ResourceError:
    """Return the error to raise if Ray's node process on this machine (raylet) has died during a run."""
    return ResourceError(
        "Ray's raylet on this machine has died. It was killed, or had no memory or disk space: see the log raylet.err "
        "in Ray's temporary folder, by default /tmp/ray/session_latest/logs. Complete rounds are kept and `rayfed "
        "resume` continues after them"
    )
