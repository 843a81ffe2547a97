"""The command `canaries`, which measures a lower bound on the privacy loss epsilon of a scenario's arms."""

from __future__ import annotations

from typing import Annotated

import typer

from rayfed.cli.common import CHECKING, Debug, ScenarioFile, Set, errors_for_people, load_with_notes
from rayfed.cli.tables import make_terminal_table
from rayfed.report.terminal.console import console

commands = typer.Typer()
HEADINGS = "arm", "defence", "unit", "claimed", "measured", "verdict", "delta", "TPR", "FPR", "canaries", "runs", "time"


@commands.command(rich_help_panel=CHECKING)
def canaries(
    scenario: ScenarioFile,
    changes: Set = None,
    count: Annotated[
        int,
        typer.Option(
            "--canaries",
            metavar="INT",
            min=100,
            help="Minimum number of canaries per mechanism. A larger number gives a tighter bound.",
        ),
    ] = 2000,
    debug: Debug = False,
) -> None:
    """Compare the claimed epsilon of each arm (setting of defences) with a measured lower bound.

    The bound is measured with canaries: samples or clients whose presence is easy to detect. It holds with 95 %
    confidence. Exit with 1 if it exceeds a claimed epsilon.

    Examples:

        rayfed canaries noniid --canaries 5000
    """
    with errors_for_people(debug):
        from rayfed.audits.canaries import audit_canaries
        from rayfed.privacy.printing import format_lower, format_upper
        from rayfed.report.text.formats import format_share
        from rayfed.runs.bounds import BoundExceeded
        from rayfed.simulation.inputs import prepare_inputs

        rows, above = [], []
        inputs = prepare_inputs(load_with_notes(scenario, changes))
        for one in audit_canaries(inputs, count):
            found = one.found
            rates = format_share(found.true_positives.value), format_share(found.false_positives.value)
            claimed, measured = format_upper(found.claimed), format_lower(found.epsilon)
            effort = f"{one.canaries:,}", f"{one.runs}", f"{one.seconds:.0f} s"
            verdict = "EXCEEDED" if found.refutes_claim else "not exceeded"
            rows.append(
                [one.arm, one.defence, one.unit, claimed, measured, verdict, format_upper(one.delta), *rates, *effort]
            )
            if found.refutes_claim:
                above.append(
                    f"{one.defence} of arm {one.arm}: epsilon is at least {measured}, but {claimed} is claimed "
                    f"(at most {format_upper(found.noise)} times the accounted noise)"
                )
        page = console()
        page.print(make_terminal_table("Epsilon: claimed, and measured lower bound", HEADINGS, rows))
        page.print(
            "Measured: lower bound with 95 % confidence, from the true positive rate (TPR) at the false positive"
        )
        page.print("rate (FPR) with which canaries are detected. A value below the claim does not prove the claim.")
        audited_arms = {row[0] for row in rows}
        if bare := [account.name for account in inputs.accounts if account.name not in audited_arms]:
            page.print(f"Not audited, because they claim no epsilon: {', '.join(bare)}")
        if above:
            raise BoundExceeded("; ".join(above))
