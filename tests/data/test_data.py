"""Data sets: what is loaded is what the files hold, and every broken file is named in the error."""

import gzip
import hashlib
import io
import json
import pickle
import time
import urllib.error
import urllib.request
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io
import skimage.data
import sklearn.datasets
from PIL import Image
from torchvision import datasets

from rayfed import registry
from rayfed.data.base import Dataset, StoredSplit, choose_stratified, hold_out_fifth
from rayfed.data.images import Encoded, decode_images, resize
from rayfed.data.sets import TABLE
from rayfed.data.sets.digits import Digits
from rayfed.errors import DataError
from tests.helpers.data_fixtures import idx_bytes, png, random_images, write_idx_set, write_parquet


def load(name, **parameters):
    return registry.build("datasets", name, parameters).load()


def pillow_resize(image, size):
    """Independent resize of one (C, H, W) image."""
    channels = [np.asarray(Image.fromarray(c).resize((size, size), Image.Resampling.BILINEAR)) for c in image]
    return np.stack(channels)


# ---- what all sets share ----


@pytest.mark.parametrize("name", TABLE)
def test_every_name_is_a_component_with_the_shared_fields(name):
    fields = {p.name: p for p in registry.parameters(registry.find("datasets", name))}
    own = {"words": {"height", "width"}, "text": {"length"}, "text_table": {"length"}, "diabetes": set()}
    size = own.get(name, {"label"} if name == "table" else {"size"})
    assert {*size, "train_samples", "test_samples"} <= fields.keys()
    assert callable(registry.find("datasets", name).load)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": np.zeros((4, 1, 2, 2), np.float32)}, "train_images is float32"),
        ({"train_images": np.zeros((4, 2, 2), np.uint8)}, r"train_images is uint8 \(4, 2, 2\)"),
        ({"test_images": np.zeros((0, 1, 2, 2), np.uint8)}, "test_images"),
        ({"train_labels": np.zeros(3, np.int64)}, r"train_labels is int64 \(3,\), expected int64 \(4,\)"),
        ({"test_labels": np.zeros(2, np.int32)}, "test_labels is int32"),
        (
            {"train_labels": np.array([0, 1, 2, 1])},
            r"train_labels, row 2 \(from 0\): label 2, expected 0 to 1",
        ),
        ({"test_labels": np.array([0, -1])}, "test_labels, row 1"),
        ({"test_images": np.zeros((2, 3, 2, 2), np.uint8)}, "both splits must have the same shape"),
    ],
)
def test_a_dataset_that_does_not_hold_together_is_refused(change, message):
    good = {
        "train_images": np.zeros((4, 1, 2, 2), np.uint8),
        "train_labels": np.array([0, 1, 1, 0]),
        "test_images": np.zeros((2, 1, 2, 2), np.uint8),
        "test_labels": np.array([0, 1]),
        "classes": ("a", "b"),
    }
    assert Dataset(**good).sample.shape == (1, 2, 2)
    with pytest.raises(DataError, match=message):
        Dataset(**{**good, **change})


@pytest.mark.parametrize("seed", range(5))
def test_a_stratified_subset_gives_each_class_its_share(seed):
    rng = np.random.default_rng(seed)
    labels = rng.choice(7, size=503, p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.03, 0.02])
    for samples in (1, 10, 100, 503):
        chosen = choose_stratified(labels, samples)
        assert len(np.unique(chosen)) == samples
        share = np.bincount(labels, minlength=7) * samples / len(labels)
        assert np.abs(np.bincount(labels[chosen], minlength=7) - share).max() <= 1
        np.testing.assert_array_equal(chosen, choose_stratified(labels, samples))


def test_sample_limits_take_a_subset_of_the_split():
    everything, few = load("digits", size=None), load("digits", size=None, train_samples=100, test_samples=20)
    assert (len(few.train_images), len(few.test_images)) == (100, 20)
    assert np.bincount(few.train_labels).min() >= 9
    assert {i.tobytes() for i in few.train_images} <= {i.tobytes() for i in everything.train_images}
    with pytest.raises(DataError, match="test_samples is 360, but the split has only 359"):
        load("digits", test_samples=360)


