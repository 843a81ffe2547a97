"""Losses: against PyTorch's own and finite differences, targets that are numbers, and attacks on them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed import registry, scenario
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.inference.labels import with_labels
from rayfed.attacks.sealed import attempt
from rayfed.core import losses
from rayfed.core.losses import BinaryCrossEntropy, CrossEntropy, Loss, MeanSquaredError, OwnLoss
from rayfed.errors import UserError
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import compute_findings
from rayfed.gradients import gradient, per_sample_gradients, weights_of
from rayfed.runs import runner
from rayfed.samples import Pixels
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.update import Observation
from tests.helpers.data_fixtures import png

OUTPUTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
BINARY = torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]])


def huber(outputs: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
    return F.huber_loss(outputs, targets, delta=delta)


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().pow(3).sum(1)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def constant(outputs: Tensor, targets: Tensor) -> Tensor:
    return targets.sum().requires_grad_()


def breaks(outputs: Tensor, targets: Tensor) -> Tensor:
    raise ValueError("no such thing")


def coupled(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each sample's loss at its own value, but for a slope in the others' outputs."""
    each = (outputs - targets).square().mean(1)
    return each - 0.9 * (each.mean() - each.mean().detach())


def random(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets + 1e-3 * torch.randn_like(outputs)).square().mean(1)


