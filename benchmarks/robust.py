"""Robust rules against malicious clients: the table of accuracy by rule and attacker, in medians over seeds.

    python -m benchmarks.robust [SCENARIO] [--seeds 1 2 3 4 5] [--arms krum median ...] [--set path=value ...]

Plays a scenario with `opponents`, by default scenarios/robust.yaml, once for each seed: other weights, other malicious
clients, other batches. One process, one thread, no Ray. Markdown goes to the standard output; a cell is the test
accuracy after the last round and, where the attacker plants a backdoor, how often that works, both in percent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

import torch

from rayfed.aggregation.server import GlobalModel, TreeFold
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.core.seeds import torch_generator
from rayfed.errors import UserError
from rayfed.scenario import Scenario, load
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import aggregation_of
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.store.schemas import VERSUS

SCENARIO = Path(__file__).parent.parent / "scenarios" / "robust.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="?", default=str(SCENARIO))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--arms", nargs="+", help="all by default")
    parser.add_argument("--set", nargs="+", default=[], dest="changes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    for seed in chosen.seeds:
        scenario = load(chosen.scenario, [*chosen.changes, f"seed={seed}"])
        inputs = prepare_inputs(scenario)
        runtime = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
        for name in scenario.played:
            arm, _, opponent = name.partition(VERSUS)
            if chosen.arms is None or arm in chosen.arms:
                found.setdefault((arm, opponent), []).append(played(scenario, runtime, name))
                print(seed, name, *found[arm, opponent][-1], file=sys.stderr)
    print(table(found))


def played(scenario: Scenario, runtime: ClientWorker, arm: str) -> tuple[float, float | None]:
    """Test accuracy after the last round, and the backdoor's if there is one; who diverges has learnt nothing."""
    built = runtime.arm(arm)
    model = GlobalModel(built.weights, built.buffers, ServerOptimiser("sgd", built.spec.server_lr, 0.0))
    rule = aggregation_of(built.spec)
    tests = len(runtime.data.test_labels)
    for round in range(scenario.federation.rounds):
        cohorts = plan.cohorts(scenario, round)
        fold = TreeFold(rule, len(cohorts))
        for index, clients in enumerate(cohorts):
            try:
                partial, _ = runtime.cohort(arm, Sent(round, model.weights, model.buffers), clients, {})
            except UserError:
                return 1 / len(runtime.data.classes), None
            fold.add(index, partial)
        model.apply(*rule.combine(fold.total(), torch_generator(round)))
    last = Sent(scenario.federation.rounds, model.weights, model.buffers)
    accuracy = runtime.evaluate(arm, last, 0, tests)[1] / tests
    if not runtime.malicious[arm].poisoning.has_trigger:
        return accuracy, None
    taken, tried = runtime.evaluate_backdoor(arm, last, 0, tests)
    return accuracy, taken / tried


def table(found: dict[tuple[str, str], list[tuple[float, float | None]]]) -> str:
    """Rules down, attackers across."""
    arms, opponents = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    lines = ["| rule | " + " | ".join(opponents) + " |", "| --- " * (len(opponents) + 1) + "|"]
    for arm in arms:
        lines.append(f"| `{arm}` | " + " | ".join(cell(found[arm, opponent]) for opponent in opponents) + " |")
    return "\n".join(lines)


def cell(runs: list[tuple[float, float | None]]) -> str:
    """`96.1`, or `96.1 / 88.0` with the backdoor's share."""
    accuracies, backdoors = zip(*runs, strict=True)
    shown = f"{100 * median(accuracies):.1f}"
    known = [share for share in backdoors if share is not None]
    return f"{shown} / {100 * median(known):.1f}" if known else shown


if __name__ == "__main__":
    main()
