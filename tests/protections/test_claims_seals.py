"""What docs/aggregation.md and docs/threat-models.md promise of sealed updates, against servers that lie and wiretaps.

An honest client opens the sum of the round's clients, and nothing else.

Clients are asked as they are in a run, through `ClientRuntime.answer`. The forger has everything but the clients' keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import gmpy2
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfed import scenario as scenarios
from rayfed.aggregation.fedboosting import Evaluation, Score
from rayfed.crypto.keys import derive
from rayfed.crypto.tags import PRIME
from rayfed.errors import ProtectionError, ScenarioError
from rayfed.protections.encrypted import Open
from rayfed.simulation.client.plan import drawn_clients
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Encrypted, Share

TEXT = """
name: t
seed: 31
data: {name: digits, size: 8, train_samples: 200, test_samples: 50}
model: {name: mlp, hidden: [4]}
training: {algorithm: fedsgd}
federation: {rounds: 2, clients: 3, validation: 0.25, aggregation: {name: fedavg, weights: uniform}}
arms:
  packed: {protection: {name: paillier, key_bits: 256, insecure: true}}
  pieces: {protection: {name: paillier, key_bits: 256, insecure: true, encoding: fedboosting}}
  ckks: {protection: ckks}
  bfv: {protection: bfv}
  other: {protection: {name: paillier, key_bits: 256, insecure: true, encoding: fedboosting}}
  boosted: {aggregation: {name: fedboosting, fusion: 0.9}, protection: bfv}
  shown: {aggregation: fedboosting, protection: bfv}
"""
ARMS = ("packed", "pieces", "ckks", "bfv")
EACH = pytest.mark.parametrize("arm", ARMS)
PAILLIER = pytest.mark.parametrize("arm", ["packed", "pieces"])


@dataclass(frozen=True)
class Round:
    """A round of one arm, with what its server has."""

    runtime: ClientRuntime
    arm: str
    sent: Sent

    @property
    def rule(self) -> Any:
        """As the server has it, without keys."""
        rule: Any = self.runtime.rule(self.arm, self.sent)
        return replace(rule, channel=replace(rule.channel, keys=None))

    def sealed(self, client: int) -> Encrypted:
        """What a client sends."""
        partial, _ = self.runtime.cohort(self.arm, self.sent, [client], {})
        return partial[client].model if self.arm in ("boosted", "shown") else partial[0]

    def asked(self, *clients: int) -> Encrypted:
        """What an honest server asks about these clients' sum."""
        cohorts = [self.runtime.cohort(self.arm, self.sent, [client], {})[0] for client in clients]
        session = self.rule.begin_round(clients, {}).finalise(reduce(self.rule.merge, cohorts))
        asked: Encrypted = session.request().payload.sum
        return asked

    def answer(self, payload: Any, client: int = 0) -> Any:
        """What a client says that is asked to open a sum, or to score models."""
        asked = Score(payload) if isinstance(payload, dict) else Open(payload)
        return self.runtime.answer(self.arm, self.sent, asked, client, {}, {})[1]

    def opened(self, payload: Any, client: int = 0) -> torch.Tensor:
        """What comes back to the server."""
        tensors, buffers, *_ = self.answer(payload, client)
        return torch.cat([t.ravel() for t in [*tensors.values(), *buffers.values()]])

    def refuses(self, payload: Any, client: int = 0) -> None:
        """That nothing comes back."""
        with pytest.raises(ProtectionError):
            self.answer(payload, client)


@cache
def runtime_of(*changes: str) -> ClientRuntime:
    inputs = prepare_inputs(scenarios.parse(TEXT, changes=list(changes)))
    return ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)


@cache
def round_of(arm: str, number: int = 0, *changes: str) -> Round:
    runtime = runtime_of(*changes)
    built = runtime.arm(arm)
    return Round(runtime, arm, Sent(number, built.weights, built.buffers, box_of(arm, *changes)))


@cache
def box_of(arm: str, *changes: str) -> bytes:
    """The clients' locked key pair: one for a run."""
    return runtime_of(*changes).make_keys(arm)


@cache
def whole(arm: str, *changes: str) -> Encrypted:
    """What an honest server asks: the sum of all three clients."""
    return round_of(arm, 0, *changes).asked(0, 1, 2)


@cache
def single(arm: str, client: int) -> Encrypted:
    return round_of(arm).sealed(client)


