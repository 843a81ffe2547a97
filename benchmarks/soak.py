"""Soak: a small scenario with attacks and client states played again and again; does anything grow?

    python -m benchmarks.soak --executor local --minutes 60 --out soak

Launches of many rounds follow each other in one process, on one Ray: every start and end of Ray leaves a thread and two
or three sockets in its process, without any code of ours (Ray 2.60). Every few seconds resident memory, open files,
threads and processes of the driver and its descendants are sampled, with the files in /dev/shm and in the temporary
folder, which is the soak's own, Ray's included. Ray's log monitor opens the logs of every worker, up to 200 files.
`OUT/samples.parquet` has the samples, `OUT/soak.svg` draws them. A line is fitted to each quantity after the warm-up:
what grows is a slope whose 95 % interval, from the means of blocks, is above what is allowed (exit code 1); where
allowed growth lies inside the interval, the time was too short to say.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import stats

from actors import local_ray
from actors.executor import on_ray
from rayfed import scenario
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress

ALLOWED = {"memory": 20.0, "files": 5.0, "threads": 5.0, "processes": 5.0, "shared": 5.0, "temporary": 20.0}
"""Growth an hour that counts as none: megabytes (memory, shared, temporary) or numbers."""
WARM_UP = 0.3
"""Share of the time that is left out of the fit: allocators and caches fill."""
BLOCKS = 12
"""Blocks of samples whose means the line is fitted to, for neighbouring samples say the same."""
GROWS, FLAT = "GROWS", "flat"
SCENARIO: dict[str, Any] = {
    "name": "soak",
    "data": {"name": "digits", "size": 8, "train_samples": 100, "test_samples": 20},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"lr": 0.05, "batch_size": 8},
    "federation": {"rounds": 30, "clients": 6, "clients_per_round": 4},
    "defences": [{"name": "top_k", "k": 0.1, "error_feedback": True}],
    "attacks": [{"name": "idlg", "iterations": 5, "rounds": list(range(0, 30, 5)), "victims": 1}],
    "resources": {"clients": {"actors": 1}, "attackers": {"actors": 1}},
}


class Slope(NamedTuple):
    """Growth an hour, with its 95 % interval."""

    value: float
    low: float
    high: float


def sample(temporary: Path) -> dict[str, float]:
    """What the driver and its descendants hold now; memory is counted once where processes share it."""
    driver = psutil.Process()
    counted = {"memory": 0.0, "files": 0.0, "threads": 0.0, "processes": 0.0}
    for process in [driver, *driver.children(recursive=True)]:
        try:
            with process.oneshot():
                found = process.memory_full_info().pss / 1e6, process.num_fds(), process.num_threads(), 1
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        for name, value in zip(counted, found, strict=True):
            counted[name] += value
    return counted | {"shared": _megabytes(Path("/dev/shm")), "temporary": _megabytes(temporary)}


def _megabytes(folder: Path) -> float:
    """Space that the files of a folder take, in megabytes; files that go meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total / 1e6


def slope(hours: np.ndarray, values: np.ndarray) -> Slope:
    """Fit a line to the means of `BLOCKS` blocks of samples."""
    blocks = [np.mean(part, axis=1) for part in np.array_split(np.stack([hours, values]), BLOCKS, axis=1)]
    x, y = np.transpose(blocks)
    fit = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, BLOCKS - 2) * np.nan_to_num(fit.stderr))  # of a constant it is not a number
    return Slope(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half)


def soak(executor: str, seconds: float, every: float, out: Path, temporary: Path) -> pa.Table:
    """Launch the scenario until the time is up and return the samples."""
    rows, over, began, launches = list[dict[str, float]](), Event(), monotonic(), 0

    def watch() -> None:
        while not over.wait(every):
            rows.append({"seconds": monotonic() - began, "launches": launches, **sample(temporary)})

    watching = Thread(target=watch)
    watching.start()
    execution = on_ray() if executor == "ray" else local
    try:
        with local_ray.starting() if executor == "ray" else nullcontext():
            while monotonic() - began < seconds:
                runner.launch(scenario.parse(json.dumps(SCENARIO), "soak"), str(out / "runs"), execution, Progress())
                launches += 1
    finally:
        over.set()
        watching.join()
    return pa.Table.from_pylist(rows)


def judged(samples: pa.Table) -> Iterator[tuple[str, Slope, str]]:
    """Yield each quantity with its slope after the warm-up, and what that says."""
    hours = samples["seconds"].to_numpy() / 3600
    after = hours >= WARM_UP * hours[-1]
    for name, allowed in ALLOWED.items():
        found = slope(hours[after], samples[name].to_numpy()[after])
        yield name, found, GROWS if found.low > allowed else FLAT if found.high <= allowed else "too short to say"


def draw(samples: pa.Table, file: Path) -> None:
    """Draw all quantities against the time."""
    figure, axes = plt.subplots(len(ALLOWED), 1, sharex=True, figsize=(8, 10), layout="constrained")
    minutes = samples["seconds"].to_numpy() / 60
    for axis, name in zip(axes, ALLOWED, strict=True):
        axis.plot(minutes, samples[name].to_numpy())
        axis.axvline(WARM_UP * minutes[-1], linestyle=":", color="grey")
        axis.set_ylabel(name + " (MB)" * (name in ("memory", "shared", "temporary")))
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("minutes")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--executor", choices=["local", "ray"], default="local")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--out", type=Path, default=Path("soak"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = tempfile.tempdir = temporary
        samples = soak(arguments.executor, arguments.minutes * 60, arguments.every, arguments.out, Path(temporary))
    pq.write_table(samples, arguments.out / "samples.parquet")
    draw(samples, arguments.out / "soak.svg")
    print(f"{samples['launches'][-1].as_py()} launches, {len(samples)} samples")
    verdicts = list(judged(samples))
    for name, found, verdict in verdicts:
        print(f"{name:>10}: {found.value:+9.2f} an hour ({found.low:+.2f} to {found.high:+.2f})  {verdict}")
    sys.exit(any(verdict == GROWS for _, _, verdict in verdicts))


if __name__ == "__main__":
    main()
