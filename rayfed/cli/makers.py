"""Commands that prepare files for scenarios: trained networks, transformation policies and packed data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rayfed.cli.common import MAKING, Debug, Quiet, ScenarioFile, Set, errors_for_people, load_with_notes

commands = typer.Typer()
NetworkFile = Annotated[
    Path, typer.Option(help="File to write the trained network to. Also writes FILE.sha256.", metavar="FILE")
]
IMAGE_SIZE = "Height and width to which images are resized. Default: original size. Unit: pixels."
TrainingSeed = Annotated[int, typer.Option(metavar="INT", min=0, help="Random seed of the training or search.")]


@commands.command(rich_help_panel=MAKING)
def train_generator(
    scenario: ScenarioFile,
    out: NetworkFile,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="INT", min=1, help="Number of epochs on the public images. Default: enough for about 3,000 steps."
        ),
    ] = None,
    seed: TrainingSeed = 0,
    changes: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the generator of the attack `ggl` on the scenario's public data.

    Examples:

        rayfed train-generator my.yaml --out generator.safetensors
    """
    with errors_for_people(debug):
        loaded = load_with_notes(scenario, changes)
        from rayfed.pretraining.generator import make

        def progress(epoch: int, epochs: int, critic: float, generator: float) -> None:
            if not quiet:
                print(f"epoch {epoch:>3}/{epochs}  critic {critic:.3f}  generator {generator:.3f}", flush=True)

        made = make(loaded.data, out, epochs, seed, progress)
        print(_said(made, out))


@commands.command(rich_help_panel=MAKING)
def search_policy(
    scenario: ScenarioFile,
    out: Annotated[
        Path,
        typer.Option(
            help="YAML file to write the policies to. Copy the file's defences into a scenario.", metavar="FILE"
        ),
    ],
    candidates: Annotated[int, typer.Option(metavar="INT", min=1, help="Number of random policies to score.")] = 300,
    sequences: Annotated[
        int, typer.Option(metavar="INT", min=1, help="Number of policies to combine in the result, best first.")
    ] = 2,
    images: Annotated[int, typer.Option(metavar="INT", min=1, help="Number of public images per privacy score.")] = 20,
    epochs: Annotated[
        int, typer.Option(metavar="INT", min=1, help="Number of epochs of the short training on the public images.")
    ] = 10,
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="FLOAT",
            min=0,
            help="Maximum relative loss of the accuracy score by a policy, as a share (0.1: 10 %).",
        ),
    ] = 0.1,
    seed: TrainingSeed = 0,
    changes: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Search for image transformations (policies) for the defence `ats`.

    Uses the model and the public data of the scenario.

    Examples:

        rayfed search-policy my.yaml --out policy.yaml --candidates 300
    """
    with errors_for_people(debug):
        loaded = load_with_notes(scenario, changes)
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
        reached = f"{len(found)} of {candidates} policies reach the required accuracy score"
        print(f"{reached}; wrote policy {policy} to {out}")


@commands.command(rich_help_panel=MAKING)
def train_evaluator(
    out: NetworkFile,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA...]",
            help="Training images: scenarios (their public images), Parquet files, image folders (one subfolder per "
            "class) or built-in names. Default: free photographs of scikit-image and scikit-learn.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(metavar="INT", min=1, help=IMAGE_SIZE)] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="INT",
            min=1,
            help="Number of epochs on all images (paper: 20). Default: enough for about 500 steps.",
        ),
    ] = None,
    seed: TrainingSeed = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the noise estimator of the defence `refiner` and the metric `noise_ratio`.

    Examples:

        rayfed train-evaluator --out evaluator.safetensors
        rayfed train-evaluator my_images/ --size 32 --out evaluator.safetensors
    """
    with errors_for_people(debug):
        from rayfed.pretraining.evaluator import FREE_PHOTOGRAPHS, make

        def progress(epoch: int, epochs: int, loss: float) -> None:
            if not quiet:
                print(f"epoch {epoch:>3}/{epochs}  loss {loss:.3f}", flush=True)

        specs = [_data(source, size) for source in data or []] or [FREE_PHOTOGRAPHS]
        made = make(specs, out, epochs, seed, progress)
        print(_said(made, out))


@commands.command(rich_help_panel=MAKING)
def train_recogniser(
    scenario: ScenarioFile,
    out: NetworkFile,
    epochs: Annotated[
        int | None,
        typer.Option(metavar="INT", min=1, help="Number of training epochs. Default: enough for about 500 steps."),
    ] = None,
    seed: TrainingSeed = 0,
    changes: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the face recogniser of the metrics `top1`, `top3` and `top5`.

    Each class of the data is one person.

    Examples:

        rayfed train-recogniser my.yaml --out recogniser.safetensors
    """
    with errors_for_people(debug):
        loaded = load_with_notes(scenario, changes)
        from rayfed.metrics.top import TOP, chance
        from rayfed.pretraining import recogniser
        from rayfed.report.text.formats import format_share

        def progress(epoch: int, epochs: int, loss: float) -> None:
            if not quiet and epoch % max(1, epochs // 10) == 0:
                print(f"epoch {epoch:>3}/{epochs}  loss {loss:.3f}", flush=True)

        made, data = recogniser.make(loaded.data, out, epochs, seed, progress)
        print(_said(made, out))
        if not quiet:
            images, people = recogniser.faces(data)[1], len(data.classes)
            whose = "public images, not owned by any client" if loaded.data.public else "images: all of the clients'"
            print(f"{people} people; trained on {len(images)} {whose}")
            found = recogniser.held_out(out, data)
            print(f"Accuracy on {len(data.test_labels)} original images that it was not trained on:")
            for name, k in TOP.items():
                print(f"  top-{k}  {format_share(found[name]):>7}  (chance {format_share(chance(name, people))})")


@commands.command(rich_help_panel=MAKING)
def pack(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Data to pack: scenario file, Parquet file, image folder (one subfolder per class) or built-in name.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.arrow", help="Arrow file to write.", show_default=False)],
    size: Annotated[int | None, typer.Option(metavar="INT", min=1, help=IMAGE_SIZE)] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a data set of images to an Arrow file, which clients map into memory instead of loading.

    Use the file in a scenario with `data: {name: arrow, path: OUT.arrow}`.

    Examples:

        rayfed pack my_images/ my_images.arrow --size 64
    """
    with errors_for_people(debug):
        from rayfed.data import packing

        def progress(done: int, count: int) -> None:
            if not quiet:
                print(f"{done}/{count} samples", flush=True)

        source = _data(data, size).build()
        layout = packing.pack_dataset(source, out, progress)
        for note in source.notes():
            print(f"note: {note}")
        shape = "x".join(map(str, layout.shape))
        print(f"wrote {out}: images of {shape}, {layout.train} for training, {len(layout.classes)} classes")


def _data(source: str, size: int | None) -> Any:
    """Return the section `data` of one argument."""
    from rayfed.data.section import UserData
    from rayfed.scenario import DataSpec

    if Path(source).suffix in (".yaml", ".yml"):
        return load_with_notes(Path(source), None).data
    return DataSpec.model_validate(UserData(source, size).section())


def _said(made: bool, out: Path) -> str:
    """Return the message for a trained network."""
    return f"wrote {out}" if made else f"{out} is up to date: already trained on the same data with the same settings"
