"""What a reconstruction says beyond a guess: copies do, averages, constants, blurs and other samples do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayfed.metrics.guessing import Others, above_baseline, above_public, identified, nearest_of
from rayfed.samples import Column, Pixels, Records, SampleSpec, Tokens

TEXTS = Tokens(tuple(map(str, range(50))), 6)
ROWS = Records((Column("age", (), 0, 1, 0.3), Column("sex", ("f", "m")), Column("pain", (), 0, 1, 0.3)))
IMAGES = Pixels(1, 8, 8)


def drawn(sample: SampleSpec, count: int, seed: int) -> Tensor:
    inputs = sample.noise(count, torch.Generator().manual_seed(seed))
    if sample is ROWS:
        inputs[..., 1:3] = torch.eye(2)[inputs[..., 1].gt(0.5).long()]
    return inputs


def others_of(sample: SampleSpec, count: int = 60) -> Others:
    return Others(drawn(sample, count, 1))


@pytest.mark.parametrize("sample", [IMAGES, TEXTS, ROWS])
def test_a_copy_says_more_than_any_guess_and_is_told_apart(sample: SampleSpec) -> None:
    true, others = drawn(sample, 4, 2), others_of(sample)
    assert (above_baseline(sample, others)(true, true) > 0).all()
    assert (identified(sample, others)(true, true) == 1).all()


@pytest.mark.parametrize("sample", [IMAGES, TEXTS, ROWS])
def test_what_others_have_in_common_says_nothing(sample: SampleSpec) -> None:
    true, others = drawn(sample, 4, 2), others_of(sample)
    typical = others.inputs.mode(0).values if sample is TEXTS else others.inputs.mean(0)
    assert (above_baseline(sample, others)(true, typical.expand_as(true)) <= 0).all()


def test_no_constant_says_anything_of_an_image() -> None:
    true, others = drawn(IMAGES, 4, 2), others_of(IMAGES)
    gain = above_baseline(IMAGES, others)
    for level in torch.linspace(0, 1, 21):
        assert (gain(true, level.expand_as(true)) <= 1e-6).all()
    assert (gain(true, true.mean((2, 3), keepdim=True).expand_as(true)) <= 1e-6).all()


@pytest.mark.parametrize("sample", [IMAGES, TEXTS])
def test_another_sample_is_not_told_for_ones_own(sample: SampleSpec) -> None:
    true, others = drawn(sample, 4, 2), others_of(sample)
    told = identified(sample, others)
    assert (told(true, others.inputs[:4]) == 0).all()
    assert (told(true, true.roll(1, 0)) == 0).all(), "samples of one batch are others to each other"


def test_copies_of_the_true_sample_are_no_others() -> None:
    true = drawn(IMAGES, 2, 2)
    others = others_of(IMAGES)
    doubled = Others(torch.cat([others.inputs, true]))
    near = (true + 0.01).clamp(0, 1)
    assert (identified(IMAGES, doubled)(true, near) == 1).all()
    assert (identified(IMAGES, doubled)(true[:1].repeat(2, 1, 1, 1), near[:1].repeat(2, 1, 1, 1)) == 1).all()


def test_noise_is_hardly_ever_told_apart() -> None:
    true, others = drawn(IMAGES, 40, 2), others_of(IMAGES, 300)
    found = identified(IMAGES, others)(true, drawn(IMAGES, 40, 9))
    assert found.sum() <= 2


@pytest.mark.parametrize("sample", [IMAGES, TEXTS, ROWS])
def test_the_nearest_public_sample_is_a_guess(sample: SampleSpec) -> None:
    true, others = drawn(sample, 4, 2), others_of(sample)
    alike = true.clone()
    first = true[..., 0]
    alike[..., 0] = (first + 1) % 50 if sample is TEXTS else torch.where(first > 0.5, first - 0.01, first + 0.01)
    pool = torch.cat([drawn(sample, 30, 3), alike])
    found = nearest_of(true, pool, sample)
    assert torch.equal(found, alike)
    public = Others(others.inputs, pool)
    assert (above_public(sample, public)(true, alike) <= 0).all(), "no nearer than a sample that everybody has"
    assert (above_public(sample, public)(true, true) > 0).all()
    unlike = Others(others.inputs, others.inputs)
    assert (above_public(sample, unlike)(true, alike) > 0).all(), "and nearer than samples that are unlike"
    assert above_public(sample, others)(true, alike).isnan().all(), "nobody guesses at what no attacker holds"


def test_the_nearest_is_found_as_by_hand_and_never_a_copy() -> None:
    true, pool = drawn(IMAGES, 3, 2), drawn(IMAGES, 50, 3)
    apart = torch.cdist(true.flatten(1).double(), pool.flatten(1).double())
    assert torch.equal(nearest_of(true, pool, IMAGES), pool[apart.argmin(1)])
    assert torch.equal(nearest_of(true, torch.cat([pool, true]), IMAGES), pool[apart.argmin(1)])
    assert torch.equal(nearest_of(true, true[:1], IMAGES)[0], torch.zeros_like(true[0]))
