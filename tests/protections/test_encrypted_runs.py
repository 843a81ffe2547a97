"""Encrypted runs on Ray: the same weights as plain ones, and no secret anywhere but at clients."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.executor import on_ray
from rayfed import scenario as scenarios
from rayfed.aggregation.over_channel import SumOverChannel
from rayfed.crypto.keys import derive, unlock
from rayfed.errors import ProtectionError, ScenarioError, UserError
from rayfed.protections.encrypted import EncryptedChannel
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.server import Server
from rayfed.store import checkpoint
from rayfed.store.folder import RunFolder
from rayfed.update import Encrypted
from tests.helpers.run_fixtures import Killer, Spied, assert_same_bits, spied_launch, weights

TEXT = """
name: t
seed: 987654321
data: {name: digits, size: 8, train_samples: 400, test_samples: 100}
model: {name: lenet, norm: batch}
training: {batch_size: 16, lr: 0.1, momentum: 0.5}
federation: {rounds: 2, clients: 6, clients_per_round: 5, cohort_size: 2}
arms:
  none: {}
  paillier: {protection: {name: paillier, key_bits: 512, insecure: true, bits: 24}}
  ckks: {protection: ckks}
  bfv: {protection: bfv}
resources: {clients: {actors: 2}, attackers: {actors: 1}}
"""
ATTACK = """
attacks:
  - {name: inverting_gradients, rounds: [1], observes: gradient, iterations: 5}
"""
PROTECTED = ("paillier", "ckks", "bfv")


def parsed(*changes: str, extra: str = "") -> Scenario:
    return scenarios.parse(TEXT + extra, changes=changes)


@pytest.fixture(scope="module")
def spied(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Spied:
    return spied_launch(parsed(extra=ATTACK), tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(parsed(), str(tmp_path_factory.mktemp("runs")), local, Progress())


@pytest.mark.engine
def test_encrypted_runs_end_where_plain_ones_do(undisturbed: RunFolder) -> None:
    arms = weights(undisturbed)
    for arm in PROTECTED:
        for part in ("weights", "buffers"):
            for name, plain in arms["none"][part].items():
                torch.testing.assert_close(arms[arm][part][name], plain, rtol=0, atol=2e-5)
    rows = undisturbed.read_table("clients").to_pylist()
    assert {row["clipped"] for row in rows if row["arm"] != "none"} == {0}
    assert {row["clipped"] for row in rows if row["arm"] == "none"} == {None}


@pytest.mark.slow
def test_encryption_costs_no_accuracy(tmp_path: Path) -> None:
    """Ten rounds at full strength, to within half a percentage point."""
    change = "arms={none: {}, paillier: {protection: paillier}, ckks: {protection: ckks}, bfv: {protection: bfv}}"
    data = "data={name: digits, size: 28}"
    folder = runner.launch(parsed(change, data, "federation.rounds=10"), str(tmp_path), local, Progress())
    last = {r["arm"]: r["test_accuracy"] for r in folder.read_table("rounds").to_pylist() if r["round"] == 9}
    assert all(abs(last[arm] - last["none"]) <= 0.005 for arm in PROTECTED)


@pytest.mark.engine
@pytest.mark.parametrize(("victim", "clients"), [("ServerActor", 1), ("ClientActor", 2)])
@pytest.mark.usefixtures("ray_session")
def test_bits_do_not_depend_on_actors(victim: str, clients: int, undisturbed: RunFolder, tmp_path: Path) -> None:
    """On how many there are, and which dies."""
    killer = Killer(victim, round=1)
    folder = runner.launch(parsed(f"resources.clients.actors={clients}"), str(tmp_path), on_ray(), killer)
    assert killer.killed == 1
    assert_same_bits(weights(folder), weights(undisturbed))


@pytest.mark.engine
def test_a_resumed_run_ends_with_the_same_bits(undisturbed: RunFolder, tmp_path: Path) -> None:
    folder = runner.launch(parsed("federation.rounds=1"), str(tmp_path), local, Progress())
    folder.write_text("scenario.yaml", parsed().dump())
    runner.resume(folder.url, local, Progress(), extend=True)
    assert_same_bits(weights(folder), weights(undisturbed))


@pytest.mark.engine
def test_secrets_are_with_clients_alone(spied: Spied) -> None:
    """All that goes to actors' methods, all that is put into the object store, the memory of server and attacker."""
    scenario = parsed(extra=ATTACK)
    relayed = {args[0]: args[1] for method, args in spied.calls if method == "ServerActor.relay"}
    assert set(relayed) == set(PROTECTED)
    secrets = secrets_of(scenario, relayed)
    assert len(secrets) == 3 * 5 + 4
    known = {int.from_bytes(secrets[f"paillier {prime}"], "big") for prime in ("p", "q")}
    spied.assert_without(secrets, {scenario.seed, *known})
    added = [args[2] for method, args in spied.calls if method == "ServerActor.add" and args[0] in PROTECTED]
    partials = [partial for places in added for partial in places.values()]
    assert partials
    assert all(isinstance(sealed, Encrypted) for partial in partials for sealed in partial)


