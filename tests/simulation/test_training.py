"""Local training, cohorts and the runtime, on real digits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.problem import Matching
from rayfed.core import seeds
from rayfed.defences.base import Batch, DataMethod, Defence, GradientMethod, Task
from rayfed.defences.gaussian import Gaussian
from rayfed.errors import ScenarioError, UserError
from rayfed.gradients import buffers_of, weights_of, within
from rayfed.models.build import build_model
from rayfed.registry import component
from rayfed.samples import Pixels
from rayfed.scenario import AttackSpec, DataSpec, DefenceSpec, ModelSpec, Scenario, Training, resolve
from rayfed.scenario.sections import Schedule
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import Arm, build_arm
from rayfed.simulation.client.cohort import cohort_updates, obstacle, works_together
from rayfed.simulation.client.failures import checked
from rayfed.simulation.client.local import batches, local_training, trained_samples, update_method
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ClientVisit, ObservedClient
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Named, Update
from tests.helpers.component_fixtures import variants

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)


def task(digits: tuple[torch.Tensor, torch.Tensor], model: nn.Module, client: int = 0, samples: int = 21) -> Task:
    rows = torch.arange(samples) + 50 * client
    return Task(
        client=client,
        round=0,
        model=model,
        weights=weights_of(model),
        buffers=buffers_of(model),
        data=Batch(digits[0][rows], digits[1][rows]),
        generator=torch.Generator().manual_seed(client),
        order=client,
    )


def mlp() -> nn.Module:
    return build_model("mlp", {"hidden": [16]}, (1, 8, 8), 10, seed=0)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_local_training_is_torchs_sgd(digits, momentum: float, nesterov: bool) -> None:  # type: ignore[no-untyped-def]
    training = Training(epochs=2, batch_size=8, lr=0.1, momentum=momentum, nesterov=nesterov)
    work = task(digits, mlp())
    update = update_method(training, [])(work)
    reference = mlp()
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=momentum, nesterov=nesterov)
    for index in batches(21, training, work.order):
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(work.data.inputs[index]), work.data.labels[index]).backward()
        optimiser.step()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(work.weights[name] - update.tensors[name], p.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.1}, {"clip_norm": 0.5}, {"weight_decay": 0.1, "clip_norm": 0.5}]
)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adadelta"])
def test_local_training_is_torchs_own(digits, name: str, settings: dict[str, float]) -> None:  # type: ignore[no-untyped-def]
    lr = 1.0 if name == "Adadelta" else 0.01
    training = Training(epochs=2, batch_size=8, lr=lr, optimiser=name.lower(), **settings)  # type: ignore[arg-type]
    work = task(digits, mlp())
    update = update_method(training, [])(work)
    reference = mlp()
    optimiser = getattr(torch.optim, name)(reference.parameters(), lr, weight_decay=settings.get("weight_decay", 0.0))
    for index in batches(21, training, work.order):
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(work.data.inputs[index]), work.data.labels[index]).backward()
        if "clip_norm" in settings:
            assert nn.utils.clip_grad_norm_(reference.parameters(), settings["clip_norm"]) > settings["clip_norm"]
        optimiser.step()
    for parameter, p in reference.named_parameters():
        torch.testing.assert_close(
            work.weights[parameter] - update.tensors[parameter], p.detach(), atol=1e-6, rtol=1e-5
        )


def test_schedules_are_torchs_own() -> None:
    from torch.optim import lr_scheduler as torchs

    def rates(scheduler: Any, rounds: int) -> list[float]:
        optimiser = torch.optim.SGD([torch.zeros(1)], 0.2)
        of_round, found = scheduler(optimiser), []
        for _ in range(rounds):
            found.append(optimiser.param_groups[0]["lr"])
            optimiser.step()
            of_round.step()
        return found

    def ours(count: int, **schedule: Any) -> list[float]:
        training = Training(lr=0.2, schedule=Schedule(**schedule))
        return [training.in_round(round).lr for round in range(count)]

    assert ours(6, kind="cosine", rounds=6) == pytest.approx(rates(lambda o: torchs.CosineAnnealingLR(o, 6), 6))
    assert ours(9, kind="step", rounds=3, factor=0.5) == pytest.approx(rates(lambda o: torchs.StepLR(o, 3, 0.5), 9))
    by_milestones = rates(lambda o: torchs.MultiStepLR(o, [2, 5], 0.2), 7)
    assert ours(7, kind="milestones", milestones=(2, 5), factor=0.2) == pytest.approx(by_milestones)
    assert ours(6, warmup=4) == pytest.approx(rates(lambda o: torchs.LinearLR(o, 0.25, 1, 3), 6))
    assert ours(6, kind="cosine", rounds=4, warmup=2)[2:] == pytest.approx(ours(4, kind="cosine", rounds=4))
    assert Training(schedule=Schedule(kind="step", rounds=5)).in_round(4) == Training(
        schedule=Schedule(kind="step", rounds=5)
    )


def test_bf16_rounds_the_passes_and_nothing_else(digits) -> None:  # type: ignore[no-untyped-def]
    found = {}
    for precision in ("float32", "bf16"):
        model = mlp()
        update = update_method(Training(batch_size=8, precision=precision), [])(task(digits, model))  # type: ignore[arg-type]
        assert all(t.dtype == torch.float32 for t in update.tensors.values())
        assert model(torch.zeros(1, 1, 8, 8)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        found[precision] = torch.cat([t.flatten() for t in update.tensors.values()])
    apart = (found["bf16"] - found["float32"]).norm() / found["float32"].norm()
    assert 1e-4 < apart < 0.03


def test_fedsgd_sends_the_gradient_of_one_batch(digits) -> None:  # type: ignore[no-untyped-def]
    work = task(digits, model := mlp())
    update = update_method(Training(algorithm="fedsgd", batch_size=None), [])(work)
    nn.functional.cross_entropy(model(work.data.inputs), work.data.labels).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(update.tensors[name], p.grad, atol=1e-6, rtol=1e-5)


def test_training_leaves_its_task_as_it_was(digits) -> None:  # type: ignore[no-untyped-def]
    model = build_model("resnet10", {}, (1, 8, 8), 10, seed=0)
    work = task(digits, model, samples=6)
    before = {n: t.clone() for n, t in {**work.weights, **work.buffers}.items()}
    update = update_method(Training(batch_size=3), [])(work)
    assert all(torch.equal(t, before[n]) for n, t in {**work.weights, **work.buffers}.items())
    assert any(not torch.equal(b, work.buffers[n]) for n, b in update.buffers.items())


@pytest.mark.parametrize(
    ("settings", "steps", "last"),
    [({"epochs": 2, "batch_size": 8}, 6, 5), ({"steps": 4, "batch_size": 8}, 4, 8), ({"batch_size": None}, 1, 21)],
)
def test_batches_cover_each_epoch_once(settings: dict[str, int], steps: int, last: int) -> None:
    found = list(batches(21, Training(**settings), order=3))  # type: ignore[arg-type]
    assert (len(found), len(found[-1])) == (steps, last)
    assert sorted(torch.cat(found)[:21].tolist()) == list(range(21))
    assert all(torch.equal(a, b) for a, b in zip(found, batches(21, Training(**settings), 3), strict=True))  # type: ignore[arg-type]


def test_scale_of_an_update_under_a_constant_gradient() -> None:
    """An update of k momentum steps along a constant gradient, by running them."""
    training = Training(steps=5, batch_size=4, lr=0.1, momentum=0.9)
    w, v = 0.0, 0.0
    for _ in range(5):
        v = 0.9 * v + 1.0
        w -= 0.1 * v
    assert local_training(20, training).scale == pytest.approx(-w)
    assert local_training(20, Training(algorithm="fedsgd")).scale == 1.0
    assert trained_samples(20, Training(steps=2, batch_size=4)) == 8
    assert trained_samples(20, Training(epochs=3)) == 20


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 2, "batch_size": 8, "momentum": 0.9},
        {"algorithm": "fedsgd", "batch_size": 8},
        {"batch_size": 8, "weight_decay": 0.1, "clip_norm": 0.5},
        {"batch_size": 8, "optimiser": "adamw", "weight_decay": 0.1, "clip_norm": 0.5},
    ],
)
@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_vmapped_cohort_gives_the_loops_numbers(digits, settings: dict[str, int], model: str) -> None:  # type: ignore[no-untyped-def]
    net = build_model(model, {}, (1, 8, 8), 10, seed=0)
    defences = [Gaussian(sigma=0.01)]
    sent: dict[str, list[Update]] = {}
    for how in ("loop", "vmap"):
        tasks = [task(digits, net, c, samples=s) for c, s in enumerate((21, 5, 16))]  # unlike steps, unlike batches
        sent[how] = list(cohort_updates(tasks, Training(vectorise=how, lr=0.05, **settings), defences))  # type: ignore[arg-type]
    for a, b in zip(sent["loop"], sent["vmap"], strict=True):
        assert (a.client, a.samples) == (b.client, b.samples)
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
        for name in a.tensors:
            # Adam divides by the gradient, however small: rounding is not as small as it
            torch.testing.assert_close(
                a.tensors[name], b.tensors[name], atol=1e-4 if "optimiser" in settings else 1e-5, rtol=0
            )


def test_vmapped_cohort_gives_the_loops_numbers_with_adam(digits) -> None:  # type: ignore[no-untyped-def]
    """In double precision: Adam divides by the gradient's own size, which magnifies what rounding leaves of a zero."""
    net = build_model("mlp", {"hidden": [16]}, (1, 8, 8), 10, seed=0).double()
    doubled = digits[0].double(), digits[1]
    sent: dict[str, list[Update]] = {}
    for how in ("loop", "vmap"):
        tasks = [task(doubled, net, c, samples=s) for c, s in enumerate((21, 5, 16))]
        training = Training(vectorise=how, epochs=2, batch_size=8, lr=0.01, optimiser="adam")  # type: ignore[arg-type]
        sent[how] = list(cohort_updates(tasks, training, []))
    for a, b in zip(sent["loop"], sent["vmap"], strict=True):
        for name in a.tensors:
            torch.testing.assert_close(a.tensors[name], b.tensors[name], atol=1e-9, rtol=0)


