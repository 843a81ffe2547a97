"""Secure aggregation as a scenario's protection: exact sums, drop-outs in every phase, nothing but masked vectors."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from actors.executor import on_ray
from rayfed import scenario as scenarios
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.median import Median
from rayfed.aggregation.over_channel import SumOverChannel
from rayfed.crypto.keys import derive
from rayfed.crypto.masking import Advertised, Transcript, neighbours
from rayfed.crypto.session import MaskingSession
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.secure_aggregation import PHASES, Dropouts, Hosted, MaskedChannel, SecureAggregation
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.simulation.client import plan
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.store.folder import RunFolder
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Masked, Update
from tests.helpers.run_fixtures import Killer, Noting, Spied, assert_same_bits, spied_launch, weights

ROUND = 4
COUNTS = ("advertised", "shared", "sent", "confirmed", "revealed")


def updates(count: int) -> list[Update]:
    """Whole numbers from -127 to 127, unequal weights, buffers beside."""
    draw = np.random.default_rng(count)

    def whole(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw.integers(-127, 128, shape)).float()

    return [Update(c, ROUND, {"w": whole(6, 5)}, {"mean": whole(7)}, 3 * c + 1, 0.0) for c in range(count)]


class Someone:
    round = ROUND

    def __init__(self, client: int) -> None:
        self.client = client

    def evaluate(self, *_: object) -> tuple[float, float]:
        raise AssertionError


def played(sent: list[Update], **parameters: Any) -> tuple[SumOverChannel, MaskingSession]:
    """A round at a server that has no secrets: client c is the (c + 1)th to leave; cohorts of three."""
    # steps of one, for whole numbers
    protection = SecureAggregation(**{"bits": 8, "clip": 127, "clip_buffers": 127} | parameters)
    members = list(range(len(sent)))
    server = SumOverChannel.of(FedAvg(), protection, len(sent), sum(u.samples for u in sent))
    server.check(len(sent))

    transcripts: dict[int, Transcript] = {}

    def consulted(known: Any) -> Any:
        while question := known.request():
            clients = hosting(server, Hosted(b"s" * 32, None, members, transcripts=transcripts))
            payload = pickle.loads(pickle.dumps(question.payload))
            known = known.receive({c: clients.answer(payload, Someone(c)) for c in members})
        return known

    session = consulted(server.begin_round(members, {}))
    clients = hosting(server, Hosted(b"s" * 32, session.broadcast(), members))
    partials = [clients.partial(map(clients.protect, sent[low : low + 3])) for low in range(0, len(sent), 3)]
    total = partials[0]
    for partial in partials[1:]:
        total = server.merge(total, partial)
    return server, consulted(session.finalise(total))


def hosting(server: SumOverChannel, hosted: Hosted) -> SumOverChannel:
    """The server's rule where clients are."""
    assert isinstance(server.channel, MaskedChannel)
    return replace(server, channel=replace(server.channel, hosted=hosted))


def assert_mean_of(server: SumOverChannel, total: MaskingSession, left: list[Update]) -> None:
    """Whole numbers are sent exactly, so that float32 division is all that rounds."""
    assert total.masked is not None
    assert set(total.masked.clients) == {u.client for u in left}
    step, buffers = server.combine(total, torch.Generator())
    weight = sum(u.samples for u in left)
    for found, part, name in ((step, "tensors", "w"), (buffers, "buffers", "mean")):
        expected = sum(u.samples * getattr(u, part)[name].double() for u in left) / weight
        torch.testing.assert_close(found[name].double(), expected, rtol=2e-7, atol=0)
    assert total.opened is not None
    assert total.opened[-1] == weight


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lost", range(5))
def test_sums_are_exact_up_to_n_minus_t_drop_outs_in_every_phase_and_no_further(phase: str, lost: int) -> None:
    """N = 7, t = 4: the last one but one."""
    sent = updates(7)
    server, total = played(sent, threshold=4, dropouts=Dropouts(**{phase: lost}))
    if lost > 3:
        assert "needed" in str(total.aborted)
        assert total.opened is None
        return
    assert total.aborted is None
    assert_mean_of(server, total, sent if phase in ("confirm", "reveal") else sent[lost:])
    [row] = total.rows()["secure_sums"]
    gone = PHASES.index(phase)
    assert [row[k] for k in COUNTS] == [7] * gone + [7 - lost] * (5 - gone)