CASES: dict[str, tuple[Loss, Tensor, Tensor]] = {
    "smoothed": (CrossEntropy(label_smoothing=0.2), CLASSES, F.cross_entropy(OUTPUTS, CLASSES, label_smoothing=0.2)),
    "binary": (BinaryCrossEntropy(), BINARY, F.binary_cross_entropy_with_logits(OUTPUTS, BINARY)),
    "squared": (MeanSquaredError(), BINARY, F.mse_loss(OUTPUTS, BINARY)),
    "own mean": (losses.make_loss("tests.core.test_losses:huber", {"delta": 0.5}), BINARY, huber(OUTPUTS, BINARY, 0.5)),
    "own per sample": (
        losses.make_loss("tests.core.test_losses:per_sample", {}),
        BINARY,
        per_sample(OUTPUTS, BINARY).mean(),
    ),
    "PyTorch's class": (
        losses.make_loss("torch.nn:SmoothL1Loss", {"beta": 2.0}),
        BINARY,
        F.smooth_l1_loss(OUTPUTS, BINARY, beta=2.0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_the_mean_of_its_samples_and_has_the_residuals_that_differences_show(case: str) -> None:
    loss, targets, expected = CASES[case]
    each = loss(OUTPUTS, targets, "none")
    assert each.shape == (6,)
    torch.testing.assert_close(loss(OUTPUTS, targets), expected)
    torch.testing.assert_close(each.mean(), expected)
    torch.testing.assert_close(loss(OUTPUTS, targets, "sum"), 6 * expected)
    moved = OUTPUTS.double()
    up, down = moved.clone(), moved.clone()
    up[2, 1] += 1e-6
    down[2, 1] -= 1e-6
    slope = (loss(up, targets, "sum") - loss(down, targets, "sum")) / 2e-6
    assert float(loss.residuals(OUTPUTS, targets)[2, 1]) == pytest.approx(float(slope), abs=1e-6)


def test_plain_cross_entropy_keeps_its_bits() -> None:
    assert torch.equal(losses.get_loss(nn.Linear(1, 1))(OUTPUTS, CLASSES), F.cross_entropy(OUTPUTS, CLASSES))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("summed", "mean"),
        ("constant", "zero gradient"),
        ("coupled", "mean"),
        ("random", "random"),
        ("breaks", "ValueError: no such"),
    ],
)
def test_a_function_that_is_no_mean_loss_is_refused_with_its_reason(name: str, says: str) -> None:
    loss = losses.make_loss(f"tests.core.test_losses:{name}", {})
    assert isinstance(loss, OwnLoss)
    with pytest.raises(UserError, match=says):
        loss.check(OUTPUTS.clone(), BINARY)


def test_an_own_loss_trains_sample_by_sample_as_together() -> None:
    model = nn.Linear(4, 3)
    losses.attach_loss(model, CASES["own mean"][0])
    inputs = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    together, _ = gradient(model, weights_of(model), {}, inputs, BINARY)
    alone = per_sample_gradients(model, weights_of(model), {}, inputs, BINARY)
    torch.testing.assert_close(together["weight"], alone["weight"].mean(0))
    mask = torch.tensor([1.0, 1, 0, 0, 0, 0])
    first_two, _ = gradient(model, weights_of(model), {}, inputs, BINARY, mask)
    torch.testing.assert_close(first_two["weight"], alone["weight"][:2].mean(0))


# targets


REGRESSION = {
    "name": "t",
    "data": {"name": "diabetes", "regression": True},
    "model": {"name": "mlp", "hidden": [8]},
    "loss": "mean_squared_error",
    "training": {"batch_size": 16, "epochs": 2},
    "federation": {"rounds": 2, "clients": 2},
}


@pytest.mark.engine
def test_regression_is_judged_by_its_error_and_never_by_accuracy(tmp_path: Path) -> None:
    folder = runner.launch(scenario.check_scenario(REGRESSION, "t"), str(tmp_path), local, Progress())
    last = folder.read_table("rounds").to_pylist()[-1]
    assert last["test_accuracy"] is None
    assert last["baseline_accuracy"] is None
    assert 0 < last["test_error"] <= 1.05 * last["baseline_error"] < 0.3
    assert folder.exists("report.html")


def test_two_classes_are_one_output_and_partitions_still_go_by_class() -> None:
    document = REGRESSION | {
        "data": "diabetes",
        "loss": "binary_cross_entropy",
        "partition": {"name": "dirichlet", "alpha": 0.1},
    }
    data = prepare_inputs(scenario.check_scenario(document, "t")).data
    assert data.classes == ("fast",)
    assert np.array_equal(data.train_labels[:, 0], data.groups[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "cross_entropy"}, "needs classes"),
        ({"loss": "binary_cross_entropy"}, "labels that are 0 or 1"),
        ({"partition": {"name": "dirichlet", "alpha": 1.0}}, "iid or quantity"),
        ({"defences": ["dcs2"]}, "'dcs2' needs one class per sample"),
        ({"loss": "tests.core.test_losses:summed"}, "tests.core.test_losses:summed"),
    ],
)
def test_what_does_not_go_with_numbers_is_said_before_a_run(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        prepare_inputs(scenario.check_scenario(REGRESSION | changes, "t"))


def test_images_with_a_list_of_labels_and_a_table_with_targets(tmp_path: Path) -> None:
    images = [{"bytes": png(np.full((1, 4, 4), 10 * i, np.uint8)), "path": None} for i in range(10)]
    labels = pa.array([[i % 2, i // 5, 0] for i in range(10)], pa.list_(pa.int64()))
    pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "several.parquet")
    found = registry.build("datasets", "parquet", {"train": str(tmp_path / "several.parquet")}).load()
    assert found.has_numbers
    assert found.train_labels.shape == (8, 3)
    assert set(np.unique(found.train_labels)) == {0.0, 1.0}
    (tmp_path / "t.csv").write_text("a,y,z\n" + "".join(f"{i},{10 * i},{i % 3}\n" for i in range(10)))
    table = registry.build("datasets", "table", {"path": str(tmp_path / "t.csv"), "targets": ["y", "z"]}).load()
    assert table.classes == ("y", "z")
    assert (table.train_labels.min(), table.train_labels.max()) == (0, 1)


# attacks


def observed(
    loss: Loss, outputs: int, batch: int, activation: nn.Module
) -> tuple[nn.Module, Tensor, Tensor, Observation]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 48), activation, nn.Linear(48, outputs))
    losses.attach_loss(model, loss)
    images, quantities = torch.rand(batch, 1, 4, 4), torch.rand(batch, outputs)
    targets = quantities.round() if isinstance(loss, BinaryCrossEntropy) else quantities
    sent, _ = gradient(model, weights_of(model), {}, images, targets)
    seen = Observation(0, 0, weights_of(model), {}, sent, 1.0, batch, Pixels(1, 4, 4), outputs, has_numbers=True)
    return model, images, targets, seen


def played(name: str, model: nn.Module, seen: Observation, **parameters: object) -> Reconstruction:
    method = registry.build("attacks", name, parameters)
    [found] = attempt(method, [seen], model, [torch.Generator().manual_seed(0)], factor=False)
    assert isinstance(found, Reconstruction)
    return found


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), MeanSquaredError(), CASES["own mean"][0]])
@pytest.mark.parametrize(("name", "outputs", "batch"), [("analytic", 1, 1), ("spear", 3, 2)])
def test_closed_forms_find_samples_and_their_numbers(loss: Loss, name: str, outputs: int, batch: int) -> None:
    model, images, targets, seen = observed(loss, outputs, batch, nn.ReLU())
    found = played(name, model, seen)
    nearest = torch.cdist(images.flatten(1), found.images.flatten(1)).argmin(1)
    torch.testing.assert_close(found.images[nearest], images, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.labels[nearest], targets, atol=1e-3, rtol=0)
    assert found.loss < 1e-4


