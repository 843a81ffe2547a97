"""Model inversion of split models: the cut, what a runtime grants, and the images that a colluder's part gives back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.matching.model_inversion import ModelInversion
from rayfed.errors import ScenarioError, UserError
from rayfed.gradients import buffers_of, weights_of
from rayfed.metrics.images import mse
from rayfed.models.build import build_model
from rayfed.models.front import Front
from rayfed.samples import Pixels
from rayfed.scenario import AttackSpec, Scenario, parse
from rayfed.simulation.client import plan
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit, ObservedClient
from rayfed.simulation.inputs import prepare_inputs
from rayfed.threat_model.grants.colluder import colluder
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Observation
from tests.helpers.attack_fixtures import generators, images_of, observed


def scenario(data: str = "digits, size: 16", cut: str = "conv1", **changes: object) -> Scenario:
    text = f"""
name: t
seed: 3
data: {{name: {data}, train_samples: 400, test_samples: 10}}
model: lenet
training: {{batch_size: 10, lr: 0.01, momentum: 0.9}}
federation: {{rounds: 1, clients: 10}}
attacks:
  - name: model_inversion
    cut: {cut}
    observes: gradient
    batch_size: 2
    victims: 2
    knowledge: [activations, colluder]
"""
    return parse(text).model_copy(update=changes)


def hosted(s: Scenario) -> tuple[ClientRuntime, Sent]:
    inputs = prepare_inputs(s)
    runtime = ClientRuntime(s, inputs.data, inputs.parts, torch.device("cpu"))
    model = runtime.arm("none").model
    return runtime, Sent(0, weights_of(model), buffers_of(model))


def split(model: nn.Module, cut: str, images: Tensor, noise: float = 0.0) -> Observation:
    """A victim whose private part is the model's, and a colluder whose weights are a little off."""
    front = Front(model, cut)
    state = weights_of(model) | buffers_of(model)
    other = {
        n: state[n] * (1 + noise) if state[n].is_floating_point() else state[n] for n in front.names(Pixels(1, 16, 16))
    }
    labels = torch.arange(len(images))
    sent = front({n: t.clone() for n, t in state.items()}, images).detach()
    return replace(observed(model, images, labels), extra={"activations": sent, "colluder": other})


def test_a_front_is_the_model_up_to_its_cut() -> None:
    model = build_model("lenet", {}, (1, 16, 16), 10, seed=0)
    images = torch.rand(3, 1, 16, 16)
    assert isinstance(model, nn.Sequential)
    for cut, depth in (("conv1", 1), ("act1", 3), ("conv2", 4)):
        front = Front(model, cut)
        torch.testing.assert_close(front(weights_of(model), images), model[:depth](images))
        assert front.names(Pixels(1, 16, 16)) == [
            n for n, _ in model.named_parameters() if n.split(".")[0] in dict(model[:depth].named_children())
        ]
    doubled = {name: 2 * weight for name, weight in weights_of(model).items()}
    torch.testing.assert_close(Front(model, "conv1")(doubled, images), 2 * model[:1](images))


def test_a_front_of_nested_modules_knows_its_batch_norms() -> None:
    model = build_model("resnet10", {}, (3, 32, 32), 10, seed=0)
    names = Front(model, "stages.0").names(Pixels(3, 32, 32))
    assert all(name.startswith(("conv1.", "bn1.", "stages.0.")) for name in names)
    assert "stages.0.0.conv2.weight" in names
    assert "bn1.running_mean" in names
    untouched = buffers_of(build_model("resnet10", {}, (3, 32, 32), 10, seed=0))
    for name, buffer in buffers_of(model).items():
        assert torch.equal(buffer, untouched[name])


def test_a_cut_that_is_none_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(UserError, match=r"no module '2': .*valid are 0, 1"):
        Front(model, "2")
    model[0].unused = nn.ReLU()
    with pytest.raises(UserError, match=r"never calls the module '0\.unused'"):
        Front(model, "0.unused").names(Pixels(1, 2, 2))


def test_a_host_grants_the_victims_activations_and_the_colluders_part() -> None:
    s = scenario()
    runtime, sent = hosted(s)
    victim, other = 4, colluder(s, 0, 4)
    looked = ObservedClient(runtime, ClientVisit("none", sent, victim), s.attacks[0])
    observation, truth = ObservationBuilder(runtime).observe(looked.visit, looked.attack)
    trained = {
        client: {n: w - looked.trained(client)[n] for n, w in sent.weights.items()} for client in (victim, other)
    }
    for client, step in trained.items():
        partial, _ = runtime.cohort("none", sent, [client], {})
        for name, tensor in step.items():
            torch.testing.assert_close(tensor * partial.weight, partial.tensors[name], atol=1e-4, rtol=1e-4)
    conv = nn.functional.conv2d
    weight, bias = (sent.weights[n] - trained[victim][n] for n in ("conv1.weight", "conv1.bias"))
    torch.testing.assert_close(
        observation.extra["activations"], conv(truth.inputs, weight, bias, stride=2, padding=2), atol=1e-5, rtol=1e-4
    )
    assert observation.extra["colluder"].keys() == {"conv1.weight", "conv1.bias"}
    torch.testing.assert_close(
        observation.extra["colluder"]["conv1.weight"], sent.weights["conv1.weight"] - trained[other]["conv1.weight"]
    )
    plain, _ = ObservationBuilder(runtime).observe(
        ClientVisit("none", sent, victim), AttackSpec(name="dlg", observes="gradient")
    )
    assert not plain.extra


