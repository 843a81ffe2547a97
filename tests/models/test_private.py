"""Parts of a model that stay with their client: what leaves, what an attacker is shown, who is evaluated with what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from rayfed.attacks.groups import in_groups
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.defences.base import Defence
from rayfed.defences.key_lock import KeyLock
from rayfed.errors import UserError
from rayfed.gradients import weights_of
from rayfed.models.build import build_model
from rayfed.models.dcgan import Generator
from rayfed.models.key_lock import conv_norm_blocks
from rayfed.models.pretrained import Origin, save_generator
from rayfed.models.private import freeze, private_names
from rayfed.registry import component
from rayfed.runs import runner
from rayfed.samples import Pixels
from rayfed.scenario import AttackSpec, Scenario, parse
from rayfed.simulation.client.arm import build_arm
from rayfed.simulation.client.local import PRIVATE
from rayfed.simulation.client.runtime import CohortReport
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.local import local
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.store import checkpoint
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Named, Observation
from tests.helpers.attack_fixtures import generators

TEXT = """
name: t
seed: 3
data: {name: digits, size: 8, train_samples: 200, test_samples: 50}
model: {name: lenet, norm: batch}
training: {batch_size: 10, lr: 0.1}
federation: {rounds: 3, clients: 4, cohort_size: 2, evaluate_clients: true}
arms:
  none: []
  locked: [{name: key_lock, length: 16}]
