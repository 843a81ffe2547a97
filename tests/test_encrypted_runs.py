"""Encrypted runs on Ray: the same weights as plain ones, and no secret anywhere but at clients."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorMethod

from actors import launch as runs
from actors.federation import Federation
from actors.progress import Progress
from rayfed import scenario as scenarios
from rayfed.aggregation.protected import Protected
from rayfed.crypto.keys import derive, unlock
from rayfed.errors import ProtectionError, ScenarioError, UserError
from rayfed.results import checkpoint
from rayfed.results.folder import RunFolder
from rayfed.scenario import Scenario
from rayfed.training.host import Host
from rayfed.training.inputs import prepare
from rayfed.update import Sealed
from tests.test_runs import Killer, assert_same_bits, type_of, weights

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
def undisturbed(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runs.launch(parsed(), str(tmp_path_factory.mktemp("runs")), None, Progress())


@pytest.mark.ray
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
@pytest.mark.ray
def test_encryption_costs_no_accuracy(tmp_path: Path, ray_session: None) -> None:
    """Ten rounds at full strength, to within half a percentage point."""
    change = "arms={none: {}, paillier: {protection: paillier}, ckks: {protection: ckks}, bfv: {protection: bfv}}"
    data = "data={name: digits, size: 28}"
    folder = runs.launch(parsed(change, data, "federation.rounds=10"), str(tmp_path), None, Progress())
    last = {r["arm"]: r["test_accuracy"] for r in folder.read_table("rounds").to_pylist() if r["round"] == 9}
    assert all(abs(last[arm] - last["none"]) <= 0.005 for arm in PROTECTED)


@pytest.mark.ray
@pytest.mark.parametrize("what", ["one actor", "a client actor dies", "the server dies", "resumed"])
def test_bits_do_not_depend_on_actors(what: str, undisturbed: RunFolder, tmp_path: Path) -> None:
    progress = Progress()
    if "dies" in what:
        progress = Killer("ClientActor" if "client" in what else "ServerActor", round=1)
    rounds = 1 if what == "resumed" else 2
    changes = [f"resources.clients.actors={1 if what == 'one actor' else 2}"]
    folder = runs.launch(parsed(*changes, f"federation.rounds={rounds}"), str(tmp_path), None, progress)
    if what == "resumed":
        folder.write_text("scenario.yaml", parsed(*changes).dump())
        runs.resume(folder.url, None, Progress())
    assert_same_bits(weights(folder), weights(undisturbed))


def _held(actor: Any) -> tuple[list[bytes], list[int]]:
    """Every string of bytes or characters and every large number in an actor's process."""
    texts, numbers = set[bytes](), set[int]()
    for owner in gc.get_objects():
        for value in gc.get_referents(owner):
            if isinstance(value, bytes | bytearray):
                texts.add(bytes(value))
            elif isinstance(value, str):
                texts.add(value.encode(errors="replace"))
            elif (type(value) is int and value > 1 << 28) or type(value).__name__ == "mpz":
                numbers.add(int(value))
    return list(texts), list(numbers)


