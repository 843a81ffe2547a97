"""What an attacker takes off an update who has the code of its defences, and what stays."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from benchmarks.planted_defences import ClippedEach, KnownNoise, OnUpdate, drawn_like, mirrored, repainted
from benchmarks.planted_models import Dense
from rayfed import scenario
from rayfed.attacks.base import Attack, not_applicable
from rayfed.attacks.idlg import Idlg
from rayfed.attacks.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.problem import _through
from rayfed.attacks.undone import noted, undone
from rayfed.client.grants.code import Undo
from rayfed.client.grants.noise import LowRank, SharedNoise
from rayfed.client.sent import Sent
from rayfed.client.visit import ObservationRequest
from rayfed.defences.base import Defence, Task
from rayfed.engine.inputs import Inputs, prepare
from rayfed.engine.worker import ClientWorker
from rayfed.gradients import flatten, unflatten
from rayfed.reasons import Reason
from rayfed.registry import component
from rayfed.update import Named, Update
from tests.attack_fixtures import psnr

MISTAKES = "benchmarks.planted_defences"


def prepared(
    *defences: dict[str, Any],
    knowledge: tuple[str, ...] = ("code",),
    hidden: tuple[int, ...] = (16,),
    model: dict[str, Any] | None = None,
    batch: int = 1,
) -> Inputs:
    document = {
        "name": "t",
        "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20, "public": 0.1},
        "model": model or {"name": "mlp", "hidden": list(hidden)},
        "federation": {"rounds": 1, "clients": 4},
        "arms": {"bare": [], "defended": list(defences)},
        "attacks": [{"name": "analytic", "observes": "gradient", "batch_size": batch, "knowledge": list(knowledge)}],
    }
    return prepare(scenario.parse(yaml.safe_dump(document)))


def observed(*defences: dict[str, Any], **options: Any) -> Any:
    """An observation of client 1, and the update as it would be without defences."""
    inputs = prepared(*defences, **options)
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    seen = []
    for account in inputs.accounts:
        sent = Sent(0, account.arm.weights, account.arm.buffers)
        seen += worker.observe(sent, ObservationRequest(account.name, [1], inputs.scenario.attacks[0]))[1]
    return seen[1], flatten(seen[0].update)


@component
class OrderNoise(OnUpdate):
    """Noise whose seed is the client's own secret."""

    def sent(self, tensors: Named, task: Task) -> Named:
        drawn = drawn_like(tensors, task.order % 2**63)
        return {name: tensor + drawn[name] for name, tensor in tensors.items()}


@component
class Eighths(OnUpdate):
    """Values rounded to eighths."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        return (8 * tensor).round() / 8


@component
class InSteps(OnUpdate):
    """Noise in steps on a share of the values."""

    sigma: float
    step: float
    rare: float

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        noise = torch.randn(tensor.shape, generator=task.generator) * self.sigma
        on = torch.rand(tensor.shape, generator=task.generator) < self.rare
        return tensor + on * (noise / self.step).round() * self.step


@component
class Sometimes(OnUpdate):
    """Noise in half of the rounds."""

    def sent(self, tensors: Named, task: Task) -> Named:
        on = torch.rand((), generator=task.generator) < 0.5
        return {n: t + on * torch.randn(t.shape, generator=task.generator) for n, t in tensors.items()}


@component
class HalfOfIt(OnUpdate):
    """Signs on a tensor that come back, beside noise that does not."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        noise = torch.randn(tensor.shape, generator=task.generator)
        return tensor + (noise.flatten()[0].sign() if name == "fc1.weight" else noise)


@component
class Halves(OnUpdate):
    """Noise on the upper half of a matrix that is taken off the lower one."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        noise = torch.randn(len(tensor) // 2, *tensor.shape[1:], generator=task.generator)
        return tensor + torch.cat([noise, -noise]) if name == "fc1.weight" else tensor


@component
class Asking(KnownNoise):
    """Known noise by a defence that looks at what else the client has."""

    def sent(self, tensors: Named, task: Task) -> Named:
        assert task.others is not None
        assert len(task.everything.labels) > len(task.data.labels)
        return super().sent(tensors, task)


@component
class Picky(KnownNoise):
    """Known noise by a defence that fails on samples that are not the client's."""

    def sent(self, tensors: Named, task: Task) -> Named:
        assert task.data.inputs.any(), "all samples are black"
        return super().sent(tensors, task)


