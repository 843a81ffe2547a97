"""Whatever stands in a scenario, a run folder or a user's file: it is used, or there is one message; nothing hangs."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pickle
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from rayfed import scenario as scenarios
from rayfed.data.base import load_in_memory
from rayfed.errors import DataError, RunError, ScenarioError, UserError
from rayfed.evidence import recommend as choice
from rayfed.evidence.compare import compare_results
from rayfed.metrics.lpips import Lpips
from rayfed.models.pretrained import SHIPPED_EVALUATOR, load_evaluator, load_generator, load_recogniser
from rayfed.registry import build
from rayfed.report.export.tables import export_table
from rayfed.report.html.run import write_report
from rayfed.report.html.sweep import write_sweep_report
from rayfed.report.text import recommendation
from rayfed.results.loading import Run, open_results
from rayfed.results.sweep_folder import SweepFolder, is_sweep
from rayfed.scenario import Scenario
from rayfed.scenario.trials import plan_trials
from rayfed.simulation.client.failures import Failed, checked
from rayfed.simulation.client.local import update_method
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.inputs import Inputs, prepare_inputs
from rayfed.store import checkpoint
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import RunFolder
from tests.conftest import REPOSITORY
from tests.helpers.fuzz_fixtures import (
    Change,
    Cut,
    Damage,
    Splice,
    assert_finite,
    changed,
    changes,
    damaged_files,
    damages,
    dumped,
    splices,
)
from tests.helpers.report_fixtures import Page, make_run, make_sweep
from tests.helpers.run_fixtures import assert_same_bits

SCENARIOS = sorted(path.name for path in (REPOSITORY / "scenarios").glob("*.yaml"))
PLAYABLE = [
    "toy.yaml", "undefended.yaml", "user_model.yaml", "noniid.yaml", "many_clients.yaml", "bayesian_privacy.yaml",
    "broken_key.yaml", "choosing.yaml", "defences.yaml", "encrypted.yaml", "faces.yaml", "fedboosting.yaml",
    "fedboosting_encrypted.yaml", "key_lock.yaml", "labels.yaml", "refiner.yaml", "secure_aggregation.yaml",
    "soteria.yaml", "tabular.yaml",
]  # fmt: skip
"""Those whose models take 8 x 8 pixels and whose accounts are quickly made."""
SMALL = {"name": "digits", "size": 8, "train_samples": 100, "test_samples": 20, "public": 0.1}


@pytest.fixture(autouse=True)
def users_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scenarios")


def accepted(use: Callable[[], Any], refused: type[UserError] = UserError) -> Any:
    """What comes of it, or None where it says in words what does not work."""
    try:
        return use()
    except refused as error:
        reason = str(error)
    assert reason.strip()
    return None


# Scenarios


@cache
def document(name: str) -> Any:
    """A scenario that is shipped, on few images where it can be played on them."""
    found = yaml.safe_load(Path(REPOSITORY, "scenarios", name).read_text())
    return found | {"data": SMALL} if name in PLAYABLE else found


Spoilt = tuple[str, list[Change]]
"""A scenario's file and what is changed in it."""


def spoilt(names: Sequence[str]) -> st.SearchStrategy[Spoilt]:
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), changes(document(name))))


def text_of(case: Spoilt) -> str:
    name, made = case
    return dumped(changed(document(name), made))


def check_that_it_can_be_resumed(scenario: Scenario) -> None:
    """A run folder keeps the dump, and `rayfed resume` reads it."""
    assert scenarios.parse(scenario.dump()).dump() == scenario.dump()


def needs_timm(case: Spoilt) -> bool:
    return find_spec("timm") is None and "timm:" in text_of(case)


@settings(max_examples=12)
@given(case=spoilt(SCENARIOS))
@example(case=("toy.yaml", []))
def test_spoilt_scenarios_are_valid_or_say_why(case: Spoilt) -> None:
    """Scenarios of timm's models say that it is missing, where it is."""
    scenario = accepted(lambda: scenarios.parse(text_of(case)), DataError if needs_timm(case) else ScenarioError)
    if scenario:
        check_that_it_can_be_resumed(scenario)


@settings(max_examples=8)
@given(case=spoilt(PLAYABLE))
@example(case=("toy.yaml", []))
def test_spoilt_scenarios_are_played_or_say_why(case: Spoilt) -> None:
    """As `rayfed validate` does, on few images; then a client of every arm takes one step."""

    def validated() -> Inputs:
        scenario = scenarios.parse(text_of(case))
        if scenario.sweep and scenario.sweep.search != "optuna":
            plan_trials(scenario)
        inputs = prepare_inputs(scenario)
        assert all(0 < limit <= scenario.federation.rounds for limit in inputs.limits.values())
        assert not [row for row in inputs.privacy if row.get("epsilon") is not None and not row["epsilon"] >= 0]
        return inputs

    inputs = accepted(validated)
    event("accepted" if inputs else "refused")
    for arm in inputs.scenario.played if inputs else ():
        accepted(lambda arm=arm: check_one_step(inputs, arm))