def changed(sealed: Encrypted, place: int, **fields: Any) -> Encrypted:
    """With other fields of one share."""
    shares = list(sealed.shares)
    shares[place] = shares[place]._replace(**fields)
    return replace(sealed, shares=tuple(shares))


def plus(sealed: Encrypted, value: int, place: int = 0) -> Encrypted:
    """With a number added to a Paillier plaintext, by who has the public key alone."""
    n = int.from_bytes(sealed.public, "big")
    ciphertexts = list(sealed.ciphertexts)
    number = int.from_bytes(ciphertexts[place], "big") * (1 + value * n) % n**2
    ciphertexts[place] = number.to_bytes(len(ciphertexts[place]), "big")
    return replace(sealed, ciphertexts=tuple(ciphertexts))


def added(*sealed: Encrypted) -> Encrypted:
    """A sum as somebody adds it who does not ask whether it belongs together."""
    scheme, first = sealed[0].parameters.scheme, sealed[0]
    return replace(
        first,
        shares=tuple(share for one in sealed for share in one.shares),
        ciphertexts=reduce(lambda a, b: scheme.add(first.public, a, b), (one.ciphertexts for one in sealed)),
        tag=sum(one.tag for one in sealed) % PRIME,
    )


def times(sealed: Encrypted, factor: int) -> Encrypted:
    """A product as such a one makes it."""
    scheme = sealed.parameters.scheme
    return replace(
        sealed,
        shares=tuple(share._replace(after=factor * share.after) for share in sealed.shares),
        ciphertexts=scheme.times(sealed.public, sealed.ciphertexts, factor),
        tag=factor * sealed.tag % PRIME,
    )


def weighted(arm: str, factors: dict[int, int]) -> Encrypted:
    """Clients' updates with factors of the server's choice."""
    return added(*(times(single(arm, client), factor) for client, factor in factors.items()))


# A single update, by questions to honest clients.


@EACH
def test_the_sum_of_all_clients_is_opened_by_each_and_again(arm: str) -> None:
    """So that a round that is played again after a crash ends with the same bits."""
    round = round_of(arm)
    found = [round.opened(whole(arm), client) for client in (0, 1, 2, 0)]
    assert all(torch.equal(found[0], other) for other in found)
    assert torch.equal(found[0], round.opened(round.asked(0, 1, 2)))


@EACH
@pytest.mark.parametrize("factor", [0, -1, PRIME, -PRIME, 1 << 200])
def test_a_client_is_not_counted_whose_update_is_not_in_the_sum(arm: str, factor: int) -> None:
    """The server names others with factors that leave one update alone, or nearly so."""
    alone, others = single(arm, 0), [single(arm, client).shares[0]._replace(after=factor) for client in (1, 2)]
    for own in (1, 100, 102):
        product = times(alone, own)
        round_of(arm).refuses(replace(product, shares=(*product.shares, *others)))


@EACH
@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
def test_sums_of_which_differences_are_single_updates_are_not_opened(arm: str, pair: tuple[int, int]) -> None:
    for client in (0, 1, 2):
        round_of(arm).refuses(round_of(arm).asked(*pair), client)


@EACH
def test_a_client_is_in_the_sum_once(arm: str) -> None:
    """Twice is a second sum, of which the difference to the first is its update."""
    parts = [single(arm, client) for client in (0, 1, 2)]
    round_of(arm).refuses(added(*parts, parts[0]))
    round_of(arm).refuses(added(parts[0], parts[0], parts[1]))


@pytest.mark.parametrize("factors", [(98, 1, 1), (33, 34, 33), (33, 33, 34), (34, 33, 32), (1, 1, 1), (34, 33, 34)])
def test_factors_are_those_of_the_declared_weights(factors: tuple[int, int, int]) -> None:
    """34 : 33 : 33 is what equal weights come to; with who has the odd piece changed, three sums give every update."""
    opened = round_of("pieces").opened(weighted("pieces", {0: 34, 1: 33, 2: 33}))
    assert torch.equal(opened, round_of("pieces").opened(whole("pieces")))
    round_of("pieces").refuses(weighted("pieces", dict(enumerate(factors))))


def test_the_order_of_clients_does_not_deal_the_odd_piece_anew() -> None:
    """Of equal weights the first has the odd piece: the first by number, not the first in the server's list."""
    round_of("pieces").refuses(weighted("pieces", {1: 34, 0: 33, 2: 33}))
    round_of("pieces").refuses(weighted("pieces", {2: 34, 0: 33, 1: 33}))


