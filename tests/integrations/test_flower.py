"""Recording in Flower: what a client's training is watched for, and a simulated app, recorded on both sides."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.audits import replay
from rayfed.errors import UserError
from rayfed.evidence.methods import Method
from rayfed.integrations.watch import Seen, Watch
from rayfed.recording import Recording
from rayfed.store.folder import RunFolder
from rayfed.update import LocalTraining
from tests.conftest import REPOSITORY, missing
from tests.helpers.command import run


def net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def watched(
    batches: list[tuple[Tensor, Tensor]], optimiser: type[torch.optim.Optimizer] = torch.optim.SGD, **options: float
) -> Seen:
    """What is seen of a training whose model is evaluated, too, and goes on when nobody watches any more."""
    model = net()
    steps = optimiser(model.parameters(), **({"lr": 0.1} | options))

    def train() -> None:
        for inputs, labels in batches:
            steps.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            steps.step()
            with torch.no_grad():
                F.cross_entropy(model(inputs), labels)
            model.eval()
            model(inputs)
            model.train()

    with Watch(nn.Sequential) as watch:
        train()
    train()
    return watch.seen()


def test_samples_and_steps_of_a_training_are_watched() -> None:
    x, y = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 2])
    found = watched([(x[:2], y[:2]), (x[2:], y[2:]), (x[1:], y[1:]), (x[:1], y[:1])], momentum=0.9, weight_decay=0.01)
    assert found.local == LocalTraining(4, 2, 0.1, 0.9, 0.01)
    assert torch.equal(found.inputs, x), "every sample once, although there were two epochs"
    assert found.labels is not None
    assert torch.equal(found.labels, y)


def test_labels_of_the_losses_module_are_seen_as_those_of_its_function() -> None:
    model, x, y = net(), torch.rand(2, 1, 2, 2), torch.tensor([2, 0])
    with Watch(nn.Sequential) as watch:
        nn.CrossEntropyLoss()(model(x), y).backward()
    seen = watch.seen(LocalTraining(7))
    assert (seen.labels is not None and torch.equal(seen.labels, y), seen.local.steps) == (True, 7)
    with Watch(nn.Sequential) as watch:
        model(x).sum().backward()
    assert watch.seen(LocalTraining()).labels is None


def test_steps_that_no_attack_undoes_are_refused() -> None:
    x, y = torch.rand(1, 1, 2, 2), torch.tensor([0])
    with pytest.raises(UserError, match="Adam"):
        watched([(x, y)], torch.optim.Adam)
    with pytest.raises(UserError, match="SGD"):
        watched([(x, y)], momentum=0.9, nesterov=True)
    with pytest.raises(UserError, match="Linear"), Watch(nn.Linear) as watch:
        watch.seen()
    with Watch(nn.Sequential) as watch:
        net()(x)
    with pytest.raises(UserError, match="optimiser"):
        watch.seen()


def simulated(folder: Path, *defence: str) -> str:
    """Simulate the Flower app, recorded into a folder, and return what it printed."""
    if find_spec("flwr") is None:  # in CI, too: it pins another Ray than ours
        pytest.skip("flwr is not installed: pip install 'rayfed[flower]' in an environment of its own")
    if not Path(os.environ.get("RAYFED_DATA", "nowhere"), "cifar10").is_dir():
        missing("no CIFAR-10 in the folder RAYFED_DATA")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    command = [sys.executable, str(REPOSITORY / "tests" / "flower_app.py"), str(folder), "2", *defence]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Received 2 results and 0 failures" in done.stdout + done.stderr, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flower")
    simulated(folder)
    return folder


@pytest.mark.slow
def test_client_and_server_of_a_flower_app_record_the_same_updates(recordings: Path) -> None:
    client, server = (Recording(recordings / side) for side in ("client", "server"))
    assert client.rounds == server.rounds == [1, 2]
    for round in client.rounds:
        of_client, of_server = client.of_round(round), server.of_round(round)
        assert [u.samples for u in of_client] == [u.samples for u in of_server] == [2, 2]
        assert {(u.local.steps, u.local.lr, u.local.momentum) for u in [*of_client, *of_server]} == {(1, 0.01, 0.9)}
        assert {u.has_truth for u in of_client} == {True}
        assert {u.has_truth for u in of_server} == {False}
        for one in of_client:
            assert any(all(torch.equal(one.returned[n], t) for n, t in two.returned.items()) for two in of_server)
            assert all(torch.equal(t, of_server[0].sent[name]) for name, t in one.sent.items())


@pytest.mark.slow
def test_a_recorded_flower_app_is_replayed(recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, which rayfed trains from the recorded samples, sends what Flower's clients sent."""
    monkeypatch.setattr(replay, "METHODS", (Method("inverting_gradients", evaluations=1),))
    model = ("--model", str(REPOSITORY / "tests" / "flower_task.py") + ":Net", "--iterations", "20")
    options = (*model, "--round", "2", "--executor", "local", "--out", str(tmp_path), "--fail-above", "60")
    code, output = run("replay", str(recordings / "client"), *options)
    assert code == 3, output
    [folder] = tmp_path.glob("replay-*")
    rows = RunFolder.at(str(folder)).read_table("attacks").to_pylist()
    assert len(rows) == 2 * 2 * 2 * 2  # arms, twins, clients, samples
    assert max(row["distortion"] for row in rows if row["arm"] == "recorded") < 1e-3
    code, output = run("replay", str(recordings / "server"), *options)
    assert (code, "NOT MEASURED: without the truth" in output) == (3, True)


@pytest.mark.slow
def test_a_flower_app_is_defended_with_its_account_printed(tmp_path: Path) -> None:
    """What leaves the clients is clipped, with noise on every parameter, that of both clients and rounds its own."""
    clip, sigma = 0.01, 0.001
    said = simulated(tmp_path, f"{{name: gaussian, clip: {clip}, sigma: {sigma}}}")
    assert "gaussian: epsilon" in said
    assert "after 2 rounds" in said
    recorded = [update for round in (1, 2) for update in Recording(tmp_path / "client").of_round(round)]
    moved = [torch.cat([(u.sent[n] - u.returned[n]).flatten() for n in u.sent]).double() for u in recorded]
    noise = sigma * len(moved[0]) ** 0.5
    for one in moved:
        assert noise * 0.98 < one.norm() < (noise**2 + clip**2) ** 0.5 * 1.02
    correlations = torch.corrcoef(torch.stack(moved))
    assert (correlations - torch.eye(4)).abs().max() < 0.05


def test_a_mod_defends_updates_alone() -> None:
    from rayfed.integrations.flower import defend

    with pytest.raises(UserError, match="works on gradients"):
        defend([{"name": "dp_sgd", "noise_multiplier": 1.0}], net(), rounds=1)
    with pytest.raises(UserError, match="state"):
        defend([{"name": "top_k", "k": 2, "error_feedback": True}], net(), rounds=1)
