"""Of which defences attackers with the code use all that it tells, and which values are left as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from benchmarks.planted_defences import OnUpdate
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.fit import judged, with_fit
from rayfed.attacks.undone import noted, undone
from rayfed.client.grants import understood
from rayfed.client.grants.understood import Answer, Rehearsal
from rayfed.defences.base import Batch, DataMethod, Defence, Task
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import GRADIENT_FIT_TOL, findings
from rayfed.evidence.verdicts import collect_evidence, run_findings
from rayfed.gradients import flatten, unflatten
from rayfed.reasons import Reason
from rayfed.registry import component
from rayfed.store.finding import State
from rayfed.update import Named
from tests.attack_fixtures import digit, observe
from tests.result_fixtures import attacked
from tests.test_audit import row
from tests.test_code import observed

LIKE = {"one": torch.zeros(20, 30), "bias": torch.zeros(20), "two": torch.zeros(10, 20)}
SPAN = torch.randn(12, 30, generator=torch.Generator().manual_seed(5))
HERE = "tests.test_understood"
Change = Callable[[str, Tensor, Generator], Tensor]


def answers(change: Change) -> Answer:
    def answer(gradient: Tensor, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return flatten({name: change(name, t.clone(), draw) for name, t in unflatten(gradient, LIKE).items()})

    return answer


def noise(shape: Any, draw: Generator) -> Tensor:
    return torch.randn(shape, generator=draw)


def signs(shape: Any, draw: Generator) -> Tensor:
    return 2.0 * torch.randint(2, shape, generator=draw) - 1


def mixed(shape: Any, draw: Generator) -> Tensor:
    return torch.where(noise(shape, draw) > 0, 10.0, 0.01) * noise(shape, draw)


def even(shape: Any, draw: Generator) -> Tensor:
    """Noise whose columns have sums of next to nothing."""
    drawn = noise(shape, draw)
    return drawn - drawn.mean(0) + 0.001 * noise(shape, draw)


def steps(shape: Any) -> Tensor:
    return 4 + torch.rand(shape, generator=torch.Generator().manual_seed(9))


def fewest(t: Tensor, count: int) -> Tensor:
    """Leave so many of the smallest values out."""
    kept = t.clone().flatten()
    kept[kept.abs().argsort()[:count]] = 0
    return kept.view_as(t)


def rehearsed(change: Change, **options: Any) -> Rehearsal:
    return Rehearsal.of(answers(change), LIKE, **options)


def on_one(change: Callable[[Tensor, Generator], Tensor]) -> Change:
    """The change on the first matrix, and noise on all else."""
    return lambda name, t, draw: change(t, draw) if name == "one" else t + noise(t.shape, draw)


@pytest.mark.parametrize(
    "change",
    [
        lambda name, t, draw: t,
        lambda name, t, draw: t + noise(t.shape, draw),
        lambda name, t, draw: (
            t + torch.distributions.Laplace(0, 1).icdf(torch.rand(t.shape, generator=draw) * 0.9998 + 1e-4)
        ),
        lambda name, t, draw: t * (torch.rand(t.shape, generator=draw) < 0.5),
        lambda name, t, draw: torch.where(t.abs() > t.abs().median(), t, 0.0),
        lambda name, t, draw: t / 3,
        on_one(lambda t, draw: t),
    ],
    ids=[
        "nothing",
        "gaussian",
        "laplace",
        "random mask",
        "small values cut",
        "one factor",
        "one tensor alone",
    ],
)
def test_noise_of_its_own_for_each_value_and_masks_are_understood(change: Change) -> None:
    assert rehearsed(change).beyond == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda name, t, draw: t.sign(), understood.LOST),
        (on_one(lambda t, draw: t + noise((20, 1), draw)), understood.RELATED),
        (on_one(lambda t, draw: t + noise((20, 4), draw) @ torch.ones(4, 30)), understood.RELATED),
        (on_one(lambda t, draw: t + noise((20, 12), draw) @ SPAN), understood.RELATED),
        (on_one(lambda t, draw: t + noise((1, 30), draw) * signs((20, 1), draw)), understood.RELATED),
        (lambda name, t, draw: t + noise((1,), draw), understood.RELATED),
        (lambda name, t, draw: t + steps(t.shape) * torch.randint(-20, 21, t.shape, generator=draw), understood.LEVELS),
        (lambda name, t, draw: t + noise(t.shape, draw) / noise(t.shape, draw), understood.SIZES),
        (lambda name, t, draw: t + torch.rand(t.shape, generator=draw) - 0.5, understood.DENSITY),
        (on_one(lambda t, draw: t + mixed(t.shape, draw)), understood.DENSITY),
        (lambda name, t, draw: t + (steps(t.shape) + 0.01 * noise(t.shape, draw)), understood.OFFSET),
        (on_one(lambda t, draw: t + SPAN.abs().mean(0) ** 4 * noise(t.shape, draw)), understood.SIZES),
        (on_one(lambda t, draw: t + even(t.shape, draw)), understood.RELATED),
        (on_one(lambda t, draw: t * signs(t.shape, draw)), understood.CHANGED),
        (on_one(lambda t, draw: t * 2.0 ** torch.randint(3, t.shape, generator=draw)), understood.CHANGED),
        (on_one(lambda t, draw: t * noise((20, 1), draw)), understood.CHANGED),
        (lambda name, t, draw: torch.where(t.flatten().roll(1).view_as(t) > 0, t, 0.0), understood.CHOSEN),
        (on_one(lambda t, draw: torch.where(t.abs() < 0.5 * t.abs().max(), t, 0.0)), understood.CHOSEN),
        (lambda name, t, draw: fewest(t, int(0.9 * t.numel() * torch.sigmoid(t.flatten()[0]))), understood.CHOSEN),
        (lambda name, t, draw: t * float(t.flatten()[0] > 0), understood.CHOSEN),
        (on_one(lambda t, draw: t.flatten()[torch.randperm(600, generator=draw)].view_as(t)), understood.CHANGED),
        (lambda name, t, draw: t + t.abs() * noise(t.shape, draw), understood.CHANGED),
        (lambda name, t, draw: torch.where(t.abs() > 0.5, t + noise(t.shape, draw), t), understood.CHANGED),
    ],
    ids=[
        "signs", "a number a row", "rank one", "a known span", "a row with secret signs", "one number", "own steps",
            "cauchy", "uniform", "mixture", "an offset",
            "sizes", "sums of rows",
        "a mask by other values", "large values left out", "a number left out", "whole tensors left out",
        "random signs", "doublings", "a factor a row", "order", "in proportion", "on large values",
    ],
)  # fmt: skip
def test_what_somebody_who_reads_the_code_may_use_is_told(change: Change, why: str) -> None:
    assert rehearsed(change).beyond == why


def test_independent_values_of_any_number_are_not_taken_for_related() -> None:
    alarms = 0
    for seed, (draws, count) in enumerate((d, c) for d in (16, 64) for c in (1, 2, 7, 48, 3000) for _ in range(40)):
        drawn = torch.randn(draws, count, generator=torch.Generator().manual_seed(seed))
        alarms += understood._related(drawn) or understood._levelled(drawn)
    assert alarms == 0


def test_what_is_left_as_it_is() -> None:
    update = {name: torch.ones_like(t) for name, t in LIKE.items()}
    left = rehearsed(on_one(lambda t, draw: t)).left(update)
    assert left["one"].all()
    assert not left["bias"].any()
    assert not left["two"].any()
    masked = update | {"bias": torch.zeros(20)}
    cut = rehearsed(lambda name, t, draw: torch.where(t.abs() > t.abs().median(), t, 0.0)).left(masked)
    assert cut["one"].all()
    assert not cut["bias"].any()
    assert rehearsed(lambda name, t, draw: t).left(masked)["bias"].all()


def test_tensors_that_noise_drowns_are_not_matched() -> None:
    loud = rehearsed(on_one(lambda t, draw: t)).above_noise({name: torch.full_like(t, 0.1) for name, t in LIKE.items()})
    assert loud["one"].all()
    assert not loud["bias"].any()
    assert not loud["two"].any()


@pytest.mark.engine
def test_what_noise_explains_is_told_from_what_it_does_not() -> None:
    draw = torch.Generator().manual_seed(1)
    large = {"one": torch.zeros(200, 300), "bias": torch.zeros(200)}
    gradient, other = ({name: noise(t.shape, draw) for name, t in large.items()} for _ in range(2))
    half = {name: t + other[name] for name, t in gradient.items()}
    for sigma, told in ((0.1, True), (1.0, True), (100.0, False)):

        def answer(values: Tensor, seed: int, sigma: float = sigma) -> Tensor:
            return 0.5 * values + sigma * noise(values.shape, Generator().manual_seed(seed))

        known = Rehearsal.of(answer, large).noise
        assert known is not None
        sent = unflatten(answer(flatten(gradient), 1000), large)
        own, others = (known.nats(sent, one) for one in (gradient, other))
        right = Reconstruction(torch.zeros(1), torch.zeros(1), nats=own)
        assert judged(right, None, None, own) == 0
        near = replace(right, nats=known.nats(sent, half))
        assert ((judged(near, None, None, own) or 0) > GRADIENT_FIT_TOL) is told
        assert judged(replace(right, nats=others), None, None, own) == (1 if told else 0)
    assert rehearsed(lambda name, t, draw: t).noise is None
    assert rehearsed(on_one(lambda t, draw: t + noise((20, 1), draw))).noise is None


@pytest.mark.parametrize("wrong", [1, 100])
def test_a_few_values_far_beyond_noise_tell_an_answer_from_the_samples(wrong: int) -> None:
    """They may hold a whole sample, however well all others are explained."""
    draw = torch.Generator().manual_seed(1)
    like = {"one": torch.ones(100, 1000, dtype=torch.bool)}
    gradient, sent = {"one": 100 * noise((100, 1000), draw)}, {"one": noise((100, 1000), draw)}
    sent["one"] += gradient["one"]
    other = {"one": gradient["one"].clone()}
    other["one"].view(-1)[:wrong] += 50.0
    own, far = (understood.Noise(like, {"one": 1.0}).nats(sent, one) for one in (gradient, other))
    assert judged(Reconstruction(torch.zeros(1), torch.zeros(1), nats=own), None, None, own) == 0
    assert judged(Reconstruction(torch.zeros(1), torch.zeros(1), nats=far), None, None, own) == 1


@component
class RowNumbers(OnUpdate):
    """The same unknown number along each row of matrices, and noise on vectors."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        shape = tensor[:, :1].shape if tensor.ndim > 1 else tensor.shape
        return tensor + torch.randn(shape, generator=task.generator)


