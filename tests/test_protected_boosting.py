"""FedBoosting on fused and on sealed updates: mixtures worked by hand, their inversion, the same steps as in plain."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfed.aggregation.fedboosting import FedBoosting, Judgement
from rayfed.aggregation.protected_boosting import ProtectedBoosting
from rayfed.crypto.packing import apportion
from rayfed.crypto.sealing import Keys
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.base import Protection
from rayfed.protections.bfv import Bfv
from rayfed.protections.ckks import Ckks
from rayfed.protections.paillier import Paillier
from rayfed.update import Named, Sealed, Update

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


def sealing(name: str, rule: FedBoosting, clients: int, **parameters: Any) -> ProtectedBoosting:
    protection = replace(PROTECTIONS[name], clip_buffers=1.0, **parameters)
    protected = ProtectedBoosting.of(rule, protection, clients)
    return protected.with_keys(Keys(b"s" * 32, protected.sealer.scheme.generate(b"s" * 32)))


class Judge:
    """A client that takes a model for the better the larger its first weight, and remembers what it was shown."""

    round = 4

    def __init__(self, client: int) -> None:
        self.client = client
        self.shown: list[tuple[Named, Named]] = []

    def evaluate(self, update: Named, buffers: Named, split: str = "validation") -> tuple[float, float]:
        self.shown.append((update, buffers))
        return 1.0, float((1 + update["w"][0, 0]) / 2)


def played(rule: FedBoosting | ProtectedBoosting, sent: list[Update]) -> tuple[Any, list[Any], Judge]:
    """A round as it is played: the total before the step, what was asked, and the first client."""
    server: Any = replace(rule, keys=None) if isinstance(rule, ProtectedBoosting) else rule
    judges = [Judge(update.client) for update in sent]
    partials = [rule.partial([rule.sends(update)]) for update in sent]  # type: ignore[list-item]
    total = partials[0]
    for partial in partials[1:]:
        total = server.merge(total, partial)
    total, asked = server.recall(total, {}), []
    while question := server.asks(total):
        asked.append(question.payload)
        whom = judges if question.of == "all" else judges[:1]
        total = server.hears(total, {judge.client: rule.answer(question.payload, judge) for judge in whom})
    return total, asked, judges[0]


def flat(named: Named) -> torch.Tensor:
    return torch.cat([t.ravel() for t in named.values()]).double()


def test_a_mixture_is_nine_parts_its_own_and_one_part_everybody_elses() -> None:
    ones = {c: {"w": torch.eye(4)[c]} for c in range(4)}
    ballot = FedBoosting().partial([Update(c, 0, ones[c], {"m": 10 * ones[c]["w"]}, 1, 0.0) for c in ones])
    shown = FedBoosting(fusion=0.7).shown(ballot)
    tensors = torch.stack([shown[c][0]["w"] for c in range(4)])
    torch.testing.assert_close(tensors, 0.6 * torch.eye(4) + 0.1)
    torch.testing.assert_close(torch.stack([shown[c][1]["m"] for c in range(4)]), 6 * torch.eye(4) + 1)
    assert FedBoosting().shown(ballot)[2][0] is ballot.candidates[2].tensors


@pytest.mark.parametrize(("clients", "own", "other"), [(2, 90, 10), (3, 90, 5), (10, 90, 1), (11, 90, 1)])
def test_sealed_mixtures_are_equation_4_5_rounded_down(clients: int, own: int, other: int) -> None:
    sent, rule = sent_updates(clients), sealing("bfv", FedBoosting(fusion=0.9), clients)
    _, [mixtures, _], judge = played(rule, sent)
    for place, update in enumerate(sent):
        sealed = mixtures[update.client]
        assert {s.client: s.after for s in sealed.shares} == {u.client: own if u is update else other for u in sent}
        parts = [own if u is update else other for u in sent]
        expected = sum(part * flat(u.tensors) for part, u in zip(parts, sent, strict=True)) / sum(parts)
        torch.testing.assert_close(flat(judge.shown[place][0]), expected, rtol=0, atol=TOLERANCE["bfv"])


def test_fusion_wants_somebody_to_fuse_with_and_pieces_enough_for_everybody() -> None:
    with pytest.raises(UserError, match="no other to fuse its model with"):
        FedBoosting(fusion=0.9).check(1)
    with pytest.raises(UserError, match=r"leaves the 11 others .* raise the protection's pieces_of_weight"):
        sealing("bfv", FedBoosting(fusion=0.9), 12)
    assert sealing("bfv", FedBoosting(fusion=0.9), 12, pieces_of_weight=110).sealer.load.units == 110


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
    assert total.ballot.weights == pytest.approx(plain.weights, abs=3 * TOLERANCE[name])
    dealt = [pieces / 100 for pieces in apportion(list(total.ballot.weights.values()), 100)]
    assert max(abs(p - w) for p, w in zip(dealt, plain.weights.values(), strict=True)) < 0.01 + 3 * TOLERANCE[name]
    step, buffers = protected.combine(total, torch.Generator())
    for found, of in ((step, "tensors"), (buffers, "buffers")):
        expected = sum(p * flat(getattr(u, of)) for p, u in zip(dealt, sent, strict=True))
        torch.testing.assert_close(flat(found), expected, rtol=0, atol=TOLERANCE[name])
    assert protected.rows(total)["weights"] == [
        row | {"weight": pytest.approx(row["weight"], abs=1e-4), "accuracy": pytest.approx(row["accuracy"], abs=1e-4)}
        for row in rule.rows(plain)["weights"]
    ]


def test_smoothed_weights_are_remembered() -> None:
    rule = FedBoosting(smoothing=0.1)
    protected = sealing("bfv", rule, 3)
    total, _, _ = played(protected, sent_updates(3))
    memory = protected.memory(total)
    assert set(memory) == {0, 2, 4}
    assert protected.recall(total, memory).ballot.memory is memory


def test_who_sees_all_mixtures_has_every_update() -> None:
    sent = sent_updates(10)
    shown = FedBoosting(fusion=0.9).shown(FedBoosting().partial(sent))
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
    assert rule.keys is not None
    for secret in (rule.keys.pair, rule.keys.secret):
        assert secret not in pickle.dumps([asked, replace(total, opened=None), replace(rule, keys=None)])
    answer = rule.answer(asked[0], judge)
    assert isinstance(answer, Judgement)
    assert all(isinstance(number, float) for pair in answer.validation.values() for number in pair)
    assert all(not candidate.tensors for candidate in total.ballot.candidates.values())
    with pytest.raises(ProtectionError, match="only clients have the keys"):
        replace(rule, keys=None).answer(asked[0], judge)


def test_single_updates_are_opened_only_to_be_scored_without_fusion() -> None:
    sent = sent_updates(2)
    fused, plain = (sealing("bfv", FedBoosting(fusion=fusion), 2) for fusion in (0.9, None))
    alone = fused.sealed(sent[0])
    for rule, payload in ((fused, {0: alone}), (fused, alone), (plain, replace(alone, parameters=plain.sealer))):
        with pytest.raises(ProtectionError, match="would give one's update away"):
            rule.answer(payload, Judge(0))
    judge = Judge(0)
    plain.answer({0: plain.sealed(sent[0])}, judge)
    torch.testing.assert_close(judge.shown[0][0]["w"], sent[0].tensors["w"], rtol=0, atol=TOLERANCE["bfv"])


def test_of_another_round_or_tampered_with_nothing_is_opened() -> None:
    rule = sealing("paillier", FedBoosting(fusion=0.9), 3)
    _, [mixtures, summed], judge = played(rule, sent_updates(3))
    assert isinstance(summed, Sealed)
    first = mixtures[0]
    with pytest.raises(ProtectionError, match="of round 3 was sent in round 4"):
        rule.answer({0: replace(first, round=3)}, judge)
    swapped = replace(first, ciphertexts=(first.ciphertexts[1], *first.ciphertexts[1:]))
    with pytest.raises(ProtectionError, match="not the sum of what its clients sealed"):
        rule.answer(mixtures | {0: swapped}, judge)
