"""Paths in scenarios: beside the scenario, then in the current folder, and found again from any other."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from rayfed import registry, scenario
from rayfed.cli import app
from rayfed.errors import UserError, nearest
from rayfed.scenario import find_inputs

NET = "from torch import nn\n\n\ndef net(classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
TEXT = """
name: t
data: {name: image_folder, root: images}
model: "nets/path_net.py:net"
federation: {rounds: 1, clients: 2}
attacks: [{name: idlg, iterations: 1}]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a scenario, images and a model; the current folder is another one."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(registry, "SEARCHED", [])
    monkeypatch.delitem(sys.modules, "path_net", raising=False)
    home = tmp_path / "home"
    _images(home / "images")
    (home / "nets").mkdir()
    (home / "nets" / "path_net.py").write_text(NET)
    (home / "s.yaml").write_text(TEXT)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return home


def _images(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i in range(5):
            Image.new("L", (8, 8), 40 * i).save(folder / name / f"{i}.png")


def load(home: Path, *changes: str, notes: list[str] | None = None) -> scenario.Scenario:
    return scenario.load(home / "s.yaml", changes, [].append if notes is None else notes.append)


@pytest.mark.engine
def test_a_run_and_its_resumption_find_what_lies_beside_the_scenario(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> None:
        result = CliRunner().invoke(app, [*arguments, "--executor", "local"])
        assert result.exit_code == 0, result.output

    run("launch", "../home/s.yaml", "--out", str(tmp_path / "runs"))
    [folder] = (tmp_path / "runs").iterdir()
    saved = folder / "scenario.yaml"
    saved.write_text(saved.read_text().replace("rounds: 1", "rounds: 2"))
    (tmp_path / "third" / "images").mkdir(parents=True)  # not taken for the run's
    monkeypatch.chdir(tmp_path / "third")
    run("resume", str(folder), "--extend")


def test_the_current_folder_comes_second_and_is_said(home: Path) -> None:
    notes: list[str] = []
    elsewhere = Path.cwd() / "images"
    _images(elsewhere)
    assert load(home, notes=notes).data.parameters["root"] == str(home / "images")
    assert notes == []
    (home / "images").rename(home / "moved")
    assert load(home, notes=notes).data.parameters["root"] == str(elsewhere)
    assert set(notes) == {f"{home / 'images'} not found; using {elsewhere} from the current folder."}
    elsewhere.rename(elsewhere.with_name("gone"))
    assert load(home).data.parameters["root"] == str(home / "images")  # where it is expected


def test_paths_of_the_command_line_are_relative_to_the_current_folder(home: Path) -> None:
    found = load(home, "data.root=images", "metrics.evaluator=e.pt")
    assert found.data.parameters["root"] == str(Path.cwd() / "images")
    assert found.metrics.evaluator == Path.cwd() / "e.pt"


def test_every_place_of_a_scenario(home: Path) -> None:
    document = {
        "data": {"name": "words", "train": [{"format": "svt", "root": "x"}, {"format": "rendered", "font": "cmr10"}]},
        "metrics": {"lpips_weights": "w", "recogniser": "~/r.pt"},
        "defences": [{"name": "refiner", "evaluator": "e.pt"}],
        "arms": {"a": [{"name": "refiner", "evaluator": "e.pt"}], "b": {"model": {"name": "nets/path_net.py:net"}}},
        "attacks": [{"name": "ggl", "generator": "g.pt"}, {"name": "idlg", "label": "no.py:label"}],
        "sweep": {
            "fields": {
                "data": [{"name": "parquet", "train": "p", "test": None}],
                "attacks.ggl.generator": ["g.pt"],
                "arms.a.defences.refiner.evaluator": ["e.pt"],
                "training.lr": {"low": 0, "high": 1},
                "seed": [1],
            }
        },
    }
    find_inputs(document, [home])
    assert document == {
        "data": {
            "name": "words",
            "train": [{"format": "svt", "root": f"{home}/x"}, {"format": "rendered", "font": "cmr10"}],
        },
        "metrics": {"lpips_weights": f"{home}/w", "recogniser": "~/r.pt"},
        "defences": [{"name": "refiner", "evaluator": f"{home}/e.pt"}],
        "arms": {
            "a": [{"name": "refiner", "evaluator": f"{home}/e.pt"}],
            "b": {"model": {"name": "path_net:net"}},
        },
        "attacks": [{"name": "ggl", "generator": f"{home}/g.pt"}, {"name": "idlg", "label": "no.py:label"}],
        "sweep": {
            "fields": {
                "data": [{"name": "parquet", "train": f"{home}/p", "test": None}],
                "attacks.ggl.generator": [f"{home}/g.pt"],
                "arms.a.defences.refiner.evaluator": [f"{home}/e.pt"],
                "training.lr": {"low": 0, "high": 1},
                "seed": [1],
            }
        },
    }


@pytest.mark.engine
def test_fields_that_name_files_are_paths() -> None:
    """What is found follows from the type `Path`: a field that says it is a file has it."""
    for kind in registry.KINDS:
        for name in registry.table(kind):
            target = registry.find(kind, name)
            said = registry.said_of_fields(target) if isinstance(target, type) else {}
            for field, info in getattr(target, "__pydantic_fields__", {}).items():
                if {"File", "file", "Folder", "folder"} & set(said.get(field, "").split(" ")[:3]):
                    assert "Path" in str(info.annotation), f"{kind} {name}.{field}: {info.annotation}"


@pytest.mark.parametrize("kind", registry.KINDS)
def test_a_missing_file_is_told_from_an_unknown_name(kind: str) -> None:
    if kind == "metrics":  # they are named, not imported, by a scenario
        return
    with pytest.raises(UserError, match=r"there is no file nets/none\.py for "):
        registry.find(kind, "nets/none.py:Thing")
    with pytest.raises(UserError, match=r"'nets/none\.py' is a file: .* as nets/none\.py:Name"):
        registry.find(kind, "nets/none.py")
    with pytest.raises(UserError, match=r"unknown .* 'nothing': .* or a dotted path"):
        registry.find(kind, "nothing")


def test_names_in_a_scenario_that_lead_nowhere(home: Path) -> None:
    with pytest.raises(UserError, match=r"model\.name: there is no file nets/none\.py"):
        load(home, "model=nets/none.py:Net")
    with pytest.raises(UserError, match=r"unknown model 'resnet19': did you mean 'resnet1"):
        load(home, "model=resnet19")
    with pytest.raises(UserError, match=r"data\.name: unknown dataset 'x/t\.parquet': .*train: FILE"):
        load(home, "data=x/t.parquet")
    with pytest.raises(UserError, match=r"defences\.0\.name: there is no file mine\.py"):
        load(home, 'defences=["mine.py:Mine"]')


@pytest.mark.parametrize("odd", ["x" * 5000, "~nobody-here/x", "$UNSET/x", "a/" * 3000, "."])
def test_paths_that_no_file_can_have_end_in_words(home: Path, odd: str) -> None:
    load(home, f"metrics.evaluator={odd}", f"data.root={odd}")
    with pytest.raises(UserError, match="there is no file"):
        load(home, f"model={odd}.py:net")


def test_a_module_that_another_one_hides(home: Path) -> None:
    (home / "json.py").write_text(NET)
    (home / "my-net.py").write_text(NET)
    with pytest.raises(UserError, match=f"another module is called 'json', {json.__file__}; rename the file"):
        scenario.load(_with(home, "json.py:net"))
    with pytest.raises(UserError, match=r"my-net\.py"):
        scenario.load(_with(home, "my-net.py:net"))


def _with(home: Path, model: str) -> Path:
    (home / "s.yaml").write_text(TEXT.replace("nets/path_net.py:net", model))
    return home / "s.yaml"


def test_validate_names_the_code_in_files(home: Path) -> None:
    assert scenario.dotted_paths(TEXT, ["data=x/y.py:Set"]) == ["nets/path_net.py:net", "x/y.py:Set"]


@pytest.mark.parametrize("arm", [[{"name": "gaussian"}, "prune"], {"defences": [{"name": "gaussian"}, "prune"]}])
@pytest.mark.parametrize("defence", ["gaussian", "0", "defences.gaussian", "defences.0"])
def test_defences_of_an_arm_in_either_form_by_name_or_index(arm: object, defence: str) -> None:
    document = scenario.with_changes({"arms": {"a.b": copy.deepcopy(arm)}}, [f"arms.a.b.{defence}.sigma=0.5"])
    of_arm = document["arms"]["a.b"]
    assert (of_arm if isinstance(of_arm, list) else of_arm["defences"])[0] == {"name": "gaussian", "sigma": 0.5}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("arms.a.defences.nois.sigma", r"arms\.a\.defences has 0 \(gaussian\), 1 \(prune\)"),
        ("arms.a.nois.sigma", r"arms\.a has 0 \(gaussian\), 1 \(prune\)"),
        ("arms.a.2.sigma", r"arms\.a has 0 \(gaussian\), 1 \(prune\)"),
        ("arms.b.gaussian.sigma", r"arms has a$"),
        ("name.x", "name has 't'"),
        ("attacks.idlg.iterations", r"attacks has nothing in it"),
    ],
)
def test_set_names_what_is_there(change: str, said: str) -> None:
    document = {"name": "t", "arms": {"a": ["gaussian", "prune"]}, "attacks": []}
    with pytest.raises(UserError, match=rf"--set {change}=1: '{change}' not found; {said}"):
        scenario.with_changes(document, [f"{change}=1"])


