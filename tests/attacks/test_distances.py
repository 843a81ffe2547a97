"""Distances of gradients against their formulas in double precision."""

from collections.abc import Callable

import pytest
import torch

from rayfed.attacks.matching.distances import inner, one_minus_cosine
from rayfed.attacks.matching.gradvit import relative_distance
from rayfed.attacks.matching.grnn import wasserstein
from rayfed.attacks.matching.sent import Sent, sign_nats, wrong_signs


def drawn(apart: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return three pairs of vectors in two tensors; each is `apart` of its length from the other, and twice as long."""
    generator = torch.Generator().manual_seed(0)
    targets = {name: torch.randn(3, *shape, generator=generator) for name, shape in {"a": (40, 30), "b": (50,)}.items()}
    gradients = {name: 2 * (t + apart * torch.randn(t.shape, generator=generator)) for name, t in targets.items()}
    return gradients, targets


def formula(gradients: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    left, right = (torch.cat([t.double().flatten(1) for t in side.values()], 1) for side in (gradients, targets))
    return 1 - torch.cosine_similarity(left, right, 1)


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4])
def test_cosine_keeps_its_digits_however_near_the_gradients_are(apart: float) -> None:
    gradients, targets = drawn(apart)
    exact = formula(gradients, targets)
    assert torch.allclose(one_minus_cosine(gradients, targets).double(), exact, rtol=1e-2 if apart < 1e-3 else 1e-4)


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4])
def test_slope_of_the_cosine_is_that_of_its_formula(apart: float) -> None:
    gradients, targets = drawn(apart)
    weights = torch.tensor([1.0, 2.0, -3.0])
    slopes = []
    for measure in (one_minus_cosine, formula):
        leaves = {name: g.detach().requires_grad_() for name, g in gradients.items()}
        (measure(leaves, targets) * weights).sum().backward()
        slopes.append(torch.cat([leaf.grad.double().flatten() for leaf in leaves.values() if leaf.grad is not None]))
    assert torch.allclose(*slopes, rtol=0, atol=float(slopes[1].abs().max()) * (1e-2 if apart < 1e-3 else 1e-4))


def test_cosine_with_nothing_is_no_number() -> None:
    gradients, targets = drawn(1.0)
    assert one_minus_cosine({n: 0 * g for n, g in gradients.items()}, targets).isnan().all()
    assert one_minus_cosine(gradients, {n: 0 * t for n, t in targets.items()}).isnan().all()


DISTANCES = one_minus_cosine, inner, relative_distance, wasserstein, wrong_signs, sign_nats


@pytest.mark.parametrize("measure", DISTANCES, ids=lambda one: one.__name__)
def test_a_parameter_without_dimensions_counts_as_one_of_one_value(measure: Callable[..., torch.Tensor]) -> None:
    """A trained temperature, say."""
    scalars = [{**tensors, "scale": tensors["b"][:, 0]} for tensors in drawn(1.0)]
    vectors = [{**tensors, "scale": tensors["b"][:, :1]} for tensors in drawn(1.0)]
    assert torch.equal(measure(*scalars), measure(*vectors))


def test_zeros_are_read_off_updates_with_a_parameter_without_dimensions() -> None:
    gradients, targets = drawn(1.0)
    open_ = Sent({"b": torch.zeros(3, 50), "scale": torch.ones(3)}, torch.ones(3, dtype=torch.bool), None)
    both = ({"b": tensors["b"], "scale": tensors["b"][:, 0]} for tensors in (gradients, targets))
    assert open_.like(*both, torch.arange(3))["scale"].shape == (3,)
