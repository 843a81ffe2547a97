"""Command line of rayfed."""

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
    help="Measure how much federated learning leaks, which defence helps, and what it costs.\n\n"
    "Start with rayfed launch noniid, or with rayfed audit --help for your own model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)
for part in (runs, audit, results, gate, canaries, lookup, replay, reproduce, makers):
    app.add_typer(part.commands)


def _version(show: bool) -> None:
    if show:
        print(f"rayfed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
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
        sys.exit(unreturned.choose_exit_code(error.code))  # type: ignore[arg-type]
    except NotPortable:  # libraries choose their instructions when they are loaded, so start again
        from rayfed.simulation.machine import PORTABLE

        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, os.environ | PORTABLE)
    except Killed as error:  # before or after the command itself
        sys.exit(128 + error.signal)
    finally:
        end_at_once()