def check_one_step(inputs: Inputs, arm: str) -> None:
    """A client's update has the form of the model and is finite, or the server would say that it is not."""
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    built, training = runtime.arm(arm), runtime.specs[arm].training
    if training.algorithm == "fedavg":
        training = training.model_copy(update={"epochs": None, "steps": 1})
    task = runtime.task(arm, Sent(0, built.weights, built.buffers), 0, runtime.parts[0], {})
    update = update_method(training, built.defences)(task)
    made = checked(update, task)
    if isinstance(made, Failed):  # 1e308 for a learning rate, say
        assert made.reason == "sent an update that is not finite"
        assert not all(t.isfinite().all() for t in [*update.tensors.values(), *update.buffers.values()])
        return
    assert {name: t.shape for name, t in made.tensors.items()} == {
        name: t.shape for name, t in built.weights.items() if name not in built.private
    }
    assert 0 < made.samples <= len(runtime.parts[0])


TEXT = (REPOSITORY / "scenarios" / "toy.yaml").read_text()


@settings(max_examples=15)
@given(made=splices(TEXT))
@example(made=[])
def test_any_text_is_a_scenario_or_says_why(made: list[Splice]) -> None:
    text = reduce(lambda content, splice: splice.of(content), made, TEXT.encode()).decode()
    if scenario := accepted(lambda: scenarios.parse(text), ScenarioError):
        check_that_it_can_be_resumed(scenario)


@pytest.mark.engine
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
    with pytest.raises(ScenarioError, match="after aliases are expanded"):
        scenarios.parse("\n".join(lines))


