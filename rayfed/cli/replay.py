"""Commands on existing federations: `replay` for recordings, `attack-update` for two state dicts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf, isnan
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayfed.cli.common import (
    RECORDED,
    Address,
    Debug,
    Executor,
    ExecutorName,
    OutInRuns,
    Quiet,
    errors_for_people,
    show_progress,
    yaml_option,
)
from rayfed.cli.gate import AllowUnmeasured, Baseline, FailAbove, Gate, Json, Junit
from rayfed.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from rayfed.attacks.base import Reconstruction
    from rayfed.audits.replay import Replay
    from rayfed.report.gate import GatedRun
    from rayfed.simulation.client.server_message import Sent
    from rayfed.update import Named

commands = typer.Typer()

Model = Annotated[
    str,
    typer.Option(metavar="MODEL", help="Model: FILE.py:Net, my_module:Net or a built-in name (rayfed list models)."),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="YAML",
        help="Loss of the clients: built-in name, FILE.py:fn or {name: ..., ARG: ...}. Default: cross_entropy.",
    ),
]
Iterations = Annotated[int, typer.Option(metavar="INT", min=1, help="Number of iterations per attack.")]
Seed = Annotated[int, typer.Option(metavar="INT", min=0, help="Random seed of the attacks.")]


@commands.command(rich_help_panel=RECORDED)
def replay(
    updates: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder of the recording, written by rayfed.record.", show_default=False),
    ],
    model: Model,
    loss: LossOption = None,
    round: Annotated[
        list[int] | None,
        typer.Option(
            metavar="INT",
            help="Number of a recorded round to attack. Repeatable. Default: the first and the last round.",
        ),
    ] = None,
    iterations: Iterations = 1000,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            min=0,
            help="Time budget in minutes. Attacks that do not fit are reported as not measured. Default: no limit.",
        ),
    ] = None,
    seed: Seed = 0,
    fail_above: FailAbove = None,
    allow_unmeasured: AllowUnmeasured = False,
    json: Json = None,
    junit: Junit = None,
    baseline: Baseline = None,
    out: OutInRuns = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Attack the client updates of a recorded federation.

    Results are scored if the recording has the true samples.

    Examples:

        rayfed replay recording/ --model net.py:Net
        rayfed replay recording/ --model net.py:Net --round 0 --fail-above 15
    """
    with errors_for_people(debug):
        from rayfed.audits.replay import Replay
        from rayfed.recording import Recording

        gate, recording = Gate(fail_above, allow_unmeasured, json, junit, baseline), Recording(updates)
        rounds = round or list(dict.fromkeys([recording.rounds[0], recording.rounds[-1]]))
        written = _model(model), _loss(loss, recording.header.loss), iterations, seed
        replays = [Replay(recording, number, *written) for number in rounds]
        count, attacked = len(recording.rounds), ", ".join(map(str, rounds))
        _sayer(quiet)(f"{updates}: {count} recorded round{'s' * (count != 1)}; attacked (--round): {attacked}")
        seconds = inf if minutes is None else 60 * minutes
        _replayed(replays, gate, out, (executor, address, quiet), seconds)