@pytest.mark.parametrize(("height", "width", "size"), [(8, 8, 28), (28, 28, 14), (40, 30, 16), (16, 16, 16)])
def test_resize_agrees_with_pillow(height, width, size):
    images = random_images(5, 3, height, width)
    expected = np.stack([pillow_resize(image, size) for image in images]).astype(int)
    resized = resize(images, size)
    assert resized.dtype == np.uint8
    assert np.abs(resized - expected).max() <= 1  # the two round half levels differently


# ---- shipped in wheels ----


def test_digits_are_those_of_scikit_learn():
    data = load("digits", size=None)
    raw = sklearn.datasets.load_digits()
    expected = Counter(
        (np.floor(image * 255 / 16 + 0.5).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(raw.images, raw.target, strict=True)
    )
    images, labels = (
        np.concatenate([data.train_images, data.test_images]),
        [*data.train_labels, *data.test_labels],
    )
    assert Counter((i.tobytes(), int(n)) for i, n in zip(images, labels, strict=True)) == expected
    assert len(data.test_images) == 359
    assert np.abs(np.bincount(data.test_labels) - np.bincount(raw.target) / 5).max() <= 1
    assert data.classes == tuple("0123456789")


def test_digits_are_enlarged_to_28_by_default():
    small, data = load("digits", size=None), load("digits")
    assert data.sample.shape == (1, 28, 28)
    for original, enlarged in zip(small.test_images[:20], data.test_images[:20], strict=True):
        assert np.abs(pillow_resize(original, 28).astype(int) - enlarged).max() <= 1


PHOTOGRAPHS = {
    "astronaut": skimage.data.astronaut,
    "cat": skimage.data.chelsea,
    "coffee": skimage.data.coffee,
    "flower": lambda: sklearn.datasets.load_sample_image("flower.jpg"),
    "motorcycle": lambda: skimage.data.stereo_motorcycle()[0],
    "rocket": skimage.data.rocket,
    "temple": lambda: sklearn.datasets.load_sample_image("china.jpg"),
}


@pytest.mark.parametrize("size", [32, 100])
def test_photos_are_every_cell_of_the_grid_exactly_once(size):
    data = load("photos", size=size)
    assert data.classes == tuple(PHOTOGRAPHS)
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels])
    for label, name in enumerate(data.classes):
        photo = PHOTOGRAPHS[name]()
        corners = [
            (y, x) for y in range(0, photo.shape[0] - size + 1, size) for x in range(0, photo.shape[1] - size + 1, size)
        ]
        cells = Counter(photo[y : y + size, x : x + size].transpose(2, 0, 1).tobytes() for y, x in corners)
        assert Counter(image.tobytes() for image in images[labels == label]) == cells
    share = np.bincount(labels) / 5
    assert np.abs(np.bincount(data.test_labels, minlength=len(PHOTOGRAPHS)) - share).max() <= 1


def test_patches_larger_than_a_photograph_are_refused():
    with pytest.raises(DataError, match=r"size 301 exceeds the size of .*chelsea.png: 300x451"):
        load("photos", size=301)


