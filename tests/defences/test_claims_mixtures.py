"""What is promised of mixtures of images: no image counts twice, and none weighs more than it may."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from rayfed import scenario as scenarios
from rayfed.defences.base import Batch, Task
from rayfed.defences.instahide import InstaHide
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, weights_of
from rayfed.registry import component
from rayfed.simulation.client.local import data_method
from rayfed.simulation.inputs import prepare_inputs


@component
class Sized:
    """The partition that gives client i the next `sizes[i]` samples."""

    sizes: list[int]

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """See `Partition.split`."""
        return np.split(np.arange(sum(self.sizes)), np.cumsum(self.sizes)[:-1])


quick = settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])


def client(samples: int, public: int = 0, asked: int | None = None, seed: int = 0) -> Task:
    """A client asked for some of its samples, all of another class.

    Each image, public or own, is grey but for one pixel of its own, which is white: `weights_in` reads how much of it
    is in a mixture, however its pixels flip about the grey.
    """
    images = torch.full((samples + public, 1, 1, samples + public), 0.5, dtype=torch.float64)
    images[:, 0, 0].fill_diagonal_(1.0)
    own = Batch(images[:samples], torch.arange(samples))
    rows = torch.arange(samples) < (samples if asked is None else asked)
    model = torch.nn.Linear(samples + public, samples)
    return Task(
        client=0,
        round=0,
        model=model,
        weights=weights_of(model),
        buffers=buffers_of(model),
        data=own.rows(rows),
        generator=torch.Generator().manual_seed(seed),
        order=0,
        classes=samples,
        public=Batch(images[samples:], torch.zeros(public, dtype=torch.int64)) if public else None,
        others=None if rows.all() else own.rows(~rows),
    )


def weights_in(mixtures: Tensor) -> Tensor:
    """(N, samples + public), how much each image weighs in each mixture in all."""
    return (mixtures - 0.5).abs().flatten(1) * 2


@quick
@given(data=st.data())
def test_the_images_of_a_mixture_are_distinct_and_none_weighs_more_than_it_may(data: st.DataObject) -> None:
    public = data.draw(st.booleans())
    images = data.draw(st.integers(3 if public else 2, 6))
    private = 2 if public else images
    samples = data.draw(st.integers(private, 12))
    shared = data.draw(st.integers(images - private, 8)) if public else 0
    largest = data.draw(st.floats(1 / images + 1e-9, 1))
    task = client(samples, shared, data.draw(st.integers(1, samples)), data.draw(st.integers(0, 2**31)))
    found = data_method([InstaHide(images=images, public=public, largest=largest)])(task)
    weights = weights_in(found.inputs)
    own = weights[:, :samples]
    assert ((weights > 1e-12).sum(1) == images).all()
    assert ((own > 1e-12).sum(1) == private).all()
    assert (own.diagonal() > 1e-12).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights), dtype=torch.float64))
    assert weights.max() <= largest + 1e-12  # half a unit in the last place of a sum
    assert own.sum(1).min() >= 0.3 - 1e-12
    torch.testing.assert_close(found.labels.double(), own / own.sum(1, keepdim=True), atol=1e-6, rtol=0)


@pytest.mark.parametrize("public", [False, True])
def test_every_choice_of_partners_is_as_likely(public: bool) -> None:
    counts = torch.zeros(6)
    for seed in range(400):
        found = data_method([InstaHide(images=3, public=public)])(client(4, 2, asked=1, seed=seed))
        counts += weights_in(found.inputs)[0] > 1e-12
    expected = [400, 133, 133, 133, 200, 200] if public else [400, 267, 267, 267, 0, 0]
    assert counts.tolist() == pytest.approx(expected, abs=40)  # over four standard deviations


@pytest.mark.parametrize(
    ("samples", "public", "defence"),
    [(3, 0, InstaHide()), (1, 5, InstaHide(public=True)), (5, 1, InstaHide(public=True))],
)
def test_too_few_images_are_refused(samples: int, public: int, defence: InstaHide) -> None:
    with pytest.raises(UserError, match="different"):
        data_method([defence])(client(samples, public))


@pytest.mark.parametrize(("images", "largest"), [(7, 0.149), (8, 0.15), (20, 0.1)])
def test_bounds_that_no_mixture_keeps_are_refused(images: int, largest: float) -> None:
    with pytest.raises(ValidationError, match="largest"):
        InstaHide(images=images, public=True, largest=largest)
    InstaHide(images=images, largest=largest)


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ("images: 4", [5, 3, 9], r"arm '.*': instahide needs 4 samples per client, but client 1 has 3"),
        ("images: 4, public: true", [5, 1, 9], r"instahide needs 2 samples per client, but client 1 has 1"),
        ("images: 200, public: true", [200, 200, 200], r"instahide needs 198 public samples, but the data has 144"),
    ],
)
def test_a_client_with_too_few_samples_is_named_before_the_run(options: str, sizes: list[int], message: str) -> None:
    scenario = scenarios.parse(f"""
name: t
data: {{name: digits, size: 8, public: 0.1}}
federation: {{rounds: 1, clients: 3}}
partition: {{name: tests.defences.test_claims_mixtures:Sized, sizes: {sizes}}}
defences: [{{name: instahide, {options}}}]
""")
    with pytest.raises(UserError, match=message):
        prepare_inputs(scenario)