def test_every_client_has_a_piece_however_light_it_is() -> None:
    """Where it had none it would not be in the sum, and nobody could tell that from a server that leaves it out."""
    changes = (
        "federation.aggregation=fedavg",
        "arms.pieces.protection.pieces_of_weight=3",
        "partition={name: quantity, alpha: 1}",
        "training.batch_size=null",
    )
    sealed = whole("pieces", *changes)
    weights = [share.weight for share in sealed.shares]
    assert min(weights) * 3 < 0.5 * sum(weights)
    assert [share.after for share in sealed.shares] == [1, 1, 1]
    round_of("pieces", 0, *changes).opened(sealed)


@EACH
def test_the_server_names_no_weights_of_its_own(arm: str) -> None:
    sealed = whole(arm)
    for what in ("weight", "before"):
        for value in (0, -1, 2, 1 + PRIME):
            round_of(arm).refuses(changed(sealed, 0, **{what: value}))


@EACH
def test_updates_of_other_weights_of_the_same_round_are_not_added(arm: str) -> None:
    """A server that sends one client another model (one without gradient, say) has the others' sum, and with the same
    round twice the difference of two (Pasquini 2022, 'Eluding secure aggregation').
    """
    honest = round_of(arm)
    zero = {name: torch.zeros_like(w) for name, w in honest.sent.weights.items()}
    lying = Round(honest.runtime, arm, replace(honest.sent, weights=zero))
    parts = [honest.sealed(0), lying.sealed(1), lying.sealed(2)]
    factors = (34, 33, 33) if arm == "pieces" else (1, 1, 1)
    mixed = added(*(times(part, f) for part, f in zip(parts, factors, strict=True)))
    for round in (honest, lying):
        round.refuses(mixed)
    lying.refuses(whole(arm))


@EACH
def test_updates_of_another_round_or_run_are_not_added(arm: str) -> None:
    """Two runs of one seed have the same clients' secret, and the same key pair where it is drawn from it."""
    this = round_of(arm)
    again = Round(this.runtime, arm, replace(this.sent, keys=this.runtime.make_keys(arm)))
    for other in (round_of(arm, 1), again):
        old = replace(other.asked(0, 1, 2), public=whole(arm).public)
        this.refuses(replace(old, round=0))
        parts = [replace(other.sealed(0), round=0), single(arm, 1), single(arm, 2)]
        factors = (34, 33, 33) if arm == "pieces" else (1, 1, 1)
        this.refuses(added(*(times(part, f) for part, f in zip(parts, factors, strict=True))))


def test_updates_of_another_arm_are_not_opened() -> None:
    round_of("other").refuses(whole("pieces"))
    round_of("other").refuses(replace(whole("pieces"), public=whole("other").public))


def test_the_same_weights_in_rounds_of_other_clients_give_single_updates_away() -> None:
    """What remains, as docs/threat-models.md says: of two of three clients a round, on all samples of each."""
    changes = ("federation.clients_per_round=2", "training.batch_size=null", "federation.rounds=8")
    rounds = [round_of("bfv", number, *changes) for number in range(8)]
    drawn = {tuple(drawn_clients(round.runtime.scenario, round.sent.round)): round for round in rounds}
    sums = {pair: round.opened(round.asked(*pair)) for pair, round in drawn.items()}
    found = (sums[0, 1] + sums[0, 2] - sums[1, 2]) / 2
    update = rounds[0].runtime.updates("bfv", rounds[0].sent, [0], {})[0]
    torch.testing.assert_close(found, torch.cat([t.ravel() for t in update.tensors.values()]), rtol=0, atol=1e-6)


def test_a_run_says_where_a_clients_weight_makes_the_sum_nearly_its_update() -> None:
    """What a client truly holds weighs as it does: the sum is opened."""
    skewed = ["federation.aggregation=fedavg", "partition={name: quantity, alpha: 1}", "training.batch_size=null"]
    inputs = prepare_inputs(scenarios.parse(TEXT, changes=skewed))
    share = inputs.parts.sizes.max() / inputs.parts.sizes.sum()
    assert share > 0.5
    lines = [line for line in inputs.encryption if "nearly that client's update" in line]
    assert [line.split()[1] for line in lines] == ["packed", "pieces", "ckks", "bfv", "other"]
    assert all(f"client {inputs.parts.sizes.argmax()} {share:.0%} of the weight of round 0" in line for line in lines)
    for changes in (skewed[1:], skewed[:1]):  # uniform weights, and equal parts
        assert "nearly that client's update" not in str(
            prepare_inputs(scenarios.parse(TEXT, changes=changes)).encryption
        )


