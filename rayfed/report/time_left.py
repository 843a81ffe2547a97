"""Time left of the attacks of a round, from what calls of the same attack took, or were measured to take before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rayfed.attacks.telling import Standing

_SILENT = 5.0
"""Seconds after which a search of which nothing is heard is taken for one that has ended."""


class Left(NamedTuple):
    """Time that calls still take."""

    seconds: float
    all_known: bool
    """False where some calls are of attacks of which nobody knows how long they take: it is at least so long then."""


class _Search(NamedTuple):
    began: float
    heard: float
    standing: Standing


class TimeLeft:
    """Estimates from measured work; parallel calls count by the work done per second."""

    def __init__(self, expected: Mapping[str, float], now: float) -> None:
        """Start the estimate at `now` (s); `expected` has the seconds of one call of an attack, by title, if known."""
        self._expected, self._began = expected, now
        self._took: dict[str, list[float]] = {}
        self._searches: dict[tuple[str, str], _Search] = {}

    def ended(self, done: Sequence[tuple[str, float]]) -> None:
        """Record the titles of all calls that have ended, with their seconds of work."""
        self._took = {}
        for title, seconds in done:
            self._took.setdefault(title, []).append(seconds)

    def heard(self, title: str, arm: str, standing: Standing, now: float) -> None:
        """Record the progress of one search."""
        known = self._searches.get((title, arm))
        same = known is not None and known.standing.search <= standing.search and now - known.heard < _SILENT
        began = known.began if known is not None and same else now - standing.seconds
        self._searches[title, arm] = _Search(began, now, standing)

    def left(self, waiting: Sequence[str], now: float) -> Left:
        """Return the time for the calls that have not ended, some of which may be under way."""
        going = [(title, s) for (title, _), s in self._searches.items() if now - s.heard < _SILENT and title in waiting]
        known = {title: seconds for title in dict.fromkeys(waiting) if (seconds := self._of_call(title)) is not None}
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
        return Left(max(work, 0.0) / at_once, len(known) == len(set(waiting)))

    def _of_call(self, title: str) -> float | None:
        """Return the seconds of a call: the mean of those that have ended, or what was expected, set right by others'.

        None where nothing is known of it.
        """
        if took := self._took.get(title):
            return sum(took) / len(took)
        if title not in self._expected:
            return None
        both = [(sum(took), len(took) * self._expected[t]) for t, took in self._took.items() if self._expected.get(t)]
        measured, expected = (sum(side) for side in zip(*both, strict=True)) if both else (0.0, 0.0)
        return self._expected[title] * (measured / expected if expected else 1.0)
