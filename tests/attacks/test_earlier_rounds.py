"""Attacks that look back: one client's answers to the same samples in several rounds, matched together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfed import scenario as scenarios
from rayfed.attacks.inference.labels import with_labels
from rayfed.attacks.matching.distances import one_minus_cosine, squared_l2
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.relative import RelativeVariation
from rayfed.attacks.matching.sent import Sent
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.defences.prune import Prune
from rayfed.defences.quantise import Quantise
from rayfed.errors import RunError, ScenarioError, UserError
from rayfed.gradients import buffers_of, flatten, gradient, weights_of
from rayfed.registry import component
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.simulation.client import server_message as server
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.local import local
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.store.folder import RunFolder
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Named, Observation, Update
from tests.helpers.attack_fixtures import digit, leaky_lenet, observe, observed, psnr, seeded
from tests.helpers.progress_fixtures import Interrupted
from tests.helpers.run_fixtures import assert_same_bits, weights

LOOKS = "{name: idlg, observes: gradient, rounds: [2], victims: 2, iterations: 2, earlier: 2}"
TEXT = f"""
name: t
seed: 5
data: {{name: digits, size: 8, train_samples: 60, test_samples: 20}}
model: {{name: mlp, hidden: [8]}}
training: {{algorithm: fedsgd, batch_size: null, lr: 0.5}}
federation: {{rounds: 3, clients: 4}}
arms: {{none: [], noisy: [{{name: gaussian, sigma: 0.1}}]}}
attacks: [{LOOKS}]
"""


def parsed(*changes: str) -> Scenario:
    return scenarios.parse(TEXT, changes=changes)


def seen_in_rounds(count: int, noise: float = 0.0, known: bool = True) -> tuple[torch.nn.Module, Observation]:
    """The gradients of one digit at several weights, the first of which is the attacked round's."""
    draws = seeded(7)[0]
    rounds = []
    for number in range(count):
        seen = observe(leaky_lenet((1, 8, 8), seed=number), digit(3), torch.tensor([3]), known)
        noisy = {name: t + noise * torch.randn(t.shape, generator=draws) for name, t in seen.update.items()}
        rounds.append(replace(seen, update=noisy, round=count - number))
    return leaky_lenet((1, 8, 8)), replace(rounds[0], earlier=tuple(rounds[1:]))


