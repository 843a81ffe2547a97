"""Images with masks: how they are read, moved with their images, learnt and evaluated."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.metrics import jaccard_score
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as V

from rayfed import registry
from rayfed.core.losses import PlaceCrossEntropy, attach_loss
from rayfed.core.objective import NO_TARGET, count_overlap
from rayfed.data.base import Dataset
from rayfed.data.packing import pack_dataset
from rayfed.data.section import UserData
from rayfed.data.sets.image_masks import is_given
from rayfed.errors import DataError, UserError
from rayfed.gradients import gradient, per_sample_gradients, weights_of
from rayfed.metrics.masks import mask_iou
from rayfed.models.build import build_model
from rayfed.scenario import Augment, check_scenario
from rayfed.simulation.client.augmentation import area_box, augmented
from rayfed.simulation.client.runtime import Evaluation
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.rounds.evaluation import measure_baselines
from tests.helpers.data_fixtures import png, random_images


def load(root: Path, **parameters: Any) -> Dataset:
    data: Dataset = registry.build("datasets", "image_masks", {"root": root, **parameters}).load()
    return data


def classes_of(count: int, height: int = 6, width: int = 8, classes: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, (count, height, width), dtype=np.uint8)


def written(root: Path, masks: np.ndarray, images: np.ndarray | None = None) -> np.ndarray:
    """Images and masks as files `0.png`, `1.png`, ... in `root`; returns the images (N, H, W)."""
    pictures = random_images(*masks.shape) if images is None else images
    for folder, pixels in (("images", pictures), ("masks", masks)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(pixels):
            (root / folder / f"{number}.png").write_bytes(png(one))
    return pictures


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


# ---- reading ----


def test_a_folder_of_images_and_masks_is_read_pixel_by_pixel(tmp_path: Path) -> None:
    masks = classes_of(10)
    masks[2, 3, 4] = 255
    images = written(tmp_path, masks)
    data = load(tmp_path)
    held_out = [2, 7]  # every fifth, by position
    kept = [row for row in range(10) if row not in held_out]
    assert np.array_equal(data.train_images[np.arange(8)], images[kept][:, None])
    assert np.array_equal(data.train_labels, masks[kept])
    expected = masks[held_out].astype(np.int64)
    expected[0, 3, 4] = NO_TARGET
    assert np.array_equal(data.test_labels, expected)
    assert data.classes == ("0", "1", "2")
    assert data.has_places
    assert UserData(str(tmp_path)).section() == {"name": "image_masks", "root": str(tmp_path)}
    assert data.groups[1] == ("all",)


def test_splits_palettes_and_bits_are_read_as_the_numbers_that_they_hold(tmp_path: Path) -> None:
    masks = classes_of(3, classes=2)
    written(tmp_path / "train", masks)
    written(tmp_path / "val", masks[:2])
    palette = Image.fromarray(masks[0], "P")
    palette.putpalette([200, 10, 10, 5, 250, 90])
    (tmp_path / "train" / "masks" / "0.png").write_bytes(encoded(palette))
    (tmp_path / "train" / "masks" / "1.png").unlink()
    (tmp_path / "train" / "masks" / "1.bmp").write_bytes(encoded(Image.fromarray(masks[1] > 0), "BMP"))
    deep = Image.fromarray(masks[2].astype(np.uint16))
    (tmp_path / "train" / "masks" / "2.png").write_bytes(encoded(deep))
    data = load(tmp_path, classes=["background", "object"])
    assert np.array_equal(data.train_labels, masks)
    assert np.array_equal(data.test_labels, masks[:2])
    assert data.classes == ("background", "object")
    assert len(load(tmp_path, train_samples=2).train_labels) == 2


def test_parquet_with_a_column_of_masks(tmp_path: Path) -> None:
    masks, images = classes_of(6), random_images(6, 6, 8)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": png(mask), "path": None} for mask in masks]
    columns = {"image": [png(image) for image in images], "annotation": pa.array(rows, kind)}
    pq.write_table(pa.table(columns), tmp_path / "all.parquet")
    data = load(tmp_path / "all.parquet")
    assert np.array_equal(np.concatenate([data.train_labels, data.test_labels]), masks[[0, 1, 2, 4, 5, 3]])
    assert UserData(str(tmp_path), 16).section() == {"name": "image_masks", "root": str(tmp_path), "size": 16}
    with pytest.raises(DataError, match=r"all.parquet has no column 'lesion': .*`data.mask_column`"):
        load(tmp_path / "all.parquet", mask_column="lesion")
    damaged = {"image": columns["image"], "mask": [png(mask) for mask in masks[:5]] + [None]}
    pq.write_table(pa.table(damaged), tmp_path / "damaged.parquet")
    with pytest.raises(DataError, match=r"damaged.parquet, row 5 \(from 0\): no bytes in column 'mask'"):
        load(tmp_path / "damaged.parquet")


def test_masks_are_resized_with_their_images_by_the_nearest_pixel(tmp_path: Path) -> None:
    places = np.arange(24)
    edges = np.stack([(places >= cut)[:, None] | (places < 3)[None] for cut in (6, 12, 18, 8, 16)])
    written(tmp_path, edges.astype(np.uint8), images=(200 * edges).astype(np.uint8))
    data = load(tmp_path, size=8)
    assert np.array_equal(data.train_images[np.arange(4)][:, 0] > 100, data.train_labels)
    (tmp_path / "other").mkdir()
    masks = classes_of(5, 24, 24)
    written(tmp_path / "other", masks)
    centres = ((np.arange(7) + 0.5) * 24 / 7).astype(int)
    kept = masks[[0, 1, 3, 4]]
    assert np.array_equal(load(tmp_path / "other", size=7).train_labels, kept[:, centres][:, :, centres])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "masks" / "3.png").unlink(), r"images.3\.png has no mask: expected .*masks.3\.png"),
        (
            lambda root: (root / "masks" / "3.png").write_bytes(png(classes_of(1, 3, 8)[0])),
            r"3\.png is 3x8, but image .*3\.png is 6x8 \(height x width\)",
        ),
        (
            lambda root: (root / "masks" / "3.png").write_bytes(png(random_images(6, 8, 3))),
            r"masks.3\.png: the mask is in colour \(mode RGB\)",
        ),
        (
            lambda root: (root / "masks" / "3.png").write_bytes(encoded(Image.fromarray(classes_of(1)[0]), "JPEG")),
            r"masks.3\.png: the mask is a JPEG, whose compression changes class numbers: save masks as PNG",
        ),
        (
            lambda root: Image.fromarray(classes_of(1)[0]).save(root / "masks" / "3.png", bits=2),
            r"masks.3\.png: the mask is a grey PNG with 2 bits, which is read as grey levels",
        ),
        (lambda root: (root / "masks" / "3.png").write_bytes(b"no image"), r"masks.3\.png is not an image"),
        (lambda root: written(root, 255 * classes_of(10, classes=2)), "only class 0 and 255, which is ignored"),
        (lambda root: written(root, 0 * classes_of(10)), r"only class 0$"),
        (
            lambda root: (root / "images" / "3.jpg").write_bytes(png(random_images(6, 8))),
            "have the same name, so their mask is ambiguous: rename one",
        ),
    ],
)
def test_masks_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    written(tmp_path, classes_of(10))
    change(tmp_path)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_a_class_beyond_the_named_ones_is_named_with_its_place(tmp_path: Path) -> None:
    masks = classes_of(10, classes=2)
    masks[4, 5, 1] = 7
    written(tmp_path, masks)
    with pytest.raises(DataError, match=r"4\.png has class 7 at row 5, column 1 \(from 0\), but there are 2 classes"):
        load(tmp_path, classes=["no", "yes"])
    with pytest.raises(DataError, match="no images with masks: expected"):
        load(tmp_path / "masks")


def test_an_image_that_its_exif_orientation_turns_is_told(tmp_path: Path) -> None:
    masks = classes_of(5)
    written(tmp_path, masks)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    stored = Image.fromarray(random_images(8, 6))
    (tmp_path / "images" / "0.png").write_bytes(encoded(stored, exif=exif))
    data = load(tmp_path)
    assert data.train_images.shape[2:] == (6, 8)
    assert "1 images are rotated or mirrored by their EXIF orientation" in data.remarks[0]


def test_a_packed_file_takes_no_masks(tmp_path: Path) -> None:
    written(tmp_path, classes_of(5))
    source = registry.build("datasets", "image_masks", {"root": tmp_path})
    with pytest.raises(DataError, match=r"masks cannot be packed, .*: use the original data set"):
        pack_dataset(source, tmp_path / "packed.arrow", lambda done, count: None)


# ---- augmentation ----


@pytest.mark.parametrize("augment", [Augment(crop=3, flip=True), Augment(scale=0.3, flip=True), Augment(flip=True)])
def test_a_mask_moves_as_its_image_does(augment: Augment) -> None:
    masks = torch.from_numpy(classes_of(40, 12, 12)).long()
    images, labels = augmented(torch.rand(40, 3, 12, 12), masks, augment, np.random.default_rng(2))
    numbers = np.random.default_rng(2).random((40, 25))
    for mask, found, own in zip(masks, labels, numbers, strict=True):
        expected = mask[None]
        if augment.crop:
            top, left = (int(number * 7) for number in own[:2])
            expected = V.crop(V.pad(expected, [3], fill=NO_TARGET), top, left, 12, 12)
        if augment.scale:
            box = area_box(own[2:-1], augment.scale, 12, 12)
            nearest = InterpolationMode.NEAREST_EXACT
            expected = V.resized_crop(expected, *box, size=[12, 12], interpolation=nearest)
        assert torch.equal(found, (V.horizontal_flip(expected) if own[-1] < 0.5 else expected)[0])
    if augment.scale is None:  # an image that is its mask stays so, whatever was drawn
        same, moved = augmented(masks[:, None].float() / 2, masks, augment, np.random.default_rng(3))
        assert torch.equal(2 * same[:, 0], moved.clamp(min=0).float())
    assert images.shape == (40, 3, 12, 12)


# ---- learning and evaluating ----


def test_intersection_over_union_is_that_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(6, 4, 5, 7, generator=draw), torch.randint(4, (6, 5, 7), generator=draw)
    targets[0, :2] = NO_TARGET
    parts = [count_overlap(outputs[some], targets[some]) for some in (slice(0, 2), slice(2, 6))]
    counted = targets != NO_TARGET
    expected = jaccard_score(targets[counted], outputs.argmax(1)[counted], average="macro")
    found = sum((Evaluation(0, 0, 0, overlap=part) for part in parts[1:]), Evaluation(0, 0, 0, overlap=parts[0]))
    assert found.iou == pytest.approx(expected, abs=1e-12)
    assert found.over(6).iou == pytest.approx(expected, abs=1e-12)
    assert np.isnan(Evaluation(0, 0, 0).iou)


def test_pixels_without_a_class_in_either_mask_count_nothing() -> None:
    one, other = torch.tensor([[[0, 1], [NO_TARGET, 1]]]), torch.tensor([[[0, 1], [1, NO_TARGET]]])
    assert mask_iou(one, other).tolist() == mask_iou(other, one).tolist() == [1.0]


def test_a_table_with_labels_or_texts_is_none_of_masks(tmp_path: Path) -> None:
    for columns in ({"text": ["a"], "annotation": ["b"]}, {"label": [0], "mask": [b"png"]}):
        file = tmp_path / f"{'-'.join(columns)}.parquet"
        pq.write_table(pa.table(columns), file)
        assert not is_given(file)


def test_a_class_that_is_neither_predicted_nor_true_counts_in_no_mean() -> None:
    outputs = torch.zeros(1, 3, 2, 2)
    outputs[:, 0] = 1
    targets = torch.tensor([[[0, 0], [0, 1]]])
    assert Evaluation(0, 0, 0, overlap=count_overlap(outputs, targets)).iou == pytest.approx((3 / 4 + 0) / 2)


def test_one_class_everywhere_is_what_guessing_comes_to(tmp_path: Path) -> None:
    masks = classes_of(10)
    written(tmp_path, masks)
    data = load(tmp_path)
    found, (share, classes) = (
        measure_baselines(data, PlaceCrossEntropy()),
        (np.bincount(data.test_labels.ravel()).max(), 3),
    )
    assert found["baseline_iou"] == pytest.approx(share / data.test_labels.size / classes)
    constant = torch.nn.functional.one_hot(torch.tensor(np.bincount(data.test_labels.ravel()).argmax()), 3).float()
    everywhere = constant[None, :, None, None].expand(2, -1, 6, 8)
    counts = count_overlap(everywhere, torch.from_numpy(data.test_labels))
    assert found["baseline_iou"] == pytest.approx(Evaluation(0, 0, 0, overlap=counts).iou)
    assert found["baseline_accuracy"] is not None
    assert found["baseline_perplexity"] is None


def test_masks_of_probabilities_give_the_loss_and_the_slope_of_masks() -> None:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(2, 3, 4, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(3, (2, 4, 5), generator=draw)
    soft = torch.nn.functional.one_hot(targets, 3).movedim(-1, 1).double()
    loss = PlaceCrossEntropy()
    torch.testing.assert_close(loss.per_sample(outputs, soft), loss.per_sample(outputs, targets))
    slopes = [torch.autograd.grad(loss(outputs, one), outputs)[0] for one in (soft, targets)]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(slopes[0], (outputs.softmax(1) - soft) / 40)  # the closed form


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of the user's: one less the overlap of probabilities and masks, sample by sample."""
    true = torch.nn.functional.one_hot(targets.clamp(min=0), outputs.shape[1]).movedim(-1, 1)
    shares = outputs.softmax(1)
    return 1 - 2 * (shares * true).sum((1, 2, 3)) / (shares + true).sum((1, 2, 3))


