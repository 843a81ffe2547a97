"""Straggler handling: clients whose work takes too long are left out of a round's cohorts.

Work that hangs in C code cannot be stopped from within, so the executor ends its process. Whoever of a cohort it was
shows when each client is tried alone; then the cohort is computed again without those, so that its sum has the bits of
one that never had them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from rayfed.client import plan
from rayfed.client.failures import Failed
from rayfed.client.runtime import CohortReport
from rayfed.client.sent import State
from rayfed.engine.executor import Call, Overdue, Ref, Run
from rayfed.engine.tables import Rows
from rayfed.errors import ClientError
from rayfed.scenario import Failures, ResolvedArm, Scenario

_SAID = 5
"""Number of clients whose reasons a message gives; the table has all."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """A cohort: some clients of an arm in a round, and what their work needs."""

    arm: ResolvedArm
    index: int
    sent: Ref
    clients: tuple[int, ...]
    states: Mapping[int, State]
    """States of these clients, and of all malicious clients where they collude."""
    left_out: tuple[Failed, ...] = ()
    """Clients of the cohort that took too long."""

    def of(self, client: int) -> Cohort:
        """Return a cohort of one of the clients."""
        return replace(self, clients=(client,))

    def without(self, failed: Sequence[Failed]) -> Cohort:
        """Return the cohort without the clients that failed."""
        gone = {one.client for one in failed}
        left = tuple(client for client in self.clients if client not in gone)
        return replace(self, clients=left, left_out=(*self.left_out, *failed))


Portion = Sequence[Cohort]
"""Consecutive cohorts of one arm, for one call: their partial results travel merged."""
Partials: TypeAlias = Ref
"""Partial results by their places in the server's tree (`TreeFold.nodes`); None where nobody is left."""
Result: TypeAlias = tuple[Portion, CohortReport, Partials]


def portions(weights: Sequence[float], calls: int) -> list[list[int]]:
    """Split cohorts with these weights into at most `calls` runs of about equal weight; returns their numbers."""
    middles = np.cumsum(weights) - np.array(weights) / 2
    owners = np.minimum(middles * calls // max(sum(weights), 1), calls - 1)
    return [np.flatnonzero(owners == owner).tolist() for owner in np.unique(owners)]


def _call(portion: Portion, timeout: float | None) -> Call:
    first, clients = portion[0], [cohort.clients for cohort in portion]
    states = {client: state for cohort in portion for client, state in cohort.states.items()}
    limit = None if timeout is None else timeout * sum(map(len, clients))
    return Call("cohorts", (first.arm.name, first.sent, first.index, clients, states), portion, returns=2, limit=limit)


@dataclass(frozen=True)
class StragglerHandling:
    """Runs a round's cohorts within the time limit, without the clients that take longer."""

    round: int
    failures: Failures
    run: Run
    """Does calls on client workers."""
    note: Callable[[str], None]

    def results(self, work: Sequence[Portion]) -> Iterator[Result]:
        """Yield the result of each portion as they come.

        Raises `ClientError` where a client takes too long and the run is not to go on without it.
        """
        searches = 0
        while work:
            late = list[Portion]()
            for portion, report, partials in self._tried(work):
                if isinstance(report, Overdue):
                    late.append(portion)
                else:
                    yield portion, report, partials
            searches += 1
            left = self._searched(late, last=searches > self.failures.retries) if late else []
            yield from (([c], CohortReport([], 0.0), {(0, c.index): None}) for c in left if not c.clients)
            work = [[cohort] for cohort in left if cohort.clients]

    def _searched(self, portions: Sequence[Portion], last: bool) -> list[Cohort]:
        """Return the cohorts without the clients that take too long even alone; the `last` search finds one or ends."""
        failures, late = self.failures, [cohort for portion in portions for cohort in portion]
        arms = ", ".join(sorted({cohort.arm.name for cohort in late}))
        self.note(
            f"{sum(len(c.clients) for c in late)} clients of round {self.round} took longer together than "
            f"federation.failures.timeout allows (arm {arms}): their actor is ended, they are tried one by one"
        )
        were_alone = [portion[0] for portion in portions if len(portion) == len(portion[0].clients) == 1]
        alone = [cohort.of(client) for cohort in late if cohort not in were_alone for client in cohort.clients]
        hanging = were_alone + self._overdue(alone)
        for _ in range(failures.retries):
            hanging = self._overdue(hanging)
        reason = f"took longer than {failures.timeout:g} s" + f" {1 + failures.retries} times" * bool(failures.retries)
        advice = "raise federation.failures.timeout or retries"
        failed = [(one, Failed(one.clients[0], reason, advice)) for one in hanging]
        if failures.then == "stop" and failed:
            one, failure = failed[0]
            raise failure.error(one.arm.name, self.round)
        if last and not failed:
            raise ClientError(
                f"the cohort of client {late[0].clients[0]} in round {self.round} of arm '{late[0].arm.name}' takes "
                f"too long again and again, though none of its clients does alone: {advice}; complete rounds are kept "
                f"and `rayfed resume` goes on from there"
            )
        return [
            cohort.without([f for one, f in failed if (one.arm.name, one.index) == (cohort.arm.name, cohort.index)])
            for cohort in late
        ]

    def _overdue(self, cohorts: Sequence[Cohort]) -> list[Cohort]:
        """Return the cohorts that take too long, in their order."""
        tried = self._tried([[cohort] for cohort in cohorts])
        found = {portion[0] for portion, report, _ in tried if isinstance(report, Overdue)}
        return [cohort for cohort in cohorts if cohort in found]

    def _tried(self, work: Iterable[Portion]) -> Iterator[Result | tuple[Portion, Overdue, dict[Any, None]]]:
        for call, report, rest in self.run([_call(portion, self.failures.timeout) for portion in work]):
            yield call.tag, report, rest[0] if rest else {}


def rows_of(cohort: Cohort, scenario: Scenario, round: int) -> Rows:
    """Return rows of the table `clients` for those of a cohort that took too long."""
    malicious = plan.malicious_clients(scenario, cohort.arm)
    return [
        {
            "arm": cohort.arm.name,
            "round": round,
            "client": one.client,
            "malicious": one.client in malicious,
            "status": one.reason,
        }
        for one in cohort.left_out
    ]


def told(arm: str, round: int, rows: Rows) -> str:
    """Return a message that names the clients of an arm that are left out of a round, and why."""
    failed = [f"client {row['client']} {row['status']}" for row in rows if row["status"] != "ok"]
    said = [*failed[:_SAID], *["..."] * (len(failed) > _SAID)]
    return f"{len(failed)} of {len(rows)} clients are left out of round {round} of arm {arm}: {'; '.join(said)}"