# Where clients may drop out.

DROP = "federation.failures.then=drop"


def test_where_clients_may_drop_out_sums_of_some_are_opened_and_the_run_says_so() -> None:
    """What remains then: nobody's update by itself, nobody twice, nobody from outside, no weights of the server's."""
    round = round_of("bfv", 0, DROP)
    round.opened(round.asked(0, 2))
    round.refuses(round.asked(1))
    round.refuses(added(round.sealed(0), round.sealed(0)))
    round.refuses(changed(round.asked(0, 2), 1, client=3))
    said = prepare_inputs(scenarios.parse(TEXT, changes=[DROP])).encryption
    assert any("bfv" in line and "failed" in line for line in said)
    assert not any("who has failed" in line for line in prepare_inputs(scenarios.parse(TEXT)).encryption)


# FedBoosting.


def test_mixtures_are_those_of_the_rule_and_nothing_of_them_goes_back_but_scores() -> None:
    round = round_of("boosted")
    parts = {client: round.sealed(client) for client in (0, 1, 2)}

    def mixture(model: int, own: int = 90, other: int = 5) -> Encrypted:
        return added(*(times(part, own if c == model else other) for c, part in parts.items()))

    good = {model: mixture(model) for model in parts}
    found = round.answer(good)
    assert isinstance(found, Evaluation)
    assert all(isinstance(number, float) for pair in found.validation.values() for number in pair)
    round.refuses(good | {0: mixture(0, 98, 1)})
    round.refuses(good | {0: good[1]})
    round.refuses(good | {3: good[0]})
    round.refuses({0: good[0]})
    round.refuses(good | {0: added(times(parts[0], 90), times(parts[1], 10))})


def test_without_fusion_single_updates_are_opened_to_be_scored_and_never_sent_back() -> None:
    round = round_of("shown")
    shown = {client: times(round.sealed(client), 100) for client in (0, 1, 2)}
    assert isinstance(round.answer(shown), Evaluation)
    round.refuses(shown[0])
    round.refuses(replace(shown[0], shares=(*shown[0].shares, shown[1].shares[0]._replace(after=0))))
    round.refuses(shown | {0: shown[1]})


@pytest.mark.parametrize("arm", ["boosted", "shown"])
def test_the_boosted_sum_has_whole_pieces_of_the_rounds_clients(arm: str) -> None:
    """The server finds the weights, so it may name any: what is bounded is that two clients have a piece or more, and
    that the pieces are all there are.
    """
    round = round_of(arm)
    parts = [round.sealed(client) for client in (0, 1)]
    round.opened(added(times(parts[0], 99), times(parts[1], 1)))  # as docs/threat-models.md says
    for own, other in ((100, 0), (99, 2), (1, 1), (100 + PRIME, -PRIME), (101, -1)):
        payload = times(parts[0], own % PRIME) if own < PRIME else parts[0]
        second = times(parts[1], other) if other > 0 else None
        payload = added(payload, second) if second else payload
        shares = (parts[0].shares[0]._replace(after=own), parts[1].shares[0]._replace(after=other))
        round.refuses(replace(payload, shares=shares))


# Forged tags.


@PAILLIER
@pytest.mark.parametrize("factor", [PRIME, -PRIME, 2 * PRIME, 1 << 127])
def test_a_factor_that_the_tag_cannot_tell_apart_is_refused(arm: str, factor: int) -> None:
    """With factors the bound on the sum grew, so that multiples of the prime fitted."""
    for place in range(3):
        after = whole(arm).shares[place].after + factor
        for value in (0, PRIME, -PRIME, 2 * PRIME):
            round_of(arm).refuses(changed(plus(whole(arm), value), place, after=after))
        before = whole(arm).shares[place].before + factor
        round_of(arm).refuses(changed(plus(whole(arm), PRIME), place, before=before))


