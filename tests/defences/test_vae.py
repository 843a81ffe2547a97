"""The VAE defence: its autoencoder, the forged data and their noise, and that the autoencoder stays with the client."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from rayfed import scenario as scenarios
from rayfed.defences.base import MEASURED, Batch, Task
from rayfed.defences.vae import Vae
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, weights_of
from rayfed.models.build import build_model
from rayfed.models.vae import Autoencoder
from rayfed.scenario import AttackSpec, Training
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.local import data_method
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.inputs import prepare_inputs
from rayfed.store import checkpoint
from rayfed.store.folder import RunFolder
from rayfed.threat_model.observations import ObservationBuilder
from tests.helpers.attack_fixtures import digit, photo

CPU = torch.device("cpu")
SILENT = 1e9
"""An epsilon whose noise is nothing."""
QUICK = "{name: vae, epochs: 2, hidden: 16, latent: 4}"


def client(images: Tensor, seed: int = 0, order: int = 7) -> Task:
    model = build_model("mlp", {"hidden": [8]}, tuple(images.shape[1:]), 10, seed=0)  # type: ignore[arg-type]
    data = Batch(images, torch.arange(len(images)) % 10, places=torch.arange(len(images)))
    generator = torch.Generator().manual_seed(seed)
    return Task(0, 0, model, weights_of(model), buffers_of(model), data, generator, order, classes=10)


def digits(count: int) -> Tensor:
    return torch.cat([digit(i) for i in range(count)])


def forged(defence: Vae, task: Task) -> Batch:
    return data_method([defence])(task)


def autoencoder(task: Task) -> dict[str, Tensor]:
    [weights] = (own for key, own in task.state.items() if key != MEASURED)
    return weights  # type: ignore[no-any-return]


def runtime() -> ClientRuntime:
    s = scenarios.parse(f"""
