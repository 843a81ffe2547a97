"""Lease of a folder, so that only one driver at a time writes to it.

Drivers are numbered. Driver n creates the file `lease/<n>.json` atomically (`Files.claim`) and holds the folder until
`lease/<n+1>.json` exists, which it checks before each write and removal (`Lease.check`). The number is a fencing token
[1]. File stores cannot check and write in one step, so a late write of a replaced driver may still arrive. It changes
no result, because its file name contains the driver's number (`Files.tag`) and the history does not list it
(`rayfed.store.history`).

A driver that is alive is not taken over. On the same machine, the operating system reports whether the process exists,
by its id and start time since the last boot. For a driver on another machine, a thread renews the lease, and the
process that wants the folder watches the file for changes [2]. No clocks are compared. If the driver is wrongly assumed
dead, it stops without damage to the results.

[1] M. Kleppmann, "How to do distributed locking", 2016.
[2] C. Gray, D. Cheriton, "Leases: an efficient fault-tolerant mechanism for distributed file cache consistency", SOSP
1989; changes are watched instead of comparing times, as in Amazon's DynamoDB lock client.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from rayfed.errors import LeaseError, RunError
from rayfed.store.files import Files
from rayfed.store.history import newest_driver

FOLDER = "lease"
"""Subfolder with the leases."""
CLAIM = f"{FOLDER}/0"
"""File that marks the folder as created; its creator owns the folder."""
RENEWAL = 10.0
"""Seconds between renewals."""
PATIENCE = 60.0
"""Seconds without a renewal after which a driver on another machine is assumed dead."""
_NAME = re.compile(r"(\d+)\.json", re.ASCII)
_HELD = set[str]()
"""Leases that this process holds."""

_F = TypeVar("_F", bound=Files)


@dataclass(frozen=True)
class Holder:
    """Description of the driver that holds a lease."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    process: str | None = field(default_factory=lambda: _process(os.getpid()))
    """Unique identifier of the process on its machine since the last boot; None if the system provides none."""
    since: str = field(default_factory=lambda: f"{datetime.now():%Y-%m-%d %H:%M:%S}")
    id: str = field(default_factory=lambda: uuid4().hex)
    renewed: int = 0
    """Number of renewals of the lease."""
    ended: bool = False
    """Whether the lease's driver has ended normally."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def document(self) -> bytes:
        """Return the content of the lease file: the holder's fields as JSON."""
        return json.dumps(asdict(self)).encode()


_HOLDERS = TypeAdapter(Holder)
_UNKNOWN = Holder(host="an unknown machine", pid=0, process=None, since="", id="")
"""Holder of a lease whose file cannot be read, as the driver may have died while writing it."""


@dataclass(frozen=True)
class Lease:
    """Right of the `token`-th driver to write to a folder (`rayfed.store.files.Fence`)."""

    files: Files
    """The folder, with the lease of the parent folder, if any."""
    token: int
    holder: Holder
    taken_from: str = ""
    """Description of the previous driver if it had not ended, else empty."""
    process: int | None = field(default_factory=os.getpid)
    """Process that may write; None after the driver has sent the lease to another process, such as a sweep's trial."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process; in contrast, a copy made by a fork is not valid."""
        return vars(self) | {"process": None}

    def check(self) -> None:
        """Raise `LeaseError` if another driver has taken over the folder or its parent folder.

        Also raises if the lease file was removed or replaced, and in a forked copy of the driver's process.
        """
        self.files.check()
        newest = _newest(self.files)
        by = _holder(self.files, newest) if newest else None
        if by and by.id == self.holder.id and newest == self.token and self.process in (None, os.getpid()):
            return
        if by is None or by.id == self.holder.id:
            raise LeaseError(
                f"{self.files.url}: this driver lost its lease, or is a forked copy: the driver stops and writes "
                "nothing more. Run `rayfed resume` when no other driver uses the run or sweep"
            )
        raise LeaseError(
            f"{self.files.url} was taken over by {by} at {by.since}: this driver stops and has written nothing since "
            f"then; let the other driver finish the run or sweep"
        )


