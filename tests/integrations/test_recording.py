"""Recordings of federations that exist: what is written and what never is, replays, and one update by hand."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import Normalize
from typer.testing import CliRunner

from rayfed import Normalisation, record
from rayfed.audits import replay
from rayfed.cli import app
from rayfed.cli import replay as commands
from rayfed.core.reasons import Reason
from rayfed.errors import DataError, UserError
from rayfed.evidence.methods import Method
from rayfed.evidence.verdicts import read_evidence
from rayfed.metrics.images import psnr
from rayfed.recording import Recording
from rayfed.store.finding import State
from rayfed.store.folder import RunFolder
from rayfed.update import LocalTraining
from tests.conftest import REPOSITORY
from tests.helpers.command import run
from tests.helpers.data_fixtures import decoded

MODEL = "tests.integrations.test_recording:Net"
LOCAL = ("--executor", "local")
STEPS = LocalTraining(steps=3, lr=0.1)
QUICK = (Method("analytic"), Method("inverting_gradients", evaluations=1))


class Net(nn.Module):
    """A closed form reads single images of it."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.b(F.relu(self.a(images.flatten(1))))
        return logits


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.b(F.relu(self.n(self.a(images))).flatten(1))
        return logits


def images(seed: int, count: int = 1) -> tuple[Tensor, Tensor]:
    """Images of 8 bits, and labels."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (count, 1, 8, 8), generator=generator)
    return levels / 255, torch.arange(count) + seed % 5


def trained(model: nn.Module, batch: tuple[Tensor, Tensor], steps: int = 3, lr: float = 0.1) -> dict[str, Tensor]:
    """The state after steps of PyTorch's own SGD on a whole batch."""
    own = copy.deepcopy(model)
    optimiser = torch.optim.SGD(own.parameters(), lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(own(batch[0]), batch[1]).backward()
        optimiser.step()
    return own.state_dict()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def recorded(folder: Path, model: nn.Module, noise: float = 0.0, rounds: int = 1, **options: Any) -> Path:
    """A recording of three clients a round, the last with two samples; `noise` is their defence."""
    generator = torch.Generator().manual_seed(1)
    with record(model, folder, STEPS, **options) as r:
        for round in range(rounds):
            sent = {name: tensor + round / 100 for name, tensor in model.state_dict().items()}
            other = copy.deepcopy(model)
            other.load_state_dict(sent)
            for client, size in enumerate((1, 1, 2)):
                batch = images(10 * round + client, size)
                state = trained(other, batch)
                state = {n: t + noise * torch.randn(t.shape, generator=generator) for n, t in state.items()}
                r.round(sent, state, batch)
    return folder


def test_what_a_server_sees_is_written_and_no_sample(tmp_path: Path, net: Net) -> None:
    folder = recorded(tmp_path / "updates", net, rounds=2)
    assert (folder.stat().st_mode & 0o777) == 0o700
    assert not (folder / "truth").exists()
    rows = pq.read_table(folder / "index").to_pylist()
    assert sorted((row["round"], row["client"], row["samples"]) for row in rows) == [
        (0, 0, 1), (0, 1, 1), (0, 2, 2), (1, 0, 1), (1, 1, 1), (1, 2, 2),
    ]  # fmt: skip
    assert {(row["kind"], row["steps"], row["lr"], row["truth"]) for row in rows} == {("state", 3, 0.1, None)}
    assert len({row["sent"] for row in rows}) == len(list((folder / "sent").iterdir())) == 2
    first = next(row for row in rows if (row["round"], row["client"]) == (0, 0))
    found = load_file(folder / first["returned"])
    assert all(torch.equal(found[name], tensor) for name, tensor in trained(net, images(0)).items())
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for batch in (images(0), images(2, 2)):
        assert all(part.numpy().tobytes() not in written for part in batch[:1])
    assert not Recording(folder).updates[0].has_truth


def test_the_truth_is_written_where_it_is_asked_for(tmp_path: Path, net: Net) -> None:
    batch = images(3, 2)
    with record(net, tmp_path, STEPS, truth=True, normalise=Normalisation([0.2], [0.5])) as r:
        r.round(net.state_dict(), trained(net, batch), ((batch[0] - 0.2) / 0.5, batch[1]))
    [update] = Recording(tmp_path).updates
    inputs, labels = update.truth
    assert torch.allclose(inputs, batch[0], atol=1e-6)
    assert torch.equal(labels, batch[1])
    header = Recording(tmp_path).header
    assert (header.shape, header.classes, header.mean, header.std) == ((1, 8, 8), 10, (0.2,), (0.5,))


def test_rounds_and_clients_are_told_or_counted(tmp_path: Path, net: Net) -> None:
    batch, sent = images(0), net.state_dict()
    with record(net, tmp_path / "told", STEPS) as r:
        r.round(sent, trained(net, batch), batch, round=7, client=3)
    with record(net, tmp_path / "told", STEPS) as r:  # another process of the same federation
        r.round(sent, trained(net, batch), batch, round=7, client=1)
    assert [(u.round, u.client) for u in Recording(tmp_path / "told").updates] == [(7, 1), (7, 3)]
    with pytest.raises(UserError, match=r"no round 0\b.* 7$"):
        Recording(tmp_path / "told").of_round(0)


def test_a_server_records_without_samples(tmp_path: Path, net: Net) -> None:
    with record(net, tmp_path, STEPS, shape=(1, 8, 8)) as r:
        r.round(net.state_dict(), trained(net, images(0, 3)), 3)
    [update] = Recording(tmp_path).updates
    assert (update.samples, Recording(tmp_path).header.classes) == (3, 10)
    with pytest.raises(UserError, match=r"shape=\(C, H, W\)"):
        r.round(net.state_dict(), net.state_dict(), 0)
    with pytest.raises(UserError, match="truth=True"), record(net, tmp_path / "x", STEPS) as r:
        r.round(net.state_dict(), net.state_dict(), 3)


def test_recordings_by_mistake_are_refused_or_warned_of(tmp_path: Path, net: Net) -> None:
    sent, batch = copy.deepcopy(net.state_dict()), images(0)
    good = trained(net, batch)

    def recording(*arguments: Any, model: nn.Module = net, folder: str = "x", **options: Any) -> None:
        with record(model, tmp_path / folder, STEPS, **options) as r:
            r.round(*arguments)

    with pytest.raises(UserError, match=r"from -1 to .* mean and std"):
        recording(sent, good, (batch[0] * 2 - 1 - batch[0].min() * 2, batch[1]))
    with pytest.raises(UserError, match="from nan to nan"):
        recording(sent, good, (batch[0] * torch.nan, batch[1]))
    with pytest.raises(UserError, match=r"rayfed\.attacks\.external_update\.observe"):
        recording(sent, good, (torch.zeros(1, 5, dtype=torch.int64), batch[1]))
    with pytest.raises(UserError):
        recording(sent, good, batch, normalise=[0.5])
    with pytest.raises(UserError, match="need 1 values each"):
        recording(sent, good, batch, normalise=Normalize([0.5, 0.5], [1, 1]))
    with pytest.raises(UserError, match=r"a\.weight of the model's tensors are missing"):
        recording(sent, {name: t for name, t in good.items() if name != "a.weight"}, batch)
    with (
        pytest.raises(UserError, match=r"\b6 .* 8\b"),
        record(net, tmp_path / "y", LocalTraining(3, 2)) as r,
    ):
        r.round(sent, good, images(0, 8))
    assert not (tmp_path / "x").exists()
    with pytest.warns(UserWarning, match="zero everywhere"):
        recording(good, good, batch)
    with pytest.raises(UserError, match="another recording"):
        recording(Net(5).state_dict(), Net(5).state_dict(), batch, model=Net(5))
    with pytest.warns(UserWarning, match="nothing was recorded"), record(net, tmp_path / "z", STEPS):
        pass


def test_what_is_no_recording_is_said_to_be_none(tmp_path: Path, net: Net) -> None:
    with pytest.raises(DataError, match=r"recording\.json"):
        _ = Recording(tmp_path).updates
    folder = recorded(tmp_path / "r", net)
    header = json.loads((folder / "recording.json").read_text())
    (folder / "recording.json").write_text(json.dumps(header | {"version": 2}))
    with pytest.raises(DataError, match="version 1"):
        _ = Recording(folder).header
    (folder / "recording.json").write_text(json.dumps(header))
    (next((folder / "returned").iterdir())).write_bytes(b"no")
    with pytest.raises(DataError, match=r"round 0, client \d"):
        _ = [update.returned for update in Recording(folder).updates]
    code, output = run("replay", str(tmp_path), "--model", MODEL, *LOCAL)
    assert (code, "recording.json" in output) == (2, True)


def replayed(folder: Path, tmp_path: Path, *options: str) -> tuple[int, str, RunFolder | None]:
    out = tmp_path / f"runs{len(list(tmp_path.glob('runs*')))}"
    code, output = run("replay", str(folder), *options, "--iterations", "20", "--out", str(out), *LOCAL)
    [played] = out.glob("replay-*") if out.exists() else [None]
    return code, output, None if played is None else RunFolder.at(str(played))


def scores(folder: RunFolder, arm: str) -> dict[tuple[Any, ...], float]:
    rows = (row for row in folder.read_table("attacks").to_pylist() if row["arm"] == arm)
    return {(row["attack"], row["victim"], row["sample"]): row["psnr"] for row in rows}


@pytest.mark.engine
def test_a_replay_scores_and_gates_what_was_recorded(tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of PyTorch's own SGD, recorded, leak as those of the control do, which rayfed trains by itself."""
    monkeypatch.setattr(replay, "METHODS", QUICK)
    plain = recorded(tmp_path / "plain", net, truth=True, rounds=2)
    code, output, folder = replayed(plain, tmp_path, "--model", MODEL, "--round", "1", "--fail-above", "15")
    assert code == 3, output
    assert folder is not None
    found, control = scores(folder, "recorded"), scores(folder, "none")
    assert found.keys() == control.keys()
    assert len(found) == 4 * 4  # two attacks, with and without labels, of two images alone and two together
    single = [value for (attack, *_), value in found.items() if attack.startswith("analytic batch 1")]
    assert len(single) == 4
    assert min(single) > 60
    for key, value in found.items():
        assert min(value, 90) == pytest.approx(min(control[key], 90), abs=0.5), key
    assert re.search(r"recorded 1 PSNR below 15.0 dB \S+ dB FAILED", output)
    assert (folder.scenario()["training"]["steps"], folder.scenario()["training"]["lr"]) == (3, 0.1)
    noisy = recorded(tmp_path / "noisy", net, noise=1.0, truth=True, rounds=2)
    gated = ("--model", MODEL, "--round", "0", "--fail-above", "15")
    code, output, folder = replayed(noisy, tmp_path, *gated)
    assert code == 3, output
    assert folder is not None
    [verdict] = [one for one in read_evidence(folder).verdicts if one.arm == "recorded"]
    assert (verdict.state, verdict.reasons) == (State.INCONCLUSIVE, {Reason.DEFENCES_UNKNOWN})


@pytest.mark.engine
def test_what_a_replay_has_no_time_for_is_not_measured_and_passes_no_gate(
    tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "METHODS", QUICK)
    folder = recorded(tmp_path / "scored", net, truth=True)
    code, output, page = replayed(folder, tmp_path, "--model", MODEL, "--fail-above", "15", "--minutes", "0")
    assert (code, "NOT MEASURED" in output) == (3, True), output
    assert page is not None
    rows = page.read_table("attacks").to_pylist()
    assert {row["status"] for row in rows if row["attack"].startswith("inverting_gradients")} == {"not played"}


def test_a_replay_that_nothing_scores_ends_in_time(tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "METHODS", QUICK)
    folder = recorded(tmp_path / "updates", net)
    code, _, page = replayed(folder, tmp_path, "--model", MODEL, "--minutes", "0")
    assert code == 0
    assert page is not None
    rows = pq.read_table(Path(page.root) / "reconstructions.parquet").to_pylist()
    assert {(row["status"], row["message"], row["image"]) for row in rows} == {("failed", "not enough time", None)}
    whole = Recording(folder), 0, {"name": MODEL}, {"name": "cross_entropy"}, 1_000_000
    ends = monotonic() + 3
    searched = [found for _, name, found in replay.Replay(*whole).unscored(ends) if name != "analytic"]
    assert {found.message for found in searched} == {"not enough time"}, "a search is ended on its way"


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_what_seems_wrong_with_updates_is_said_also_to_the_quiet(
    quiet: tuple[str, ...], tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "METHODS", QUICK)
    sent, wrong = replay.Replay.sent, "client 0: the update seems to have the wrong sign"
    monkeypatch.setattr(replay.Replay, "sent", lambda one: (sent(one)[0], [wrong]))
    options = ("--model", MODEL, "--minutes", "0", "--out", str(tmp_path / "o"), *LOCAL, *quiet)
    for truth in (False, True):
        with monkeypatch.context() as stopped:
            stopped.setattr(commands, "_scored", divmod)  # the attacks are another test's
            folder = recorded(tmp_path / f"updates-{truth}", net, truth=truth)
            result = CliRunner().invoke(app, ["replay", str(folder), *options])
        assert (result.exit_code, result.stderr.count(f"note: {wrong}"), wrong in result.stdout) == (truth, 1, False)
    for name, state in {"before": trained(net, images(0), 1), "after": net.state_dict()}.items():
        torch.save(state, tmp_path / f"{name}.pt")
    files = (part for name in ("before", "after") for part in (f"--{name}", str(tmp_path / f"{name}.pt")))
    given = ("--lr", "0.1", "--shape", "1,8,8", "--classes", "10", "--iterations", "1", "--model", MODEL)
    result = CliRunner().invoke(app, ["attack-update", *files, *given, "--out", str(tmp_path / "o"), *quiet])
    assert (result.exit_code, result.stderr.count("sent and returned may be swapped")) == (0, 1)


@pytest.mark.engine
def test_without_the_truth_there_is_no_score_and_no_verdict(
    tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "METHODS", QUICK)
    folder = recorded(tmp_path / "updates", net)
    code, output, page = replayed(folder, tmp_path, "--model", MODEL, "--fail-above", "15")
    assert (code, "gate: NOT MEASURED" in output) == (3, True), output
    assert not re.search("LEAKS|PSNR|not reconstructed", output)
    assert page is not None
    rows = pq.read_table(Path(page.root) / "reconstructions.parquet").to_pylist()
    assert {row["attack"] for row in rows} == {"analytic", "inverting_gradients"}
    assert all(row["objective"] is not None for row in rows if row["attack"] == "inverting_gradients")
    assert "psnr" not in rows[0]
    text = (Path(page.root) / "report.html").read_text()
    assert text.count("<img") == len([row for row in rows if row["image"]])
    [first] = [row for row in rows if (row["client"], row["attack"]) == (0, "analytic")]
    assert float(psnr(images(0)[0], decoded(first["image"])[None])) > 40, "it is the image all the same"
    assert replayed(folder, tmp_path, "--model", MODEL, "--fail-above", "15", "--allow-unmeasured")[0] == 0


@pytest.mark.engine
def test_gradients_and_batch_norm_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "METHODS", QUICK)
    torch.manual_seed(0)
    model, batch = Normed(), images(0, 4)
    with record(model, tmp_path / "states", STEPS, truth=True) as r:
        sent = copy.deepcopy(model.state_dict())
        r.round(sent, trained(model, batch), batch)
    with record(model, tmp_path / "gradients", truth=True) as r:
        own = copy.deepcopy(model)
        loss = F.cross_entropy(own(batch[0]), batch[1])
        slopes = torch.autograd.grad(loss, list(own.parameters()))
        r.round(sent, dict(zip(dict(own.named_parameters()), slopes, strict=True)), batch)
    for name in ("states", "gradients"):
        code, output, folder = replayed(
            tmp_path / name, tmp_path, "--model", "tests.integrations.test_recording:Normed"
        )
        assert code == 0, output
        assert folder is not None
        rows = [row for row in folder.read_table("attacks").to_pylist() if row["arm"] == "recorded"]
        assert {row["batch_size"] for row in rows} == {4}
        assert max(row["distortion"] for row in rows) < 1e-3, "what was recorded is what the control sends"


def test_clients_of_one_round_have_one_local_training(tmp_path: Path, net: Net) -> None:
    def of(*trainings: tuple[int, LocalTraining]) -> replay.Replay:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with record(net, folder, STEPS) as r:
            for size, local in trainings:
                batch = images(0, size)
                r.round(net.state_dict(), trained(net, batch, local.steps), batch, local=local)
        return replay.Replay(Recording(folder), 0, {"name": MODEL}, {"name": "cross_entropy"}, 20)

    two_epochs = of((4, LocalTraining(4, 2, 0.1)), (7, LocalTraining(8, 2, 0.1)))
    training = two_epochs.document()["training"]
    assert (training["epochs"], training["batch_size"]) == (2, 2)
    with pytest.raises(UserError, match="epochs"):
        of((4, LocalTraining(4, 2, 0.1)), (4, LocalTraining(6, 2, 0.1))).document()
    with pytest.raises(UserError, match="local training"):
        of((1, LocalTraining(1, lr=0.1)), (1, LocalTraining(1, lr=0.2))).document()


def test_guesses_are_made_from_other_rounds(tmp_path: Path, net: Net) -> None:
    folder = recorded(tmp_path / "two", net, truth=True, rounds=2)
    data = replay.RecordedData(folder=folder, round=0).load()
    assert np.array_equal(data.train_images[np.arange(1)], (images(0)[0] * 255).round().numpy())
    assert data.train_images.dtype == np.uint8
    assert np.allclose(data.test_images[np.arange(1)] / 255, images(10)[0])
    assert data.remarks == ()
    alone = replay.RecordedData(folder=recorded(tmp_path / "one", net, truth=True), round=0).load()
    assert len(alone.test_labels) == 1
    assert "best constant image" in alone.remarks[0]


def test_one_update_of_two_state_dicts_is_attacked(tmp_path: Path, net: Net) -> None:
    batch = images(0)
    torch.save(net.state_dict(), tmp_path / "before.pt")
    torch.save({f"module.{name}": t for name, t in trained(net, batch, 1).items()}, tmp_path / "after.pt")
    files = ("--before", str(tmp_path / "before.pt"), "--after", str(tmp_path / "after.pt"), "--model", MODEL)
    options = ("--lr", "0.1", "--shape", "1,8,8", "--classes", "10", "--iterations", "20", "--out", str(tmp_path / "o"))
    code, output = run("attack-update", *files, *options)
    assert code == 0, output
    assert "'module.'" in output
    assert "NOT MEASURED" in output
    [table] = (tmp_path / "o").glob("*/reconstructions.parquet")
    [found] = [row for row in pq.read_table(table).to_pylist() if row["attack"] == "analytic"]
    assert float(psnr(batch[0], decoded(found["image"])[None])) > 40
    assert found["label"] == int(batch[1])
    (tmp_path / "no.pt").write_bytes(b"no")
    for wrong, said in {
        ("--shape", "8,8"): "give channels, height and width",
        ("--shape", "1,8,x"): "numbers separated by commas",
        ("--mean", "0.5"): "--mean and --std",
        ("--before", str(tmp_path / "no.pt")): "no.pt",
        ("--before", str(tmp_path / "none.pt")): "none.pt",
        ("--classes", "5"): "number of classes",
    }.items():
        code, output = run("attack-update", *files, *options, *wrong)
        assert (code, said in output) == (2, True), output


def test_the_loop_of_the_documentation_records(tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "existing-federations.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    def federation() -> Iterator[Any]:
        x, y = images(0)
        batch = ((x - 0.5) / 0.5, y)
        yield copy.deepcopy(net.state_dict()), trained(net, batch, 5), batch

    monkeypatch.chdir(tmp_path)
    exec(compile(code, "existing-federations.md", "exec"), {"model": net, "federation": federation})
    [update] = Recording(tmp_path / "updates").updates
    assert (update.samples, update.local.steps, update.has_truth) == (1, 5, False)


def test_an_update_between_two_checkpoints_is_attacked(tmp_path: Path, net: Net) -> None:
    batch = images(0)
    states = {"before": net.state_dict(), "after": trained(net, batch, 1)}
    for name, state in states.items():
        torch.save({"epoch": 3, "net": {f"module.{key}": t for key, t in state.items()}}, tmp_path / f"{name}.pth")
    files = (part for name in states for part in (f"--{name}", str(tmp_path / f"{name}.pth")))
    options = ("--lr", "0.1", "--shape", "1,8,8", "--classes", "10", "--iterations", "1", "--out", str(tmp_path / "o"))
    code, output = run("attack-update", *files, "--model", MODEL, *options)
    assert (code, "'net.module.'" in output) == (0, True), output
    [table] = (tmp_path / "o").glob("*/reconstructions.parquet")
    [found] = [row for row in pq.read_table(table).to_pylist() if row["attack"] == "analytic"]
    assert float(psnr(batch[0], decoded(found["image"])[None])) > 40