@PAILLIER
@pytest.mark.parametrize("value", [1, -1, 1 << 62, 1 << 64, PRIME, -PRIME, PRIME << 1, (1 << 255) - 1])
def test_a_plaintext_that_was_added_to_is_refused(arm: str, value: int) -> None:
    """In particular by multiples of the prime, and by what lies above all lanes."""
    for place in (0, len(whole(arm).ciphertexts) - 1):
        top = whole(arm).parameters.scheme.lanes
        for change in (value, value << (top.width * top.count) if top else value):
            if place == 0 or not top:  # behind the last value, a lane is padding
                round_of(arm).refuses(plus(whole(arm), change, place))


@EACH
def test_ciphertexts_of_two_clients_are_not_exchanged(arm: str) -> None:
    """The sum of two that are is the same; with tags, weights or factors left where they were it is not opened."""
    a, b = single(arm, 0), single(arm, 1)
    exchanged = [replace(a, ciphertexts=b.ciphertexts), replace(b, ciphertexts=a.ciphertexts), single(arm, 2)]
    if arm == "pieces":
        round_of(arm).refuses(added(*(times(one, f) for one, f in zip(exchanged, (34, 33, 33), strict=True))))
    first = exchanged[0].ciphertexts
    round_of(arm).refuses(replace(whole(arm), ciphertexts=first))
    if len(first) > 1:
        cut = whole(arm).ciphertexts
        round_of(arm).refuses(replace(whole(arm), ciphertexts=(*cut[:-1], first[-1])))
        round_of(arm).refuses(replace(whole(arm), ciphertexts=(*cut[1:], cut[0])))


@EACH
def test_ciphertexts_are_as_many_as_the_layout_takes(arm: str) -> None:
    ciphertexts = whole(arm).ciphertexts
    for other in ((), ciphertexts[:-1], (*ciphertexts, ciphertexts[0]), ciphertexts * 2):
        round_of(arm).refuses(replace(whole(arm), ciphertexts=other))


