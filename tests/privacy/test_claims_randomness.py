"""What is claimed of random numbers: every bit of a seed counts, and no two purposes share a stream."""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.utils import parameters_to_vector

from rayfed import scenario as scenarios
from rayfed.core import seeds
from rayfed.crypto.keys import derive
from rayfed.errors import RunError, ScenarioError
from rayfed.gradients import weights_of
from rayfed.models.build import build_model
from rayfed.privacy.sampling import Draw, SecureGenerator, add_noise, make_generator, sample_gaussian, sample_laplace
from rayfed.runs import runner, sweeps
from rayfed.runs.local_sweep import local_sweep
from rayfed.scenario import Training, resolve
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import aggregation_of
from rayfed.simulation.client.local import batches, update_method
from rayfed.simulation.client.plan import drawn_clients
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.store import run_key
from rayfed.store.folder import RunFolder

FAR_APART = [5, 5 + 2**32, 5 + 2**48, 5 + 2**62]
"""Seeds with the same low 32 bits, which is all that `torch.Generator.manual_seed` reads on the CPU."""


def weights_drawn(seed: int) -> list[float]:
    return parameters_to_vector(build_model("mlp", {}, (1, 4, 4), 3, seed).parameters()).tolist()


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: torch.rand(4, generator=seeds.torch_generator(seed)).tolist(),
        lambda seed: torch.rand(4, generator=seeds.torch_generator(seed, "client", 0, 3)).tolist(),
        lambda seed: seeds.numpy_generator(seed).random(4).tolist(),
        lambda order: next(iter(batches(50, Training(), order))).tolist(),
        lambda order: next(iter(batches(50, Training(sampling="poisson"), order))).tolist(),
        weights_drawn,
    ],
    ids=["torch", "torch of a purpose", "numpy", "shuffled batches", "Poisson batches", "first weights"],
)
def test_every_bit_of_a_seed_counts(draw) -> None:  # type: ignore[no-untyped-def]
    assert len({tuple(draw(seed)) for seed in FAR_APART}) == len(FAR_APART)


def test_seeds_that_the_tables_could_not_hold_are_refused() -> None:
    text = "name: t\nfederation: {rounds: 1, clients: 2}\nseed: "
    assert scenarios.parse(f"{text}{2**63 - 1}").seed == 2**63 - 1
    for seed in (2**63, 5 + 2**64, -1):
        with pytest.raises(ScenarioError, match="seed"):
            scenarios.parse(f"{text}{seed}")


DISTINCT = [
    ("buckeroo",), ("plumless",),  # of the same CRC-32
    (crc32(b"buckeroo"),), (str(crc32(b"buckeroo")),),
    (1,), (1, 0), (1, 0, 0), ("1",), ("1", "0"), ("10",), (1, ""), ("", 1),
    ("ab", "c"), ("a", "bc"), ("a\x00b",), ("a", "b"), (0,), (256,), (65536,), (255,), (128,),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["torch", "numpy", "crypto"])
def test_no_two_keys_share_a_stream(kind: str) -> None:
    def drawn(key: tuple[int | str, ...]) -> bytes:
        if kind == "crypto":
            return derive(b"secret", *key)
        if kind == "numpy":
            return seeds.numpy_generator(*key).bytes(16)
        return torch.rand(4, generator=seeds.torch_generator(*key)).numpy().tobytes()

    assert len({drawn(key) for key in DISTINCT}) == len(DISTINCT)


def test_many_seeds_have_as_many_streams() -> None:
    """Of 32 bits, 105,000 streams were enough to meet one twice."""
    first, second = (torch.rand(4, generator=seeds.torch_generator(seed)) for seed in (41_780, 104_948))
    assert not torch.equal(first, second)


def test_a_generator_is_the_mersenne_twister_of_all_of_its_words() -> None:
    """The same words in numpy's MT19937 give the same numbers, so what a key fills is the state that counts."""
    generator, key = torch.Generator(), seeds.derive_bytes(3, "oracle")
    seeds.seed_generator(generator, key)
    oracle = np.random.MT19937()
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * 624), np.uint32)
    oracle.state = {"bit_generator": "MT19937", "state": {"key": words.copy(), "pos": 624}}
    ours = torch.rand(2000, generator=generator)
    assert torch.equal(ours, torch.from_numpy((oracle.random_raw(2000) % 2**24 / 2**24).astype(np.float32)))