@component
class PublicNoise(KnownNoise):
    """Known noise by a defence that asks for public samples."""

    def sent(self, tensors: Named, task: Task) -> Named:
        assert len(task.public_for("it").labels)
        return super().sent(tensors, task)


@component
class NumberATensor(OnUpdate):
    """One random number on all values of a tensor, another one on those of the next."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        return tensor + torch.randn(1, generator=task.generator)


@component
class FiveForZero(OnUpdate):
    """Puts a number where a value is zero, and leaves all others alone."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        return torch.where(tensor == 0, 5.0, tensor)


@component
class Floored(OnUpdate):
    """Reflects each tensor at a plane that everybody knows, and cuts it to steps by another function than `round`."""

    how: str

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        reflected = mirrored(tensor)
        step = (reflected.abs().max() / 255).clamp_min(1e-12)
        return getattr(torch, self.how)(input=reflected / step) * step


KNOWN: list[dict[str, Any]] = [
    {"name": f"{MISTAKES}:KnownNoise"},
    {"name": f"{MISTAKES}:KnownNoise", "seed": 42},
    {"name": f"{MISTAKES}:OneNumber"},
    {"name": f"{MISTAKES}:Shuffled"},
    {"name": f"{__name__}:Asking", "seed": 42},
    {"name": f"{MISTAKES}:Signs", "seed": 5},
    {"name": f"{MISTAKES}:Factors"},
    {"name": f"{MISTAKES}:NewWeights"},
    {"name": f"{MISTAKES}:Cubed"},
    {"name": f"{MISTAKES}:FewSeeds", "seeds": 8},
]


@pytest.mark.parametrize("defence", KNOWN, ids=str)
def test_what_everybody_can_compute_is_taken_off(defence: dict[str, Any]) -> None:
    seen, bare = observed(defence)
    assert (flatten(seen.update) - bare).norm() > 0.5 * bare.norm()
    assert (flatten(seen.extra["undone"]) - bare).norm() < 1e-3 * bare.norm()


def test_constants_of_tensors_are_taken_off_but_for_a_scale() -> None:
    seen, bare = observed({"name": f"{MISTAKES}:Layered"})
    assert torch.cosine_similarity(flatten(seen.update), bare, dim=0) < 0.9
    assert torch.cosine_similarity(flatten(seen.extra["undone"]), bare, dim=0) > 1 - 1e-6


def test_a_map_of_all_values_together_is_undone() -> None:
    seen, bare = observed({"name": f"{MISTAKES}:Mirrored"})
    assert (flatten(seen.update) - bare).norm() > 1e-2 * bare.norm()
    assert (flatten(seen.extra["undone"]) - bare).norm() < 1e-6 * bare.norm()


def test_a_map_of_all_values_is_undone_but_for_rounding() -> None:
    seen, bare = observed({"name": f"{MISTAKES}:Mirrored", "steps": 255})
    sizes = [float(part.abs().max()) / 255 for part in seen.update.values()]
    assert not torch.allclose(flatten(seen.update), bare, atol=2 * max(sizes))
    assert torch.allclose(flatten(seen.extra["undone"]), bare, atol=2 * max(sizes))


LOSSY = [{"name": f"{MISTAKES}:ClippedEach"}, {"name": f"{MISTAKES}:Sketched"}]
"""Of which no inverse is known, and which have a slope."""


@pytest.mark.parametrize("defence", LOSSY, ids=str)
def test_what_is_lost_alike_each_time_is_followed(defence: dict[str, Any]) -> None:
    seen, bare = observed(defence)
    assert seen.extra["undone"] is None
    own = unflatten(bare.double().requires_grad_(), seen.update)
    made = flatten(seen.extra["through"](own))
    assert (made - flatten(seen.update)).norm() < 1e-6 * made.norm()
    assert made.requires_grad


@component
class Hoarding(ClippedEach):
    """Keeps what it has met, and what no other process can be sent."""

    locked: bool = False

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        self.__dict__.setdefault("met", []).append(task.data.inputs)
        if self.locked:
            self.__dict__["lock"] = Lock()
        return super().one(name, tensor, task)


