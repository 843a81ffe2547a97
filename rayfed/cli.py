"""The commands that a user types: `rayfed launch scenarios/noniid.yaml` and what stands beside it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rayfed import __version__
from rayfed.errors import UserError

app = typer.Typer(
    help="Measure how much federated learning leaks, what each defence buys and what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and notes.")]
Address = Annotated[
    str | None,
    typer.Option(help="Ray cluster to run on (`auto`, `ray://host:10001`); a local one is started when not given."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a field, for example `training.lr=0.05`. May be repeated."
    ),
]
ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario's YAML file.", show_default=False)]
Out = Annotated[str | None, typer.Option(help="Folder or fsspec URL for the run folder.", metavar="DIR")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its URL.", show_default=False)]
Kind = Annotated[
    str,
    typer.Argument(
        metavar="KIND",
        help="attacks, defences, aggregations, protections, models, datasets, partitions or poisonings.",
        show_default=False,
    ),
]

INTERRUPTED = 130
"""The shell's convention for a program that Ctrl-C ended."""


@app.command()
def launch(
    scenario: ScenarioFile,
    changes: Set = None,
    out: Out = None,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a scenario: train, attack, score, and write tables and a report."""
    with _errors_for_people(debug, resumable=True):
        loaded = _load(scenario, changes)
        from actors import launch as runs

        with _watched(quiet) as view:
            folder = runs.launch(loaded, out, address, view)
            view.finished(f"{folder.url}/report.html")


@app.command()
def attack(
    scenario: ScenarioFile,
    changes: Set = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Attack what this run has learnt instead of the untrained model.")
    ] = None,
    out: Out = None,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Play a scenario's attacks without its training: what does one update give away?"""
    with _errors_for_people(debug):
        if run:
            _search_where(run)
        loaded = _load(scenario, changes)
        if not loaded.attacks:
            raise UserError(f"{scenario} has no `attacks`: add one, such as `attacks: [idlg]`")
        from actors import launch as runs

        with _watched(quiet) as view:
            folder = runs.attack(loaded, run, out, address, view)
            view.finished(f"{folder.url}/report.html")


@app.command()
def resume(run: Run, address: Address = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Continue a run after its last complete round; the result is the same as without the break."""
    with _errors_for_people(debug, resumable=True):
        from actors import launch as runs

        _search_where(run)
        with _watched(quiet) as view:
            folder = runs.resume(run, address, view)
            view.finished(f"{folder.url}/report.html")


@app.command()
def report(run: Run, debug: Debug = False) -> None:
    """Make a run's `report.html` again from its tables."""
    with _errors_for_people(debug):
        from rayfed.results.folder import RunFolder
        from rayfed.results.report import write_report

        print(write_report(RunFolder.open(run)))


@app.command()
def validate(scenario: ScenarioFile, changes: Set = None, debug: Debug = False) -> None:
    """Check a scenario, its data and its models without running it."""
    with _errors_for_people(debug):
        loaded = _load(scenario, changes)
        from rayfed.console import guarantees
        from rayfed.training.inputs import prepare

        inputs = prepare(loaded)
        sizes = sorted(len(part) for part in inputs.parts)
        shape = "x".join(map(str, inputs.data.image_shape))
        print(f"{scenario}: valid")
        print(
            f"  data: {loaded.data.name}, {len(inputs.data.train_labels)} training and "
            f"{len(inputs.data.test_labels)} test images of {shape}, {len(inputs.data.classes)} classes"
        )
        print(f"  clients: {len(sizes)}, with {sizes[0]} to {sizes[-1]} samples ({loaded.partition.name})")
        print(f"  arms: {', '.join(loaded.stacks)}")
        for line in guarantees(inputs.privacy):
            print(f"  {line}")
        print(f"  attacks: {', '.join(a.title for a in loaded.attacks) or 'none'}")
        foreign = sorted({spec.name for spec in _components(loaded) if ":" in spec.name})
        if foreign:
            print(f"  your own code that a run imports: {', '.join(foreign)}")


@app.command()
def audit(
    model: Annotated[str, typer.Option(help="A name of `rayfed list models`, or your own `my_module:Net`.")],
    data: Annotated[str, typer.Option(help="A Parquet file, a folder with one folder a class, or a data set's name.")],
    batch: Annotated[str, typer.Option(help="Batch sizes behind the gradient, comma-separated.")] = "1,4,16",
    images: Annotated[int, typer.Option(min=1, help="Images attacked for each batch size, rounded up to batches.")] = 4,
    size: Annotated[int | None, typer.Option(min=1, help="Resize images to this height and width.")] = None,
    iterations: Annotated[int, typer.Option(min=20, help="Steps of every iterative attack.")] = 1000,
    threshold: Annotated[float, typer.Option(help="PSNR in dB from which a reconstruction is a leak.")] = 15.0,
    seed: Annotated[int, typer.Option(min=0, help="All randomness follows from it.")] = 0,
    changes: Set = None,
    out: Out = None,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Without a scenario: how much does one gradient of your model leak, and which defence stops it?"""
    with _errors_for_people(debug):
        from rayfed import catalogue, scenario
        from rayfed.audit import scenario_text

        catalogue.search(str(Path.cwd()))
        text = scenario_text(model, data, _batches(batch), images, size, iterations, seed)
        loaded = scenario.parse(text, "the audit's scenario", changes or [])
        from actors import launch as runs

        with _watched(quiet, brief=True) as view:
            folder = runs.attack(loaded, None, out, address, view)
            view.audited(folder.read_table("attacks").to_pylist(), threshold, f"{folder.url}/report.html")


@app.command()
def train_generator(
    scenario: ScenarioFile,
    out: Annotated[Path, typer.Option(help="File to write; `FILE.sha256` is written beside it.", metavar="FILE")],
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the public images; as many as make 3,000 steps by default.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="All randomness of the training follows from it.")] = 0,
    changes: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the generator that the attack `ggl` searches, on the scenario's public data."""
    with _errors_for_people(debug):
        loaded = _load(scenario, changes)
        from rayfed.training.generator import make

        def progress(epoch: int, epochs: int, critic: float, generator: float) -> None:
            if not quiet:
                print(f"epoch {epoch:>3}/{epochs}  critic {critic:.3f}  generator {generator:.3f}", flush=True)

        made = make(loaded.data, out, epochs, seed, progress)
        print(f"wrote {out}" if made else f"{out}: trained on these data with these settings before, and kept")


@app.command()
def search_policy(
    scenario: ScenarioFile,
    out: Annotated[Path, typer.Option(help="YAML file to write; its `defences` fit a scenario.", metavar="FILE")],
    candidates: Annotated[int, typer.Option(min=1, help="Random policies that are scored.")] = 300,
    sequences: Annotated[int, typer.Option(min=1, help="Best policies that the written one is a hybrid of.")] = 2,
    images: Annotated[int, typer.Option(min=1, help="Public images behind the privacy score.")] = 20,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the public images of the half training.")] = 10,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Share by which the accuracy score may fall below the untransformed images'.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="All randomness of the search follows from it.")] = 0,
    changes: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Search a policy of transformations for the defence `ats`, on the scenario's public data and for its model."""
    with _errors_for_people(debug):
        loaded = _load(scenario, changes)
        from rayfed.training import policy_search

        def progress(scored: int, candidates: int) -> None:
            if not quiet and scored % max(1, candidates // 10) == 0:
                print(f"scored {scored:>4}/{candidates} policies", flush=True)

        found, plain = policy_search.search(
            loaded,
            candidates=candidates,
            images=images,
            epochs=epochs,
            tolerance=tolerance,
            seed=seed,
            progress=progress,
        )
        policy = policy_search.write(out, found[:sequences], plain)
        print(f"{len(found)} of {candidates} policies keep the accuracy score; wrote {out} with policy {policy}")


@app.command()
def train_evaluator(
    out: Annotated[Path, typer.Option(help="File to write; `FILE.sha256` is written beside it.", metavar="FILE")],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA...]",
            help="Scenarios (their public images), Parquet files, folders with one folder a class, names of data sets; "
            "by default free photographs of scikit-image and scikit-learn.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Height and width in which data sets are read.")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over all images (the paper: 20); by default about 500 steps.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="All randomness of the training follows from it.")] = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the network that tells how much of an image is noise, for `refiner` and the metric `noise_ratio`."""
    with _errors_for_people(debug):
        from rayfed.training.evaluator import FREE_PHOTOGRAPHS, make

        def progress(epoch: int, epochs: int, loss: float) -> None:
            if not quiet:
                print(f"epoch {epoch:>3}/{epochs}  loss {loss:.3f}", flush=True)

        specs = [_public_data(source, size) for source in data or []] or [FREE_PHOTOGRAPHS]
        made = make(specs, out, epochs, seed, progress)
        print(f"wrote {out}" if made else f"{out}: trained on these data with these settings before, and kept")


@app.command("list")
def list_(kind: Kind, debug: Debug = False) -> None:
    """Name every component of a kind."""
    with _errors_for_people(debug):
        from rayfed import catalogue

        rows = Table(box=None, show_header=False, pad_edge=False)
        for name in sorted(catalogue.table(kind)):
            rows.add_row(f"[bold]{escape(name)}[/bold]", escape(_first_line(catalogue.find(kind, name))))
        Console().print(rows)


@app.command()
def describe(
    kind: Kind,
    name: Annotated[str, typer.Argument(help="Its name, for example gaussian.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Describe one component: what it does, its fields, types, defaults and source."""
    with _errors_for_people(debug):
        import inspect

        from rayfed import catalogue

        plural = next((k for k in catalogue.KINDS if kind in (k, k.rstrip("s"))), kind)
        catalogue.table(plural)
        target = catalogue.find(plural, name)
        console = Console()
        console.print(f"[bold]{escape(name)}[/bold]  ({target.__module__}:{target.__qualname__})")
        console.print(escape(inspect.getdoc(target) or "no description"), highlight=False)
        table = Table("field", "type", "default", "meaning")
        for p in catalogue.parameters(target):
            table.add_row(p.name, escape(p.type), escape(p.default), escape(" ".join(p.doc.split())))
        console.print(table)


@app.command()
def schema(debug: Debug = False) -> None:
    """Print the JSON schema of a scenario, for completion in an editor."""
    with _errors_for_people(debug):
        from rayfed.scenario import json_schema

        print(json.dumps(json_schema(), indent=2))


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the scenario; NAME.yaml is written.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Write a commented scenario to start from."""
    with _errors_for_people(debug):
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
    """The entry point of the `rayfed` command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is told to stop leaves a readable folder
    app()


@contextmanager
def _errors_for_people(debug: bool, resumable: bool = False) -> Iterator[None]:
    """Exit code 2 and one message for the user's mistakes, 1 for ours, 130 for an interruption."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        yield
    except UserError as error:
        if debug:
            raise
        errors.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print("interrupted" + "; what is complete is kept: `rayfed resume RUN` continues" * resumable)
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        errors.print(f"[red]internal error:[/red] {escape(f'{type(error).__name__}: {error}')}")
        errors.print("This is a defect of rayfed. Please report it with what --debug prints.")
        raise typer.Exit(1) from None


def _load(path: Path, changes: list[str] | None) -> Any:
    from rayfed import catalogue, scenario

    catalogue.search(str(Path.cwd()))
    catalogue.search(str(path.resolve().parent))
    return scenario.load(path, changes or [])


def _public_data(source: str, size: int | None) -> Any:
    """The `data` section behind one argument of `train-evaluator`."""
    from rayfed.audit import data_section
    from rayfed.scenario import DataSpec

    if Path(source).suffix in (".yaml", ".yml"):
        return _load(Path(source), None).data
    return DataSpec.model_validate(data_section(source) | ({} if size is None else {"size": size}))


def _batches(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise UserError(f"--batch: found '{text}'; give whole numbers from 1, such as 1,4,16")
    return sizes


def _search_where(run: str) -> None:
    """Let dotted paths name modules where the run found them, or in the working directory."""
    from rayfed import catalogue
    from rayfed.results.folder import RunFolder

    catalogue.search(str(Path.cwd()))
    folder = RunFolder.open(run)
    if folder.exists("environment.json"):  # a run that never got a cluster has none
        for place in reversed(json.loads(folder.read_text("environment.json")).get("search_path", [])):
            catalogue.search(place)


def _components(scenario: Any) -> Iterator[Any]:
    yield from (scenario.data, scenario.partition, scenario.model, *scenario.attacks)
    for arm, stack in scenario.stacks.items():
        yield from (scenario.aggregation_of(arm), *stack)


@contextmanager
def _watched(quiet: bool, brief: bool = False) -> Iterator[Any]:
    from rayfed.console import RunView

    view = RunView(Console(), quiet, brief)
    try:
        yield view
    finally:
        view.close()


def _first_line(target: Any) -> str:
    return (target.__doc__ or "").strip().partition("\n")[0]