# ---- idx files ----


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "."),
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "."),
        ("fashion_mnist", "fashion_mnist"),
        ("fashion_mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_files_are_read_wherever_they_may_lie(tmp_path, monkeypatch, name, folder, packed):
    content = write_idx_set(tmp_path / folder, packed=packed)
    monkeypatch.setenv("SOME_ROOT", str(tmp_path))
    data = load(name, root="$SOME_ROOT")
    np.testing.assert_array_equal(data.train_images[:, 0], content["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.test_images[:, 0], content["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.train_labels, content["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(data.test_labels, content["t10k-labels-idx1-ubyte"])
    assert data.classes == tuple(datasets.FashionMNIST.classes) if name == "fashion_mnist" else tuple("0123456789")


def test_a_root_with_both_sets_does_not_mix_them_up(tmp_path):
    write_idx_set(tmp_path, seed=1)
    fashion = write_idx_set(tmp_path / "FashionMNIST" / "raw", seed=2)
    data = load("fashion_mnist", root=str(tmp_path))
    np.testing.assert_array_equal(data.train_images[:, 0], fashion["train-images-idx3-ubyte"])


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def broken_idx(content):
    """Case -> file, its bytes, what the error must say."""
    images, labels = idx_bytes(content[IMAGES]), idx_bytes(content[LABELS])
    too_large = np.where(np.arange(20) == 7, 10, content[LABELS])
    return {
        "truncated": (IMAGES, images[:-1], ["truncated", "20 x 6 x 5", "616 bytes", "found 615"]),
        "header only": (IMAGES, images[:9], ["truncated", "header of 16 bytes", "found 9"]),
        "too long": (LABELS, labels + b"\0", ["too long", "28 bytes", "found 29"]),
        "labels for images": (IMAGES, labels, ["0x00000801", "0x00000803", "3 dimensions"]),
        "no idx": (LABELS, b"<html>not found</html>", ["0x3c68746d", "0x00000801"]),
        "empty": (LABELS, b"", ["expected 0x00000801"]),
        "packed, truncated": (f"{IMAGES}.gz", gzip.compress(images)[:-60], ["truncated", "616 bytes"]),
        "packed, corrupt": (f"{IMAGES}.gz", b"no gzip", ["cannot be read"]),
        "fewer labels": (LABELS, idx_bytes(content[LABELS][:19]), [IMAGES, "20 images", "19 labels"]),
        "mislabelled": (LABELS, idx_bytes(too_large), ["row 7 (from 0)", "label 10", "expected 0 to 9"]),
    }


@pytest.mark.parametrize("case", broken_idx({IMAGES: np.zeros((20, 6, 5)), LABELS: np.zeros(20)}))
def test_a_broken_idx_file_is_named_with_what_was_expected(tmp_path, case):
    name, content, says = broken_idx(write_idx_set(tmp_path))[case]
    (tmp_path / name.removesuffix(".gz")).unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load("mnist", root=str(tmp_path))
    for words in (str(tmp_path / name), *says):
        assert words in str(caught.value)


def test_a_missing_idx_file_is_named_with_the_places_for_it(tmp_path):
    write_idx_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        DataError,
        match=r"t10k-labels-idx1-ubyte is missing from .*set their folder \(--set data.root=FOLDER\).*download: true",
    ):
        load("mnist", root=str(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100", "svhn"])
def test_a_failed_download_says_which_files_to_put_where(tmp_path, monkeypatch, name):
    def no_network(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    with pytest.raises(DataError, match=r"no route to host") as caught:
        load(name, root=str(tmp_path), download=True)
    assert str(tmp_path) in str(caught.value)
    assert registry.find("datasets", name).layout in str(caught.value)


def test_nothing_is_downloaded_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("went to the network"))
    for name in ("mnist", "cifar10", "cifar100", "svhn"):
        with pytest.raises(DataError, match="is missing"):
            load(name, root=str(tmp_path))
    write_idx_set(tmp_path)
    load("mnist", root=str(tmp_path), download=True)  # all files are there


@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion_mnist", "fashion-mnist")])
def test_the_real_idx_sets_load_fast_and_exactly(shared_data, name, folder):
    root = shared_data / folder
    start = time.process_time()
    data = load(name, root=str(root))
    assert time.process_time() - start < 2
    for split, images, labels in (
        ("train", data.train_images, data.train_labels),
        ("t10k", data.test_images, data.test_labels),
    ):
        pixels = gzip.decompress((root / f"{split}-images-idx3-ubyte.gz").read_bytes())[16:]
        numbers = gzip.decompress((root / f"{split}-labels-idx1-ubyte.gz").read_bytes())[8:]
        assert images.shape == (len(numbers), 1, 28, 28)
        assert images.tobytes() == pixels
        assert labels.tolist() == list(numbers)
    if name == "mnist":  # the counts that the literature gives
        assert np.bincount(data.train_labels).tolist() == [
            5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949
        ]  # fmt: skip


# ---- torchvision's own layouts ----


def write_cifar(root, monkeypatch, source, key, meta_key):
    """torchvision's batches with images and labels of our own, and the checksums to match."""
    folder = root / source.base_folder
    folder.mkdir()
    content = {}

    def write(name, entry):
        (folder / name).write_bytes(pickle.dumps(entry))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    for seed, name in enumerate(file for file, _ in source.train_list + source.test_list):
        content[name] = (random_images(4, 3, 32, 32, seed=seed), np.arange(4) + seed % 3)
    lists = {
        part: [
            write(name, {"data": content[name][0].reshape(4, -1), key: content[name][1].tolist()})
            for name, _ in getattr(source, part)
        ]
        for part in ("train_list", "test_list")
    }
    name, md5 = write(source.meta["filename"], {meta_key: [f"class {i}" for i in range(10)]})
    # torchvision's CIFAR100 inherits, so each attribute is set on the class itself
    for attribute, value in {**lists, "meta": {"filename": name, "key": meta_key, "md5": md5}}.items():
        monkeypatch.setattr(source, attribute, value)
    return content


CIFAR = [
    ("cifar10", datasets.CIFAR10, "labels", "label_names"),
    ("cifar100", datasets.CIFAR100, "fine_labels", "fine_label_names"),
]


@pytest.mark.parametrize(("name", "source", "key", "meta_key"), CIFAR)
def test_cifar_in_torchvisions_layout(tmp_path, monkeypatch, name, source, key, meta_key):
    content = list(write_cifar(tmp_path, monkeypatch, source, key, meta_key).values())
    data = load(name, root=str(tmp_path))
    np.testing.assert_array_equal(data.train_images, np.concatenate([images for images, _ in content[:-1]]))
    np.testing.assert_array_equal(data.train_labels, np.concatenate([labels for _, labels in content[:-1]]))
    np.testing.assert_array_equal(data.test_images, content[-1][0])
    np.testing.assert_array_equal(data.test_labels, content[-1][1])
    assert data.classes == tuple(f"class {i}" for i in range(10))


@pytest.mark.parametrize(("name", "source", "key", "meta_key"), CIFAR)
def test_a_broken_cifar_batch_is_named(tmp_path, monkeypatch, name, source, key, meta_key):
    write_cifar(tmp_path, monkeypatch, source, key, meta_key)
    batch = tmp_path / source.base_folder / source.test_list[0][0]
    batch.write_bytes(batch.read_bytes()[:-10])
    with pytest.raises(DataError, match=f"{batch} is truncated or altered: expected MD5 {source.test_list[0][1]}"):
        load(name, root=str(tmp_path))
    batch.unlink()
    with pytest.raises(DataError, match=f"{batch} is missing; expected torchvision's folder"):
        load(name, root=str(tmp_path))


def test_svhn(tmp_path, monkeypatch):
    content = {}
    for split in ("train", "test"):
        images, labels = random_images(11, 3, 32, 32), np.arange(1, 12) % 11
        labels[labels == 0] = 10
        content[split] = (images, labels)
        path = tmp_path / f"{split}_32x32.mat"
        scipy.io.savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None]})
        md5 = hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setitem(datasets.SVHN.split_list, split, ["", path.name, md5])
    data = load("svhn", root=str(tmp_path))
    np.testing.assert_array_equal(data.train_images, content["train"][0])
    np.testing.assert_array_equal(data.train_labels, content["train"][1] % 10)
    np.testing.assert_array_equal(data.test_labels, content["test"][1] % 10)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"test_32x32.mat is truncated or altered.*\(100 bytes\)"):
        load("svhn", root=str(tmp_path))


def test_cifar_from_parquet_shards_in_root_and_one_folder_below(tmp_path):
    images = random_images(12, 32, 32, 3)
    names = [str(i) for i in range(100)]
    columns = {"image_column": "img", "label_column": "fine_label"}  # as on the Hugging Face hub
    files = [
        tmp_path / "data" / "train-00000.parquet",
        tmp_path / "train-00001.parquet",
        tmp_path / "val.parquet",
    ]
    for i, path in enumerate(files):
        rows = slice(4 * i, 4 * i + 4)
        write_parquet(path, [png(image) for image in images[rows]], [i, 1, 2, 99], names, **columns)
    data = load("cifar100", root=str(tmp_path))
    np.testing.assert_array_equal(data.train_images, images[:8].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.train_labels, [0, 1, 2, 99, 1, 1, 2, 99])
    np.testing.assert_array_equal(data.test_images, images[8:].transpose(0, 3, 1, 2))
    assert data.remarks == ()
    stream = io.BytesIO()
    Image.fromarray(images[4]).save(stream, "JPEG")
    write_parquet(files[1], [stream.getvalue()] * 4, [1, 1, 2, 99], names, **columns)
    [said] = load("cifar100", root=str(tmp_path)).remarks
    assert "train-00000.parquet (PNG), train-00001.parquet (JPEG)" in said
    files[2].unlink()
    with pytest.raises(DataError, match=r"expected .*val"):
        load("cifar100", root=str(tmp_path))


@pytest.mark.engine
def test_the_real_cifar10_files(shared_data):
    root = shared_data / "cifar10"
    data = load("cifar10", root=str(root))
    assert len(data.train_images) == sum(pq.ParquetFile(f).metadata.num_rows for f in root.glob("*train.parquet"))
    assert len(data.test_images) == sum(pq.ParquetFile(f).metadata.num_rows for f in root.glob("*test.parquet"))
    names = pq.read_schema(root / "jpeg-train.parquet").metadata[b"huggingface"].decode()
    assert list(data.classes) == json.loads(names)["info"]["features"]["label"]["names"]
    rows = pq.read_table(root / "lossless-test.parquet").to_pylist()
    expected = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))).transpose(2, 0, 1) for row in rows]
    np.testing.assert_array_equal(data.test_images[-len(rows) :], expected)
    assert data.test_labels[-len(rows) :].tolist() == [row["label"] for row in rows]


