"""Progress of runs in tests: keeps notes, or ends a run."""

from __future__ import annotations

from typing import Any

from rayfed.simulation.progress import Progress


class Noting(Progress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes = list[str]()

    def note(self, message: str) -> None:
        self.notes.append(message)


class Interrupted(Progress):
    """Ends a run after some round, by default the first, as Ctrl-C would."""

    def __init__(self, after: int = 0) -> None:
        self.after = after

    def round_done(self, rows: Any, *others: Any) -> None:
        if rows[0]["round"] == self.after:
            raise KeyboardInterrupt
