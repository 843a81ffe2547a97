"""GPU memory that does not suffice: fewer go together, the numbers are the same up to rounding, and a note says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfed import memory
from rayfed import scenario as scenarios
from rayfed.attacks.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.problem import Matching
from rayfed.client import cohort
from rayfed.engine import runs
from rayfed.engine.local import local
from rayfed.errors import ResourceError
from rayfed.memory import Fitting
from tests.attack_fixtures import seeded, two_digits
from tests.run_fixtures import Noting, weights

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 60, test_samples: 10}
partition: {name: dirichlet, alpha: 1}
model: lenet
training: {batch_size: 4, epochs: 2, momentum: 0.5, vectorise: vmap}
federation: {rounds: 1, clients: 10, cohort_size: 5}
defences: [mixup]
attacks:
  - {name: inverting_gradients, iterations: 3, restarts: 1, victims: 3, observes: gradient, rounds: [0]}
"""

BITS = "go together, which can change the last bits of what they find"


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    memory.take_notes()
    yield
    memory.take_notes()


class Small:
    """A GPU that has room for so many things of a kind."""

    def __init__(self, room: int) -> None:
        self.room, self.seen = room, list[int]()

    def check(self, count: int) -> None:
        self.seen.append(count)
        if count > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB")


def test_what_is_too_large_goes_in_halves_and_stays_so() -> None:
    gpu, fitting = Small(3), Fitting()

    def work(part: slice) -> list[int]:
        gpu.check(part.stop - part.start)
        return list(range(10))[part]

    assert [list(fitting.in_parts(work, 10, "things")) for _ in range(2)] == [
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    ] * 2
    assert gpu.seen == [10, 5] + [2] * 10
    assert memory.take_notes() == [
        f"GPU memory does not suffice for 10 things: no more than 5 {BITS}",
        f"GPU memory does not suffice for 5 things: no more than 2 {BITS}",
    ]
    assert memory.take_notes() == []
    assert list(Fitting().in_parts(work, 4, "things", together=3)) == [[0, 1, 2], [3]]
    assert list(fitting.in_parts(work, 0, "things")) == []


def test_one_thing_that_is_too_large_is_an_error() -> None:
    fitting = Fitting()
    with pytest.raises(torch.OutOfMemoryError):
        list(fitting.in_parts(lambda part: Small(0).check(1), 4, "things"))
    assert fitting.most == 1


def test_the_cache_is_given_back_before_less_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by then nothing holds what the failed call had made."""
    told = list[str]()

    class Held:
        def __del__(self) -> None:
            told.append("freed")

    def work(part: slice) -> None:
        _held = Held()
        Small(1).check(part.stop - part.start)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("given back"))
    list(Fitting().in_parts(work, 2, "things"))
    assert told == ["freed", "given back", "freed", "freed"]


def played(folder: Path, progress: Noting, *changes: str) -> Any:
    return runs.launch(scenarios.parse(TEXT, changes=changes), str(folder), local, progress)


@pytest.mark.engine
def test_a_cohort_and_an_attack_that_are_too_large_have_the_numbers_of_those_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = played(tmp_path / "whole", Noting())
    trained, reconstruct, gpu = cohort._trained, InvertingGradients.reconstruct, Small(2)

    def training(tasks: Any, *rest: Any) -> Any:
        gpu.check(len(tasks))
        return trained(tasks, *rest)

    def attacking(self: Any, observations: Any, *rest: Any) -> Any:
        gpu.check(len(observations))
        return reconstruct(self, observations, *rest)

    monkeypatch.setattr(cohort, "_trained", training)
    monkeypatch.setattr(InvertingGradients, "reconstruct", attacking)
    progress = Noting()
    parts = played(tmp_path / "parts", progress)
    for arm, server in weights(whole).items():
        for name, w in server["weights"].items():
            torch.testing.assert_close(weights(parts)[arm]["weights"][name], w, rtol=1e-5, atol=1e-6)
    for table, column in (("clients", "loss"), ("attacks", "psnr"), ("traces", "objective")):
        one, other = (folder.read_table(table).to_pylist() for folder in (whole, parts))
        assert [row[column] for row in one] == pytest.approx([row[column] for row in other], rel=1e-3)
    notes = [note for note in progress.notes if "GPU memory" in note]
    assert notes == [
        f"GPU memory does not suffice for 5 clients in one call: no more than 2 {BITS}",
        f"GPU memory does not suffice for 3 victims of inverting_gradients: no more than 1 {BITS}",
    ]
    assert all(note in parts.read_text("log.txt") for note in notes)


@pytest.mark.engine
@pytest.mark.parametrize(("changes", "kind"), [((), "clients"), (("training.vectorise=loop",), "attackers")])
def test_what_does_not_fit_even_alone_ends_the_run_with_what_to_do(
    changes: tuple[str, ...], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        Small(0).check(1)

    monkeypatch.setattr(cohort, "_trained", never)
    monkeypatch.setattr(InvertingGradients, "reconstruct", never)
    with pytest.raises(ResourceError, match=f"the work of {kind}, .* 2 GiB.*resources.{kind}.num_gpus.*rayfed resume"):
        played(tmp_path, Noting(), *changes)


def test_a_search_whose_points_are_too_many_has_the_numbers_of_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, observations = two_digits()
    points = torch.rand(8, 64, generator=seeded(0)[0])
    victims = torch.arange(8) // 4

    def found() -> tuple[Tensor, Tensor, Tensor]:
        problem = Matching.of(observations, model, None, squared_l2)
        return (*problem.value_and_gradient(points, victims), problem.values(points, victims))

    whole, losses, gpu = found(), Matching.losses, Small(3)

    def small(self: Matching, points: Tensor, victims: Tensor) -> Tensor:
        gpu.check(len(points))
        return losses(self, points, victims)

    monkeypatch.setattr(Matching, "losses", small)
    for one, other in zip(whole, found(), strict=True):
        torch.testing.assert_close(other, one)
    assert gpu.seen == [1, 8, 4, *[2] * 4, *[2] * 4], "what was too large is not tried again, nor measured"