resources: {clients: {actors: 2}, attackers: {actors: 1}}
"""
LOCK = {"norm1.lock.gamma.weight", "norm1.lock.gamma.bias", "norm1.lock.beta.weight", "norm1.lock.beta.bias"}
KEY = "norm1.lock.key"


def parsed(*changes: str) -> Scenario:
    return parse(TEXT, changes=changes)


def hosted(s: Scenario, arm: str = "locked") -> tuple[ClientWorker, Sent]:
    inputs = prepare_inputs(s)
    runtime = ClientWorker(s, inputs.data, inputs.parts, torch.device("cpu"))
    return runtime, Sent(0, runtime.arm(arm).weights, runtime.arm(arm).buffers)


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_in(value)
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from tensors_in(getattr(thing, field.name))


def holds(thing: Any, secret: Named) -> bool:
    """Whether one of the secret tensors can be reached from an object, by value, whatever its name."""
    return any(t.shape == s.shape and torch.equal(t, s) for t in tensors_in(thing) for s in secret.values())


def played(runtime: ClientWorker, sent: Sent, clients: list[int], states: dict[int, Any]) -> tuple[Any, CohortReport]:
    return runtime.cohort("locked", sent, clients, states)


def test_a_locked_norm_scales_and_shifts_by_its_key() -> None:
    model = KeyLock(length=5).adapt_model(build_model("lenet", {"norm": "batch"}, (1, 8, 8), 10, seed=0))
    assert private_names(model) == LOCK | {KEY}
    weights = {**weights_of(model), KEY: model.get_buffer(KEY)}
    features = torch.randn(3, 12, 4, 4)
    gamma, beta = (
        weights[KEY] @ weights[f"norm1.lock.{name}.weight"].T + weights[f"norm1.lock.{name}.bias"]
        for name in ("gamma", "beta")
    )
    plain = F.batch_norm(features, None, None, training=True)
    expected = gamma[:, None, None] * plain + beta[:, None, None]
    torch.testing.assert_close(model.get_submodule("norm1")(features), expected)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "parameters", "first"),
    [
        ("resnet10", {}, "bn1"),
        ("resnet20", {"norm": "group"}, "bn1"),
        ("convnet", {"width": 4}, None),
        ("torchvision", {"arch": "vgg11_bn"}, "features.1"),
        ("torchvision", {"arch": "resnet18"}, "bn1"),
    ],
)
def test_blocks_are_found_in_all_kinds_of_models(name: str, parameters: dict[str, Any], first: str | None) -> None:
    model = build_model(name, parameters, (3, 32, 32), 10, seed=0)
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, nn.GroupNorm))]
    blocks = conv_norm_blocks(model)
    assert len(blocks) == len(norms) > 0
    assert first in (None, blocks[0])
    locked = KeyLock(length=4, blocks=(0, len(blocks) - 1)).adapt_model(model)
    assert len(private_names(locked)) == 10
    assert locked(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_a_model_without_norms_cannot_be_locked() -> None:
    with pytest.raises(UserError, match="found 0 convolutions followed by a normalisation"):
        KeyLock().adapt_model(build_model("lenet", {}, (1, 8, 8), 10, seed=0))


def test_an_update_has_no_private_tensor_and_the_state_has_all() -> None:
    runtime, sent = hosted(parsed())
    assert not private_names(runtime.arm("locked").model) & (sent.weights.keys() | sent.buffers.keys())
    partial, report = played(runtime, sent, [0, 1], {})
    states = {client: state[PRIVATE] for client, state in report.states.items()}
    for state in states.values():
        assert state.keys() == LOCK | {KEY}
        assert not holds(partial, state)
    assert not torch.equal(states[0][KEY], states[1][KEY])
    before = runtime.drawn_privately("locked", 0)
    assert torch.equal(before[KEY], states[0][KEY])
    assert not torch.equal(before["norm1.lock.gamma.weight"], states[0]["norm1.lock.gamma.weight"])
    _, again = played(runtime, replace(sent, round=1), [0], report.states)
    assert torch.equal(again.states[0][PRIVATE][KEY], states[0][KEY])
    assert not torch.equal(again.states[0][PRIVATE]["norm1.lock.beta.bias"], states[0]["norm1.lock.beta.bias"])


def test_under_fedsgd_the_lock_takes_the_step_that_its_gradient_says() -> None:
    runtime, sent = hosted(parsed("training={algorithm: fedsgd, batch_size: null, lr: 0.5}"))
    own = runtime.drawn_privately("locked", 2)
    _, report = played(runtime, sent, [2], {})
    weights = {n: w.requires_grad_() for n, w in (sent.weights | {n: own[n] for n in LOCK}).items()}
    task = runtime.task("locked", sent, 2, runtime.parts[2], {})
    buffers = {n: b.clone() for n, b in sent.buffers.items()} | {KEY: own[KEY]}
    logits = functional_call(runtime.arm("locked").model, weights | buffers, (task.data.inputs,))
    F.cross_entropy(logits, task.data.labels).backward()
    state = report.states[2][PRIVATE]
    for name in LOCK:
        torch.testing.assert_close(state[name], own[name].detach() - 0.5 * weights[name].grad)


ATTACK = AttackSpec(name="inverting_gradients", observes="gradient")


def seen(runtime: ClientWorker, sent: Sent, victim: int, states: dict[int, Any], **changes: Any) -> Observation:
    observation, _ = ObservationBuilder(runtime).observe(
        ClientVisit("locked", sent, victim, states), ATTACK.model_copy(update=changes)
    )
    return observation


@pytest.mark.parametrize("observes", ["gradient", "update"])
@pytest.mark.parametrize("round", [0, 1])
def test_an_attacker_meets_a_random_part_and_the_secrets_that_he_was_given(observes: str, round: int) -> None:
    runtime, sent = hosted(parsed())
    sent = replace(sent, round=round)
    states = played(runtime, sent, [0, 1], {})[1].states if round else {}
    own = states[0][PRIVATE] if round else runtime.drawn_privately("locked", 0)
    key, lock = {KEY: own[KEY]}, {name: own[name] for name in LOCK}
    sees: dict[str, Any] = {"observes": observes}
    blind = seen(runtime, sent, 0, states, **sees)
    assert not holds(blind, own)
    assert blind.buffers.keys() >= LOCK | {KEY}
    assert not LOCK & (blind.update.keys() | blind.weights.keys())
    assert torch.equal(blind.buffers[KEY], seen(runtime, sent, 1, states, **sees).buffers[KEY])
    colluding = seen(runtime, sent, 0, states, knowledge=["colluder"], **sees)
    assert not holds(colluding, own)
    assert holds(colluding, {KEY: runtime.drawn_privately("locked", 1)[KEY]})
    with_key = seen(runtime, sent, 0, states, knowledge=["key"], **sees)
    assert holds(with_key, key)
    assert not holds(with_key, lock)
    with_lock = seen(runtime, sent, 0, states, knowledge=["lock"], **sees)
    assert holds(with_lock, lock)
    assert not holds(with_lock, key)
    assert with_lock.update.keys() >= LOCK
    both = seen(runtime, sent, 0, states, knowledge=["key", "lock"], **sees)
    for name in LOCK | {KEY}:
        assert torch.equal({**both.weights, **both.buffers}[name], own[name])


@pytest.mark.engine
@pytest.mark.parametrize("attack", [{"name": "dlg", "restarts": 1}, "grnn", "inverting_gradients", "ggl"])
def test_the_papers_attacks_put_what_they_are_given_into_the_gap(attack: Any, tmp_path: Path) -> None:
    given = {"name": attack} if isinstance(attack, str) else attack
    if attack == "ggl":
        torch.manual_seed(0)
        save_generator(tmp_path / "g.pt", Generator((1, 8, 8), 10, latent=4, width=8), Origin({}, "", 0, 0))
        given |= {"generator": str(tmp_path / "g.pt"), "optimiser": "adam"}
    method = AttackSpec.model_validate({**given, "iterations": 2}).build()
    runtime, sent = hosted(parsed())
    states = played(runtime, sent, [0, 1], {})[1].states
    objectives = []
    for knowledge in ([], ["colluder"], ["key"], ["lock"], ["key", "lock"]):
        observation = seen(runtime, sent, 0, states, knowledge=["labels", *knowledge])
        model = build_arm(runtime.specs["locked"], Pixels(1, 8, 8), 10, 0).model
        freeze(model, private_names(model) - observation.weights.keys())
        [found] = method.reconstruct([observation], model, generators(1))
        assert found.status == "ok"
        assert found.images.shape == (1, 1, 8, 8)
        objectives.append(found.loss)
    assert len(set(objectives)) == len(objectives)  # the same start: what differs is the private part


def test_who_is_given_the_key_has_all_while_locks_begin_alike() -> None:
    runtime, sent = hosted(parsed("arms={locked: [{name: key_lock, length: 16, start: common}]}"))
    own, other = (runtime.drawn_privately("locked", client) for client in (0, 1))
    assert not torch.equal(own[KEY], other[KEY])
    assert all(torch.equal(own[name], other[name]) for name in LOCK)
    observation = seen(runtime, sent, 0, {}, knowledge=["key"])
    assert all(torch.equal(observation.buffers[name], own[name]) for name in LOCK | {KEY})
    assert not holds(seen(runtime, sent, 0, {}), {KEY: own[KEY]})


def test_a_malicious_server_learns_nothing_of_the_private_part() -> None:
    runtime, sent = hosted(parsed())
    attack = AttackSpec.model_validate({"name": "imprint", "observes": "gradient", "bins": 8})
    observation, _ = ObservationBuilder(runtime).observe(ClientVisit("locked", sent, 0), attack)
    assert not holds(observation, runtime.drawn_privately("locked", 0))
    assert any(name.startswith("imprint.") for name in observation.update)
    assert not any(".lock." in name for name in observation.update)
    model = runtime.arm("locked").model
    [found] = attack.build().reconstruct([observation], model, generators(1))
    assert found.status == "ok"


def test_victims_whose_keys_are_known_are_not_attacked_with_each_others() -> None:
    runtime, sent = hosted(parsed())
    observations = [seen(runtime, sent, victim, {}, knowledge=["key", "lock"]) for victim in (0, 1)]
    groups: list[int] = []

    def attack(group: Any, generators: Any) -> Any:
        groups.append(len(group))
        model = build_arm(runtime.specs["locked"], Pixels(1, 8, 8), 10, 0).model
        freeze(model, private_names(model) - group[0].weights.keys())
        return InvertingGradients(iterations=1).reconstruct(group, model, generators)

    in_groups(attack, observations, generators(2))
    assert groups == [1, 1]
    blind = [seen(runtime, sent, victim, {}) for victim in (0, 1)]
    in_groups(attack, blind, generators(2))
    assert groups == [1, 1, 2]


def test_members_are_evaluated_with_their_own_part_and_non_members_with_none() -> None:
    runtime, sent = hosted(parsed())
    states = played(runtime, sent, [0, 1], {})[1].states
    images, labels = runtime.test_data()
    model = runtime.arm("locked").model.eval()

    def accuracy(private: Named) -> float:
        logits = functional_call(model, {**sent.weights, **sent.buffers, **private}, (images,))
        return (logits.argmax(1) == labels).double().mean().item()

    after = replace(sent, round=1)
    member = runtime.evaluate_member("locked", after, 1, states[1], ["test", "train"])
    assert member["test"][1] == pytest.approx(accuracy(states[1][PRIVATE]))
    non_member = runtime.drawn_privately("locked", "stranger", 1)
    mean = {name: (states[0][PRIVATE][name] + states[1][PRIVATE][name]) / 2 for name in LOCK}
    zero = {name: torch.zeros_like(t) for name, t in mean.items()}
    expected = accuracy(non_member), accuracy(non_member | mean), accuracy(non_member | zero)
    assert runtime.evaluate_non_member("locked", after, list(states.values())) == pytest.approx(expected)


@component
class Settling(Defence):
    """Lets the private part learn for an epoch whenever weights arrive."""

    private_epochs: int = 1


def test_arriving_weights_are_met_by_a_private_part_that_has_settled() -> None:
    stack = "arms={locked: [{name: key_lock, length: 16}, {name: 'tests.models.test_private:Settling'}]}"
    runtime, sent = hosted(parsed(stack))
    states = played(runtime, sent, [0], {})[1].states
    first = runtime.task("locked", sent, 0, runtime.parts[0], states[0])
    later = runtime.task("locked", replace(sent, round=1), 0, runtime.parts[0], states[0])
    for name, tensor in {**first.weights, **first.buffers}.items():
        same = torch.equal(tensor, {**later.weights, **later.buffers}[name])
        assert same is (name not in LOCK), name


def test_clients_with_private_layers_do_not_train_in_one_vmap_call() -> None:
    with pytest.raises(UserError, match="vectorise"):
        hosted(parsed("training.vectorise=vmap", "model.batch_norm=eval"))


def assert_same(a: Any, b: Any) -> None:
    pairs = list(zip(tensors_in(a), tensors_in(b), strict=True))
    assert pairs
    assert all(torch.equal(x, y) for x, y in pairs)


def saved_by(run: Any) -> checkpoint.Checkpoint:
    saved = checkpoint.load(run)
    assert saved is not None
    return saved


@pytest.mark.engine
def test_a_run_keeps_secrets_from_the_server_and_survives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runner.launch(parsed(), str(tmp_path / "whole"), local, Progress())
    saved, locked = saved_by(whole), checkpoint.load_states(whole, "locked", range(4), 3)
    secrets = {f"{c}.{n}": t for c, state in locked.items() for n, t in state[PRIVATE].items()}
    assert len(secrets) == 4 * 5
    assert not holds(saved.server, secrets)
    assert not checkpoint.load_states(whole, "none", range(4), 3)
    rounds, clients = (whole.read_table(name).to_pylist() for name in ("rounds", "clients"))
    last = [row for row in clients if row["arm"] == "locked" and row["round"] == 2]
    [row] = [row for row in rounds if row["arm"] == "locked" and row["round"] == 2]
    assert row["test_accuracy"] == pytest.approx(sum(r["test_accuracy"] for r in last) / 4)
    assert row["non_member_accuracy"] is not None
    assert row["train_accuracy"] is not None
    assert all(r["test_accuracy"] is None for r in clients if r["arm"] == "none")

    class Interrupting(Progress):
        def round_done(self, *arguments: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.launch(parsed(), str(tmp_path / "half"), local, Interrupting())
    [half] = (tmp_path / "half").iterdir()
    again = runner.resume(str(half), local, Progress())
    resumed = saved_by(again)
    assert_same(resumed.server, saved.server)
    assert_same(checkpoint.load_states(again, "locked", range(4), 3), locked)
