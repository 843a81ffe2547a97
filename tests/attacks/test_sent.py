"""What the zeros and magnitudes of an update show: attackers match what was sent, and keep a gradient's own zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.base import Attack
from rayfed.attacks.matching.distances import one_minus_cosine, squared_l2
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.relative import noise_share
from rayfed.attacks.matching.sent import Sent, bounds, sign_nats, signs_alone, vectors_entering, wrong_signs
from rayfed.gradients import norm, weights_of
from rayfed.models.convnet import ConvNet
from rayfed.models.lenet import LeNet
from rayfed.registry import build
from rayfed.update import Named, Observation
from tests.helpers.attack_fixtures import digit, leaky_lenet, observe, observed, photo, psnr, seeded, two_digits

DIGITS = torch.cat([digit(i) for i in range(4)])


def mlp(first: int = 64, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(first, 48), activation(), nn.Linear(48, 32), activation(), nn.Linear(32, 10)
    )


def drawn(kept: float, seed: int = 0) -> Callable[[Named], Named]:
    """A mask drawn at random, which keeps the mean: a defence that nobody has listed."""
    generator = seeded(seed)[0]
    return lambda g: {n: t * (torch.rand(t.shape, generator=generator) < kept) / kept for n, t in g.items()}


def largest(kept: float) -> Callable[[Named], Named]:
    return lambda g: {n: t * (t.abs() >= t.abs().flatten().quantile(1 - kept)) for n, t in g.items()}


def one_bit(gradient: Named) -> Named:
    return {n: t.sign() * t.abs().mean() for n, t in gradient.items()}


def defended(observation: Observation, defence: Callable[[Named], Named]) -> Observation:
    return replace(observation, update=defence(observation.update))


# a gradient's own zeros


def of(gradient: Named, samples: int = 1, model: nn.Module | None = None) -> Named | None:
    """The bounds of a gradient, beside weights that tell nothing where no model is given."""
    weights = weights_of(model) if model else {n: torch.ones_like(t) for n, t in gradient.items()}
    return bounds(gradient, weights, lambda: dict.fromkeys(gradient, samples))


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_zeros_of_units_that_are_off_are_a_gradients_own(samples: int) -> None:
    model = mlp()
    seen = observe(model, DIGITS[:samples], torch.arange(samples))
    assert any((t == 0).any() for t in seen.update.values())
    found = of(seen.gradient, samples, model)
    assert found is None or norm(found) < 0.05 * norm(seen.gradient)
    assert (found is None) >= (samples == 1)


class Rows(nn.Module):
    """A layer that sees every row of an image by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.out = nn.Linear(8, 32), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.row(x[:, 0]).relu().flatten(1))
        return logits


@pytest.mark.parametrize("samples", [1, 2])
def test_zeros_of_a_layer_that_sees_a_sample_at_several_places_are_its_own(samples: int) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = Rows()
        seen = observe(model, DIGITS[:samples], torch.arange(samples))
        assert vectors_entering(model, seen) == {"row.weight": 8 * samples, "out.weight": samples}
        sent = Sent.of([seen], list(seen.update), torch.float32, model)
        assert sent is None or not any(bound.isinf().any() for bound in sent.bounds.values())
        drawn_from = Sent.of([defended(seen, drawn(0.1))], list(seen.update), torch.float32, model)
        assert drawn_from is not None
        assert drawn_from.bounds["out.weight"].isinf().any()


def test_zeros_of_inputs_that_are_off_are_a_gradients_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    hot = nn.functional.one_hot(torch.tensor([5]), 64).float().reshape(1, 1, 8, 8)
    assert of(observe(model, hot, torch.tensor([1])).gradient) is None


def test_zeros_of_convolutions_are_a_gradients_own() -> None:
    torch.manual_seed(0)
    seen = observe(ConvNet(width=4).build((3, 32, 32), 10).eval(), photo(0, 0), torch.tensor([1]))
    assert (seen.update["fc.weight"] == 0).any()
    found = of(seen.gradient)
    assert found is None or not any(bound.isinf().any() for bound in found.values())