@component
class Naive(Defence):
    """A noise defence as a user writes it first."""

    sigma: float = 0.1
    """Standard deviation of the noise."""

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, torch.Tensor]:
            sent, loss = next(task, weights, batch)
            return {n: g + self.sigma * torch.randn(g.shape, generator=task.generator) for n, g in sent.items()}, loss

        return gradient


@component
class NaiveUpdate(Defence):
    """The same of the whole update, which it makes twice."""

    def wrap_update(self, next):  # type: ignore[no-untyped-def]
        def update(task: Task) -> Update:
            one, other = next(task), next(task.replace(weights={n: -w for n, w in task.weights.items()}))
            return replace(one, tensors={n: t + other.tensors[n] for n, t in one.tensors.items()})

        return update


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("naive", [Naive(), NaiveUpdate()])
def test_a_defence_that_promises_nothing_is_played_client_by_client(digits, naive: Defence) -> None:  # type: ignore[no-untyped-def]
    """Even where cohorts are one call by default, on a GPU; and who demands that is told what stands in its way."""
    tasks = [task(digits, mlp(), c) for c in range(2)]
    on_gpu = tasks[0].replace(weights={name: w.as_subclass(OnGpu) for name, w in tasks[0].weights.items()})
    assert works_together(on_gpu, Training(), [Gaussian(sigma=0.1)])
    assert not works_together(on_gpu, Training(), [naive])
    alone = [update_method(Training(), [naive])(task(digits, mlp(), c)).tensors for c in range(2)]
    made = cohort_updates(tasks, Training(), [naive])
    assert all(torch.equal(one.tensors[n], t) for one, own in zip(made, alone, strict=True) for n, t in own.items())
    name = type(naive).__name__
    with pytest.raises(UserError, match=f"vmap is not possible: the defence {name}"):
        cohort_updates(tasks, Training(vectorise="vmap"), [naive])


