"""Whether a run that is disturbed comes to the same weights and tables as one that is not, or to one clear refusal.

    python -m tests.helpers.faults [--runs 50] [--seed 7]

One run undisturbed, then so many with one fault each, drawn at random with its moment: a client's, the attacker's or
the server's process is killed; the driver is killed and the run resumed; the disk is full, room is made and the run
resumed (needs user namespaces: `unshare -Urm`); a client hangs and is tried again; a client raises, ends its process
or takes more memory than Ray's memory killer allows, and is left out (identical is then what leaves the same client out
for any other reason), or ends the run, which is resumed; the raylet is killed, which ends the run, and it is resumed.
Every run is a `rayfed launch` of its own with its own Ray. Printed: fault, moment, seconds with the resume,
"identical", "refused, then identical" or what differs, and processes that are left 90 s after the end (agents of Ray
wait a minute for its control service). Exit code 1 where anything differs or is left, or a refusal is not one message.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
import yaml

from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.registry import component
from rayfed.store import checkpoint
from rayfed.store.folder import REPORT, RunFolder
from rayfed.store.schemas import TABLES
from rayfed.update import Update

TEXT = """
name: t
seed: 987654321
data: {name: digits, size: 8, train_samples: 400, test_samples: 100}
partition: {name: dirichlet, alpha: 1}
model: {name: mlp, hidden: [16]}
training: {batch_size: 8, momentum: 0.5}
federation: {rounds: 6, clients: 8, clients_per_round: 6, cohort_size: 2, server: {momentum: 0.5}}
arms:
  none: [{name: "tests.helpers.faults:Faulty"}]
  sparse: [{name: top_k, k: 0.1, error_feedback: true}, {name: gaussian, sigma: 0.001}]
attacks:
  - {name: inverting_gradients, rounds: [1, 3, 5], victims: 2, observes: gradient, batch_size: 2, iterations: 20}
resources: {clients: {actors: 2, num_cpus: 0.5}, attackers: {actors: 1, num_cpus: 0.5}, server: {num_cpus: 0}}
"""
MARK, WHERE = "RAYFED_FAULT", "RAYFED_FAULT_WHERE"
TIMES = {"seconds", "actor_seconds", "warming"}
"""Columns that differ from run to run."""


GREED = 2 << 30
"""Bytes that a client takes at most; Ray's killer comes before."""


@component
class Faulty(Defence):
    """Fails at the client and round that a file beside the run names, in the way that it names.

    A client that hangs, in C and without giving the interpreter free, removes the file first, so that it hangs once.
    """

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            where = Path(os.environ.get(WHERE, "nowhere"))
            round, client, how = where.read_text().split() if where.is_file() else ("", "", "")
            if (round, client) == (str(task.round), str(task.client)):
                _fail(how, where)
            return next(task)

        return update


def _fail(how: str, where: Path) -> None:
    match how:
        case "hang":
            where.unlink()
            ctypes.PyDLL(None).sleep(600)
        case "raise":
            raise ZeroDivisionError("by the benchmark")
        case "exit":
            os._exit(3)
        case "memory":
            held = list[bytes]()
            while sum(map(len, held)) < GREED:
                held.append(b"x" * (64 << 20))
            time.sleep(5)  # the killer looks now and then


@dataclass
class Command:
    """A command of Python and the processes that descend from it, no matter who their parent is by now."""

    arguments: list[str]
    environment: Mapping[str, str]
    before: tuple[str, ...] = ()
    """What runs it."""

    def __post_init__(self) -> None:
        self.mark = f"{MARK}={uuid4().hex}"
        name, value = self.mark.split("=")
        self.output, self.errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*self.before, sys.executable, *self.arguments],
            env={**os.environ, **self.environment, name: value},
            stdout=self.output,
            stderr=self.errors,
            start_new_session=True,
        )

    def processes(self) -> Iterator[tuple[int, str]]:
        """Number and title of each."""
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace").strip("\0")

    def kill(self, what: str) -> bool:
        """Kill the first of its actors of a class, or its raylet; whether there was one."""
        found = [
            process
            for process, title in self.processes()
            if title.startswith(f"ray::{what}") or title.partition("\0")[0].endswith(f"/{what}")
        ]
        for process in found[:1]:
            os.kill(process, signal.SIGKILL)
        return bool(found)

    def wait(self, seconds: float = 300) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def said(self) -> str:
        """What it has printed as errors, on one line."""
        self.errors.seek(0)
        return " ".join(self.errors.read().split())

    def left(self, seconds: float = 90) -> list[str]:
        """The titles of processes that are still there after so long, ended then."""
        until = time.monotonic() + seconds
        while (found := list(self.processes())) and time.monotonic() < until:
            time.sleep(0.1)
        for process, _ in found:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        return [title[:60] for _, title in found]


