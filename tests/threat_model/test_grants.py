"""Threat models: an attacker sees what the protocol shows and what its grants declare, and nothing else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.attacks.base import not_applicable
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.sealed import attempt
from rayfed.errors import ScenarioError, UserError
from rayfed.evidence.attack_results import attack_input
from rayfed.registry import component
from rayfed.report.text.attacks import attack_input_text
from rayfed.runs import runner
from rayfed.scenario import AttackSpec, ResolvedArm
from rayfed.simulation.client import plan
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ClientVisit, ObservedClient, Truth
from rayfed.simulation.executors.attacker import AttackWorker
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.threat_model.grants.base import Grant
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.threat_model.views import View, VisibleUpdate
from rayfed.update import Named, Observation, Update
from tests.conftest import REPOSITORY

GRANTS = sorted(registry.table("grants"))
OF_PRIVATE = {name for name in GRANTS if registry.find("grants", name).of_private}
"""The grants that say what becomes of a private part; all others leave the protocol's fields alone."""
TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 120, test_samples: 40, public: 0.1}
model: {name: lenet, norm: batch}
federation: {rounds: 1, clients: 3, validation: 0.2}
arms:
  locked: [{name: key_lock, length: 8}, {name: prune, ratio: 0.5}]
  ckks: {defences: [{name: prune, ratio: 0.5}], protection: ckks}
  masked: {defences: [{name: prune, ratio: 0.5}], protection: secure_aggregation}
  short:
    defences: [{name: prune, ratio: 0.5}]
    protection: {name: paillier, key_bits: 128, insecure: true, bits: 32}
  boosted: {defences: [{name: soteria, ratio: 0.5}], model: {norm: none}, aggregation: fedboosting}
  averaged: {defences: [{name: soteria, ratio: 0.5}], model: {norm: none}}
"""
SEALED = ("ckks", "masked", "short")
"""The arms of which a server sees no update."""


@pytest.fixture(scope="module")
def seen() -> Any:
    """Client 0 of an arm as an attack with some knowledge observes it."""
    inputs = prepare_inputs(scenarios.parse(TEXT))
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)

    def observe(*knowledge: str, arm: str = "locked", **settings: Any) -> Observation:
        sent = Sent(0, runtime.arm(arm).weights, runtime.arm(arm).buffers, keys=runtime.make_keys(arm))
        raw = {"name": "model_inversion", "cut": "conv1", "knowledge": list(knowledge), "observes": "gradient"}
        attack = AttackSpec.model_validate({**raw, "batch_size": 3, **settings})
        return ObservationBuilder(runtime).observe(ClientVisit(arm, sent, 0), attack)[0]

    return observe


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


SOME = [names for size in (0, 1, 2, len(GRANTS)) for names in combinations(GRANTS, size)]
FEW = [names for names in SOME if len(names) != 2]


KEYS = {"norm1.lock.key"}
LOCK = {f"norm1.lock.{layer}.{name}" for layer in ("gamma", "beta") for name in ("weight", "bias")}
PRIVATE = {"key": KEYS, "lock": LOCK, "lock_weights": LOCK, "colluder": KEYS | LOCK}
"""Tensors of the arm `locked` on which a grant has a say; on all others none has."""


def differing(one: Any, other: Any) -> set[str]:
    """Names of the tensors in which two fields of observations differ; of other fields `whole`."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if same(one, other) else {"whole"}
    return {name for name in {**one, **other} if not same(one.get(name), other.get(name))}


def protocol(observation: Observation) -> dict[str, Any]:
    """What the protocol shows; of a sealed update, whose seal is drawn anew each time, what is to be read."""
    shown = {f.name: getattr(observation, f.name) for f in fields(Observation) if f.name not in ("labels", "extra")}
    sealed: Any = observation.sealed
    return {**shown, "sealed": sealed and (type(sealed), sealed.tensors, sealed.buffers, sealed.round)}


@pytest.mark.parametrize("observes", registry.table("views"))
@pytest.mark.parametrize("arm", ["locked", "boosted", "averaged", *SEALED])
@pytest.mark.engine
def test_an_attacker_receives_what_protocol_and_grants_declare_and_nothing_else(
    arm: str, observes: str, seen: Any
) -> None:
    """Whatever it is given, `labels` and `extra` hold what its grants declare, each as if it were given alone; of the
    protocol's fields it sees what it sees without, but for the private tensors on which its grants have a say.
    """
    own = {"arm": arm, "observes": observes, "batch_size": 3 if observes == "gradient" else 1}
    plain, alone = seen(**own), {name: seen(name, **own) for name in GRANTS}
    assert plain.labels is None
    assert not plain.extra
    for names in SOME if arm == "locked" else FEW:
        observation = seen(*names, **own)
        declared = {filled for name in names for filled in registry.find("grants", name).fills}
        assert (observation.labels is not None) == ("labels" in declared)
        assert set(observation.extra) == declared - {"labels"}
        for name in names:
            for filled in set(registry.find("grants", name).fills) - {"labels"}:
                assert same(observation.extra[filled], alone[name].extra[filled]) or "lock" in names, filled
        private = set[str]().union(*(PRIVATE[name] for name in names if name in PRIVATE and arm == "locked"))
        for field, shown in protocol(observation).items():
            assert differing(shown, protocol(plain)[field]) <= private, (names, field)