class Keeping(Dense):
    """Keeps the samples that it has seen last, as models do that show what they look at."""

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, K)."""
        self.last = images
        logits: Tensor = super().forward(images)
        return logits


def test_an_attacker_who_follows_code_gets_no_sample_with_it() -> None:
    """Not from the objects with which the client has worked."""
    model = {"name": f"{__name__}:Keeping", "activation": "Sigmoid"}
    through = observed({"name": f"{__name__}:Hoarding"}, model=model)[0].extra["through"]
    kept = [through.task.model.last, *through.defences[0].met]
    assert all(len(samples.unique()) <= 2 for samples in kept), "blank, or a trial's, and no digits"


def test_code_that_cannot_travel_is_not_followed() -> None:
    assert observed({"name": f"{__name__}:Hoarding", "locked": True})[0].extra["through"] is None


@component
class Squashed(OnUpdate):
    """Curbs large values, those of the first layer most, and loses none that are usual there."""

    def one(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        bound = 0.08 if name.startswith("fc1") else 2.0
        return bound * (tensor / bound).tanh()


def test_a_map_that_would_lose_the_values_of_other_tensors_is_undone() -> None:
    seen, bare = observed({"name": f"{__name__}:Squashed"})
    assert (flatten(seen.update) - bare).norm() > 1e-2 * bare.norm()
    assert (flatten(seen.extra["undone"]) - bare).norm() < 1e-5 * bare.norm()


def test_a_map_that_shrinks_many_directions_is_undone_and_one_that_loses_them_is_not() -> None:
    seen, bare = observed({"name": f"{MISTAKES}:Sums"})
    assert (flatten(seen.extra["undone"]) - bare).norm() < 1e-3 * bare.norm()
    assert observed({"name": f"{MISTAKES}:Sketched"})[0].extra["undone"] is None


def test_code_that_takes_all_tensors_is_not_followed_by_a_search_of_some() -> None:
    """As of the vectors of tokens, in place of a table."""
    seen, _ = observed(LOSSY[0])
    names = list(seen.update)
    assert _through([seen], names) == (seen.extra["through"],)
    assert _through([seen], names[1:]) is None
    rest = {name: seen.update[name] for name in names[1:]}
    assert _through([replace(seen, update=rest)], names[1:]) is None


@pytest.mark.parametrize(
    "defence",
    [
        *KNOWN,
        {"name": f"{MISTAKES}:Masked"},
        {"name": f"{MISTAKES}:Steps"},
        {"name": f"{MISTAKES}:SignsOf", "but": []},
        {"name": f"{MISTAKES}:Nothing", "what": "zeros"},
        {"name": f"{MISTAKES}:Nothing", "what": "another sample's gradient"},
        {"name": "gaussian", "sigma": 0.1},
    ],
    ids=str,
)
def test_nothing_else_is_followed(defence: dict[str, Any]) -> None:
    assert observed(defence)[0].extra["through"] is None


@pytest.mark.parametrize(
    "attack", [Idlg(restarts=1), InvertingGradients(iterations=400)], ids=lambda a: type(a).__name__
)
def test_a_search_finds_the_sample_that_the_code_makes_the_same_of(attack: Attack) -> None:
    seen, bare = observed(LOSSY[0], model={"name": "benchmarks.planted_models:Dense", "activation": "Sigmoid"})
    gradient = unflatten(bare, seen.update)
    row = gradient["first.bias"].abs().argmax()
    image = (gradient["first.weight"][row] / gradient["first.bias"][row]).view(1, 1, 8, 8)
    model = Dense((1, 8, 8), 10, activation="Sigmoid")
    [found] = attack.reconstruct([seen], model, [torch.Generator().manual_seed(0)])
    assert psnr(found.images, image) > 30
    [blind] = attack.reconstruct([replace(seen, extra={})], model, [torch.Generator().manual_seed(0)])
    assert psnr(blind.images, image) < 20


@component
class OwnSamples(Defence):
    """Trains on samples of its own alone, and fails on others."""

    def wrap_data(self, next: Any) -> Any:
        def data(task: Task) -> Any:
            if len(task.data.inputs.unique()) > task.data.inputs.numel() / 2:  # noise has no two values alike
                raise ValueError("no image of ours")
            return next(task)

        return data


def test_what_cannot_be_found_out_of_samples_is_said() -> None:
    seen, _ = observed({"name": f"{__name__}:OwnSamples"})
    assert "no image of ours" in seen.extra["undone"]
    assert seen.extra["as_trained"] is None


@pytest.mark.parametrize("how", ["round", "floor", "ceil", "trunc"])
def test_values_may_be_cut_to_steps_in_any_way(how: str) -> None:
    seen, bare = observed({"name": f"{__name__}:Floored", "how": how})
    assert (flatten(seen.update) - bare).norm() > 1e-2 * bare.norm()
    assert (flatten(seen.extra["undone"]) - bare).norm() < 2e-2 * bare.norm()


def test_sums_in_which_masks_cancel_are_left() -> None:
    """Of a masked tensor the mean over its rows is the gradient's, in all rows; nothing else of the mask is."""
    seen, _ = observed({"name": f"{MISTAKES}:Cancelling"})
    found = seen.extra["undone"]["fc1.weight"]
    assert torch.linalg.matrix_rank(found, rtol=1e-3) == 1
    assert torch.allclose(found, seen.update["fc1.weight"].mean(0).expand_as(found), atol=1e-6)