def launched(
    place: Path,
    *changes: str,
    executor: str = "ray",
    environment: Mapping[str, str] | None = None,
    before: tuple[str, ...] = (),
) -> Command:
    """A `rayfed launch` of the scenario into `place`/runs."""
    place.mkdir(exist_ok=True)
    file = place / "scenario.yaml"
    file.write_text(TEXT)
    sets = [argument for change in changes for argument in ("--set", change)]
    arguments = ["-m", "rayfed", "launch", str(file), "--out", str(place / "runs"), "--executor", executor, *sets]
    return Command(arguments, environment or {}, before)


def run_of(place: Path) -> Path | None:
    """The run folder in there, if it has come to be one."""
    return next((path.parent for path in place.glob("runs/*/scenario.yaml")), None)


def resumed(place: Path) -> Command:
    """A `rayfed resume` of the run in there, or its launch where there is none yet."""
    run = run_of(place)
    return Command(["-m", "rayfed", "resume", str(run)], {}) if run else launched(place)


def differences(run: Path | str, expected: Path | str, but: Collection[str] = ()) -> list[str]:
    """What of a run's weights, states and tables, less these columns, is not as in another."""
    a, b = RunFolder.open(str(run)), RunFolder.open(str(expected))
    one, other = checkpoint.load(a), checkpoint.load(b)
    assert one is not None
    assert other is not None
    found = [f"checkpoint.{part}" for part in ("round", "server") if not same(getattr(one, part), getattr(other, part))]
    clients = range(yaml.safe_load(a.read_text("scenario.yaml"))["federation"]["clients"])
    for arm in one.server:
        states = [checkpoint.load_states(folder, arm, clients, one.round + 1) for folder in (a, b)]
        if not same(*states):
            found.append(f"states of {arm}")
    for table in TABLES:
        compared = [column for column in TABLES[table].names if column not in (*TIMES, *but)]
        rows, others = (folder.read_table(table).select(compared).to_pylist() for folder in (a, b))
        if repr(rows) != repr(others):  # NaN is NaN
            found.append(table)
    return found