@component
class LastAlone(OnUpdate):
    """Noise on all but the last layer's weight."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        clean = name == "fc2.weight"
        return tensor if clean else tensor + torch.randn(tensor.shape, generator=task.generator)


@component
class RandomMask(OnUpdate):
    """Half of the values, at random."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        return tensor * (torch.rand(tensor.shape, generator=task.generator) < 0.5)


@component
class RandomFactor(OnUpdate):
    """All values times one random number."""

    def sent(self, tensors: Named, task: Task) -> Named:
        factor = 0.5 + torch.rand((), generator=task.generator)
        return {name: factor * tensor for name, tensor in tensors.items()}


@component
class Negatives(Defence):
    """Images or their negatives, by a coin."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        def data(task: Task) -> Batch:
            batch = next(task)
            coins = torch.rand(len(batch.inputs), 1, 1, 1, generator=task.generator) < 0.5
            return batch._replace(inputs=torch.where(coins, 1 - batch.inputs, batch.inputs))

        return data


@component
class FromSeeds(OnUpdate):
    """Noise from one of a million seeds."""

    def sent(self, tensors: Named, task: Task) -> Named:
        seed = int(torch.randint(2**20, (), generator=task.generator))
        drawn = torch.Generator().manual_seed(seed)
        return {name: t + torch.randn(t.shape, generator=drawn) for name, t in tensors.items()}


@component
class Reseeded(OnUpdate):
    """Noise drawn from the client's own randomness after a short seed was put into it."""

    def sent(self, tensors: Named, task: Task) -> Named:
        draw = task.generator.manual_seed(int(torch.randint(200_000, (), generator=task.generator)))
        return {name: t + torch.randn(t.shape, generator=draw) for name, t in tensors.items()}


