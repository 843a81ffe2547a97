"""Key of a secure run (`privacy.secure`), stored while the run can be resumed.

The key is stored with the clients' private states. On a local disk only the user can read the file.
"""

from __future__ import annotations

from rayfed.errors import RunError
from rayfed.store import client_states
from rayfed.store.folder import RunFolder

FILE = f"{client_states.FOLDER}/run.key"
_BYTES = 32


def save_key(folder: RunFolder, key: bytes) -> None:
    """Write the key of a secure run to a folder that only the owner can read."""
    client_states.make_private(folder)
    folder.write_bytes(FILE, key, private=True)


def load_key(folder: RunFolder) -> bytes | None:
    """Return the key of a secure run, or None if the run has no key; raise `RunError` if the key is damaged."""
    if not folder.exists(FILE):
        return None
    key = folder.read_bytes(FILE)
    if len(key) != _BYTES:
        raise RunError(
            f"the run key '{folder.url}/{FILE}' has {len(key)} bytes, not {_BYTES}; restore the file from a copy"
        )
    return key


def remove_key(folder: RunFolder) -> None:
    """Remove the key of a secure run, so that the run's noise cannot be reproduced."""
    if folder.exists(FILE):
        folder.remove(FILE)