name: t
data: {{name: digits, size: 8, train_samples: 60}}
model: mlp
training: {{epochs: 1, batch_size: 8}}
federation: {{rounds: 3, clients: 3, aggregation: {{name: fedavg, weights: uniform}}}}
arms: {{none: [], vae: [{QUICK}]}}
""")
    inputs = prepare_inputs(s)
    return ClientRuntime(s, inputs.data, inputs.parts, CPU)


def sent(runtime: ClientRuntime, round: int = 0) -> Sent:
    model = runtime.arm("vae").model
    return Sent(round, weights_of(model), buffers_of(model))


def test_the_loss_is_cross_entropy_and_divergence() -> None:
    torch.manual_seed(0)
    network, images, draws = Autoencoder((3, 5, 4), 12, 6), torch.rand(7, 3, 5, 4), torch.randn(7, 6)
    seen = images + torch.randn_like(images)
    mean, log_variance = network.encoder(seen).chunk(2, -1)
    prior = Normal(torch.zeros(6), torch.ones(6))
    divergence = kl_divergence(Normal(mean, log_variance.exp().sqrt()), prior).sum(1)
    made = network(seen, draws)
    assert made.shape == images.shape
    expected = F.binary_cross_entropy(made, images, reduction="sum") / 7 + divergence.mean()
    torch.testing.assert_close(network.loss(seen, images, draws), expected)


@pytest.mark.parametrize("images", [digits(20), torch.cat([photo(0, i) for i in range(3)])])
def test_labels_stay_and_images_are_made_anew(images: Tensor) -> None:
    task = client(images)
    found = forged(Vae(epsilon=SILENT, epochs=2), task)
    assert found.inputs.shape == images.shape
    assert 0 <= found.inputs.min() <= found.inputs.max() <= 1
    assert torch.equal(found.labels, task.data.labels)
    assert found.places is None


def test_a_forged_image_is_like_its_own_more_than_like_others() -> None:
    images = digits(100)
    found = forged(Vae(epsilon=SILENT), client(images)).inputs
    nearest = torch.cdist(found.flatten(1), images.flatten(1)).argmin(1)
    hits = int((nearest == torch.arange(100)).sum())
    assert stats.binomtest(hits, 100, 1 / 100, alternative="greater").pvalue < 1e-3  # one in a hundred by chance
    assert (found - images).square().mean() < (images.mean(0) - images).square().mean()


def test_an_autoencoder_that_knows_labels_forges_what_the_label_says() -> None:
    """Two images of one value each; the wrong label makes the other image."""
    images = torch.cat([torch.full((40, 1, 6, 6), value) for value in (0.0, 1.0)])
    labels = torch.arange(80) // 40
    task = client(images)
    task = task.replace(data=Batch(images, labels, places=torch.arange(80)), classes=2)
    defence = Vae(conditional=True, epochs=30, epsilon=SILENT, latent=1)
    swapped = defence.forged(task, Batch(torch.full_like(images, 0.5), 1 - labels))
    assert ((swapped.mean((1, 2, 3)) > 0.5) == (labels == 0)).float().mean() > 0.9
    with pytest.raises(UserError):
        defence.forged(task, Batch(images, F.one_hot(labels, 2).float()))


def test_the_loss_of_the_last_epoch_is_in_the_clients_row() -> None:
    there = runtime()
    _, first = there.cohort("vae", sent(there), [0], {})
    _, second = there.cohort("vae", sent(there, 1), [0], first.states)
    [row], [later] = first.rows, second.rows
    network = Vae(epochs=2, hidden=16, latent=4)._network(
        there.task("vae", sent(there), 0, there.parts[0], first.states[0])
    )
    images = there.task("vae", sent(there), 0, there.parts[0], {}).data.inputs
    at_the_end = network.loss(images, images, torch.randn(len(images), 4))
    assert row["autoencoder_loss"] == pytest.approx(at_the_end.item(), rel=0.2)
    assert "autoencoder_loss" not in later


def test_noise_is_laplace_of_sensitivity_over_epsilon() -> None:
    images = torch.full((50, 1, 40, 40), 0.5)
    noise = Vae(sensitivity=2, epsilon=8).noised(images, torch.Generator().manual_seed(0)) - images
    assert noise.abs().mean().item() == pytest.approx(0.25, rel=0.02)
    assert noise.square().mean().item() == pytest.approx(2 * 0.25**2, rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert (images + noise).min() < 0  # not clipped


def test_data_are_new_in_every_round_and_the_autoencoder_is_not() -> None:
    defence, task = Vae(epochs=2), client(digits(20))
    first = forged(defence, task)
    weights = copy.deepcopy(autoencoder(task))
    later = client(digits(20), seed=1, order=8).replace(round=1, state=task.state)
    second = forged(defence, later)
    assert not torch.equal(first.inputs, second.inputs)
    assert all(torch.equal(w, autoencoder(later)[name]) for name, w in weights.items())
    again = forged(defence, client(digits(20)))
    assert torch.equal(first.inputs, again.inputs)


def test_it_follows_the_clients_keys_alone() -> None:
    defence = Vae(epochs=2)
    found = []
    for stream in (5, 6):
        torch.manual_seed(stream)
        task = client(digits(20))
        forged(defence, task)
        found.append(autoencoder(task))
        after = torch.rand(3)
        torch.manual_seed(stream)
        assert torch.equal(after, torch.rand(3))  # and leaves the global stream alone
    assert all(torch.equal(w, found[1][name]) for name, w in found[0].items())
    other = client(digits(20), order=8)
    forged(defence, other)
    assert not torch.equal(autoencoder(other)["decoder.0.weight"], found[0]["decoder.0.weight"])


def test_each_of_two_in_a_stack_has_its_own() -> None:
    task = client(digits(20))
    data_method([Vae(epochs=1), Vae(epochs=2)])(task)
    assert len(task.state.keys() - {MEASURED}) == 2


def test_everything_is_in_the_clients_own_order() -> None:
    whole = client(digits(6)).data
    one, rest = whole.rows(torch.tensor([4, 1])), whole.rows(torch.tensor([0, 5, 2, 3]))
    everything = client(digits(6)).replace(data=one, others=rest).everything
    assert torch.equal(everything.inputs, whole.inputs)
    assert torch.equal(everything.labels, whole.labels)
    assert torch.equal(
        client(digits(6)).replace(data=whole.rows(torch.arange(5, -1, -1))).everything.inputs, whole.inputs
    )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Tensor]]]:
    """The autoencoders that forged something, in the order in which they did."""
    seen: list[dict[str, Tensor]] = []
    plain = Vae._network

    def noted(self: Vae, task: Task) -> Autoencoder:
        network = plain(self, task)
        seen.append({name: w.clone() for name, w in network.state_dict().items()})
        return network

    monkeypatch.setattr(Vae, "_network", noted)
    return seen


@pytest.mark.parametrize("round", [0, 2])
@pytest.mark.parametrize("known", [False, True])
def test_an_observed_gradient_comes_from_the_autoencoder_of_the_round(
    round: int, known: bool, trained: list[dict[str, Tensor]]
) -> None:
    """Before the client's first round the attacked client trains it too, of all its samples; later it has it."""
    there = runtime()
    states = there.cohort("vae", sent(there), [1], {})[1].states if known else {}
    trained.clear()
    attack = AttackSpec(name="dlg", observes="gradient", batch_size=2, averages=2)
    ObservationBuilder(there).observe(ClientVisit("vae", sent(there, round), 1, states), attack)
    there.cohort("vae", sent(there, round), [0, 1], states)
    assert len(trained) == 4
    first, again, other, played = trained
    for name, w in played.items():
        assert torch.equal(first[name], w)
        assert torch.equal(again[name], w)
    assert not torch.equal(other["decoder.0.weight"], played["decoder.0.weight"])