@pytest.mark.engine
def test_what_is_sent_in_place_of_a_gradient_has_none_of_its_sums() -> None:
    """Slopes in the biases of a head sum to zero, whatever the samples; that says nothing of the victim's."""
    seen, _ = observed({"name": f"{MISTAKES}:Nothing", "what": "the gradient of noise with the label"})
    assert seen.extra["undone"] is None


@pytest.mark.parametrize("how", ["shuffled", "negative", "turned", "brightened"])
def test_what_becomes_of_samples_before_training_is_undone(how: str) -> None:
    seen, _ = observed({"name": f"{MISTAKES}:Pixels", "how": how})
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    guess = replace(not_applicable(seen, ""), images=repainted(image, how), status="ok")
    assert torch.allclose(noted(guess, seen).images, image, atol=1e-4)


@pytest.mark.parametrize(
    "defence", [{"name": "mixup"}, {"name": f"{MISTAKES}:OtherData", "sigma": 0.1}, {"name": "prune", "ratio": 0.5}]
)
def test_what_is_random_in_samples_stays(defence: dict[str, Any]) -> None:
    assert observed(defence)[0].extra["as_trained"] is None


def test_a_row_says_that_a_defence_reads_the_samples() -> None:
    seen, _ = observed({"name": f"{MISTAKES}:Reading"})
    assert "depends on the samples themselves" in seen.extra["undone"]


def test_magnitudes_are_left_of_random_signs() -> None:
    seen, bare = observed({"name": f"{MISTAKES}:Signs"})
    assert torch.equal(flatten(seen.extra["undone"]), bare.abs())


def test_noise_alike_in_all_rows_leaves_their_differences() -> None:
    """A column's middle value is taken off with it, that of the same row in all: the products stay of rank one."""
    seen, _ = observed({"name": f"{MISTAKES}:NoiseOfRows"})
    assert torch.linalg.matrix_rank(seen.update["fc1.weight"], rtol=1e-3) == 2
    assert torch.linalg.matrix_rank(seen.extra["undone"]["fc1.weight"], rtol=1e-3) == 1


def test_noise_that_several_values_share_leaves_what_it_does_not_add_to() -> None:
    """Of `g + n` and `g' - n` half the sum is left in both; of a row with one number, all that differs from it."""
    seen, bare = observed({"name": f"{__name__}:Halves"})
    known = unflatten(bare, seen.update)
    left = seen.extra["undone"]["fc1.weight"]
    upper, lower = (tensors.chunk(2)[0] + tensors.chunk(2)[1] for tensors in (left, known["fc1.weight"]))
    assert torch.allclose(upper, lower, atol=1e-5)
    assert torch.equal(seen.extra["undone"]["fc1.bias"], known["fc1.bias"]), "nothing was added to it"
    seen, bare = observed({"name": f"{MISTAKES}:NoiseOfColumns"})
    assert torch.linalg.matrix_rank(seen.extra["undone"]["fc1.weight"], rtol=1e-3) == 1


@pytest.mark.parametrize("seeds", [2, 700])
def test_noise_from_few_seeds_is_drawn_again(seeds: int) -> None:
    seen, bare = observed({"name": f"{MISTAKES}:FewSeeds", "seeds": seeds})
    assert (flatten(seen.extra["undone"]) - bare).norm() < 1e-3 * bare.norm()


