"""That the samples themselves explain what defences send: nobody else is asked to do better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from rayfed import scenario
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.fit import fit_of, judged
from rayfed.core.reasons import Reason
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.defences.declarations import normal_log_likelihood
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import GRADIENT_FIT_TOL, compute_findings
from rayfed.registry import component
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ObservationRequest, Truth
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Named, Observation, Update
from tests.helpers.attack_fixtures import observed

DEFENCES: list[list[dict[str, Any]]] = [
    [{"name": "gaussian", "sigma": 0.1}],
    [{"name": "gaussian", "sigma": 0.001}],
    [{"name": "laplace", "scale": 0.1}],
    [{"name": "prune", "ratio": 0.9}],
    [{"name": "top_k", "k": 0.1}],
    [{"name": "quantise", "bits": 1}],
    [{"name": "quantise", "bits": 4}],
    [{"name": "quantise", "bits": 8}],
    [{"name": "gaussian", "sigma": 0.01}, {"name": "top_k", "k": 0.1}],
    [{"name": "laplace", "scale": 0.1}, {"name": "prune", "ratio": 0.5}],
    [{"name": "gaussian", "sigma": 0.1}, {"name": "gaussian", "sigma": 1.0}],
    [{"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 1.0}],
    [{"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 0.001}],
    [{"name": "soteria", "ratio": 0.5}],
    [{"name": "outpost"}],
    [{"name": "tests.threat_model.test_explained:LastAlone"}],
]


def one_client(
    model: dict[str, Any], defences: list[dict[str, Any]], batch: int, algorithm: str = "fedsgd", epochs: int = 0
) -> tuple[Observation, Truth, nn.Module]:
    """What an attacker with the code sees of one client, the truth behind it, and the model.

    With `epochs` it sees the client's whole update of these, in batches of five.
    """
    document = {
        "name": "t",
        "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20},
        "model": model,
        "federation": {"rounds": 1, "clients": 4},
        "training": {"algorithm": algorithm, "lr": 0.1} | ({"batch_size": 10} if algorithm == "fedavg" else {}),
        "arms": {"defended": defences},
        "attacks": [
            {"name": "dlg", "observes": "gradient", "batch_size": batch, "knowledge": ["defence", "code", "labels"]}
        ],
    }
    if epochs:
        document["training"] |= {"epochs": epochs, "batch_size": 5}
        document["attacks"] = [{"name": "dlg", "observes": "update", "knowledge": ["defence", "code"]}]
    inputs = prepare_inputs(scenario.parse(yaml.safe_dump(document)))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    [account] = inputs.accounts
    sent = Sent(0, account.arm.weights, account.arm.buffers)
    _, [seen], [truth] = worker.observe(sent, ObservationRequest(account.name, [1], inputs.scenario.attacks[0]))
    return seen, truth, account.arm.model


@pytest.mark.engine
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("defences", DEFENCES, ids=lambda found: " ".join(map(str, found)))
def test_the_samples_explain_what_is_sent_of_them(defences: list[dict[str, Any]], algorithm: str, batch: int) -> None:
    seen, truth, model = one_client({"name": "mlp", "hidden": [64]}, defences, batch, algorithm)
    noise = torch.rand(truth.inputs.shape, generator=torch.Generator().manual_seed(0))
    for images, right in ((truth.inputs, True), (noise, False)):
        fit, fits, nats = fit_of(images, truth.labels, seen, model)
        found = Reconstruction(images, truth.labels, fit=fit, fits=fits, nats=nats)
        told = judged(found, truth.fit, truth.fits, truth.nats)
        assert told is None or not right or told <= GRADIENT_FIT_TOL
        if not right and defences[0] in (
            DEFENCES[1][0],
            DEFENCES[3][0],
            {"name": "tests.threat_model.test_explained:LastAlone"},
        ):
            assert algorithm == "fedavg" or (told is not None and told > GRADIENT_FIT_TOL), (
                "it is told from the samples"
            )


@component
class LastAlone(Defence):
    """Noise on the last layer alone."""

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the update without noise."""
        return tensors

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        """Return the log density of normal noise on the last tensor."""
        last = [*sent][-1]
        deviations = {name: torch.full_like(t, float(name == last)) for name, t in sent.items()}
        return normal_log_likelihood(sent, expected, deviations)

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Add noise to the last tensor of the update."""

        def update(task: Task) -> Update:
            sent = next(task)
            last, tensor = [*sent.tensors.items()][-1]
            noisy = tensor + torch.randn(tensor.shape, generator=task.generator)
            return replace(sent, tensors={**sent.tensors, last: noisy})

        return update


@component
class Paired(Defence):
    """Negatives, made sample by sample beside its label."""

    def wrap_data(self, next: Any) -> Any:
        def data(task: Task) -> Any:
            batch = next(task)
            pairs = zip(batch.inputs, batch.labels, strict=True)
            return batch._replace(inputs=torch.stack([1 - one for one, _ in pairs]))

        return data


@pytest.mark.engine
def test_of_several_steps_nothing_is_compared() -> None:
    """Nor are samples of several passes made again beside the labels of one."""
    seen, truth, _ = one_client({"name": "mlp", "hidden": [16]}, [{"name": f"{__name__}:Paired"}], 1, "fedavg", 2)
    assert seen.local.steps == 4
    assert (truth.fit, truth.fits, truth.nats) == (1.0, None, None)


@pytest.mark.engine
def test_the_samples_explain_what_a_model_makes_of_their_places_in_a_batch() -> None:
    """Even slightly: where the order of the batch was not that of the truth, nobody was asked to explain it."""
    _, truth, _ = one_client({"name": "tests.threat_model.test_explained:First"}, [], 4)
    assert truth.fits is not None
    assert float(truth.fits.nan_to_num(0).max()) < GRADIENT_FIT_TOL


@pytest.mark.engine
@pytest.mark.parametrize("defences", [[], [{"name": "gaussian", "sigma": 0.1}]], ids=["none", "noise"])
def test_of_what_a_model_draws_nobody_is_excused(defences: list[dict[str, Any]]) -> None:
    """The samples do not explain it either, so an answer that is another sample may not pass for that."""
    seen, truth, model = one_client({"name": "tests.threat_model.test_explained:First", "dropout": 0.5}, defences, 1)
    fit, fits, nats = fit_of(truth.inputs.flip(2), truth.labels, seen, model)
    told = judged(Reconstruction(truth.inputs, truth.labels, fit=fit, fits=fits, nats=nats), *explained(truth))
    assert told is None or told > GRADIENT_FIT_TOL
    assert defences or (truth.fits is not None and not truth.fits.any())


def explained(truth: Truth) -> tuple[float | None, Tensor | None, float | None]:
    return truth.fit, truth.fits, truth.nats


class Rows(nn.Module):
    """Sees the mean of each row of pixels. What tells images apart with the same means is up to others."""

    def __init__(self, image_shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.rows, self.head = nn.Linear(8, 64), nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to logits (N, K)."""
        logits: Tensor = self.head(self.seen(images, self.rows(images.mean((1, 3)))).tanh())
        return logits

    def seen(self, images: Tensor, rows: Tensor) -> Tensor:
        """Change what enters the activation, (N, 64)."""
        return rows


