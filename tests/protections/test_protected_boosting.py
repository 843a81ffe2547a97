"""FedBoosting on fused and on sealed updates: mixtures worked by hand, their inversion, the same steps as in plain."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayfed import scenario as scenarios
from rayfed.aggregation.boosting_over_channel import BoostingOverChannel
from rayfed.aggregation.fedboosting import Evaluation, FedBoosting, Score
from rayfed.attacks.mixed import unmixed
from rayfed.crypto.encryptor import Keys
from rayfed.crypto.packing import apportion
from rayfed.errors import ProtectionError, ScenarioError, UserError
from rayfed.protections.base import Protection
from rayfed.protections.bfv import Bfv
from rayfed.protections.ckks import Ckks
from rayfed.protections.encrypted import Open
from rayfed.protections.paillier import Paillier
from rayfed.runs.runner import launch
from rayfed.simulation.client.local import update_method
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Encrypted, Named, Observation, Update
from tests.helpers.run_fixtures import weights

SHORT = {"key_bits": 256, "insecure": True}
PROTECTIONS: dict[str, Protection] = {
    "paillier": Paillier(**SHORT),
    "pieces": Paillier(**SHORT, encoding="fedboosting"),
    "ckks": Ckks(),
    "bfv": Bfv(),
}
TOLERANCE = dict.fromkeys(PROTECTIONS, 4 * torch.finfo(torch.float32).eps)
TOLERANCE["paillier"] += 1 / (2**16 - 2)
"""Half a step of values up to 1, where that is coarser than sums of three products in single precision."""
EACH = pytest.mark.parametrize("name", PROTECTIONS)
FUSIONS = pytest.mark.parametrize("fusion", [None, 0.9])


def sent_updates(count: int) -> list[Update]:
    g = torch.Generator().manual_seed(count)
    return [
        Update(2 * c, 4, {"w": torch.rand(20, 3, generator=g) * 2 - 1, "b": torch.zeros(2)},
               {"m": 2 * torch.rand(5, generator=g) - 1}, 1 + c, 0.3 * c)
        for c in range(count)
    ]  # fmt: skip


def sealing(name: str, rule: FedBoosting, clients: int, **parameters: Any) -> BoostingOverChannel:
    protection = replace(PROTECTIONS[name], clip_buffers=1.0, **parameters)
    server = BoostingOverChannel.of(rule, protection, clients)
    keys = Keys(b"s" * 32, server.channel.encryptor.scheme.generate(b"s" * 32))
    return replace(server, channel=replace(server.channel, keys=keys, clients=tuple(range(0, 2 * clients, 2))))


def without_keys(rule: BoostingOverChannel) -> BoostingOverChannel:
    return replace(rule, channel=replace(rule.channel, keys=None))


class Judge:
    """A client that takes a model for the better the larger its first weight, and remembers what it was shown."""

    round = 4

    def __init__(self, client: int) -> None:
        self.client = client
        self.shown: list[tuple[Named, Named]] = []

    def evaluate(self, update: Named, buffers: Named, split: str = "validation") -> tuple[float, float]:
        self.shown.append((update, buffers))
        return 1.0, float((1 + update["w"][0, 0]) / 2)


def played(rule: FedBoosting | BoostingOverChannel, sent: list[Update]) -> tuple[Any, list[Any], Judge]:
    """A round as it is played: the session before the step, what was asked, and the first client."""
    hidden = isinstance(rule, BoostingOverChannel)
    server: Any = without_keys(rule) if hidden else rule
    judges = [Judge(update.client) for update in sent]
    partials = [rule.partial([rule.protect(update) if hidden else update]) for update in sent]  # type: ignore
    total = partials[0]
    for partial in partials[1:]:
        total = server.merge(total, partial)
    session, asked = server.begin_round([update.client for update in sent], {}), []
    assert session.request() is None
    session = session.finalise(total)
    while question := session.request():
        asked.append(question.payload)
        whom = judges if question.of == "all" else judges[:1]
        session = session.receive({judge.client: rule.answer(question.payload, judge) for judge in whom})
    return session, asked, judges[0]


def flat(named: Named) -> torch.Tensor:
    return torch.cat([t.ravel() for t in named.values()]).double()


def test_a_mixture_is_nine_parts_its_own_and_one_part_everybody_elses() -> None:
    ones = {c: {"w": torch.eye(4)[c]} for c in range(4)}
    models = {c: (ones[c], {"m": 10 * ones[c]["w"]}) for c in ones}
    shown = FedBoosting(fusion=0.7).mixed(models)
    tensors = torch.stack([shown[c][0]["w"] for c in range(4)])
    torch.testing.assert_close(tensors, 0.6 * torch.eye(4) + 0.1)
    torch.testing.assert_close(torch.stack([shown[c][1]["m"] for c in range(4)]), 6 * torch.eye(4) + 1)
    assert FedBoosting().mixed(models)[2][0] is ones[2]


@pytest.mark.parametrize(("clients", "own", "other"), [(2, 90, 10), (3, 90, 5), (10, 90, 1), (11, 90, 1)])
def test_sealed_mixtures_are_equation_4_5_rounded_down(clients: int, own: int, other: int) -> None:
    sent, rule = sent_updates(clients), sealing("bfv", FedBoosting(fusion=0.9), clients)
    _, [mixtures, _], judge = played(rule, sent)
    for place, update in enumerate(sent):
        sealed = mixtures.models[update.client]
        assert {s.client: s.after for s in sealed.shares} == {u.client: own if u is update else other for u in sent}
        parts = [own if u is update else other for u in sent]
        expected = sum(part * flat(u.tensors) for part, u in zip(parts, sent, strict=True)) / sum(parts)
        torch.testing.assert_close(flat(judge.shown[place][0]), expected, rtol=0, atol=TOLERANCE["bfv"])


def test_fusion_wants_somebody_to_fuse_with_and_pieces_enough_for_everybody() -> None:
    with pytest.raises(UserError, match="fusion"):
        FedBoosting(fusion=0.9).check(1)
    with pytest.raises(UserError, match=r"11 other clients .* pieces_of_weight"):
        sealing("bfv", FedBoosting(fusion=0.9), 12)
    assert sealing("bfv", FedBoosting(fusion=0.9), 12, pieces_of_weight=110).pieces == 110


@EACH
@FUSIONS
def test_scores_and_steps_are_the_plain_ones_within_quantisation(name: str, fusion: float | None) -> None:
    """90 : 5 : 5 is what 0.9 is without rounding, so mixtures are the same; weights are off by a piece at most."""
    sent, rule = sent_updates(3), FedBoosting(training_loss=False, sharpness=3, fusion=fusion)
    protected = sealing(name, rule, 3)
    total, _, judge = played(protected, sent)
    plain, _, plain_judge = played(rule, sent)
    for (found, buffers), (tensors, means) in zip(judge.shown, plain_judge.shown, strict=True):
        torch.testing.assert_close(flat(found), flat(tensors), rtol=0, atol=TOLERANCE[name])
        torch.testing.assert_close(flat(buffers), flat(means), rtol=0, atol=TOLERANCE[name])
    assert total.weights == pytest.approx(plain.weights, abs=3 * TOLERANCE[name])
    dealt = [pieces / 100 for pieces in apportion(list(total.weights.values()), 100)]
    assert max(abs(p - w) for p, w in zip(dealt, plain.weights.values(), strict=True)) < 0.01 + 3 * TOLERANCE[name]
    step, buffers = protected.combine(total, torch.Generator())
    for found, of in ((step, "tensors"), (buffers, "buffers")):
        expected = sum(p * flat(getattr(u, of)) for p, u in zip(dealt, sent, strict=True))
        torch.testing.assert_close(flat(found), expected, rtol=0, atol=TOLERANCE[name])
    assert total.rows()["weights"] == [
        row | {"weight": pytest.approx(row["weight"], abs=1e-4), "accuracy": pytest.approx(row["accuracy"], abs=1e-4)}
        for row in plain.rows()["weights"]
    ]


def test_smoothed_weights_are_remembered() -> None:
    """The memory is that of the plain rule, and a round that recalls it weighs otherwise than one that does not."""
    rule = FedBoosting(smoothing=0.1)
    protected = sealing("bfv", rule, 3)
    (total, _, _), (plain, _, _) = played(protected, sent_updates(3)), played(rule, sent_updates(3))
    memory, expected = total.remembered(), plain.remembered()
    assert set(memory) == {0, 2, 4}
    for client, state in expected.items():
        torch.testing.assert_close(memory[client], state, rtol=0, atol=1e-4)
    changed = {client: Evaluation({m: (loss, 1 - score) for m, (loss, score) in said.validation.items()})
               for client, said in total.evaluations.items()}  # fmt: skip
    losses = {candidate.client: candidate.loss for candidate in total.candidates.values()}
    recalled, forgotten = (
        again.receive(changed).weights
        for again in (protected.begin_round([], m).finalise(total.candidates) for m in (memory, {}))
    )
    assert recalled == pytest.approx(rule.weigh(losses, changed, expected)[0], abs=1e-4)
    assert recalled != pytest.approx(forgotten, abs=1e-2)


def test_who_sees_all_mixtures_has_every_update() -> None:
    sent = sent_updates(10)
    shown = FedBoosting(fusion=0.9).mixed({update.client: (update.tensors, update.buffers) for update in sent})
    shares = torch.full((10, 10), 0.1 / 9).double().fill_diagonal_(0.9)
    mixed = torch.stack([flat(tensors) for tensors, _ in shown.values()])
    found = torch.linalg.solve(shares, mixed)
    true = torch.stack([flat(update.tensors) for update in sent])
    assert not torch.allclose(mixed, true, atol=0.05)
    torch.testing.assert_close(found, true, rtol=0, atol=1e-6)
    assert torch.cosine_similarity(mixed, true).min() > 0.99


@EACH
def test_server_and_answers_have_nothing_of_the_clients(name: str) -> None:
    rule = sealing(name, FedBoosting(fusion=0.9), 3)
    total, asked, judge = played(rule, sent_updates(3))
    assert rule.channel.keys is not None
    for secret in (rule.channel.keys.pair, rule.channel.keys.secret):
        assert secret not in pickle.dumps([asked, replace(total, opened=None), without_keys(rule)])
    answer = rule.answer(asked[0], judge)
    assert isinstance(answer, Evaluation)
    assert all(isinstance(number, float) for pair in answer.validation.values() for number in pair)
    assert all(isinstance(candidate.model, Encrypted) for candidate in total.candidates.values())
    with pytest.raises(ProtectionError, match="only clients have the keys"):
        without_keys(rule).answer(asked[0], judge)


def test_single_updates_are_opened_only_to_be_scored_without_fusion() -> None:
    sent = sent_updates(2)
    fused, plain = (sealing("bfv", FedBoosting(fusion=fusion), 2) for fusion in (0.9, None))
    alone = fused.protect(sent[0]).model
    its_own = replace(alone, parameters=plain.channel.encryptor)
    for rule, payload in ((fused, Score({0: alone})), (fused, Open(alone)), (plain, Open(its_own))):
        with pytest.raises(ProtectionError, match="not decrypted"):
            rule.answer(payload, Judge(0))
    judge = Judge(0)
    models = {u.client: plain.channel.encryptor.times(plain.protect(u).model, 100) for u in sent}
    plain.answer(Score(models), judge)
    torch.testing.assert_close(judge.shown[0][0]["w"], sent[0].tensors["w"], rtol=0, atol=TOLERANCE["bfv"])


def test_of_another_round_or_tampered_with_nothing_is_opened() -> None:
    rule = sealing("paillier", FedBoosting(fusion=0.9), 3)
    _, [mixtures, summed], judge = played(rule, sent_updates(3))
    assert isinstance(summed, Open)
    first = mixtures.models[0]
    with pytest.raises(ProtectionError, match="of round 3 was sent in round 4"):
        rule.answer(Score({model: replace(one, round=3) for model, one in mixtures.models.items()}), judge)
    swapped = replace(first, ciphertexts=(first.ciphertexts[1], *first.ciphertexts[1:]))
    with pytest.raises(ProtectionError, match="not the sum of its clients' updates"):
        rule.answer(Score(mixtures.models | {0: swapped}), judge)


TEXT = """
name: t
seed: 31
data: {name: digits, size: 8, train_samples: 400, test_samples: 100}
model: {name: mlp, hidden: [32]}
training: {algorithm: fedsgd, batch_size: 1, lr: 0.1}
federation: {rounds: 2, clients: 4, validation: 0.25, aggregation: {name: fedboosting, fusion: 0.9}}
arms:
  plain: {aggregation: fedboosting}
  fused: {}
  sealed: {protection: bfv}
  fedavg: {aggregation: fedavg}