def test_the_values_of_a_lock_come_without_key_and_gradient(seen: Any) -> None:
    plain, granted, lock = seen(), seen("lock_weights"), seen("lock")
    assert all(same(granted.buffers[name], lock.weights[name]) for name in LOCK)
    assert all(not same(granted.buffers[name], plain.buffers[name]) for name in LOCK)
    assert all(same(granted.buffers[name], plain.buffers[name]) for name in KEYS)
    assert not LOCK & granted.update.keys()


@pytest.mark.engine
def test_an_attacker_is_told_of_the_defences_that_are_part_of_the_architecture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, attack = dict[str, ResolvedArm](), AttackWorker.attack

    def spied(self: AttackWorker, spec: AttackSpec, arm: ResolvedArm, *rest: Any) -> Any:
        told[arm.name] = arm
        return attack(self, spec, arm, *rest)

    monkeypatch.setattr(AttackWorker, "attack", spied)
    arms = (
        "arms: {locked: [{name: key_lock, length: 8}, {name: prune, ratio: 0.5}], noisy: [{name: gaussian, sigma: 1}]}"
    )
    malicious = "federation.malicious={name: sign_flip, clients: [2]}"
    scenario = scenarios.parse(
        f"{TEXT.partition('arms:')[0]}{arms}\nattacks: [{{name: dlg, iterations: 1}}]\n", changes=[malicious]
    )
    runner.launch(scenario, str(tmp_path), local, Progress())
    assert {name: [d.name for d in arm.defences] for name, arm in told.items()} == {"locked": ["key_lock"], "noisy": []}
    assert {arm.malicious for arm in told.values()} == {None}


