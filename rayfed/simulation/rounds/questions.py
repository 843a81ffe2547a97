"""Exchange of questions and replies between an arm's aggregation rule and its clients in a round."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rayfed.simulation.client import plan
from rayfed.simulation.client.server_message import State
from rayfed.simulation.executors.base import Call, Ref
from rayfed.simulation.rounds.federation import Federation


def consult(
    federation: Federation,
    round: int,
    sent: Mapping[str, Ref],
    states: Mapping[str, Mapping[int, State]],
    failed: Collection[tuple[str, int]] = (),
) -> None:
    """Pass questions of aggregation rules to a round's clients, and the replies to the server, until no rule asks.

    Clients that `failed` in an arm are not asked. Payloads and replies are passed by reference, so this process never
    holds them. The server receives replies ordered by client, not by arrival.
    """
    executor, transcripts = federation.executor, federation.transcripts
    drawn = plan.drawn_clients(federation.scenario, round)
    members = {arm: [client for client in drawn if (arm, client) not in failed] for arm in sent}
    asking = list(sent)
    while asking:
        asked = {arm: executor.serve("request", arm, returns=2) for arm in asking}
        found = zip(asked, federation.wait_for([whom for whom, _ in asked.values()], len(asked)), strict=True)
        of = {arm: whom for arm, whom in found if whom}
        calls = []
        for arm, whom in of.items():
            for client in members[arm] if whom == "all" else members[arm][:1]:
                known = states[arm].get(client, {}), transcripts.get((arm, round, client), {})
                calls.append(Call("answer", (arm, sent[arm], asked[arm][1], client, *known), (arm, client), returns=2))
        answers = {}
        for call, transcript, [answer], _ in federation.run_clients(calls):
            arm, client = call.tag
            answers[arm, client], transcripts[arm, round, client] = answer, transcript
        heard = []
        for arm in of:
            own = [client for client in members[arm] if (arm, client) in answers]
            heard.append(executor.serve("receive", arm, own, *(answers[arm, client] for client in own)))
        federation.wait_for(heard, len(heard))
        asking = list(of)