def test_biases_of_convolutions_that_are_off_are_a_gradients_own() -> None:
    zeros = 0
    for seed in range(5):
        torch.manual_seed(seed)
        seen = observe(LeNet().build((3, 32, 32), 10), photo(0, 0), torch.tensor([1]))
        zeros += sum(int((t == 0).sum()) for t in seen.update.values() if t.ndim == 1)
        assert of(seen.gradient) is None
        assert of(largest(0.5)(seen.gradient)) is not None
    assert zeros > 0


# zeros of a defence


def test_a_threshold_bounds_what_it_took() -> None:
    exact = observe(mlp(activation=nn.Sigmoid), digit(3), torch.tensor([3])).gradient
    found = of(largest(0.1)(exact))
    assert found is not None
    weight = "3.weight"
    taken = found[weight] > 0
    assert taken.float().mean() == pytest.approx(0.9, abs=0.01)
    assert found[weight].isfinite().all()
    assert (exact[weight].abs() <= found[weight])[taken].all()


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("kept", [0.5, 0.1])
def test_the_zeros_of_a_mask_drawn_at_random_say_nothing(samples: int, kept: float) -> None:
    for model in (mlp(), leaky_lenet((1, 8, 8))):
        seen = drawn(kept)(observe(model, DIGITS[:samples], torch.arange(samples)).gradient)
        found = of(seen, samples, model)
        assert found is not None
        assert all(found[name][tensor == 0].isinf().all() for name, tensor in seen.items())


def test_a_threshold_of_what_the_weights_make_of_values_bounds_them() -> None:
    model = mlp(activation=nn.Sigmoid)
    exact, weights = observe(model, digit(3), torch.tensor([3])).gradient, weights_of(model)
    scores = {n: (t * weights[n]).abs() for n, t in exact.items()}
    found = of({n: t * (scores[n] >= scores[n].flatten().quantile(0.9)) for n, t in exact.items()}, 1, model)
    assert found is not None
    for name in ("1.weight", "3.weight"):
        taken = found[name] > 0
        assert taken.float().mean() == pytest.approx(0.9, abs=0.01)
        assert (exact[name].abs() <= found[name] * 1.0001)[taken].all()
        assert found[name].isfinite().all()


def test_a_tensor_left_out_says_nothing() -> None:
    exact = observe(mlp(), digit(3), torch.tensor([3])).gradient
    for kept in ({"1.bias"}, set()):
        left = {n: t if "3." not in n or n in kept else torch.zeros_like(t) for n, t in exact.items()}
        found = of(left)
        assert found is not None
        assert found["3.weight"].isinf().all()


def test_rows_that_their_biases_deny_say_nothing() -> None:
    exact = observe(mlp(activation=nn.Sigmoid), digit(3), torch.tensor([3])).gradient
    rows = exact | {"3.weight": exact["3.weight"].clone()}
    rows["3.weight"][::2] = 0
    found = of(rows)
    assert found is not None
    assert found["3.weight"][::2].isinf().all()
    assert found["3.weight"][1::2].eq(0).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_zeros_of_a_quantiser_are_small_values(bits: int) -> None:
    defence = build("defences", "quantise", {"bits": bits})
    seen = observed(leaky_lenet((1, 8, 8)), digit(3), torch.tensor([3]), [defence])
    found = of(seen.gradient)
    assert found is not None
    assert not any(bound.isinf().any() for name, bound in found.items() if (seen.update[name] != 0).any())


# matching


@pytest.mark.parametrize("distance", [squared_l2, one_minus_cosine])
@pytest.mark.parametrize("defence", [largest(0.1), drawn(0.1), one_bit], ids=["largest", "drawn", "one_bit"])
def test_the_truth_costs_nothing_behind_what_was_sent(distance: object, defence: Callable[[Named], Named]) -> None:
    model, (first, _) = two_digits()
    problem = Matching.of([defended(first, defence)], model, None, distance, dtype=torch.float64)  # type: ignore[arg-type]
    truth, other = digit(3).reshape(1, -1).double(), digit(5).reshape(1, -1).double()
    assert problem.values(truth, torch.tensor([0])) < 1e-8 < 1e-3 * problem.values(other, torch.tensor([0]))