# ---- Parquet ----


def test_parquet_round_trip_with_a_test_file(tmp_path):
    images = random_images(9, 5, 7)
    pictures = [png(image) for image in images]
    write_parquet(tmp_path / "a.parquet", pictures[:4], [0, 1, 2, 0], ["x", "y", "z"])
    write_parquet(tmp_path / "b.parquet", pictures[4:6], [2, 2], ["x", "y", "z"])
    test = write_parquet(tmp_path / "other" / "t.parquet", pictures[6:], [1, 0, 1], ["x", "y", "z"])
    data = load("parquet", train=str(tmp_path), test=str(test))
    np.testing.assert_array_equal(data.train_images[:, 0], images[:6])
    np.testing.assert_array_equal(data.test_images[:, 0], images[6:])
    assert data.train_labels.tolist() == [0, 1, 2, 0, 2, 2]
    assert data.test_labels.tolist() == [1, 0, 1]
    assert data.classes == ("x", "y", "z")
    [said] = data.remarks
    assert "are read as one training split: a.parquet, b.parquet." in said
    assert load("parquet", train=str(tmp_path / "a.parquet"), test=str(test)).remarks == ()


def test_parquet_without_a_test_file_holds_out_a_stratified_fifth(tmp_path):
    images = random_images(50, 4, 4)
    labels = np.sort(np.arange(50) % 5)
    path = write_parquet(tmp_path / "a.parquet", [png(i) for i in images], labels.tolist())
    data = load("parquet", train=str(path))
    assert np.bincount(data.test_labels).tolist() == [2] * 5
    assert data.classes == tuple("01234")
    found = Counter(i.tobytes() for i in (*data.train_images, *data.test_images))
    assert found == Counter(i.tobytes() for i in images)
    again = load("parquet", train=str(path))
    np.testing.assert_array_equal(data.test_images, again.test_images)


