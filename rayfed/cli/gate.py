"""The command `gate`, and the options of the gate (pass or fail against bounds) that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayfed.cli.common import BOUND_EXCEEDED, CHECKING, Debug, Quiet, Run, errors_for_people
from rayfed.errors import UserError
from rayfed.store import exits

if TYPE_CHECKING:
    from rayfed.evidence.bounds import Bound
    from rayfed.report.gate import GatedRun
    from rayfed.samples import Modality

commands = typer.Typer()
GATE_PANEL = "Gate (continuous integration)"

FailAbove = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-above",
        metavar="[METRIC=]X",
        help="Bound: exit with code 3 if an attack reaches X, or if the result is inconclusive. X is a PSNR in dB "
        "(texts, tables: a share), or METRIC=X such as ssim=0.5. Repeatable. Default: no bound.",
        rich_help_panel=GATE_PANEL,
    ),
]
AllowUnmeasured = Annotated[
    bool,
    typer.Option(
        "--allow-unmeasured",
        help="Exit with code 0 if a result is inconclusive or not measured. Default: exit with code 3.",
        rich_help_panel=GATE_PANEL,
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="JSON file to write the gate result to. Default: no file.",
        rich_help_panel=GATE_PANEL,
    ),
]
Junit = Annotated[
    str | None,
    typer.Option(
        "--junit",
        metavar="FILE",
        help="JUnit XML file to write the gate result to. Default: no file.",
        rich_help_panel=GATE_PANEL,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help="Output of an earlier --json: exit with code 3 if significantly more leaks than in FILE. "
        "Default: no comparison.",
        rich_help_panel=GATE_PANEL,
    ),
]


@dataclass(frozen=True)
class Gate:
    """Options of a gate, as given to one command: bounds, baseline and output files."""

    fail_above: Sequence[str] | None
    allow_unmeasured: bool
    json: str | None
    junit: str | None
    baseline: str | None

    @property
    def asked(self) -> bool:
        """Return whether the user gave a bound, a baseline or an output file."""
        return any((self.fail_above, self.json, self.junit, self.baseline))

    def bounds(self, modality: Modality, measured: Collection[str] | None = None) -> list[Bound]:
        """Return the bounds of `--fail-above` on the `measured` metrics, by default on all metrics of the modality.

        Raises `UserError` for an invalid bound or baseline.
        """
        from rayfed.cli.bounds import parse_bounds
        from rayfed.evidence.bounds import boundable_metrics

        _ = self._earlier
        return parse_bounds(
            self.fail_above or (), modality, boundable_metrics(modality) if measured is None else measured
        )

    def changes(self, modality: Modality) -> list[str]:
        """Return the changes (`--set` texts) that make a scenario measure the bounded metrics, too."""
        from rayfed.metrics.known import default_names

        usual = default_names(modality)
        asked = [bound.name for bound in self.bounds(modality) if bound.name not in usual]
        return [f"metrics.names=[{', '.join([*usual, *asked])}]"] if asked else []

    def close(
        self, runs: Sequence[GatedRun], bounds: Sequence[Bound], say: Callable[[str], None], advise: bool = False
    ) -> None:
        """Print the result of the gate, write the JSON and JUnit files, and exit with code 3 if the gate fails.

        `advise` prints a next step if a bound is not measured. Commands that run attacks have already printed the step.
        """
        from rayfed.report.gate import GateVerdict, Ruling

        if not self.asked:
            return
        ruling = Ruling(runs, bounds, self.allow_unmeasured, self._earlier)
        *lines, verdict = ruling.lines
        unmeasured = ruling.verdict == GateVerdict.NOT_MEASURED
        steps = dict.fromkeys(run.next_step for run in runs) if advise and unmeasured else {}
        for line in [*lines, *filter(None, steps), verdict]:
            say(line)
        if self.json is not None:
            _write(self.json, json.dumps(ruling.document(), indent=2) + "\n")
        if self.junit is not None:
            _write(self.junit, ruling.junit())
        if not ruling.passed:
            raise typer.Exit(BOUND_EXCEEDED)

    @contextmanager
    def undecided(self, say: Callable[[str], None]) -> Iterator[None]:
        """Print that the gate has no result if Ctrl-C or a signal ends the attacks."""
        try:
            yield
        except KeyboardInterrupt as error:
            if self.fail_above or self.baseline:
                say(f"gate: NOT MEASURED: {exits.describe_interruption(error)} before it was decided")
            raise

    @cached_property
    def _earlier(self) -> dict[str, Any] | None:
        from rayfed.report.gate import read_document

        return None if self.baseline is None else read_document(Path(self.baseline))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the gate result to {path}: {error.strerror}; choose another file") from error


def _arm(name: str, arms: Collection[str], scenario: Mapping[str, Any]) -> str:
    """Return the arm of this name, or the only arm whose one defence has it: `prune` for `prune (ratio 0.9)`.

    An arm with several defences never matches the name of one of them.
    """
    from rayfed.errors import nearest
    from rayfed.evidence.arms import arm_spec

    if name in arms:
        return name
    short = name.rpartition(":")[2]  # of FILE.py:Class or module:Class
    pipelines = {arm: arm_spec(scenario, arm).get("defences") or [] for arm in arms}
    found = [arm for arm, defences in pipelines.items() if len(defences) == 1 and _name_of(defences[0]) == short]
    if len(found) != 1:
        raise UserError(f"--arm: the run has no arm '{name}'; {nearest(name, arms)}")
    return found[0]


def _name_of(defence: Any) -> str:
    """Return the name of a defence; for a dotted path, the part after the colon."""
    name = defence["name"] if isinstance(defence, Mapping) else defence
    return str(name).rpartition(":")[2]


@commands.command(rich_help_panel=CHECKING)
def gate(
    run: Run,
    fail_above: FailAbove = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARM",
            help="Arm (setting of defences in the scenario) to check. Repeatable. Default: all arms with a defence.",
        ),
    ] = None,
    allow_unmeasured: AllowUnmeasured = False,
    json: Json = None,
    junit: Junit = None,
    baseline: Baseline = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check the results of a run's attacks against your bounds on leakage.

    Exit with code 3 if a bound is exceeded, or the result is inconclusive or not measured.

    Examples:

        rayfed gate runs/NAME --fail-above 15 --fail-above labels=0.9
        rayfed gate runs/NAME --arm dp_sgd --fail-above ssim=0.5 --junit gate.xml
        rayfed gate runs/NAME --fail-above 15 --baseline old.json --json new.json
    """
    with errors_for_people(debug):
        from rayfed.report.gate import GatedRun
        from rayfed.report.text.weights import attacked_weights
        from rayfed.results.sweep_folder import TRIALS, is_sweep
        from rayfed.store.folder import RunFolder

        asked = Gate(fail_above, allow_unmeasured, json, junit, baseline)
        if not asked.asked:
            raise UserError(
                "gate: no bound, baseline or output file was given; add --fail-above, --baseline, --json or --junit"
            )
        folder = RunFolder.open(run)
        if is_sweep(folder):
            raise UserError(
                f"'{run}' is a sweep, but a gate checks one run. Give a trial ({folder.url}/{TRIALS}/NAME), or "
                "compare all settings with bounds: rayfed recommend"
            )
        gated = GatedRun(folder, "")
        evidence = gated.evidence
        if arm:
            arms = {row["arm"] for row in [*evidence.attacks, *evidence.inferences]} | set(evidence.gated_arms)
            gated = replace(gated, arms=[_arm(name, arms, evidence.scenario) for name in arm])
        rows = [*evidence.attacks, *evidence.inferences]
        gated = replace(
            gated, weights=attacked_weights(evidence.scenario, exits.read_status(folder), rows, gated.names)
        )
        bounds = asked.bounds(evidence.modality, evidence.measures)
        asked.close([gated], bounds, (lambda line: None) if quiet else partial(print, flush=True), advise=True)
