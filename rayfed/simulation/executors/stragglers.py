"""Search for clients that crash or hang, so that a round can continue without them.

A crash or a hang in C code ends the process of a whole cohort. To find the clients that cause it, each client of the
cohort is run separately. Then the cohort is computed again without them, so that its sum has the same bits as if they
had never been in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np

from rayfed.errors import ClientError
from rayfed.scenario import Failures, ResolvedArm, Scenario
from rayfed.simulation.client import plan
from rayfed.simulation.client.failures import Failed
from rayfed.simulation.client.runtime import CohortReport
from rayfed.simulation.client.server_message import State
from rayfed.simulation.executors.base import Call, Crashed, Done, Overdue, Ref, Run
from rayfed.simulation.tables import Rows

_CRASHES = 1
"""Number of process deaths after which a call is repeated as a whole; a single death may have another cause."""
_LATER = 1 / 32
"""Maximum share by which a round's training may take longer in exchange for fewer calls or partial results."""
_FEW = 8
"""Maximum number of cohorts per worker for which one call per worker is considered."""
_SAID = 5
"""Maximum number of clients that a message lists; the table `clients` has all."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """Group of an arm's clients that one call trains in a round, with the inputs of their work."""

    arm: ResolvedArm
    index: int
    sent: Ref
    clients: tuple[int, ...]
    states: Mapping[int, State]
    """States of these clients, and of all malicious clients if they collude."""
    left_out: tuple[Failed, ...] = ()
    """Clients of the cohort that crashed or took too long."""
    node: str = ""
    """Preferred node for its work; empty for any."""

    def select(self, client: int) -> Cohort:
        """Return a copy of the cohort that contains only the client `client`."""
        return replace(self, clients=(client,))

    def without(self, failed: Sequence[Failed]) -> Cohort:
        """Return a copy of the cohort without the clients in `failed`."""
        gone = {one.client for one in failed}
        left = tuple(client for client in self.clients if client not in gone)
        return replace(self, clients=left, left_out=(*self.left_out, *failed))


Portion = Sequence[Cohort]
"""Consecutive cohorts of one arm for one call, whose partial results are sent merged."""
Partials: TypeAlias = Ref
"""Partial results by position in the server's tree (`TreeFold.nodes`); None if no client is left."""
Unfinished: TypeAlias = Overdue | Crashed
"""Marker of an unfinished portion, instead of its report."""


class Result(NamedTuple):
    """Result of one portion of work (consecutive cohorts that one call trains)."""

    portion: Portion
    report: CohortReport
    partials: Partials
    node: str = ""
    """Node that holds the partial results; empty if there are none, or only one node."""


def split_among_workers(weights: Sequence[float], workers: int, arms: int) -> list[list[int]]:
    """Split an arm's cohorts into consecutive parts for `workers` workers shared by `arms` arms; return cohort numbers.

    There are two parts per worker, which balances slower workers. There is one part per worker if the only arm has few
    cohorts and this is hardly slower, because it needs fewer calls.
    """
    own = max(1, ceil(workers / arms))
    two = split_by_weight(weights, max(2, ceil(2 * workers / arms)), own)
    if arms > 1 or len(weights) > _FEW * workers:
        return two
    one = split_by_weight(weights, workers, workers)
    ends = [_makespan(np.array([sum(weights[i] for i in run) for run in runs]), workers) for runs in (one, two)]
    return one if ends[0] <= ends[1] * (1 + _LATER) else two