@pytest.mark.parametrize("neighbours", [6, 8])
def test_a_sparse_graph_costs_less_and_gives_the_same_sum(neighbours: int) -> None:
    sent = updates(20)
    gone = Dropouts(share=1, mask=1)
    server, total = played(sent, neighbours=neighbours, threshold=neighbours // 2 + 2, dropouts=gone)
    assert total.aborted is None, total.aborted
    assert_mean_of(server, total, sent[2:])
    assert total.protocol_bytes < played(sent, dropouts=gone)[1].protocol_bytes


def test_all_five_phases_lose_clients_at_once() -> None:
    sent = updates(11)
    server, total = played(sent, threshold=6, dropouts=Dropouts(advertise=1, share=1, mask=1, confirm=1, reveal=1))
    assert_mean_of(server, total, sent[3:])


def test_the_smallest_round_is_of_two() -> None:
    sent = updates(2)
    assert_mean_of(*played(sent), sent)


def test_values_are_exact_to_half_a_step() -> None:
    g = torch.Generator().manual_seed(0)
    sent = [Update(c, ROUND, {"w": torch.randn(50, generator=g)}, {}, 1 + c, 0.0) for c in range(5)]
    for bits in (8, 16, 32):
        server, total = played(sent, bits=bits, clip=1)
        step, _ = server.combine(total, torch.Generator())
        values = [u.tensors["w"].double().numpy().clip(-1, 1) for u in sent]
        expected = np.average(values, axis=0, weights=[u.samples for u in sent])
        assert (np.abs(step["w"].numpy() - expected) <= 1 / (2**bits - 2) + 1e-7).all()
        assert server.channel.clipped(sent[0]) == int((sent[0].tensors["w"].abs() > 1).sum())


def test_the_heaviest_sum_does_not_overflow_and_heavier_ones_are_refused() -> None:
    top = [Update(c, ROUND, {"w": torch.tensor([1.0, -1.0, 9.0])}, {}, 2**31 - 1, 0.0) for c in range(2)]
    server, total = played(top, bits=32, clip=1)
    step, _ = server.combine(total, torch.Generator())
    assert step["w"].tolist() == [1.0, -1.0, 1.0]
    with pytest.raises(UserError, match="exceed 64 bits"):
        SumOverChannel.of(FedAvg(), SecureAggregation(), 3, 2**33)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"threshold": 2}, "2 is not more than half of 5.* set 3 or more"),
        ({"threshold": 6}, "in a round of 5 clients there are only 5"),
        ({"dropouts": Dropouts(mask=4, reveal=2)}, "the 5 clients"),
    ],
)
def test_what_cannot_be_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SumOverChannel.of(FedAvg(), SecureAggregation(**parameters), 5, 50).check(5)


def test_other_mistakes_are_named() -> None:
    with pytest.raises(ValidationError, match="with 8 neighbours set 6 or more"):
        SecureAggregation(neighbours=8, threshold=5)
    with pytest.raises(UserError, match="not enough for Median"):
        SumOverChannel.of(Median(), SecureAggregation(), 5, 50)
    with pytest.raises(ProtectionError, match="only clients have secrets"):
        SumOverChannel.of(FedAvg(), SecureAggregation(), 5, 50).protect(updates(1)[0])


def test_no_graph_that_passes_the_threshold_falls_apart() -> None:
    """Whoever drops out: where every survivor's neighbourhood is above the smallest threshold, all are connected."""
    draw = np.random.default_rng(0)
    whole = 0
    for _ in range(2000):
        near = neighbours({c: Advertised(draw.bytes(32), draw.bytes(32)) for c in range(12)}, degree=4)
        left = set(draw.choice(12, draw.integers(4, 13), replace=False).tolist())
        if any(len({c, *near[c]} & left) < 4 for c in left):
            continue
        reached, border = set[int](), {min(left)}
        while border:
            reached |= border
            border = {n for c in border for n in near[c] if n in left} - reached
        assert reached == left
        whole += 1
    assert whole > 100


