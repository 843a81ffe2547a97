"""Commands that look things up: `list`, `describe`, `schema`; and `new`, which writes a scenario."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rayfed.cli.common import Debug, errors_for_people
from rayfed.cli.tables import console
from rayfed.errors import UserError

commands = typer.Typer()

Kind = Annotated[
    str,
    typer.Argument(
        metavar="KIND",
        help="attacks, grants, views, defences, aggregations, protections, models, datasets, partitions, poisonings or "
        "metrics.",
        show_default=False,
    ),
]


@commands.command("list")
def list_(kind: Kind, debug: Debug = False) -> None:
    """Name every component of a kind."""
    with errors_for_people(debug):
        from rayfed import registry

        rows = Table(box=None, show_header=False, pad_edge=False)
        for name in sorted(registry.table(kind)):
            rows.add_row(f"[bold]{escape(name)}[/bold]", escape(_first_line(registry.find(kind, name))))
        console().print(rows)


@commands.command()
def describe(
    kind: Kind,
    name: Annotated[str, typer.Argument(help="Its name, for example gaussian.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Describe one component: what it does, its fields, types, defaults and source."""
    with errors_for_people(debug):
        import inspect

        from rayfed import registry

        registry.search(str(Path.cwd()))
        plural = next((k for k in registry.KINDS if kind in (k, k.rstrip("s"))), kind)
        path = registry.table(plural).get(name, name)
        target = registry.find(plural, name)
        page = console()
        page.print(f"[bold]{escape(name)}[/bold]  ({path})")
        page.print(escape(inspect.getdoc(target) or "no description"), highlight=False)
        table = Table("field", "type", "default", "meaning")
        for p in registry.parameters(target):
            table.add_row(p.name, escape(p.type), escape(p.default), escape(" ".join(p.doc.split())))
        if table.rows:
            page.print(table)


@commands.command()
def schema(debug: Debug = False) -> None:
    """Print the JSON schema of a scenario, for completion in an editor."""
    with errors_for_people(debug):
        from rayfed.scenario import json_schema

        print(json.dumps(json_schema(), indent=2))


@commands.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the scenario; NAME.yaml is written.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Write a commented scenario to start from."""
    with errors_for_people(debug):
        path = Path(name).with_suffix(".yaml")
        text = files("rayfed").joinpath("new_scenario.yaml").read_text(encoding="utf-8")
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text.replace("NAME", path.stem))
        except FileExistsError:
            raise UserError(f"{path} is there already; choose another name or remove it") from None
        except OSError as error:
            raise UserError(f"cannot write {path}: {error}") from error
        print(f"wrote {path}; run it with: rayfed launch {path}")


def _first_line(target: Any) -> str:
    return (target.__doc__ or "").strip().partition("\n")[0]