def test_grey_and_colour_images_together_become_rgb(tmp_path):
    grey, colour = random_images(5, 6, 6), random_images(1, 6, 6, 3)
    train = write_parquet(tmp_path / "a.parquet", [png(i) for i in grey], [0] * 5)
    test = write_parquet(tmp_path / "b.parquet", [png(colour[0])], [0])
    data = load("parquet", train=str(train), test=str(test))
    assert data.sample.shape == (3, 6, 6)
    for channel in range(3):
        np.testing.assert_array_equal(data.train_images[:, channel], grey)
    np.testing.assert_array_equal(data.test_images[0], colour[0].transpose(2, 0, 1))


def test_images_of_different_sizes_need_a_size(tmp_path):
    pictures = [png(random_images(1, 6, 6)[0])] * 4 + [png(random_images(1, 8, 5)[0])]
    path = write_parquet(tmp_path / "a.parquet", pictures, [0] * 5)
    with pytest.raises(DataError, match=r"row 0.* is 6x6, .*row 4 .* is 8x5 .*set `data.size: 6`"):
        load("parquet", train=str(path))
    assert load("parquet", train=str(path), size=4).sample.shape == (1, 4, 4)


GOOD = [png(image) for image in random_images(6, 4, 4)]
BROKEN_PARQUET = {
    "null label": (GOOD, [0, 1, None, 1, 0, 1], {}, ["row 2 (from 0)", "no label in column 'label'"]),
    "negative label": (GOOD, [0, 1, 0, -1, 0, 1], {}, ["row 3 (from 0)", "label -1", "expected 0 to 1"]),
    "label beyond the names": (
        GOOD,
        [0, 1, 0, 1, 2, 1],
        {"names": ["a", "b"]},
        ["row 4", "label 2", "0 to 1"],
    ),
    "labels that are neither numbers nor names": (
        GOOD,
        [True] * 6,
        {"label_type": pa.bool_()},
        ["'label' is bool", "expected numbers"],
    ),
    "no label column": (GOOD, [0] * 6, {"label_column": "y"}, ["no column 'label'", "image, y"]),
    "no bytes": ([*GOOD[:5], None], [0] * 6, {}, ["row 5 (from 0)", "no bytes in column 'image'"]),
    "truncated image": (
        [GOOD[0], GOOD[1][:50], *GOOD[2:]],
        [0] * 6,
        {},
        ["row 1 (from 0)", "cannot be decoded"],
    ),
    "no image": ([*GOOD[:5], b"text"], [0] * 6, {}, ["row 5 (from 0)", "is not an image"]),
    "no rows": ([], [], {}, ["has no rows"]),
    "too few": (GOOD[:4], [0] * 4, {}, ["has 4 samples", "at least 5"]),
}