def test_granting_leaves_what_was_sent_as_it_was() -> None:
    s = scenario(cut="conv1").model_copy(update={"model": parse(SCENARIO_WITH_BATCH_NORM).model})
    runtime, sent = hosted(s)
    before = {name: tensor.clone() for name, tensor in sent.buffers.items()}
    ObservationBuilder(runtime).observe(ClientVisit("none", sent, 1), s.attacks[0])
    for name, tensor in sent.buffers.items():
        assert torch.equal(tensor, before[name])


SCENARIO_WITH_BATCH_NORM = "name: t\nmodel: {name: resnet10}\nfederation: {rounds: 1, clients: 1}\n"


def test_the_colluder_is_the_next_drawn_client() -> None:
    s = scenario()
    s = s.model_copy(update={"federation": s.federation.model_copy(update={"clients_per_round": 3})})
    drawn = plan.drawn_clients(s, 0)
    assert [colluder(s, 0, victim) for victim in drawn] == [*drawn[1:], drawn[0]]
    alone = s.model_copy(update={"federation": s.federation.model_copy(update={"clients_per_round": 1})})
    [victim] = plan.drawn_clients(alone, 0)
    with pytest.raises(ScenarioError, match=r"set federation\.clients_per_round to at least 2"):
        colluder(alone, 0, victim)


def test_mistakes_show_before_a_run() -> None:
    with pytest.raises(UserError, match="no module 'conv9': did you mean 'conv"):
        prepare_inputs(scenario(cut="conv9"))
    one = scenario()
    one = one.model_copy(update={"federation": one.federation.model_copy(update={"clients": 1})})
    with pytest.raises(ScenarioError):
        prepare_inputs(one)
    text = "name: t\ndata: {name: digits, train_samples: 40}\nfederation: {rounds: 1, clients: 2}\n"
    with pytest.raises(ScenarioError, match="set `cut` of dlg"):
        parse(text + "attacks: [{name: dlg, knowledge: [activations]}]\n")
    for known in ("colluder", "key", "lock"):
        with pytest.raises(ScenarioError, match=f"'dlg' has the knowledge {known}, but no arm has private layers"):
            prepare_inputs(parse(text + f"attacks: [{{name: dlg, knowledge: [{known}]}}]\n"))


@pytest.mark.engine
def test_it_inverts_a_layer_through_a_colluders() -> None:
    model = build_model("lenet", {}, (1, 16, 16), 10, seed=0)
    images, _ = images_of("digits", 4, size=16, skip=20)
    seen = [split(model, "conv1", images[:1], 0.01), split(model, "conv1", images[1:4], 0.01)]
    found = ModelInversion(cut="conv1").reconstruct(seen, model, generators(2))
    assert mse(images, torch.cat([f.images for f in found])).max() < 1e-3
    assert found[0].labels.tolist() == [0]
    assert found[1].trace[-1][1] < 1e-2 * found[1].trace[0][1]


@pytest.mark.engine
def test_a_batch_norm_in_the_private_part_hides_brightness_and_contrast_alone() -> None:
    model = build_model("resnet10", {}, (1, 16, 16), 10, seed=0)
    images, _ = images_of("digits", 3, size=16, skip=20)
    attack = ModelInversion(cut="bn1", tv=0)
    [found] = attack.reconstruct([split(model, "bn1", images)], model, generators(1))
    assert torch.corrcoef(torch.stack([images.flatten(), found.images.flatten()]))[0, 1] > 0.9
    model.eval()
    [found] = attack.reconstruct([split(model, "bn1", images)], model, generators(1))
    assert mse(images, found.images).max() < 1e-3


def test_a_result_depends_on_its_own_generator_alone() -> None:
    model = build_model("lenet", {}, (1, 16, 16), 10, seed=0)
    images, _ = images_of("digits", 2, size=16)
    seen = [split(model, "conv1", images[i : i + 1], 0.01) for i in range(2)]
    attack = ModelInversion(cut="conv1", iterations=10)
    together, again = (attack.reconstruct(seen, model, generators(2)) for _ in range(2))
    [alone] = attack.reconstruct(seen[1:], model, generators(2)[1:])
    assert torch.equal(together[1].images, again[1].images)
    assert alone.trace[-1][1] == pytest.approx(together[1].trace[-1][1], abs=1e-4)


@pytest.mark.engine
def test_a_broken_observation_leaves_the_others_alone() -> None:
    model = build_model("lenet", {}, (1, 16, 16), 10, seed=0)
    images, _ = images_of("digits", 2, size=16)
    first, second = (split(model, "conv1", images[i : i + 1]) for i in range(2))
    broken = replace(first, extra={**first.extra, "activations": first.extra["activations"] * torch.nan})
    bad, good = ModelInversion(cut="conv1").reconstruct([broken, second], model, generators(2))
    assert bad.status == "diverged"
    assert bad.images.isfinite().all()
    assert mse(images[1:], good.images).max() < 1e-3


def test_it_says_what_it_has_not_been_granted() -> None:
    model = build_model("lenet", {}, (1, 16, 16), 10, seed=0)
    seen = observed(model, torch.rand(1, 1, 16, 16), torch.tensor([1]))
    [found] = ModelInversion(cut="conv1").reconstruct([seen], model, generators(1))
    assert found.status == "not applicable"
    assert "[activations, colluder]" in found.message


@pytest.mark.engine
def test_lenet_on_mnist_gives_its_images_away(shared_data: Path) -> None:
    """The paper calls a mean squared error under 0.05 no protection (table 1)."""
    s = scenario(f"mnist, root: {shared_data}")
    runtime, sent = hosted(s)
    seen = [ObservationBuilder(runtime).observe(ClientVisit("none", sent, client), s.attacks[0]) for client in (2, 5)]
    found = ModelInversion(cut="conv1").reconstruct([o for o, _ in seen], runtime.arm("none").model, generators(2))
    for (_, truth), guess in zip(seen, found, strict=True):
        assert mse(truth.inputs, guess.images).max() < 0.05