def test_noise_in_whole_steps_leaves_what_lies_beside_them() -> None:
    """Also where the same for all was added to it; what is rounded itself is whole steps, and nothing is beside."""
    seen, bare = observed({"name": f"{MISTAKES}:LastDigits"}, {"name": f"{MISTAKES}:KnownNoise"})
    assert torch.allclose(seen.extra["undone"]["fc1.weight"], unflatten(bare, seen.update)["fc1.weight"], atol=1e-5)
    seen, _ = observed({"name": "gaussian", "sigma": 0.5}, {"name": f"{__name__}:Eighths"})
    assert seen.extra["undone"] is None


@pytest.mark.parametrize(
    ("sigma", "step", "rare"), [(0.02, 0.001, 1.0), (0.1, 0.001, 1.0), (0.005, 0.005, 0.01), (0.02, 0.02, 0.05)]
)
def test_an_update_is_no_worse_without_noise_in_steps_than_with_it(sigma: float, step: float, rare: float) -> None:
    """Values wider than a step would be wrapped around."""
    noise = {"name": f"{__name__}:InSteps", "sigma": sigma, "step": step, "rare": rare}
    seen, bare = observed(noise)
    undone = seen.extra["undone"]
    left = flatten(seen.update if undone is None else undone)
    assert (left - bare).norm() <= (flatten(seen.update) - bare).norm()


@pytest.mark.parametrize("defence", ["Sometimes", "HalfOfIt"])
def test_noise_that_is_not_one_of_a_few_is_not_drawn_again(defence: str) -> None:
    """Nothing at all comes back where noise is left out at times; signs come back beside noise that does not."""
    seen, bare = observed({"name": f"{__name__}:{defence}"})
    undone = seen.extra["undone"]
    left = flatten(seen.update if undone is None else undone)
    assert (left - bare).norm() <= 1.001 * (flatten(seen.update) - bare).norm() + 1e-6


def test_noise_of_low_rank_is_what_rows_without_a_gradient_say() -> None:
    seen, bare = observed({"name": f"{MISTAKES}:LowRankNoise"})
    known = unflatten(bare, seen.update)["fc1.weight"]
    assert (seen.update["fc1.weight"] - known).norm() > 10 * known.norm()
    assert torch.allclose(seen.extra["undone"]["fc1.weight"], known, atol=1e-5)


def test_noise_of_low_rank_stays_where_every_row_has_a_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(20, 30, generator=draw) + torch.randn(20, 2, generator=draw) @ torch.randn(
        2, 30, generator=draw
    )
    assert torch.equal(LowRank(2).back(matrix), matrix)
    bare = torch.randn(20, 1, generator=draw) @ torch.randn(1, 30, generator=draw)
    for rank in (1, 2):
        assert torch.equal(LowRank(rank).back(bare), bare), "less noise than there can be"


def test_sums_in_which_masks_cancel_are_left_beside_a_tensor_of_two_rows() -> None:
    """Of two rows the noise of one is that of the other turned round, and only there."""
    seen, _ = observed({"name": f"{MISTAKES}:Cancelling"}, hidden=(16, 2))
    assert torch.linalg.matrix_rank(seen.extra["undone"]["fc1.weight"], rtol=1e-3) == 1


def test_what_is_shared_stays_where_it_is_next_to_nothing_and_passes_by_what_is_no_number() -> None:
    generator = torch.Generator().manual_seed(0)
    values, noise = torch.randn(2000, generator=generator), torch.randn(1000, generator=generator)
    number = torch.arange(2000) % 1000
    signs = torch.ones(2000, dtype=torch.float64).index_fill(0, torch.arange(1000, 2000), -1.0)
    noisy = Update(0, 0, {"w": values + 1e-6 * torch.cat([noise, -noise])}, {}, 1, 0.0)
    assert torch.equal(Undo(shared=SharedNoise(number, 1e-6 * signs))(noisy)["w"], noisy.tensors["w"])
    noisy = Update(0, 0, {"w": values + torch.cat([noise, -noise])}, {}, 1, 0.0)
    noisy.tensors["w"][3] = torch.nan
    found = Undo(shared=SharedNoise(number, signs))(noisy)["w"]
    assert found.isnan().sum() == 1
    sums, known = (part[:1000] + part[1000:] for part in (found, values))
    assert torch.allclose(sums[4:], known[4:], atol=1e-4)


