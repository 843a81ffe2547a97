"""Ray's files on this machine: the permissions of its token, and session folders that killed drivers leave."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

MARK = "rayfed.lock"
"""File in a session's folder that its driver holds locked as long as it lives, however it ends."""
_session: IO[bytes] | None = None
"""The lock of this process's own session."""


def guard_token() -> None:
    """Make Ray's token file readable for its owner only; Ray creates it readable for all.

    Who has it can run code as the user. Does nothing where the environment names another token, or none.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(
        os.environ
    ):
        return
    path = Path.home() / ".ray" / "auth_token"  # Ray's own default
    with suppress(OSError):  # a home that cannot be written: Ray says so
        path.parent.mkdir(exist_ok=True)
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file,
        ):
            file.write(secrets.token_hex(32))
        path.chmod(0o600)


def claim_session() -> None:
    """Mark the session of this process as rayfed's, and remove marked sessions whose drivers are dead."""
    import ray

    global _session
    node = ray._private.worker.global_worker.node
    assert node is not None
    folder = Path(node.get_session_dir_path())
    _session = _locked(folder)
    remove_dead(folder.parent)


def remove_dead(root: Path) -> None:
    """Remove the session folders in `root` that a rayfed driver has marked and no process locks any more."""
    for folder in root.glob("session_*"):
        if (folder / MARK).exists() and not folder.is_symlink() and (lock := _locked(folder)):
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()


def leave_session(remove: bool) -> None:
    """Unlock and remove this process's own session after Ray has stopped; a later `claim_session` removes leftovers."""
    global _session
    if _session:
        if remove:
            shutil.rmtree(Path(_session.name).parent, ignore_errors=True)
        _session.close()
        _session = None


def _locked(folder: Path) -> IO[bytes] | None:
    """Return the mark of a session, locked by this process; None if another process or user holds it."""
    try:
        mark = (folder / MARK).open("ab")
    except OSError:
        return None
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        mark.close()
        return None
    return mark