def test_the_global_stream_is_lent_and_given_back() -> None:
    torch.manual_seed(1)
    undisturbed = torch.rand(3)
    torch.manual_seed(1)
    with seeds.global_stream(7, "lent", cuda=True):
        lent = torch.rand(3)
    assert torch.equal(torch.rand(3), undisturbed)
    assert torch.equal(lent, torch.rand(3, generator=seeds.torch_generator(7, "lent")))
    with seeds.global_stream(7 + 2**32, "lent"):
        assert not torch.equal(torch.rand(3), lent)


SECURE = "name: t\nfederation: {rounds: 3, clients: 400, clients_per_round: 40}\nprivacy: {secure: true}"


def test_secure_scenarios_do_not_follow_from_their_seed() -> None:
    first, second = scenarios.parse(SECURE), scenarios.parse(SECURE)
    plain = scenarios.parse(SECURE.replace("true", "false"))
    assert first.seed == second.seed == plain.seed == 0
    assert len({s.secret("client", 0, 1, "order") for s in (first, second, plain)}) == 3
    assert len({tuple(drawn_clients(s, 0)) for s in (first, second, plain)}) == 3
    noise = [sample_gaussian(torch.Size([5]), s.generator("client", 0, 1, "defences", "a")) for s in (first, second)]
    assert not torch.equal(*noise)
    assert plain.secret("x") == scenarios.parse(plain.dump()).secret("x")


def test_the_key_of_a_secure_run_stays_with_its_scenario_and_is_written_nowhere() -> None:
    secure = scenarios.parse(SECURE)
    copies = [secure.model_copy(update={"name": "u"}), pickle.loads(pickle.dumps(secure)), secure.attacked_in(2)]
    assert {s.secret("x") for s in copies} == {secure.secret("x")}
    assert len(secure.run_key) == 32
    for text in (secure.dump(), repr(secure), str(secure.model_dump()), secure.model_dump_json()):
        assert secure.run_key.hex() not in text
        assert repr(secure.run_key)[2:-1] not in text
    assert scenarios.parse(secure.dump()).privacy.secure
    assert scenarios.parse(secure.dump()).run_key != secure.run_key
    with pytest.raises(AssertionError, match="without a key"):
        secure.with_run_key(b"").secret("x")


def test_a_round_that_is_played_again_without_a_client_has_other_noise() -> None:
    """After a server's death, or resumed, others may fail (`failures: {then: drop}`) than before: under the same noise
    the two sums would differ by their updates alone.
    """
    secure = scenarios.parse(SECURE)

    def noise(*failed: int) -> torch.Tensor:
        return sample_gaussian(torch.Size([5]), make_generator(plan.server_key(secure, "a", 1, failed), True))

    assert torch.equal(noise(), noise())
    assert torch.equal(noise(7, 30), noise(30, 7))
    assert len({tuple(noise(*failed).tolist()) for failed in ((), (7,), (30,), (7, 30))}) == 4
    assert plan.server_key(secure, "a", 1, ()) == secure.secret("server", 1, "a")


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_clients_are_drawn_as_the_account_takes_them_to_be(sampling: str) -> None:
    """Each as often as any other, in 2,000 rounds with one key each."""
    text = SECURE.replace(
        "clients: 400, clients_per_round: 40", f"clients: 20, clients_per_round: 5, sampling: {sampling}"
    )
    s = scenarios.parse(text)
    s = s.with_run_key(b"a fixed key of thirty-two bytes.")
    rounds = [drawn_clients(s, round) for round in range(2000)]
    counts = np.bincount(np.concatenate(rounds).astype(int), minlength=20)
    sizes = np.array([len(clients) for clients in rounds])
    if sampling == "fixed":
        assert set(sizes) == {5}
        assert all(len(set(clients)) == 5 and clients == sorted(clients) for clients in rounds)
        # A count is 0 or 1 a round with a mean of 1/4, and 20 of them add up to 5: chi-square with 19 degrees.
        assert stats.chi2.sf(((counts - 500) ** 2).sum() / (2000 * 0.25 * 0.75 * 20 / 19), 19) > 1e-3
    else:
        expected = 2000 * stats.binom.pmf(np.arange(21), 20, 0.25)
        seen = np.bincount(sizes, minlength=21)
        middle = expected > 5
        assert stats.chi2.sf(((seen - expected) ** 2 / expected)[middle].sum(), middle.sum()) > 1e-3
        assert stats.chi2.sf(((counts - 500) ** 2).sum() / (2000 * 0.25 * 0.75), 20) > 1e-3