def test_a_gradient_in_one_piece_is_refused_before_dp_sgd_and_an_update_is_not() -> None:
    private = DefenceSpec(name="dp_sgd", noise_multiplier=1)  # type: ignore[call-arg]
    built("mlp", DefenceSpec(name=f"{__name__}:NaiveUpdate"), private)
    with pytest.raises(UserError, match="dp_sgd needs the gradient of each sample, which Naive"):
        built("mlp", DefenceSpec(name=f"{__name__}:Naive"), private)


def built(model: str, *defences: DefenceSpec, **parameters: str) -> Arm:
    scenario = scenarios.parse("{name: t, federation: {rounds: 1, clients: 4}}")
    spec = replace(resolve(scenario)["none"], model=ModelSpec(name=model, **parameters), defences=list(defences))
    return build_arm(spec, Pixels(1, 8, 8), 10, 0)


TOGETHER = {
    "ats", "dldp_a", "dldp_b", "dp_fedavg", "gaussian", "instahide", "laplace", "mixup", "prune", "quantise", "top_k",
    "vae",
}  # fmt: skip
"""Defences with which clients must be trained together. With others, this follows from what the defence declares."""


@pytest.mark.parametrize("name", sorted(registry.table("defences")))
def test_a_defence_that_says_it_vectorises_gives_the_loops_numbers(digits, name: str) -> None:  # type: ignore[no-untyped-def]
    norm = {"norm": "batch"} if name == "key_lock" else {}
    for parameters in variants(name):
        arm = built("lenet", DefenceSpec(name=name, **parameters), **norm)
        sent: dict[str, list[Update]] = {}
        for how in ("loop", "vmap", "fused"):
            tasks = [task(digits, arm.model, client, samples) for client, samples in enumerate((21, 5, 16))]
            tasks = [one.replace(private=arm.private, data=placed(one.data), classes=10) for one in tasks]
            training = Training(vectorise=how, steps=3, batch_size=8, lr=0.05)  # type: ignore[arg-type]
            together = obstacle(tasks[0], training, arm.defences) is None
            assert together or name not in TOGETHER
            if how != "loop" and not together:
                with pytest.raises(UserError, match=f"{how} is not possible"):
                    cohort_updates(tasks, training, arm.defences)
            elif together:
                sent[how] = cast("list[Update]", list(cohort_updates(tasks, training, arm.defences)))
        for others in (sent.get(how, []) for how in ("vmap", "fused")):
            for one, other in zip(sent.get("loop", []), others, strict=True):
                assert one.samples == other.samples
                apart = torch.cat([(t - other.tensors[n]).abs().flatten() for n, t in one.tensors.items()])
                # rounding decides which of two nearly equal values is kept, or to which of two steps one is rounded
                assert apart.quantile(0.99) < 1e-7, parameters