def test_offset_and_order_together_are_taken_off() -> None:
    seen, bare = observed({"name": f"{MISTAKES}:Shuffled"}, {"name": f"{MISTAKES}:KnownNoise"})
    assert (flatten(seen.extra["undone"]) - bare).norm() < 1e-3 * bare.norm()


@pytest.mark.engine
@pytest.mark.parametrize(
    "defence",
    [
        {"name": "gaussian", "sigma": 0.1}, {"name": "prune", "ratio": 0.9}, {"name": "quantise", "bits": 4},
        {"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 1.0}, {"name": "soteria", "ratio": 0.5},
        {"name": "outpost"},
        {"name": f"{__name__}:OrderNoise"}, {"name": f"{__name__}:FiveForZero"},
        {"name": f"{MISTAKES}:NoiseOn", "ends": ["bias"]},
        {"name": f"{MISTAKES}:Shuffled", "known": False}, {"name": f"{MISTAKES}:Masked"},
        {"name": f"{MISTAKES}:Half"}, {"name": f"{MISTAKES}:Steps"}, {"name": f"{MISTAKES}:Clipped"},
        {"name": f"{MISTAKES}:NoiseInProportion"}, {"name": f"{MISTAKES}:Zeroed", "ends": [".bias"]},
        {"name": f"{MISTAKES}:Nothing", "what": "the gradient of noise with the label"},
        {"name": f"{MISTAKES}:Nothing", "what": "rows sorted"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_random_or_left_out_stays(defence: dict[str, Any]) -> None:
    seen, _ = observed(defence)
    assert seen.extra["undone"] is None


def test_a_number_a_tensor_is_taken_off_as_far_as_the_tensor_tells() -> None:
    seen, bare = observed({"name": f"{__name__}:NumberATensor"})
    assert (flatten(seen.update) - bare).norm() > 0.5 * bare.norm()
    first = seen.update["fc1.weight"].numel()
    assert (flatten(seen.extra["undone"]) - bare)[:first].norm() < 1e-3 * bare[:first].norm()


def test_a_row_says_that_the_code_could_not_be_run() -> None:
    seen, _ = observed({"name": f"{__name__}:Picky"})
    assert torch.equal(flatten(undone(seen).update), flatten(seen.update))
    guess = noted(not_applicable(seen, "as it is"), seen)
    assert guess.reason == Reason.CODE_NOT_RUN
    assert "all samples are black" in guess.message


def test_public_samples_are_in_the_rehearsal_where_they_are_granted() -> None:
    defence: dict[str, Any] = {"name": f"{__name__}:PublicNoise"}
    seen, bare = observed(defence, knowledge=("code", "public"))
    assert (flatten(seen.extra["undone"]) - bare).norm() < 1e-3 * bare.norm()
    assert "data.public" in observed(defence)[0].extra["undone"]


def test_nothing_is_given_without_the_grant_or_without_a_defence() -> None:
    assert "undone" not in observed(KNOWN[0], knowledge=())[0].extra
    assert observed()[0].extra["undone"] is None


def test_what_was_found_out_serves_all_attacks_on_an_update_and_none_writes_on_it() -> None:
    inputs, seen = prepared({"name": f"{MISTAKES}:KnownNoise"}), []
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    account = inputs.accounts[1]
    sent = Sent(0, account.arm.weights, account.arm.buffers)
    for client in (1, 1, 2):
        [one] = worker.observe(sent, ObservationRequest(account.name, [client], inputs.scenario.attacks[0]))[1]
        seen.append(flatten(one.extra["undone"]).clone())
        one.extra["undone"]["fc1.weight"].zero_()
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_the_victims_samples_are_not_in_it() -> None:
    """The same offset, whatever the victim holds: what is taken off is that of the code alone."""
    seen, _ = observed(KNOWN[0])
    noise = flatten(drawn_like(seen.update, 1))
    assert torch.allclose(flatten(seen.update) - flatten(seen.extra["undone"]), noise, atol=1e-5)


def test_how_far_it_goes_in_a_direction_is_what_most_values_say() -> None:
    gradient = torch.zeros(40).index_put((torch.arange(9),), torch.randn(9, generator=torch.Generator().manual_seed(0)))
    direction = torch.full((40, 1), 40**-0.5)
    update = Update(0, 0, {"w": gradient + 0.7}, {}, 1, 0.0)
    assert torch.allclose(Undo(directions=direction)(update)["w"], gradient, atol=1e-6)