class First(Rows):
    """Sees all pixels of the first sample of a batch, slightly."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, dropout: float = 0.0) -> None:
        super().__init__(image_shape, classes)
        self.all, self.dropout = nn.Linear(64, 64, bias=False), nn.Dropout(dropout)

    def seen(self, images: Tensor, rows: Tensor) -> Tensor:
        """Add the first sample's pixels."""
        first = torch.eye(len(images), device=images.device)[:, :1]
        return rows + 1e-3 * first * self.dropout(self.all(images.flatten(1)))


class Marked(Rows):
    """A unit for each pixel is stretched by a ten thousandth of it, in 17 levels."""

    def seen(self, images: Tensor, rows: Tensor) -> Tensor:
        """Stretch the units."""
        return rows * (1 + 1e-4 * (16 * images.flatten(1)).round() / 16)


class Lengths(Rows):
    """The slope in each pixel's vector has always the same direction, and as its length the pixel's level, slightly."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(64, 64))
        self.rows, self.head = self._modules.pop("rows"), self._modules.pop("head")

    def seen(self, images: Tensor, rows: Tensor) -> Tensor:
        """Add what the vectors make of the levels."""
        levels = 1 + (16 * images.flatten(1)).round() / 16
        return rows + 1e-6 * (levels @ self.vectors.sum(1))[:, None]


class Packs(Rows):
    """Keeps its last sample's pixels in buffers, five of them, in 17 levels, in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(13))

    def seen(self, images: Tensor, rows: Tensor) -> Tensor:
        """Keep the levels."""
        if self.training:
            levels = (16 * nn.functional.pad(images[-1].flatten(), (0, 1))).round().view(13, 5)
            self.kept = levels @ 17.0 ** -torch.arange(1.0, 6.0)
        return rows