@pytest.mark.parametrize("case", BROKEN_PARQUET)
def test_a_broken_parquet_file_is_named_with_the_row(tmp_path, case):
    images, labels, options, says = BROKEN_PARQUET[case]
    path = write_parquet(tmp_path / "broken.parquet", images, labels, **options)
    with pytest.raises(DataError) as caught:
        load("parquet", train=str(path))
    for words in (str(path), *says):
        assert words in str(caught.value)


def test_a_truncated_parquet_file_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", GOOD, [0] * 6)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{path} cannot be read: .*expected a complete Parquet file"):
        load("parquet", train=str(path))


def test_an_image_column_of_another_layout_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [[1, 2]] * 6, "label": [0] * 6}), path)
    with pytest.raises(DataError, match=f"{path} has no column 'image'; the columns are image, label"):
        load("parquet", train=str(path))
    with pytest.raises(DataError, match=f"{path}: column 'image' is list.*expected binary or struct"):
        load("parquet", train=str(path), image_column="image")


def test_files_that_disagree_or_overlap_are_refused(tmp_path):
    one = write_parquet(tmp_path / "1.parquet", GOOD, [0] * 6, ["a", "b"])
    two = write_parquet(tmp_path / "2.parquet", GOOD, [0] * 6, ["b", "a"])
    with pytest.raises(DataError, match=f"{two} and {one} have different class names"):
        load("parquet", train=str(one), test=str(two))
    two.unlink()
    with pytest.raises(DataError, match=f"{one} is in both the training and the test split"):
        load("parquet", train=str(tmp_path), test=str(one))
    with pytest.raises(DataError, match="nowhere"):
        load("parquet", train=str(tmp_path / "nowhere"))