def placed(data: Batch) -> Batch:
    return data._replace(places=torch.arange(len(data.labels)))


def test_vmap_says_what_stands_in_its_way(digits) -> None:  # type: ignore[no-untyped-def]
    with_norm = build_model("resnet10", {}, (1, 8, 8), 10, seed=0)
    with pytest.raises(UserError, match="batch norm in training mode"):
        cohort_updates([task(digits, with_norm)], Training(vectorise="vmap"), [])
    with pytest.raises(UserError, match="vmap is not possible: the defence Tracing"):
        cohort_updates([task(digits, mlp())], Training(vectorise="vmap"), [Tracing("a", [])])


class Tracing(Defence):
    """Notes which of its hooks is called when."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def wrap_data(self, next: DataMethod) -> DataMethod:
        def data(task: Task) -> Batch:
            batch = next(task)
            self.seen.append(f"{self.name}.data")
            return batch

        return data

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, torch.Tensor]:
            grads, loss = next(task, weights, batch)
            self.seen.append(f"{self.name}.gradient")
            return {n: 2 * g for n, g in grads.items()}, loss

        return gradient

    def wrap_update(self, next):  # type: ignore[no-untyped-def]
        def update(task: Task) -> Update:
            sent = next(task)
            self.seen.append(f"{self.name}.update")
            task.state["rounds"] = task.state.get("rounds", 0) + 1
            return sent

        return update


def test_every_hook_is_called_innermost_first(digits) -> None:  # type: ignore[no-untyped-def]
    seen: list[str] = []
    training = Training(algorithm="fedsgd", batch_size=None)
    stack = [Tracing("first", seen), Tracing("second", seen)]
    update = update_method(training, stack)(task(digits, mlp()))
    assert seen == [f"{n}.{hook}" for hook in ("data", "gradient", "update") for n in ("first", "second")]
    plain = update_method(training, [])(task(digits, mlp()))
    torch.testing.assert_close(update.tensors, {name: 4 * t for name, t in plain.tensors.items()})


def scenario(extra: str = "") -> Scenario:
    text = """
