"""Estimate of the time left for the attacks of a round, from finished calls.

For attacks without a finished call, the estimate uses the speed of other searches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from rayfed.attacks.progress import Standing

_SILENT = 5.0
"""Seconds without a message after which a search counts as ended."""


class Left(NamedTuple):
    """Estimated time left for some runs of attacks."""

    seconds: float
    how: Literal["about", "roughly", "at least"]
    """"roughly" if the time of some calls is estimated from counts of evaluations only, "at least" if the time of some
    calls is not known."""


class _Search(NamedTuple):
    began: float
    heard: float
    standing: Standing


class TimeLeft:
    """Estimator of the time left for attacks, from measured work; parallel calls add up their work per second."""

    def __init__(self, now: float, evaluations: Mapping[str, int] | None = None) -> None:
        """Start the estimate at the time `now` (s).

        `evaluations` has the maximum number of sequential evaluations of an attack's objective, by title.
        """
        self._began, self._evaluations = now, evaluations or {}
        self._took: dict[str, list[float]] = {}
        self._searches: dict[tuple[str, str], _Search] = {}

    def ended(self, done: Sequence[tuple[str, float]]) -> None:
        """Record all finished calls of attacks, as pairs (title, seconds of work)."""
        self._took = {}
        for title, seconds in done:
            self._took.setdefault(title, []).append(seconds)

    def heard(self, title: str, arm: str, standing: Standing, now: float) -> None:
        """Record the reported progress of one optimisation attack."""
        known = self._searches.get((title, arm))
        same = known is not None and known.standing.search <= standing.search and now - known.heard < _SILENT
        began = known.began if known is not None and same else now - standing.seconds
        self._searches[title, arm] = _Search(began, now, standing)

    def left(self, waiting: Sequence[str], now: float) -> Left:
        """Return the estimated time left for the attacks that are waiting or running."""
        going = [(title, s) for (title, _), s in self._searches.items() if now - s.heard < _SILENT and title in waiting]
        pace, counted = self._seconds_each(), set[str]()
        known = {title: seconds for title in dict.fromkeys(waiting) if (seconds := self._of_call(title)) is not None}
        if pace is not None:
            counted = {title for title in waiting if title not in known and self._evaluations.get(title)}
            known |= {title: pace * self._evaluations[title] for title in counted}
        work = sum(known.get(title, 0.0) for title in waiting)
        for title, search in going:
            spent = now - search.began
            rest = search.standing.left
            if title in known:
                work += max(-spent, rest - known[title], -known[title]) if rest < float("inf") else 0.0
            else:
                work += rest if rest < float("inf") else 0.0
        done = sum(map(sum, self._took.values()))
        at_once = max(done / max(now - self._began, 1e-9), 1.0)
        how: Literal["about", "roughly", "at least"] = "roughly" if counted else "about"
        return Left(max(work, 0.0) / at_once, how if len(known) == len(set(waiting)) else "at least")

    def _seconds_each(self) -> float | None:
        """Return the median seconds per evaluation over all searches; None without a search."""
        heard = [search.standing for search in self._searches.values() if search.standing.iteration]
        return median(one.seconds / one.iteration for one in heard) if heard else None

    def _of_call(self, title: str) -> float | None:
        """Return the mean seconds of the finished calls of an attack; None if none has finished."""
        took = self._took.get(title)
        return sum(took) / len(took) if took else None
