"""Benchmarks: all of them import, whatever was renamed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

IMPORT = """
import importlib, sys
ours = ("actors", "benchmarks", "rayfed", "tests")
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:  # another framework, which is not installed
        if error.name.split(".")[0] in ours:
            raise
"""


@pytest.mark.engine
def test_every_benchmark_imports() -> None:
    names = sorted(path.stem for path in (REPOSITORY / "benchmarks").glob("*.py"))
    subprocess.run([sys.executable, "-c", IMPORT, *names], check=True, cwd=REPOSITORY)
