"""Replay a search's objective on a GPU as one CUDA graph, which launches all kernels of a call at once.

The calls of a search differ only by the point. For small models, launching kernels takes longer than running them (see
docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from rayfed.core.memory import forbid_halving, give_back_cache

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Points (P, D) -> values (P,) and gradients (P, D), without side effects such as counters or random numbers."""

_FIRST = 3
"""Index of the call to capture. Earlier calls finish any setup."""

_UNFIT: set[tuple[Hashable, torch.Size]] = set()
"""Kinds of objectives and shapes of points that this process failed to replay."""


class Replayed:
    """Objective that runs as a CUDA graph after the first calls at points of one shape, with bit-identical results.

    On a CPU, every call runs normally. On a GPU, calls also run normally if the objective cannot be captured, for
    example because it reads a value back. The same applies if memory is short, or if the first replay differs from a
    normal call in any bit. This check uses another point than the capture, so a value captured as a constant shows.
    After a failure, objectives of the same `kind` and shape are not captured again, because an attempt costs up to 0.1
    s per search.
    """

    def __init__(self, objective: Objective, kind: Hashable) -> None:
        self._objective, self._kind = objective, kind
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_checked = False

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective's values (P,) and gradients (P, D) at points (P, D)."""
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
        """Capture a call at points. If this fails, keep calling the objective normally."""
        self._points = points.detach().clone()
        try:
            self._graph, self._made = _captured(self._objective, self._points)
        except RuntimeError:  # includes running out of memory
            _UNFIT.add((self._kind, points.shape))

    def _check(self, points: Tensor, made: tuple[Tensor, Tensor]) -> None:
        """Compare a replay with `made`, the result of a normal call. Keep the graph if they are equal."""
        if torch.equal(points.detach(), self._points):
            return
        for tensor in self._made:
            tensor.fill_(torch.nan)  # detects a replay that writes nothing
        self._is_checked = all(torch.equal(*pair) for pair in zip(self._replayed(points), made, strict=True))
        if not self._is_checked:
            _UNFIT.add((self._kind, points.shape))
            self._graph = None
            del self._made, self._points  # they hold the graph's memory


def _captured(objective: Objective, points: Tensor) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    """Return a graph of the objective at the contents of `points`, and the tensors into which a replay writes."""
    before, stream = torch.cuda.current_stream(), _side_stream()
    stream.wait_stream(before)
    give_back_cache()  # the graph has a separate memory pool and cannot use the cache of normal calls
    with forbid_halving():
        with torch.cuda.stream(stream), _refusing_to_wait():
            objective(points)  # keeps setup of libraries for this stream out of the capture
        torch.cuda.synchronize()
        give_back_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                made = objective(points)
        finally:
            torch.cuda.set_stream(before)  # a failed capture does not restore the stream
    return graph, made


@cache
def _side_stream() -> torch.cuda.Stream:
    """Return the stream of all captures. cuBLAS keeps a workspace of megabytes for each stream that it has used."""
    return torch.cuda.Stream()


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise an error in the block if the processor would wait for the GPU, for example to read a value back.

    A capture refuses this, too. But up to PyTorch 2.11 at least, a failed capture corrupts the process: the allocator
    treats the capture as unfinished (pytorch/pytorch#180395), and releasing the cache then fails.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