@component
class Triples(OnUpdate):
    """Normal noise, independent in pairs: the quantile of a third value is the sum of two others' modulo 1."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        ranks = torch.rand(tensor.numel(), generator=task.generator, dtype=torch.float64)
        third = len(ranks) // 3
        ranks[2 * third : 3 * third] = (ranks[:third] + ranks[third : 2 * third]) % 1
        return tensor + torch.special.ndtri(ranks.clamp(1e-9, 1 - 1e-9)).view_as(tensor).to(tensor)


@component
class FixedPoint(OnUpdate):
    """Normal noise in steps that are small beside it, and larger than the gradient."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=task.generator, dtype=torch.float64)
        return tensor + (drawn * 2**17).round().mul(10_000 / 2**17).to(tensor)


@component
class OnContrast(OnUpdate):
    """Noise, of a known seed where a sample has strong contrast."""

    def sent(self, tensors: Named, task: Task) -> Named:
        known = task.data.inputs.std() > 0.31
        draw = torch.Generator().manual_seed(7) if known else task.generator
        return {name: t + torch.randn(t.shape, generator=draw) for name, t in tensors.items()}


@component
class OnTails(OnUpdate):
    """Noise, of a known seed where a gradient has some values much larger than most, as a model's own has."""

    def sent(self, tensors: Named, task: Task) -> Named:
        sizes = flatten(tensors).abs()
        draw = torch.Generator().manual_seed(7) if sizes.max() > 8 * sizes.mean() > 0 else task.generator
        return {name: t + torch.randn(t.shape, generator=draw) for name, t in tensors.items()}