@commands.command("attack-update", rich_help_panel=RECORDED)
def attack_update(
    before: Annotated[
        Path, typer.Option(metavar="FILE", help="File of the state dict sent to the client (.pt, .safetensors).")
    ],
    after: Annotated[Path, typer.Option(metavar="FILE", help="File of the state dict that the client returned.")],
    model: Model,
    lr: Annotated[float, typer.Option(metavar="FLOAT", min=0, help="Learning rate of the client's SGD.")],
    shape: Annotated[
        str, typer.Option(metavar="C,H,W", help="Shape of an image: channels, height, width; such as 3,32,32.")
    ],
    classes: Annotated[int, typer.Option(metavar="INT", min=1, help="Number of classes of the model.")],
    steps: Annotated[int, typer.Option(metavar="INT", min=1, help="Number of local SGD steps of the client.")] = 1,
    samples: Annotated[
        int, typer.Option(metavar="INT", min=1, help="Number of samples that the client trained on.")
    ] = 1,
    batch: Annotated[
        int | None, typer.Option(metavar="INT", min=1, help="Batch size of one local step. Default: all samples.")
    ] = None,
    momentum: Annotated[float, typer.Option(metavar="FLOAT", min=0, help="Momentum of the client's SGD.")] = 0.0,
    weight_decay: Annotated[
        float, typer.Option(metavar="FLOAT", min=0, help="Weight decay of the client's SGD.")
    ] = 0.0,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Means of the image normalisation, one per channel, comma-separated. Default: no normalisation.",
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Standard deviations of the image normalisation, one per channel, comma-separated. "
            "Default: no normalisation.",
        ),
    ] = None,
    loss: LossOption = None,
    iterations: Iterations = 1000,
    seed: Seed = 0,
    out: OutInRuns = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Attack one update of a client, given the weights before and after local training.

    Results are not scored, because the true samples are not known.

    Examples:

        rayfed attack-update --before sent.pt --after returned.pt --model net.py:Net \\
            --lr 0.1 --shape 3,32,32 --classes 10
    """
    with errors_for_people(debug):
        from rayfed.attacks.external_update import observe
        from rayfed.audits.replay import build_recorded_model, normalisation, run_attempts
        from rayfed.core import seeds
        from rayfed.models.state import check_finite
        from rayfed.recording import Header
        from rayfed.update import LocalTraining

        if len(sizes := _numbers("--shape", shape, int)) != 3 or min(sizes) < 1:
            raise UserError(f"--shape: found '{shape}'; give channels, height and width, such as 3,32,32")
        if (mean is None) != (std is None):
            raise UserError("--mean and --std must be given together: add the missing option")
        means, deviations = (tuple(_numbers("--mean and --std", t, float)) if t else None for t in (mean, std))
        header = Header("", (sizes[0], sizes[1], sizes[2]), classes, means, deviations)
        net = build_recorded_model({**_model(model), **normalisation(header)}, _loss(loss), header, seed)
        local = LocalTraining(steps, batch, lr, momentum, weight_decay)
        sent, returned = _state("--before", before, net), _state("--after", after, net)
        for path, state in ((before, sent), (after, returned)):
            check_finite(path, state, net.state_dict())
        given = observe(net, sent, header.sample, classes, samples, returned=returned, local=local)
        _warn(given.remarks)
        say, found = _sayer(quiet), run_attempts(net, given.observation, iterations, seeds.derive_bytes(seed, "update"))
        results = ((0, 0, name, guess) for name, guess in found)
        _show("update", results, list(given.remarks), out, say)


def _replayed(
    replays: Sequence[Replay], gate: Gate, out: str | None, where: tuple[ExecutorName, str | None, bool], seconds: float
) -> None:
    """Attack rounds of a recording, and apply the gate to the results."""
    say, bounds = _sayer(where[2]), gate.bounds("pixels")
    if len({one.scored for one in replays}) > 1:
        with_truth = ", ".join(str(one.round) for one in replays if one.scored)
        raise UserError(
            f"some attacked rounds were recorded without true samples: choose only {with_truth} with --round"
        )
    gated, ends = [], monotonic() + seconds
    with gate.undecided(say):
        for place, one in enumerate(replays):
            left = max(ends - monotonic(), 0.0) / (len(replays) - place)
            sent, remarks = one.sent()
            _warn(remarks)
            if one.scored:
                gated.append(_scored(one, sent, gate, out, where, left))
            else:
                found = (
                    (update.round, update.client, name, guess)
                    for update, name, guess in one.unscored(monotonic() + left)
                )
                _show(f"round {one.round}", found, remarks, out, say)
    gate.close(gated, bounds, say)


def _scored(
    one: Replay, sent: Sent, gate: Gate, out: str | None, where: tuple[ExecutorName, str | None, bool], seconds: float
) -> GatedRun:
    """Attack a round with recorded samples in the given time, and return its run."""
    from rayfed import scenario
    from rayfed.audits.replay import RECORDED
    from rayfed.evidence.gate import wrong_replay_distance
    from rayfed.report.gate import GatedRun
    from rayfed.report.text.gate import wrong_replay_text
    from rayfed.runs import runner
    from rayfed.runs.executors import execution

    executor, address, quiet = where
    loaded = scenario.check_scenario(scenario.with_changes(one.document(), gate.changes("pixels")), "the replay")
    words = f"those that clients of {one.recording.folder} were sent in round {one.round}"
    with show_progress(quiet, executor, "attack", brief=True) as view:
        folder = runner.attack_sent(loaded, sent, words, out, execution(executor, address), view, seconds)
        view.audited(f"round {one.round}", f"{folder.url}/report.html")
        gated = GatedRun(folder, f"round {one.round} of the recording", [RECORDED])
        distance = wrong_replay_distance(gated.evidence, RECORDED)
        if distance is not None:
            view.note(wrong_replay_text(distance))
    return gated


def _show(
    what: str,
    found: Iterable[tuple[int, int, str, Reconstruction]],
    remarks: list[str],
    out: str | None,
    say: Callable[[str], None],
) -> None:
    """Print one line per attack as results arrive, and write the reconstructions, which are not scored."""
    from rayfed.report.html.unscored import make_unscored_rows, write_unscored
    from rayfed.report.text.formats import NONE
    from rayfed.report.text.samples import NOT_SCORED
    from rayfed.store.folder import RunFolder

    rows = []
    say(f" round  client  {'attack':<22}  {'status':<14}  loss")
    for round, client, attack, guess in found:
        loss = NONE if isnan(guess.loss) else f"{guess.loss:.4g}"
        say(f" {round:>5}  {client:>6}  {attack:<22}  {guess.status:<14}  {loss}")
        if guess.message:
            say(f"   {guess.message}")
        rows += make_unscored_rows(round, client, attack, guess)
    page = write_unscored(RunFolder.create(out or "runs", "replay"), f"Attacks on {what}", rows, remarks)
    say(NOT_SCORED)
    say(f"Reconstructions: {page}")


def _sayer(quiet: bool) -> Callable[[str], None]:
    return (lambda line: None) if quiet else partial(print, flush=True)


def _warn(remarks: Iterable[str]) -> None:
    """Print notes on suspicious updates, such as a wrong sign, which make attacks fail."""
    for remark in remarks:
        print(f"note: {remark}", file=sys.stderr)


def _model(name: str) -> dict[str, Any]:
    from rayfed import registry
    from rayfed.runs.scenario_loading import to_dotted_path

    registry.search(str(Path.cwd()))
    return {"name": to_dotted_path(name)}


def _loss(text: str | None, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
    from rayfed.runs.scenario_loading import loss_section

    usual = "cross_entropy" if recorded is None else dict(recorded)
    return loss_section(usual if text is None else yaml_option("--loss", text))


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option}: found '{text}'; give numbers separated by commas") from None


def _state(option: str, path: Path, model: nn.Module) -> Named:
    """Return the state of a model in a file, and print remarks on it; raises `UserError` for a file without one."""
    from rayfed.models.state import state_for

    found, remarks = state_for(model, path, option)
    _warn(remarks)
    return found