@contextmanager
def hold_lease(folder: _F, note: Callable[[str], None], told: bool = False) -> Iterator[_F]:
    """Hold the lease of a folder during the block; writes through the yielded folder check the lease.

    If the previous driver has died, take the lease over and call `note`. If it is alive, raise `LeaseError`. With
    `told`, the holder of the parent folder has requested the run, and the lease is taken over without a check.
    """
    mine = Holder()
    token, before = _acquire(folder, mine, note, told)
    left = before is not None and not before.ended and not told
    taken_from = f"{before}, the previous driver, has died or does not respond: this driver continues" if left else ""
    if taken_from:
        note(taken_from)
    lease = Lease(folder, token, mine, taken_from)
    held = replace(folder, lease=lease)
    with _renewed(lease, mine):
        if before and not before.ended:
            held.remove_unfinished()
        yield held


def _acquire(folder: Files, mine: Holder, note: Callable[[str], None], told: bool) -> tuple[int, Holder | None]:
    """Create the next lease of a folder; return its number, and the previous holder."""
    while True:
        newest = _newest(folder)
        before = _holder(folder, newest) if newest else None
        if before and not before.ended and not told and _lives(folder, newest, before, note):
            raise LeaseError(
                f"{folder.url} is in use by {before} since {before.since}: wait until that driver ends, or end its "
                "process and try again"
            )
        number = max(newest, newest_driver(folder)) + 1  # leases may be missing, for example in a copied folder
        if folder.claim(_file(number), mine.document()):
            return number, before


def has_no_driver(folder: Files) -> bool:
    """Return whether the last driver that held a folder has ended, or is known to have died."""
    newest = _newest(folder)
    holder = _holder(folder, newest) if newest else None
    return holder is not None and (holder.ended or _runs_here(holder) is False)


def _runs_here(holder: Holder) -> bool | None:
    """Return whether a driver is alive on this machine; None if unknown or if it is on another machine."""
    own = _process(os.getpid())
    if not (own and holder.process and _machine(own) == _machine(holder.process)):
        return None
    if holder.pid == os.getpid():
        return holder.id in _HELD
    return _process(holder.pid) == holder.process


def _lives(folder: Files, number: int, holder: Holder, note: Callable[[str], None]) -> bool:
    """Return whether the driver that holds a lease seems to be alive."""
    if (here := _runs_here(holder)) is not None:
        return here
    note(f"{folder.url} is in use by {holder}; waiting {PATIENCE:.0f} s to check whether that driver is alive")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(min(1.0, PATIENCE))
        if (now := _holder(folder, number)) != holder:
            return not now.ended
    return False


@contextmanager
def _renewed(lease: Lease, mine: Holder) -> Iterator[None]:
    """Renew a lease periodically during the block, and mark its end."""
    over = Event()

    def say(holder: Holder) -> None:
        with suppress(RunError):  # the lease is lost or cannot be written: the driver's next save reports it
            lease.check()
            lease.files.write_bytes(_file(lease.token), holder.document())

    def renew() -> None:
        for times in count(1):
            if over.wait(RENEWAL):
                return
            say(replace(mine, renewed=times))

    thread = Thread(target=renew, name="lease", daemon=True)
    _HELD.add(mine.id)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _HELD.discard(mine.id)
        say(replace(mine, ended=True))


def _newest(files: Files) -> int:
    """Return the number of the latest lease, or 0 if there is none."""
    return max((int(match[1]) for name in files.files(FOLDER) if (match := _NAME.fullmatch(name))), default=0)


def _holder(files: Files, number: int) -> Holder:
    try:
        return _HOLDERS.validate_json(files.read_bytes(_file(number)))
    except ValidationError:
        return _UNKNOWN


def _file(number: int) -> str:
    return f"{FOLDER}/{number}.json"


def _process(pid: int) -> str | None:
    """Return a globally unique identifier of a process; None if it has ended or cannot be identified."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbered = os.readlink("/proc/self/ns/pid")  # a container has its own process numbers
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else f"{socket.gethostname()} {boot} {numbered} {pid} {fields[18]}"


def _machine(process: str) -> str:
    return process.rsplit(" ", 2)[0]
