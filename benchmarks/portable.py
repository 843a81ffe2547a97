"""The price of `resources.deterministic: portable`: CPU seconds a round with it and without, in turns.

    python -m benchmarks.portable --repeats 3

Each measurement is a run in a process of its own, on the local executor with one thread. CPU seconds, unlike those of
the clock, are hardly longer on a machine that has other work. The first round of a run, in which libraries choose and
make their kernels, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from rayfed import scenario
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.machine import PORTABLE
from rayfed.simulation.progress import Progress

MODES = ("machine", "portable")
SCENARIOS: dict[str, dict[str, Any]] = {
    "lenet": {
        "data": {"name": "digits", "train_samples": 400, "test_samples": 50},
        "model": "lenet",
        "federation": {"rounds": 6, "clients": 4},
    },
    "resnet18": {
        "data": {"name": "digits", "size": 32, "train_samples": 64, "test_samples": 8},
        "model": "resnet18",
        "federation": {"rounds": 4, "clients": 2},
    },
}


class Clock(Progress):
    """CPU seconds of every round."""

    def __init__(self) -> None:
        self.seconds = list[float]()

    def ready(self, first_round: int) -> None:
        self._begun = process_time()

    def round_done(self, *_: Any) -> None:
        self.seconds.append(process_time() - self._begun)
        self._begun = process_time()


def play(name: str, mode: str) -> list[float]:
    """CPU seconds of the rounds of a scenario but the first."""
    document = {"name": name, **SCENARIOS[name], "resources": {"deterministic": mode}}
    clock = Clock()
    with TemporaryDirectory() as out:
        runner.launch(scenario.parse(json.dumps(document), name), out, local, clock)
    return clock.seconds[1:]


def measured(name: str, mode: str) -> list[float]:
    """What `play` returns in a process of its own."""
    fixed = PORTABLE if mode == "portable" else {}
    kept = {key: value for key, value in os.environ.items() if key not in PORTABLE}
    command = [sys.executable, "-m", "benchmarks.portable", "--play", name, mode]
    done = subprocess.run(command, env={**kept, **fixed}, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--play", nargs=2, metavar=("SCENARIO", "MODE"))
    arguments = parser.parse_args()
    if arguments.play:
        print(json.dumps(play(*arguments.play)))
        return
    for name in SCENARIOS:
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        ratios = []
        for _ in range(arguments.repeats):
            pair = {mode: measured(name, mode) for mode in MODES}
            ratios.append(median(pair["portable"]) / median(pair["machine"]))
            for mode in MODES:
                seconds[mode] += pair[mode]
        told = ", ".join(f"{mode} {median(seconds[mode]):.3f} s" for mode in MODES)
        print(
            f"{name}: {told} a round; ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True
        )


if __name__ == "__main__":
    main()
