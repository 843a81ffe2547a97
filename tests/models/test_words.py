"""Reading words: the CTC loss against its definition, the formats of word images, what a scenario may ask of words."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch import Tensor, nn

from rayfed.core import objective
from rayfed.data.base import Dataset
from rayfed.data.words.base import Word
from rayfed.errors import DataError, UserError
from rayfed.models.build import build_model, output_shape
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.scenario import parse
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.inputs import prepare_inputs

RENDERED = {"format": "rendered", "samples": 6, "length": 3, "letters": "0123"}


def collapsed(path: tuple[int, ...]) -> tuple[int, ...]:
    """What a path of classes spells, by the definition: repetitions merged, then blanks left out."""
    return tuple(letter for letter, _ in itertools.groupby(path) if letter)


def test_the_loss_is_that_of_all_paths_that_spell_the_word() -> None:
    logits = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([[1, 2, 0], [1, 1, 0], [2, 0, 0]])
    shares = logits.softmax(2)
    expected = []
    for share, label in zip(shares, labels, strict=True):
        word = tuple(label[label > 0].tolist())
        paths = [p for p in itertools.product(range(3), repeat=4) if collapsed(p) == word]
        expected.append(-torch.stack([share[range(4), p].prod() for p in paths]).sum().log())
    torch.testing.assert_close(objective.loss(logits, labels, "none"), torch.stack(expected))
    torch.testing.assert_close(objective.loss(logits, labels), torch.stack(expected).mean())
    torch.testing.assert_close(objective.loss(logits, labels, "sum"), torch.stack(expected).sum())


def test_a_word_that_does_not_fit_costs_nothing() -> None:
    logits = torch.randn(1, 4, 3, requires_grad=True)
    loss = objective.loss(logits, torch.tensor([[1, 1, 1, 0]]))  # needs five places
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_places_that_a_word_needs() -> None:
    labels = torch.tensor([[1, 2, 0], [1, 1, 0], [2, 2, 2], [3, 0, 0]])
    assert objective.needed_places(labels).tolist() == [2, 3, 5, 1]


def spelling(path: list[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([path]), 4).float()


@pytest.mark.parametrize("path", [[0, 1, 1, 0, 1], [3, 3, 0, 0, 2], [0, 0, 0, 0, 0], [1, 2, 3, 2, 1]])
def test_words_are_read_by_the_best_path(path: list[int]) -> None:
    (word,) = objective.decode_words(spelling(path))
    assert tuple(word.tolist()) == collapsed(tuple(path))
    label = torch.zeros(1, 6, dtype=torch.int64)
    label[0, : len(word)] = word
    assert objective.are_correct(spelling(path), label).tolist() == [True]
    label[0, len(word)] = 1
    assert objective.are_correct(spelling(path), label).tolist() == [False]


def picture(path: Path, size: tuple[int, int] = (60, 30)) -> Path:
    """An image that is dark but for a light rectangle at (10, 5) to (50, 25)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((size[1], size[0]), np.uint8)
    pixels[5:25, 10:50] = 200
    Image.fromarray(pixels).save(path)
    return path


def synth90k(root: Path) -> None:
    picture(root / "1/2/7_Lube_45.jpg")
    (root / "annotation_train.txt").write_text("./1/2/7_Lube_45.jpg 45\n")


def synthtext(root: Path) -> None:
    picture(root / "8/a.jpg")
    corners = np.array([[10, 50, 50, 10], [5, 5, 25, 25]], float)
    both = np.stack([corners, corners + 1], 2)
    names, boxes, texts = (np.empty((1, 2), object) for _ in range(3))
    names[0, 0] = names[0, 1] = "8/a.jpg"
    boxes[0, 0], boxes[0, 1] = both, corners  # of one word it is 2 x 4, as in the published file
    texts[0, 0], texts[0, 1] = np.array(["Lube\nx2y"]), np.array(["one"])
    savemat(root / "gt.mat", {"imnames": names, "wordBB": boxes, "txt": texts})


def iiit5k(root: Path) -> None:
    picture(root / "test/1_1.png")
    record = np.array([[("test/1_1.png", "LUBE")]], dtype=[("ImgName", "O"), ("GroundTruth", "O")])
    savemat(root / "testdata.mat", {"testdata": record})