def same(a: object, b: object) -> bool:
    """Whether two states are alike to the last bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@dataclass(frozen=True)
class Disturbed:
    """A run that was disturbed."""

    place: Path
    moment: str
    commands: tuple[Command, ...]
    """Those that played it."""
    refusal: str = ""
    """What it said as it ended, before it was resumed."""
    without: tuple[int, int] | None = None
    """Round and client that are left out."""

    def left(self) -> list[str]:
        """The processes that do not end by themselves."""
        return [title for command in self.commands for title in command.left()]


def killed(place: Path, actor: str, seconds: float) -> Disturbed:
    """After so many seconds, or as soon as there is such an actor."""
    command, began = launched(place), time.monotonic()
    time.sleep(seconds)
    while not (done := command.kill(actor)) and command.process.poll() is None:
        time.sleep(0.05)
    moment = f"{time.monotonic() - began:.1f} s" if done else "after its end"
    assert command.wait() == 0, command.said()
    return Disturbed(place, moment, (command,))


def driver_killed(place: Path, seconds: float) -> Disturbed:
    """The driver after so many seconds; then resumed."""
    command = launched(place)
    time.sleep(seconds)
    command.process.kill()
    command.wait()
    run = run_of(place)
    rounds = len(list(run.glob("rounds/*.parquet"))) if run else 0
    commands = [command]
    if run is None or not ended(run):
        commands.append(resumed(place))
        assert commands[-1].wait() == 0, commands[-1].said()
    return Disturbed(place, f"{seconds:.1f} s, {rounds} rounds done", tuple(commands))


def ended(run: Path) -> bool:
    """Whether nothing of it is left to resume."""
    status = run / "status.json"
    return status.is_file() and '"finished"' in status.read_text() and (run / "report.html").is_file()


def disk_full(place: Path, kilobytes: int) -> Disturbed:
    """On a file system of that size; then room is made and the run resumed."""
    out = place / "runs"
    out.mkdir(parents=True)
    script = (
        f"mount -t tmpfs -o size={kilobytes}k tmpfs {out} || exit 99\n"
        f'"$@"; code=$?\n'
        f"mount -o remount,size=100m {out}; run=$(dirname {out}/*/scenario.yaml)\n"
        f'if [ -e "$run" ]; then {sys.executable} -m rayfed resume "$run"; else "$@"; fi || exit 98\n'
        f"cp -r {out} {place}/kept; exit $code"
    )
    command = launched(place, before=("unshare", "-Urm", "sh", "-c", script, "sh"))
    code = command.wait()
    said = command.said()
    assert code == 2, (code, said)
    assert said.count("error:") == 1, said
    assert "disk full" in said, said
    assert "Traceback" not in said, said
    out.rmdir()
    (place / "kept").rename(out)
    return Disturbed(place, f"{kilobytes} kB", (command,))


def hung(place: Path, round: int, client: int) -> Disturbed:
    """One client in one round, once."""
    file = fault_file(place, round, client, "hang")
    command = launched(place, "federation.failures.timeout=3", environment={WHERE: str(file)})
    assert command.wait() == 0, command.said()
    assert not file.exists()
    return Disturbed(place, f"round {round}, client {client}", (command,))


def failed(place: Path, round: int, client: int, how: str, then: str) -> Disturbed:
    """One client in one round, each time: it is left out, or ends the run, which goes on when it is fixed."""
    file = fault_file(place, round, client, how)
    environment = {WHERE: str(file)} | (short_of_memory() if how == "memory" else {})
    command = launched(place, f"federation.failures.then={then}", environment=environment)
    code, moment = command.wait(600), f"round {round}, client {client}, {then}"
    if code == 0:
        run = run_of(place)
        assert run is not None
        rows = RunFolder.open(str(run)).read_table("clients").to_pylist()
        gone = [(row["round"], row["client"]) for row in rows if row["status"] != "ok"]
        if not gone and how == "memory":  # others gave memory back meanwhile
            return Disturbed(place, f"{moment}: enough", (command,))
        assert then == "drop", command.said()
        return Disturbed(place, moment, (command,), without=(round, client))
    refusal = refused(command, code)
    assert (f"client {client} " in refusal and then == "stop") or (how == "memory" and "memory" in refusal), refusal
    file.unlink()
    return again(place, moment, command, refusal)


def raylet_killed(place: Path, seconds: float) -> Disturbed:
    """After so many seconds and the first round; then resumed."""
    command, began = launched(place), time.monotonic()
    while command.process.poll() is None and not ((run := run_of(place)) and list(run.glob("rounds/*.parquet"))):
        time.sleep(0.05)
    time.sleep(max(0.0, min(1.0, seconds - (time.monotonic() - began))))
    done = command.kill("raylet") and command.process.poll() is None
    moment, code = f"{time.monotonic() - began:.1f} s", command.wait()
    if code == 0:
        return Disturbed(place, "as it ended" if done else "after its end", (command,))
    refusal = refused(command, code)
    assert "raylet on this machine has died" in refusal, refusal
    run = run_of(place)
    assert run is not None
    assert (run / "report.html").is_file()
    return again(place, moment, command, refusal)


def fault_file(place: Path, round: int, client: int, how: str) -> Path:
    """The file that says which client fails how."""
    place.mkdir()
    file = place / "fault"
    file.write_text(f"{round} {client} {how}")
    return file


def short_of_memory() -> dict[str, str]:
    """Settings by which Ray's memory killer comes when this machine has 2.2 GiB less than now, and a run takes most."""
    found = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    share = 1 - (found["MemAvailable"] - 2.2 * (1 << 20)) / found["MemTotal"]
    return {"RAY_memory_usage_threshold": f"{share:.4f}", "RAY_memory_monitor_refresh_ms": "50"}


def refused(command: Command, code: int) -> str:
    """The one message by which a command ended; raises where it is not one for people."""
    assert code == 2, (code, command.said())
    command.errors.seek(0)
    lines = command.errors.read().splitlines()  # Ray's own among them
    assert not any(line.startswith("Traceback") for line in lines), lines
    [message] = [line for line in lines if line.startswith("error:")]
    assert "\x1b" not in message, message
    return message


