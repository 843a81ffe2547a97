"""Code shared by several commands: options, error messages, loading of scenarios, progress views of runs."""

from __future__ import annotations

import os
import re
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from shlex import quote
from threading import Event, Thread
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rayfed.cli import unreturned
from rayfed.core.user_exits import describe_exit, exits_refused
from rayfed.errors import Killed, NotPortable, UserError, plain
from rayfed.report.terminal.console import console
from rayfed.store import exits


class ExecutorName(StrEnum):
    """Name of an executor of runs."""

    RAY = "ray"
    LOCAL = "local"


RUNNING = "Run"
INSPECTING = "Inspect results"
CHECKING = "Check"
RECORDED = "Attack existing federations"
LOOKING_UP = "Look up and start"
REPRODUCING = "Reproduce papers"
MAKING = "Prepare files for attacks, defences and metrics"
"""Panels of commands in `rayfed --help`."""
DATA_PANEL = "Model and data"
ATTACK_PANEL = "Attack"
EXECUTION_PANEL = "Execution and output"
"""Panels of options in the help of a command."""
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the full Python traceback of an error.", rich_help_panel=EXECUTION_PANEL)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors and notes.", rich_help_panel=EXECUTION_PANEL)
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address of a Ray cluster: auto or ray://HOST:10001. Default: start Ray on this machine.",
        rich_help_panel=EXECUTION_PANEL,
    ),
]
Executor = Annotated[
    ExecutorName,
    typer.Option(
        "--executor",
        help="Executor: ray (parallel actors) or local (one process, for debugging). Both give the same results.",
        rich_help_panel=EXECUTION_PANEL,
    ),
]
SET_HELP = "Override a field of the scenario, such as training.lr=0.05. Repeatable. Default: no override."
Set = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help=SET_HELP)]


def _scenario_file(source: Path) -> Path:
    """Return the file of a scenario by its path or name; print a note if a file of the user has the same name."""
    from rayfed.core.shipped import scenario_path

    found, own = scenario_path(source), Path(f"{source}.yaml")
    if found != source and own.is_file() and not own.samefile(found):
        print(f"note: using the built-in scenario {source}; to use your file, write {own}", file=sys.stderr)
    return found


ScenarioFile = Annotated[
    Path,
    typer.Argument(
        metavar="SCENARIO",
        help="Scenario file (YAML), or a built-in scenario such as noniid.",
        show_default=False,
        callback=_scenario_file,
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Output folder, or a URL such as s3://BUCKET/runs. Default: the scenario's output.folder, or runs.",
        rich_help_panel=EXECUTION_PANEL,
    ),
]
OutInRuns = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Output folder, or a URL such as s3://BUCKET/runs. Default: runs.",
        rich_help_panel=EXECUTION_PANEL,
    ),
]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Path or URL of a run folder, such as runs/NAME.", show_default=False)
]
BOUND_EXCEEDED = 3
"""Exit code of a command whose results exceed a bound, or do not show that the bound holds."""
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, by the shell's convention."""
READER_GONE = 141
"""Exit code of a program that writes to a closed pipe, by the shell's convention."""
EXIT_CODES = {
    "0": "The command finished, and no bound is exceeded.",
    "1": "A bug in rayfed. Or a measurement of a run exceeds a proved bound. Or `rayfed canaries` measured a larger "
    "epsilon than the claimed one.",
    "2": "A mistake that you can fix: an unknown name, a missing file, or an error in your own code. Or another "
    "process is using the run.",
    f"{BOUND_EXCEEDED}": "A bound that you gave is exceeded, or the result is inconclusive: `rayfed audit "
    "--fail-above`, `rayfed gate`, `rayfed replay`. Or no setting satisfies all bounds: `rayfed recommend`.",
    f"{INTERRUPTED}": "Interrupted by Ctrl-C. `rayfed resume` continues training or a sweep. Start attacks and audits "
    "again.",
    f"{READER_GONE}": "The program that reads the output closed it, as `head` does.",
    "128 + N": "Killed by signal N, such as 143 for SIGTERM. Continue as after Ctrl-C.",
}
"""Exit code -> when a command ends with it."""