def svt(root: Path) -> None:
    picture(root / "img/a.jpg")
    (root / "test.xml").write_text(
        "<?xml version='1.0'?><tagset><image><imageName>img/a.jpg</imageName><lex>X,Y</lex><taggedRectangles>"
        '<taggedRectangle height="20" width="40" x="10" y="5"><tag>LUBE</tag></taggedRectangle>'
        "</taggedRectangles></image></tagset>"
    )


def scut_foru(root: Path) -> None:
    picture(root / "word_img/a.jpg")
    (root / "word_annotation").mkdir()
    (root / "word_annotation/a.txt").write_text("10, 5, 40, 20, Lube\n")


def ic15(root: Path) -> None:
    picture(root / "word_1.png")
    (root / "gt.txt").write_text('\ufeffword_1.png, "Lube"\n', encoding="utf-8")


FORMATS = {f.__name__: f for f in (synth90k, synthtext, iiit5k, svt, scut_foru, ic15)}
CUT = {"synthtext", "svt", "scut_foru"}


def loaded(*train: dict[str, Any], **changes: Any) -> Dataset:
    data: Dataset = build("datasets", "words", {"train": list(train), "test": [RENDERED], **changes}).load()
    return data


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_the_word_and_its_part_of_the_picture(format: str, tmp_path: Path) -> None:
    FORMATS[format](tmp_path)
    data = loaded({"format": format, "root": str(tmp_path)})
    spelt = "".join(data.classes[letter] for letter in data.train_labels[0])
    assert spelt == "lube"
    assert data.train_images.shape[1:] == (1, 32, 100)
    share = (data.train_images[0] > 100).mean()
    assert share > 0.95 if format in CUT else 0.3 < share < 0.6
    assert data.train_labels.shape == (len(data.train_images), 25)
    if format == "synthtext":
        assert len(data.train_images) == 3


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_set_is_named(format: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is missing: set `root` to the folder of the unpacked"):
        loaded({"format": format, "root": str(tmp_path)})


@pytest.mark.parametrize(
    ("format", "file", "text", "message"),
    [
        ("synth90k", "annotation_train.txt", "\n./1/x.jpg 3\n", "line 2: expected PATH/NUMBER_WORD_NUMBER.jpg"),
        ("svt", "test.xml", "<tagset>", "does not have the format of SVT"),
        ("scut_foru", "word_annotation/a.txt", "1, 2, 3", "line 1: expected x, y, w, h, label, found '1, 2, 3'"),
        ("scut_foru", "word_annotation/b.txt", "1, 2, 3", "b.txt has no picture with the same name"),
        ("ic15", "gt.txt", "word_1.png Lube", 'line 1: expected word_1.png, "TEXT"'),
        ("ic15", "gt.txt", 'word_2.png, "Lube"', "word_2.png with the word 'Lube' cannot be read"),
        ("svt", "test.xml", None, "outside the picture of 60x30 pixels"),
    ],
)
def test_broken_files_are_named(format: str, file: str, text: str | None, message: str, tmp_path: Path) -> None:
    FORMATS[format](tmp_path)
    written = (tmp_path / file).read_text().replace('x="10"', 'x="100"') if text is None else text
    (tmp_path / file).write_text(written)
    with pytest.raises(DataError, match=message):
        loaded({"format": format, "root": str(tmp_path)})


def test_words_of_other_lengths_and_letters_are_left_out(tmp_path: Path) -> None:
    texts = ["ab", "abc", "ABC", "a-bc", "a" * 25, "a" * 26]
    for i in range(len(texts)):
        picture(tmp_path / f"word_{i}.png")
    (tmp_path / "gt.txt").write_text("".join(f'word_{i}.png, "{text}"\n' for i, text in enumerate(texts)))
    data = loaded({"format": "ic15", "root": str(tmp_path)})
    assert [int((label > 0).sum()) for label in data.train_labels] == [3, 3, 25]
    np.testing.assert_array_equal(data.train_labels[0], data.train_labels[1])
    with pytest.raises(DataError, match="ic15 has no word with 3 to 25 letters out of xyz"):
        loaded({"format": "ic15", "root": str(tmp_path)}, letters="xyz")


@pytest.mark.parametrize(("across", "kept"), [(50, 25), (400, 100)])
def test_a_test_word_can_keep_its_proportions(across: int, kept: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (64, across), np.uint8)
    [word] = Word("abc", Image.fromarray(picture)).pixels(32, 100, proportional=True)
    expected = Image.fromarray(picture).resize((kept, 32), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(word[:, :kept], np.asarray(expected))
    assert word.shape == (32, 100)
    assert len(np.unique(word[:, kept:])) <= 1


def test_rendered_words_are_the_same_again_and_others_with_another_seed() -> None:
    one, same, other = (loaded({**RENDERED, "seed": seed, "background": "noise"}) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.train_images, same.train_images)
    assert (one.train_images != other.train_images).any()
    assert one.train_images.std((1, 2, 3)).min() > 10  # something is written everywhere
    with pytest.raises(DataError, match="font 'Papyrus'"):
        loaded({**RENDERED, "font": "Papyrus"})


def test_letters_are_given_once_and_small() -> None:
    for letters in ("ABC", "abca"):
        with pytest.raises(DataError, match="letters"):
            loaded(RENDERED, letters=letters)


def test_partitions_go_by_the_sources() -> None:
    data = loaded(RENDERED, {**RENDERED, "font": "DejaVuSerif", "samples": 4})
    groups, names = data.groups
    assert names == ("0 rendered", "1 rendered")
    parts = build("partitions", "shards", {"shards_per_client": 1}).split(groups, 2, np.random.default_rng(0))
    assert {tuple(np.unique(groups[part])) for part in parts} >= {(0,)}
    public = data.with_public(0.5)
    assert public.train_sources is not None
    assert np.bincount(public.train_sources).tolist() == [3, 2]


def test_the_network_gives_a_class_for_every_fourth_column() -> None:
    model = build_model("crnn", {"width": 2, "hidden": 4}, (1, 32, 100), 37, seed=0)
    assert model(torch.rand(2, 1, 32, 100)).shape == (2, 26, 37)
    assert output_shape(model, Pixels(1, 32, 100))[0] == 26
    with pytest.raises(UserError, match="height 32"):
        build_model("crnn", {}, (1, 28, 28), 37, seed=0)


def test_the_network_has_the_papers_size() -> None:
    model = build_model("crnn", {}, (1, 32, 100), 37, seed=0)
    convolutions = sum(p.numel() for m in model if isinstance(m, nn.Conv2d) for p in m.parameters())
    by_hand = sum(9 * a * b + b for a, b in [(1, 64), (64, 128), (128, 256), (256, 256), (256, 512), (512, 512)])
    assert convolutions == by_hand + 4 * 512 * 512 + 512


SCENARIO = """
name: words
data: {{name: words, width: 40, train: [{source}], test: [{source}]}}
model: {model}
training: {{batch_size: 4}}
federation: {{rounds: 1, clients: 1}}
"""
SOURCE = "{format: rendered, samples: 4, length: 3}"
LONG = "{format: rendered, samples: 4, length: 5}"
CRNN = "{name: crnn, width: 2, hidden: 4}"


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("lenet", None, "model 'lenet'"),
        (CRNN, "data=digits", "crnn"),
        (CRNN, f"data={{name: words, width: 8, train: [{LONG}], test: [{LONG}]}}", "4 of 4 training words need more"),
        (CRNN, "attacks=[dlg]", "'dlg' supports classes, not words"),
        (CRNN, "federation.malicious={name: label_flip, clients: 1}", "'label_flip' supports classes, not words"),
        (CRNN, "defences=[mixup]", "defence 'mixup' supports classes, not words"),
    ],
)
def test_what_knows_classes_alone_is_refused(model: str, change: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_inputs(parse(SCENARIO.format(source=SOURCE, model=model), changes=[change] if change else []))


def hosted(*changes: str) -> tuple[ClientRuntime, Sent]:
    s = parse(SCENARIO.format(source=SOURCE, model=CRNN), changes=changes)
    inputs = prepare_inputs(s)
    runtime = ClientRuntime(s, inputs.data, inputs.parts, torch.device("cpu"))
    return runtime, Sent(0, runtime.arm("none").weights, runtime.arm("none").buffers)


def test_words_do_not_train_in_one_vmap_call() -> None:
    with pytest.raises(UserError, match="vectorise"):
        hosted("training.vectorise=vmap")


def test_what_works_on_the_update_takes_words() -> None:
    changes = ["defences=[{name: gaussian, sigma: 0.1}, {name: prune, ratio: 0.5}, {name: key_lock, length: 4}]"]
    prepare_inputs(parse(SCENARIO.format(source=SOURCE, model=CRNN), changes=changes))
