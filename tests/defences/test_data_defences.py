"""Defences that change what clients train on: mixtures, and noise that fades over the local steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from rayfed import scenario as scenarios
from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.instahide import InstaHide
from rayfed.defences.mixup import Mixup
from rayfed.defences.outpost import Outpost
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.scenario import AttackSpec, Training
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.local import data_method, gradient_method, update_method
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.inputs import prepare_inputs
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Update
from tests.helpers.attack_fixtures import digit

CPU = torch.device("cpu")


def task(samples: int = 40, seed: int = 0, public: Tensor | None = None, pixels: Tensor | None = None) -> Task:
    """A client whose images are basis vectors: a mixture shows its coefficients."""
    pixels = torch.eye(samples).reshape(samples, 1, 1, samples) if pixels is None else pixels
    model = build_model("mlp", {"hidden": [8]}, (1, *pixels.shape[2:]), 10, seed=0)
    batch = Batch(pixels, torch.arange(samples) % 10)
    others = None if public is None else Batch(public, torch.zeros(len(public), dtype=torch.int64))
    generator = torch.Generator().manual_seed(seed)
    return Task(0, 0, model, weights_of(model), buffers_of(model), batch, generator, order=0, classes=10, public=others)


def mixed(defence: Defence, asked: Task) -> Batch:
    return data_method([defence])(asked)


@pytest.mark.parametrize(("alpha", "images"), [(1.0, 2), (0.2, 2), (1.0, 4)])
def test_mixtures_and_their_labels_have_the_coefficients_that_were_asked_for(alpha: float, images: int) -> None:
    asked = task(samples=2000)
    found = mixed(Mixup(alpha=alpha, images=images), asked)
    coefficients = found.inputs.reshape(2000, 2000)
    torch.testing.assert_close(coefficients.sum(1), torch.ones(2000))
    assert int((coefficients > 0).sum(1).max()) == images
    torch.testing.assert_close(found.labels, coefficients @ nn.functional.one_hot(asked.data.labels, 10).float())
    own = coefficients.diagonal()
    variance = (images - 1) / (images**2 * (images * alpha + 1))  # of one Dirichlet coefficient
    assert own.mean().item() == pytest.approx(1 / images, abs=0.02)
    assert own.var().item() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("defence", [Mixup(), InstaHide(), InstaHide(images=2)])
def test_a_mixture_is_new_in_every_round_and_the_same_when_repeated(defence: Defence) -> None:
    first, again, other = (mixed(defence, task(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.inputs, other.inputs)


def test_a_client_mixes_in_its_other_samples_where_one_of_them_is_asked_for() -> None:
    whole = task(samples=40)
    one = whole.replace(
        data=Batch(whole.data.inputs[:1], whole.data.labels[:1]),
        others=Batch(whole.data.inputs[1:], whole.data.labels[1:]),
    )
    found = mixed(Mixup(), one)
    assert found.inputs.shape == (1, 1, 1, 40)
    assert int((found.inputs > 0).sum()) == 2
    alone = mixed(Mixup(), one.replace(others=None))
    torch.testing.assert_close(alone.inputs, one.data.inputs)


def test_pixels_flip_half_of_the_time_about_the_middle_grey() -> None:
    grey = torch.full((2, 1, 50, 50), 0.2)
    found = mixed(InstaHide(images=2), task(samples=2, pixels=grey))
    flipped = torch.isclose(found.inputs, torch.tensor(0.8))
    assert (flipped | torch.isclose(found.inputs, torch.tensor(0.2))).all()
    assert flipped.float().mean().item() == pytest.approx(0.5, abs=0.03)
    model, signs = nn.Linear(2500, 3), torch.where(flipped, -1.0, 1.0)
    seen = model(((found.inputs - 0.5) / 0.5).flatten(1))  # what a model with `normalise` of 0.5 and 0.5 sees
    torch.testing.assert_close(seen, model((signs * (grey - 0.5) / 0.5).flatten(1)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("images", [2, 4])
def test_no_image_of_instahide_outweighs_the_others(images: int) -> None:
    coefficients = InstaHide(images=images, largest=0.6)._coefficients(300, np.random.default_rng(0))
    assert coefficients.max() <= 0.6
    np.testing.assert_allclose(coefficients.sum(1), 1)


def test_public_images_are_mixed_in_and_lend_no_label() -> None:
    asked = task(samples=200, public=torch.ones(7, 1, 1, 200))
    coefficients = InstaHide(public=True)._coefficients(500, np.random.default_rng(0))
    assert coefficients[:, :2].sum(1).min() >= 0.3
    found = mixed(InstaHide(public=True), asked)
    torch.testing.assert_close(found.labels.sum(1), torch.ones(200))
    assert int((found.labels > 0).sum(1).max()) == 2
    unflipped = torch.minimum(found.inputs, 1 - found.inputs).reshape(200, 200)
    public = unflipped.median(1).values  # the public, white, images alone lie under most pixels
    assert 0 <= public.min() < public.max() <= 0.5
    assert int(((unflipped - public[:, None]).abs() > 1e-5).sum(1).max()) == 2


def test_public_images_are_asked_for_where_there_are_none() -> None:
    with pytest.raises(UserError, match=r"data\.public"):
        mixed(InstaHide(public=True), task())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mixup(alpha=0),
        lambda: Mixup(images=1),
        lambda: InstaHide(images=2, public=True),
        lambda: InstaHide(images=2, largest=0.5),
        lambda: Outpost(pruned=1),
        lambda: Outpost(noised=0),
    ],
)
def test_parameters_are_checked_wherever_a_defence_is_built(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValidationError):
        make()


@pytest.mark.parametrize("defence", [Mixup(), InstaHide()])
def test_a_vmapped_cohort_trains_on_the_same_mixtures(defence: Defence) -> None:
    digits = torch.cat([digit(i) for i in range(21)])
    sent = {}
    for how in ("loop", "vmap"):
        tasks = [task(n, seed=n, pixels=digits[:n]).replace(client=n) for n in (21, 9)]
        tasks = [t.replace(model=tasks[0].model) for t in tasks]
        sent[how] = list(cohort_updates(tasks, Training(vectorise=how, batch_size=8), [defence]))  # type: ignore[arg-type]
    for a, b in zip(sent["loop"], sent["vmap"], strict=True):
        assert a.samples == b.samples
        for name in a.tensors:
            torch.testing.assert_close(a.tensors[name], b.tensors[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mixup", "instahide"])
def test_the_truth_behind_a_mixture_is_the_clients_own_image(name: str) -> None:
    s = scenarios.parse(f"""