@EACH
def test_names_and_shapes_are_authenticated(arm: str) -> None:
    """Values that change places, or become buffers, with another clip bound, are another update."""
    tensors, buffers = whole(arm).tensors, whole(arm).buffers
    (first, shape), *rest = tensors
    names = [name for name, _ in tensors]
    size = int(torch.tensor(shape).prod())
    for other in (
        tuple(zip(reversed(names), (shape for _, shape in tensors), strict=True)),
        (("x", shape), *rest),
        ((first, (size,)), *rest),
        ((first, (1, *shape)), *rest),
        (("x", (size // 2,)), (first, (size - size // 2,)), *rest),
        (*tensors, ("x", (0,))),
        ((first, tuple(-n for n in shape)), *rest),
    ):
        round_of(arm).refuses(replace(whole(arm), tensors=other))
    round_of(arm).refuses(replace(whole(arm), tensors=(), buffers=(*tensors, *buffers)))
    round_of(arm).refuses(replace(whole(arm), tensors=tensors[:1], buffers=(*tensors[1:], *buffers)))
    round_of(arm).refuses(replace(whole(arm), tensors=(), buffers=(), ciphertexts=()))


@EACH
def test_how_values_are_read_is_the_clients_own(arm: str) -> None:
    sealer = whole(arm).parameters
    for other in (
        replace(sealer, clip=2.0),
        replace(sealer, clip_buffers=1.0),
        replace(sealer, load=replace(sealer.load, units=101)),
        replace(sealer, load=replace(sealer.load, clients=2)),
        replace(sealer, load=replace(sealer.load, multiplied=not sealer.load.multiplied)),
        None,
    ):
        round_of(arm).refuses(replace(whole(arm), parameters=other))


def test_two_tags_of_one_client_and_round_do_not_give_a_third() -> None:
    """A client that seals two vectors in a round (its training is not the same bits on a GPU) must not hide both tags
    behind one mask: the difference of the tags would then be a tag of the difference.
    """
    round = round_of("pieces")
    update = round.runtime.updates("pieces", round.sent, [0], {})[0]
    other = replace(update, tensors={name: t + 0.01 for name, t in update.tensors.items()})
    rule: Any = round.runtime.rule("pieces", round.sent)
    n = int.from_bytes(whole("pieces").public, "big")
    one, two = rule.protect(update), rule.protect(other)
    forged = [
        int.from_bytes(c, "big") * int.from_bytes(b, "big") * int(gmpy2.invert(int.from_bytes(a, "big"), n**2)) % n**2
        for c, a, b in zip(whole("pieces").ciphertexts, one.ciphertexts, two.ciphertexts, strict=True)
    ]
    size = len(one.ciphertexts[0])
    ciphertexts = tuple(number.to_bytes(size, "big") for number in forged)
    tag = (whole("pieces").tag + two.tag - one.tag) % PRIME
    round.refuses(replace(whole("pieces"), ciphertexts=ciphertexts, tag=tag))


def test_what_is_derived_tells_its_purposes_apart() -> None:
    found = {
        derive(b"s", *purpose)
        for purpose in (("a", "b"), ("a\x00b",), ("ab",), ("a", "b", ""), (1, 23), (12, 3), (-1, 23), ("1\x0023",))
    }
    assert len(found) == 8


# Anything at all.

NUMBERS = st.one_of(
    st.integers(-3, 200), st.integers(), st.sampled_from([PRIME, -PRIME, PRIME + 1, 1 << 64, 1 << 127, 1 << 256])
)
SHAPES = st.lists(
    st.tuples(st.text(max_size=3), st.lists(st.integers(-2, 300), max_size=3).map(tuple)), max_size=4
).map(tuple)


@st.composite
def tampering(draw: st.DrawFn, arm: str) -> Encrypted:
    """An honest sum with some of its fields changed at random, moved about, or taken from another sum."""
    sealed, others = whole(arm), [single(arm, client) for client in (0, 1, 2)]
    donors = st.sampled_from([*others, round_of(arm, 1).asked(0, 1, 2), whole("other"), added(*others)])
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(["round", "shares", "tensors", "buffers", "public", "ciphertexts", "tag", "donor"]))
        value: Any
        if name == "donor":
            name = draw(st.sampled_from(["round", "shares", "tensors", "public", "ciphertexts", "tag", "parameters"]))
            value = getattr(draw(donors), name)
        elif name in ("round", "tag"):
            value = draw(NUMBERS) + getattr(sealed, name) * draw(st.integers(0, 1))
        elif name == "shares":
            shares = list(draw(st.permutations(sealed.shares)))[: draw(st.integers(0, 4))]
            place = draw(st.integers(0, max(0, len(shares) - 1)))
            field = draw(st.sampled_from(Share._fields))
            if shares and isinstance(getattr(shares[place], field), int):
                changes: dict[str, Any] = {field: draw(NUMBERS)}
                shares[place] = shares[place]._replace(**changes)
            value = (*shares, *shares[: draw(st.integers(0, 1))])
        elif name in ("tensors", "buffers"):
            value = draw(st.one_of(SHAPES, st.permutations(sealed.tensors + sealed.buffers).map(tuple)))
        elif name == "public":
            value = draw(st.binary(max_size=40))
        else:
            parts = list(draw(st.permutations(list(sealed.ciphertexts))))[: draw(st.integers(0, 99))]
            flipped: bool = draw(st.booleans())
            if parts and flipped:
                place = draw(st.integers(0, len(parts[0]) - 1))
                bit = 1 << draw(st.integers(0, 7))
                parts[0] = parts[0][:place] + bytes([parts[0][place] ^ bit]) + parts[0][place + 1 :]
            value = tuple(parts)
        sealed = replace(sealed, **{name: value})
        if arm in ("packed", "pieces") and sealed.ciphertexts and draw(st.booleans()):
            sealed = plus(sealed, draw(NUMBERS)) if sealed.public == whole(arm).public else sealed
    return sealed


@pytest.mark.engine
@EACH
def test_whatever_is_tampered_with_is_refused_or_the_true_sum(arm: str) -> None:
    true, outcomes = round_of(arm).opened(whole(arm)), list[bool]()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(tampering(arm))
    def tried(sealed: Encrypted) -> None:
        try:
            found = round_of(arm).opened(sealed)
        except ProtectionError:
            outcomes.append(False)
        else:
            outcomes.append(True)
            assert torch.equal(found, true)

    tried()
    assert outcomes.count(False) > 30


@pytest.mark.parametrize("name", ["paillier, encoding: fedboosting", "paillier", "bfv", "ckks", "secure_aggregation"])
@pytest.mark.parametrize("field", ["clip", "clip_buffers"])
def test_a_clip_bound_is_finite(name: str, field: str) -> None:
    """Steps would be infinite, and 0 times those no number: the sum would say nothing."""
    with pytest.raises(ScenarioError, match=rf"{field}: found inf"):
        scenarios.parse(TEXT, changes=[f"arms={{one: {{protection: {{name: {name}, {field}: .inf}}}}}}"])
