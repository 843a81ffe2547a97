"""Data sets larger than memory: packed in pieces, mapped in place, sent as a path; the same bits as in memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from actors.executor import RayExecutor, on_ray
from rayfed import scenario as scenarios
from rayfed.cli import app
from rayfed.data import packing
from rayfed.data.base import Dataset
from rayfed.data.mapped import Mapped
from rayfed.data.sets.arrow import Arrow
from rayfed.data.sets.digits import Digits
from rayfed.data.sets.image_folder import ImageFolder
from rayfed.errors import DataError, UserError
from rayfed.runs import runner
from rayfed.scenario import resolve
from rayfed.simulation.progress import Progress
from tests.conftest import REPOSITORY

TEXT = """
name: t
data: {DATA}
partition: {name: resampled, samples: 30}
model: {name: lenet, activation: relu}
training: {batch_size: 10}
federation: {rounds: 1, clients: 4}
"""


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packing, "_BATCH", 64 * 16 * 16)  # of many batches
    packing.pack_dataset(Digits(size=16), tmp_path / "digits.arrow", lambda *_: None)
    return tmp_path / "digits.arrow"


def every(images: object) -> np.ndarray:
    return images[np.arange(len(images))]  # type: ignore[arg-type, index]


def assert_same(a: Dataset, b: Dataset) -> None:
    assert np.array_equal(every(a.train_images), every(b.train_images))
    assert np.array_equal(every(a.test_images), every(b.test_images))
    assert np.array_equal(a.train_labels, b.train_labels)
    assert np.array_equal(a.test_labels, b.test_labels)
    assert a.classes == b.classes


def test_a_mapped_data_set_is_the_one_that_was_packed(packed: Path) -> None:
    data = Arrow(path=str(packed)).load()
    assert_same(data, Digits(size=16).load())
    assert isinstance(data.train_images, Mapped)
    assert len(data.train_images.batches) > 20
    shuffled = np.random.default_rng(0).permutation(len(data.train_labels))[:100]
    assert np.array_equal(data.train_images[shuffled], every(data.train_images)[shuffled])


def test_chosen_and_public_samples_are_the_same_and_stay_in_the_file(packed: Path) -> None:
    chosen = {"train_samples": 500, "test_samples": 40}
    data = Arrow(path=str(packed), **chosen).load().with_public(0.1)
    there = Digits(size=16, **chosen).load().with_public(0.1)
    assert_same(data, there)
    assert np.array_equal(every(data.public_images), every(there.public_images))
    assert isinstance(data.train_images, Mapped)
    assert_same(pickle.loads(pickle.dumps(data)), there)


def test_it_is_sent_as_its_path(packed: Path) -> None:
    assert len(pickle.dumps(Arrow(path=str(packed)).load())) < 1000


def test_a_place_without_the_file_is_told_of_it(packed: Path) -> None:
    sent = pickle.dumps(Arrow(path=str(packed)).load())
    packing.pack_dataset(Digits(size=16), packed, lambda *_: None)  # packed again, whatever has changed in its images
    with pytest.raises(DataError, match=r"digits\.arrow on the machine .* is not the file of the run"):
        _ = pickle.loads(sent).classes
    packed.unlink()
    with pytest.raises(DataError, match=r"digits\.arrow is not on the machine"):
        _ = pickle.loads(sent).classes


@pytest.mark.parametrize("content", [b"", b"ARROW1" * 50])
def test_what_is_no_packed_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.arrow cannot be memory-mapped.*rayfed pack"):
        Arrow(path=str(tmp_path / "x.arrow")).load()


def test_another_arrow_file_is_refused(tmp_path: Path) -> None:
    table = pa.table({"image": [b"12"], "label": [0]})
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="no metadata from rayfed"):
        Arrow(path=str(tmp_path / "x.arrow")).load()


SAID = {"shape": [1, 1, 2], "train": 1, "classes": ["a", "b"], "identity": "x"}
IMAGE, LABEL = pa.array([b"12", b"34"], pa.binary(2)), pa.array([0, 1])


@pytest.mark.parametrize(
    ("said", "columns", "message"),
    [
        ({}, {"image": IMAGE.cast(pa.binary()), "label": LABEL}, "columns"),
        ({}, {"image": IMAGE, "label": LABEL.cast(pa.int32())}, "columns"),
        ({}, {"label": LABEL, "image": IMAGE}, "columns"),
        ({"shape": [1, 1, 3]}, {"image": IMAGE, "label": LABEL}, "columns"),
        ({"shape": [1, -1, 1]}, {"image": IMAGE.cast(pa.binary()), "label": LABEL}, "shape 1x-1x1"),
        ({"shape": [2**40, 2**40, 1]}, {"image": IMAGE, "label": LABEL}, ""),
        ({"shape": [float("inf"), 1, 1]}, {"image": IMAGE, "label": LABEL}, ""),
        ({}, {"image": pa.array([b"12", None], pa.binary(2)), "label": LABEL}, "nulls"),
        ({}, {"image": IMAGE, "label": pa.array([0, None])}, "nulls"),
        ({}, {"image": IMAGE[:0], "label": LABEL[:0]}, "of the 0 rows"),
        ({"train": -1}, {"image": IMAGE, "label": LABEL}, "-1 of the 2 rows"),
        ({"train": 2}, {"image": IMAGE, "label": LABEL}, "2 of the 2 rows"),
    ],
)
def test_what_does_not_hold_what_it_says_is_refused(
    said: dict[str, Any], columns: dict[str, pa.Array], message: str, tmp_path: Path
) -> None:
    table = pa.table(columns).replace_schema_metadata({b"rayfed": json.dumps(SAID | said)})
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=rf"x\.arrow cannot be memory-mapped: .*{message}.*rayfed pack"):
        Arrow(path=str(tmp_path / "x.arrow")).load()


def test_another_size_is_refused(packed: Path) -> None:
    assert Arrow(path=str(packed), size=16).load().sample.shape == (1, 16, 16)
    with pytest.raises(DataError, match="pack the data set again at size 32"):
        Arrow(path=str(packed), size=32).load()


def test_a_folder_is_packed_as_it_would_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BATCH", 1)
    draw = np.random.default_rng(0)
    for index in range(10):
        colour = index == 9  # one colour image makes all RGB, whatever was written before
        pixels = draw.integers(256, size=(9, 8, 3) if colour else (9, 8), dtype=np.uint8)
        path = tmp_path / "images" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    out = tmp_path / "x.arrow"
    found = CliRunner().invoke(app, ["pack", str(tmp_path / "images"), str(out), "--size", "6", "--quiet"])
    assert found.exit_code == 0, found.output
    assert "images of 3x6x6, 8 for training, 2 classes" in found.output
    assert_same(Arrow(path=str(out)).load(), ImageFolder(root=str(tmp_path / "images"), size=6).load())


LIMITED = """
import resource, sys, torch
from pathlib import Path
from tests.data.test_mapped import TEXT, trained
torch.set_num_threads(1)
path = sys.argv[1]
trained("{name: digits, size: 8}")  # what libraries take is not counted
used = int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmData")).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (1024 * used + (64 << 20),) * 2)
if sys.argv[2] == "copy":
    try:
        from rayfed.data.mapped import open_mapped
        import numpy as np
        images = open_mapped(path).train_images
        images[np.arange(len(images))]
    except MemoryError:
        print("too large for memory")
