"""Peak memory of a command with all the processes that it starts: the sum of their proportional set sizes (PSS).

    python -m benchmarks.memory rayfed launch scenarios/many_clients.yaml

PSS counts a page that several processes share, such as one of Ray's object store, once in all. Linux alone tells it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from types import TracebackType

import psutil

INTERVAL = 0.2
"""Seconds between two looks."""


def pss(process: int) -> int:
    """Proportional set size of a process (bytes); 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def family(process: int) -> list[psutil.Process]:
    """A process and all that it or they have started."""
    try:
        parent = psutil.Process(process)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Watch:
    """Looks at a process and its children for as long as a `with` block lasts."""

    def __init__(self, process: int) -> None:
        self.peak = 0
        """Bytes, all together."""
        self.peaks: dict[str, int] = {}
        """Bytes by the name of the process, the largest of one name."""
        self._process, self._over = process, Event()
        self._thread = Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(INTERVAL):
            self._look_once()
        if not self.peak:  # it was over before the first look
            self._look_once()

    def _look_once(self) -> None:
        found = [(_name(p), pss(p.pid)) for p in family(self._process)]
        self.peak = max(self.peak, sum(size for _, size in found))
        for name, size in found:
            self.peaks[name] = max(self.peaks.get(name, 0), size)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()


def _name(process: psutil.Process) -> str:
    try:
        title = process.cmdline()[0] if process.cmdline() else process.name()
    except psutil.Error:
        return "ended"
    title = title.partition(".")[0] if title.startswith("ray::") else Path(title).name
    return title.removesuffix("()").partition(":cohort")[0]


def main() -> None:
    began = perf_counter()
    with subprocess.Popen(sys.argv[1:]) as process, Watch(process.pid) as watch:
        process.wait()
    for name, size in sorted(watch.peaks.items(), key=lambda item: -item[1])[:8]:
        print(f"{name:32}{size / 2**20:8.0f} MiB, the largest of its name")
    print(f"peak of all processes: {watch.peak / 2**20:.0f} MiB; {perf_counter() - began:.1f} s")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
