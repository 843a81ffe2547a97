"""Extras: the first commands run without them, and other commands name the extra that they need."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rayfed.errors import MissingExtraError, require_extra
from rayfed.report.html import page
from tests.conftest import REPOSITORY
from tests.helpers.command import LOCAL, MINIMAL, run
from tests.helpers.result_fixtures import attacked, small_run

EXTRAS = {
    "search": ("optuna", "cmaes", "moocore"),
    "text": ("tokenizers", "rouge_score"),
    "plots": ("plotly",),
    "export": ("pandas", "tabulate"),
    "gate": ("jsonschema",),
    "crypto": ("flint",),
    "medical": ("pydicom", "tifffile"),
    "hub": ("transformers", "timm", "peft"),
    "aws": ("s3fs",),
    "trackers": ("mlflow", "wandb"),
}
"""Modules of each extra in `all`. Without `tensorboardX`, which Ray brings."""
FIRST_COMMANDS = """
import json, sys
from importlib.machinery import PathFinder

blocked = sys.argv[1].split()

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
from typer.testing import CliRunner

import rayfed
from rayfed.cli import app

codes = {}
for command in json.loads(sys.argv[2]):
    result = CliRunner().invoke(app, command)
    codes[" ".join(command)] = result.exit_code
rayfed.load(sys.argv[3]).verdicts()
print(json.dumps(codes))
"""
SWEEP = f"{MINIMAL}sweep: {{fields: {{training.lr: [0.1, 0.2]}}}}"
RESULT = {"arms": {"none": []}, "metrics": {"names": ["psnr"]}}
GENERATOR = "attacks=[{name: ggl, generator: g.npz, observes: gradient}]"


@pytest.mark.engine
def test_the_first_commands_need_no_extra(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(MINIMAL)
    (tmp_path / "grid.yaml").write_text(SWEEP)
    folder = small_run(str(tmp_path), RESULT)
    folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=9.0)])
    small = ("--set", "attacks.0.iterations=1", "--set", "federation.rounds=1", "--set", "data.train_samples=200")
    commands = [
        ["--help"],
        ["new", "mine"],
        *(["list", kind] for kind in ("attacks", "metrics", "models", "datasets", "protections")),
        ["validate", "noniid"],
        ["validate", "encrypted"],
        ["launch", "noniid", *LOCAL, *small],
        [
            "audit",
            "--model",
            "mlp",
            "--data",
            "digits",
            "--size",
            "8",
            "--batch",
            "1",
            "--images",
            "1",
            "--iterations",
            "1",
            "--defence",
            "{name: gaussian, sigma: 0.1}",
            *LOCAL,
        ],
        ["sweep", "grid.yaml", *LOCAL],
        ["report", folder.url],
        ["recommend", folder.url, "--max-psnr", "15"],
        ["gate", folder.url, "--fail-above", "15"],
    ]
    # pandas is Ray's, and PyArrow converts tables to its frames
    blocked = [module for modules in EXTRAS.values() for module in modules if module != "pandas"]
    arguments = [sys.executable, "-c", FIRST_COMMANDS, " ".join(blocked), json.dumps(commands), folder.url]
    result = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, check=True)
    codes = json.loads(result.stdout.splitlines()[-1])
    assert not {command: code for command, code in codes.items() if code not in (0, 3)}  # 3: the gate fails


@pytest.mark.parametrize("module", ["optuna", "cmaes", "tokenizers", "rouge_score", "pandas", "tabulate",
                                    "jsonschema", "flint", "transformers", "timm", "peft", "s3fs"])  # fmt: skip
def test_a_command_names_the_extra_that_it_lacks(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    Path("s.yaml").write_text(MINIMAL)
    Path("baseline.json").write_text("{}")
    launch = ("launch", "s.yaml", *LOCAL, "--set")
    result = small_run(str(tmp_path), RESULT).url
    commands: dict[str, tuple[str, ...]] = {
        "optuna": (
            "sweep",
            "s.yaml",
            *LOCAL,
            "--set",
            "sweep={search: optuna, samples: 2, objectives: [test_accuracy], fields: {training.lr: [0.1, 0.2]}}",
        ),
        "cmaes": (*launch, GENERATOR),
        "tokenizers": (*launch, "data={name: text}", "--set", "model=text_rnn"),
        "rouge_score": (*launch, "data={name: text}", "--set", "model=text_rnn"),
        "pandas": ("export", result),
        "tabulate": ("export", result, "--format", "markdown"),
        "jsonschema": ("gate", result, "--baseline", "baseline.json"),
        "flint": ("attack", "broken_key", *LOCAL),
        "transformers": (*launch, "model=hf:folder"),
        "timm": (*launch, "model=timm:resnet18"),
        "peft": (*launch, "model.train={lora: {rank: 2}}"),
        "s3fs": (*launch, "seed=1", "--out", "s3://bucket/runs"),
    }
    [extra] = [name for name, modules in EXTRAS.items() if module in modules]
    code, output = run(*commands[module])
    assert code == 2, output
    assert f"rayfed[{extra}]" in output


def test_a_report_without_plotly_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page._plotly.cache_clear()
    folder = small_run(str(tmp_path), RESULT)
    folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=9.0)])
    code, output = run("report", folder.url)
    assert code == 0, output
    text = folder.read_text("report.html")
    assert "rayfed[plots]" in text
    assert 'id="plot"' not in text


def test_an_extra_has_the_packages_of_the_modules() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["all"] == [f"rayfed[{','.join(EXTRAS)}]"]


def test_a_missing_package_has_its_extra() -> None:
    require_extra("search", "a test", "json")
    with pytest.raises(MissingExtraError) as caught:
        require_extra("search", "a test", "json", "no_such_package")
    assert caught.value.extra == "search"
