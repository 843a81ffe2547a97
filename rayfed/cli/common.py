"""Code that several commands use: options, error messages, loading of scenarios, views of runs."""

from __future__ import annotations

import os
import re
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from shlex import join, quote
from threading import Event, Thread
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from rayfed.cli import unreturned
from rayfed.documents import load_yaml
from rayfed.errors import Killed, NotPortable, UserError, plain
from rayfed.report.terminal import console
from rayfed.store import exits
from rayfed.user_exits import describe_exit, exits_refused


class ExecutorName(StrEnum):
    """Name of an executor of runs."""

    RAY = "ray"
    LOCAL = "local"


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and notes.")]
Address = Annotated[
    str | None,
    typer.Option(help="Ray cluster to run on (`auto`, `ray://host:10001`); a local one is started when not given."),
]
Executor = Annotated[
    ExecutorName,
    typer.Option(
        "--executor",
        help="`ray`: clients, attackers and server as actors. `local`: everything in this process, one call after "
        "another, which a debugger can follow. The results are the same.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a field, for example `training.lr=0.05`. May be repeated."
    ),
]


def _scenario_file(source: Path) -> Path:
    """Return the file of a scenario by its path or name; print a note if a file of the user has the same name."""
    from rayfed.shipped import scenario_path

    found, own = scenario_path(source), Path(f"{source}.yaml")
    if found != source and own.is_file() and not own.samefile(found):
        print(f"note: {source} is the scenario that comes with rayfed; yours is {own}", file=sys.stderr)
    return found


