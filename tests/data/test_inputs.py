"""People's own files: 16 bits, DICOM, TIFF, orientation, tables of labels, and what Hugging Face leaves on disk."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rayfed.data import packing
from rayfed.data.base import Dataset, load_in_memory
from rayfed.data.images import Encoded, decode_images
from rayfed.data.section import UserData
from rayfed.errors import DataError, UserError
from rayfed.registry import build
from tests.conftest import imported
from tests.helpers.data_fixtures import png, random_images, write_parquet

DEEP = np.random.default_rng(1).integers(0, 65536, (5, 7), dtype=np.uint16)
DEEP[0, :2] = 0, 65535


def decoded(content: bytes) -> np.ndarray:
    [image] = decode_images([Encoded("here", content)], None)
    return image


def png_of_16_bits(pixels: np.ndarray) -> bytes:
    """A PNG (H, W) or (H, W, C), written by the specification, by no library that reads it here."""
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    parts = (struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff_of_16_bits(pixels: np.ndarray, photometric: int = 1, bits: int = 16) -> bytes:
    """A grey TIFF (H, W), one strip, by the specification: little-endian, header, directory, pixels."""
    tags = [(256, pixels.shape[1]), (257, pixels.shape[0]), (258, bits), (259, 1), (262, photometric), (273, 134)]
    tags += [(277, 1), (278, pixels.shape[0]), (279, 2 * pixels.size), (339, 1)]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHIHH", tag, 3, 1, v, 0) for tag, v in tags)
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4) + pixels.astype("<u2").tobytes()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_png_of_16_bits_keeps_all_of_them(channels: int) -> None:
    pixels = DEEP if channels == 1 else np.stack([np.roll(DEEP, i) for i in range(channels)], axis=2)
    found = decoded(png_of_16_bits(pixels))
    assert found.dtype == np.uint16
    colours = {1: 1, 2: 1, 3: 3, 4: 3}[channels]  # transparency is dropped
    assert np.array_equal(found, pixels.reshape(5, 7, channels)[..., :colours].transpose(2, 0, 1))


def test_a_grey_tiff_of_16_bits_goes_by_its_white_and_its_bits() -> None:
    assert np.array_equal(decoded(tiff_of_16_bits(DEEP))[0], DEEP)
    assert np.array_equal(decoded(tiff_of_16_bits(DEEP, photometric=0))[0], 65535 - DEEP)


def test_tiffs_of_several_channels_or_pages_keep_them() -> None:
    tifffile = imported("tifffile", "medical")

    def written(pixels: np.ndarray, **how: Any) -> bytes:
        file = BytesIO()
        tifffile.imwrite(file, pixels, **how)
        return file.getvalue()

    colour = np.stack([DEEP, DEEP[::-1], DEEP[:, ::-1]], axis=2)
    assert np.array_equal(decoded(written(colour, photometric="rgb")), colour.transpose(2, 0, 1))
    bands = random_images(1, 6, 5, 4)[0]  # such as red, green, blue and infrared
    extra = {"photometric": "rgb", "extrasamples": ["unspecified"]}
    assert np.array_equal(decoded(written(bands, **extra)), bands.transpose(2, 0, 1))
    clear = {"photometric": "rgb", "extrasamples": ["unassalpha"]}
    assert np.array_equal(decoded(written(bands, **clear)), bands[..., :3].transpose(2, 0, 1))
    pages = random_images(5, 6, 7)
    assert np.array_equal(decoded(written(pages, photometric="minisblack")), pages)
    with pytest.raises(DataError, match="here: the TIFF's values are float32"):
        decoded(written(DEEP.astype(np.float32), photometric="minisblack"))
    with pytest.raises(DataError, match="here: the TIFF has the axes"):
        decoded(written(random_images(2, 6, 5, 3), photometric="rgb"))
    turned = written(DEEP[..., None].repeat(3, 2), photometric="rgb", extratags=[(274, "H", 1, 6, True)])
    assert np.array_equal(decoded(turned)[0], np.rot90(DEEP, -1))


@pytest.mark.parametrize(
    ("orientation", "seen"),
    [
        (1, lambda x: x),
        (2, np.fliplr),
        (3, lambda x: np.rot90(x, 2)),
        (4, np.flipud),
        (5, np.transpose),
        (6, lambda x: np.rot90(x, -1)),
        (7, lambda x: np.rot90(x, 2).T),
        (8, np.rot90),
    ],
)
def test_images_are_turned_as_their_camera_was(orientation: int, seen: Any) -> None:
    from rayfed.data.tiff import _turned

    pixels, exif, file = random_images(1, 6, 9)[0], Image.Exif(), BytesIO()
    exif[274] = orientation
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    assert np.array_equal(decoded(file.getvalue())[0], seen(pixels))
    assert np.array_equal(_turned(pixels[None], orientation)[0], seen(pixels))


def test_depths_are_mixed_at_the_deeper_and_training_sees_the_unit_range(tmp_path: Path) -> None:
    shallow = random_images(1, 5, 7)[0]
    both = decode_images([Encoded("a", png(shallow)), Encoded("b", png_of_16_bits(DEEP))], None)
    assert np.array_equal(both[0, 0], shallow.astype(int) * 257)
    for label in "ab":
        (tmp_path / "set" / label).mkdir(parents=True)
        for i in range(5):
            (tmp_path / "set" / label / f"{i}.png").write_bytes(png_of_16_bits(np.roll(DEEP, i)))
    source = build("datasets", "image_folder", {"root": str(tmp_path / "set")})
    data = source.load()
    np.testing.assert_allclose(data.sample.tensor(data.train_images)[0, 0].numpy(), DEEP / 65535, atol=1e-7)
    packing.pack_dataset(source, tmp_path / "x.arrow", lambda *_: None)
    mapped = build("datasets", "arrow", {"path": str(tmp_path / "x.arrow")}).load()
    assert np.array_equal(load_in_memory(mapped.train_images), data.train_images)
    half = build("datasets", "image_folder", {"root": str(tmp_path / "set"), "size": 3}).load()
    assert half.train_images.dtype == np.uint16
    assert abs(float(half.train_images.mean()) / float(data.train_images.mean()) - 1) < 0.1


# ---- DICOM ----


def scan(stored: np.ndarray, **fields: Any) -> bytes:
    """A DICOM file with these pixels, 16 bits allocated."""
    pydicom = imported("pydicom", "medical")
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    file = pydicom.Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    file.SOPClassUID, file.SOPInstanceUID = SecondaryCaptureImageStorage, file.file_meta.MediaStorageSOPInstanceUID
    file.Rows, file.Columns = stored.shape
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit = 16, 12, 11
    file.PixelRepresentation = int(stored.dtype.kind == "i")
    file.PixelData = stored.astype(stored.dtype.newbyteorder("<")).tobytes()
    for name, value in fields.items():
        setattr(file, name, value)
    out = BytesIO()
    pydicom.dcmwrite(out, file, enforce_file_format=True)
    return out.getvalue()


STORED = np.array([[0, 1024, 2048], [3000, 4000, 4095]], np.uint16)


def test_dicom_grey_goes_by_the_stored_bits_the_window_and_the_photometric() -> None:
    plain = decoded(scan(STORED))[0] / 65535
    np.testing.assert_allclose(plain, STORED / 4095, atol=1e-5)
    inverted = decoded(scan(STORED, PhotometricInterpretation="MONOCHROME1"))[0] / 65535
    np.testing.assert_allclose(inverted, 1 - STORED / 4095, atol=1e-5)
    signed = (STORED.astype(np.int16) - 2048)[:]
    np.testing.assert_allclose(decoded(scan(signed))[0] / 65535, (signed + 2048) / 4095, atol=1e-5)
    rescaled = {"RescaleSlope": 2, "RescaleIntercept": -1000}
    np.testing.assert_allclose(decoded(scan(STORED, **rescaled))[0] / 65535, STORED / 4095, atol=1e-5)
    window = {"WindowCenter": 3000, "WindowWidth": 2001}
    units = STORED * 2.0 - 1000
    seen = decoded(scan(STORED, **rescaled, **window))[0] / 65535
    np.testing.assert_allclose(seen, ((units - 2999.5) / 2000 + 0.5).clip(0, 1), atol=1e-5)


def test_dicom_windows_and_colours_are_pydicoms_own() -> None:
    imported("pydicom", "medical")
    from pydicom import dcmread
    from pydicom.data import get_testdata_file
    from pydicom.pixels import apply_modality_lut, apply_windowing

    path = get_testdata_file("MR_small.dcm", download=False)
    file = dcmread(path)
    values = apply_modality_lut(file.pixel_array, file)
    shown = apply_windowing(values, file)
    found = decoded(Path(path).read_bytes())[0] / 65535
    np.testing.assert_allclose(found, (shown - -32768) / 65535, atol=1e-4)
    colour = get_testdata_file("examples_rgb_color.dcm", download=False)
    assert np.array_equal(decoded(Path(colour).read_bytes()), dcmread(colour).pixel_array.transpose(2, 0, 1))


def test_dicom_that_is_no_image_or_several_is_named() -> None:
    with pytest.raises(DataError, match="here: the DICOM file has 2 frames"):
        decoded(scan(STORED, NumberOfFrames=2))
    with pytest.raises(DataError, match=r"here: the window .* is SIGMOID"):
        decoded(scan(STORED, WindowCenter=1, WindowWidth=2, VOILUTFunction="SIGMOID"))
    with pytest.raises(DataError, match="here cannot be decoded"):
        decoded(scan(STORED, PixelData=bytes(2)))
    from pydicom.data import get_testdata_file

    report = get_testdata_file("reportsi.dcm", download=False)
    with pytest.raises(DataError, match="here: the DICOM file has no pixels"):
        decoded(Path(str(report)).read_bytes())


@pytest.mark.parametrize("package", ["pydicom", "tifffile"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = scan(STORED) if package == "pydicom" else b"II*\0" + bytes(50)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=r"rayfed\[medical\]"):
        decoded(content)


# ---- tables of labels ----


def folder_of_images(place: Path, count: int = 10) -> np.ndarray:
    images = random_images(count, 6, 6)
    place.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        (place / f"scan{i}.png").write_bytes(png(image))
    return images


def audited(path: Path, label: str | None = None) -> Dataset:
    """Load what `rayfed audit --data PATH` would."""
    section = UserData(str(path), label=label).section()
    return build("datasets", section.pop("name"), section).load()


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("name", ["scan{}", "scan{}.png", "images/scan{}.png"])
def test_a_table_says_what_the_images_beside_it_show(ending: str, name: str, tmp_path: Path) -> None:
    images = folder_of_images(tmp_path / "images")
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    rows = {"Image_ID": [name.format(i) for i in order], "age": [40] * 10, "Diagnosis": ["ill", "well"] * 5}
    path = tmp_path / f"labels.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table(rows), path)
    else:
        pa.csv.write_csv(pa.table(rows), path, pa.csv.WriteOptions(delimiter="\t" if ending == "tsv" else ","))
    for asked in (tmp_path, path):
        data = audited(asked)
        assert data.classes == ("ill", "well")
        both = zip([*data.train_images, *data.test_images], [*data.train_labels, *data.test_labels], strict=True)
        labels = {image.tobytes(): int(label) for image, label in both}
        assert labels == {images[o].tobytes(): place % 2 for place, o in enumerate(order)}


def test_tables_that_leave_open_what_they_mean_are_refused(tmp_path: Path) -> None:
    folder_of_images(tmp_path / "a")
    path, names = tmp_path / "labels.csv", [f"scan{i}" for i in range(10)]

    def write(**columns: list[Any]) -> None:
        pa.csv.write_csv(pa.table({"file": names, **columns}), path)

    write(label=[10, 9] * 5, target=[0, 1] * 5)
    with pytest.raises(
        DataError, match=r"each of the columns label and target may contain the classes: .*, one of file, label, target"
    ):
        audited(tmp_path)
    assert audited(tmp_path, "label").classes == ("9", "10")  # by value
    names[3] = "scan77"
    write(label=[0, 1] * 5)
    with pytest.raises(DataError, match=r"labels.csv, row 3 \(from 0\): 'scan77', but .* has no such image"):
        audited(tmp_path)
    names[3] = "scan3"
    folder_of_images(tmp_path / "b")
    write(label=[0, 1] * 5)
    with pytest.raises(DataError, match=r"row 0 .*'scan0', but .* has 2 images of that name"):
        audited(tmp_path)
    names[:] = [f"b/scan{i}" for i in range(10)]
    write(label=[0, 1] * 5)
    assert len(audited(tmp_path).train_labels) == 8
    (tmp_path / "b" / "scan4.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"b/scan4.png"):
        audited(tmp_path)
    pa.csv.write_csv(pa.table({"file": names, "label": ["x"] * 10}), tmp_path / "more.csv")
    with pytest.raises(UserError, match="several tables of images"):
        audited(tmp_path)
    (tmp_path / "more.csv").rename(tmp_path / "val.csv")
    path.rename(tmp_path / "train.csv")
    assert UserData(str(tmp_path)).section()["test"].endswith("val.csv")


def test_a_folder_of_parquet_is_split_as_its_files_are_named(tmp_path: Path) -> None:
    images = [png(image) for image in random_images(6, 4, 4)]
    for name in ("jpeg-train", "jpeg-test"):
        write_parquet(tmp_path / f"{name}.parquet", images, [0, 1] * 3)
    section = UserData(str(tmp_path), 8).section()
    assert [Path(section[split]).stem for split in ("train", "test")] == ["jpeg-train", "jpeg-test"]
    assert (section["size"], len(audited(tmp_path).train_labels), len(audited(tmp_path).test_labels)) == (8, 6, 6)
    write_parquet(tmp_path / "png-train.parquet", images, [0, 1] * 3)
    with pytest.raises(
        UserError, match=r"several tables of images: give one of these tables: .*jpeg-test.parquet, .*png-train"
    ):
        UserData(str(tmp_path)).section()
    (tmp_path / "png-train.parquet").unlink()
    train, test = (tmp_path / f"jpeg-{split}.parquet" for split in ("train", "test"))
    for names in (("trainset", "testset"), ("mnistTrain", "mnistTest"), ("images", "images_val"), ("Training", "VAL")):
        train, test = (path.rename(path.with_stem(name)) for path, name in zip((train, test), names, strict=True))
        section = UserData(str(tmp_path)).section()
        assert (Path(section["train"]), Path(section["test"])) == (train, test)
    train.rename(train.with_stem("latest"))
    test.rename(test.with_stem("strain"))
    assert UserData(str(tmp_path)).section() == {"name": "parquet", "train": str(tmp_path)}


def test_a_class_folder_with_splits_may_validate_and_may_be_dicom(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("valid", "void"):
            place = tmp_path / split / label
            place.mkdir(parents=True)
            for i in range(2):
                (place / f"1.2.840.{i}").write_bytes(scan(STORED))  # as archives call them
            (place / "notes.txt").write_text("passed over")
    data = audited(tmp_path)
    assert (len(data.train_labels), len(data.test_labels), data.classes) == (4, 4, ("valid", "void"))


# ---- Hugging Face ----

FEATURES = {"picture": {"_type": "Image"}, "kind": {"names": ["cat", "dog"], "_type": "ClassLabel"}}


def samples(count: int, first: int = 0) -> pa.Table:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = [{"bytes": png(i), "path": None} for i in random_images(count, 4, 4, seed=first)]
    table = pa.table(
        {"picture": pa.array(images, kind), "id": list(range(count)), "kind": [i % 2 for i in range(count)]}
    )
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})


def save_to_disk(place: Path, table: pa.Table) -> None:
    """As `datasets.Dataset.save_to_disk` of version 5.2.0 does, in two shards."""
    place.mkdir(parents=True)
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, half in zip(names, (table.slice(0, 3), table.slice(3)), strict=True):
        with pa.OSFile(str(place / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(half)
    (place / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (place / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))


def test_what_hugging_face_saves_is_read_without_it(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "one", samples(10))
    single = audited(tmp_path / "one")
    assert (len(single.train_labels), len(single.test_labels), single.classes) == (8, 2, ("cat", "dog"))
    for split, count in (("train", 7), ("test", 4)):
        save_to_disk(tmp_path / "two" / split, samples(count, count))
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    data = audited(tmp_path / "two")
    assert np.array_equal(data.train_images[:, 0], random_images(7, 4, 4, seed=7))
    assert np.array_equal(data.test_images[:, 0], random_images(4, 4, 4, seed=4))
    (tmp_path / "two" / "test" / "data-00001-of-00002.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=r"data-00001-of-00002.arrow cannot be read: .* expected a complete Arrow file"):
        audited(tmp_path / "two")
    (tmp_path / "two" / "test" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002.arrow.*state.json"):
        audited(tmp_path / "two")
    (tmp_path / "one" / "state.json").write_text('{"_data_files": [{"filename": "../two/train/x.arrow"}]}')
    with pytest.raises(DataError, match="is not a file in the same folder"):
        audited(tmp_path / "one")


def test_a_repository_of_the_hub_is_read_by_its_splits(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    for name, count in {"train-00000-of-00002": 5, "train-00001-of-00002": 3, "validation-00000-of-00001": 4}.items():
        pq.write_table(samples(count, count), place / f"{name}.parquet")
    data = audited(tmp_path)
    assert (len(data.train_labels), len(data.test_labels), data.classes) == (8, 4, ("cat", "dog"))
    other = build("datasets", "hugging_face", {"root": str(tmp_path), "train": "validation", "test": "train"}).load()
    assert np.array_equal(other.test_images, data.train_images)
    with pytest.raises(DataError, match="no split 'tset' in Parquet or Arrow files; choose from train, validation"):
        build("datasets", "hugging_face", {"root": str(tmp_path), "test": "tset"}).load()
    (tmp_path / "small").mkdir()
    pq.write_table(samples(5), tmp_path / "small" / "train-00000-of-00001.parquet")
    with pytest.raises(DataError, match="the split 'train' in several folders"):
        audited(tmp_path)


def test_parquet_takes_plain_bytes_and_names_for_labels(tmp_path: Path) -> None:
    images, path = random_images(6, 4, 4), tmp_path / "x.parquet"
    pq.write_table(pa.table({"content": [png(i) for i in images], "label": ["b", "a", "b", "a", "b", "b"]}), path)
    data = audited(path)
    assert data.classes == ("a", "b")
    assert (
        np.array_equal(data.train_images[:, 0], images[[i for i in range(6) if i != 1]]) or len(data.test_labels) == 1
    )
    by_image = zip([*data.train_images, *data.test_images], [*data.train_labels, *data.test_labels], strict=True)
    assert {i.tobytes(): int(n) for i, n in by_image} == {
        i.tobytes(): n for i, n in zip(images, (1, 0, 1, 0, 1, 1), strict=True)
    }
