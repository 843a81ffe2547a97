"""Protection of Ray's token on this machine, and removal of the session folders of killed drivers."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

MARK = "rayfed.lock"
"""File in a session's folder that is locked by its driver as long as the driver is alive."""
_session: IO[bytes] | None = None
"""The locked file of this process's session."""


def guard_token() -> None:
    """Make Ray's token file readable only for the file's owner, because Ray creates the file readable for all users.

    With the token, other users could run code as the owner. Does nothing if the environment sets another token or mode.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(
        os.environ
    ):
        return
    path = Path.home() / ".ray" / "auth_token"  # Ray's own default
    with suppress(OSError):  # Ray reports a home that is not writable
        path.parent.mkdir(exist_ok=True)
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file,
        ):
            file.write(secrets.token_hex(32))
        path.chmod(0o600)


def claim_session() -> None:
    """Mark this process's Ray session folder as rayfed's, and remove marked session folders of dead drivers."""
    import ray

    global _session
    node = ray._private.worker.global_worker.node
    assert node is not None
    folder = Path(node.get_session_dir_path())
    _session = _locked(folder)
    remove_dead(folder.parent)


def remove_dead(root: Path) -> None:
    """Remove the Ray session folders in `root` that a rayfed driver marked and that no process locks."""
    for folder in root.glob("session_*"):
        if (folder / MARK).exists() and not folder.is_symlink() and (lock := _locked(folder)):
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()


def leave_session(remove: bool) -> None:
    """Unlock this process's Ray session folder after Ray has stopped and, with `remove`, delete the folder."""
    global _session
    if _session:
        if remove:
            shutil.rmtree(Path(_session.name).parent, ignore_errors=True)
        _session.close()
        _session = None


def _locked(folder: Path) -> IO[bytes] | None:
    """Lock the mark of a session and return it. None if another process or user holds it."""
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