def test_a_loss_of_the_users_is_of_masks_too(tmp_path: Path) -> None:
    written(tmp_path, classes_of(10, 8, 8))
    loss = prepare_inputs(
        check_scenario(scenario(tmp_path, loss={"name": "tests.data.test_masks:dice"}), "t")
    ).scenario.loss.build()
    outputs, targets = torch.randn(4, 3, 8, 8), torch.from_numpy(classes_of(4, 8, 8)).long()
    torch.testing.assert_close(loss.overlap(outputs, targets), count_overlap(outputs, targets))
    assert loss.overlap(outputs, targets[:, 0, 0]) is None


def unet(shape: tuple[int, int, int], classes: int = 3, **parameters: Any) -> torch.nn.Module:
    model = build_model("unet", {"width": 4, **parameters}, shape, classes, seed=0)
    attach_loss(model, PlaceCrossEntropy())
    return model


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 17, 21)])
def test_a_unet_scores_every_pixel(shape: tuple[int, int, int]) -> None:
    model = unet(shape, norm="batch")
    assert model(torch.rand(2, *shape)).shape == (2, 3, *shape[1:])


def test_a_unet_has_the_parameters_of_its_layers() -> None:
    def block(inputs: int, outputs: int) -> int:
        return 9 * (inputs + outputs) * outputs + 2 * outputs

    expected = block(3, 4) + block(4, 8) + (8 * 4 + 4) + block(8, 4) + (4 * 3 + 3)
    assert sum(p.numel() for p in unet((3, 16, 16), levels=2).parameters()) == expected
    with pytest.raises(UserError, match="unet with 6 levels needs images of at least 32 pixels per side, not 16x16"):
        unet((3, 16, 16), levels=6)


