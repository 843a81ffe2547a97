"""Replaying of a search's objective on a GPU: the kernels of a call are launched all at once, as one CUDA graph.

The calls of a search differ by the point alone, and the kernels of a small model take less time than their launches
(docs/gpu.md has the figures).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from rayfed.memory import give_back_cache, undivided

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Values (P,) and slopes (P, D) at points (P, D), and nothing else: no counting of calls, no drawing of numbers."""

_FIRST = 3
"""The call that is captured: what the calls before it set up is there."""

_UNFIT: set[tuple[Hashable, torch.Size]] = set()
"""Kinds of objectives, and shapes of points, of which this process replays none: it has tried."""


class Replayed:
    """An objective whose later calls at points of one shape are replayed on a GPU, with the same bits.

    Every call is a plain one on a CPU. So it stays on a GPU where the objective cannot be captured, as one that reads a
    value back, where memory does not suffice, or where the first replay differs from the plain call in any bit. That
    one is at another point than the capture, so that what was captured as a constant differs. Of another objective of
    its `kind` at points of that shape nothing is captured any more, which costs up to 0.1 s a search.
    """

    def __init__(self, objective: Objective, kind: Hashable) -> None:
        self._objective, self._kind = objective, kind
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_checked = False

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and slopes at points."""
        has_graph = self._graph is not None and points.shape == self._points.shape
        if has_graph and self._is_checked:
            return self._replayed(points)
        made = self._objective(points)
        self._calls += 1
        if has_graph:
            self._check(points, made)
        elif points.is_cuda and self._calls == _FIRST and (self._kind, points.shape) not in _UNFIT:
            self._capture(points)
        return made

    def _replayed(self, points: Tensor) -> tuple[Tensor, Tensor]:
        assert self._graph is not None
        self._points.copy_(points.detach())
        self._graph.replay()
        values, slopes = self._made
        return values.clone(), slopes.clone()  # the next replay writes over them

    def _capture(self, points: Tensor) -> None:
        """Capture a call at points; leave the objective as it is where that does not do."""
        self._points = points.detach().clone()
        try:
            self._graph, self._made = _captured(self._objective, self._points)
        except RuntimeError:  # out of memory among them
            _UNFIT.add((self._kind, points.shape))

    def _check(self, points: Tensor, made: tuple[Tensor, Tensor]) -> None:
        """Compare a replay with the plain call of which this was `made`; keep the graph if they are the same."""
        if torch.equal(points.detach(), self._points):
            return
        for tensor in self._made:
            tensor.fill_(torch.nan)  # a replay that writes nothing is none
        self._is_checked = all(torch.equal(*pair) for pair in zip(self._replayed(points), made, strict=True))
        if not self._is_checked:
            _UNFIT.add((self._kind, points.shape))
            self._graph = None
            del self._made, self._points  # the memory of the graph is theirs


def _captured(objective: Objective, points: Tensor) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    """Return a graph of the objective at whatever `points` holds, and where a replay puts values and slopes."""
    before, stream = torch.cuda.current_stream(), _side_stream()
    stream.wait_stream(before)
    give_back_cache()  # a graph has memory of its own, beside what plain calls have left in the cache
    with undivided():
        with torch.cuda.stream(stream), _refusing_to_wait():
            objective(points)  # what a library sets up for a stream must not be captured
        torch.cuda.synchronize()
        give_back_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                made = objective(points)
        finally:
            torch.cuda.set_stream(before)  # which a capture that fails leaves as it was in it
    return graph, made


@cache
def _side_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: cuBLAS keeps a workspace of megabytes for each that it has met."""
    return torch.cuda.Stream()


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise in the block where the processor would wait for the GPU, as in reading a value back.

    A capture refuses the same, but one that has failed spoils the process, up to PyTorch 2.11 at least: its allocator
    takes it to be under way for ever (pytorch/pytorch#180395), and then giving back the cache is an error.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