name: t
data: {name: digits, size: 8, train_samples: 200, test_samples: 100}
partition: {name: dirichlet, alpha: 1}
model: {name: mlp, hidden: [16]}
training: {batch_size: 8}
federation: {rounds: 3, clients: 8, clients_per_round: 5, cohort_size: 2}
"""
    return scenarios.parse(text + extra)


def runtime(s: Scenario) -> tuple[ClientWorker, Sent]:
    inputs = prepare_inputs(s)
    found = ClientWorker(s, inputs.data, inputs.parts, CPU)
    model = found.arm(next(iter(s.played))).model
    return found, Sent(0, weights_of(model), buffers_of(model))


def test_no_two_visits_of_clients_draw_the_same() -> None:
    """Noise that comes again in another round, or at another client, could be subtracted."""
    own, sent = runtime(scenario("arms: {a: [{name: gaussian, sigma: 1}], b: [{name: gaussian, sigma: 1}]}\n"))

    def drawn(arm: str, round: int, client: int) -> tuple[int, int]:
        task = own.task(arm, replace(sent, round=round), client, own.parts[client], {})
        return task.generator.initial_seed(), task.order

    visits = [(arm, round, client) for arm in "ab" for round in range(3) for client in range(3)]
    assert len({drawn(*visit)[0] for visit in visits}) == len(visits)
    assert len({drawn("a", *visit)[1] for visit in ((r, c) for r in range(3) for c in range(3))}) == 9
    assert all(drawn(*visit) == drawn(*visit) for visit in visits)  # whoever does it, and however often


def with_batch_norm(s: Scenario) -> Scenario:
    model, data = ModelSpec(name="convnet", width=4), DataSpec(name="digits", size=16)  # type: ignore[call-arg]
    return s.model_copy(update={"model": model, "data": data})


@pytest.mark.parametrize(("vectorise", "expected"), [("vmap", [3.0, 3.0]), ("loop", [1.0, 5.0])])
def test_the_seconds_of_a_cohort(vectorise: str, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by 1 and 5 s as the two clients are trained: in one call, or one after the other."""
    s = scenario()
    s = s.model_copy(update={"training": s.training.model_copy(update={"vectorise": vectorise})})
    h, sent = runtime(s)
    clock = [0.0]
    updates = cohort_updates

    def timed(tasks: Sequence[Task], training: Training, defences: Sequence[Defence]) -> Iterator[Update]:
        def trained() -> Iterator[Update]:
            for update, seconds in zip(updates(tasks, training, defences), (1, 5), strict=True):
                clock[0] += seconds
                yield update

        return iter(list(trained())) if vectorise == "vmap" else trained()

    monkeypatch.setattr("rayfed.simulation.client.runtime.cohort_updates", timed)
    for module in ("runtime", "cohort"):
        monkeypatch.setattr(f"rayfed.simulation.client.{module}.perf_counter", lambda: clock[0])
    _, report = h.cohort("none", sent, [1, 3], {})
    assert [row["seconds"] for row in report.rows] == expected
    assert report.seconds == 6


def test_a_client_sends_the_same_whoever_its_neighbours_are() -> None:
    s = scenario()
    h, sent = runtime(s)
    alone, _ = h.cohort("none", sent, [3], {})
    together, report = h.cohort("none", sent, [1, 3], {})
    first, _ = h.cohort("none", sent, [1], {})
    for name, total in together.tensors.items():
        assert torch.equal(total, first.tensors[name] + alone.tensors[name])
    assert [row["client"] for row in report.rows] == [1, 3]


def test_plan_follows_from_the_scenario() -> None:
    s = scenario()
    drawn = [plan.drawn_clients(s, r) for r in range(20)]
    assert all(len(set(d)) == 5 and d == sorted(d) for d in drawn)
    assert set(np.concatenate(drawn)) == set(range(8))
    assert [len(c) for c in plan.cohorts(s, 0)] == [2, 2, 1]
    assert drawn[0] == plan.drawn_clients(s, 0)


def test_victims_are_clients_that_can_be_observed() -> None:
    s = scenario()
    samples = [len(p) for p in prepare_inputs(s).parts]
    drawn = plan.drawn_clients(s, 0)
    chosen = plan.victims(s, AttackSpec(name="dlg", victims=2), 0, samples)
    assert chosen == drawn[:2]
    absent = next(c for c in range(8) if c not in drawn)
    with pytest.raises(ScenarioError, match=f"client {absent} as a victim, which is not sampled in round 0"):
        plan.victims(s, AttackSpec(name="dlg", victims=[absent]), 0, samples)
    assert plan.victims(s, AttackSpec(name="dlg", victims=[absent], observes="gradient"), 0, samples) == [absent]
    with pytest.raises(ScenarioError, match="choose another victim or a smaller batch_size"):
        plan.victims(s, AttackSpec(name="dlg", victims=[0], observes="gradient", batch_size=201), 0, samples)


def test_an_observed_update_is_the_one_that_was_sent() -> None:
    s = scenario("arms: {none: [], gaussian: [{name: gaussian, sigma: 0.1}]}\n")
    h, sent = runtime(s)
    partial, _ = h.cohort("gaussian", sent, [2], {})
    seen, truth = ObservationBuilder(h).observe(ClientVisit("gaussian", sent, 2), AttackSpec(name="dlg"))
    plain, undefended = ObservationBuilder(h).observe(ClientVisit("none", sent, 2), AttackSpec(name="dlg"))
    apart = torch.cat([(t - plain.update[n]).flatten() for n, t in seen.update.items()]).norm()
    assert truth.distortion == pytest.approx(
        float(apart / torch.cat([t.flatten() for t in plain.update.values()]).norm())
    )
    assert undefended.distortion == 0
    for name, tensor in seen.update.items():
        assert torch.equal(tensor * partial.weight, partial.tensors[name])
    assert seen.batch_size == len(truth.labels) == len(h.parts[2])
    assert seen.labels is None