@contextmanager
def errors_for_people(debug: bool, resumable: bool = False) -> Iterator[None]:
    """Turn an error of a command into one printed message and an exit code.

    The code is 2 for mistakes of the user and for a run that another process uses, 1 for bugs in rayfed, 130 for an
    interruption, and 128 plus the signal's number for a signal.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    unreturned.begin_command()
    try:
        with exits_refused():
            yield
        unreturned.end_command()
    except NotPortable:
        raise  # `main` handles it
    except UserError as error:
        if debug:
            raise
        errors.print(f"[red]error:[/red] {escape(plain(str(error)))}")
        raise typer.Exit(2) from None
    except (KeyboardInterrupt, BdbQuit) as error:
        errors.print(exits.describe_interruption(error) + (escape(_kept_after(error)) if resumable else ""))
        raise typer.Exit(128 + error.signal if isinstance(error, Killed) else INTERRUPTED) from None
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe: the last flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_GONE) from None
    except (typer.Exit, typer.Abort) as error:
        if getattr(error, "exit_code", 1):
            raise
        # The commands of rayfed return instead of exiting with 0, so the user's code raised this.
        errors.print(f"[red]error:[/red] {escape(describe_exit(error))}")
        raise typer.Exit(2) from None
    except BaseException as error:  # code of the user may raise any
        if debug:
            raise
        by_user = _print_unexpected(errors, error)
        raise typer.Exit(2 if by_user else 1) from None


def _kept_after(interruption: BaseException) -> str:
    """Return which results an interruption leaves, and the commands for them; its note is the run folder."""
    place = next(iter(getattr(interruption, "__notes__", ())), None)
    if place is None:
        return ", before any result was written"
    return (
        f"; complete rounds, attacks and trials are kept. Continue: `rayfed resume {place}`. Report of the results so "
        f"far: `rayfed report {place}`"
    )


def _print_unexpected(errors: Console, error: BaseException) -> bool:
    """Print an error that is no `UserError`, and return whether the user's code raised it."""
    if isinstance(error.__cause__, StopIteration):  # raised in a generator on the way
        error = error.__cause__
    said = escape(plain(f"{type(error).__name__}: {error}"))
    if place := _own_code(error):
        errors.print(f"[red]error:[/red] {said} (raised by {escape(place)}; `--debug` shows the traceback)")
        return True
    errors.print(f"[red]internal error:[/red] {said}")
    errors.print("This is a bug in rayfed. Please report it with the output of --debug.")
    return False


def _own_code(error: BaseException) -> str | None:
    """Return the file and line of the user's code that raised an error; None if other code raised it.

    An error from another process has the traceback of that process as a note.
    """
    from rayfed import registry

    folders = {Path(folder).resolve() for folder in registry.SEARCHED}
    files = (getattr(sys.modules.get(name), "__file__", None) for name in registry.NAMED)
    named = {Path(file).resolve() for file in files if file}
    ours = Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[2] / "actors"
    frames = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    frames += re.findall(r'^ *File "(.+)", line (\d+)', "\n".join(getattr(error, "__notes__", ())), re.MULTILINE)
    for file, line in reversed(frames):  # the user's code may have called a library that raised
        path = Path(file).resolve()
        if any(path.is_relative_to(folder) for folder in ours):
            return None
        if path.parent in folders or path in named:
            return f"{path.name}, line {line}"
    return None


def ray_beside(
    executor: ExecutorName, address: str | None, path: Path, changes: list[str] | None
) -> AbstractContextManager[None]:
    """Start a local Ray in the background while the command reads its files, unless the scenario is malformed."""
    if executor is not ExecutorName.RAY:
        return nullcontext()
    from rayfed import scenario
    from rayfed.runs.executors import start_in_background

    try:
        wanted = not address and scenario.has_form(scenario.read_text(path), changes or [])
    except UserError:
        wanted = False  # `load_scenario_file` reports the error
    return start_in_background(executor) if wanted else nullcontext()


def load_with_notes(path: Path, changes: list[str] | None) -> Any:
    """Return the scenario of a file; print a note for each input file that was found in another folder."""
    from rayfed.runs import scenario_loading

    notes: dict[str, None] = {}
    loaded = scenario_loading.load_scenario_file(path, changes or [], lambda line: notes.update({line: None}))
    for line in notes:
        print(f"note: {line}", file=sys.stderr)
    return loaded


def yaml_option(option: str, text: str | None) -> Any:
    """Return the parsed value of a YAML option; None for a missing option. Raises `UserError` for invalid YAML."""
    if text is None:
        return None
    import yaml

    from rayfed.core.documents import load_yaml

    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"{option}: '{text}' is not valid YAML: {error}") from error


@contextmanager
def show_progress(
    quiet: bool, executor: ExecutorName, kind: exits.RunKind = "training", brief: bool = False
) -> Iterator[Any]:
    """Show the progress of one run. The local executor has no progress bar, which would hide a debugger's prompt."""
    from rayfed.report.terminal.run import RunView

    view, over = RunView(console(), quiet, brief, bar=executor is ExecutorName.RAY), Event()
    if executor is ExecutorName.RAY:  # otherwise this thread does the work and reports its progress
        Thread(target=_pulses, args=(view, over), daemon=True).start()
    try:
        yield view
    except KeyboardInterrupt as error:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C stops the message and has the same result
            view.interrupted(kind)
        if view.folder:
            error.add_note(quote(view.folder.url))  # the argument of `rayfed resume`
        raise
    except Exception as error:
        view.stopped(exits.classify_exit(error), kind)
        raise
    finally:
        over.set()
        view.close()


def _pulses(view: Any, over: Event) -> None:
    while not over.wait(1.0):
        view.pulse()
