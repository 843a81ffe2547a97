"""From the command to the end of the first round: seconds, and processor time of all processes up to there.

    python -m benchmarks.start [--executors local ray] [--times 3] [CHECKOUT ...]

Several checkouts take turns, so that what they are compared by is of the same minutes. Processor time hardly depends on
who else uses the machine; seconds do. On Linux alone: the processes are read from /proc.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
SCENARIO = """
name: start
data: {name: digits, size: 28}
model: benchmarks.work:LeNet5
training: {epochs: 1}
federation: {rounds: 1, clients: 10}
"""
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """What /proc says of one process."""

    parent: int
    name: str
    seconds: float
    """Processor time, its own."""


class Start(NamedTuple):
    """One start."""

    seconds: float
    """From the command to the line of the first round."""
    processor: float
    """Processor time of all processes until then."""
    parts: dict[str, float]
    """The same by kind of process."""


class _Sampler(Thread):
    """Reads again and again what the processes below one have used, for those that end before it is asked."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root, self._over = root, Event()
        self.seen: dict[int, Process] = {}

    def run(self) -> None:
        while not self._over.wait(0.1):
            self.read()

    def read(self) -> None:
        self.seen |= dict(_below(self._root))

    def end(self) -> None:
        self._over.set()
        self.join()


def _below(root: int) -> Iterator[tuple[int, Process]]:
    there = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _read(entry)):
            there[int(entry.name)] = found
    children = defaultdict(list)
    for pid, one in there.items():
        children[one.parent].append(pid)
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid in there:
            yield pid, there[pid]
        waiting += children[pid]


def _read(entry: Path) -> Process | None:
    try:
        text, command = (entry / "stat").read_text(), (entry / "cmdline").read_text()
    except OSError:  # it has ended meanwhile
        return None
    fields = text.rpartition(")")[2].split()
    return Process(int(fields[1]), _kind(command.split("\0")), (int(fields[11]) + int(fields[12])) * _TICK)


def _kind(command: list[str]) -> str:
    if command[0].startswith("ray::"):
        return command[0].partition(".")[0].partition("(")[0].split()[0]
    if "rayfed" in command:
        return "driver"
    known = ("gcs_server", "raylet", "default_worker", "runtime_env", "log_monitor", "monitor.py", "dashboard", "agent")
    return next((f"ray's {name}" for name in known if any(name in part for part in command[:3])), Path(command[0]).name)


def start(checkout: Path, executor: str) -> Start:
    """Start a run of one round and wait for its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "start.yaml"
        path.write_text(SCENARIO)
        command = [sys.executable, "-m", "rayfed", "launch", str(path), "--out", folder, "--executor", executor]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        began, found = perf_counter(), None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment) as process:
            sampler = _Sampler(process.pid)
            sampler.start()
            for line in process.stdout or ():
                if line.startswith("round "):
                    seconds = perf_counter() - began
                    sampler.read()
                    parts: dict[str, float] = defaultdict(float)
                    for one in sampler.seen.values():
                        parts[one.name] += one.seconds
                    found = Start(seconds, sum(parts.values()), dict(parts))
            sampler.end()
        if process.returncode or found is None:
            sys.exit(f"rayfed launch ended with {process.returncode}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[REPOSITORY], metavar="CHECKOUT")
    parser.add_argument("--executors", nargs="+", default=["local", "ray"])
    parser.add_argument("--times", type=int, default=3)
    chosen = parser.parse_args()
    for executor in chosen.executors:
        found: dict[Path, list[Start]] = {checkout.resolve(): [] for checkout in chosen.checkouts}
        for _ in range(chosen.times):
            for checkout, starts in found.items():
                starts.append(start(checkout, executor))
        print(f"--executor {executor}, medians of {chosen.times}; load {os.getloadavg()[0]:.1f}")
        for checkout, starts in found.items():
            seconds, used = (median(getattr(one, what) for one in starts) for what in ("seconds", "processor"))
            print(f"  {checkout.name:12}{seconds:8.1f} s, {used:6.2f} s of processors: ", end="")
            parts = {name for one in starts for name in one.parts}
            of = {name: median(one.parts.get(name, 0.0) for one in starts) for name in parts}
            told = sorted(of.items(), key=lambda item: -item[1])
            print(", ".join(f"{name} {used:.2f}" for name, used in told if used >= 0.05), flush=True)


if __name__ == "__main__":
    main()
