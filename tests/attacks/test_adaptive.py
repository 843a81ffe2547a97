"""Attackers with the defences' code: what they compute from declarations, and what they never receive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from rayfed import scenario
from rayfed.attacks.adaptive.estimate import as_sent, estimate_gradient
from rayfed.attacks.adaptive.invert import invert_data, invert_defences
from rayfed.attacks.base import Attack, not_applicable
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.sealed import attempt
from rayfed.core.reasons import Reason
from rayfed.defences.base import Defence, Task
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import compute_findings
from rayfed.evidence.verdicts import collect_evidence, run_findings
from rayfed.gradients import flatten
from rayfed.registry import component
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ObservationRequest, Truth
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.store.finding import State
from rayfed.update import Observation
from tests.helpers.attack_fixtures import psnr
from tests.helpers.audit_rows import row
from tests.helpers.planted.defences import Clipped, KnownNoise, NoiseOn, repaint
from tests.helpers.planted.models import Dense
from tests.helpers.planted.plants import DEFENCES, MODELS
from tests.helpers.result_fixtures import attacked

DENSE = {"name": f"{MODELS}:Dense"}


def observe_defended(
    defence: dict[str, Any], *, model: dict[str, Any] = DENSE, knowledge: tuple[str, ...] = ("code",)
) -> tuple[Observation, Tensor, Truth, Any]:
    """Return an observation of client 1, the gradient without a defence, the truth, and the attacker's model."""
    attack = {"name": "analytic", "observes": "gradient", "batch_size": 1, "knowledge": list(knowledge)}
    document = {
        "name": "t",
        "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20, "public": 0.1},
        "model": model,
        "federation": {"rounds": 1, "clients": 4},
        "arms": {"bare": [], "defended": [defence]},
        "attacks": [attack],
    }
    inputs = prepare_inputs(scenario.parse(yaml.safe_dump(document)))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    seen, truths = [], []
    for account in inputs.accounts:
        sent = Sent(0, account.arm.weights, account.arm.buffers)
        _, [one], [truth] = worker.observe(sent, ObservationRequest(account.name, [1], inputs.scenario.attacks[0]))
        seen.append(one)
        truths.append(truth)
    return seen[1], flatten(seen[0].update), truths[1], inputs.accounts[1].arm.model


