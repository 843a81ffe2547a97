"""Observers of a run's progress, which the command line displays and tests record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any

from rayfed.analysis.sweep_folder import SweepFolder
from rayfed.attacks.telling import Standing
from rayfed.scenario import Scenario
from rayfed.scenario.trials import Trial
from rayfed.store.folder import RunFolder


class Progress:
    """Callbacks of the driver during a run; the base class ignores all."""

    def starting(self, scenario: Scenario, folder: RunFolder, where: str) -> None:
        """Called before clients and server start; `where` says in words what runs where."""

    def ready(self, first_round: int) -> None:
        """Called when all actors have started, before this round."""

    def accounted(self, rows: Sequence[dict[str, Any]]) -> None:
        """Called with the rows of `privacy`: every arm's guarantees over the whole run."""

    def clients_done(self, round: int, done: int, total: int) -> None:
        """Called when `done` of the `total` client updates of a round, over all arms, have arrived."""

    def observations_done(self, round: int, done: int, total: int) -> None:
        """Called when `done` of the `total` observations of a round's attacks have been made."""

    def attacks_done(self, round: int, done: Sequence[tuple[str, float]], waiting: Sequence[str]) -> None:
        """Called with the finished and the pending attack calls of a round, by title.

        Beside each that has ended stand its seconds of work. It is told first when none has ended.
        """

    def search_goes_on(self, round: int, title: str, arm: str, standing: Standing) -> None:
        """Called about once a second with the progress of a running search on an arm."""

    def round_done(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        """Called with the rows of a finished round, after its tables are written."""

    def note(self, message: str) -> None:
        """Called with a message for the user, such as the death of an actor."""

    def finished(self, report: str) -> None:
        """Called at the end of the run; `report` is the page's path."""


class NoteOnce:
    """Passes messages that many processes have on to `note`, each the first time alone."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._said = note, set[str]()

    def __call__(self, messages: Iterable[str]) -> None:
        """Pass on the messages that are new."""
        for message in dict.fromkeys(messages):
            if message not in self._said:
                self._said.add(message)
                self._note(message)


class AuditProgress(Progress):
    """Callbacks of an audit beside those of its runs; the base class ignores all."""

    seconds: Mapping[str, float] = MappingProxyType({})
    """About how many seconds one call of each attack takes, by title, where that is known."""
    ends: Callable[[float], float] = staticmethod(lambda began: inf)
    """Returns when a run's attacks are stopped, given when they began (both by `monotonic`)."""
    noted: Collection[str] = ()
    """Notes that the audit has told before its runs, which tell them, too."""

    def say(self, *parts: str) -> None:
        """Called with a line on the audit's actions, in parts."""

    def trying(self, title: str, number: int, total: int, standing: Standing | None) -> None:
        """Called while an attack is tried before the run; `standing` is the progress of its search."""

    def tried(self) -> None:
        """Called after all attacks have been tried."""

    def audited(self, weights: str, report: str) -> None:
        """Called when the attacks on these weights have ended; `report` is the page's path."""


class SweepProgress:
    """Callbacks of the driver during a sweep; the base class ignores all."""

    def starting(self, scenario: Scenario, folder: SweepFolder, where: str, trials: int, done: int) -> None:
        """Called when `trials` trials begin after `done` earlier ones; `where` says what runs where."""

    def note(self, message: str) -> None:
        """Called with a message for the user, such as the death of another driver."""

    def trial_done(self, trial: Trial, rows: Sequence[dict[str, Any]]) -> None:
        """Called when a trial has ended; `rows` are its outcomes."""