@pytest.mark.ray
def test_secrets_are_with_clients_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ray_session: None) -> None:
    """All that goes to actors' methods, all that is put into the object store, the memory of server and attacker."""
    scenario = parsed(extra=ATTACK)
    calls: list[tuple[str, Any]] = []
    put: list[Any] = []
    held: dict[str, tuple[list[bytes], list[int]]] = {}
    call, into_store, close = ActorMethod._remote, ray.put, Federation.close

    def spied_call(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        calls.append((f"{type_of(self._actor)}.{self._method_name}", args))
        return call(self, args, kwargs, **options)

    def spied_put(value: Any, **options: Any) -> Any:
        put.append(value)
        return into_store(value, **options)

    def inspected(self: Federation) -> None:
        held["server"] = ray.get(self._server.__ray_call__.remote(_held))
        assert self._attackers is not None
        held["attacker"] = ray.get(self._attackers._actors[0].__ray_call__.remote(_held))
        close(self)

    monkeypatch.setattr(ActorMethod, "_remote", spied_call)
    monkeypatch.setattr(ray, "put", spied_put)
    monkeypatch.setattr(Federation, "close", inspected)
    runs.launch(scenario, str(tmp_path), None, Progress())
    sent = [(method, resolved(args)) for method, args in calls]
    relayed = {args[0]: args[1] for method, args in sent if method == "ServerActor.relay"}
    assert set(relayed) == set(PROTECTED)
    secrets = secrets_of(scenario, relayed)
    assert len(secrets) == 3 * 5 + 4
    everything = pickle.dumps([put, [args for _, args in sent if args is not None]])
    assert not [name for name, secret in secrets.items() if secret in everything]
    for process, (texts, numbers) in held.items():
        assert len(texts) > 1000, process
        for name, secret in secrets.items():
            assert not any(secret in text for text in texts), f"{process} holds {name}"
        known = {int.from_bytes(secrets[f"paillier {prime}"], "big") for prime in ("p", "q")}
        assert not {scenario.seed, *known} & set(numbers), process
    partials = [args[3] for method, args in sent if method == "ServerActor.add" and args[0] in PROTECTED]
    assert partials
    assert all(isinstance(sealed, Sealed) for partial in partials for sealed in partial)


def resolved(value: Any) -> Any:
    if isinstance(value, ray.ObjectRef):
        return ray.get(value)
    if isinstance(value, list | tuple):
        return [resolved(item) for item in value]
    return value


def secrets_of(scenario: Scenario, relayed: dict[str, bytes]) -> dict[str, bytes]:
    """What an arm's clients know: their secret, what they derive from it, the key pair and its parts."""
    inputs = prepare(scenario)
    host, found = Host(scenario, inputs.data, inputs.parts, torch.device("cpu")), dict[str, bytes]()
    for arm in PROTECTED:
        secret = host._secret(arm)
        pair = unlock(derive(secret, "box"), relayed[arm])
        found |= {f"{arm} secret": secret, f"{arm} pair": pair, f"{arm} tags": derive(secret, "tags", 0)}
        found |= {f"{arm} box": derive(secret, "box"), f"{arm} seed of pair": derive(secret, "pair")}
        if arm == "paillier":
            p, q = pair[: len(pair) // 2], pair[len(pair) // 2 :]
            found |= {"paillier p": p, "paillier q": q, "paillier p reversed": p[::-1], "paillier q reversed": q[::-1]}
    return found


@pytest.mark.ray
@pytest.mark.parametrize(
    ("arm", "damage", "message"),
    [
        ("paillier", lambda s: replace(s, ciphertexts=(s.ciphertexts[1], *s.ciphertexts[1:])), "not the sum of what"),
        ("bfv", lambda s: replace(s, ciphertexts=s.ciphertexts[:-1]), "truncated|cannot be read"),
        ("ckks", lambda s: replace(s, ciphertexts=(s.ciphertexts[0][:-100], *s.ciphertexts[1:])), "cannot be read"),
    ],
)
def test_a_round_with_a_damaged_ciphertext_is_not_applied(
    arm: str,
    damage: Callable[[Sealed], Sealed],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ray_session: None,
) -> None:
    """On its way from the clients to the server, in the second round; afterwards the run is resumed unharmed."""
    call = ActorMethod._remote

    def damaged(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if self._method_name == "add" and args[1] == 1:
            [partial] = ray.get(args[3])
            args = [*args[:3], (damage(partial) if partial.round == 1 else partial,)]
        return call(self, args, kwargs, **options)

    spec = parsed().arms[arm].protection
    assert spec is not None
    one = parsed(f"arms={{{arm}: {{protection: {spec.model_dump_json()}}}}}")
    with monkeypatch.context() as patched:
        patched.setattr(ActorMethod, "_remote", damaged)
        with pytest.raises(ProtectionError, match=message):
            runs.launch(one, str(tmp_path), None, Progress())
    [path] = tmp_path.iterdir()
    saved = checkpoint.load(RunFolder.open(str(path)))
    assert saved is not None
    assert saved.round == 0
    folder = runs.resume(str(path), None, Progress())
    assert set(weights(folder)) == {arm}


@pytest.mark.ray
def test_attackers_see_nothing_unless_they_break_the_key(tmp_path: Path, ray_session: None) -> None:
    attack = """
attacks:
  - {name: inverting_gradients, observes: gradient, knowledge: [labels], iterations: 20, victims: 2}
  - {name: inverting_gradients, label: factors, factor: true, observes: gradient, knowledge: [labels], iterations: 20,
     victims: 2}
  - {name: membership, observes: gradient, batch_size: 4, knowledge: [candidates]}
"""
    arms = (
        "arms={none: {}, bfv: {protection: bfv}, long: {protection: {name: paillier, key_bits: 512, insecure: true}}, "
        "short: {protection: {name: paillier, key_bits: 128, insecure: true, bits: 32}}}"
    )
    folder = runs.attack(parsed(arms, extra=attack), None, str(tmp_path), None, Progress())
    rows = folder.read_table("attacks").to_pylist()
    found = {(row["arm"], row["attack"], row["victim"]): row for row in rows}
    victims = {victim for _, _, victim in found}
    for (arm, attack_, _), row in found.items():
        seen = arm == "none" or (arm == "short" and attack_ == "factors")
        assert row["status"] == ("ok" if seen else "not applicable")
        assert seen or "the update is encrypted" in row["message"]
    for victim in victims:
        plain, broken = found["none", "factors", victim], found["short", "factors", victim]
        assert broken["psnr"] == pytest.approx(plain["psnr"], abs=0.5)
    inferred = {row["arm"]: row["status"] for row in folder.read_table("inferences").to_pylist()}
    assert inferred == {"none": "ok", "bfv": "not applicable", "long": "not applicable", "short": "not applicable"}


def test_an_observation_of_a_sealed_update_has_its_ciphertext_alone() -> None:
    from rayfed.training.host import Sent
    from rayfed.training.observer import Observer

    scenario = parsed(extra=ATTACK)
    inputs = prepare(scenario)
    host = Host(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    arm = host.arm("paillier")
    sent = Sent(1, arm.weights, arm.buffers, host.make_keys("paillier"))
    observation, _ = Observer(host).observe("paillier", sent, 0, scenario.attacks[0], {})
    assert observation.sealed is not None
    assert not observation.update
    assert not observation.returned_buffers
    assert not observation.sealed.tag
    rule = host.rule("paillier", sent)
    assert isinstance(rule, Protected)
    assert rule.keys is not None
    assert rule.keys.pair not in pickle.dumps(observation)


def test_rounds_of_one_client_are_refused() -> None:
    with pytest.raises(ScenarioError, match="round 0 has one client"):
        prepare(parsed("federation.clients_per_round=1", "federation.cohort_size=1"))


def test_rules_that_cannot_be_encrypted_are_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="not enough for Median"):
        prepare(parsed("federation.aggregation=median"))


def test_a_scenario_says_what_is_wrong_with_a_protection() -> None:
    with pytest.raises(ScenarioError) as found:
        parsed("arms.paillier.protection={name: paillier, key_bits: 1024}", "arms.bfv.protection={name: bfw}")
    assert "arms.paillier.protection" in str(found.value)
    assert "did you mean 'bfv'" in str(found.value)


def test_a_run_says_how_finely_it_encrypts_and_whether_its_keys_can_be_broken() -> None:
    messages = prepare(parsed()).encryption
    assert [message.split()[1] for message in messages] == ["paillier", "paillier", "ckks", "bfv"]
    assert "sums of up to 5 clients: values up to 1 in steps of 1.2e-07" in messages[0]
    assert "INSECURE: keys of 512 bits can be broken" in messages[1]