def test_the_autoencoder_leaves_the_client_neither_to_the_server_nor_to_the_attacker() -> None:
    there = runtime()
    reports = [there.cohort("vae", sent(there), [client], {}) for client in (0, 1)]  # each sum is one update as it is
    observations = [
        ObservationBuilder(there).observe(ClientVisit("vae", sent(there), client), AttackSpec(name="dlg", **how))[0]  # type: ignore[arg-type]
        for client in (0, 1)
        for how in ({"observes": "update"}, {"observes": "gradient", "knowledge": ["labels", "defence"]})
    ]

    def found(secret: Tensor, where: object) -> bool:
        return secret.contiguous().numpy().tobytes() in pickle.dumps(where)

    for client, (_, report) in enumerate(reports):
        [weights] = report.states[client].values()
        for w in weights.values():
            assert found(w, report.states)  # so the search would find it
            assert not any(found(w, update) for update, _ in reports)
            assert not any(found(w, seen) for seen in observations)
    assert found(reports[0][0].tensors["fc1.weight"], reports[0][0])


def test_a_later_round_is_the_same_on_another_actor_with_what_a_checkpoint_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    there = runtime()
    states = there.cohort("vae", sent(there), [0, 1], {})[1].states
    folder = RunFolder.create(str(tmp_path), "run")
    checkpoint.save(folder, checkpoint.Checkpoint(0, {}, {"vae": states}))
    here, _ = there.cohort("vae", sent(there, 1), [0, 1], states)
    elsewhere, report = runtime().cohort(
        "vae", sent(there, 1), [0, 1], checkpoint.load_states(folder, "vae", [0, 1], 1)
    )
    assert all(torch.equal(t, elsewhere.tensors[name]) for name, t in here.tensors.items())
    assert set(report.states) == {0, 1}


def test_a_vmapped_cohort_trains_on_the_same_forged_data() -> None:
    updates = {}
    for how in ("loop", "vmap"):
        tasks = [client(digits(n), seed=n, order=n).replace(client=n) for n in (21, 9)]
        tasks = [t.replace(model=tasks[0].model) for t in tasks]
        training = Training(vectorise=how, batch_size=8)  # type: ignore[arg-type]
        updates[how] = list(cohort_updates(tasks, training, [Vae(epochs=2)]))
    for a, b in zip(updates["loop"], updates["vmap"], strict=True):
        for name in a.tensors:
            torch.testing.assert_close(a.tensors[name], b.tensors[name], atol=1e-5, rtol=0)


def test_it_guarantees_nothing_and_takes_the_guarantee_of_samples_from_others() -> None:
    s = scenarios.parse(f"""
name: t
data: {{name: digits, size: 8, train_samples: 60}}
model: mlp
federation: {{rounds: 1, clients: 3}}
arms: {{vae: [{QUICK}], both: [{QUICK}, {{name: dp_sgd, clip: 1, noise_multiplier: 1}}]}}
""")
    [alone], [both] = (account.rows(1) for account in prepare_inputs(s).accounts)
    assert alone["note"].startswith("empirical")
    assert "vae changes the samples" in both["note"]


@pytest.mark.parametrize("wrong", [{"epsilon": 0}, {"sensitivity": 0}, {"latent": 0}, {"disturbance": -1}])
def test_parameters_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Vae(**wrong)
