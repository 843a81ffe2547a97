"""Search for clients whose work crashes or hangs, and rounds without them.

Nothing can stop a crash or what hangs in C code from within: the process is gone, or the executor ends it. Those of
a cohort it was shows when each client is tried alone; then the cohort is computed again without those, so that its sum
has the bits of one that never had them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np

from rayfed.client import plan
from rayfed.client.failures import Failed
from rayfed.client.runtime import CohortReport
from rayfed.client.sent import State
from rayfed.engine.executor import Call, Crashed, Done, Overdue, Ref, Run
from rayfed.engine.tables import Rows
from rayfed.errors import ClientError
from rayfed.scenario import Failures, ResolvedArm, Scenario

_CRASHES = 1
"""Processes that a call may end before its clients are tried alone: somebody may have killed the first."""
_LATER = 1 / 32
"""Share of a round's training by which it may be longer for fewer calls or partial results."""
_FEW = 8
"""Cohorts of each worker up to which a second call costs more than it evens out."""
_SAID = 5
"""Number of clients whose reasons a message gives; the table has all."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """A cohort: clients of an arm in a round with the inputs of their work."""

    arm: ResolvedArm
    index: int
    sent: Ref
    clients: tuple[int, ...]
    states: Mapping[int, State]
    """States of these clients, and of all malicious clients where they collude."""
    left_out: tuple[Failed, ...] = ()
    """Clients of the cohort that crashed or took too long."""
    node: str = ""
    """Node on which its work is best done; empty for any."""

    def of(self, client: int) -> Cohort:
        """Return a cohort that holds this client alone."""
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
Unfinished: TypeAlias = Overdue | Crashed
"""Marker in place of the report on a portion."""


class Result(NamedTuple):
    """Result of a portion of work."""

    portion: Portion
    report: CohortReport
    partials: Partials
    node: str = ""
    """Node that holds the partial results; empty where there is nothing to hold, or one node alone."""


def shares(weights: Sequence[float], workers: int, arms: int) -> list[list[int]]:
    """Split one of several arms' cohorts into runs for shared workers; return their numbers.

    Two for each worker, which even out if some are slower; but one where the only arm has few cohorts, and one is done
    hardly later: there the way to the worker and back counts.
    """
    own = max(1, ceil(workers / arms))
    two = portions(weights, max(2, ceil(2 * workers / arms)), own)
    if arms > 1 or len(weights) > _FEW * workers:
        return two
    one = portions(weights, workers, workers)
    ends = [_makespan(np.array([sum(weights[i] for i in run) for run in runs]), workers) for runs in (one, two)]
    return one if ends[0] <= ends[1] * (1 + _LATER) else two


def portions(weights: Sequence[float], calls: int, workers: int) -> list[list[int]]:
    """Split cohorts with these weights into at most `calls` runs of nearly equal weight; return their numbers.

    Cuts are at multiples of a power of two, of the largest with which so many workers, the longest run first, are done
    hardly later than with cuts anywhere: a run between such cuts is few subtrees of the server's tree, often one, and
    sends as many partial results.
    """
    if not weights:
        return []
    each = np.array(weights, float)
    cuts = _cuts(each, calls)
    in_time = _makespan(np.add.reduceat(each, cuts), workers) * (1 + _LATER)
    for level in reversed(range(1, (len(each) // calls).bit_length())):
        starts = np.arange(0, len(each), 1 << level)
        aligned = starts[_cuts(np.add.reduceat(each, starts), calls)]
        if _makespan(np.add.reduceat(each, aligned), workers) <= in_time:
            cuts = aligned
            break
    return [run.tolist() for run in np.split(np.arange(len(each)), cuts[1:])]


def _cuts(weights: np.ndarray, calls: int) -> np.ndarray:
    """Return the starts of runs of nearly equal weight."""
    middles = weights.cumsum() - weights / 2
    owners = np.minimum(middles * calls // max(weights.sum(), 1), calls - 1)
    return np.flatnonzero(np.diff(owners, prepend=-1))


def _makespan(loads: np.ndarray, workers: int) -> float:
    """Return the finishing time of workers that take the largest remaining load whenever they are free."""
    ends = [0.0] * workers
    for load in np.sort(loads)[::-1]:
        heapreplace(ends, ends[0] + float(load))
    return max(ends)


@dataclass(frozen=True)
class StragglerHandling:
    """Runner of a round's cohorts that leaves out clients which crash or exceed the time limit."""

    round: int
    failures: Failures
    run: Run
    """Does calls on client workers."""
    note: Callable[[str], None]

    def results(self, work: Sequence[Portion]) -> Iterator[Result]:
        """Yield the result of each portion when it is finished.

        Raises `ClientError` where a client fails so and the run is not to go on without it.
        """
        searches = 0
        while work:
            lost = list[tuple[Portion, Unfinished]]()
            for done in self._tried(work, _CRASHES):
                if isinstance(done.result, Unfinished):
                    lost.append((done.call.tag, done.result))
                else:
                    yield Result(done.call.tag, done.result, done.rest[0], done.node)
            searches += 1
            left = self._searched(lost, last=searches > self.failures.retries) if lost else []
            yield from (Result([c], CohortReport([], 0.0), {(0, c.index): None}) for c in left if not c.clients)
            work = [[cohort] for cohort in left if cohort.clients]

    def _searched(self, lost: Sequence[tuple[Portion, Unfinished]], last: bool) -> list[Cohort]:
        """Return the cohorts without clients that fail alone; raises if the `last` search finds none."""
        whole = [cohort for portion, _ in lost for cohort in portion]
        self._tell(lost)
        failing = {p[0]: unfinished for p, unfinished in lost if len(p) == len(p[0].clients) == 1}
        alone = [cohort.of(client) for cohort in whole if cohort not in failing for client in cohort.clients]
        failing |= self._unfinished(alone)
        for _ in range(self.failures.retries):
            failing = self._unfinished(list(failing))
        failed = [(one, self._failure(one.clients[0], unfinished)) for one, unfinished in failing.items()]
        if self.failures.then == "stop" and failed:
            one, failure = failed[0]
            raise failure.error(one.arm.name, self.round)
        if last and not failed:
            raise self._nobodys_fault(*lost[0])
        return [
            cohort.without([f for one, f in failed if (one.arm.name, one.index) == (cohort.arm.name, cohort.index)])
            for cohort in whole
        ]

    def _tell(self, lost: Sequence[tuple[Portion, Unfinished]]) -> None:
        """Report why the clients of lost calls are now tried one by one."""
        said: dict[str, list[Cohort]] = {}
        for portion, unfinished in lost:
            if isinstance(unfinished, Overdue):
                reason = "took longer together than federation.failures.timeout allows"
            else:
                reason = "needed more memory than there is" if unfinished.memory else "ended their processes"
            said.setdefault(reason, []).extend(portion)
        for reason, cohorts in said.items():
            arms = ", ".join(sorted({cohort.arm.name for cohort in cohorts}))
            clients = f"{sum(len(c.clients) for c in cohorts)} clients of round {self.round + 1}"
            self.note(f"{clients} {reason} (arm {arms}): other actors try them one by one")

    def _failure(self, client: int, unfinished: Unfinished) -> Failed:
        """Return the failure of a client whose work alone never finished."""
        times = f" {1 + self.failures.retries} times" * bool(self.failures.retries)
        if isinstance(unfinished, Overdue):
            reason = f"took longer than {self.failures.timeout:g} s{times}"
            return Failed(client, reason, "raise federation.failures.timeout or retries")
        if unfinished.memory:
            advice = "lower training.batch_size or the model's size, or take a machine with more memory"
            return Failed(client, f"needed more memory than there is{times}", advice)
        return Failed(client, f"ended its process{times}", "fix what its work runs (a crash in C code, `os._exit`)")

    def _nobodys_fault(self, portion: Portion, unfinished: Unfinished) -> ClientError:
        """Return the error for a cohort that fails although each client succeeds alone."""
        if isinstance(unfinished, Overdue):
            what, advice = "takes too long", "raise federation.failures.timeout or retries"
        elif unfinished.memory:
            what, advice = "needs more memory than there is", "lower federation.cohort_size"
        else:
            what, advice = "ends its process", "fix what its work runs, or lower federation.cohort_size"
        first = portion[0]
        return ClientError(
            f"the cohort of client {first.clients[0]} in round {self.round + 1} of arm '{first.arm.name}' {what} again "
            f"and again, though none of its clients does alone: {advice}; complete rounds are kept and `rayfed resume` "
            f"goes on from there"
        )

    def _unfinished(self, cohorts: Sequence[Cohort]) -> dict[Cohort, Unfinished]:
        """Return the cohorts that never finish, in order."""
        tried = self._tried([[cohort] for cohort in cohorts], crashes=0)
        found = {done.call.tag[0]: done.result for done in tried if isinstance(done.result, Unfinished)}
        return {cohort: found[cohort] for cohort in cohorts if cohort in found}

    def _tried(self, work: Iterable[Portion], crashes: int) -> Iterator[Done]:
        return self.run([_call(portion, self.failures.timeout, crashes) for portion in work])


def _call(portion: Portion, timeout: float | None, crashes: int) -> Call:
    first, clients = portion[0], [cohort.clients for cohort in portion]
    states = {client: state for cohort in portion for client, state in cohort.states.items()}
    limit = None if timeout is None else timeout * sum(map(len, clients))
    arguments = first.arm.name, first.sent, first.index, clients, states
    return Call("cohorts", arguments, portion, returns=2, limit=limit, crashes=crashes, node=first.node)


def rows_of(cohort: Cohort, scenario: Scenario, round: int) -> Rows:
    """Return rows of the table `clients` for the clients of a cohort that crashed or took too long."""
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


def told(arm: str, round: int, failed: Rows, drawn: int) -> str:
    """Return a message on the failed clients of an arm in a round, with their number and reasons."""
    reasons = [f"client {row['client']} {row['status']}" for row in failed]
    said = [*reasons[:_SAID], *["..."] * (len(reasons) > _SAID)]
    return f"{len(failed)} of {drawn} clients are left out of round {round + 1} of arm {arm}: {'; '.join(said)}"