class Beside(Rows):
    """Keeps in a buffer all pixels but one, and beside them the brightness, a hundred million times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(64))

    def seen(self, images: Tensor, rows: Tensor) -> Tensor:
        """Keep the pixels."""
        self.kept = torch.cat([1e8 * images.mean()[None], images.flatten()[1:]])
        return rows


class Standardised(Beside):
    """Keeps all pixels in units of their deviation, which a grey image has not: there they are no numbers."""

    def seen(self, images: Tensor, rows: Tensor) -> Tensor:
        """Keep the pixels."""
        flat = images.flatten()
        self.kept = (flat - flat.mean()) / flat.std()
        return rows


@pytest.mark.parametrize("model", [Marked, Lengths, Packs, Beside, Standardised])
def test_an_answer_that_differs_in_what_is_slight_alone_does_not_explain(model: type[Rows]) -> None:
    """What has the same rows explains all but a ten thousandth; in that is the sample, which a few lines read."""
    torch.manual_seed(0)
    network, images, labels = model().train(), sixteenths(), torch.tensor([3])
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network(images)
    seen = replace(observed(network, images, labels), returned_buffers=dict(network.named_buffers()), buffers=before)
    (_, own, _), (fit, fits, _) = (fit_of(one, labels, seen, network) for one in (images, images.flip(3)))
    assert fit is not None
    assert fit < 0.1
    assert (judged(Reconstruction(images, labels, fit=0.0, fits=own), None, own, None) or 0.0) <= GRADIENT_FIT_TOL
    assert (judged(Reconstruction(images, labels, fit=fit, fits=fits), None, own, None) or 0.0) > GRADIENT_FIT_TOL


def sixteenths() -> Tensor:
    """An image whose means of rows are the same in any order of their pixels, to the last bit."""
    return (16 * torch.rand(1, 1, 8, 8)).round() / 16


def test_an_answer_that_differs_in_nothing_that_is_seen_explains() -> None:
    torch.manual_seed(0)
    network, images, labels = Rows(), sixteenths(), torch.tensor([3])
    seen = observed(network, images, labels)
    (_, own, _), (fit, fits, _) = (fit_of(one, labels, seen, network) for one in (images, images.flip(3)))
    assert (judged(Reconstruction(images, labels, fit=fit, fits=fits), None, own, None) or 0.0) <= GRADIENT_FIT_TOL


class Folded(Rows):
    """Sees how far each pixel is from the middle, and not on which side of it."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(image_shape, classes)
        self.rows = nn.Linear(64, 64)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to logits (N, K)."""
        logits: Tensor = self.head(self.rows((images.flatten(1) - 0.5).square()).tanh())
        return logits


def met(
    document: dict[str, Any],
) -> tuple[ClientWorker, tuple[Sent, ObservationRequest], Observation, Truth]:
    """A worker, what it is asked to observe of the scenario's client 1, and what comes of it."""
    inputs = prepare_inputs(scenario.parse(yaml.safe_dump(document)))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    [account], [attack] = inputs.accounts, inputs.scenario.attacks
    asked = Sent(0, account.arm.weights, account.arm.buffers), ObservationRequest(account.name, [1], attack)
    _, [seen], [truth] = worker.observe(*asked)
    return worker, asked, seen, truth