attacks:
  - {name: analytic, observes: shown, victims: 2}
  - {name: analytic, label: unmixed, observes: shown, unmix: true, victims: 2}
"""


def observed(arm: str, attack: int, text: str = TEXT) -> tuple[Observation, Named]:
    """Client 2 as another client sees it in an untrained arm; and its update."""
    inputs = prepare_inputs(scenarios.parse(text))
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    built = runtime.arm(arm)
    keys = runtime.make_keys(arm) if runtime.specs[arm].protection else b""
    sent = Sent(0, built.weights, built.buffers, keys)
    update = update_method(runtime.specs[arm].training, ())(runtime.task(arm, sent, 2, runtime.parts[2], {}))
    observation, truth = ObservationBuilder(runtime).observe(ClientVisit(arm, sent, 2), inputs.scenario.attacks[attack])
    assert truth.distortion == pytest.approx(
        float((flat(observation.update) - flat(update.tensors)).norm() / flat(update.tensors).norm())
        if observation.update
        else 0
    )
    return observation, update.tensors


def test_a_curious_client_sees_what_it_is_shown_and_can_unmix_it() -> None:
    assert torch.equal(flat(observed("plain", 0)[0].update), flat(observed("plain", 0)[1]))
    for arm in ("fused", "sealed"):
        observation, own = observed(arm, 1)
        assert observation.sealed is None
        assert not torch.allclose(flat(observation.update), flat(own), atol=1e-4)
        found = unmixed(observation)
        torch.testing.assert_close(flat(found.update), flat(own), rtol=0, atol=2e-6)
        assert observed(arm, 0)[0].shown is None
    assert observed("fedavg", 0)[0].update == {}


def test_a_mixture_points_where_the_update_does() -> None:
    """Pitfall 2 of DP fusion: the more clients, the less of each other one is in it."""
    text = TEXT.replace("batch_size: 1", "batch_size: 8").replace("clients: 4", "clients: 10")
    observation, own = observed("fused", 0, text)
    assert float(torch.cosine_similarity(flat(observation.update), flat(own), dim=0)) > 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attacks=[{name: dlg, unmix: true}]", "set `observes: shown`"),
        ("attacks=[{name: imprint, observes: shown}]", "observes: imprint is an attack by the server"),
        ("attacks=[{name: dlg, observes: shown, averages: 2, knowledge: [defence]}]", "averages: clients receive"),
        ("attacks=[{name: dlg, observes: shown, batch_size: 2}]", "batch_size: found 2"),
    ],
)
def test_what_a_curious_client_cannot_do_is_said(change: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        scenarios.parse(TEXT, changes=[change])


def test_a_run_says_what_its_clients_see() -> None:
    messages = prepare_inputs(
        scenarios.parse(TEXT, changes=["arms.open={aggregation: fedboosting, protection: ckks}"])
    ).encryption
    assert "arm sealed shows every client mixtures of all updates" in messages[1]
    assert "arm open hides the updates only from the server" in messages[3]


@pytest.mark.engine
def test_runs_end_where_plain_ones_do_and_fusion_stops_no_attack(tmp_path: Path) -> None:
    """Weights of 10,000 pieces: a piece is less than 1e-4 of an update of values up to 1."""
    arms = """arms={
      plain: {aggregation: fedboosting},
      paillier: {aggregation: fedboosting, protection: {name: paillier, key_bits: 512, insecure: true, bits: 24,
                                                        pieces_of_weight: 10000}},
      fused: {},
      fused ckks: {protection: {name: ckks, pieces_of_weight: 3000}}}"""
    scenario = scenarios.parse(TEXT, changes=[arms])
    folder = launch(scenario, str(tmp_path), local, Progress())
    found = weights(folder)
    for sealed, plain, pieces in (("paillier", "plain", 10000), ("fused ckks", "fused", 3000)):
        ours, theirs = (flat(found[arm]["weights"]) for arm in (sealed, plain))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * 0.1 * 4 / pieces)
    table = folder.read_table("weights").to_pylist()
    assert {row["arm"] for row in table} == set(found)
    rows = folder.read_table("attacks").to_pylist()
    assert {row["observes"] for row in rows} == {"shown"}
    assert min(row["psnr"] for row in rows if row["attack"] == "unmixed") > 60
