"""Classification of Ray's exceptions: which calls to repeat, and what to tell the user."""

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

from rayfed.engine.executor import Lost
from rayfed.errors import Killed, ResourceError, UserError

DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError)
"""What a call raises whose actor has died; Ray's memory killer has an exception of its own."""
_NODE_DIED = "its node has died"
"""Ray's words where the actor's machine is gone: the exception has no field that says so."""


class Loss(Enum):
    """The cause of an actor's death."""

    NODE = auto()
    """Its machine is gone, with all that was there: no fault of the call's."""
    MEMORY = auto()
    """Ray's memory killer chose it, as a machine had too little: it may be innocent."""
    PROCESS = auto()
    """Its process ended: the call crashed, or somebody killed it."""


def loss_of(error: Exception) -> Loss:
    """Return why an actor has died, from one of the exceptions in `DEATHS`."""
    if isinstance(error, OutOfMemoryError):
        return Loss.MEMORY
    if isinstance(error, NodeDiedError) or getattr(error, "preempted", False) or _NODE_DIED in str(error):
        return Loss.NODE
    return Loss.PROCESS


def original(error: RayTaskError) -> Exception:
    """Return the exception that the call raised, or Ray's own error about an argument or the machine.

    A defect, and a mistake in the user's own code, has the traceback that it had in the actor as a note.
    """
    cause: Exception = error.cause
    if isinstance(cause, RayTaskError):
        return error
    if not isinstance(cause, UserError | RayError):
        cause.add_note(str(error))
    return cause


def brief(error: Exception) -> str:
    """Return the message of one of `DEATHS`; of a memory killer's, the first line, which has the figures."""
    return str(error).partition("\n")[0] if loss_of(error) is Loss.MEMORY else str(error)


@contextmanager
def telling_losses() -> Iterator[None]:
    """Turn Ray's errors about a dead server and lost objects into `Lost`."""
    try:
        yield
    except DEATHS as error:
        raise Lost("the server died", brief(error)) from error
    except ObjectLostError as error:
        raise Lost("an object was lost", str(error)) from error


@contextmanager
def in_words_for_people() -> Iterator[None]:
    """Turn Ray's errors about the machine into a `ResourceError` that says what to do.

    A signal that came while Ray waited is named again: Ray knows Ctrl-C alone.
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
            "/tmp/ray): make room there, or name a larger disk with RAY_TMPDIR; complete rounds are kept and `rayfed "
            "resume` goes on from there"
        ) from error
    except LocalRayletDiedError as error:
        raise raylet_died() from error


def raylet_died() -> ResourceError:
    """Return the error for a run whose local raylet has died."""
    return ResourceError(
        "Ray's raylet on this machine has died (killed, or out of memory or disk: its log is raylet.err in Ray's "
        "temporary folder, by default /tmp/ray/session_latest/logs); complete rounds are kept and `rayfed resume` goes "
        "on from there"
    )