def test_other_formats_of_more_than_eight_bits_are_refused():
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(stream, "PPM")
    with pytest.raises(DataError, match=r"more than 8 bits per channel"):
        decode_images([Encoded("here", stream.getvalue())], None)


@pytest.mark.parametrize(
    ("file", "shape", "classes", "tests"),
    [
        ("faces/orl.parquet", (1, 112, 92), 40, [2] * 40),
        ("faces/lfw-color-subset.parquet", (3, 250, 250), 10, [2] * 10),
        ("imagenet-sample/sample-224.parquet", (3, 224, 224), 1000, None),
    ],
)
def test_the_real_parquet_files(shared_data, file, shape, classes, tests):
    path = shared_data / file
    data = load("parquet", train=str(path))
    rows = pq.read_table(path).to_pylist()
    assert data.sample.shape == shape
    assert len(data.classes) == classes
    assert tests is None or np.bincount(data.test_labels).tolist() == tests
    expected = Counter(
        (np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))).tobytes(), row["label"]) for row in rows
    )
    pairs = [
        *zip(data.train_images, data.train_labels, strict=True),
        *zip(data.test_images, data.test_labels, strict=True),
    ]
    assert Counter((image.transpose(1, 2, 0).tobytes(), int(label)) for image, label in pairs) == expected


# ---- image folders ----


def write_folder(root, counts, seed=0):
    """`counts[class]` grey images a class; returns them by class."""
    content = {}
    for i, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        content[name] = random_images(count, 6, 6, seed=seed + i)
        for j, image in enumerate(content[name]):
            (root / name / f"{j:03}.png").write_bytes(png(image))
    return content


def test_image_folder_with_both_splits(tmp_path):
    train = write_folder(tmp_path / "train", {"dog": 3, "cat": 2})
    test = write_folder(tmp_path / "test", {"dog": 1, "cat": 2}, seed=9)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    data = load("image_folder", root=str(tmp_path))
    assert data.classes == ("cat", "dog")
    np.testing.assert_array_equal(data.train_images[:, 0], np.concatenate([train["cat"], train["dog"]]))
    np.testing.assert_array_equal(data.test_images[:, 0], np.concatenate([test["cat"], test["dog"]]))
    assert data.train_labels.tolist() == [0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 0, 1]


def test_image_folder_without_splits_holds_out_a_fifth(tmp_path):
    content = write_folder(tmp_path, {"a": 10, "b": 20})
    data = load("image_folder", root=str(tmp_path))
    assert np.bincount(data.test_labels).tolist() == [2, 4]
    for label, name in enumerate("ab"):
        images = [
            *data.train_images[data.train_labels == label],
            *data.test_images[data.test_labels == label],
        ]
        assert Counter(i.tobytes() for i in images) == Counter(i.tobytes() for i in content[name])