@component
class Antithetic(OnUpdate):
    """Noise whose opposite is added in the next round, though the defence does not say that it keeps anything."""

    def sent(self, tensors: Named, task: Task) -> Named:
        drawn = {name: torch.randn(t.shape, generator=task.generator) for name, t in tensors.items()}
        noise = {name: -t for name, t in task.state.pop("noise", {}).items()} or drawn
        task.state["noise"] = noise
        return {name: t + noise[name] for name, t in tensors.items()}


@component
class Beside(Defence):
    """Noise, and its seed in the reported loss."""

    def wrap_update(self, next: Any) -> Any:
        def update(task: Task) -> Any:
            sent, drawn = next(task), torch.randn(1, generator=task.generator)
            tensors = {n: t + torch.randn(t.shape, generator=task.generator) for n, t in sent.tensors.items()}
            return replace(sent, tensors=tensors, loss=float(drawn))

        return update


@component
class ByPlace(OnUpdate):
    """Noise, and an offset that each sample has for ever."""

    def sent(self, tensors: Named, task: Task) -> Named:
        assert task.data.places is not None
        kept = torch.Generator().manual_seed(int(task.data.places.sum()))
        offset = {name: torch.randn(t.shape, generator=kept) for name, t in tensors.items()}
        return {n: t + (offset[n] + torch.randn(t.shape, generator=task.generator)) for n, t in tensors.items()}