@pytest.mark.parametrize("distance", [squared_l2, one_minus_cosine])
def test_gradients_of_all_rounds_are_compared_as_one_vector(distance: Any) -> None:
    model, seen = seen_in_rounds(3, noise=0.01)
    problem = Matching.of([seen], model, ["fc.weight", "conv*"], distance)
    images = torch.rand(2, 1, 8, 8, generator=seeded(1)[0])

    def vector(tensors: Named) -> Tensor:
        return flatten({name: tensors[name] for name in problem.targets})

    rounds, each = [seen, *seen.earlier], []
    for image in images:
        parts = [gradient(model, o.weights, o.buffers, image[None], torch.tensor([3]))[0] for o in rounds]
        each.append(torch.cat([vector(part) for part in parts]))
    target = torch.cat([vector(o.update) for o in rounds])
    expected = {
        squared_l2: [(one - target).square().sum() for one in each],
        one_minus_cosine: [1 - torch.cosine_similarity(one, target, 0) for one in each],
    }[distance]
    values = problem.values(images.flatten(1), torch.tensor([0, 0]))
    torch.testing.assert_close(values, torch.stack(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(problem.target_norms(), target.square().sum()[None])


def test_noise_that_is_estimated_is_that_of_all_rounds() -> None:
    _, seen = seen_in_rounds(3, noise=0.05)
    alone, together = (RelativeVariation.of([o], None) for o in (replace(seen, earlier=()), seen))
    clean, noisy = (torch.cat([flatten(o.update) for o in (s, *s.earlier)]) for s in (seen_in_rounds(3)[1], seen))
    assert together.cosines.item() == pytest.approx(torch.cosine_similarity(clean, noisy, 0).item(), abs=0.02)
    assert together.reach == pytest.approx(alone.reach / 3)


def test_three_rounds_tell_three_times_as_much_beside_the_variation() -> None:
    """Ends of searches are compared so, too: else a flat image wins, whose gradients are further off in every round."""
    _, seen = seen_in_rounds(3)
    alone, together = (RelativeVariation.of([o], None) for o in (replace(seen, earlier=()), seen))
    weights = [[one.weight for one in (*prior.weights, prior.judge)] for prior in (alone, together)]
    assert weights[1] == pytest.approx([weight / 3 for weight in weights[0]])


def test_a_quantisers_zeros_are_values_among_several_rounds() -> None:
    """Alone they bound what they stand for; where it was rounded by chance, the mean is right with them only."""
    model = leaky_lenet((1, 8, 8))
    defences = {"levels": Quantise(bits=2, rounding="stochastic"), "cut": Prune(ratio=0.8)}
    seen = {name: observed(model, digit(3), torch.tensor([3]), [defence]) for name, defence in defences.items()}
    bounded = {
        (name, alone): Sent.of([one], list(one.update), torch.float32, model, alone) is not None
        for name, one in seen.items()
        for alone in (True, False)
    }
    assert bounded == {("levels", True): True, ("levels", False): False, ("cut", True): True, ("cut", False): True}


def test_labels_are_those_that_all_rounds_agree_on() -> None:
    model, seen = seen_in_rounds(3, known=False)
    misread = {name: torch.zeros_like(t) for name, t in seen.update.items()}
    misread["fc.bias"][7] = -1e-3
    [alone], [together] = (with_labels([replace(o, update=misread)], model) for o in (replace(seen, earlier=()), seen))
    assert (alone.labels, together.labels) == (torch.tensor([7]), torch.tensor([3]))


def test_rounds_whose_labels_are_not_sure_are_outvoted_by_one_whose_labels_are() -> None:
    model, seen = seen_in_rounds(3, known=False)
    misread = {name: torch.zeros_like(t) for name, t in seen.update.items()}
    misread["fc.bias"][7], misread["fc.bias"][5] = -9e3, -8e3
    unsure = [replace(one, update=misread) for one in seen.earlier]
    [found] = with_labels([replace(seen, earlier=tuple(unsure))], model, soft=True)
    assert torch.equal(found.labels, torch.tensor([3]))
    [found] = with_labels([replace(unsure[0], earlier=(unsure[1],))], model, soft=True)
    assert found.labels.is_floating_point()
    assert found.labels.argmax(1) == 7


def test_a_round_that_is_not_finite_says_nothing_of_the_labels() -> None:
    model, seen = seen_in_rounds(3, known=False)
    broken = {name: t.clone() for name, t in seen.update.items()}
    broken["fc.weight"][0, 0] = torch.nan
    for rounds in ([seen, *seen.earlier], [*seen.earlier, seen]):
        first, *others = [replace(one, update=broken, earlier=()) if one is seen else one for one in rounds]
        [found] = with_labels([replace(first, earlier=tuple(others))], model)
        assert torch.equal(found.labels, torch.tensor([3]))


def client(*changes: str) -> tuple[ClientWorker, list[server.Sent]]:
    """The clients' side, and three rounds' weights."""
    inputs = prepare_inputs(parsed(*changes))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
    model = worker.arm("none").model
    start, buffers = weights_of(model), buffers_of(model)
    return worker, [server.Sent(r, {n: w * 1.1**r for n, w in start.items()}, buffers) for r in range(3)]


def test_a_gradients_batch_is_the_attacked_rounds_in_all() -> None:
    worker, sent = client()
    [attack] = worker.scenario.attacks
    seen, truth = ObservationBuilder(worker).observe(ClientVisit("none", sent[2], 1, {}, tuple(sent[:2])), attack)
    model = worker.arm("none").model
    assert [one.round for one in seen.earlier] == [0, 1]
    for one, at in zip((*seen.earlier, seen), sent, strict=True):
        exact, _ = gradient(model, at.weights, dict(at.buffers), truth.inputs, truth.labels)
        torch.testing.assert_close(one.update, exact)


def test_earlier_updates_are_those_that_were_sent() -> None:
    """With the noise of their own rounds."""
    worker, sent = client("attacks.0.observes=update")
    [attack] = worker.scenario.attacks
    builder = ObservationBuilder(worker)
    seen, _ = builder.observe(ClientVisit("noisy", sent[2], 1, {}, tuple(sent[:2])), attack)
    alone = [builder.observe(ClientVisit("noisy", one, 1), attack)[0] for one in sent]
    for ours, theirs in zip((*seen.earlier, seen), alone, strict=True):
        assert_same_bits(ours.update, theirs.update)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["attacks.0.name=analytic", "attacks.0.iterations=null"], "analytic uses only one round"),
        (["attacks.0.name=two_images"], "two_images uses only one round"),
        (["attacks.0.rounds=[1, 2]"], "earlier: found 2, but only 1 rounds"),
        (["attacks.0.factor=true"], "earlier: cannot be combined with `factor`"),
        (["attacks.0.observes=shown"], "earlier: mixtures of earlier rounds"),
        (["attacks.0.observes=update", "federation.failures={then: drop}"], "earlier: needs updates"),
        (["attacks.0.observes=update", "training.batch_size=8"], r"with 15 samples, .*training\.batch_size"),
        (["attacks.0.observes=update", "federation.clients_per_round=2"], "in which client . is not sampled"),
    ],
)
def test_rounds_that_cannot_be_matched_together_are_refused(changes: Sequence[str], message: str) -> None:
    changes = [change for change in changes if not change.endswith("null")]
    if "attacks.0.name=analytic" in changes:
        changes = [f"attacks=[{LOOKS.replace('idlg', 'analytic').replace('iterations: 2, ', '')}]"]
    with pytest.raises(UserError, match=message):
        prepare_inputs(parsed(*changes))


