"""Folders of users: files of systems and tools, empty and damaged files, endings, and what images become."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfed.data.base import Dataset
from rayfed.data.images import Encoded, decode_images
from rayfed.data.section import UserData
from rayfed.errors import DataError
from rayfed.registry import build
from tests.helpers.command import run
from tests.helpers.data_fixtures import png, random_images, write_parquet

COLOURS = random_images(24, 6, 6, 3)


def class_folder(root: Path, ending: str = ".png", kind: str = "PNG", **options: Any) -> Path:
    """Twelve images of each of two classes."""
    for place, pixels in enumerate(COLOURS):
        folder = root / ("cat", "dog")[place % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{place:02}{ending}", kind, **options)
    return root


def loaded(path: Path) -> Dataset:
    section = UserData(str(path)).section()
    data: Dataset = build("datasets", section.pop("name"), section).load()
    return data


def counts(notes: Sequence[str]) -> list[int]:
    """The numbers of files in the note on those that are not used."""
    return [int(count) for note in notes for count in re.findall(r"[:,] (\d+) ", note)]


def same(data: Dataset, other: Dataset) -> bool:
    parts = ("train_images", "train_labels", "test_images", "test_labels")
    return data.classes == other.classes and all(np.array_equal(getattr(data, n), getattr(other, n)) for n in parts)


def add(path: Path, content: bytes = b"\0\5\26\7Mac OS X") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


FILES = {
    "macos": (["cat/._00.png", "__MACOSX/cat/._00.png", "__MACOSX/._cat", ".DS_Store", "cat/.DS_Store"], [2]),
    "windows": (["Thumbs.db", "cat/Thumbs.db", "dog/desktop.ini", "$RECYCLE.BIN/x.png"], [1]),
    "tools": ([".ipynb_checkpoints/00-checkpoint.png", "cat/@eaDir/00.png/thumb.png", "cat/__pycache__/x.pyc"], [2]),
    "hidden": ([".git/config", ".thumbnails/a.png", "dog/.gitkeep"], [1]),
    "others": (["cat/notes.txt", "cat/scan.heic", "dog/Makefile", "README.md", "labels.xlsx"], [1, 1, 1, 1]),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_no_samples_change_nothing_and_are_counted(kind: str, tmp_path: Path) -> None:
    clean = loaded(class_folder(tmp_path / "clean"))
    assert clean.remarks == ()
    names, expected = FILES[kind]
    for name in names:
        add(class_folder(tmp_path / "used") / name)
    data = loaded(tmp_path / "used")
    assert same(data, clean)
    assert counts(data.remarks) == expected


def test_empty_files_and_images_outside_the_classes_are_counted(tmp_path: Path) -> None:
    clean, used = loaded(class_folder(tmp_path / "clean")), class_folder(tmp_path / "used")
    add(used / "cat" / "99.png", b"")
    add(used / "cat" / "98.JPG", b"")
    for name in ("stray.png", "cat/more/1.png", "cat/more/2.png"):
        add(used / name, png(COLOURS[0]))
    data = loaded(used)
    assert same(data, clean)
    assert sorted(counts(data.remarks)) == [2, 3]


def test_splits_are_read_without_folders_of_tools(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        class_folder(tmp_path / split)
        add(tmp_path / split / "__MACOSX" / "cat" / "._00.png")
    add(tmp_path / "__MACOSX" / "train" / "._cat")
    data = loaded(tmp_path)
    assert (data.classes, len(data.train_labels), len(data.test_labels)) == (("cat", "dog"), 24, 24)
    assert sorted(counts(data.remarks)) == [3, 24]  # the validation split is not used


LOSSLESS = [(".PNG", "PNG"), (".bmp", "BMP"), (".tif", "TIFF"), (".ppm", "PPM"), ("", "PNG"), (".dib", "BMP")]


@pytest.mark.parametrize(("ending", "kind"), LOSSLESS)
def test_endings_do_not_change_lossless_images(ending: str, kind: str, tmp_path: Path) -> None:
    data = loaded(class_folder(tmp_path / "b", ending, kind))
    assert same(data, loaded(class_folder(tmp_path / "a")))
    assert data.remarks == ()


@pytest.mark.parametrize(
    ("ending", "kind"), [(".jfif", "JPEG"), (".jpe", "JPEG"), (".JPG", "JPEG"), (".webp", "WEBP"), ("", "JPEG")]
)
def test_lossy_images_are_as_pillow_has_them(ending: str, kind: str, tmp_path: Path) -> None:
    data = loaded(class_folder(tmp_path, ending, kind))
    with Image.open(tmp_path / "cat" / f"00{ending}") as picture:
        expected = np.array(picture.convert("RGB")).transpose(2, 0, 1)
    assert len(data.train_labels) + len(data.test_labels) == 24
    assert any(np.array_equal(expected, image) for image in [*data.train_images, *data.test_images])


@pytest.mark.parametrize("ending", [".png", ".jpg", ".gif", ".bmp", ".webp", ".tif", ".ppm", ".jfif"])
@pytest.mark.parametrize("share", [0.6, 0.02])
def test_a_damaged_image_is_named(ending: str, share: float, tmp_path: Path) -> None:
    kind = {".png": "PNG", ".jpg": "JPEG", ".tif": "TIFF", ".jfif": "JPEG"}.get(ending, ending[1:].upper())
    path = class_folder(tmp_path, ending, kind) / "dog" / f"07{ending}"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content)) + 1])
    with pytest.raises(DataError, match=f"07{ending}"):
        loaded(tmp_path)


def test_a_class_without_images_names_those_below_it(tmp_path: Path) -> None:
    add(class_folder(tmp_path) / "emu" / "first" / "1.png", png(COLOURS[0]))
    with pytest.raises(DataError, match=r"emu.*emu/first/1\.png"):
        loaded(tmp_path)


def decoded(path: Path) -> np.ndarray:
    return decode_images([Encoded(str(path), path)], None)[0]


@pytest.mark.parametrize("ending", ["png", "gif", "webp"])
def test_the_first_frame_of_an_animation_is_read_and_noted(ending: str, tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((6, 6, 3), value, np.uint8)) for value in (200, 90, 10)]
    path = tmp_path / f"a.{ending}"
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)
    assert (decoded(path) == 200).all()
    shutil.copy(path, class_folder(tmp_path / "set") / "cat" / path.name)
    assert len(loaded(tmp_path / "set").remarks) == (ending != "png")


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK", "1", "L", "LA", "I;16"])
def test_modes_are_converted(mode: str, tmp_path: Path) -> None:
    """Against the values that were written; a palette of 256 colours and CMYK are exact for these."""
    levels = (np.arange(36, dtype=np.uint8) * 7).reshape(6, 6)
    rgb = np.stack([levels, levels[::-1], levels.T], axis=2)
    source = Image.fromarray(levels) if mode in ("1", "L", "LA") else Image.fromarray(rgb)
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    if mode == "P":
        source.quantize(256).save(path)
    elif mode == "I;16":
        Image.fromarray(levels.astype(np.uint16) * 257).save(path)
    else:
        source.convert(mode).save(path)
    found = decoded(path)
    if mode == "1":
        assert sorted(np.unique(found)) == [0, 255]
    elif mode in ("L", "LA"):
        assert np.array_equal(found[0], levels)
    elif mode == "I;16":
        assert np.array_equal(found[0], levels.astype(np.uint16) * 257)
    else:
        assert np.array_equal(found.transpose(1, 2, 0), rgb)


def test_a_cmyk_jpeg_is_not_inverted(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    Image.new("RGB", (8, 8), (250, 120, 10)).convert("CMYK").save(path, quality=100)
    assert np.abs(decoded(path)[:, 4, 4].astype(int) - [250, 120, 10]).max() <= 3


def test_a_shape_that_is_only_transparency_is_refused(tmp_path: Path) -> None:
    pixels = np.zeros((6, 6, 4), np.uint8)
    pixels[2:4, :, 3] = 255
    Image.fromarray(pixels).save(tmp_path / "shape.png")
    with pytest.raises(DataError, match=r"shape\.png"):
        decoded(tmp_path / "shape.png")
    pixels[..., 3] = 128
    Image.fromarray(pixels).save(tmp_path / "even.png")
    assert (decoded(tmp_path / "even.png") == 0).all()
    pixels[0, 0] = (9, 9, 9, 0)
    Image.fromarray(pixels).save(tmp_path / "seen.png")
    assert decoded(tmp_path / "seen.png").max() == 9


# ---- folders of other kinds ----


def flat(root: Path) -> Path:
    (root / "images").mkdir(parents=True)
    for place in range(10):
        (root / "images" / f"s{place}.png").write_bytes(png(COLOURS[place]))
    return root


@pytest.mark.parametrize(
    ("name", "head", "sep", "encoding"),
    [
        ("labels.csv", "file;label\n", ";", "utf-8-sig"),
        ("labels.txt", "image\tclass\n", "\t", "utf-16"),
        ("labels.tsv", "id\t Diagnosis \n", "\t", "cp1252"),
        ("labels.data", "", "|", "utf-8"),
        ("labels.csv", "", ",", "utf-8"),
    ],
)
def test_tables_of_images_in_other_layouts(name: str, head: str, sep: str, encoding: str, tmp_path: Path) -> None:
    root = flat(tmp_path)
    rows = "".join(f"s{place}.png{sep}{('größer', 'kleiner')[place % 2]}\n" for place in range(8))
    (root / name).write_bytes((head + rows).encode(encoding))
    add(root / f"._{name}")
    add(root / "__MACOSX" / "images" / "s0.png")
    add(root / "README.txt", b"Some words, and others\nand no table\n")
    for path in (root, root / name):
        data = loaded(path)
        assert (data.classes, len(data.train_labels) + len(data.test_labels)) == (("größer", "kleiner"), 8)
        assert sorted(counts(data.remarks)) == [1, 1, 2]  # of macOS, the README, images that the table does not name


def test_masks_and_parquet_and_texts_are_read_without_files_of_tools(tmp_path: Path) -> None:
    for place in range(6):
        for folder, pixels in (("images", COLOURS[place]), ("masks", (COLOURS[place][..., 0] > 99).astype(np.uint8))):
            add(tmp_path / "m" / folder / f"{place}.png", png(pixels))
    clean = loaded(tmp_path / "m")
    add(tmp_path / "m" / "images" / "._0.png")
    add(tmp_path / "m" / "masks" / "Thumbs.db")
    add(tmp_path / "m" / "masks" / "77.png", png(np.zeros((6, 6), np.uint8)))
    data = loaded(tmp_path / "m")
    assert same(data, clean)
    assert sorted(counts(data.remarks)) == [1, 1]
    write_parquet(tmp_path / "p" / "train.parquet", [png(image) for image in COLOURS], [0, 1] * 12)
    add(tmp_path / "p" / "._train.parquet")
    assert loaded(tmp_path / "p").classes == ("0", "1")
    for name in ("a", "b"):
        add(tmp_path / "t" / name / "1.txt", b"one two three four five six seven " * 60)
        add(tmp_path / "t" / name / "._1.txt")
    add(tmp_path / "t" / "__MACOSX" / "a" / "._1.txt")
    assert loaded(tmp_path / "t").classes == ("a", "b")


def test_a_class_folder_with_a_note_in_a_class_has_images(tmp_path: Path) -> None:
    add(class_folder(tmp_path) / "cat" / "origin.txt", b"from a scanner")
    assert UserData(str(tmp_path)).section()["name"] == "image_folder"


@pytest.mark.engine
def test_packing_and_validating_note_the_files_that_are_not_used(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "set")
    add(folder / "cat" / "._00.png")
    code, output = run("pack", str(folder), str(tmp_path / "x.arrow"))
    assert (code, "._00.png" in output) == (0, True), output
    scenario = tmp_path / "s.yaml"
    scenario.write_text(
        f"name: t\ndata: {{name: image_folder, root: {folder}}}\nmodel: mlp\nfederation: {{rounds: 1, clients: 2}}\n"
    )
    code, output = run("validate", str(scenario))
    assert (code, "._00.png" in output) == (0, True), output
