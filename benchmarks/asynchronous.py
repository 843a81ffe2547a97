"""Simulated seconds that FedAvg and FedBuff take to a test accuracy, by how unlike the clients' devices are.

    python -m benchmarks.asynchronous [--seeds 0 1 2] [--spreads 0 0.5 1 1.5] [--target 0.85]

The shape of Nguyen et al. 2022. An MLP on digits, dealt to 300 clients alike; 30 tasks are in flight: FedAvg waits for
all 30, FedBuff steps on 10. Speeds of devices are log-normal about one median with the `spread` of their logarithm,
networks take no time. Means over seeds, with the least and the most. No Ray; nothing is timed, so neither other work on
the machine nor its speed changes a figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from rayfed import scenario as scenarios
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress

IN_FLIGHT = 30
TEXT = """
name: asynchronous
data: {name: digits, size: 8}
model: {name: mlp, hidden: [32]}
training: {batch_size: 5, epochs: 5, lr: 0.1}
federation:
  rounds: 1000
  clients: 300
  clients_per_round: 30
  system: {reference: 1.0e6}
"""
RULES = {
    "fedavg": (),
    "fedbuff": (
        "federation.aggregation=fedbuff",
        "federation.clients_per_round=10",
        f"federation.system.concurrency={IN_FLIGHT}",
    ),
}


class Reached(Exception):
    """The accuracy is reached: the rest of the run is not needed."""


@dataclass
class Racing(Progress):
    """Progress that adds up a run's simulated seconds, steps and updates until an accuracy is reached."""

    target: float
    seconds: float = 0.0
    steps: int = 0
    updates: int = 0

    def round_done(self, rows: Sequence[dict[str, Any]], *others: object) -> None:
        """Add the round."""
        [row] = rows
        self.seconds += row["simulated_seconds"]
        self.steps += 1
        self.updates += row["clients"]
        if row["test_accuracy"] >= self.target:
            raise Reached


def race(rule: str, spread: float, seed: int, target: float) -> Racing:
    """Return what a rule needs to the target accuracy; raises `RuntimeError` if it does not get there."""
    changes = (*RULES[rule], f"federation.system.compute_spread={spread}", f"seed={seed}")
    racing = Racing(target)
    with TemporaryDirectory() as folder:
        try:
            runner.launch(scenarios.parse(TEXT, changes=changes), folder, local, racing)
        except Reached:
            return racing
    raise RuntimeError(f"{rule} did not reach {target:.0%} in {racing.steps} steps: take a lower --target")


def told(figures: Sequence[float], form: str) -> str:
    """Return the mean with the least and the most."""
    return f"{fmean(figures):{form}} ({min(figures):{form}} to {max(figures):{form}})"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5])
    parser.add_argument("--target", type=float, default=0.85)
    options = parser.parse_args()
    print("| spread of compute | FedAvg (s) | FedBuff (s) | FedBuff is ahead by | FedAvg steps | FedBuff steps |")
    print("| --- | --- | --- | --- | --- | --- |")
    for spread in options.spreads:
        avg, buff = ([race(rule, spread, seed, options.target) for seed in options.seeds] for rule in RULES)
        ahead = [waits.seconds / steps.seconds for waits, steps in zip(avg, buff, strict=True)]
        seconds = [told([one.seconds for one in each], ".1f") for each in (avg, buff)]
        steps = [told([one.steps for one in each], ".0f") for each in (avg, buff)]
        print("|", " | ".join([f"{spread:g}", *seconds, told(ahead, ".1f"), *steps]), "|", flush=True)


if __name__ == "__main__":
    main()
