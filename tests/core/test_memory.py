"""What work takes of memory, and how many points of a search go together by that; GPU memory that does not suffice:
fewer go together, the numbers are the same up to rounding, and a note says so."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from benchmarks import iteration
from rayfed import scenario as scenarios
from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.second_derivatives import DIFFERENCED, IN_TURN, TOGETHER, Way
from rayfed.core import memory
from rayfed.core.memory import Fitting, measure_most_held
from rayfed.errors import ResourceError
from rayfed.models.build import build_model
from rayfed.runs import runner
from rayfed.simulation.client import cohort
from rayfed.simulation.executors.local import local
from rayfed.update import LocalTraining
from tests.helpers.attack_fixtures import digit, observe, seeded, two_digits
from tests.helpers.run_fixtures import Noting, weights

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


def numbers(notes: list[str]) -> list[list[int]]:
    """Return the numbers in each note."""
    return [[int(number) for number in re.findall(r"\d+", note)] for note in notes]


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
    assert numbers(memory.take_notes()) == [[10, 5], [5, 2]]
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
    return runner.launch(scenarios.parse(TEXT, changes=changes), str(folder), local, progress)


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
    assert numbers(notes) == [[5, 2], [3, 1]]
    assert "inverting_gradients" in notes[1]
    assert all(note in parts.read_text("log.txt") for note in notes)


@pytest.mark.engine
def test_a_client_that_does_not_fit_even_alone_ends_the_run_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        Small(0).check(1)

    monkeypatch.setattr(cohort, "_trained", never)
    with pytest.raises(ResourceError, match=r"clients, .* 2 GiB.*resources.clients.num_gpus.*rayfed resume"):
        played(tmp_path, Noting())


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


# ---- what work takes ----

_GIVEN = torch.linspace(0, 1, 1000)
"""4,000 bytes"""


def in_a_circle() -> None:
    """Make tensors that only the garbage collector frees."""
    for _ in range(100):
        held: list[Any] = [_GIVEN + 1]
        held.append(held)


@pytest.mark.parametrize(
    ("work", "size"),
    [
        (lambda: _GIVEN.view(10, 100)[1:].T, 0),
        (lambda: (_GIVEN.view(10, 100) + 1).mul_(2).view(-1), 4_000),
        (lambda: [_GIVEN + i for i in range(3)], 12_000),
        (lambda: [float((_GIVEN + i)[0]) for i in range(3)], 4_000),
        (lambda: torch.cat([_GIVEN, _GIVEN]).chunk(2), 8_000),
        (lambda: torch.eye(1000).to_sparse() @ _GIVEN[:, None], None),
        (in_a_circle, 400_000),
    ],
)
def test_what_is_held_is_what_operations_make_until_nothing_holds_it(work: Callable[[], Any], size: int | None) -> None:
    found = measure_most_held(work)
    assert size is None or found == size
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert measure_most_held(work) == found, "whatever the garbage collector does"
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()


def test_what_a_graph_keeps_is_held() -> None:
    """As many results of a function whose derivative needs them as it is applied, also within `torch.func`."""

    def many(x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = x.tanh()
        return x.sum()

    given = _GIVEN.clone().requires_grad_()
    assert measure_most_held(lambda: many(given, 5)) == 20_004
    assert measure_most_held(lambda: many(_GIVEN, 5)) == 8_000, "the last and the one before"
    seven, five = (measure_most_held(lambda n=n: vmap(grad(lambda x: many(x, n)))(_GIVEN[:, None])) for n in (7, 5))
    assert seven - five >= 8_000


# ---- points of a search that go together on a CPU ----


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [("lenet5", (1, 28, 28), 16), ("convnet", (3, 32, 32), 5), ("mlp", (3, 32, 32), 16), ("unet", (3, 32, 32), 16)],
)
def test_small_models_are_bounded_by_time_alone(
    name: str, shape: tuple[int, ...], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In double precision, too, as `dlg` is."""
    monkeypatch.setitem(iteration.MODELS, name, lambda: build_model(name, {}, shape, 10, 0))
    for sizes in ("_IMAGE", "_SCENE"):
        monkeypatch.setattr(iteration, sizes, shape)
    problem, _ = iteration.problem(name, 1)
    assert problem.at_once == size
    assert problem.fitting.each is not None
    assert 2 * size * problem.fitting.each < 2**30


