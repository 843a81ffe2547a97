"""What a run tells whoever watches it; the command line draws it, tests record it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayfed.analysis.sweep_folder import SweepFolder
from rayfed.scenario import Scenario
from rayfed.scenario.trials import Trial
from rayfed.store.folder import RunFolder


class Progress:
    """Called by the driver as a run goes on; this one keeps silent."""

    def starting(self, scenario: Scenario, folder: RunFolder, where: str) -> None:
        """Clients and server are being brought up; `where` says in words what runs where."""

    def ready(self, first_round: int) -> None:
        """All are up; this round begins."""

    def accounted(self, rows: Sequence[dict[str, Any]]) -> None:
        """What every arm guarantees over its whole run: the rows of `privacy`."""

    def clients_done(self, round: int, done: int, total: int) -> None:
        """So many of the round's client updates (over all arms) are in."""

    def attacks_done(self, round: int, done: int, total: int) -> None:
        """So many of the round's attacks (a call of some victims each) are scored."""

    def round_done(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        """A round is over and its tables are written: its rows of `rounds`, `attacks` and `inferences`."""

    def note(self, message: str) -> None:
        """Something that the user should know: an actor died and its work is done again."""


class SweepProgress:
    """Called by the driver as a sweep goes on; this one keeps silent."""

    def starting(self, scenario: Scenario, folder: SweepFolder, where: str, trials: int, done: int) -> None:
        """So many trials begin, so many were played before; `where` says in words what runs where."""

    def trial_done(self, trial: Trial, rows: Sequence[dict[str, Any]]) -> None:
        """A trial has ended; its outcomes are these."""