@pytest.mark.parametrize(("model", "few"), [("Folded", True), ("Rows", False)])
def test_a_sample_that_a_few_others_hide_is_not_acquitted(model: str, few: bool) -> None:
    """An image and its negative have one gradient, but no image between them has it; of a row's mean, all have."""
    document = {
        "name": "t",
        "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20},
        "model": f"{__name__}:{model}",
        "federation": {"rounds": 1, "clients": 4},
        "attacks": [{"name": "dlg", "observes": "gradient", "batch_size": 2}],
    }
    worker, asked, seen, truth = met(document)

    def rows(images: Tensor) -> list[dict[str, Any]]:
        images, labels = images.flip(0), truth.labels.flip(0)  # in any order of the batch
        fit, fits, nats = fit_of(images, labels, seen, worker.arm("none").model)
        found = Reconstruction(images, labels, fit=fit, fits=fits, nats=nats)
        [scored] = worker.score([truth], [found], False, *asked)
        call = {"arm": "none", "batch_size": 2, "victim": 1, "attack": "a", "knowledge": [], "status": "ok"}
        return [row | call | {"message": ""} for row in scored.rows]

    others = rows(1 - truth.inputs if few else truth.inputs.flip(3))
    assert all(row["fit"] <= GRADIENT_FIT_TOL for row in others)
    assert all((row["between"] > 0.1) if few else (row["between"] <= GRADIENT_FIT_TOL) for row in others)
    [told] = compute_findings(others, Criterion("pixels", 20.0))
    assert (told.state, told.reason) == (
        ("inconclusive", Reason.FEW_SAMPLES_FIT) if few else ("not reconstructed", None)
    )
    assert {row["between"] for row in rows(truth.inputs)} == {None}, "nothing lies between"


