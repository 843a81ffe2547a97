"""Observers of a run's progress: the command line draws it, tests record it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rayfed.analysis.sweep_folder import SweepFolder
from rayfed.attacks.telling import Standing
from rayfed.scenario import Scenario
from rayfed.scenario.trials import Trial
from rayfed.store.folder import RunFolder


class Progress:
    """Callbacks of the driver as a run goes on; this base does nothing."""

    def starting(self, scenario: Scenario, folder: RunFolder, where: str) -> None:
        """Called before clients and server start; `where` says in words what runs where."""

    def ready(self, first_round: int) -> None:
        """All actors are up; this round begins."""

    def accounted(self, rows: Sequence[dict[str, Any]]) -> None:
        """The account is made: `rows` of `privacy` say what every arm guarantees over its whole run."""

    def clients_done(self, round: int, done: int, total: int) -> None:
        """`done` of the `total` client updates of a round, over all arms, are in."""

    def observations_done(self, round: int, done: int, total: int) -> None:
        """`done` of the `total` observations that the attack calls of a round begin with are made."""

    def attacks_done(self, round: int, done: Sequence[tuple[str, float]], waiting: Sequence[str]) -> None:
        """The attack calls of a round, of some victims each, that have ended, and those that have not, by title.

        Beside each that has ended stand its seconds of work. It is told first when none has ended.
        """

    def search_goes_on(self, round: int, title: str, arm: str, standing: Standing) -> None:
        """One of the attack calls of a round, on an arm, makes a search that stands so; told about once a second."""

    def round_done(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        """A round is over and its tables are written; the arguments are its rows of them."""

    def note(self, message: str) -> None:
        """Something happened that the user should know: an actor died and its work is done again."""

    def finished(self, report: str) -> None:
        """All is over; `report` is where the page lies."""


class AuditProgress(Progress):
    """Callbacks of an audit beside those of its runs; this base does nothing."""

    seconds: Mapping[str, float] = MappingProxyType({})
    """About how many seconds one call of each attack takes, by title, where that is known."""
    noted: Collection[str] = ()
    """Notes that the audit has told before its runs, which tell them, too."""

    def say(self, *parts: str) -> None:
        """The audit says something of what it does; the parts are one line."""

    def trying(self, title: str, number: int, total: int, standing: Standing | None) -> None:
        """One of so many attacks is tried before the run; `standing` is how far its search is."""

    def tried(self) -> None:
        """All attacks have been tried."""

    def audited(self, weights: str, report: str) -> None:
        """The attacks on these weights, in words, have ended; `report` is where the page lies."""


class SweepProgress:
    """Callbacks of the driver as a sweep goes on; this base does nothing."""

    def starting(self, scenario: Scenario, folder: SweepFolder, where: str, trials: int, done: int) -> None:
        """`trials` trials begin, `done` were played before; `where` says in words what runs where."""

    def note(self, message: str) -> None:
        """Something happened that the user should know: another driver has died, and its sweep goes on."""

    def trial_done(self, trial: Trial, rows: Sequence[dict[str, Any]]) -> None:
        """A trial has ended; `rows` are its outcomes."""