@pytest.mark.parametrize(("draw", "norm"), [(sample_gaussian, "norm"), (sample_laplace, "laplace")])
@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_distributed_as_the_account_takes_it_to_be(draw: Draw, norm: str, secure: bool) -> None:
    """Against the closed form, in the bulk, in the tails, and by its sum of squares; values do not hang together."""
    key = b"one key for 300,000 draws of noise"
    noise = draw(torch.Size([3, 100_000]), make_generator(key, secure)).double().numpy()
    law = getattr(stats, norm)
    assert stats.kstest(noise.ravel(), norm).pvalue > 1e-3
    tail = law.isf(5e-4)
    assert stats.binomtest(int((abs(noise) > tail).sum()), noise.size, 1e-3).pvalue > 1e-3
    kurtosis = law.moment(4) / law.var() ** 2
    squares = ((noise**2).sum() / law.var() - noise.size) / np.sqrt(noise.size * (kurtosis - 1))
    assert stats.norm.sf(abs(squares)) > 5e-4
    for lag in (1, 4, 1 << 13, 1 << 16):
        together = np.corrcoef(noise.ravel()[lag:], noise.ravel()[:-lag])[0, 1]
        assert stats.norm.sf(abs(together) * np.sqrt(noise.size)) > 2.5e-4
    assert abs(np.corrcoef(noise) - np.eye(3)).max() < 4 / np.sqrt(100_000)


def test_secure_noise_is_of_double_precision_and_rounded_once() -> None:
    key, value = b"key", torch.linspace(-1, 1, 1000)
    noise = sample_gaussian(value.shape, make_generator(key, True))
    assert noise.dtype == torch.float64
    assert not torch.equal(noise.float().double(), noise)
    made = add_noise({"w": value}, 0.3, sample_gaussian, make_generator(key, True))["w"]
    assert made.dtype == torch.float32
    assert torch.equal(made, (value.double() + 0.3 * noise).float())


def test_uniform_numbers_reach_zero_but_not_one_and_use_53_bits() -> None:
    numbers = SecureGenerator(b"key").uniform(200_000)
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert ((numbers * 2**53) % 1 == 0).all()
    assert ((numbers * 2**52) % 1 != 0).mean() == pytest.approx(0.5, abs=0.01)
    assert numbers.max() < 1