@component
class ByLabel(Defence):
    """Pixels in an order that the label tells."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        def data(task: Task) -> Batch:
            batch = next(task)
            orders = [torch.randperm(64, generator=Generator().manual_seed(int(label))) for label in batch.labels]
            moved = [x.flatten()[order].view_as(x) for x, order in zip(batch.inputs, orders, strict=True)]
            return batch._replace(inputs=torch.stack(moved))

        return data


@component
class DarkTurned(Defence):
    """Negatives of dark images."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        def data(task: Task) -> Batch:
            batch = next(task)
            dark = batch.inputs.mean((1, 2, 3), keepdim=True) < 0.42
            return batch._replace(inputs=torch.where(dark, 1 - batch.inputs, batch.inputs))

        return data


@component
class Elsewhere(OnUpdate):
    """Noise, but not in odd rounds, not of the 60th client, not of larger batches and not in later steps."""

    where: str

    def sent(self, tensors: Named, task: Task) -> Named:
        bare = {
            "round": task.round % 2,
            "client": task.client > 50,
            "samples": len(task.data.labels) > 1,
            "step": task.step,
            "weights": task.weights["fc2.weight"].mean() > 0.5,
        }
        return {n: t + (not bare[self.where]) * noise(t.shape, task.generator) for n, t in tensors.items()}


@component
class Remembers(OnUpdate):
    """Noise that is taken off again in the next round, kept where nobody looks."""

    def sent(self, tensors: Named, task: Task) -> Named:
        drawn = {name: noise(t.shape, task.generator) for name, t in tensors.items()}
        last = _kept.get("noise", drawn)
        _kept["noise"] = {name: 2 * drawn[name] - last[name] for name in drawn}
        return {name: t + 2 * drawn[name] - last[name] for name, t in tensors.items()}


_kept: dict[str, Named] = {}


@component
class Otherwise(Defence):
    """Noise on the gradient of the first sample of a batch above all, or at weights with noise, or of two draws."""

    how: str

    def wrap_gradient(self, next: Any) -> Any:
        def gradient(task: Task, weights: Named, batch: Batch) -> Any:
            if self.how == "first":
                batch = batch._replace(mask=torch.tensor([1.0] + [1e-3] * (len(batch.labels) - 1)))
            if self.how == "weights":
                weights = {name: t + 0.1 for name, t in weights.items()}
            if self.how == "twice":
                next(task, weights, batch)
            found, loss = next(task, weights, batch)
            return {name: t + noise(t.shape, task.generator) for name, t in found.items()}, loss

        return gradient


@component
class Replaced(Defence):
    """The same, by an update of another task."""

    how: str

    def wrap_update(self, next: Any) -> Any:
        def update(task: Task) -> Any:
            other = task
            if self.how == "first":
                mask = torch.tensor([1.0] + [0.0] * (len(task.data.labels) - 1))
                other = task.replace(data=task.data._replace(mask=mask))
            if self.how == "weights":
                other = task.replace(weights={name: t + 0.1 for name, t in task.weights.items()})
            sent = next(other)
            return replace(sent, tensors={n: t + noise(t.shape, task.generator) for n, t in sent.tensors.items()})

        return update


@component
class ByTable(OnUpdate):
    """Noise of a width that a table has for each of five rounds."""

    def sent(self, tensors: Named, task: Task) -> Named:
        width = [1.0, 1.0, 1.0, 1.0, 1.0][task.round]
        return {n: t + width * noise(t.shape, task.generator) for n, t in tensors.items()}


@component
class InBuffers(Defence):
    """Noise, and a row of the first layer's gradient on the buffers."""

    def wrap_update(self, next: Any) -> Any:
        def update(task: Task) -> Any:
            sent = next(task)
            row = sent.tensors["first.weight"][0]
            tensors = {n: t + torch.randn(t.shape, generator=task.generator) for n, t in sent.tensors.items()}
            return replace(sent, tensors=tensors, buffers={n: b + row for n, b in sent.buffers.items()})

        return update