def test_the_statistics_that_a_client_returns_are_observed_bare() -> None:
    s = scenario("arms: {none: [], gaussian: [{name: gaussian, sigma: 0.1}]}\n")
    s = with_batch_norm(s)
    h, sent = runtime(s)
    partial, _ = h.cohort("none", sent, [2], {})
    seen, _ = ObservationBuilder(h).observe(ClientVisit("gaussian", sent, 2), AttackSpec(name="dlg"))
    assert any(not torch.equal(b, seen.buffers[name]) for name, b in seen.returned_buffers.items())
    for name, total in partial.buffers.items():
        assert torch.equal(seen.returned_buffers[name] * partial.weight, total)


class HalfFrozen(nn.Module):
    """A random projection that nobody trains, under a linear layer."""

    def __init__(self, frozen_layers: int = 1) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        for layer in (self.body, self.head)[:frozen_layers]:
            layer.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sigmoid(self.body(images.flatten(1))))


def half_frozen(frozen_layers: int = 1) -> ModelSpec:
    return ModelSpec(name="tests.simulation.test_training:HalfFrozen", frozen_layers=frozen_layers)  # type: ignore[call-arg]


@pytest.mark.parametrize("how", ["loop", "vmap"])
def test_attackers_are_shown_the_parameters_that_are_frozen(how: str) -> None:
    s = scenario().model_copy(update={"model": half_frozen(), "training": Training(vectorise=how, batch_size=8)})  # type: ignore[arg-type]
    h, sent = runtime(s)
    assert (set(sent.weights), set(sent.buffers)) == ({"head.weight", "head.bias"}, {"body.weight", "body.bias"})
    partial, _ = h.cohort("none", sent, [1, 2], {})
    assert partial.buffers == {}
    attack = AttackSpec(name="dlg", observes="gradient", knowledge=["labels"])
    seen, truth = ObservationBuilder(h).observe(ClientVisit("none", sent, 1), attack)
    [spec] = h.specs.values()
    others = build_arm(spec, h.data.sample, 10, seed=7).model  # as attackers build it: another seed
    problem = Matching.of([seen], others, None, squared_l2)
    assert problem.losses(truth.inputs.reshape(1, -1), torch.zeros(1, dtype=torch.int64)) < 1e-10


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(UserError, match="no trainable parameter"):
        prepare_inputs(scenario().model_copy(update={"model": half_frozen(frozen_layers=2)}))


def test_an_observed_gradient_is_that_of_its_truth() -> None:
    s = scenario()
    h, sent = runtime(s)
    attack = AttackSpec(name="dlg", observes="gradient", batch_size=3, knowledge=["labels"])
    seen, truth = ObservationBuilder(h).observe(ClientVisit("none", sent, 2), attack)
    model = h.arm("none").model
    nn.functional.cross_entropy(model(truth.inputs), truth.labels).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(seen.gradient[name], p.grad, atol=1e-6, rtol=1e-5)
    assert seen.labels is not None
    assert torch.equal(seen.labels, truth.labels.sort().values)


def test_noise_fades_in_the_mean_of_answers_that_an_informed_attacker_sees() -> None:
    s = scenario("arms: {none: [], noisy: [{name: gaussian, sigma: 0.5}]}\n")
    h, sent = runtime(s)
    attack = AttackSpec(name="dlg", observes="gradient", knowledge=["defence"], averages=100)
    plain, truth = ObservationBuilder(h).observe(ClientVisit("none", sent, 2), attack)
    noisy, same = ObservationBuilder(h).observe(ClientVisit("noisy", sent, 2), attack)
    assert torch.equal(truth.inputs, same.inputs)
    rest = torch.cat([(noisy.update[n] - t).flatten() for n, t in plain.update.items()])
    assert float(rest.std()) == pytest.approx(0.05, rel=0.1)
    exact, error = (ObservedClient(h, ClientVisit(arm, sent, 2), attack).error() for arm in ("none", "noisy"))
    assert exact is not None
    assert error is not None
    assert not any(t.any() for t in exact.values())
    assert torch.cat([t.flatten() for t in error.values()]).mean().item() == pytest.approx(0.05, rel=0.02)


