"""What a command imports before it is used: a start is mostly imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.result_fixtures import attacked, small_run

HEAVY = (
    "IPython dp_accounting lpips matplotlib optuna pandas plotly ray scipy skimage sklearn sympy tenseal timm torch"
    " torch._dynamo torchvision transformers triton"
)
"""Modules whose import takes a tenth of a second or more, with what they bring."""

STARTED = """
name: start
data: {name: digits, size: 8, train_samples: 100, test_samples: 40}
model: lenet
federation: {rounds: 1, clients: 5}
"""

COMMANDS = f"""
import json, sys

heavy = "{HEAVY}"
loaded = lambda: [name for name in heavy.split() if name in sys.modules]
said = {{}}
from rayfed.cli import app
said["rayfed.cli"] = loaded()
app(["validate", sys.argv[1]], standalone_mode=False)
said["validate"] = loaded()
from rayfed.report.terminal.run import RunView
shown = RunView.round_done

def round_done(*args):
    said["launch"] = loaded()
    shown(*args)

RunView.round_done = round_done
app(["launch", sys.argv[1], "--executor", "local", "--out", sys.argv[2]], standalone_mode=False)
print(json.dumps(said))
"""


def test_the_command_line_imports_nothing_heavy() -> None:
    code = f"import rayfed.cli, sys; print([name for name in {HEAVY.split()} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.engine
def test_a_launch_imports_what_it_uses(tmp_path: Path) -> None:
    path = tmp_path / "start.yaml"
    path.write_text(STARTED)
    command = [sys.executable, "-c", COMMANDS, str(path), str(tmp_path)]
    found = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert json.loads(found.stdout.splitlines()[-1]) == {
        "rayfed.cli": [],
        "validate": ["torch"],
        "launch": ["pandas", "torch"],  # pyarrow imports pandas as it makes its first table
    }


@pytest.mark.engine
def test_commands_on_results_import_no_pytorch(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": [], "noise": ["gaussian"]}, "metrics": {"names": ["psnr"]}})
    folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=30.0), attacked("noise", "dlg", psnr=9.0)])
    other = small_run(str(tmp_path), {"arms": {"none": []}}, "other")
    commands = [
        (["export", folder.url], 0),
        (["export", folder.url, "--figures", str(tmp_path / "figures")], 0),
        (["recommend", folder.url, "--max-psnr", "15"], 0),
        (["compare", folder.url, other.url], 0),
        (["gate", folder.url, "--fail-above", "psnr=15"], 0),
    ]
    code = f"""
import sys
from rayfed.cli import app
for command, expected in {commands}:
    try:
        code = app(command, standalone_mode=False) or 0
    except SystemExit as end:
        code = end.code
    assert code == expected, (command, code)
    assert "torch" not in sys.modules, command
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert not found.returncode, found.stderr
