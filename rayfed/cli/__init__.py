"""The command line: `rayfed launch scenarios/noniid.yaml` and its other commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from rayfed.cli import audit, canaries, gate, lookup, makers, replay, reproduce, results, runs, unreturned
from rayfed.cli.signals import end_at_once, end_on_signals
from rayfed.cli.warned import warn_once
from rayfed.errors import Killed, NotPortable
from rayfed.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    help="Measure how much federated learning leaks, what each defence buys and what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
)
for part in (runs, audit, canaries, gate, replay, results, reproduce, lookup, makers):
    app.add_typer(part.commands)


def _version(show: bool) -> None:
    if show:
        print(f"rayfed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `rayfed` command."""
    end_on_signals()
    warn_once()
    unreturned.guard_os_exit()
    try:
        app()
    except SystemExit as error:
        sys.exit(unreturned.exit_code_of(error.code))  # type: ignore[arg-type]
    except NotPortable:  # libraries choose their instructions as they are loaded: once more, from the beginning
        from rayfed.engine.machine import PORTABLE

        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, os.environ | PORTABLE)
    except Killed as error:  # before the command began, or behind its end
        sys.exit(128 + error.signal)
    finally:
        end_at_once()
