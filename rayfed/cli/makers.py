"""Commands that make files for scenarios: a generator, a policy, an evaluation network, a recogniser, packed data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rayfed.cli.common import Debug, Quiet, ScenarioFile, Set, errors_for_people, load

commands = typer.Typer()
NetworkFile = Annotated[Path, typer.Option(help="File to write; `FILE.sha256` is written beside it.", metavar="FILE")]
TrainingSeed = Annotated[int, typer.Option(min=0, help="Random seed.")]


@commands.command()
def train_generator(
    scenario: ScenarioFile,
    out: NetworkFile,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the public images; as many as make 3,000 steps by default.")
    ] = None,
    seed: TrainingSeed = 0,
    changes: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the generator that the attack `ggl` searches, on the scenario's public data."""
    with errors_for_people(debug):
        loaded = load(scenario, changes)
        from rayfed.pretraining.generator import make

        def progress(epoch: int, epochs: int, critic: float, generator: float) -> None:
            if not quiet:
                print(f"epoch {epoch:>3}/{epochs}  critic {critic:.3f}  generator {generator:.3f}", flush=True)

        made = make(loaded.data, out, epochs, seed, progress)
        print(_said(made, out))


@commands.command()
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
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    changes: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Search a policy of transformations for the defence `ats`, on the scenario's public data and for its model."""
    with errors_for_people(debug):
        loaded = load(scenario, changes)
        from rayfed.pretraining import policy_search

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


@commands.command()
def train_evaluator(
    out: NetworkFile,
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
    seed: TrainingSeed = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the network that estimates the share of noise in an image, for `refiner` and the metric `noise_ratio`."""
    with errors_for_people(debug):
        from rayfed.pretraining.evaluator import FREE_PHOTOGRAPHS, make

        def progress(epoch: int, epochs: int, loss: float) -> None:
            if not quiet:
                print(f"epoch {epoch:>3}/{epochs}  loss {loss:.3f}", flush=True)

        specs = [_data(source, size) for source in data or []] or [FREE_PHOTOGRAPHS]
        made = make(specs, out, epochs, seed, progress)
        print(_said(made, out))


@commands.command()
def train_recogniser(
    scenario: ScenarioFile,
    out: NetworkFile,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the images; as many as make 500 steps by default.")
    ] = None,
    seed: TrainingSeed = 0,
    changes: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the network that recognises people, for the metrics `top1`, `top3` and `top5`: a class is a person."""
    with errors_for_people(debug):
        loaded = load(scenario, changes)
        from rayfed.metrics.top import TOP, chance
        from rayfed.pretraining import recogniser

        def progress(epoch: int, epochs: int, loss: float) -> None:
            if not quiet and epoch % max(1, epochs // 10) == 0:
                print(f"epoch {epoch:>3}/{epochs}  loss {loss:.3f}", flush=True)

        made, data = recogniser.make(loaded.data, out, epochs, seed, progress)
        print(_said(made, out))
        if not quiet:
            images, people = recogniser.faces(data)[1], len(data.classes)
            whose = "public images: no client owns one" if loaded.data.public else "images of the clients, all of them"
            print(f"{people} people; trained on {len(images)} {whose}")
            found = recogniser.held_out(out, data)
            told = [f"top-{k} {found[name]:.1%} (chance {chance(name, people):.1%})" for name, k in TOP.items()]
            print(f"{len(data.test_labels)} true images that it has not seen: {', '.join(told)}")


@commands.command()
def pack(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A scenario (its data), a Parquet file, a folder with one folder a class, or a data set's name.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.arrow", help="File to write.", show_default=False)],
    size: Annotated[int | None, typer.Option(min=1, help="Height and width of the images.")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a data set into an Arrow file that `data: {name: arrow, path: OUT.arrow}` maps instead of loading it."""
    with errors_for_people(debug):
        from rayfed.data import packing

        def progress(done: int, count: int) -> None:
            if not quiet:
                print(f"{done}/{count} samples", flush=True)

        layout = packing.pack(_data(data, size).build(), out, progress)
        shape = "x".join(map(str, layout.shape))
        print(f"wrote {out}: images of {shape}, {layout.train} for training, {len(layout.classes)} classes")


def _data(source: str, size: int | None) -> Any:
    """Return the section `data` for one argument."""
    from rayfed.data.section import data_section
    from rayfed.scenario import DataSpec

    if Path(source).suffix in (".yaml", ".yml"):
        return load(Path(source), None).data
    return DataSpec.model_validate(data_section(source, size))


def _said(made: bool, out: Path) -> str:
    """Return the message on a network that was to be trained."""
    return f"wrote {out}" if made else f"{out}: trained on these data with these settings before, and kept"