RANDOM = {
    "gaussian": "{name: gaussian, sigma: 0.1}",
    "quantise": "{name: quantise, bits: 2, rounding: stochastic}",
    "outpost": "{name: outpost}",
    "grad_defense": "{name: grad_defense, scale: 0.1}",
    "dropout": "{name: dropout, rate: 0.5}",
    "dcs2": "{name: dcs2, iterations: 10, start: noise}",
}


@pytest.mark.parametrize("defence", RANDOM)
def test_the_mean_of_answers_is_nearer_to_the_gradient_than_one(defence: str) -> None:
    """Each of the defences that draw anew: whoever asks again learns more, of some up to what is biased."""
    s = scenario(f"arms: {{none: [], random: [{RANDOM[defence]}]}}\n")
    s = s.model_copy(update={"data": s.data.model_copy(update={"public": 0.2})})
    h, sent = runtime(s)

    def apart(answers: int) -> float:
        attack = AttackSpec(name="dlg", observes="gradient", knowledge=["defence"], averages=answers)
        seen = [ObservationBuilder(h).observe(ClientVisit(arm, sent, 2), attack)[0] for arm in ("none", "random")]
        plain, random = (torch.cat([t.flatten() for t in one.update.values()]) for one in seen)
        return float((random - plain).norm() / plain.norm())

    one, many = apart(1), apart(40)
    assert 0 < many < 0.9 * one


def test_attackers_match_only_what_pruning_kept() -> None:
    s = scenario("arms: {none: [], pruned: [{name: prune, ratio: 0.9}]}\n")
    h, sent = runtime(s)
    attack = AttackSpec(name="dlg", observes="gradient", knowledge=["defence", "labels"])
    seen, truth = ObservationBuilder(h).observe(ClientVisit("pruned", sent, 2), attack)
    point, victim = truth.inputs.reshape(1, -1), torch.tensor([0])
    for attacker in (seen, replace(seen, extra={})):
        problem = Matching.of([attacker], h.arm("pruned").model, None, squared_l2)
        assert problem.values(point, victim).item() == pytest.approx(0, abs=1e-10)
        assert problem.values(1 - point, victim).item() > 1e-3


def test_the_gradient_estimate_of_one_local_step_is_exact() -> None:
    s = scenario()
    s = s.model_copy(update={"training": Training(steps=1, batch_size=None, lr=0.01)})
    h, sent = runtime(s)
    seen, truth = ObservationBuilder(h).observe(ClientVisit("none", sent, 2), AttackSpec(name="dlg"))
    model = h.arm("none").model
    nn.functional.cross_entropy(model(truth.inputs), truth.labels).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(seen.gradient[name], p.grad, atol=1e-5, rtol=1e-3)


def test_a_clients_state_comes_back_and_an_attacker_does_not_change_it() -> None:
    s = scenario()
    h, sent = runtime(s)
    h._arms["none"] = replace(h.arm("none"), defences=(Tracing("t", []),))
    state = {"rounds": 4}
    ObservationBuilder(h).observe(ClientVisit("none", sent, 1, {1: state}), AttackSpec(name="dlg"))
    assert state == {"rounds": 4}
    _, report = h.cohort("none", sent, [1], {1: state})
    assert report.states == {1: {"rounds": 5}}


def test_evaluation_counts_what_the_model_gets_right() -> None:
    s = scenario()
    h, sent = runtime(s)
    parts = [h.evaluate("none", sent, i, min(i + 60, 100)) for i in range(0, 100, 60)]
    model = h.arm("none").model
    with torch.no_grad():
        logits = model(torch.from_numpy(h.data.test_images).float() / 255)
    labels = torch.from_numpy(h.data.test_labels)
    assert sum(p[1] for p in parts) == int((logits.argmax(1) == labels).sum())
    assert sum(p[0] for p in parts) == pytest.approx(
        float(nn.functional.cross_entropy(logits, labels, reduction="sum")), rel=1e-5
    )


def test_evaluation_on_the_clients_own_samples_counts_those_of_every_client_once() -> None:
    h, sent = runtime(scenario())
    owned = np.concatenate(h.parts)
    parts = [h.evaluate("none", sent, i, min(i + 60, len(owned)), "train") for i in range(0, len(owned), 60)]
    with torch.no_grad():
        logits = h.arm("none").model(torch.from_numpy(h.data.train_images[owned]).float() / 255)
    assert sum(p[1] for p in parts) == int((logits.argmax(1) == torch.from_numpy(h.data.train_labels[owned])).sum())


