"""Where the time of a round goes: milliseconds of each phase at the driver, and of the actors' work.

    python -m benchmarks.round_profile [--cases 10/100 100/1000] [--rounds 40] [CHECKOUT ...]

Checkouts take turns, block by block, each in a process of its own; without one, this one has all. Medians and
quartiles; processor time is that of all processes of the run, a round, and hardly depends on who else uses the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PHASES = {
    "_begin": "begin",
    "_train": "train, to the last report",
    "_ask": "ask",
    "_step": "step, sent",
    "_finished": "wait for the step",
    "_end": "end",
}
"""Methods of `Round.play`, in their order."""


def profiled(case: str, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds by phase of each round of a case of `benchmarks.engine`, after four that do not count."""
    import psutil

    from benchmarks.engine import _work, engine
    from rayfed.simulation.rounds.round import Round

    found: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Round, *args: Any) -> Any:
            began = perf_counter()
            result = method(self, *args)
            found[name].append(1e3 * (perf_counter() - began))
            if name == PHASES["_train"]:
                found["work of an actor"].append(1e3 * sum(row["actor_seconds"] for row in self.tables.rounds) / 2)
            return result

        return call

    for method, name in PHASES.items():
        setattr(Round, method, timed(name, getattr(Round, method)))
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
    with engine(_work(case)) as play:
        for round in range(4):
            play(round)
        found.clear()
        everybody = [psutil.Process(), *psutil.Process().children(recursive=True)]
        before = _processor_time(everybody)
        found["round"] = [1e3 * play(round) for round in range(4, 4 + rounds)]
        found["processor time"] = [1e3 * (_processor_time(everybody) - before) / rounds]
    return found


def _processor_time(processes: list[Any]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[REPOSITORY])
    parser.add_argument("--cases", nargs="*", default=["10/100", "100/1000"])
    parser.add_argument("--rounds", type=int, default=40, help="of a block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--one", metavar="CASE", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print("found", json.dumps(profiled(chosen.one, chosen.rounds)))
        return
    for case in chosen.cases:
        found: dict[Path, dict[str, list[float]]] = {at: defaultdict(list) for at in chosen.checkouts}
        for _ in range(chosen.blocks):
            for checkout, all_of_it in found.items():
                command = [sys.executable, __file__, "--one", case, "--rounds", str(chosen.rounds)]
                env = os.environ | {"PYTHONPATH": str(checkout.resolve())}
                done = subprocess.run(command, env=env, stdout=-1, text=True, check=True, cwd=checkout)
                line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
                for name, values in json.loads(line.removeprefix("found ")).items():
                    all_of_it[name] += values
        print(f"\n{case} clients, {chosen.blocks} x {chosen.rounds} rounds, load {os.getloadavg()[0]:.0f}; ms")
        for checkout, phases in found.items():
            print(checkout.resolve().name)
            for name, values in phases.items():
                low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
                print(f"  {name:26}{median(values):9.1f}  ({low:.1f} to {high:.1f})", flush=True)


if __name__ == "__main__":
    main()
