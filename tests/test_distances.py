"""Distances of gradients against their formulas in double precision."""

import pytest
import torch

from rayfed.attacks.matching.distances import one_minus_cosine


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
