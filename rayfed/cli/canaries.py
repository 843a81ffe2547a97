"""The command `canaries`, which measures a lower bound on the privacy loss epsilon of a scenario's arms."""

from __future__ import annotations

from typing import Annotated

import typer

from rayfed.cli.common import CHECKING, Debug, ScenarioFile, Set, errors_for_people, load
from rayfed.cli.tables import table
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
        from rayfed.audits.canaries import audited
        from rayfed.privacy.printing import at_least, at_most
        from rayfed.report.text.formats import share
        from rayfed.runs.bounds import BoundExceeded
        from rayfed.simulation.inputs import prepare

        rows, above = [], []
        inputs = prepare(load(scenario, changes))
        for one in audited(inputs, count):
            found = one.found
            rates = share(found.true_positives.value), share(found.false_positives.value)
            claimed, measured = at_most(found.claimed), at_least(found.epsilon)
            effort = f"{one.canaries:,}", f"{one.runs}", f"{one.seconds:.0f} s"
            verdict = "EXCEEDED" if found.refutes_claim else "not exceeded"
            rows.append(
                [one.arm, one.defence, one.unit, claimed, measured, verdict, at_most(one.delta), *rates, *effort]
            )
            if found.refutes_claim:
                above.append(
                    f"{one.defence} of arm {one.arm}: epsilon is at least {measured}, but {claimed} is claimed "
                    f"(at most {at_most(found.noise)} times the accounted noise)"
                )
        page = console()
        page.print(table("Epsilon: claimed, and measured lower bound", HEADINGS, rows))
        page.print(
            "Measured: lower bound with 95 % confidence, from the true positive rate (TPR) at the false positive"
        )
        page.print("rate (FPR) with which canaries are detected. A value below the claim does not prove the claim.")
        audited_arms = {row[0] for row in rows}
        if bare := [account.name for account in inputs.accounts if account.name not in audited_arms]:
            page.print(f"Not audited, because they claim no epsilon: {', '.join(bare)}")
        if above:
            raise BoundExceeded("; ".join(above))
