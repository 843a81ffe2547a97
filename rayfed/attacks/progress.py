"""Report the progress of searches to a listener that `listening` sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic

from torch import Tensor


@dataclass(frozen=True)
class Standing:
    """Progress of one search of an attack. An attack may run several searches, one after the other."""

    search: int
    """Index of the attack's search, from 1."""
    iteration: int
    """Number of iterations done."""
    iterations: int
    """Maximum number of iterations of the search."""
    distance: float
    """Smallest objective at this iteration, in the attack's unit, or NaN if none is finite."""
    seconds: float
    """Seconds since the search started."""

    @property
    def left(self) -> float:
        """Return the estimated seconds left in the search, or infinity before the first iteration is done."""
        return (self.iterations - self.iteration) * self.seconds / self.iteration if self.iteration else float("inf")


class _Listener:
    def __init__(self, hear: Callable[[Standing], None], every: float) -> None:
        self.hear, self.every = hear, every
        self.search, self.began, self.told = 0, 0.0, -float("inf")


_LISTENER: ContextVar[_Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(hear: Callable[[Standing], None], every: float = 1.0) -> Iterator[None]:
    """Call `hear` with the progress of searches in the `with` block, at most once every `every` seconds."""
    token = _LISTENER.set(_Listener(hear, every))
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(iteration: int, iterations: int, values: Tensor) -> None:
    """Report one iteration of a search, with the objective values (P,), to the listener set by `listening`.

    Searches call this at every iteration, starting with 0. The values are read only when a report is due, because
    reading them makes a GPU wait.
    """
    listener = _LISTENER.get()
    if listener is None:
        return
    now = monotonic()
    if iteration == 0:
        listener.search, listener.began = listener.search + 1, now
    if now - listener.told < listener.every:
        return
    listener.told = now
    finite = values[values.isfinite()]
    distance = finite.min().item() if len(finite) else float("nan")
    listener.hear(Standing(listener.search, iteration, iterations, distance, now - listener.began))