MECHANISMS = {
    "gaussian": "{name: gaussian, sigma: 0.1, clip: 1}",
    "laplace": "{name: laplace, scale: 0.1, clip: 1}",
    "dp_sgd": "{name: dp_sgd, noise_multiplier: 1}",
    "fed_cdp": "{name: fed_cdp, noise_multiplier: 1}",
    "dp_fedavg": "{name: dp_fedavg, noise_multiplier: 1}",
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_noise_of_every_mechanism_is_secure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it comes from the Mersenne Twister, whose numbers give its state away; and it is there."""
    s = scenarios.parse(
        f"name: t\nfederation: {{rounds: 1, clients: 3}}\ntraining: {{batch_size: 4, steps: 1}}\n"
        f"privacy: {{secure: true}}\nmodel: {{name: mlp, hidden: [8]}}\ndefences: [{MECHANISMS[name]}]"
    )
    inputs = prepare_inputs(s)
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
    model, sent = runtime.arm(name), Sent(0, weights_of(runtime.arm(name).model), {})
    task = runtime.task(name, sent, 1, runtime.parts[1], {})
    twister = task.generator.get_state()
    release = update_method(s.training, model.defences)

    def released() -> torch.Tensor:
        update = release(runtime.task(name, sent, 1, runtime.parts[1], {})).tensors
        if name == "dp_fedavg":  # the server's part
            rule = aggregation_of(resolve(s)[name])
            update = rule._noised(update, make_generator(s.secret("server", 0, name), s.privacy.secure))  # type: ignore
        return torch.cat([t.flatten() for t in update.values()])

    noisy = released()
    assert torch.equal(noisy, released())  # again after a crash: the same bits
    assert torch.equal(task.generator.get_state(), twister)
    monkeypatch.setattr(torch, "randn", None)
    monkeypatch.setattr(torch.Tensor, "exponential_", None)
    assert torch.equal(noisy, released())
    monkeypatch.setattr("rayfed.privacy.sampling._normal", lambda *u: np.zeros_like(u[0]))
    monkeypatch.setattr("rayfed.privacy.sampling._product", lambda *u: np.zeros_like(u[0]))
    assert float((noisy - released()).std()) > 1e-3


LOUD = {
    "gaussian": "{name: gaussian, sigma: 100, clip: 1}",
    "laplace": "{name: laplace, scale: 100, clip: 1}",
    "dp_sgd": "{name: dp_sgd, noise_multiplier: 100}",
    "fed_cdp": "{name: fed_cdp, noise_multiplier: 100}",
}


@pytest.mark.parametrize("name", LOUD)
@pytest.mark.parametrize("secure", [True, False])
def test_no_noise_is_added_to_two_answers_of_a_secure_run(name: str, secure: bool) -> None:
    """A server that asks again in the same round, at other weights, has their difference without noise otherwise."""
    s = scenarios.parse(
        f"name: t\nfederation: {{rounds: 1, clients: 3}}\ntraining: {{batch_size: 4, steps: 1}}\n"
        f"privacy: {{secure: {str(secure).lower()}}}\nmodel: {{name: mlp, hidden: [8]}}\ndefences: [{LOUD[name]}]"
    )
    inputs = prepare_inputs(s)
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
    weights = weights_of(runtime.arm(name).model)

    def answer(factor: float) -> torch.Tensor:
        sent = Sent(0, {n: factor * w for n, w in weights.items()}, {}, b"box")
        [update] = runtime.updates(name, sent, [1], {})
        return torch.cat([t.flatten() for t in update.tensors.values()])

    first, again, other = answer(1.0), answer(1.0), answer(0.5)
    assert torch.equal(first, again)
    assert (float((first - other).std()) > float(first.std())) is secure


def test_the_key_of_a_run_is_readable_for_its_owner_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path), "run")
    before = os.umask(0)
    try:
        run_key.save_key(folder, bytes(range(32)))
    finally:
        os.umask(before)
    path = Path(folder.root) / run_key.FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "run.key" in (path.parent / "README.txt").read_text()
    assert run_key.load_key(folder) == bytes(range(32))
    path.write_bytes(b"short")
    with pytest.raises(RunError, match="has 5 bytes, not 32"):
        run_key.load_key(folder)
    run_key.remove_key(folder)
    assert run_key.load_key(folder) is None


@pytest.mark.parametrize("begun", ["{}", '{"streams": 1}'])
def test_a_run_that_began_with_other_random_numbers_is_not_continued(begun: str, tmp_path: Path) -> None:
    """Its clients had other data, and its account would be of draws that were not made."""
    folder = RunFolder.create(str(tmp_path), "run")
    folder.write_text("environment.json", begun)
    text = "name: t\nfederation: {rounds: 2, clients: 2}\n"
    folder.write_text("scenario.yaml", text)
    folder.write_text("status.json", '{"kind": "training", "state": "interrupted"}')
    with pytest.raises(RunError, match="other random numbers"):
        runner.resume(folder.url, local, Progress())
    with pytest.raises(RunError, match="other random numbers"):
        runner.attack(scenarios.parse(text), folder.url, None, local, Progress())
    folder.write_text("scenario.yaml", text + "sweep: {fields: {training.lr: [0.1, 0.2]}}\n")
    with pytest.raises(RunError, match="other random numbers"):
        sweeps.resume(folder.url, False, local_sweep, SweepProgress())
