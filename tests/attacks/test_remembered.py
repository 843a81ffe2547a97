"""What is found of a model alone is found once, and anew for other weights, other arms and other public samples."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks import fit
from rayfed.attacks.base import Attack, Reconstruction
from rayfed.attacks.closed_form import answer
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.closed_form.april import April
from rayfed.attacks.closed_form.columns import Columns
from rayfed.attacks.closed_form.probe import probe
from rayfed.attacks.inference import labels
from rayfed.attacks.inference.labels import OwnProducts, with_labels
from rayfed.attacks.matching import second_derivatives
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.remembered import Memory, once, remembering
from rayfed.models.lenet import LeNet
from rayfed.samples import Pixels
from rayfed.scenario import parse, resolve
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ObservationRequest
from rayfed.simulation.executors.attacker import AttackWorker
from rayfed.simulation.executors.local import TimeLimit, TimeLimitExceeded
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Observation
from tests.helpers.attack_fixtures import digit, observe, psnr, seeded


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LeNet().build((1, 8, 8), 10)


def batch(network: nn.Module) -> Observation:
    return observe(network, torch.cat([digit(3), digit(5)]), torch.tensor([3, 5]), known=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """Observations for which samples of the attacker's own were made."""
    found: list[Observation] = []
    of: Callable[..., OwnProducts] = OwnProducts.of

    def counted(head: Any, seen: Observation) -> OwnProducts:
        found.append(seen)
        return of(head, seen)

    monkeypatch.setattr(labels.OwnProducts, "of", counted)
    return found


def test_samples_of_ones_own_are_made_once_for_all_observations_at_the_same_weights(made: list[Observation]) -> None:
    network, memory = model(), Memory()
    first, again = batch(network), batch(network)
    with remembering(memory):
        [told] = with_labels([first], network)
        [same] = with_labels([again], network)
    assert len(made) == 1
    [alone] = with_labels([again], network)
    assert len(made) == 2, "nothing is kept outside"
    for found in (told, same, alone):
        assert found.labels is not None
        assert found.labels.tolist() == [3, 5]


def test_other_weights_and_other_public_samples_are_looked_at_anew(made: list[Observation]) -> None:
    network, memory = model(), Memory()
    first = batch(network)
    moved = {name: weight + 1e-3 for name, weight in first.weights.items()}
    public = torch.cat([digit(number) for number in range(10)]), torch.arange(10)
    others = [replace(first, weights=moved), replace(first, extra={**first.extra, "public": public})]
    with remembering(memory):
        for seen in (first, *others, first, *others):
            with_labels([seen], network)
    assert len(made) == 3