def test_an_entry_goes_by_its_label_and_by_a_name_that_no_other_has() -> None:
    attacks = [{"name": "idlg", "label": "blind"}, {"name": "idlg", "label": "informed"}, {"name": "dlg"}]
    changed = scenario.with_changes({"attacks": attacks}, ["attacks.informed.iterations=2", "attacks.dlg.iterations=3"])
    assert [attack.get("iterations") for attack in changed["attacks"]] == [None, 2, 3]
    with pytest.raises(UserError, match=r"0 \(idlg, label blind\), 1 \(idlg, label informed\), 2 \(dlg\)"):
        scenario.with_changes({"attacks": attacks}, ["attacks.idlg.iterations=2"])


def test_an_arm_that_is_a_list_takes_other_fields() -> None:
    changed = scenario.with_changes({"arms": {"a": ["gaussian"]}}, ["arms.a.training.lr=1"])
    assert changed["arms"]["a"] == {"defences": ["gaussian"], "training": {"lr": 1}}


def test_a_name_that_a_module_lacks_is_told_beside_those_that_it_has(home: Path) -> None:
    (home / "xray.py").write_text("from math import sqrt\nclass XrayNet: ...\n_HIDDEN = 1\n")
    registry.search(str(home))
    with pytest.raises(UserError, match=r"no 'XRayNet'; did you mean 'XrayNet'\? \(valid: XrayNet\)$"):
        registry.find("models", "xray:XRayNet")


def test_a_module_that_is_nowhere_is_told_from_one_that_imports_what_is_not_there(home: Path) -> None:
    with pytest.raises(UserError, match=r"import 'nowhere' .*: no nowhere\.py in .*FOLDER/nowhere\.py:Net"):
        registry.find("models", "nowhere:Net")
    (home / "needy.py").write_text("import nothing_like_this\n")
    registry.search(str(home))
    with pytest.raises(UserError, match=r"cannot import 'needy' .*'nothing_like_this'; install"):
        registry.find("models", "needy:Net")


def test_initials_mean_the_name() -> None:
    assert nearest("bce", ["binary_cross_entropy", "cross_entropy"]).startswith("did you mean 'binary_cross_entropy'?")