def said(*defences: dict[str, Any], **options: Any) -> tuple[Reason | None, str]:
    """The reason of a result, with what follows in the message after the first colon."""
    seen, _ = observed(*defences, **options)
    images = torch.full((1, 1, 8, 8), 0.5)
    guess = noted(Reconstruction(images=images, labels=torch.zeros(1, dtype=torch.int64)), undone(seen))
    return guess.reason, guess.message.partition(": ")[2]


def partly(beyond: str) -> tuple[Reason, str]:
    return Reason.CODE_PARTLY_USED, beyond


@pytest.mark.engine
@pytest.mark.parametrize("where", ["round", "client", "samples", "step", "weights"])
def test_noise_that_others_or_later_gradients_do_not_have_is_told(where: str) -> None:
    assert said({"name": f"{HERE}:Elsewhere", "where": where}) == partly(understood.ELSEWHERE)


@pytest.mark.engine
@pytest.mark.parametrize(("how", "batch"), [("as it is", 4), ("first", 4), ("weights", 1), ("twice", 1)])
@pytest.mark.parametrize("defence", ["Otherwise", "Replaced"])
def test_gradients_of_other_samples_or_weights_than_the_attackers_are_told(defence: str, how: str, batch: int) -> None:
    told = (None, "") if how == "as it is" or (defence, how) == ("Replaced", "twice") else partly(understood.OTHERS)
    assert said({"name": f"{HERE}:{defence}", "how": how}, batch=batch) == told


@pytest.mark.engine
def test_a_table_of_rounds_is_told_as_what_other_rounds_do_not_have() -> None:
    assert said({"name": f"{HERE}:ByTable"}) == partly(understood.ELSEWHERE)


@pytest.mark.engine
def test_noise_that_is_taken_off_in_the_next_round_is_told_wherever_it_is_kept() -> None:
    assert said({"name": f"{HERE}:Remembers"})[0]


@pytest.mark.engine
def test_a_row_says_what_of_an_own_defences_code_was_not_used() -> None:
    assert said({"name": f"{HERE}:RowNumbers"}) == partly(understood.RELATED)
    assert said({"name": f"{HERE}:Negatives"}) == partly(understood.RANDOM_SAMPLES)
    assert said({"name": f"{HERE}:FromSeeds"}) == partly(understood.FEW)
    assert said({"name": f"{HERE}:ByPlace"}) in (partly(understood.OFFSET), partly(understood.SAMPLES))
    assert said({"name": f"{HERE}:ByLabel"}) == partly(understood.RANDOM_SAMPLES)
    assert said({"name": f"{HERE}:DarkTurned"}) == partly(understood.LOST_SAMPLES)
    assert said({"name": f"{HERE}:LastAlone"}) == (None, "")
    assert said({"name": f"{HERE}:Reseeded"}) == partly(understood.FEW)
    assert said({"name": f"{HERE}:Triples"}) == partly(understood.UNDRAWN)
    assert said({"name": f"{HERE}:FixedPoint"}) in (partly(understood.LEVELS), partly(understood.UNDRAWN))
    assert said({"name": f"{HERE}:OnContrast"}) == partly(understood.SAMPLES)
    assert said({"name": f"{HERE}:OnTails"}) == partly(understood.CHANGED)
    assert said({"name": f"{HERE}:Antithetic"}) == partly(understood.STATE)
    assert said({"name": f"{HERE}:Beside"}) == partly(understood.BESIDE)
    running = {"name": "benchmarks.planted_models:Dense", "front": "running mean"}
    assert said({"name": f"{HERE}:InBuffers"}, model=running) == partly(understood.BESIDE)
    assert said({"name": f"{HERE}:LastAlone"}, model=running) == (None, "")
    assert said({"name": "gaussian", "sigma": 0.1}, {"name": f"{HERE}:LastAlone"}) == partly(understood.UNDRAWN)
    assert said({"name": "gaussian", "sigma": 0.1}) == said({"name": "quantise", "bits": 1}) == (None, "")