def test_an_observed_gradient_knows_where_its_samples_stand_and_what_else_the_client_has() -> None:
    h, sent = runtime(scenario())
    own = h.parts[1]
    chosen = own[[5, 2]]
    task = h.task("none", sent, 1, chosen, {})
    assert task.data.places is not None
    assert task.data.places.tolist() == [5, 2]
    assert task.others is not None
    assert task.others.places is not None
    assert sorted([*task.data.places.tolist(), *task.others.places.tolist()]) == [*range(len(own))]
    image = torch.from_numpy(h.data.train_images[own[task.others.places[3]]]).float() / 255
    assert torch.equal(task.others.inputs[3], image)
    assert h.task("none", sent, 1, own, {}).others is None


def test_a_diverged_client_is_named() -> None:
    s = scenario()
    s = s.model_copy(update={"training": Training(lr=1e30, batch_size=8)})
    h, sent = runtime(s)
    with pytest.raises(UserError, match="client 1 sent an update that is not finite in round 1 of arm 'none'"):
        h.cohort("none", sent, [1], {})


def test_statistics_that_are_not_finite_are_refused() -> None:
    s = with_batch_norm(scenario())
    h, sent = runtime(s)
    buffers = {name: b * torch.nan if b.is_floating_point() else b for name, b in sent.buffers.items()}
    with pytest.raises(UserError, match="client 1 sent an update that is not finite"):
        h.cohort("none", replace(sent, buffers=buffers), [1], {})


@pytest.mark.parametrize("part", ["tensors", "buffers"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-45])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(part: str, value: float) -> None:
    h, sent = runtime(with_batch_norm(scenario()))
    asked = h.task("none", sent, 1, h.parts[1], {})
    made = update_method(h.specs["none"].training.in_round(0), ())(asked)
    for place in range(-1, 1):
        tensors = {name: t.clone() for name, t in getattr(made, part).items()}
        [*tensors.values()][place].view(-1)[place] = value
        finite = isinstance(checked(replace(made, **{part: tensors}), asked), Update)
        assert finite == np.isfinite(value)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bare = nn.Linear(3, 3), nn.Parameter(torch.zeros(3))
        self.again = self.first
        self.second = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
        self.second[0].weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.again(inputs)) + self.bare
        return found


def test_a_model_is_lent_tensors_as_functional_call_lends_them(digits) -> None:  # type: ignore[no-untyped-def]
    model, inputs = Tied(), digits[0][:4].flatten(1)[:, 2:5]
    state = {name: t + 1 for name, t in (weights_of(model) | buffers_of(model)).items()}
    stored, expected = dict(model.state_dict(keep_vars=True)), {name: t.clone() for name, t in state.items()}
    theirs = functional_call(deepcopy(model), expected, (inputs,))  # which does not give back what is shared
    assert torch.equal(within(model, state, lambda lent: lent(inputs)), theirs)
    assert all(torch.equal(t, expected[name]) for name, t in state.items())  # statistics move where they were given
    assert not torch.equal(state["second.1.running_mean"], torch.ones(3))
    with pytest.raises(ZeroDivisionError):
        within(model, state, lambda lent: 1 / 0)
    assert all(t is stored[name] for name, t in model.state_dict(keep_vars=True).items())
    other = {"second.0.weight": state["first.weight"] + 1}
    with pytest.raises(ValueError, match=r"'second.0.weight' is tied"):
        within(model, state | other, lambda lent: lent(inputs))


def test_dropout_draws_the_same_for_the_same_client(digits) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    before = torch.get_rng_state()
    first, again = (update_method(Training(), [])(task(digits, model)) for _ in range(2))
    assert torch.equal(first.tensors["2.weight"], again.tensors["2.weight"])
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_depend_on_the_whole_key() -> None:
    draws = {tuple(torch.rand(2, generator=seeds.torch_generator(*key)).tolist())
             for key in [(0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1)]}  # fmt: skip
    assert len(draws) == 4


def test_an_attacker_knows_public_data_where_the_scenario_says_so(digits) -> None:  # type: ignore[no-untyped-def]
    s = scenario()
    h, sent = runtime(s.model_copy(update={"data": s.data.model_copy(update={"public": 0.1})}))
    known, _ = ObservationBuilder(h).observe(
        ClientVisit("none", sent, 1), AttackSpec(name="dlg", observes="gradient", knowledge=["public"])
    )
    images, labels = known.extra["public"]
    assert torch.equal((images * 255).round().to(torch.uint8), torch.from_numpy(h.data.public_images))
    assert torch.equal(labels, torch.from_numpy(h.data.public_labels))
    unknown, _ = ObservationBuilder(h).observe(
        ClientVisit("none", sent, 1), AttackSpec(name="dlg", observes="gradient")
    )
    assert not unknown.extra