def test_peel_tries_labels_of_0_and_1_and_says_that_quantities_are_countless() -> None:
    model, images, targets, seen = observed(BinaryCrossEntropy(), 2, 2, nn.Sigmoid())
    found = played("peel", model, seen)
    nearest = torch.cdist(images.flatten(1), found.images.flatten(1)).argmin(1)
    assert torch.equal(found.labels[nearest], targets)
    model, _, _, seen = observed(MeanSquaredError(), 2, 2, nn.Sigmoid())
    refused = played("peel", model, seen)
    assert refused.status == "not applicable"


@pytest.mark.engine
@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), MeanSquaredError()])
def test_matching_fits_numbers_with_the_images(loss: Loss) -> None:
    model, images, targets, seen = observed(loss, 2, 1, nn.Sigmoid())
    found = played("dlg", model, seen, iterations=30, restarts=1)
    torch.testing.assert_close(found.images, images, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.labels, targets, atol=1e-3, rtol=0)


def test_the_label_of_one_sample_is_the_residuals_sign_and_of_more_is_not_claimed() -> None:
    model, _, targets, seen = observed(BinaryCrossEntropy(), 3, 1, nn.ReLU())
    [read] = with_labels([seen], model)
    assert read.labels is not None
    assert torch.equal(read.labels, targets)
    model, _, _, seen = observed(BinaryCrossEntropy(), 3, 2, nn.ReLU())
    assert with_labels([seen], model)[0].labels is None


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothed_labels_are_read(smoothing: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5))
    losses.attach_loss(model, CrossEntropy(label_smoothing=smoothing))
    for batch in (1, 4):
        labels = torch.tensor([4, 1, 1, 3])[:batch]
        sent, _ = gradient(model, weights_of(model), {}, torch.rand(batch, 1, 4, 4), labels)
        seen = Observation(0, 0, weights_of(model), {}, sent, 1.0, batch, Pixels(1, 4, 4), 5)
        [read] = with_labels([seen], model)
        assert read.labels is not None
        assert read.labels.sort().values.tolist() == labels.sort().values.tolist()


def test_attacks_on_classes_say_why_they_do_not_apply_and_the_audit_says_not_measured() -> None:
    model, _, _, seen = observed(MeanSquaredError(), 2, 1, nn.ReLU())
    refused = played("two_images", model, seen)
    assert refused.status == "not applicable"
    row = {
        "arm": "none", "attack": "two_images batch 1, blind", "victim": 0, "sample": 0, "round": 0, "batch_size": 1,
        "knowledge": [], "status": refused.status, "message": refused.message, "psnr": None, "above_baseline": None,
        "identified": None, "true_label": None,
    }  # fmt: skip
    [found] = compute_findings([row], Criterion.from_modality("pixels", None))
    assert found.state == "not measured"
    assert [one.message for one in found.no_results] == [refused.message]


def test_an_error_of_targets_that_were_not_found_is_no_number() -> None:
    from rayfed.metrics.score import Scorer

    scorer, image = Scorer(("psnr", "label_accuracy")), torch.rand(1, 1, 4, 4)
    [row] = scorer.score(image, torch.tensor([[0.25]]), image, torch.tensor([[math.nan]]))
    assert (row["target_error"], row["label_accuracy"], row["true_label"]) == (None, None, None)
    [row] = scorer.score(image, torch.tensor([[0.25]]), image, torch.tensor([[0.5]]))
    assert (row["target_error"], row["target_baseline"]) == (0.25, None)


def test_an_error_of_targets_stands_beside_that_of_a_guess() -> None:
    from rayfed.metrics.guessing import Others
    from rayfed.metrics.score import Scorer

    image, number = torch.rand(1, 1, 4, 4), torch.tensor([[0.25, 1.0]])
    scorer = Scorer(("psnr",), others=Others(image, median=torch.tensor([0.75, 1.0])))
    [row] = scorer.score(image, number, image, number)
    assert (row["target_error"], row["target_baseline"]) == (0.0, 0.25)
    row |= {
        "arm": "none", "attack": "analytic batch 1, blind", "victim": 0, "round": 0, "batch_size": 1, "knowledge": [],
        "status": "ok", "message": "", "above_baseline": 10.0, "identified": 1.0,
    }  # fmt: skip
    [found] = compute_findings([row], Criterion.from_modality("pixels", None))
    assert (found.targets, found.guessed) == (0.0, 0.25)