ScenarioFile = Annotated[
    Path,
    typer.Argument(
        metavar="SCENARIO",
        help="A scenario's YAML file, or the name of a scenario that comes with rayfed, such as noniid.",
        show_default=False,
        callback=_scenario_file,
    ),
]
Out = Annotated[str | None, typer.Option(help="Folder or fsspec URL for the run folder.", metavar="DIR")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its URL.", show_default=False)]
BOUND_PASSED = 3
"""Exit code of a command whose results do not meet the user's bounds."""
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, by the shell's convention."""
READER_GONE = 141
"""Exit code of a program that writes to a closed pipe, by the shell's convention."""
EXIT_CODES = {
    "0": "The command finished, and nothing passed a bound.",
    "1": "A defect of rayfed. Or a measurement above what is proved: a run's above a bound, or that of `rayfed "
    "canaries` above a claimed epsilon.",
    "2": "A mistake that you can fix: an unknown name, a missing file, an error in your own code. Or another driver "
    "has the run.",
    f"{BOUND_PASSED}": "A bound of yours is not met, or nothing shows that it is: `rayfed audit --fail-above`, `rayfed "
    "gate`, `rayfed replay`. Or no setting meets all bounds: `rayfed recommend`.",
    f"{INTERRUPTED}": "Interrupted by Ctrl-C. `rayfed resume` continues a training or a sweep; start an attack or an "
    "audit again.",
    f"{READER_GONE}": "The program that read the output closed it, as `head` does.",
    "128 + N": "Killed by signal N, such as 143 for SIGTERM. Continue as after Ctrl-C.",
}
"""Exit code -> when a command ends with it."""


@contextmanager
def errors_for_people(debug: bool, resumable: bool = False) -> Iterator[None]:
    """Turn errors into one message and an exit code.

    The code is 2 for the user's mistakes and for a run that another driver has, 1 for defects of rayfed, 130 for an
    interruption, and 128 plus its number for a signal.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    unreturned.begin()
    try:
        with exits_refused():
            yield
        unreturned.end()
    except NotPortable:
        raise  # `main` handles it
    except UserError as error:
        if debug:
            raise
        errors.print(f"[red]error:[/red] {escape(plain(str(error)))}")
        raise typer.Exit(2) from None
    except (KeyboardInterrupt, BdbQuit) as error:
        kept = ", before anything was written"
        if place := next(iter(getattr(error, "__notes__", ())), None):
            kept = f"; complete rounds with their attacks, and trials, are kept: `rayfed resume {place}` continues, "
            kept += f"`rayfed report {place}` makes the page of what is there"
        errors.print(exits.said(error) + escape(kept) * resumable)
        raise typer.Exit(128 + error.signal if isinstance(error, Killed) else INTERRUPTED) from None
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe: the last flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_GONE) from None
    except (typer.Exit, typer.Abort) as error:
        if getattr(error, "exit_code", 1):
            raise
        # rayfed's own commands return instead: code of the user has raised it
        errors.print(f"[red]error:[/red] {escape(describe_exit(error))}")
        raise typer.Exit(2) from None
    except Exception as error:
        if debug:
            raise
        said = escape(plain(f"{type(error).__name__}: {error}"))
        if place := _own_code(error):
            errors.print(f"[red]error:[/red] {said} (raised by {escape(place)}; `--debug` shows the traceback)")
            raise typer.Exit(2) from None
        errors.print(f"[red]internal error:[/red] {said}")
        errors.print("This is a defect of rayfed. Please report it with what --debug prints.")
        raise typer.Exit(1) from None


def _own_code(error: Exception) -> str | None:
    """Return the place in the user's own modules that raised an error; None if other code raised it.

    An error of another process has the traceback of that process as a note.
    """
    from rayfed import registry

    folders = {Path(folder).resolve() for folder in registry.SEARCHED}
    ours = Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[2] / "actors"
    frames = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    frames += re.findall(r'^ *File "(.+)", line (\d+)', "\n".join(getattr(error, "__notes__", ())), re.MULTILINE)
    for file, line in reversed(frames):  # a library that it called may have raised
        path = Path(file).resolve()
        if any(path.is_relative_to(folder) for folder in ours):
            return None
        if "site-packages" not in path.parts and any(path.is_relative_to(folder) for folder in folders):
            return f"{path.name}, line {line}"
    return None


def ray_beside(
    executor: ExecutorName, address: str | None, path: Path, changes: list[str] | None
) -> AbstractContextManager[None]:
    """Start a local Ray while the command imports and reads, unless the scenario is malformed."""
    if executor is not ExecutorName.RAY:
        return nullcontext()
    from rayfed import scenario
    from rayfed.engine.executions import starting

    try:
        wanted = not address and scenario.has_form(scenario.read_text(path), changes or [])
    except UserError:
        wanted = False  # `load` says why
    return starting(executor) if wanted else nullcontext()


def load(path: Path, changes: list[str] | None) -> Any:
    """Load a scenario file, and print notes on where its inputs were found."""
    from rayfed.engine import finding

    notes: dict[str, None] = {}
    loaded = finding.load(path, changes or [], lambda line: notes.update({line: None}))
    for line in notes:
        print(f"note: {line}", file=sys.stderr)
    return loaded


def yaml_option(option: str, text: str | None) -> Any:
    """Return the value of an option in YAML, None if it is not given; raises `UserError` for invalid YAML."""
    try:
        return None if text is None else load_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"{option}: '{text}' is not valid YAML: {error}") from error


def given_again(context: typer.Context, changed: Mapping[str, Any]) -> str:
    """Return the user's command for a shell, with the parameters in `changed` replaced by their values there."""
    words = context.command_path.split()
    for parameter in context.command.params:
        name = parameter.name or ""
        typed = (
            getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        )  # Typer may bring its own Click
        value = changed.get(name, context.params.get(name) if typed else None)
        option = max(parameter.opts, key=len)
        for one in value if isinstance(value, list | tuple) else [] if value in (None, False) else [value]:
            words += [option] * option.startswith("-")
            words += [] if one is True else [f"{one:g}" if isinstance(one, float) else str(one)]
    return join(words)


@contextmanager
def watched(
    quiet: bool, executor: ExecutorName, kind: exits.RunKind = "training", brief: bool = False
) -> Iterator[Any]:
    """Show the progress of one run; a run in this process has no progress bar, because debuggers prompt there."""
    from rayfed.report.terminal_run import RunView

    view, over = RunView(console(), quiet, brief, bar=executor is ExecutorName.RAY), Event()
    if (
        executor is ExecutorName.RAY
    ):  # otherwise this thread does the work and reports its progress, or a debugger has it
        Thread(target=_pulses, args=(view, over), daemon=True).start()
    try:
        yield view
    except KeyboardInterrupt as error:
        with suppress(KeyboardInterrupt):  # pressed again, it ends what is said of the first one, and tells the same
            view.interrupted(kind)
        if view.folder:
            error.add_note(quote(view.folder.url))  # how `rayfed resume` names it
        raise
    except Exception as error:
        view.stopped(exits.exit_of(error), kind)
        raise
    finally:
        over.set()
        view.close()


def _pulses(view: Any, over: Event) -> None:
    while not over.wait(1.0):
        view.pulse()