def again(place: Path, moment: str, command: Command, refusal: str) -> Disturbed:
    """The same run, resumed."""
    run = run_of(place)
    assert run is not None
    assert '"failed"' in (run / "status.json").read_text()
    assert "\\u001b" not in (run / "status.json").read_text()
    second = resumed(place)
    assert second.wait() == 0, second.said()
    return Disturbed(place, moment, (command, second), refusal)


def left_out(place: Path, round: int, client: int) -> Path:
    """A run, on the local executor, in which that client raises and is left out: what the others' bits are then."""
    file = fault_file(place, round, client, "raise")
    played = launched(place, "federation.failures.then=drop", executor="local", environment={WHERE: str(file)})
    assert played.wait() == 0, played.said()
    run = run_of(place)
    assert run is not None
    return run


def kilobytes(run: Path) -> int:
    """Return the size of a run in whole pages, without its report: a run without room for the report finishes."""
    files = (file for file in run.rglob("*") if file.is_file() and file.name != REPORT)
    return sum(-(-file.stat().st_size // 4096) * 4 for file in files)


def faults(undisturbed: Path, seconds: float, draw: random.Random) -> dict[str, Callable[[Path], Disturbed]]:
    """Each kind of fault at a moment that is drawn when it comes."""
    clients = RunFolder.open(str(undisturbed)).read_table("clients").to_pylist()
    places = sorted({(row["round"], row["client"]) for row in clients})
    size = kilobytes(undisturbed)
    return {
        "client killed": lambda place: killed(place, "ClientActor", draw.uniform(0, seconds)),
        "server killed": lambda place: killed(place, "ServerActor", draw.uniform(0, seconds)),
        "attacker killed": lambda place: killed(place, "AttackerActor", draw.uniform(0, seconds)),
        "driver killed": lambda place: driver_killed(place, draw.uniform(0, seconds)),
        "disk full": lambda place: disk_full(place, draw.randint(size // 10, size * 9 // 10)),
        "client hangs": lambda place: hung(place, *draw.choice(places)),
        "raylet killed": lambda place: raylet_killed(place, draw.uniform(0, seconds)),
        **{
            name: lambda place, how=how: failed(place, *draw.choice(places), how, draw.choice(["drop", "stop"]))
            for name, how in (("client raises", "raise"), ("client exits", "exit"), ("client too large", "memory"))
        },
    }


def compared(disturbed: Disturbed, expected: Path) -> list[str]:
    """What of a disturbed run is not as in the undisturbed one, or in one that leaves the same client out."""
    run = run_of(disturbed.place)
    if not run:
        return ["no run"]
    if not disturbed.without:
        return differences(run, expected)
    found = differences(run, left_out(disturbed.place / "left out", *disturbed.without), but=("status",))
    rows = [row for row in RunFolder.open(str(run)).read_table("clients").to_pylist() if row["status"] != "ok"]
    who = {(row["round"], row["client"], row["arm"]) for row in rows}
    return found + ([] if who == {(*disturbed.without, "none")} else [f"left out: {who}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    draw, bad = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        reference, began = Path(folder) / "undisturbed", time.monotonic()
        command = launched(reference)
        assert command.wait() == 0, command.said()
        seconds = time.monotonic() - began
        expected = run_of(reference)
        assert expected is not None
        print(f"undisturbed: {seconds:.1f} s", flush=True)
        kinds = faults(expected, seconds, draw)
        for number in range(options.runs):
            kind, began = draw.choice(list(kinds)), time.monotonic()
            place, left = Path(folder) / str(number), list[str]()
            try:
                disturbed = kinds[kind](place)
                moment, left, apart = disturbed.moment, disturbed.left(), compared(disturbed, expected)
                well = "refused, then identical" if disturbed.refusal else "identical"
            except (AssertionError, subprocess.TimeoutExpired) as error:
                moment, apart, well = "", [f"failed: {error}"], ""
            bad += bool(apart or left)
            print(
                f"{number + 1:3d}  {kind:16s} {moment:28s} {time.monotonic() - began:5.1f} s  "
                f"{', '.join(apart) or well:24s} orphans: {', '.join(left) or 'none'}",
                flush=True,
            )
            shutil.rmtree(place)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
