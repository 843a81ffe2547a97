"""Published searches of `inverting_gradients` against a plain loop over the formulas of their authors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from rayfed.attacks.adaptive.two_images import TwoImages
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.published import published_rates
from rayfed.models.build import build_model
from tests.helpers.attack_fixtures import digit, observed

MEAN, STD = 0.3, 0.4
ITERATIONS = 24


@pytest.mark.parametrize(("published", "signed", "boxed"), [("geiping", True, True), ("dcs2", False, False)])
@pytest.mark.parametrize("pruned", [False, True])
def test_a_published_search_is_the_loop_of_its_authors(published: str, signed: bool, boxed: bool, pruned: bool) -> None:
    model = build_model("lenet", {"init": "uniform"}, (1, 8, 8), 10, seed=0, normalise=([MEAN], [STD]))
    seen = observed(model, digit(3), torch.tensor([3]))
    if pruned:  # values that a defence removed are matched, too
        seen = replace(seen, update={name: t * (t.abs() > t.abs().median()) for name, t in seen.update.items()})
    generator = torch.Generator().manual_seed(1)
    attack = InvertingGradients(iterations=ITERATIONS, published=published)  # type: ignore[arg-type]
    found = attack.reconstruct([replace(seen, labels=torch.tensor([3]))], model, [generator])[0].images

    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).view(1, 1, 8, 8).requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.1)
    milestones = [ITERATIONS // 2.667, ITERATIONS // 1.6, ITERATIONS // 1.142]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones, gamma=0.1)  # type: ignore[arg-type]
    target = torch.cat([seen.update[name].flatten() for name, _ in model.named_parameters()])
    for _ in range(ITERATIONS):
        loss = F.cross_entropy(model(x * STD + MEAN), torch.tensor([3]))
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        cosine = F.cosine_similarity(torch.cat([slope.flatten() for slope in slopes]), target, dim=0)
        variation = x.diff(dim=3).abs().mean() + x.diff(dim=2).abs().mean()
        (x.grad,) = torch.autograd.grad(1 - cosine + 1e-4 * variation, x)
        if signed:
            x.grad.sign_()
        optimiser.step()
        schedule.step()
        if boxed:
            x.data.clamp_(-MEAN / STD, (1 - MEAN) / STD)
    torch.testing.assert_close(found, x.detach() * STD + MEAN, rtol=0, atol=2e-3)
    assert bool(((found < 0) | (found > 1)).any()) != boxed


def test_the_step_size_falls_at_three_eighths_five_eighths_and_seven_eighths() -> None:
    assert published_rates(0.1, 800)[299] == pytest.approx(0.01)
    assert [published_rates(0.1, 8)[step] for step in (0, 3, 5, 7)] == pytest.approx([0.1, 0.01, 0.001, 0.0001])


@pytest.mark.parametrize(
    ("attack", "options"),
    [
        (InvertingGradients, {"published": "zhu"}),
        (InvertingGradients, {"published": "dcs2", "noise": 0.1}),
        (InvertingGradients, {"published": "geiping", "precision": "bfloat16"}),
        (TwoImages, {"published": "dcs2"}),
    ],
)
def test_options_without_effect_are_refused(attack: type, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="published"):
        attack(**options)