def test_a_broken_image_folder_is_named(tmp_path):
    def refused(root, *says):
        with pytest.raises(DataError) as caught:
            load("image_folder", root=str(root))
        for words in says:
            assert words in str(caught.value)

    refused(tmp_path / "nowhere", f"{tmp_path / 'nowhere'} is not a folder")
    refused(tmp_path, f"{tmp_path} has no class folder")
    write_folder(tmp_path / "train", {"a": 5, "b": 5})
    refused(tmp_path, f"{tmp_path / 'test'} is missing")
    write_folder(tmp_path / "test", {"a": 1, "c": 1})
    refused(tmp_path, f"{tmp_path / 'test' / 'c'} is not a class of the training split; expected a, b")
    (tmp_path / "test" / "c").rename(tmp_path / "test" / "b")
    (tmp_path / "test" / "b" / "000.png").rename(tmp_path / "test" / "b" / "000.txt")
    refused(tmp_path, f"{tmp_path / 'test' / 'b'} has no image")
    broken = tmp_path / "train" / "a" / "002.png"
    (tmp_path / "test" / "b" / "000.txt").rename(tmp_path / "test" / "b" / "000.png")
    broken.write_bytes(broken.read_bytes()[:40])
    refused(tmp_path, f"{broken} is not an image")


def test_a_held_out_fifth_exists_even_with_one_image_a_class():
    split = StoredSplit(random_images(10, 1, 2, 2), np.arange(10))
    train, test = hold_out_fifth(split, "here")
    assert (len(train.labels), len(test.labels)) == (8, 2)
    assert sorted([*train.labels, *test.labels]) == list(range(10))


def test_public_samples_belong_to_no_client_and_every_class_gives_its_share() -> None:
    data = Digits(size=8).load()
    split = data.with_public(0.25)
    assert split.public_images is not None
    assert split.public_labels is not None
    assert len(split.public_labels) == round(0.25 * len(data.train_labels))
    rows = np.concatenate([split.train_images, split.public_images]).reshape(len(data.train_labels), -1)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, data.train_images))
    shares = np.bincount(split.public_labels, minlength=10) / np.bincount(data.train_labels, minlength=10)
    assert np.all(abs(shares - 0.25) < 0.01)
    with pytest.raises(DataError, match="leaves no public or no private sample"):
        data.with_public(1e-6)


def test_the_toys_points_are_the_gaussians_on_the_grid_of_8_bits():
    data = load("gaussian_toy", samples=20000, seed=3)
    assert data.train_images.shape == (36000, 1, 1, 2)
    assert data.test_images.shape == (4000, 1, 1, 2)
    points = data.train_images.reshape(2, 18000, 2) * (8 / 255) - 4  # by client
    labels = data.train_labels.reshape(2, 18000)
    for client, label, mean, deviation in (
        (0, 0, (-2.0, -1.0), 0.6),
        (0, 1, (-0.6, 0.8), 0.5),
        (1, 0, (1.0, -1.4), 0.9),
    ):
        found = points[client, labels[client] == label]
        margin = 5 * deviation / np.sqrt(len(found))  # five standard errors, and the edge cuts off less than that
        np.testing.assert_allclose(found.mean(0), mean, atol=margin)
        np.testing.assert_allclose(found.std(0), deviation, atol=margin)
    again = load("gaussian_toy", samples=20000, seed=3)
    assert np.array_equal(again.train_images, data.train_images)


def test_a_label_beyond_all_classes_is_named_before_names_are_made_for_those_below(tmp_path):
    path = write_parquet(tmp_path / "odd.parquet", GOOD, [0, 1, 0, 1, 0, 10**12])
    with pytest.raises(
        DataError, match=r"odd\.parquet: label 1000000000000, expected class numbers from 0, below 100,000"
    ):
        load("parquet", train=str(path))


def test_a_column_whose_name_is_no_text_is_named(tmp_path):
    path = write_parquet(tmp_path / "odd.parquet", GOOD, [0, 1] * 3)
    path.write_bytes(path.read_bytes().replace(b"label", b"l\xffbel"))
    with pytest.raises(DataError, match=r"odd\.parquet cannot be read"):
        load("parquet", train=str(path))
