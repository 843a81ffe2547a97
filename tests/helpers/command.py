"""Run the command line in this process, and a minimal scenario."""

from __future__ import annotations

from typer.testing import CliRunner

from rayfed.cli import app

MINIMAL = """
name: t
data: {name: digits, size: 8, train_samples: 100, test_samples: 20}
model: {name: mlp, hidden: [8]}
federation: {rounds: 1, clients: 4}
resources: {clients: {actors: 1}, attackers: {actors: 1}}
"""


LOCAL = ("--executor", "local")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())