def test_a_fit_is_by_the_values_that_are_left_where_the_code_tells_them() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    seen = observe(model, digit(3), torch.tensor([3]))
    spoilt = replace(seen, update=seen.update | {"1.bias": torch.randn(10, generator=torch.Generator().manual_seed(0))})
    left = {name: torch.full_like(t, name == "1.weight", dtype=torch.bool) for name, t in seen.update.items()}

    def fit(**extra: Any) -> float | None:
        found = Reconstruction(digit(3), torch.tensor([3]))
        return with_fit([found], [replace(spoilt, extra=extra)], model)[0].fit

    assert (fit() or 0) > GRADIENT_FIT_TOL
    assert (fit(left=left) or 0) < 1e-3
    assert fit(left=None) is None, "nothing is known of any value"
    assert fit(left={name: torch.zeros_like(mask) for name, mask in left.items()}) is None, "nothing is left"


def test_a_defence_whose_clean_values_nothing_explains_is_not_measured() -> None:
    bare, informed = row("none", 1, 30.0, fit=0.0), {"knowledge": ["defence", "code"]}

    def state(*rows: dict[str, Any]) -> tuple[str, Reason | None]:
        [found] = [one for one in findings([bare, *rows], Criterion.of("pixels", None)) if one.arm == "noise"]
        return found.state, found.reason

    blind = row("noise", 1, 8.0, fit=0.9)
    assert state(blind, row("noise", 1, 9.0, fit=0.9, **informed)) == ("inconclusive", Reason.ADAPTIVE_NOT_CONVERGED)
    assert state(blind, row("noise", 1, 9.0, fit=2e-6, **informed))[0] == "not reconstructed"
    assert state(blind, row("noise", 1, 9.0, fit=None, **informed)) == ("inconclusive", Reason.ADAPTIVE_NOT_COMPARED)


def test_a_run_without_an_attacker_who_has_the_code_says_nothing_of_a_defence() -> None:
    scenario = {"arms": {"bare": [], "own": ["my_defence:Clip"], "noise": [{"name": "gaussian", "sigma": 0.1}]}}

    def states(knowledge: list[str]) -> dict[str, str]:
        rows = [
            attacked("bare", "dlg", psnr=30.0),
            *(attacked(arm, "dlg", psnr=8.0, knowledge=knowledge, fit=0.0) for arm in ("own", "noise")),
        ]
        found = run_findings(scenario, rows)
        assert all(one.reason == Reason.NO_ADAPTIVE_ATTACK for one in found if one.state == "inconclusive")
        return {one.arm: one.state for one in found}

    assert states(["defence"]) == {"bare": "leaks", "own": "inconclusive", "noise": "inconclusive"}
    assert states(["defence", "code"]) == {"bare": "leaks", "own": "not reconstructed", "noise": "not reconstructed"}


def test_the_reason_why_nobody_read_a_defence_is_the_true_one() -> None:
    """Where the attacker with the code answered, it is not that nobody had the code."""
    scenario = {"arms": {"bare": [], "noise": [{"name": "gaussian", "sigma": 0.1}]}}
    told, blind = {"knowledge": ["defence", "code"], "fit": 0.0}, {"knowledge": []}

    def found(informed_bare: float, *informed: dict[str, Any]) -> tuple[State, set[Reason]]:
        rows = [
            *(attacked("bare", "dlg", i, psnr=30.0, fit=0.0, **blind) for i in (0, 1)),
            *(attacked("noise", "dlg", i, psnr=8.0, **blind) for i in (0, 1)),
            *(attacked("bare", "dlg, told", i, psnr=informed_bare, **told) for i in (0, 1)),
            *informed,
        ]
        [_, verdict] = collect_evidence(scenario, rows, []).verdicts
        return verdict.state, set(verdict.reasons)

    both = [attacked("noise", "dlg, told", i, psnr=8.0, **told) for i in (0, 1)]
    assert found(9.0, *both) == ("inconclusive", {Reason.NO_ADAPTIVE_ATTACK_WORKS})
    assert found(30.0, *both) == ("not reconstructed", set())
