"""Replays of a search's objective, with a graph of CUDA that is pretended: it does the captured call again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfed.attacks.matching import replay
from rayfed.attacks.matching.replay import Replayed
from rayfed.core.memory import Fitting, take_notes


class Objective:
    """The square of points, beside what is added to a call in Python, which no graph would do again."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return points.square().sum(1), 2 * points


class Graph:
    """What a capture of this objective at static points comes to."""

    def __init__(self, points: Tensor, off: float = 0.0) -> None:
        self.points, self.off, self.replays = points, off, 0
        self.made = torch.zeros(len(points)), torch.zeros_like(points)

    def replay(self) -> None:
        self.replays += 1
        self.made[0].copy_(self.points.square().sum(1) + self.off)
        self.made[1].copy_(2 * self.points)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    made: list[Graph] = []

    def captured(_: Objective, points: Tensor) -> tuple[Graph, tuple[Tensor, Tensor]]:
        made.append(Graph(points))
        return made[-1], made[-1].made

    monkeypatch.setattr(replay, "_captured", captured)
    monkeypatch.setattr(replay, "_UNFIT", set())
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    return made


def points(count: int = 2) -> Tensor:
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(count))


def test_on_a_cpu_every_call_is_a_plain_one() -> None:
    objective = Objective()
    search = Replayed(objective, "square")
    for _ in range(6):
        search(points())
    assert objective.calls == 6


def test_later_calls_are_replayed_and_their_results_are_kept(graphs: list[Graph]) -> None:
    objective = Objective()
    search = Replayed(objective, "square")
    asked = [points() * k for k in range(1, 7)]
    found = [search(x) for x in asked]
    assert objective.calls == 4, "the fourth is compared with the first replay"
    assert [graph.replays for graph in graphs] == [1 + 2]
    for x, (values, slopes) in zip(asked, found, strict=True):
        assert torch.equal(values, x.square().sum(1))
        assert torch.equal(slopes, 2 * x)


def test_points_of_another_shape_are_not_replayed(graphs: list[Graph]) -> None:
    objective = Objective()
    search = Replayed(objective, "square")
    for k in range(5):
        search(points() * k)
    assert len(search(points(5))[0]) == 5
    assert (objective.calls, len(graphs)) == (5, 1)


def test_a_replay_that_differs_in_a_bit_is_not_used(monkeypatch: pytest.MonkeyPatch, graphs: list[Graph]) -> None:
    monkeypatch.setattr(replay, "_captured", lambda _, x: (wrong := Graph(x, 1e-6), wrong.made))
    objective = Objective()
    search = Replayed(objective, "square")
    for k in range(6):
        assert torch.equal(search(k * points())[0], (k * points()).square().sum(1))
    assert objective.calls == 6


@pytest.mark.parametrize("constant", [False, True])
def test_a_replay_that_does_nothing_or_gives_a_constant_is_not_used(
    monkeypatch: pytest.MonkeyPatch, graphs: list[Graph], constant: bool
) -> None:
    """At the point of the capture it would look right."""

    def captured(_: Objective, x: Tensor) -> tuple[Graph, tuple[Tensor, Tensor]]:
        graph, first = Graph(x), x.clone()
        graph.made[0].copy_(first.square().sum(1))
        graph.made[1].copy_(2 * first)
        write = lambda: (graph.made[0].copy_(first.square().sum(1)), graph.made[1].copy_(2 * first))  # noqa: E731
        monkeypatch.setattr(graph, "replay", write if constant else lambda: None)
        return graph, graph.made

    monkeypatch.setattr(replay, "_captured", captured)
    search = Replayed(Objective(), "square")
    for k in (1, 2, 3, 3, 4, 5, 6):
        assert torch.equal(search(k * points())[0], (k * points()).square().sum(1))


def test_what_cannot_be_captured_is_called(monkeypatch: pytest.MonkeyPatch, graphs: list[Graph]) -> None:
    def refused(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room for a graph")

    monkeypatch.setattr(replay, "_captured", refused)
    objective = Objective()
    search = Replayed(objective, "square")
    for _ in range(6):
        search(points())
    assert objective.calls == 6


@pytest.mark.parametrize("refused", [True, False])
def test_what_could_not_be_replayed_is_not_captured_again(
    monkeypatch: pytest.MonkeyPatch, graphs: list[Graph], refused: bool
) -> None:
    """Neither after a capture that failed nor after a replay that differed."""
    tried = list[Graph]()

    def captured(_: Any, x: Tensor) -> Any:
        tried.append(Graph(x, 1e-6))
        if refused:
            raise RuntimeError("called a synchronizing CUDA operation")
        return tried[-1], tried[-1].made

    def search(kind: str, count: int = 2) -> int:
        objective = Objective()
        replayed = Replayed(objective, kind)
        for k in range(6):
            replayed(k * points(count))
        assert objective.calls == 6
        return len(tried)

    monkeypatch.setattr(replay, "_captured", captured)
    assert [search("square"), search("square")] == [1, 1]
    assert [search("square", 3), search("another")] == [2, 3], "other shapes and kinds are tried"


class Cuda:
    """The functions of `torch.cuda` that a capture needs, and what they were called for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode, self.stream, self.begun = 0, "default", 0
        here = self

        @contextmanager
        def graph(*_: Any, stream: str, **__: Any) -> Iterator[None]:
            here.begun, here.stream = here.begun + 1, stream
            yield
            here.stream = "default"  # not after an error, as in PyTorch

        pretended = {
            "CUDAGraph": lambda: None,
            "stream": lambda _: nullcontext(),
            "current_stream": lambda: here.stream,
            "synchronize": lambda: None,
            "graph": graph,
            "get_sync_debug_mode": lambda: here.mode,
        }
        monkeypatch.setattr(replay, "_side_stream", lambda: SimpleNamespace(wait_stream=lambda _: None))
        for name, function in pretended.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(here, "mode", mode))
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(here, "stream", stream))


def test_what_waits_for_the_gpu_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that failed would spoil the process."""
    cuda, modes = Cuda(monkeypatch), list[Any]()

    def waits(points: Tensor) -> Any:
        modes.append(cuda.mode)
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        replay._captured(waits, points())
    assert (modes, cuda.mode, cuda.begun) == (["error"], 0, 0)


def test_a_capture_that_fails_leaves_stream_and_batch_sizes_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, fitting = Cuda(monkeypatch), Fitting()

    def objective(points: Tensor) -> Any:
        def part(rows: slice) -> Tensor:
            if cuda.begun:
                raise torch.OutOfMemoryError("no room for a graph")
            return points[rows]

        return list(fitting.in_parts(part, len(points), "points of a search"))

    with pytest.raises(torch.OutOfMemoryError):
        replay._captured(objective, points(4))
    assert (cuda.begun, cuda.stream, fitting.most) == (1, "default", inf)
    assert take_notes() == []
