"""Callbacks for the progress of runs, audits and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from rayfed.attacks.progress import Standing
from rayfed.results.sweep_folder import SweepFolder
from rayfed.scenario import Scenario
from rayfed.scenario.trials import Trial
from rayfed.store.folder import RunFolder


class Progress:
    """Callbacks of the driver during a run. The base class does nothing."""

    def starting(self, scenario: Scenario, folder: RunFolder, where: str) -> None:
        """Report that the clients and the server are about to start; `where` describes the processes."""

    def ready(self, first_round: int) -> None:
        """Report that all actors have started, before round `first_round`."""

    def accounted(self, rows: Sequence[dict[str, Any]]) -> None:
        """Report the rows of the table `privacy`, with every arm's privacy guarantees over the whole run."""

    def clients_done(self, round: int, done: int, total: int) -> None:
        """Report that `done` of the `total` client updates of a round, over all arms, have arrived."""

    def observations_done(self, round: int, done: int, total: int) -> None:
        """Report that `done` of the `total` observations of a round's attacks have been made."""

    def attacks_done(self, round: int, done: Sequence[tuple[str, float]], waiting: Sequence[str]) -> None:
        """Report the finished attack calls of a round (title, seconds of work) and the titles of pending ones.

        The first call has no finished attacks.
        """

    def search_goes_on(self, round: int, title: str, arm: str, standing: Standing) -> None:
        """Report the progress of an attack's running search on an arm, about once a second."""

    def round_done(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        """Report the rows of a finished round, after the round's tables are written."""

    def note(self, message: str) -> None:
        """Report a message for the user, such as the death of an actor."""

    def finished(self, report: str) -> None:
        """Report the end of the run; `report` is the path of the report."""


class NoteOnce:
    """Filter that passes each message to `note` only once, even if many processes send the same message."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._said = note, set[str]()

    def __call__(self, messages: Iterable[str]) -> None:
        """Pass on the messages that were not passed on before."""
        for message in dict.fromkeys(messages):
            if message not in self._said:
                self._said.add(message)
                self._note(message)


class AuditProgress(Progress):
    """Callbacks of an audit and its runs. The base class does nothing."""

    deadline: float = inf
    """Time at which the attacks are stopped, on the clock of `monotonic`."""
    noted: Collection[str] = ()
    """Notes that the audit has already printed and that its runs would repeat."""

    def say(self, *parts: str) -> None:
        """Report one line about the audit's steps, given in parts."""

    def best_so_far(self, best: Mapping[str, str]) -> None:
        """Report the maximum of the leading metric of each arm with a result, as text."""

    def pass_done(
        self, evaluations: int, seconds: Mapping[bool, float], following: int | None, best: Mapping[str, str]
    ) -> None:
        """Report the end of a pass of so many evaluations per search, with the best results (see `best_so_far`).

        `seconds` are those of its searches (True) and closed forms (False). `following` are the evaluations of the next
        pass, None after the last.
        """

    def audited(self, weights: str, report: str) -> None:
        """Report the end of the attacks on one set of weights; `report` is the path of the report."""


class SweepProgress:
    """Callbacks of the driver during a sweep. The base class does nothing."""

    def starting(self, scenario: Scenario, folder: SweepFolder, where: str, trials: int, done: int) -> None:
        """Report that `trials` trials start, after `done` finished trials; `where` describes the processes."""

    def note(self, message: str) -> None:
        """Report a message for the user, such as the death of another driver."""

    def trial_done(self, trial: Trial, rows: Sequence[dict[str, Any]]) -> None:
        """Report the end of a trial; `rows` are the trial's outcomes."""