else:
    torch.save(trained("{name: arrow, path: %s, test_samples: 10}" % path), path + ".limited")
"""


def trained(data: str) -> dict[str, torch.Tensor]:
    """The sum of one round's updates, without Ray."""
    from rayfed.simulation.client.arm import build_arm
    from rayfed.simulation.client.runtime import ClientRuntime, Sent
    from rayfed.simulation.inputs import prepare_inputs

    s = scenarios.parse(TEXT.replace("{DATA}", data))
    inputs = prepare_inputs(s)
    arm = build_arm(resolve(s)["none"], inputs.data.sample, len(inputs.data.classes), s.seed)
    runtime = ClientRuntime(s, inputs.data, inputs.parts, torch.device("cpu"))
    total, _ = runtime.cohort("none", Sent(0, arm.weights, arm.buffers), range(4), {})
    tensors: dict[str, torch.Tensor] = total.tensors
    return tensors


@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's data is Linux's")
def test_a_file_larger_than_memory_trains_the_same_bits(tmp_path: Path) -> None:
    rows, path = 150_000, tmp_path / "large.arrow"
    draw = np.random.default_rng(0)
    labels = draw.integers(10, size=rows)
    Large.made = Dataset(
        draw.integers(256, size=(rows, 1, 28, 28), dtype=np.uint8),
        labels,
        np.zeros((10, 1, 28, 28), np.uint8),
        labels[:10],
        tuple("0123456789"),
    )
    packing.pack_dataset(Large(), path, lambda *_: None)
    assert path.stat().st_size > 100 << 20  # beyond the 64 MiB that the process may take
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    said = []
    for what in ("train", "copy"):
        command = [sys.executable, "-c", LIMITED, str(path), what]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        said.append(done.stdout)
    assert said == ["", "too large for memory\n"]
    found = torch.load(f"{path}.limited", weights_only=True)
    expected = trained("{name: 'tests.data.test_mapped:Large'}")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_an_actor_without_the_file_ends_the_run_with_its_path(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RayExecutor.start

    def without_file(self: RayExecutor, *arguments: Any) -> None:
        packed.unlink()
        start(self, *arguments)

    monkeypatch.setattr(RayExecutor, "start", without_file)
    s = scenarios.parse(TEXT.replace("{DATA}", f"{{name: arrow, path: {packed}}}"))
    with pytest.raises(UserError, match=r"digits\.arrow is not on the machine") as caught:
        runner.launch(s, str(tmp_path), on_ray(), Progress())
    assert "Traceback" not in str(caught.value)


class Large(Digits):
    made: Dataset

    def load(self) -> Dataset:
        return self.made