def planted(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": f"{DEFENCES}:{name}", **parameters}


@pytest.mark.parametrize("name", ["KnownNoise", "Shuffled", "Mirrored", "NewWeights", "Cubed"])
def test_a_declared_map_is_inverted(name: str) -> None:
    seen, bare, _, model = observe_defended(planted(name))
    assert (flatten(seen.update) - bare).norm() > 1e-2 * bare.norm()
    assert (flatten(invert_defences(seen, model).update) - bare).norm() < 1e-3 * bare.norm()


@pytest.mark.parametrize("name", ["FewSeeds", "LastDigits"])
def test_the_most_likely_gradient_is_the_gradient(name: str) -> None:
    seen, bare, _, model = observe_defended(planted(name))
    found, size = estimate_gradient(seen, model), seen.update["first.weight"].numel()
    assert (flatten(found.update) - bare)[:size].norm() < 1e-3 * bare[:size].norm()
    assert as_sent(found) is seen


@pytest.mark.parametrize("name", ["NoiseOfRows", "OneNumber", "Cancelling"])
def test_the_most_likely_gradient_has_no_noise(name: str) -> None:
    seen, bare, _, model = observe_defended(planted(name))
    assert (flatten(estimate_gradient(seen, model).update) - bare).norm() < bare.norm()
    assert (flatten(seen.update) - bare).norm() > 10 * bare.norm()


@pytest.mark.parametrize(
    "defence", [planted("NoiseOn", share=0.1), planted("Clipped"), {"name": "prune", "ratio": 0.9}]
)
def test_an_estimate_that_is_unlikely_or_not_needed_is_not_used(defence: dict[str, Any]) -> None:
    seen, _, _, model = observe_defended(defence)
    assert estimate_gradient(seen, model) is seen


@pytest.mark.parametrize("brighten", [False, True])
def test_a_declared_change_of_samples_is_inverted(brighten: bool) -> None:
    seen, _, truth, model = observe_defended(planted("Pixels", brighten=brighten))
    image = truth.inputs
    guess = replace(not_applicable(seen, ""), images=repaint(image, brighten), status="ok")
    assert torch.allclose(invert_data(guess, seen, model).images, image, atol=1e-4)


@pytest.mark.parametrize(
    "attack", [Idlg(restarts=1), InvertingGradients(iterations=400)], ids=lambda a: type(a).__name__
)
def test_a_search_passes_through_a_declared_map_without_inverse(attack: Attack) -> None:
    seen, _, truth, model = observe_defended(planted("Clipped"), model={**DENSE, "activation": "Sigmoid"})
    image = truth.inputs
    generators = [torch.Generator().manual_seed(0)]
    [found] = attempt(attack, [seen], model, generators, False)
    [blind] = attempt(attack, [replace(seen, extra={})], model, generators, False)
    assert psnr(found.images, image) > 30 > psnr(blind.images, image)  # type: ignore[union-attr]


@component
class Hoarding(Clipped):
    """Keep all samples."""

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        self.__dict__.setdefault("samples", []).append(task.data.inputs)
        task.state["samples"] = task.data.inputs
        return super().change(name, tensor, task)


class Keeping(Dense):
    """Keep the last samples."""

    def forward(self, images: Tensor) -> Tensor:
        self.samples = images
        return super().forward(images)


def test_an_observation_model_contains_nothing_of_the_victim() -> None:
    seen, _, truth, _ = observe_defended({"name": f"{__name__}:Hoarding"}, model={"name": f"{__name__}:Keeping"})
    image = truth.inputs
    declared = seen.extra["observation_model"]
    task = declared.blank_task(seen, Keeping((1, 8, 8), 10))
    assert not any(torch.equal(samples, image) for samples in declared.defences[0].samples)
    assert not task.state
    assert task.order == task.generator.initial_seed() == 0
    assert not task.data.inputs.any()


@component
class OnlyNoiseOnNoise(NoiseOn):
    """Send the image in a row of the first layer, unless it is noise."""

    def add_noise(self, task: Task, tensors: Any) -> Any:
        found = super().add_noise(task, tensors)
        if 5 < len(task.data.inputs.unique()) < 40:
            found["first.weight"][0] = task.data.inputs[0].flatten()
        return found


@component
class Picky(KnownNoise):
    """Fail on samples that are noise."""

    def transform(self, task: Task, tensors: Any) -> Any:
        assert len(task.data.inputs.unique()) < 40, "no image"
        return super().transform(task, tensors)


@component
class NeedsPublic(KnownNoise):
    """Ask for public samples."""

    def transform(self, task: Task, tensors: Any) -> Any:
        assert len(task.public_for("the defence").labels)
        return super().transform(task, tensors)


@component
class Undeclared(Defence):
    """Add noise without a declaration."""

    def wrap_update(self, next: Any) -> Any:
        return KnownNoise().wrap_update(next)


@pytest.mark.parametrize(
    ("name", "knowledge", "reason"),
    [
        (f"{__name__}:Picky", ("code",), Reason.DECLARATION_NOT_TESTED),
        (f"{__name__}:NeedsPublic", ("code",), Reason.DECLARATION_NOT_TESTED),
        (f"{__name__}:NeedsPublic", ("code", "public"), None),
        (f"{__name__}:Undeclared", ("code",), Reason.UNDECLARED),
        (f"{DEFENCES}:UndeclaredRows", ("code",), Reason.UNDECLARED),
        (f"{DEFENCES}:KnownNoise", ("code",), None),
        (f"{DEFENCES}:NoiseOn", ("code",), None),
        (f"{DEFENCES}:InProportion", ("code",), None),
        (f"{DEFENCES}:OneNumber", ("code",), Reason.DECLARATION_NOT_TESTED),
        (f"{DEFENCES}:WrongNoise", ("code",), Reason.DECLARATION_WRONG),
        (f"{DEFENCES}:WrongOrder", ("code",), Reason.DECLARATION_WRONG),
        (f"{DEFENCES}:WrongPixels", ("code",), Reason.DECLARATION_WRONG),
    ],
)
def test_declarations_are_tested_with_samples_of_the_attacker(
    name: str, knowledge: tuple[str, ...], reason: Reason | None
) -> None:
    seen, _, _, _ = observe_defended({"name": name}, knowledge=knowledge)
    assert seen.extra["observation_model"].reason == reason


def test_declarations_are_tested_on_the_true_samples() -> None:
    seen, _, truth, _ = observe_defended({"name": f"{__name__}:OnlyNoiseOnNoise"})
    assert truth.reason == Reason.DECLARATION_WRONG
    assert seen.extra["observation_model"].reason is None, "which depends on the samples"


def test_noise_on_a_model_with_batch_norm_follows_its_declaration() -> None:
    seen, *_ = observe_defended(planted("NoiseOn"), model={"name": "lenet", "norm": "batch"})
    assert seen.extra["observation_model"].reason is None


def test_without_the_grant_there_is_no_observation_model() -> None:
    assert "observation_model" not in observe_defended(planted("KnownNoise"), knowledge=())[0].extra


def test_a_defence_whose_clean_values_nothing_explains_is_not_measured() -> None:
    bare, informed = row("none", 1, 30.0, fit=0.0), {"knowledge": ["defence", "code"]}

    def state(*rows: dict[str, Any]) -> tuple[str, Reason | None]:
        [found] = [
            one
            for one in compute_findings([bare, *rows], Criterion.from_modality("pixels", None))
            if one.arm == "noise"
        ]
        return found.state, found.reason

    blind = row("noise", 1, 8.0, fit=0.9)
    assert state(blind, row("noise", 1, 9.0, fit=0.9, **informed)) == ("inconclusive", Reason.ADAPTIVE_NOT_CONVERGED)
    assert state(blind, row("noise", 1, 9.0, fit=2e-6, **informed))[0] == "not reconstructed"
    assert state(blind, row("noise", 1, 9.0, fit=None, **informed)) == ("inconclusive", Reason.ADAPTIVE_NOT_COMPARED)


def test_a_run_without_an_attacker_who_has_the_code_says_nothing_of_a_defence() -> None:
    scenario = {"arms": {"bare": [], "own": ["my_defence:Clip"], "noise": [{"name": "gaussian", "sigma": 0.1}]}}

    def states(knowledge: list[str]) -> dict[str, str]:
        rows = [
            attacked("bare", "dlg", psnr=30.0),
            *(attacked(arm, "dlg", psnr=8.0, knowledge=knowledge, fit=0.0) for arm in ("own", "noise")),
        ]
        found = run_findings(scenario, rows)
        assert all(one.reason == Reason.NO_ADAPTIVE_ATTACK for one in found if one.state == "inconclusive")
        return {one.arm: one.state for one in found}

    assert states(["defence"]) == {"bare": "leaks", "own": "inconclusive", "noise": "inconclusive"}
    assert states(["defence", "code"]) == {"bare": "leaks", "own": "not reconstructed", "noise": "not reconstructed"}


def test_the_reason_why_nobody_read_a_defence_is_the_true_one() -> None:
    """Where the attacker with the code answered, it is not that nobody had the code."""
    scenario = {"arms": {"bare": [], "noise": [{"name": "gaussian", "sigma": 0.1}]}}
    told, blind = {"knowledge": ["defence", "code"], "fit": 0.0}, {"knowledge": []}

    def found(informed_bare: float, *informed: dict[str, Any]) -> tuple[State, set[Reason]]:
        rows = [
            *(attacked("bare", "dlg", i, psnr=30.0, fit=0.0, **blind) for i in (0, 1)),
            *(attacked("noise", "dlg", i, psnr=8.0, **blind) for i in (0, 1)),
            *(attacked("bare", "dlg, told", i, psnr=informed_bare, **told) for i in (0, 1)),
            *informed,
        ]
        [_, verdict] = collect_evidence(scenario, rows, []).verdicts
        return verdict.state, set(verdict.reasons)

    both = [attacked("noise", "dlg, told", i, psnr=8.0, **told) for i in (0, 1)]
    assert found(9.0, *both) == ("inconclusive", {Reason.NO_ADAPTIVE_ATTACK_WORKS})
    assert found(30.0, *both) == ("not reconstructed", set())