def test_an_attack_without_a_training_has_no_earlier_rounds(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="2 earlier rounds"):
        runner.attack(parsed(), None, str(tmp_path), local, Progress())


@pytest.mark.parametrize("defence", ["{name: top_k, k: 5, error_feedback: true}", "vae", "split"])
def test_states_of_earlier_rounds_are_refused_before_the_first(defence: str) -> None:
    with pytest.raises(ScenarioError, match="arm 'own' has stateful clients"):
        prepare_inputs(parsed(f"arms={{none: [], own: [{defence}]}}", "model={name: lenet}"))


@component
class Counting(Defence):
    """Keeps a state, and does not say so."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            task.state["rounds"] = task.state.get("rounds", 0) + 1
            return next(task)

        return update


def test_states_of_earlier_rounds_are_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="keeps_state"):
        runner.launch(
            parsed("arms={own: [tests.attacks.test_earlier_rounds:Counting]}"), str(tmp_path), local, Progress()
        )


def begun(out: Path, *changes: str) -> RunFolder:
    with pytest.raises(KeyboardInterrupt):
        runner.launch(parsed(*changes), str(out), local, Interrupted())
    [path] = out.iterdir()
    return RunFolder.open(str(path))


def test_rounds_that_were_not_kept_are_not_looked_back_on(tmp_path: Path) -> None:
    folder = begun(tmp_path, "attacks=[]")
    folder.write_text("scenario.yaml", parsed().dump())
    with pytest.raises(RunError, match="weights of round 0"):
        runner.resume(folder.url, local, Progress(), extend=True)


@pytest.mark.engine
def test_a_resumed_run_looks_back_on_the_same_weights(tmp_path: Path) -> None:
    """Arms that hide their updates keep nothing, and are resumed as well."""
    hidden = "arms.hidden={protection: secure_aggregation}"
    whole = runner.launch(parsed(hidden), str(tmp_path / "a"), local, Progress())
    folder = begun(tmp_path / "b", hidden)
    kept = {name: set(arm["earlier"]) for name, arm in weights(folder).items()}
    assert kept == {"none": {0}, "noisy": {0}, "hidden": set()}
    runner.resume(folder.url, local, Progress())
    assert_same_bits(weights(folder), weights(whole))
    ours, theirs = (f.read_table("attacks").drop(["seconds"]).to_pylist() for f in (folder, whole))
    assert ours[:4] == theirs[:4]
    assert [row["status"] for row in ours] == ["ok"] * 4 + ["not applicable"] * 2


@pytest.mark.engine
def test_noise_fades_over_rounds() -> None:
    attack = Dlg(iterations=20, restarts=1)
    found = {}
    for count in (1, 10):
        model, seen = seen_in_rounds(count, noise=0.02)
        [result] = attack.reconstruct([seen], model, seeded(1))
        found[count] = psnr(result.images, digit(3))
    assert found[10] > found[1] + 6