name: t
data: {{name: digits, size: 8}}
federation: {{rounds: 1, clients: 4}}
arms: {{none: [], mixed: [{name}]}}
""")
    inputs = prepare_inputs(s)
    runtime = ClientRuntime(s, inputs.data, inputs.parts, CPU)
    model = runtime.arm("none").model
    sent = Sent(0, weights_of(model), buffers_of(model))
    attack = AttackSpec(name="dlg", observes="gradient", batch_size=2, knowledge=["labels"])
    _, plain = ObservationBuilder(runtime).observe(ClientVisit("none", sent, 1), attack)
    seen, truth = ObservationBuilder(runtime).observe(ClientVisit("mixed", sent, 1), attack)
    assert torch.equal(truth.inputs, plain.inputs)
    assert torch.equal(truth.labels, plain.labels)
    assert truth.labels.dtype == torch.int64
    assert seen.labels is not None
    assert torch.equal(seen.labels, truth.labels.sort().values)
    assert truth.distortion > 0.1
    assert runtime.task("mixed", sent, 1, runtime.parts[1], {}).others is None


def noise_of(defence: Outpost, step: int, seeds: range) -> list[bool]:
    """Whether that local step is perturbed, for many generators."""
    plain = task(4)
    clean, _ = gradient(plain.model, plain.weights, plain.buffers, *plain.data[:3])
    found = []
    for seed in seeds:
        asked = plain.replace(generator=torch.Generator().manual_seed(seed), step=step)
        sent, _ = gradient_method([defence])(asked, asked.weights, asked.data)
        found.append(any(not torch.equal(sent[name], g) for name, g in clean.items()))
    return found


def test_perturbation_becomes_rare_over_the_local_steps() -> None:
    assert all(noise_of(Outpost(), 0, range(20)))
    share = np.mean(noise_of(Outpost(beta=0.5), 6, range(400)))
    assert share == pytest.approx(0.25, abs=0.07)


def test_small_values_go_and_large_ones_get_noise_by_the_variance_of_the_weights() -> None:
    asked = task(4)
    clean = {"a": torch.linspace(-1, 1, 10_000), "b": torch.full((5,), 1e-6)}
    weights = {"a": torch.randn(10_000, generator=torch.Generator().manual_seed(0)) / 2, "b": torch.zeros(5)}
    method = Outpost(noise=0.8, noised=0.4, pruned=0.8).wrap_gradient(lambda *_: (clean, torch.tensor(0.0)))
    sent, _ = method(asked, weights, asked.data)
    noise = sent["a"] - clean["a"]
    assert noise[clean["a"].abs() > 0.801].std().item() == pytest.approx(0.8 * 0.25, rel=0.1)
    untouched = clean["a"].abs() < 0.599
    assert not sent["a"][untouched].any()
    between = ~untouched & (clean["a"].abs() < 0.799)  # pruned, then given noise
    assert sent["a"][between].std().item() == pytest.approx(0.8 * 0.25, rel=0.1)
    exposed = Outpost().exposed(Update(0, 0, sent, {}, 1, 0.0))
    assert torch.equal(exposed["a"], sent["a"] != 0)
    assert torch.equal(sent["b"], clean["b"])  # equal values are none the smallest, and these are small


def test_in_the_mean_of_many_answers_what_was_pruned_before_its_noise_is_told_from_what_was_kept() -> None:
    asked, clean = task(4), {"a": torch.linspace(-1, 1, 10_000)}
    weights = {"a": torch.randn(10_000, generator=torch.Generator().manual_seed(0)) / 2}
    method = Outpost(noise=0.8, noised=0.4, pruned=0.8).wrap_gradient(lambda *_: (clean, torch.tensor(0.0)))
    answers = torch.stack([method(asked, weights, asked.data)[0]["a"] for _ in range(50)])
    mean, error = {"a": answers.mean(0)}, {"a": answers.std(0) / 50**0.5}
    mask = Outpost().exposed_in_mean(Update(0, 0, mean, {}, 1, 0.0), error)["a"]
    kept = clean["a"].abs() > 0.801
    assert mask[kept].all()
    assert mask[~kept].float().mean() < 0.005
    assert (Outpost().exposed(Update(0, 0, mean, {}, 1, 0.0))["a"] & ~kept).float().mean() > 0.15


def test_local_steps_are_counted() -> None:
    seen: list[int] = []

    class Counting(Defence):
        def wrap_gradient(self, next):  # type: ignore[no-untyped-def]
            def counted(task: Task, weights, batch):  # type: ignore[no-untyped-def]
                seen.append(task.step)
                return next(task, weights, batch)

            return counted

    update_method(Training(batch_size=8, epochs=2), [Counting()])(task(21))
    assert seen == [0, 1, 2, 3, 4, 5]
