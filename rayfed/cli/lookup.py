"""Commands that list components and write new scenarios: `list`, `describe`, `schema`, `new`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rayfed.cli.common import LOOKING_UP, Debug, errors_for_people
from rayfed.errors import UserError
from rayfed.report.terminal.console import console

commands = typer.Typer()
_LONGEST = 200
"""Maximum length of a scenario's name: a folder name has up to 255 bytes, and a run adds its start time."""

Kind = Annotated[
    str,
    typer.Argument(
        metavar="KIND",
        help="Kind of component: attacks, grants, views, defences, aggregations, protections, models, losses, "
        "datasets, partitions, poisonings or metrics.",
        show_default=False,
    ),
]


@commands.command("list", rich_help_panel=LOOKING_UP)
def list_(kind: Kind, debug: Debug = False) -> None:
    """List all components of a kind, such as all attacks, with a description of each.

    Examples:

        rayfed list attacks
        rayfed list defences
    """
    with errors_for_people(debug):
        from rayfed import registry

        rows = Table(box=None, show_header=False, pad_edge=False)
        for name in sorted(registry.table(kind)):
            rows.add_row(f"[bold]{escape(name)}[/bold]", escape(_first_line(registry.find(kind, name))))
        console().print(rows)


@commands.command(rich_help_panel=LOOKING_UP)
def describe(
    kind: Kind,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of a component, or FILE.py:Class.", show_default=False),
    ],
    debug: Debug = False,
) -> None:
    """Describe one component, such as an attack: purpose, fields, types, defaults and source.

    Examples:

        rayfed describe defence dp_sgd
        rayfed describe attack inverting_gradients
    """
    with errors_for_people(debug):
        import inspect

        from rayfed import registry

        registry.search(str(Path.cwd()))
        if registry.FILE_PATH.fullmatch(name):
            from rayfed.runs.scenario_loading import to_dotted_path

            name = to_dotted_path(name)
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


@commands.command(rich_help_panel=LOOKING_UP)
def schema(debug: Debug = False) -> None:
    """Print the JSON schema of scenario files, for completion in an editor.

    Examples:

        rayfed schema > scenario.schema.json
    """
    with errors_for_people(debug):
        from rayfed.scenario import json_schema

        print(json.dumps(json_schema(), indent=2))


@commands.command(rich_help_panel=LOOKING_UP)
def new(
    name: Annotated[
        str, typer.Argument(help="Name of the new scenario, which is written to NAME.yaml.", show_default=False)
    ],
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SCENARIO",
            help="Built-in scenario to copy, such as noniid. Default: a commented template.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a new scenario file with comments.

    Examples:

        rayfed new mine
        rayfed new mine --from noniid
    """
    with errors_for_people(debug):
        from rayfed.scenario import NAME

        folder, given = Path(name).parent, re.sub(r"\.ya?ml$", "", Path(name).name)
        own = re.sub(" +", "-", given)
        if not re.fullmatch(NAME, own) or len(own) > _LONGEST:
            raise UserError(
                f"'{given}' cannot name a scenario, because its runs are folders with that name. Use up to {_LONGEST} "
                f"letters without accents, digits, '-', '_' and '.', and begin with a letter or digit"
            )
        if own != given:
            print(f"note: '{given}' is renamed to {own}, because its runs are folders with that name", file=sys.stderr)
        path = folder / f"{own}.yaml"
        text, beside = _template(origin, path)
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"{path} already exists; choose another name or remove the file") from None
        except FileNotFoundError:
            raise UserError(f"cannot write {path}: folder {folder} does not exist; create it first") from None
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        for needed in beside:
            if not (copy := folder / needed.name).exists():
                (shutil.copytree if needed.is_dir() else shutil.copyfile)(needed, copy)
                print(f"wrote {copy}, needed by the scenario")
        print(f"wrote {path}\nNext: rayfed launch {quote(str(path))}")


def _template(origin: str | None, path: Path) -> tuple[str, list[Path]]:
    """Return the text of a new scenario, and the files that it needs in its folder."""
    from rayfed.core.documents import yaml_flow
    from rayfed.core.shipped import shipped_scenario

    name = yaml_flow(path.stem)  # quoted if YAML would read a number
    if origin is None:
        text = files("rayfed").joinpath("new_scenario.yaml").read_text(encoding="utf-8")
        return text.replace("name: NAME", f"name: {name}").replace("NAME.yaml", str(path)), []
    source = shipped_scenario(origin)
    text = source.read_text(encoding="utf-8").replace(f"scenarios/{origin}.yaml", str(path))
    others = (other for other in source.parent.iterdir() if other.suffix != ".yaml")
    return (
        re.sub(r"^name:.*$", lambda _: f"name: {name}", text, count=1, flags=re.MULTILINE),
        [other for other in others if re.search(rf"\b{re.escape(other.stem)}\b", text)],
    )


def _first_line(target: Any) -> str:
    return (target.__doc__ or "").strip().partition("\n")[0]
