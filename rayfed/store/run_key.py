"""Key of a secure run (`privacy.secure`), stored while the run can be resumed.

It lies with the clients' states, whose side alone may know it; on a local disk nobody but the user can read the file.
"""

from __future__ import annotations

from rayfed.errors import RunError
from rayfed.store import client_states
from rayfed.store.folder import RunFolder

FILE = f"{client_states.FOLDER}/run.key"
_BYTES = 32


def save(folder: RunFolder, key: bytes) -> None:
    """Write the key of a run into a folder that only its owner can read."""
    client_states.make_private(folder)
    folder.write_bytes(FILE, key, private=True)


def load(folder: RunFolder) -> bytes | None:
    """Read the key of a run, None without one; raises `RunError` if it is damaged."""
    if not folder.exists(FILE):
        return None
    key = folder.read_bytes(FILE)
    if len(key) != _BYTES:
        raise RunError(f"'{folder.url}/{FILE}' has {len(key)} bytes, not {_BYTES}; restore it from a copy")
    return key


def remove(folder: RunFolder) -> None:
    """Remove the key of a run, so that its noise cannot be drawn again."""
    if folder.exists(FILE):
        folder.remove(FILE)