TEXT = """
name: t
seed: 987654321
data: {name: digits, size: 8, train_samples: 400, test_samples: 100}
model: {name: lenet, norm: batch}
training: {batch_size: 16, lr: 0.1, momentum: 0.5}
federation: {rounds: 2, clients: 10, clients_per_round: 9, cohort_size: 2}
arms:
  none: {}
  all: {protection: secure_aggregation}
  some: {protection: {name: secure_aggregation, neighbours: 4, threshold: 4, dropouts: {mask: 1}}}
  few:
    protection:
      {name: secure_aggregation, threshold: 5, dropouts: {advertise: 1, share: 1, mask: 1, reveal: 1}}
  abort: {protection: {name: secure_aggregation, dropouts: {share: 1, mask: 2}}}
resources: {clients: {actors: 2}, attackers: {actors: 1}}
"""
ATTACK = """
attacks:
  - {name: inverting_gradients, rounds: [1], observes: gradient, iterations: 5, factor: true}
"""
MASKED = ("all", "some", "few", "abort")


def parsed(*changes: str, extra: str = "") -> Scenario:
    return scenarios.parse(TEXT + extra, changes=changes)


@pytest.fixture(scope="module")
def listener() -> Noting:
    return Noting()


@pytest.fixture(scope="module")
def spied(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Spied:
    return spied_launch(parsed(extra=ATTACK), tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def undisturbed(listener: Noting, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(parsed(extra=ATTACK), str(tmp_path_factory.mktemp("runs")), local, listener)


def test_masked_runs_end_where_plain_ones_do(undisturbed: RunFolder) -> None:
    arms = weights(undisturbed)
    for part in ("weights", "buffers"):
        for name, plain in arms["none"][part].items():
            torch.testing.assert_close(arms["all"][part][name], plain, rtol=0, atol=1e-5)
    assert {r["clipped"] for r in undisturbed.read_table("clients").to_pylist() if r["arm"] in MASKED} == {0}


def test_rounds_below_the_threshold_are_not_applied_and_the_run_goes_on(
    undisturbed: RunFolder, listener: Noting
) -> None:
    rows = {(r["arm"], r["round"]): r for r in undisturbed.read_table("secure_sums").to_pylist()}
    assert len(rows) == 8
    for round in range(2):
        assert rows["abort", round]["aborted"] is not None
        assert all(rows[arm, round]["aborted"] is None for arm in MASKED[:3])
        assert [rows["few", round][k] for k in ("clients", *COUNTS)] == [9, 8, 7, 6, 6, 5]
        assert any(f"round {round} of arm abort is not applied: 6 of 9" in note for note in listener.notes)
    scenario = parsed()
    inputs = prepare_inputs(scenario)
    untrained = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu")).arm("abort")
    assert_same_bits(weights(undisturbed)["abort"]["weights"], untrained.weights)


@pytest.mark.parametrize("arm", ["all", "some", "few"])
def test_a_round_of_training_is_plain_fedavg_of_those_who_are_left(arm: str) -> None:
    """Without Ray: clients at one runtime, the server's rule made as the server makes it, without secrets."""
    scenario = parsed()
    inputs = prepare_inputs(scenario)
    runtime = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    protecting = plan.protecting(scenario, runtime.specs[arm], inputs.parts.sizes)
    assert protecting is not None
    server, members = protecting.wrap(FedAvg()), plan.drawn_clients(scenario, 1)
    sent = Sent(1, runtime.arm(arm).weights, runtime.arm(arm).buffers)

    transcripts: dict[int, Transcript] = {c: {} for c in members}

    def consulted(known: Any) -> Any:
        while question := known.request():
            said = {c: runtime.answer(arm, sent, question.payload, c, {}, transcripts[c])[1] for c in members}
            known = known.receive(said)
        return known

    session = consulted(server.begin_round(members, {}))
    partial, report = runtime.cohort(arm, replace(sent, broadcast=session.broadcast()), members, {})
    found = server.combine(consulted(session.finalise(partial)), torch.Generator())
    gone = set(plan.leaving(scenario, 1)[: {"all": 0, "some": 1, "few": 3}[arm]])
    values = sum(t.numel() for part in found for t in part.values())
    assert {r["client"]: r["sent_bytes"] for r in report.rows} == {
        c: 0 if c in gone else 8 * (values + 1) for c in members
    }
    plain, _ = runtime.cohort("none", sent, [c for c in members if c not in gone], {})
    for ours, theirs in zip(found, FedAvg().combine(plain, torch.Generator()), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.engine
@pytest.mark.parametrize(("victim", "clients"), [("ServerActor", 1), ("ClientActor", 2)])
@pytest.mark.usefixtures("ray_session")
def test_bits_do_not_depend_on_actors(victim: str, clients: int, undisturbed: RunFolder, tmp_path: Path) -> None:
    """On how many there are, and which dies."""
    killer = Killer(victim, round=1)
    folder = runner.launch(parsed(f"resources.clients.actors={clients}"), str(tmp_path), on_ray(), killer)
    assert killer.killed == 1
    assert_same_bits(weights(folder), weights(undisturbed))
    assert folder.read_table("secure_sums").to_pylist() == undisturbed.read_table("secure_sums").to_pylist()


@pytest.mark.engine
def test_attackers_see_masked_vectors_alone(undisturbed: RunFolder) -> None:
    rows = undisturbed.read_table("attacks").to_pylist()
    found = {row["arm"]: row for row in rows}
    assert found["none"]["status"] == "ok"
    for arm in MASKED:
        assert found[arm]["status"] == "not applicable"
        assert "the update is masked" in found[arm]["message"]


def test_an_observation_of_a_masked_update_is_noise() -> None:
    scenario = parsed(extra=ATTACK)
    inputs = prepare_inputs(scenario)
    runtime = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    observer = ObservationBuilder(runtime)
    arm = runtime.arm("all")
    sent = Sent(1, arm.weights, arm.buffers)
    first, again = (observer.observe(ClientVisit("all", sent, 0), scenario.attacks[0])[0] for _ in range(2))
    assert not first.update
    assert not first.returned_buffers
    assert isinstance(first.sealed, Masked)
    assert isinstance(again.sealed, Masked)
    assert not (first.sealed.vector == again.sealed.vector).any()
    high = np.bincount((first.sealed.vector >> np.uint64(60)).astype(int), minlength=16)
    assert ((high - high.mean()) ** 2 / high.mean()).sum() < 45  # chi squared, 15 degrees: p < 1e-4


@pytest.mark.engine
def test_secrets_are_with_clients_alone(spied: Spied) -> None:
    """All that goes to actors' methods, all that is put into the object store, the memory of server and attacker."""
    scenario = parsed(extra=ATTACK)
    secrets = secrets_of(scenario)
    assert len(secrets) > 100
    spied.assert_without(secrets, {scenario.seed})
    added = [args[2] for method, args in spied.calls if method == "ServerActor.add" and args[0] in MASKED]
    partials = [partial for places in added for partial in places.values()]
    assert partials
    assert all(isinstance(partial, Masked) for partial in partials)
    sums = [partial.vector for partial in partials if partial.clients]
    assert sums
    for vector in sums:  # of some of a round's clients: without masks the values would be small
        assert (np.abs(vector.view(np.int64)[:-1]) > 1 << 50).mean() > 0.9


def secrets_of(scenario: Scenario) -> dict[str, bytes]:
    """Every client's in every round: what all else follows from, the keys of its boxes, and of its two other secrets
    those that nobody may open: the mask key of who sent a vector, the seed of who did not.
    """
    inputs = prepare_inputs(scenario)
    runtime, found = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu")), dict[str, bytes]()
    for arm in MASKED:
        root = derive(runtime._secret(arm), "own")
        spec = runtime.specs[arm].protection
        assert spec is not None
        before = spec.build().dropouts.until("mask")
        found |= {f"{arm} secret": runtime._secret(arm), f"{arm} root": root}
        for round in range(2):
            leaving = plan.leaving(scenario, round)
            for client in leaving:
                own = derive(root, client, round)
                never = "self" if client in leaving[:before] else "mask"
                found |= {f"{arm} {client} {round} {what}": derive(own, what) for what in ("box", never)}
                found[f"{arm} {client} {round}"] = own
    return found
