"""How a round's time and memory grow: with the clients of the round, and with all the clients that there are.

    python -m benchmarks.scale --out docs        # scaling.json and scaling.svg, about four minutes on two cores

A round is played on two client actors, as a run plays it, and its checkpoint is written: LeNet (13,426 parameters), ten
digits a client, one local step, no evaluation. Memory is the PSS of all processes of the benchmark, Ray's among them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from actors.actor_pool import ActorPool
from actors.cluster import allot, connected
from actors.executor import TrialExecution
from benchmarks.memory import Watch, family
from rayfed import scenario as scenarios
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.rounds.federation import Federation
from rayfed.simulation.rounds.round import Round, count_calls
from rayfed.store import checkpoint
from rayfed.store.folder import RunFolder

TOTAL, PER_ROUND = 100_000, 100
"""What stays the same while the other varies."""
PER_ROUNDS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
TOTALS = (1_000, 10_000, 100_000, 1_000_000)
TEXT = """
name: scale
data: {name: digits, size: 28, test_samples: 100}
partition: {name: resampled, samples: 10}
model: {name: lenet, activation: relu}
training: {batch_size: 10}
federation: {rounds: 100, clients: 100, evaluate_every: 1000000}
resources: {clients: {actors: 2, num_cpus: 1}}
"""
BARE = """
import os, sys, psutil, torch
from rayfed import scenario as scenarios
from rayfed.models.build import build_model
from rayfed.gradients import buffers_of, gradient, weights_of
torch.set_num_threads(1)
model = build_model("lenet", {"activation": "relu"}, (1, 28, 28), 10, seed=0)
images, labels = torch.rand(10, 1, 28, 28), torch.zeros(10, dtype=torch.long)
gradient(model, weights_of(model), buffers_of(model), images, labels)
print(psutil.Process().memory_info().rss)
"""
"""A process that imports torch and a model and takes one gradient."""


@dataclass(frozen=True)
class Point:
    """One case, measured."""

    clients: int
    per_round: int
    cohorts: int
    seconds: float
    """Median of the rounds."""
    actor_seconds: float
    """Of client actors at work in such a round, all together."""
    peak: int
    """Bytes, PSS of all processes."""


@contextmanager
def federation(
    clients: int, per_round: int, cohorts: int, actor_pool: ActorPool, folder: RunFolder
) -> Iterator[Federation]:
    changes = [f"federation.clients={clients}", f"federation.clients_per_round={per_round}"]
    changes.append(f"federation.cohort_size={ceil(per_round / cohorts)}")
    inputs = prepare_inputs(scenarios.parse(TEXT, changes=changes))
    allotment = allot(inputs.scenario, *count_calls(inputs.scenario, len(inputs.data.test_labels)))
    with TrialExecution(allotment, actor_pool)(inputs, Progress()) as executor:
        yield Federation(inputs, executor, Progress(), {}, partial(checkpoint.load_states, folder))


def measure(clients: int, per_round: int, actor_pool: ActorPool, cohorts: int = 8) -> Point:
    rounds = 5 if per_round <= 300 else 1
    seconds, working = [], []
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create(place, "scale")
        with federation(clients, per_round, cohorts, actor_pool, folder) as played, Watch(os.getpid()) as watch:
            for round in range(rounds + (per_round <= 1000)):
                began = perf_counter()
                tables = Round(played, round, ["none"]).play(due=())
                checkpoint.save(folder, checkpoint.Checkpoint(round, played.saved, played.changed))
                seconds.append(perf_counter() - began)
                working.append(tables.rounds[0]["actor_seconds"])
    point = Point(clients, per_round, cohorts, median(seconds[-rounds:]), median(working[-rounds:]), watch.peak)
    print(f"{clients:>9,} clients, {per_round:>6,} a round in {cohorts:>3} cohorts: {point.seconds:8.3f} s, ", end="")
    print(f"{point.per_round / point.seconds:6.0f} clients/s, {point.peak / 2**20:6.0f} MiB", flush=True)
    return point


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line through the logarithms: 1 where y grows as x does, 0 where it does not."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def actors_memory() -> tuple[list[int], int]:
    """Resident bytes of each client actor, and of a process that imports torch and the model."""
    titles = [(p, " ".join(p.cmdline())) for p in family(os.getpid()) if p.is_running()]
    actors = [p.memory_info().rss for p, title in titles if title.startswith("ray::ClientActor")]
    bare = subprocess.run([sys.executable, "-c", BARE], check=True, capture_output=True, text=True)
    return actors, int(bare.stdout)


def draw(path: Path, growing: Sequence[Point], flat: Sequence[Point]) -> None:
    """Seconds and memory over both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.4, 3.4))
    over = [(growing, [p.per_round for p in growing], "clients a round, of 100,000", "o-")]
    over += [(flat, [p.clients for p in flat], "clients in all, 100 a round", "s--")]
    for points, xs, label, style in over:
        axes[0].loglog(xs, [p.seconds for p in points], style, label=label)
        axes[1].semilogx(xs, [p.peak / 2**30 for p in points], style, label=label)
    axes[0].set_ylabel("seconds a round")
    axes[1].set_ylabel("GiB of all processes at their peak")
    axes[1].set_ylim(bottom=0)
    for each in axes:
        each.set_xlabel("clients")
        each.grid(alpha=0.3)
        each.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of scaling.json and scaling.svg")
    chosen = parser.parse_args()
    actor_pool = ActorPool()
    with connected(None, scenarios.parse(TEXT)):
        flat = [measure(clients, PER_ROUND, actor_pool) for clients in TOTALS]
        growing = [measure(TOTAL, per_round, actor_pool) for per_round in PER_ROUNDS]
        fine = measure(TOTAL, 300, actor_pool, cohorts=300)
        actors, bare = actors_memory()
    beyond = [p for p in growing if p.per_round >= 100]
    rising = slope([p.per_round for p in beyond], [p.seconds for p in beyond])
    level = slope([p.clients for p in flat], [p.seconds for p in flat])
    print(f"slope of seconds over clients a round, from 100 on: {rising:.2f}; over all clients: {level:.2f}")
    print(
        f"client actors: {', '.join(f'{rss / 2**20:.0f}' for rss in actors)} MiB; bare: {bare / 2**20:.0f} MiB", end=""
    )
    print(f"; ratio {max(actors) / bare:.2f}; load {os.getloadavg()[0]:.1f}")
    points = {"growing": [asdict(p) for p in growing], "flat": [asdict(p) for p in flat]}
    points["fine"] = [asdict(fine)]
    found = points | {"slopes": [rising, level], "actors": actors, "bare": bare}
    (chosen.out / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(chosen.out / "scaling.svg", growing, flat)


if __name__ == "__main__":
    main()
