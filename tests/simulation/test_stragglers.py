"""The search for clients that crash or hang, with calls that are only pretended: who is left out, who is named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed import scenario as scenarios
from rayfed.errors import ClientError
from rayfed.scenario import resolve
from rayfed.simulation.client.runtime import CohortReport
from rayfed.simulation.executors.base import Call, Crashed, Done, Overdue
from rayfed.simulation.executors.stragglers import Cohort, StragglerHandling, split_by_weight

TEXT = """
name: t
data: {name: digits, size: 8}
model: {name: mlp, hidden: [4]}
federation: {rounds: 1, clients: 12, cohort_size: 3, failures: {timeout: 5, then: drop}}
"""
OUTCOMES = {"crash": Crashed(memory=False), "memory": Crashed(memory=True), "hang": Overdue()}
WORDS = {
    "crash": "ended its process 2 times",
    "memory": "ran out of memory 2 times",
    "hang": "took longer than 5 s 2 times",
}


@dataclass
class Played:
    """Pretends calls: one with a bad client never comes to an end, one of too many clients neither."""

    bad: dict[int, str]
    most: int = 12
    asked: list[tuple[list[int], int | None]] = field(default_factory=list)

    def run(self, calls: Sequence[Call]) -> Iterator[Done]:
        for call in reversed(calls):
            clients = [client for cohort in call.tag for client in cohort.clients]
            self.asked.append((clients, call.crashes))
            how = [self.bad[client] for client in clients if client in self.bad]
            how += ["memory"] * (len(clients) > self.most)
            done = OUTCOMES[how[0]] if how else CohortReport([{"client": c} for c in clients], 0.0)
            yield Done(call, done, [] if how else ["partial"])


def results(played: Played, calls: int, *changes: str) -> tuple[list[Any], list[str]]:
    """What comes of four cohorts of three clients in so many calls, and the notes."""
    scenario, notes = scenarios.parse(TEXT, changes=changes), list[str]()
    arm = resolve(scenario)["none"]
    cohorts = [Cohort(arm, i, "sent", (3 * i, 3 * i + 1, 3 * i + 2), {}) for i in range(4)]
    work = [[cohorts[i] for i in portion] for portion in split_by_weight([1.0] * 4, calls, 1)]
    handling = StragglerHandling(7, scenario.federation.failures, played.run, notes.append)
    return list(handling.results(work)), notes


@given(st.dictionaries(st.integers(0, 11), st.sampled_from(sorted(OUTCOMES)), max_size=6), st.sampled_from([1, 2, 4]))
def test_only_those_that_fail_alone_are_left_out_each_with_its_reason(bad: dict[int, str], calls: int) -> None:
    done, notes = results(Played(bad), calls)
    cohorts = [cohort for portion, *_ in done for cohort in portion]
    assert sorted(cohort.index for cohort in cohorts) == [0, 1, 2, 3], "each cohort comes once"
    assert {client for cohort in cohorts for client in cohort.clients} == set(range(12)) - set(bad)
    assert {one.client: one.reason for c in cohorts for one in c.left_out} == {c: WORDS[how] for c, how in bad.items()}
    assert bool(notes) == bool(bad)


def reported(done: Collection[Any]) -> list[int]:
    return sorted(row["client"] for _, report, *_ in done for row in report.rows)


def test_a_call_may_lose_one_process_by_somebodys_kill_and_a_client_that_is_tried_alone_none() -> None:
    played = Played({4: "crash"})
    assert reported(results(played, 2)[0]) == [*range(4), *range(5, 12)]
    together = {crashes for clients, crashes in played.asked if len(clients) > 1}
    alone = [crashes for clients, crashes in played.asked if clients == [4]]
    assert (together, alone) == ({1}, [0, 0])


@pytest.mark.parametrize(("how", "advice"), [("crash", "os._exit"), ("memory", "batch_size"), ("hang", "timeout")])
def test_a_run_that_stops_names_client_round_and_arm(how: str, advice: str) -> None:
    with pytest.raises(
        ClientError, match=f"^client 4 {WORDS[how]} in round 8 of arm 'none': .*{advice}.*rayfed resume"
    ):
        results(Played({4: how}), 2, "federation.failures.then=stop")


def test_cohorts_that_are_too_large_together_are_tried_each_by_itself() -> None:
    done, _ = results(Played({}, most=3), 2)
    assert reported(done) == list(range(12))


def test_a_cohort_that_no_client_of_it_makes_too_large_ends_the_run() -> None:
    with pytest.raises(ClientError, match=r"the cohort of client .* runs out of memory .*cohort_size"):
        results(Played({}, most=2), 2)