def secrets_of(scenario: Scenario, relayed: dict[str, bytes]) -> dict[str, bytes]:
    """What an arm's clients know: their secret, what they derive from it, the key pair and its parts."""
    inputs = prepare_inputs(scenario)
    runtime, found = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu")), dict[str, bytes]()
    for arm in PROTECTED:
        secret = runtime._secret(arm)
        pair = unlock(derive(secret, "box"), relayed[arm])
        rule = runtime.rule(arm, Sent(0, runtime.arm(arm).weights, runtime.arm(arm).buffers, relayed[arm]))
        assert isinstance(rule, SumOverChannel)
        assert isinstance(rule.channel, EncryptedChannel)
        assert rule.channel.keys is not None
        found |= {f"{arm} secret": secret, f"{arm} pair": pair, f"{arm} tags": rule.channel.keys.secret}
        found |= {f"{arm} box": derive(secret, "box"), f"{arm} seed of pair": derive(secret, "pair")}
        if arm == "paillier":
            p, q = pair[: len(pair) // 2], pair[len(pair) // 2 :]
            found |= {"paillier p": p, "paillier q": q, "paillier p reversed": p[::-1], "paillier q reversed": q[::-1]}
    return found


@pytest.mark.parametrize(
    ("arm", "damage", "message"),
    [
        ("paillier", lambda s: replace(s, ciphertexts=(s.ciphertexts[1], *s.ciphertexts[1:])), "not the sum of"),
        pytest.param(
            "bfv",
            lambda s: replace(s, ciphertexts=s.ciphertexts[:-1]),
            "truncated|cannot be read",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ckks",
            lambda s: replace(s, ciphertexts=(s.ciphertexts[0][:-100], *s.ciphertexts[1:])),
            "cannot be read",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_round_with_a_damaged_ciphertext_is_not_applied(
    arm: str,
    damage: Callable[[Encrypted], Encrypted],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """On its way from the clients to the server, in the second round; afterwards the run is resumed unharmed."""
    add = Server.add

    def damaged(self: Server, name: str, cohorts: int, partials: Any) -> None:
        last, [partial] = max(partials.items())
        if partial.round == 1:
            partials = {**partials, last: (damage(partial),)}
        add(self, name, cohorts, partials)

    spec = parsed().arms[arm].protection
    assert spec is not None
    one = parsed(f"arms={{{arm}: {{protection: {spec.model_dump_json()}}}}}")
    with monkeypatch.context() as patched:
        patched.setattr(Server, "add", damaged)
        with pytest.raises(ProtectionError, match=message):
            runner.launch(one, str(tmp_path), local, Progress())
    [path] = tmp_path.iterdir()
    saved = checkpoint.load(RunFolder.open(str(path)))
    assert saved is not None
    assert saved.round == 0
    folder = runner.resume(str(path), local, Progress())
    assert set(weights(folder)) == {arm}


def test_attackers_see_nothing_unless_they_break_the_key(tmp_path: Path) -> None:
    attack = """
attacks:
  - {name: analytic, observes: gradient, batch_size: 1, victims: 2}
  - {name: analytic, label: factors, factor: true, observes: gradient, batch_size: 1, victims: 2}
  - {name: membership, observes: gradient, batch_size: 4, knowledge: [candidates]}
"""
    arms = (
        "arms={none: {}, bfv: {protection: bfv}, long: {protection: {name: paillier, key_bits: 512, insecure: true}}, "
        "short: {protection: {name: paillier, key_bits: 128, insecure: true, bits: 32}}}"
    )
    changes = arms, "model={name: mlp, hidden: [16]}"  # whose images analytic finds as they are
    folder = runner.attack(parsed(*changes, extra=attack), None, str(tmp_path), local, Progress())
    rows = folder.read_table("attacks").to_pylist()
    found = {(row["arm"], row["attack"], row["victim"]): row for row in rows}
    victims = {victim for _, _, victim in found}
    for (arm, attack_, _), row in found.items():
        seen = arm == "none" or (arm == "short" and attack_ == "factors")
        assert row["status"] == ("ok" if seen else "not applicable")
        assert seen or "the update is encrypted" in row["message"]
    for victim in victims:
        assert found["none", "factors", victim]["psnr"] > 80
        assert found["short", "factors", victim]["psnr"] > 60  # less what was lost in encoding
    inferred = {row["arm"]: row["status"] for row in folder.read_table("inferences").to_pylist()}
    assert inferred == {"none": "ok", "bfv": "not applicable", "long": "not applicable", "short": "not applicable"}


def test_an_observation_of_a_sealed_update_has_its_ciphertext_alone() -> None:
    from rayfed.simulation.client.visit import ClientVisit
    from rayfed.threat_model.observations import ObservationBuilder

    scenario = parsed(extra=ATTACK)
    inputs = prepare_inputs(scenario)
    runtime = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    arm = runtime.arm("paillier")
    sent = Sent(1, arm.weights, arm.buffers, runtime.make_keys("paillier"))
    observation, _ = ObservationBuilder(runtime).observe(ClientVisit("paillier", sent, 0), scenario.attacks[0])
    assert isinstance(observation.sealed, Encrypted)
    assert not observation.update
    assert not observation.returned_buffers
    assert not observation.sealed.tag
    rule = runtime.rule("paillier", sent)
    assert isinstance(rule, SumOverChannel)
    assert isinstance(rule.channel, EncryptedChannel)
    assert rule.channel.keys is not None
    assert rule.channel.keys.pair not in pickle.dumps(observation)


def test_rounds_of_one_client_are_refused() -> None:
    with pytest.raises(ScenarioError, match="round 0 has one client"):
        prepare_inputs(parsed("federation.clients_per_round=1", "federation.cohort_size=1"))


def test_rules_that_cannot_be_encrypted_are_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="not enough for Median"):
        prepare_inputs(parsed("federation.aggregation=median"))


def test_a_scenario_says_what_is_wrong_with_a_protection() -> None:
    with pytest.raises(ScenarioError) as found:
        parsed("arms.paillier.protection={name: paillier, key_bits: 1024}", "arms.bfv.protection={name: bfw}")
    assert "arms.paillier.protection" in str(found.value)
    assert "did you mean 'bfv'" in str(found.value)


def test_a_run_says_how_finely_it_encrypts_and_whether_its_keys_can_be_broken() -> None:
    messages = prepare_inputs(parsed()).encryption
    assert [message.split()[1] for message in messages] == ["paillier", "paillier", "ckks", "bfv"]
    assert "sums of up to 5 clients: values up to 1 in steps of 1.2e-07" in messages[0]
    assert "INSECURE: keys of 512 bits can be broken" in messages[1]