def test_what_one_victim_sent_changes_nothing_for_another() -> None:
    model, (first, second) = two_digits()
    point, owner = torch.rand(1, 64, generator=seeded(1)[0]), torch.tensor([0])
    alone = Matching.of([first], model, None, squared_l2).values(point, owner)
    for defence in (largest(0.1), drawn(0.1), one_bit):
        beside = Matching.of([first, defended(second, defence)], model, None, squared_l2)
        torch.testing.assert_close(beside.values(point, owner), alone, rtol=1e-5, atol=0)


def test_a_mask_that_is_granted_holds_beside_what_is_seen() -> None:
    model, (first, _) = two_digits()
    masks = {n: torch.ones_like(t, dtype=torch.bool) for n, t in first.update.items()}
    masks["fc.bias"] = torch.zeros_like(masks["fc.bias"])
    seen = defended(first, largest(0.1))
    sent = Sent.of([replace(seen, extra={"defence": masks})], list(masks), torch.float64, model)
    assert sent is not None
    spoilt = seen.update["fc.bias"] != 0
    assert sent.bounds["fc.bias"][0][spoilt].isinf().all()
    assert sent.bounds["fc.weight"][0][seen.update["fc.weight"] != 0].eq(0).all()


def test_signs_are_told_from_magnitudes() -> None:
    exact = two_digits()[1][0].gradient
    assert signs_alone(one_bit(exact))
    assert not signs_alone(exact)
    assert not signs_alone(largest(0.1)(one_bit(drawn(0.1)(exact))))
    assert not signs_alone({n: torch.zeros_like(t) for n, t in exact.items()})


def test_wrong_signs_against_a_loop() -> None:
    generator = seeded(0)[0]
    own, told = (
        {"a": torch.randn(2, 3, 4, generator=generator), "b": torch.randn(2, 5, generator=generator)} for _ in "ab"
    )

    def share(row: int, name: str) -> float:
        g, t = (tensors[name][row].flatten().tolist() for tensors in (own, told))
        wrong: float = sum(x * x for x, y in zip(g, t, strict=True) if x * y <= 0)
        return wrong / float(sum(x * x for x in g))

    expected = [(12 * share(row, "a") + 5 * share(row, "b")) / 17 for row in (0, 1)]
    torch.testing.assert_close(wrong_signs(own, told), torch.tensor(expected))


def test_nats_of_wrong_signs_against_a_loop() -> None:
    own, told = ({"a": torch.randn(2, 3, 4, generator=g), "b": torch.randn(2, 5, generator=g)} for g in seeded(0, 1))
    told["a"][:, 0] = 0
    for row, nats in enumerate(sign_nats(own, told)):
        pairs = [(x, y) for n in own for x, y in zip(own[n][row].flatten(), told[n][row].flatten(), strict=True) if y]
        share = min(sum(float(x * y <= 0) for x, y in pairs) / len(pairs), 0.5)
        assert float(nats) == pytest.approx(-len(pairs) * (share * log(share) + (1 - share) * log(1 - share)))


def test_updates_of_signs_are_matched_by_signs_and_as_they_are() -> None:
    model, (first, _) = two_digits()
    attack = InvertingGradients()
    assert len(attack._matching([first], model, seeded(0)).ways) == 1
    problem = attack._matching([defended(first, one_bit)], model, seeded(0))
    assert len(problem.ways) == 2
    truth, noise_, owner = digit(3).reshape(1, -1), torch.rand(1, 64, generator=seeded(1)[0]), torch.tensor([0])
    assert problem.judged(truth, owner) < problem.judged(noise_, owner)


# reconstruction by who knows no defence


@pytest.mark.engine
@pytest.mark.parametrize(
    ("defence", "attack", "decibel"),
    [
        (largest(0.1), Dlg(restarts=1, iterations=30), 40),
        (drawn(0.1), Dlg(restarts=1, iterations=30), 40),
        (largest(0.1), InvertingGradients(iterations=200), 20),
        (one_bit, InvertingGradients(iterations=200), 15),
    ],
)
def test_what_is_visible_needs_no_grant(defence: Callable[[Named], Named], attack: Attack, decibel: float) -> None:
    model, (first, _) = two_digits()
    [found] = attack.reconstruct([defended(first, defence)], model, seeded(0))
    assert psnr(found.images, digit(3)) > decibel