def split_by_weight(weights: Sequence[float], calls: int, workers: int) -> list[list[int]]:
    """Split cohorts into at most `calls` consecutive parts of nearly equal weight; return each part's cohort numbers.

    Cuts are at multiples of the largest power of two with which `workers` workers finish hardly later than with
    arbitrary cuts. A part between such cuts consists of few subtrees of the server's tree, so it sends few partial
    results.
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
    """Return the starts of consecutive parts of nearly equal weight."""
    middles = weights.cumsum() - weights / 2
    owners = np.minimum(middles * calls // max(weights.sum(), 1), calls - 1)
    return np.flatnonzero(np.diff(owners, prepend=-1))


def _makespan(loads: np.ndarray, workers: int) -> float:
    """Return the finishing time of workers that always take the largest remaining load."""
    ends = [0.0] * workers
    for load in np.sort(loads)[::-1]:
        heapreplace(ends, ends[0] + float(load))
    return max(ends)


@dataclass(frozen=True)
class StragglerHandling:
    """Runner of a round's cohorts that excludes clients that crash or exceed the time limit."""

    round: int
    failures: Failures
    run: Run
    """Run calls on client workers."""
    note: Callable[[str], None]

    def results(self, work: Sequence[Portion]) -> Iterator[Result]:
        """Run all portions of work, and yield the result of each portion as soon as the portion is finished.

        Raises `ClientError` if a client crashes or exceeds the limit, and `failures.then` is `stop`.
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
        """Return the cohorts without the clients that fail separately; raises if the `last` search finds none."""
        whole = [cohort for portion, _ in lost for cohort in portion]
        self._tell(lost)
        failing = {p[0]: unfinished for p, unfinished in lost if len(p) == len(p[0].clients) == 1}
        alone = [cohort.select(client) for cohort in whole if cohort not in failing for client in cohort.clients]
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
        """Print why the clients of lost calls are now run one by one."""
        said: dict[str, list[Cohort]] = {}
        for portion, unfinished in lost:
            if isinstance(unfinished, Overdue):
                reason = "together exceeded federation.failures.timeout"
            else:
                reason = "ran out of memory" if unfinished.memory else "ended their processes"
            said.setdefault(reason, []).extend(portion)
        for reason, cohorts in said.items():
            arms = ", ".join(sorted({cohort.arm.name for cohort in cohorts}))
            clients = f"{sum(len(c.clients) for c in cohorts)} clients of round {self.round + 1}"
            self.note(f"{clients} {reason} (arm {arms}): they are run again one by one")

    def _failure(self, client: int, unfinished: Unfinished) -> Failed:
        """Return the failure of a client whose work never finished."""
        times = f" {1 + self.failures.retries} times" * bool(self.failures.retries)
        if isinstance(unfinished, Overdue):
            reason = f"took longer than {self.failures.timeout:g} s{times}"
            return Failed(client, reason, "raise federation.failures.timeout or retries")
        if unfinished.memory:
            advice = "lower training.batch_size or the model's size, or use a machine with more memory"
            return Failed(client, f"ran out of memory{times}", advice)
        return Failed(
            client, f"ended its process{times}", "fix the code that the client runs (a crash in C code, `os._exit`)"
        )

    def _nobodys_fault(self, portion: Portion, unfinished: Unfinished) -> ClientError:
        """Return the error for a cohort that fails although each of its clients succeeds separately."""
        if isinstance(unfinished, Overdue):
            what, advice = "takes too long", "raise federation.failures.timeout or retries"
        elif unfinished.memory:
            what, advice = "runs out of memory", "lower federation.cohort_size"
        else:
            what, advice = "ends its process", "fix the code that the clients run, or lower federation.cohort_size"
        first = portion[0]
        return ClientError(
            f"the cohort of client {first.clients[0]} in round {self.round + 1} of arm '{first.arm.name}' {what} "
            f"repeatedly, but none of its clients does separately: {advice}; finished rounds are kept, and "
            f"`rayfed resume` continues after them"
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


def make_straggler_rows(cohort: Cohort, scenario: Scenario, round: int) -> Rows:
    """Return rows of the table `clients` for those clients of a cohort that crashed or took too long."""
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


def format_failures(arm: str, round: int, failed: Rows, drawn: int) -> str:
    """Return a message on the failed clients of an arm in a round, with the reasons."""
    reasons = [f"client {row['client']} {row['status']}" for row in failed]
    said = [*reasons[:_SAID], *["..."] * (len(reasons) > _SAID)]
    return f"{len(failed)} of {drawn} clients are excluded from round {round + 1} of arm {arm}: {'; '.join(said)}"
