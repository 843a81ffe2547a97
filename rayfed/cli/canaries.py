"""The command `canaries`, which measures the epsilon of a scenario's arms."""

from __future__ import annotations

from typing import Annotated

import typer

from rayfed.cli.common import CHECKING, Debug, ScenarioFile, Set, errors_for_people, load
from rayfed.cli.tables import table
from rayfed.report.terminal import console

commands = typer.Typer()
HEADINGS = "arm", "defence", "unit", "delta", "claimed", "shown", "told at false alarms", "canaries", "runs", "time"


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
            help="Minimum number of canaries per mechanism. More give a tighter bound.",
        ),
    ] = 2000,
    debug: Debug = False,
) -> None:
    """Compare the claimed epsilon of each arm with a measured lower bound.

    The bound is measured with canaries: samples or clients whose presence is easy to detect. It holds with 95 %
    confidence. Exit with 1 if it exceeds a claimed epsilon.

    Examples:

        rayfed canaries noniid --canaries 5000
    """
    with errors_for_people(debug):
        from rayfed.analysis.proved import BoundPassed
        from rayfed.engine.canaries import audited
        from rayfed.engine.inputs import prepare
        from rayfed.privacy.printing import at_least, at_most

        rows, above = [], []
        inputs = prepare(load(scenario, changes))
        for one in audited(inputs, count):
            found = one.found
            rates = f"{found.true_positives.value:.1%} at {found.false_positives.value:.1%}"
            epsilons = at_most(found.claimed), at_least(found.epsilon)
            made = f"{one.canaries:,}", f"{one.runs}", f"{one.seconds:.0f} s"
            rows.append([one.arm, one.defence, one.unit, at_most(one.delta), *epsilons, rates, *made])
            if found.refuted:
                above.append(
                    f"{one.defence} of arm {one.arm} claims an epsilon of {epsilons[0]} and spends {epsilons[1]} at "
                    f"least: no more than {at_most(found.noise)} times the noise that is accounted"
                )
        console().print(table("epsilon: claimed, and at least spent (95 % confidence)", HEADINGS, rows))
        told = {row[0] for row in rows}
        if bare := [account.name for account in inputs.accounts if account.name not in told]:
            console().print(f"not audited, as nothing is claimed of them: {', '.join(bare)}")
        if above:
            raise BoundPassed("; ".join(above))