def test_an_attacker_keeps_them_from_call_to_call_and_over_arms(made: list[Observation]) -> None:
    text = """
    name: two
    data: {name: digits, size: 8, train_samples: 40, test_samples: 20}
    model: lenet
    federation: {rounds: 1, clients: 2}
    arms: {none: [], gaussian: [{name: gaussian, sigma: 1.0e-6}]}
    attacks: [{name: inverting_gradients, iterations: 1, observes: gradient, batch_size: 2, victims: 1}]
    """
    scenario = parse(text, "here")
    inputs, [attack] = prepare_inputs(scenario), scenario.attacks
    client = ClientWorker(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    attacker = AttackWorker(inputs.data.sample, 10, torch.device("cpu"))
    for account in inputs.accounts:
        sent = Sent(0, account.arm.weights, account.arm.buffers)
        for _ in range(2):
            seen = client.observe(sent, ObservationRequest(account.name, [0], attack))[1]
            attacker.attack(attack, client.specs[account.name].to_attackers(), seen, [b"0"])
    assert len(made) == 1


def test_views_of_tensors_count_by_their_values(made: list[Observation]) -> None:
    network, memory = model(), Memory()
    first = batch(network)
    strided = {name: torch.stack([w, w], -1)[..., 0] for name, w in first.weights.items()}
    with remembering(memory):
        with_labels([first], network)
        with_labels([replace(first, weights=strided)], network)
    assert len(made) == 1


def test_few_findings_are_kept() -> None:
    seen, memory, found = batch(model()), Memory(), list[int]()
    with remembering(memory):
        for number in (*range(30), 29, 0):
            once("numbers", number, seen, lambda number=number: found.append(number))  # type: ignore[misc]
    assert found == [*range(30), 0]


def test_closed_forms_share_one_probe_of_a_model_which_holds_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(answer, "probe", lambda *given: made.append(probe(*given)) or made[-1])
    network, memory, forms = model(), Memory(), (Analytic(), April(), Columns())
    alone, together = list[Reconstruction](), list[Reconstruction]()
    seen = observe(network, digit(3), torch.tensor([3]), known=False)
    held = weakref.ref(seen)
    for form in forms:
        alone += form.reconstruct([seen], network, seeded(1))
    with remembering(memory):
        for form in forms:
            together += form.reconstruct([seen], network, seeded(1))
    assert len(made) == len(forms) + 1
    for one, other in zip(alone, together, strict=True):
        assert (one.status, one.message) == (other.status, other.message)
        assert torch.equal(one.images, other.images)
    del seen
    assert held() is None


def test_a_closed_form_that_was_cut_off_is_as_it_ever_was_afterwards() -> None:
    """A time limit ends attacks in the middle, and their attackers' next ones go on from what is known."""
    torch.manual_seed(0)
    network = Tokens(affine=True)
    nn.init.normal_(network.head.weight)
    seen = observe(network, digit(3), torch.tensor([3]))
    [whole] = April().reconstruct([seen], network, seeded(1))
    assert whole.status == "ok"
    for operations in range(0, 600, 7):
        clock = count()
        memory, cut = Memory(), False
        with remembering(memory):
            try:
                with TimeLimit(operations, partial(next, clock)):
                    April().reconstruct([seen], network, seeded(1))
            except TimeLimitExceeded:
                cut = True
            assert torch.is_grad_enabled()
            [after] = April().reconstruct([seen], network, seeded(1))
        assert torch.equal(after.images, whole.images)
        if not cut:
            break
    assert operations > 50


def test_a_weight_that_is_sent_is_another_finding_than_one_that_is_private() -> None:
    """Who is given what a client keeps sees the tensors of who is not, in another place, and a longer update."""
    seen, found = batch(model()), list[Observation]()
    *shared, last = seen.weights
    private = replace(seen, weights={n: seen.weights[n] for n in shared}, buffers={last: seen.weights[last]})
    with remembering(Memory()):
        for one in (private, seen, private):
            once("probe", "", one, lambda one=one: found.append(one))  # type: ignore[misc]
    assert len(found) == 2


def test_how_a_model_is_differentiated_is_found_once_for_all_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    found, fitting_way = list[nn.Module](), second_derivatives.fitting_way
    monkeypatch.setattr(
        second_derivatives, "fitting_way", lambda network, *given: found.append(network) or fitting_way(network, *given)
    )
    seen, memory, attack = batch(model()), Memory(), InvertingGradients(iterations=1)
    with remembering(memory):
        one, other = (attack.reconstruct([seen], model(), seeded(1)) for _ in range(2))
    assert len(found) == 1
    network = model()
    for _ in range(2):
        [alone] = attack.reconstruct([seen], network, seeded(1))
    assert len(found) == 2
    assert torch.equal(one[0].images, other[0].images)
    assert torch.equal(one[0].images, alone.images)


def test_arms_that_differ_by_their_name_alone_share_what_is_known_and_others_do_not() -> None:
    text = """
    name: arms
    data: {name: digits}
    model: mlp
    federation: {rounds: 1, clients: 2}
    arms:
      none: []
      gaussian: {defences: [{name: gaussian, sigma: 0.1}]}
      wide: {model: {hidden: [8]}}
    """
    arms = {name: arm.to_attackers() for name, arm in resolve(parse(text, "here")).items()}
    attacker = AttackWorker(Pixels(1, 8, 8), 10, torch.device("cpu"))
    none, gaussian, wide = (attacker._memory(arms[name]) for name in ("none", "gaussian", "wide"))
    assert none is gaussian is not wide


@pytest.mark.parametrize(("attack", "asks"), [(Columns(), False), (Analytic(), True)])
def test_labels_of_a_batch_are_read_where_a_closed_form_applies(
    attack: Attack, asks: bool, made: list[Observation]
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
    [found] = attack.reconstruct([batch(network)], network, seeded(1))
    assert (found.status == "ok") == bool(made) == asks


def test_no_gradient_is_compared_with_that_of_an_attack_that_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Tensor) -> None:
        pytest.fail("compared for nothing")

    network = model()
    seen = batch(network)
    found = Columns().reconstruct([seen], network, seeded(1))
    monkeypatch.setattr(fit, "fit_of", never)
    assert [one.fit for one in fit.with_fit(found, [seen], network)] == [None]


class Tokens(nn.Module):
    """Patches with learned positions, and a head that begins at 0."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, 4)
        self.before = nn.Identity() if affine else nn.GELU()
        self.positions = nn.Parameter(torch.randn(1, 4, 16))
        self.head = nn.Linear(16, 10, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.before(self.patches(images)).flatten(2).transpose(1, 2) + self.positions
        return self.head(torch.tanh(tokens).mean(1))


@pytest.mark.parametrize("affine", [True, False])
def test_a_head_that_begins_at_zero_does_not_hide_learned_positions(affine: bool) -> None:
    """What applies at other weights of the same model is not called inherent."""
    torch.manual_seed(0)
    network = Tokens(affine)
    [found] = April().reconstruct([observe(network, digit(3), torch.tensor([3]))], network, seeded(1))
    assert found.status == "not applicable"
    assert found.inherent == (not affine)


def test_entries_that_count_or_do_not_move_are_no_equations() -> None:
    """Behind a ReLU and a mean, gradients of biases count pixels; of many, some are as if affine, by chance."""
    network = nn.Sequential(nn.Conv2d(1, 512, 5), nn.BatchNorm2d(512), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = nn.Sequential(*network, nn.Linear(512, 10))
    [found] = April().reconstruct([observe(network, digit(3), torch.tensor([3]))], network, seeded(1))
    assert (found.status, found.inherent) == ("not applicable", True)


class Rounded(nn.Module):
    """Rows of an image that is cast to float32, as users do, before it is normalised, each a token with a position."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("deviation", torch.full((1,), 0.3))
        self.rows, self.positions = nn.Linear(8, 16), nn.Parameter(torch.randn(1, 8, 16))
        self.block, self.head = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = (images[:, 0] + 8).float() / self.deviation
        return self.head(self.block(self.rows(rows) + self.positions).mean(1))


class Experts(nn.Module):
    """Tokens with learned positions, each of which goes to one of two layers: how many to which, the sample decides."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, 24, 2, 2), nn.Parameter(torch.randn(1, 16, 24))
        self.experts, self.head = nn.ModuleList(nn.Linear(24, 24) for _ in range(8)), nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = (self.patches(images).flatten(2).mT + self.positions).flatten(0, 1)
        chosen = tokens[:, :8].argmax(1)
        made = torch.zeros_like(tokens)
        for place, expert in enumerate(self.experts):
            own = (chosen == place).nonzero()[:, 0]
            if len(own):
                made = made.index_add(0, own, torch.tanh(expert(tokens[own])))
        return self.head((tokens + made).view(len(images), 16, 24).mean(1))


@pytest.mark.parametrize("make", [Rounded, Experts])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_affine_but_for_rounding_or_takes_other_ways_is_read(make: type[nn.Module], seed: int) -> None:
    torch.manual_seed(seed)
    network = make()
    [found] = April().reconstruct([observe(network, digit(3), torch.tensor([3]))], network, seeded(1))
    assert found.status == "ok"
    assert psnr(found.images, digit(3)) > 30
