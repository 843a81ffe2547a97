"""Recording in NVFlare: a simulated job, whose filter records what its clients trained."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from rayfed.audits import replay
from rayfed.errors import MissingExtraError
from rayfed.evidence.methods import Method
from rayfed.integrations.nvflare import RecordingFilter
from rayfed.recording import Recording
from tests.conftest import REPOSITORY
from tests.helpers import nvflare_client as task
from tests.helpers.command import run


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("nvflare") is None:  # in CI, too: it brings a framework of its own
        pytest.skip("nvflare is not installed: pip install 'rayfed[nvflare]' in an environment of its own")
    folder = tmp_path_factory.mktemp("nvflare")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    app = str(REPOSITORY / "tests" / "nvflare_app.py")
    command = [sys.executable, app, str(folder / "updates"), str(folder / "workspace")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "updates"


@pytest.mark.slow
def test_the_filter_records_what_clients_were_sent_and_what_they_trained(recording: Path) -> None:
    """By training again, step by step, from what was sent."""
    found = Recording(recording)
    assert found.rounds == [0, 1]
    assert not any(update.has_truth for update in found.updates)
    for update in found.updates:
        images, labels = task.samples(update.client)
        model = task.Net()
        model.load_state_dict(update.sent)
        optimiser = torch.optim.SGD(model.parameters(), lr=task.LR)
        for _ in range(task.STEPS):
            optimiser.zero_grad()
            F.cross_entropy(model((images - task.MEAN[0]) / task.STD[0]), labels).backward()
            optimiser.step()
        trained = model.state_dict()
        assert all(torch.allclose(tensor, trained[name], atol=1e-6) for name, tensor in update.returned.items())
    first, second = (found.of_round(number)[0].sent for number in found.rounds)
    mean = {n: sum(u.returned[n] for u in found.of_round(0)) / 2 for n in first}
    assert all(torch.allclose(second[name], tensor, atol=1e-6) for name, tensor in mean.items())


def test_a_filter_without_nvflare_says_what_is_missing() -> None:
    if find_spec("nvflare") is None:
        with pytest.raises(MissingExtraError):
            RecordingFilter("updates", "net:Net", samples=1, shape=[1, 8, 8], local={"steps": 1, "lr": 0.1})


@pytest.mark.slow
def test_a_recorded_job_is_replayed(recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "METHODS", (Method("inverting_gradients", evaluations=1),))
    model = str(REPOSITORY / "tests" / "nvflare_client.py") + ":Net"
    code, output = run("replay", str(recording), "--model", model, "--iterations", "5", "--out", str(tmp_path))
    assert (code, "NOT MEASURED: without the truth" in output) == (0, True), output
    assert "note:" not in output, "nothing seems odd"