def test_gradients_of_single_masks_are_those_that_their_mean_is_made_of() -> None:
    model = unet((1, 8, 8)).double().eval()
    draw = torch.Generator().manual_seed(2)
    images, masks = torch.rand(3, 1, 8, 8, generator=draw).double(), torch.randint(3, (3, 8, 8), generator=draw)
    masks[1, :6] = NO_TARGET
    weights = weights_of(model)
    each = per_sample_gradients(model, weights, {}, images, masks)
    whole, _ = gradient(model, weights, {}, images, masks)
    alone: list[dict[str, Tensor]] = [gradient(model, weights, {}, images[[i]], masks[[i]])[0] for i in range(3)]
    for name, rows in each.items():
        torch.testing.assert_close(rows, torch.stack([one[name] for one in alone]))
        torch.testing.assert_close(rows.mean(0), whole[name])


def scenario(root: Path, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "t",
        "data": {"name": "image_masks", "root": str(root)},
        "model": {"name": "unet", "width": 4, "levels": 2},
        "federation": {"rounds": 1, "clients": 2},
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"name": "cross_entropy"}}, "has one label per position: set `loss: place_cross_entropy`"),
        ({"model": {"name": "lenet"}}, r"'lenet' returns \(3,\) for samples with \(6, 8\) positions"),
        (
            {"partition": {"name": "dirichlet", "alpha": 1.0}},
            "the labels of data 'image_masks'",
        ),
        ({"defences": [{"name": "mixup"}]}, "'mixup' needs one class per sample"),
    ],
)
def test_what_does_not_go_with_masks_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    written(tmp_path, classes_of(10))
    with pytest.raises(UserError, match=message):
        prepare_inputs(check_scenario(scenario(tmp_path, **changes), "t"))


def test_a_model_of_pixels_needs_masks_and_scores_of_their_size() -> None:
    digits = {"name": "t", "data": {"name": "digits", "train_samples": 40}, "federation": {"rounds": 1, "clients": 2}}
    with pytest.raises(UserError, match="'unet' scores each pixel, but data 'digits'"):
        prepare_inputs(check_scenario(digits | {"model": {"name": "unet", "width": 2}}, "t"))
    with pytest.raises(UserError, match=r"'place_cross_entropy' needs a class per position.*image_masks"):
        prepare_inputs(
            check_scenario(digits | {"model": {"name": "lenet"}, "loss": {"name": "place_cross_entropy"}}, "t")
        )
    with pytest.raises(UserError, match=r"returns \(2, 3, 4, 4\) for 2 images of 1x8x8.*\(2, 3, 8, 8\)"):
        build_model(
            "torch.nn:Conv2d", {"in_channels": 1, "out_channels": 3, "kernel_size": 2, "stride": 2}, (1, 8, 8), 3, 0
        )
