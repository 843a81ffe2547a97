"""Whatever stands in a scenario, a run folder or a user's file: it is used, or there is one message; nothing hangs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from rayfed import scenario as scenarios
from rayfed.catalogue import build
from rayfed.errors import DataError, RunError, ScenarioError, UserError
from rayfed.metrics.lpips import Lpips
from rayfed.models.pretrained import SHIPPED_EVALUATOR, load_evaluator, load_generator, load_recogniser
from rayfed.report.run import write_report
from rayfed.report.sweep import write_sweep_report
from rayfed.results import advice, checkpoint
from rayfed.results import recommend as choice
from rayfed.results.checkpoint import Checkpoint
from rayfed.results.compare import compare
from rayfed.results.export import FORMATS, export
from rayfed.results.folder import RunFolder
from rayfed.results.loading import Run, load
from rayfed.results.sweep_folder import SweepFolder, is_sweep
from rayfed.scenario.trials import planned
from rayfed.training.inputs import prepare
from tests.conftest import REPOSITORY
from tests.fuzz_fixtures import damage, dumped, examples, explore, spoil
from tests.report_fixtures import make_run, make_sweep

SCENARIOS = sorted((REPOSITORY / "scenarios").glob("*.yaml"))
SMALL = {"name": "digits", "size": 8, "train_samples": 100, "test_samples": 20}


@pytest.fixture(autouse=True)
def users_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scenarios")


def tried(use: Callable[[], Any]) -> None:
    """It works, or says in words what does not."""
    with suppress(UserError):
        use()


# Scenarios


@examples(60)
def test_spoilt_scenarios_are_valid_or_say_why(examples: int) -> None:
    def one(r: random.Random) -> None:
        document = yaml.safe_load(r.choice(SCENARIOS).read_text())
        spoil(document, r)
        tried(lambda: scenarios.parse(dumped(document)))

    explore(examples, one)


@examples(15)
def test_spoilt_scenarios_are_prepared_or_say_why(examples: int) -> None:
    """As `rayfed validate` does, on few images."""

    def validate(text: str) -> None:
        loaded = scenarios.parse(text)
        if loaded.sweep and loaded.sweep.search != "optuna":
            planned(loaded)
        inputs = prepare(loaded)
        _ = inputs.limits, inputs.privacy

    def one(r: random.Random) -> None:
        document = yaml.safe_load(r.choice(SCENARIOS).read_text())
        document["data"] = SMALL.copy()
        spoil(document, r)
        tried(lambda: validate(dumped(document)))

    explore(examples, one)


@examples(40)
def test_any_text_is_a_scenario_or_says_why(examples: int) -> None:
    odd = ["\t", "&a ", "*a", "!!int ", "!!bool ", "!!set ", "{", "]", "- ", ": ", '"\\ud800"', "\x85", "<<: "]

    def one(r: random.Random) -> None:
        text = r.choice(SCENARIOS).read_text()
        for _ in range(r.choice([1, 3])):
            place = r.randrange(len(text))
            text = text[:place] + r.choice(odd) + text[place + r.choice([0, 1, 20]) :]
        tried(lambda: scenarios.parse(text))

    explore(examples, one)


@pytest.mark.parametrize(
    "text",
    [
        "!!bool 7", "!!int ''", "!!float x", "!!timestamp x", "2020-13-45", "!!binary x", "1" * 5000,
        '"\\ud800"', '"\\0"', "&a [*a]", "? [1]\n: 2", "{? {a: 1} : 2}", "[" * 3000,
    ],
)  # fmt: skip
def test_odd_scalars_and_nesting(text: str) -> None:
    with pytest.raises(ScenarioError):
        scenarios.parse(f"name: t\nfederation: {{rounds: 1, clients: 2}}\nseed: {text}\n")


@pytest.mark.parametrize("entry", ["[{}]", "{{<<: [{}]}}"])
def test_aliases_of_aliases_are_not_written_out(entry: str) -> None:
    lines = ["a0: &a0 {x: y}"]
    lines += [f"a{i}: &a{i} {entry.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 12)]
    with pytest.raises(ScenarioError, match="aliases written out"):
        scenarios.parse("\n".join(lines))


def test_a_key_is_not_written_out() -> None:
    key = ["&a0 [x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    with pytest.raises(ScenarioError, match="line 2: a key is a list or a mapping"):
        scenarios.parse(f"name: t\n? [{', '.join(key)}]\n: 1\n")


TOUCHING = [
    "!!python/object/apply:os.mkdir [{}]",
    "!!python/object/new:pathlib.PosixPath [{}]",
    "!!python/name:os.system",
]


@pytest.mark.parametrize("tag", TOUCHING)
def test_tags_build_no_objects(tag: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for place in ("seed: {}", "name: {}", "data: {{name: digits, size: {}}}", "? {}\n: 1", "attacks: [{}]"):
        with pytest.raises(ScenarioError):
            scenarios.parse(place.format(tag.format(made)))
    folder = make_run(str(tmp_path))
    folder.write_text("scenario.yaml", f"name: {tag.format(made)}")
    with pytest.raises(RunError, match=r"scenario\.yaml"):
        write_report(folder)
    assert not made.exists()


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a mark when it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "imported"
    (tmp_path / "trap_module.py").write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.delitem(sys.modules, "trap_module", raising=False)
    return mark


@pytest.mark.parametrize(
    "line",
    [
        "seed: 'trap_module:X'", "output: {folder: 'trap_module:X'}", "metrics: {evaluator: 'trap_module:X'}",
        "training: {optimiser: 'trap_module:X'}", "data: {name: digits, size: 'trap_module:X'}", "'trap_module:X': 1",
        "attacks: [{name: idlg, label: 'trap_module:X'}]", "attacks: [{name: ggl, generator: 'trap_module:X'}]",
    ],
)  # fmt: skip
def test_nothing_but_components_is_imported(line: str, trap: Path) -> None:
    tried(lambda: scenarios.parse(f"name: t\nfederation: {{rounds: 1, clients: 2}}\n{line}\n"))
    assert not trap.exists()
    with pytest.raises(ScenarioError, match="trap_module"):
        scenarios.parse("name: t\nfederation: {rounds: 1, clients: 2}\nattacks: ['trap_module:X']\n")
    assert trap.exists()


@pytest.mark.parametrize("name", ["os:system", "rayfed.errors:UserError", "rayfed.defences.gaussian:Gaussian"])
@pytest.mark.parametrize("kind", ["attacks", "partitions", "datasets", "aggregations", "poisonings", "protections"])
def test_what_is_no_component_is_refused(kind: str, name: str) -> None:
    with pytest.raises(UserError, match="expected a class with @component"):
        build(kind, name, {})


# Run folders and sweeps


def read_all(url: str, other: str) -> list[Callable[[], Any]]:
    """What the commands that look at results do."""

    def report() -> str:
        folder = RunFolder.open(url)
        return write_sweep_report(SweepFolder(folder)) if is_sweep(folder) else write_report(folder)

    def look() -> Any:
        found = load(url)
        frames = [found.frame(name) for name in found.tables]
        pictures = list(found.images()) if isinstance(found, Run) else []
        return repr(found), found._repr_html_(), frames, pictures, found.front("psnr", "test_accuracy")

    def recommend() -> None:
        found = load(url)
        bounds = [choice.bound("psnr<=12"), choice.bound("test_accuracy>=0.9")]
        advised = choice.recommend(found.settings(), bounds, choice.COSTS)
        advice.answer(advised), advice.remarks(advised), choice.rerun(found, advised.chosen)

    exports = [lambda format=format: export(load(url), format) for format in FORMATS]
    return [report, look, recommend, lambda: compare([load(url), load(other)]), *exports]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    out = str(tmp_path_factory.mktemp("whole"))
    whole = make_run(out, {"none": [], "gaussian": ["gaussian"]}, {"idlg": 1.0}).url, make_sweep(out, 2, 2).url
    for url in whole:
        for use in read_all(url, make_run(out).url):
            use()
    return whole


@pytest.mark.parametrize("kind", ["run", "sweep"])
@examples(12)
def test_spoilt_folders_are_read_or_say_why(kind: str, examples: int, folders: tuple[str, str]) -> None:
    whole = folders[kind == "sweep"]

    def one(r: random.Random) -> None:
        with TemporaryDirectory() as place:
            copy = Path(shutil.copytree(whole, Path(place, Path(whole).name)))
            files = sorted(path for path in copy.rglob("*") if path.is_file() and path.name != "report.html")
            top = [path for path in files if path.parent == copy]
            for path in {r.choice(r.choice([top, files])) for _ in range(2)}:
                damage(path, r)
            tried(r.choice(read_all(str(copy), folders[0])))

    explore(examples, one)


def edited(run: RunFolder, name: str, change: Callable[[Any], Any]) -> None:
    run.write_text(name, change(run.read_text(name)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("scenario.yaml", "arms: [1]"), ("scenario.yaml", "arms: {none: 7}"), ("scenario.yaml", "{1: 2}"),
        ("scenario.yaml", "metrics: {success: {psnr: high}}"), ("scenario.yaml", "defences: [{sigma: 1}]"),
        ("status.json", '{"rounds": "many"}'), ("status.json", "[" * 100_000), ("environment.json", "[]"),
    ],
)  # fmt: skip
def test_documents_of_another_shape_are_named(name: str, content: str, tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    folder.write_text(name, content)
    with pytest.raises(RunError, match=name):
        write_report(folder)


def test_a_table_with_broken_text_or_nulls_is_named(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    part = Path(folder.url, "rounds", "part-00000.parquet")
    table = pq.read_table(part)
    broken = pa.Array.from_buffers(pa.string(), len(table), pa.array([b"\xff\xfe"] * len(table)).buffers())
    for arms in (broken, pa.nulls(len(table), pa.string())):
        pq.write_table(table.set_column(0, "arm", arms), part)
        with pytest.raises(RunError, match="part-00000"):
            folder.read_table("rounds")


@pytest.mark.parametrize("run", ["../../elsewhere", "trials/0000-0/../..", "/etc", "trials/٠٠٠٠-0"])
def test_outcomes_lead_to_trials_alone(run: str, tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), 2, 1, failed=0, stopped=0)
    sweep.write_outcomes([row | {"run": run} for row in sweep.outcomes().to_pylist()])
    with pytest.raises(RunError, match="no trial of a sweep"):
        write_sweep_report(sweep)
    sweep.write_outcomes([row | {"trial": run} for row in sweep.outcomes().to_pylist()])
    with pytest.raises(RunError, match="no trial of a sweep"):
        sweep.outcomes()


# Files with tensors


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def pickles(made: Path) -> list[bytes]:
    """As pickle, torch (new and old) and numpy write what runs code."""
    written = [pickle.dumps(Malicious(made))]
    for save in (
        lambda file: torch.save({"weights": Malicious(made)}, file),
        lambda file: torch.save(Malicious(made), file, _use_new_zipfile_serialization=False),
        lambda file: np.save(file, np.array([Malicious(made)], dtype=object), allow_pickle=True),
        lambda file: np.savez(file, images=np.array([Malicious(made)], dtype=object)),
    ):
        buffer = io.BytesIO()
        save(buffer)
        written.append(buffer.getvalue())
    return written


@pytest.fixture
def saved(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(str(tmp_path / "runs"), "demo")
    state = {"none": {"weights": {"w": torch.arange(12.0)}, "memory": {}}}
    checkpoint.save(folder, Checkpoint(2, state, {}))
    return folder


def test_spoilt_checkpoints_are_loaded_or_named(saved: RunFolder) -> None:
    whole = {f"checkpoint/{name}": saved.read_bytes(f"checkpoint/{name}") for name in saved.files("checkpoint")}

    def one(r: random.Random) -> None:
        for name, content in whole.items():
            saved.write_bytes(name, content)
        damage(Path(saved.url, r.choice(sorted(whole))), r)
        tried(lambda: checkpoint.load(saved))

    explore(100, one)


def with_right_hash(folder: RunFolder, content: bytes) -> None:
    """As who has written the whole folder would: the hash guards against damage, not against malice."""
    pointer = folder.read_mapping("checkpoint/latest.json")
    folder.write_bytes(f"checkpoint/{pointer['server']['file']}", content)
    pointer["server"]["sha256"] = hashlib.sha256(content).hexdigest()
    folder.write_text("checkpoint/latest.json", json.dumps(pointer))


def test_checkpoints_run_no_code(saved: RunFolder, tmp_path: Path) -> None:
    for content in [*pickles(tmp_path / "made"), b"", b"not a pickle"]:
        with_right_hash(saved, content)
        with pytest.raises(RunError, match=r"server.*\.pt"):
            checkpoint.load(saved)
    assert not (tmp_path / "made").exists()


def test_a_checkpoint_cannot_name_a_file_elsewhere(saved: RunFolder) -> None:
    edited(saved, "checkpoint/latest.json", lambda text: text.replace('"round-', '"../../round-', 1))
    with pytest.raises(RunError, match=r"latest\.json"):
        checkpoint.load(saved)


def test_networks_and_lpips_weights_run_no_code(tmp_path: Path) -> None:
    for content in [*pickles(tmp_path / "made"), b"", SHIPPED_EVALUATOR.read_bytes()[:-1000]]:
        path = tmp_path / "network.pt"
        path.write_bytes(content)
        path.with_name("network.pt.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  network.pt\n")
        with pytest.raises(UserError, match=r"network\.pt"):
            load_evaluator(str(path), torch.device("cpu"))
        with pytest.raises(UserError, match=r"network\.pt"):
            load_generator(path, (1, 28, 28), 10)
        with pytest.raises(UserError, match=r"network\.pt"):
            load_recogniser(str(path), ("a", "b"), torch.device("cpu"))
        with pytest.raises(UserError, match=r"network\.pt"):
            Lpips("alex", path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "generator", "shape": {}, "origin": {}, "weights": {}},
        {"kind": "generator", "shape": [], "origin": {}, "weights": {}},
        {"kind": "generator", "shape": {"image_shape": 3, "classes": 10}, "origin": {}, "weights": {}},
        {"kind": "evaluation network", "shape": {}, "origin": {}, "weights": {}},
        {"kind": "evaluation network", "shape": {}, "origin": {}, "weights": 7},
        {"kind": "recogniser", "shape": {"people": ["a", "b"]}, "origin": {}, "weights": {}},
        {"kind": "recogniser", "shape": {"people": 2}, "origin": {}, "weights": {}},
        ["kind"],
    ],
)  # fmt: skip
def test_networks_of_another_shape_are_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "network.pt"
    torch.save(content, path)
    path.with_name("network.pt.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    cpu = torch.device("cpu")
    for read in (
        lambda: load_generator(path, (1, 28, 28), 10),
        lambda: load_evaluator(str(path), cpu),
        lambda: load_recogniser(str(path), ("a", "b"), cpu),
    ):
        with pytest.raises(UserError, match=r"network\.pt"):
            read()


# Users' images


def parquet(path: Path) -> None:
    images = [{"bytes": png(i), "path": None} for i in range(20)]
    pq.write_table(pa.table({"image": images, "label": np.arange(20) % 2}), path)


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), shade, np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


@examples(60)
def test_spoilt_image_tables_are_loaded_or_named(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "images.parquet"
    parquet(path)
    whole = path.read_bytes()

    def one(r: random.Random) -> None:
        path.write_bytes(whole)
        damage(path, r)
        with suppress(DataError):
            build("datasets", "parquet", {"train": str(path)}).load()

    explore(examples, one)


def test_users_files_of_any_kind_run_no_code(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../../outside"))
    for number, content in enumerate([*pickles(tmp_path / "made"), archive.getvalue()]):
        folder = tmp_path / f"set{number}"
        for label in ("a", "b"):
            (folder / label).mkdir(parents=True)
            for i in range(5):
                (folder / label / f"{i}.png").write_bytes(content)
        (folder / "file").write_bytes(content)
        for name, where in (
            ("image_folder", {"root": str(folder)}),
            ("parquet", {"train": str(folder / "file")}),
            ("cifar10", {"root": str(folder)}),
            ("mnist", {"root": str(folder)}),
        ):
            with pytest.raises(DataError, match=f"set{number}"):
                build("datasets", name, where).load()
    assert not (tmp_path / "made").exists()
    assert not (tmp_path.parent.parent / "outside").exists()


def test_pickled_cifar_batches_are_not_opened_unless_they_are_the_published_ones(tmp_path: Path) -> None:
    batches = tmp_path / "cifar-10-batches-py"
    batches.mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (batches / name).write_bytes(pickle.dumps(Malicious(tmp_path / "made")))
    with pytest.raises(DataError, match="altered"):
        build("datasets", "cifar10", {"root": str(tmp_path)}).load()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("format", ["synthtext", "iiit5k", "svt", "ic15"])
def test_word_sets_that_are_none_are_named(format: str, tmp_path: Path) -> None:
    for content in [*pickles(tmp_path / "made"), b"", b"MATLAB 5.0 MAT-file" + bytes(200)]:
        for name in ("gt.mat", "testdata.mat", "traindata.mat", "test.xml", "gt.txt"):
            (tmp_path / name).write_bytes(content)
        source = {"format": format, "root": str(tmp_path)}
        with pytest.raises(DataError):
            build("datasets", "words", {"train": [source], "test": [source]}).load()
    assert not (tmp_path / "made").exists()