def test_the_order_of_knowledge_does_not_matter(seen: Any) -> None:
    one, other = seen(*GRANTS), seen(*reversed(GRANTS))
    for field in fields(Observation):
        assert same(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize("arm", SEALED)
def test_what_is_granted_beside_a_sealed_update_says_nothing_of_its_values(
    arm: str, seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the client would send, the same is granted."""
    of_all = [name for name in GRANTS if name not in OF_PRIVATE]
    answer = ObservedClient.answer

    def other(observed: ObservedClient) -> Update:
        sent = answer(observed)
        return replace(sent, tensors={name: t.flip(0) for name, t in sent.tensors.items()})

    known = seen(*of_all, arm=arm, batch_size=1)
    monkeypatch.setattr(ObservedClient, "answer", other)
    instead = seen(*of_all, arm=arm, batch_size=1)
    assert known.sealed is not None
    assert not known.update
    assert [name for name in known.extra if not same(known.extra[name], instead.extra[name])] == []


class Noted(Idlg):
    """Keeps what it is shown."""

    def reconstruct(self, observations: Sequence[Observation], *rest: Any) -> list[Any]:
        self.shown = list(observations)
        return [replace(not_applicable(o, ""), status="ok") for o in observations]


def test_who_opens_an_update_sees_then_what_defences_left_alone(seen: Any) -> None:
    sealed, method = seen("defence", arm="short"), Noted()
    assert sealed.sealed is not None
    [found] = attempt(method, [sealed], torch.nn.Identity(), [torch.Generator()], factor=True)
    [opened] = method.shown
    assert found.status == "ok"
    assert same(opened.extra["defence"], {name: t != 0 for name, t in opened.update.items()})
    kept = sum(int(mask.sum()) for mask in opened.extra["defence"].values())
    assert 0 < kept <= 0.6 * sum(t.numel() for t in opened.update.values())


def test_where_clients_are_shown_nothing_no_value_is_granted(seen: Any) -> None:
    shown = seen("defence", arm="averaged", observes="shown", batch_size=1)
    assert not shown.update
    assert callable(shown.extra["defence"])


@component
class Loss(Grant):
    """The victim's training loss."""

    describe: ClassVar[str] = "the training loss"
    fills: ClassVar[tuple[str, ...]] = ("loss",)

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        return {"loss": update.loss}


@component
class Chatty(Loss):
    """Declares one thing and gives another."""

    fills: ClassVar[tuple[str, ...]] = ("losses",)


@component
class Forger(Loss):
    """Goes by the name of a field of the protocol."""

    fills: ClassVar[tuple[str, ...]] = ("update",)

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        return {"update": truth.inputs}


def test_a_grant_of_ones_own_is_named_by_its_path(seen: Any) -> None:
    plain, known = seen(), seen("tests.threat_model.test_grants:Loss")
    assert known.extra.keys() == {"loss"}
    assert known.extra["loss"] > 0
    assert not plain.extra


def test_what_a_grant_does_not_declare_is_refused(seen: Any) -> None:
    with pytest.raises(UserError, match=r"test_grants:Chatty' returns loss"):
        seen("tests.threat_model.test_grants:Chatty")


@component
class Whisperer(Grant):
    """Declares nothing, and gives the victim's own lock."""

    describe: ClassVar[str] = "nothing"

    def supposes(self, observed: ObservedClient) -> Named:
        return observed.trained(observed.client)


def test_who_gives_private_parts_says_so(seen: Any) -> None:
    with pytest.raises(UserError, match=r"test_grants:Whisperer' uses private layers.*`of_private`"):
        seen("tests.threat_model.test_grants:Whisperer")


@component
class Betrayer(View):
    """Shows the victim's images beside its update."""

    describe: ClassVar[str] = "too much"

    def shows(self, observed: ObservedClient, answer: Update) -> VisibleUpdate:
        images = observed.asked().data.inputs
        return VisibleUpdate(replace(answer, tensors={**answer.tensors, "images": images}))


def test_a_view_shows_tensors_of_the_clients_answer_alone(seen: Any) -> None:
    with pytest.raises(UserError, match=r"test_grants:Betrayer' returns tensors whose names or shapes differ"):
        seen(observes="tests.threat_model.test_grants:Betrayer", batch_size=1)


def test_no_grant_reaches_a_field_of_the_protocol(seen: Any) -> None:
    plain, forged = seen(), seen("tests.threat_model.test_grants:Forger")
    assert forged.extra.keys() == {"update"}
    assert same(forged.update, plain.update)


def test_observations_are_built_in_one_place() -> None:
    """In a run; elsewhere are copies with less, or with what an attacker made. `given` builds those of other runs."""
    found = [
        (path.relative_to(REPOSITORY).as_posix(), call.lineno)
        for room in ("rayfed", "actors")
        for path in (REPOSITORY / room).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "Observation"
    ]
    assert sorted(path for path, _ in found) == [
        "rayfed/attacks/external_update.py",
        "rayfed/threat_model/grants/code.py",  # without an update, to test a declaration
        "rayfed/threat_model/observations.py",
    ], found


def test_no_two_grants_fill_the_same() -> None:
    filled = [name for grant in GRANTS for name in registry.find("grants", grant).fills]
    assert len(filled) == len(set(filled))


@pytest.mark.parametrize(("kind", "base"), [("grants", Grant), ("views", View)])
def test_who_involves_others_says_so(kind: str, base: type) -> None:
    for name in registry.table(kind):
        found = registry.find(kind, name)
        assert found.involves_others == (found.involves is not base.involves), name  # type: ignore[attr-defined]


def test_whose_work_is_made_again() -> None:
    s = scenarios.parse(TEXT.replace("clients: 3", "clients: 9, clients_per_round: 4"))
    drawn = plan.drawn_clients(s, 0)

    def behind(**settings: Any) -> list[int]:
        return plan.behind(s, AttackSpec.model_validate({"name": "dlg", **settings}), 0, drawn[2:])

    assert behind() == behind(knowledge=["key"], observes="gradient") == drawn[2:]
    assert behind(knowledge=["colluder"]) == [*drawn[2:], drawn[0]]
    assert sorted(behind(observes="shown")) == drawn


def test_names_and_words_are_known_without_pytorch() -> None:
    code = """
import sys
from rayfed import registry
from rayfed.scenario import has_form
for kind in ("grants", "views"):
    assert all(registry.find(kind, name).describe for name in registry.table(kind))
assert has_form("name: t\\nfederation: {rounds: 1, clients: 2}\\nattacks: [{name: dlg, knowledge: [labels, lock]}]")
assert not has_form("name: t\\nfederation: {rounds: 1, clients: 2}\\nattacks: [{name: dlg, knowledge: [lables]}]")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("name", "words"), [*((g, registry.find("grants", g).describe) for g in GRANTS), ("a:B", "a:B")]
)
def test_reports_say_what_is_granted_in_its_own_words(name: str, words: str) -> None:
    """Code that a table names is not imported: it may be anybody's."""
    row = {"batch_size": 4, "observes": "shown", "knowledge": ["labels", name]}
    assert (
        attack_input_text(attack_input([row])) == f"the shown update or mixture of 4 samples and the labels and {words}"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("knowledge: [lables]", r"attacks.0.knowledge.0: .*unknown grant 'lables': did you mean 'labels'"),
        ("knowledge: [no.such:Grant]", r"attacks.0.knowledge.0: .*cannot import 'no.such'"),
        ("knowledge: ['rayfed.attacks.matching.dlg:Dlg']", r"attacks.0.knowledge.0: .*grant.*grant\(\)"),
        ("observes: gradients", r"attacks.0.observes: .*unknown view 'gradients': did you mean 'gradient'"),
    ],
)
def test_a_threat_model_that_there_is_not(setting: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        scenarios.parse(TEXT + f"attacks: [{{name: dlg, {setting}}}]\n")


def test_a_grant_of_the_documents_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Any) -> None:
    page = (REPOSITORY / "docs" / "threat-models.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Loss" in block]
    (tmp_path / "my_grants.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert np.isclose(seen("my_grants:Loss").extra["loss"], seen("tests.threat_model.test_grants:Loss").extra["loss"])
