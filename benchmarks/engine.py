"""Client updates per second: the engine, a plain loop, two of those side by side, Flower's simulation, pfl-research's.

    python -m benchmarks.engine [--flower-python PATH] [--pfl-python PATH] [--cases 10/100 100/1000] [--rounds 15]
    python -m benchmarks.engine --cases resnet18:10/20 --rounds 3

One thread per process, two of them for every side that has several. The engine plays again with `training.vectorise:
fused`, in two cohorts or in more of 16 clients at most; with ResNet-18, which has batch norm, it cannot. Sides take
turns, round by round, and what is printed are medians of one run: on a machine that others use too, compare the ratios.
With `--turn 5` a side plays five rounds in its turn, of which the first, with what the others left in the processor's
caches, does not count: so rounds follow one another in a run.
`--flower-python` is the interpreter of an environment with `flwr[simulation]`, torch and numpy, `--pfl-python` that of
one with `pfl[pytorch]`, which plays in one process and in two; without it a peer has no turn.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import numpy as np

from actors.executor import on_ray
from benchmarks.work import BATCH, LR, SAMPLES, PlainLoop, Work, data
from rayfed import scenario as scenarios
from rayfed.data.base import Dataset
from rayfed.data.partitions.base import Parts
from rayfed.scenario import Scenario, resolve
from rayfed.simulation.account import Account
from rayfed.simulation.client.arm import build_arm
from rayfed.simulation.client.plan import drawn_clients
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.rounds.federation import Federation
from rayfed.simulation.rounds.round import Round

REPOSITORY = Path(__file__).resolve().parent.parent
PROCESSES = 2
SIDES = 2
"""Of the engine, whose actors share the cores and take turns."""
_MOST_FUSED = 16
"""Clients of a fused cohort."""

_MODELS = {"lenet5": "benchmarks.work:LeNet5", "resnet18": "{name: 'benchmarks.work:ResNet18', batch_norm: train}"}

PlayRound = Callable[[int], float]
"""Plays the round of that number and returns its seconds."""


def scenario_of(work: Work, fused: bool = False) -> Scenario:
    """The work as a scenario; evaluation would come after a last round that is never reached."""
    vectorise, cohort = ("fused", min(ceil(work.per_round / PROCESSES), _MOST_FUSED)) if fused else ("loop", "null")
    return scenarios.parse(
        f"""
        name: benchmark
        model: {_MODELS[work.model]}
        training: {{epochs: 1, batch_size: {BATCH}, lr: {LR}, vectorise: {vectorise}}}
        federation:
          rounds: 1000000
          clients: {work.clients}
          clients_per_round: {work.per_round}
          cohort_size: {cohort}
          evaluate_every: 1000000
          aggregation: {{name: fedavg, weights: uniform}}
        resources: {{clients: {{actors: {PROCESSES}, num_cpus: {1 / SIDES}}}}}
        """
    )


@contextmanager
def engine(work: Work, fused: bool = False) -> Iterator[PlayRound]:
    """The engine as a run uses it, without the files that a run writes."""
    scenario = scenario_of(work, fused)
    images, labels = data(work.clients, work.shape)
    dataset = Dataset(images, labels, images[:1], labels[:1], tuple("0123456789"))
    parts = Parts.from_indices(np.split(np.arange(len(labels)), work.clients))
    arm = build_arm(resolve(scenario)["none"], dataset.sample, len(dataset.classes), scenario.seed)
    inputs = Inputs(
        scenario, dataset, parts, Parts.from_indices([]), [Account(scenario, arm, parts.sizes, dataset.sample)]
    )
    with on_ray()(inputs, Progress()) as executor:
        federation = Federation(inputs, executor, Progress(), {}, lambda *_: {})

        def play(round: int) -> float:
            began = perf_counter()
            done = Round(federation, round, ["none"]).play(due=())
            seconds = perf_counter() - began
            assert len(done.clients) == work.per_round
            return seconds

        yield play


@contextmanager
def plain(work: Work) -> Iterator[PlayRound]:
    """The plain loop, in this process."""
    loop, scenario = PlainLoop(work), scenario_of(work)

    def play(round: int) -> float:
        clients = drawn_clients(scenario, round)
        began = perf_counter()
        loop.round(clients)
        return perf_counter() - began

    yield play


@contextmanager
def side_by_side(work: Work) -> Iterator[PlayRound]:
    """Two plain loops with half of the clients each, which exchange nothing: the floor of what two cores can do."""
    scenario = scenario_of(work)
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), _make_loop, (work,)) as pool:

        def play(round: int) -> float:
            clients = drawn_clients(scenario, round)
            began = perf_counter()
            list(pool.map(_play_in_loop, [clients[i::PROCESSES] for i in range(PROCESSES)]))
            return perf_counter() - began

        yield play


def _make_loop(work: Work) -> None:
    global _loop
    _loop = PlainLoop(work)


def _play_in_loop(clients: list[int]) -> None:
    _loop.round(clients)


@contextmanager
def peer(name: str, python: str, module: str, work: Work, *arguments: int) -> Iterator[PlayRound]:
    """Another engine in a process of its own, which stands still while others have their turn: Flower polls always."""
    command = [python, "-m", module, work.model, *map(str, (work.clients, work.per_round, *arguments))]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "FLWR_TELEMETRY_ENABLED": "0"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, env=env, stdin=-1, stdout=-1, stderr=log, text=True, cwd=REPOSITORY) as process,
    ):
        assert process.stdin
        assert process.stdout

        def play(round: int) -> float:
            assert process.stdin
            process.send_signal(signal.SIGCONT)
            print(file=process.stdin, flush=True)
            answer = next((line.split() for line in process.stdout or () if line.startswith("seconds ")), None)
            process.send_signal(signal.SIGSTOP)
            if answer is None or int(answer[3]) != work.per_round:
                log.seek(0)
                sys.exit(f"{name} failed: {answer}\n{log.read()[-3000:]}")
            return float(answer[1])

        try:
            yield play
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


def compare(
    work: Work, flower_python: str | None, pfl_python: str | None, rounds: int, warm_up: int, turn: int
) -> dict[str, list[float]]:
    """Seconds of every round that counts, side by side."""
    with ExitStack() as stack:
        sides = {"engine": stack.enter_context(engine(work)), "plain loop": stack.enter_context(plain(work))}
        if work.model == "lenet5":
            sides["fused"] = stack.enter_context(engine(work, fused=True))
        sides["two loops"] = stack.enter_context(side_by_side(work))
        played = work, warm_up + -(-rounds // turn) * turn
        if flower_python:
            sides["Flower"] = stack.enter_context(peer("Flower", flower_python, "benchmarks.flower_engine", *played))
        if pfl_python:
            for processes in (1, PROCESSES):
                name = f"pfl in {processes}"
                sides[name] = stack.enter_context(peer(name, pfl_python, "benchmarks.pfl_engine", *played, processes))
        for round in range(warm_up):
            for play in sides.values():
                play(round)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for first in range(warm_up, warm_up + rounds, turn):
            for name, play in sides.items():
                taken = [play(round) for round in range(first, first + turn)]
                seconds[name] += taken[turn > 1 :]
        return seconds


def show(work: Work, seconds: dict[str, list[float]]) -> None:
    """A table of one case: the median, and how many times as fast the engine is, with the quartiles of the rounds."""
    print(f"\n{work} clients a round, {len(seconds['engine'])} rounds; load {os.getloadavg()[0]:.1f}")
    print(f"{'':12}{'s / round':>10}{'updates / s':>13}   engine's ratio (quartiles)")
    for name, taken in seconds.items():
        low, ratio, high = quantiles([t / e for t, e in zip(taken, seconds["engine"], strict=True)], n=4)
        rate = work.per_round / median(taken)
        print(f"{name:12}{median(taken):10.3f}{rate:13.1f}   {ratio:.2f} ({low:.2f} to {high:.2f})", flush=True)


def _work(text: str) -> Work:
    model, _, sizes = text.rpartition(":")
    per_round, clients = map(int, sizes.split("/"))
    return Work(clients, per_round, model or "lenet5")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flower-python", metavar="PATH")
    parser.add_argument("--pfl-python", metavar="PATH")
    parser.add_argument("--cases", nargs="*", type=_work, default=[_work(c) for c in ("10/100", "100/100", "100/1000")])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--turn", type=int, default=1, help="rounds of a side before the next one plays")
    chosen = parser.parse_args()
    print(f"{SAMPLES} samples a client, one epoch in batches of {BATCH}; {PROCESSES} of {os.cpu_count()} cores")
    for name in ("flower", "pfl"):
        if not getattr(chosen, f"{name}_python"):
            print(f"{name} is left out: no --{name}-python")
    # Ray's workers, Flower's too, run at 15: beside other users' work they would lose to the loops, which run at 0.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
    for work in chosen.cases:
        show(work, compare(work, chosen.flower_python, chosen.pfl_python, chosen.rounds, chosen.warm_up, chosen.turn))


if __name__ == "__main__":
    main()