@pytest.mark.engine
def test_what_goes_together_fits_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A U-Net of few weights on scenes of 224 x 224: the same number each time, and one alone is not measured."""
    monkeypatch.setattr(iteration, "_SCENE", (3, 224, 224))
    found = []
    for _ in range(2):
        problem, points = iteration.problem("unet", 1)
        problem.value_and_gradient(points, torch.tensor([0]))
        assert problem.fitting.each is None
        found.append((problem.at_once, problem.fitting.each))
    assert found[0] == found[1]
    together, each = found[0]
    assert each is not None
    assert together == 2**30 // each
    assert 1 < together < 16


@pytest.mark.engine
def test_a_chunk_takes_what_its_points_take_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "_SCENE", (3, 32, 32))
    problem, points = iteration.problem("unet", 1, 16)
    owners = torch.zeros(16, dtype=torch.int64)
    whole = measure_most_held(lambda: problem.value_and_gradient(points, owners))
    values, slopes = problem.value_and_gradient(points, owners)
    monkeypatch.setattr("rayfed.attacks.matching.problem._BYTES_AT_ONCE_CPU", budget := whole // 4)
    assert 1 < problem.at_once < 8
    assert measure_most_held(lambda: problem.value_and_gradient(points, owners)) < 1.5 * budget < whole / 2
    torch.testing.assert_close(problem.value_and_gradient(points, owners), (values, slopes))


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("way", [TOGETHER, IN_TURN])
def test_every_way_that_keeps_graphs_is_measured_once(
    way: Way, simulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, observations = two_digits()
    problem = Matching.of(observations, model, None, squared_l2)
    problem = replace(problem, way=way, simulated=simulated, local=LocalTraining(batch_size=1, steps=2))
    assert problem.at_once == 16
    assert problem.fitting.each is not None
    assert problem.fitting.each > 4 * sum(w.numel() for w in model.parameters())
    monkeypatch.setattr(Matching, "value_and_gradient", None)
    assert replace(problem, prior=None).at_once == 16


@pytest.mark.engine
def test_operators_that_refuse_to_be_watched_are_left_alone() -> None:
    """Their gradient is differentiated by differences, one point after the other, of which no graph is kept."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 10)

        def forward(self, images: Tensor) -> Tensor:
            found = self.fc(images.flatten(1))
            chosen: Tensor = torch.cond(found.sum() > 0, torch.tanh, torch.sigmoid, (found,))
            return chosen

    problem = Matching.of([observe(Branching(), digit(3), torch.tensor([3]))], Branching(), None, squared_l2)
    assert problem.way is DIFFERENCED
    assert problem.at_once == 16
    values, _ = problem.value_and_gradient(torch.rand(2, 64), torch.tensor([0, 0]))
    assert values.isfinite().all()


def test_what_comes_off_a_gpu_is_read_after_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU that is pretended: a copy that is not waited for is done when its stream is waited for, no sooner."""
    under_way = list[tuple[Tensor, Tensor]]()

    class Stream:
        def synchronize(self) -> None:
            while under_way:
                there, here = under_way.pop()
                here.copy_(there)

    def to(tensor: Tensor, device: str, non_blocking: bool = False) -> Tensor:
        assert (device, non_blocking) == ("cpu", True)
        under_way.append((tensor, torch.full_like(tensor, torch.nan)))
        return under_way[-1][1]

    known = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)).t()
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", to)
        patched.setattr(Tensor, "is_cuda", property(lambda _: True))
        patched.setattr(torch.cuda, "current_stream", lambda device: Stream())
        found = memory.copy_to_host(known.requires_grad_())
    assert not found.requires_grad
    assert torch.equal(found, known)


def test_on_a_cpu_nothing_is_copied() -> None:
    known = torch.ones(3)
    assert memory.copy_to_host(known).data_ptr() == known.data_ptr()