def test_a_key_is_not_written_out() -> None:
    key = ["&a0 [x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    with pytest.raises(ScenarioError, match="line 2: "):
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
    accepted(lambda: scenarios.parse(f"name: t\nfederation: {{rounds: 1, clients: 2}}\n{line}\n"))
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


def check_report(url: str, other: str) -> None:
    """The page is balanced, loads nothing, and takes no text for a tag."""
    folder = RunFolder.open(url)
    written = write_sweep_report(SweepFolder(folder)) if is_sweep(folder) else write_report(folder)
    page = Page(Path(written).read_text())
    assert not page.open
    assert "fuzz" not in page.tags
    page.check_that_it_stands_alone()


def check_settings(url: str, other: str) -> None:
    """Every estimate is a number with an interval around it."""
    found = open_results(url)
    assert "<fuzz" not in found._repr_html_()
    repr(found)
    for name in found.tables:
        assert len(found.frame(name)) == len(found.table(name))
    every = found.settings()
    for setting in every:
        assert_finite({name: vars(estimate) for name, estimate in setting.measures.items()}, setting.title)
        assert all(e.low is None or e.low <= e.mean <= e.high for e in setting.measures.values())
    front = found.front("psnr", "test_accuracy")
    titles = {one.title for one in every}  # of settings that are read again, in which NaN is not itself
    assert {one.title for one in [*front.best, *front.unknown]} <= titles


def check_pictures(url: str, other: str) -> None:
    """Pictures are (H, W, 1) or (H, W, 3) of bytes."""
    found = open_results(url)
    for picture in found.images() if isinstance(found, Run) else ():
        for pixels in (picture.true, picture.reconstructed):
            assert (pixels.dtype, pixels.ndim) == (np.uint8, 3)
            assert pixels.shape[2] in (1, 3)


def check_recommendation(url: str, other: str) -> None:
    """One of the settings is chosen, and it meets the bounds where any does."""
    found = open_results(url)
    bounds = [choice.parse_bound("psnr<=12"), choice.parse_bound("test_accuracy>=0.9")]
    every = found.settings()
    advised = choice.recommend_setting(every, bounds, choice.COSTS)
    assert all(one in every for one in advised.chosen.settings)
    assert advised.meeting <= advised.candidates
    assert recommendation.recommendation_text(advised)
    assert all(recommendation.remarks(advised))
    recommendation.rerun_commands(found.url, found.scenario, advised.chosen)


def check_comparison(url: str, other: str) -> None:
    """The settings of both, and nothing else."""
    results = open_results(url), open_results(other)
    compared = compare_results(results)
    assert len(compared.settings) == sum(len(one.settings()) for one in results)
    assert all(len(one.values) == 2 for changed in compared.differences.values() for one in changed)


def check_exports(url: str, other: str) -> None:
    """CSV has all rows; no format has HTML in it that the tables had not."""
    found = open_results(url)
    rows = csv.reader(io.StringIO(export_table(found, "csv")))
    assert len(list(rows)) == 1 + len(found.outcomes())
    assert "<fuzz" not in export_table(found, "markdown")
    assert "tabular" in export_table(found, "latex")


READERS = {
    check.__name__: check
    for check in (
        check_report, check_settings, check_pictures, check_recommendation, check_comparison, check_exports,
    )
}  # fmt: skip
"""What the commands that look at results do."""


@cache
def folders() -> dict[str, tuple[str, dict[str, bytes]]]:
    """A run and a sweep: name -> content of every file."""
    found = {}
    for kind in ("run", "sweep"):
        with TemporaryDirectory() as out:
            made = make_run(out, {"none": [], "gaussian": ["gaussian"]}, {"idlg": 1.0}) if kind == "run" else None
            folder = Path((made or make_sweep(out, 2, 2)).url)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            found[kind] = folder.name, {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return found


def laid_out(kind: str, place: str, damaged: Mapping[str, Damage]) -> str:
    """Write a folder as it is after some damage, and say where."""
    name, files = folders()[kind]
    folder = Path(place, kind, name)
    for file, content in files.items():
        left = damaged[file].of(content) if file in damaged else content
        if left is not None:
            Path(folder, file).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, file).write_bytes(left)
    return str(folder)


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_spoilt_folders_are_read_or_say_why(kind: str) -> None:
    with TemporaryDirectory() as place:
        other = laid_out("run", place, {})

        @settings(max_examples=12 if kind == "run" else 6)
        @given(damaged=damaged_files(folders()[kind][1]), reader=st.sampled_from(sorted(READERS)))
        def check(damaged: dict[str, Damage], reader: str) -> None:
            with TemporaryDirectory() as spoilt:
                url = laid_out(kind, spoilt, damaged)
                accepted(lambda: READERS[reader](url, other))

        for reader in READERS.values():  # nothing is refused of what is whole
            with TemporaryDirectory() as whole:
                reader(laid_out(kind, whole, {}), other)
        check()


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
    with pytest.raises(RunError, match="not a trial of a sweep"):
        write_sweep_report(sweep)
    sweep.write_outcomes([row | {"trial": run} for row in sweep.outcomes().to_pylist()])
    with pytest.raises(RunError, match="not a trial of a sweep"):
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


SERVER = {"none": {"weights": {"w": torch.arange(12.0)}, "memory": {}}}


@pytest.fixture
def saved(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(str(tmp_path / "runs"), "demo")
    checkpoint.save(folder, Checkpoint(2, SERVER, {}))
    return folder


def test_spoilt_checkpoints_are_loaded_or_named(saved: RunFolder) -> None:
    """What is loaded is the state that was saved: a hash guards the tensors, and the round is a number or an error."""
    whole = {f"checkpoint/{name}": saved.read_bytes(f"checkpoint/{name}") for name in saved.files("checkpoint")}
    [state] = [name for name in whole if name.endswith(".pt")]

    @settings(max_examples=60)
    @given(name=st.sampled_from(sorted(whole)), data=st.data())
    @example(name=state, data=None)
    def check(name: str, data: st.DataObject | None) -> None:
        content = data.draw(damages(name, whole[name]), "damage").of(whole[name]) if data else whole[name]
        for each, bytes_ in (whole | {name: content}).items():
            if bytes_ is None:
                saved.remove(each)
            else:
                saved.write_bytes(each, bytes_)
        found = accepted(lambda: (checkpoint.load(saved),), RunError)
        if not data:
            assert found
        if found and name != state and content is None:
            assert found == (None,)  # a run without a pointer has no checkpoint yet
        elif found:
            [loaded] = found
            assert type(loaded.round) is int
            assert loaded.round >= 0
            assert_same_bits(loaded.server, SERVER)

    check()


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


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), shade, np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def parquet() -> bytes:
    buffer = io.BytesIO()
    images = [{"bytes": png(i), "path": None} for i in range(20)]
    pq.write_table(pa.table({"image": images, "label": np.arange(20) % 2}), buffer)
    return buffer.getvalue()


WHOLE = parquet()


@settings(max_examples=60)
@given(damage=damages("images.parquet", WHOLE))
@example(damage=Cut(len(WHOLE)))
def test_spoilt_image_tables_are_loaded_or_named(damage: Damage) -> None:
    content = damage.of(WHOLE)
    with TemporaryDirectory() as place:
        path = Path(place, "images.parquet")
        if content is not None:
            path.write_bytes(content)
        data = accepted(lambda: build("datasets", "parquet", {"train": str(path)}).load(), DataError)
    if content == WHOLE:
        assert data
    if data:
        for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
            pixels = load_in_memory(images)
            assert pixels.dtype == np.uint8
            assert pixels.shape[0] == len(labels) > 0
            assert pixels.shape[1] in (1, 3)
            if data.has_numbers:
                assert labels.shape == (len(pixels), len(data.classes))
            else:
                assert set(labels.tolist()) <= set(range(len(data.classes)))


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