def noise(gradient: Named) -> Named:
    generator = seeded(5)[0]
    return {n: t + 0.01 * torch.randn(t.shape, generator=generator) for n, t in gradient.items()}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("deviation", [0.0, 1e-3, 1e-2])
def test_noise_is_estimated_by_what_a_layer_has_beyond_its_rank(samples: int, deviation: float) -> None:
    exact = observe(leaky_lenet((1, 8, 8)), DIGITS[:samples], torch.arange(samples)).gradient
    drawn_noise = {n: deviation * torch.randn(t.shape, generator=seeded(4)[0]) for n, t in exact.items()}
    noisy = {n: t + drawn_noise[n] for n, t in exact.items()}
    share = float(norm(drawn_noise) ** 2 / norm(noisy) ** 2)
    assert noise_share(noisy, samples) == pytest.approx(share, rel=0.2, abs=1e-6)


def test_noise_that_no_layer_tells_is_none() -> None:
    exact = observe(leaky_lenet((1, 8, 8)), digit(3), torch.tensor([3])).gradient
    assert noise_share(exact, 10) == 0
    assert noise_share({n: t * torch.nan for n, t in exact.items()}, 1) == 0
    assert noise_share({n: torch.randn(t.shape, generator=seeded(1)[0]) for n, t in exact.items()}, 1) > 0.8


@pytest.mark.parametrize("distance", [squared_l2, one_minus_cosine])
def test_slopes_against_finite_differences(distance: object) -> None:
    model, (first, second) = two_digits()
    seen = [defended(first, largest(0.2)), defended(second, one_bit)]
    problem = Matching.of(seen, model, None, distance, dtype=torch.float64)  # type: ignore[arg-type]
    points = torch.rand(2, 64, dtype=torch.float64, generator=seeded(2)[0])
    owners = torch.arange(2)
    direction = torch.randn(2, 64, dtype=torch.float64, generator=seeded(3)[0])
    _, slopes = problem.value_and_gradient(points, owners)
    step = 1e-6
    up, down = (problem.values(points + sign * step * direction, owners) for sign in (1, -1))
    torch.testing.assert_close((slopes * direction).sum(1), (up - down) / (2 * step), rtol=1e-4, atol=1e-9)


def _cat() -> Tensor:
    return nn.functional.avg_pool2d(photo(60, 120), 2)


@pytest.mark.engine
@pytest.mark.parametrize("defence", [lambda g: g, noise], ids=["none", "noise"])
def test_the_chosen_weight_of_the_variation_beats_one_that_is_given(defence: Callable[[Named], Named]) -> None:
    model = leaky_lenet((3, 16, 16))
    seen = [defended(observe(model, _cat(), torch.tensor([3])), defence)]
    chosen, given = (
        psnr(
            InvertingGradients(iterations=200, tv=tv, signed=True).reconstruct(seen, model, seeded(0))[0].images, _cat()
        )
        for tv in (None, 1e-3)
    )
    assert chosen > given + 1


@pytest.mark.engine
@pytest.mark.parametrize("make", [lambda: leaky_lenet((1, 8, 8)), mlp], ids=["lenet", "mlp"])
def test_drawings_with_sharp_edges_are_not_smoothed_away(make: Callable[[], nn.Module]) -> None:
    model = make()
    seen = [observe(model, DIGITS[:1], torch.tensor([3]))]
    found = InvertingGradients(iterations=300).reconstruct(seen, model, seeded(0))[0]
    assert psnr(found.images, DIGITS[:1]) > 35


def test_the_chosen_weight_vanishes_at_the_truth() -> None:
    model, observations = two_digits()
    problem = InvertingGradients()._matching(observations, model, seeded(0, 1))
    truth = torch.stack([digit(3).flatten(), digit(5).flatten()])
    assert (problem.values(truth, torch.arange(2)) < 1e-4).all()


def test_many_vectors_that_enter_a_matrix_say_nothing_of_its_zeros() -> None:
    """As of a transformer on a batch, where 2 to their number is beyond a float."""
    gradient = {"weight": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
    gradient["weight"][0, :3] = gradient["weight"][1, 2:] = 0
    assert bounds(gradient, gradient, lambda: {"weight": 5000}) is not None