class Grouped(nn.Module):
    """Reads texts, of which it takes two tokens for one."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(300, 4), nn.Linear(4, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Map texts (N, L) to logits (N, K)."""
        logits: Tensor = self.head(self.table(texts // 2).mean(1))
        return logits


def test_a_text_that_another_hides_is_not_acquitted() -> None:
    document = {
        "name": "t",
        "data": {"name": "text", "length": 8, "vocabulary": 300},
        "model": f"{__name__}:Grouped",
        "federation": {"rounds": 1, "clients": 4},
        "attacks": [{"name": "embedding_rows", "observes": "gradient", "batch_size": 1}],
    }
    worker, asked, seen, truth = met(document)

    def found(texts: Tensor) -> dict[str, Any]:
        fit, fits, nats = fit_of(texts, truth.labels, seen, worker.arm("none").model)
        answer = Reconstruction(texts, truth.labels, fit=fit, fits=fits, nats=nats)
        [[row]] = (scored.rows for scored in worker.score([truth], [answer], False, *asked))
        call = {"arm": "none", "batch_size": 1, "victim": 1, "attack": "a", "knowledge": [], "status": "ok"}
        return row | call | {"message": ""}

    other, same = found(truth.inputs ^ 1), found(truth.inputs)
    assert other["fit"] <= GRADIENT_FIT_TOL
    assert (other["between"], same["between"]) == (torch.inf, None)
    [told] = compute_findings([other], Criterion("tokens", 1.0))
    assert (told.state, told.reason) == ("inconclusive", Reason.FEW_SAMPLES_FIT)


def test_what_cannot_be_compared_does_not_explain() -> None:
    fits, nan = torch.tensor([0.0, torch.nan]), torch.nan
    found = Reconstruction(torch.zeros(1), torch.zeros(1), fit=0.0, fits=fits, nats=nan)
    assert judged(found, None, fits, 5.0) == 1.0, "no nats"
    assert judged(replace(found, fits=torch.full((2,), nan)), None, fits, None) == torch.inf, "the samples' part is 0"


def test_behind_noise_an_answer_has_to_explain_the_buffers() -> None:
    """No noise of the update is on them."""
    fits, right = torch.tensor([0.4, torch.nan]), torch.tensor([0.0, torch.nan])
    found = Reconstruction(torch.zeros(1), torch.zeros(1), fits=fits, nats=5.0)
    assert judged(replace(found, fits=right), 1.0, right, 5.0) == 0
    assert judged(found, 1.0, right, 5.0) == pytest.approx(0.4)
    assert judged(replace(found, nats=None), 1.0, right, 5.0) is None, "buffers alone do not explain an update"


class Slight(nn.Module):
    """Sees the mean brightness, and in a branch whose slopes are a millionth of the others' every pixel."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.bright = nn.Linear(1, 32)
        self.branch, self.head = nn.Linear(64, 32, bias=False), nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to logits (N, K)."""
        flat = images.flatten(1)
        bright = self.bright(flat.mean(1, keepdim=True)).tanh()
        logits: Tensor = self.head(bright + 1e-6 * self.branch(flat))
        return logits


def test_an_answer_has_to_explain_what_moves_little_too() -> None:
    """An image of the same brightness explains all of the gradient but a millionth, which gives the sample away."""
    torch.manual_seed(0)
    model, images, labels = Slight((1, 8, 8), 10), torch.rand(2, 1, 8, 8), torch.tensor([3])
    true, other = images.split(1)
    other = other * true.mean() / other.mean()
    seen = observed(model, true, labels)
    (fit, fits, _), (far, others, _) = (fit_of(one, labels, seen, model) for one in (true, other))
    assert max(fit or 0.0, far or 0.0) < 1e-4, "by all values together both nearly explain it"
    assert (judged(Reconstruction(true, labels, fit=fit, fits=fits), None, fits, None) or 0.0) < GRADIENT_FIT_TOL
    assert (judged(Reconstruction(other, labels, fit=far, fits=others), None, fits, None) or 0.0) > GRADIENT_FIT_TOL


def test_parts_by_which_the_samples_explain_nothing_are_not_asked() -> None:
    """The slope in a bias before a norm is what rounding leaves; what has no angle is not asked either."""
    fits, nan = torch.tensor([0.9, 0.02, torch.nan]), torch.nan
    found = Reconstruction(torch.zeros(1), torch.zeros(1), fit=0.01, fits=fits)
    for own, told in (([0.8, 0.0, nan], 0.02), ([0.0, 0.0, nan], 0.9), ([0.8, 0.8, nan], 0.01)):
        assert judged(found, None, torch.tensor(own), None) == pytest.approx(told)


@pytest.mark.engine
@pytest.mark.parametrize("defence", [{"name": "dropout", "rate": 0.5}, {"name": "precode", "bottleneck": 16}])
def test_an_update_of_one_sample_shows_the_random_numbers_of_the_model(defence: dict[str, Any]) -> None:
    for batch in (1, 2):
        seen, truth, model = one_client({"name": "mlp", "hidden": [64]}, [defence], batch)
        seen, revealed = seen.extra["observation_model"].reveal(seen, model)
        fit, _, _ = fit_of(truth.inputs, truth.labels, seen, revealed)
        assert fit is not None
        assert (fit < 1e-5) == (batch == 1)
