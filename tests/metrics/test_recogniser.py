"""Re-identification: the recogniser's training and file, and what the metrics say of true and of spoilt images."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from typer.testing import CliRunner

from rayfed.cli import app
from rayfed.data.base import Dataset
from rayfed.errors import DataError, UserError
from rayfed.metrics import score
from rayfed.metrics.identity import Identity
from rayfed.metrics.score import Scorer
from rayfed.metrics.top import TOP, chance
from rayfed.models.dcgan import Generator
from rayfed.models.pretrained import (
    RECOGNISER,
    NetworkUnavailable,
    Origin,
    is_trained,
    load_recogniser,
    save_generator,
    save_recogniser,
)
from rayfed.models.recogniser import Recogniser
from rayfed.pretraining import recogniser as training
from rayfed.pretraining.recogniser import faces, held_out, train, varied
from rayfed.registry import build

CPU = torch.device("cpu")
ORIGIN = Origin({"data": "digits"}, images="0" * 64, seed=0, epochs=1)
DIGITS = tuple("0123456789")


class Knows(Recogniser):
    """Takes an image for the person whose number is a tenth of its brightness in per cent; the next ones come next."""

    def forward(self, images: Tensor) -> Tensor:
        return -(images.mean((1, 2, 3))[:, None] * 10 - torch.arange(10)).abs()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "r.pt"
    save_recogniser(path, Recogniser(10), DIGITS, ORIGIN)
    return str(path)


@pytest.fixture
def knowing(file: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("rayfed.metrics.identity.load_recogniser", lambda *_: Knows(10))
    score._functions.cache_clear()
    return file


def bright(*tenths: float) -> Tensor:
    return torch.tensor(tenths)[:, None, None, None].expand(-1, 1, 4, 4) / 10


def public_digits() -> Dataset:
    return build("datasets", "digits", {"size": 16, "train_samples": 260, "test_samples": 100}).load().with_public(0.5)


def test_images_of_any_size_and_colour_are_alike() -> None:
    network = Recogniser(7).eval()
    grey = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(network(grey.expand(-1, 3, -1, -1)), network(grey), rtol=1e-4, atol=1e-4)
        brighter = network(0.25 + grey / 2)
        assert network(torch.rand(3, 3, 250, 200)).shape == (3, 7)
    assert stats.pearsonr(brighter.flatten(), network(grey).detach().flatten()).statistic > 0.95


def test_varied_images_are_moved_mirrored_and_noisy_and_follow_from_the_draws() -> None:
    draws = [torch.Generator().manual_seed(3) for _ in range(2)]
    images = torch.zeros(64, 1, 16, 16)
    images[..., 3] = 0.5
    once, again = (varied(images, one) for one in draws)
    assert torch.equal(once, again)
    assert 0 <= once.min() <= once.max() <= 1
    right = (once[..., 8:].mean((1, 2, 3)) > once[..., :8].mean((1, 2, 3))).float().mean()
    assert 0.3 < right < 0.7
    spread = once[..., 6:10].std((1, 2, 3))
    assert spread.min() < 0.03 < 0.08 < spread.max()


@pytest.mark.engine
def test_training_follows_from_its_arguments_and_learns_people(tmp_path: Path) -> None:
    data, losses = public_digits(), []
    images, labels = faces(data)
    assert len(images) == 130
    assert not {image.tobytes() for image in images} & {image.tobytes() for image in np.asarray(data.train_images)}
    first = train(images, labels, 10, seed=0, epochs=20, progress=lambda epoch, epochs, loss: losses.append(loss))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    short, again = (train(images, labels, 10, seed=0, epochs=2) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for name, tensor in short.state_dict().items():
        torch.testing.assert_close(tensor, again.state_dict()[name], rtol=0, atol=0)
    assert losses[-1] < 0.7 * losses[0]
    path = tmp_path / "r.pt"
    save_recogniser(path, first, data.classes, ORIGIN)
    found = held_out(path, data)
    assert found["top1"] > 0.5
    assert found["top1"] <= found["top3"] <= found["top5"] <= 1


def test_everybody_needs_an_image() -> None:
    with pytest.raises(DataError, match="3 classes; 1 "):
        train(np.zeros((4, 1, 8, 8), np.uint8), np.array([0, 0, 2, 2]), 3, seed=0, epochs=1)


def test_without_a_public_part_it_sees_what_clients_have() -> None:
    data = build("datasets", "digits", {"size": 8, "train_samples": 50}).load()
    assert np.array_equal(faces(data)[0], data.train_images)


def test_a_file_gives_back_what_was_saved_to_those_who_ask_for_these_people(file: str) -> None:
    network = load_recogniser(file, DIGITS, CPU)
    assert not network.training
    assert not any(p.requires_grad for p in network.parameters())
    assert is_trained(Path(file), ORIGIN, RECOGNISER)
    others = ("anna", "bert", "carl", "dora")
    with pytest.raises(NetworkUnavailable, match=r"10 people \(0, 1, 2, ...\), but the data show 4 "):
        load_recogniser(file, others, CPU)
    with pytest.raises(NetworkUnavailable, match=r"is for 10 people"):
        load_recogniser(file, DIGITS[::-1], CPU)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.pt"
    save_generator(path, Generator((1, 8, 8), 10, latent=4, width=4), ORIGIN)
    with pytest.raises(NetworkUnavailable, match=r"is not a recogniser of rayfed: .*train-recogniser SCENARIO --out"):
        load_recogniser(str(path), DIGITS, CPU)
    with pytest.raises(UserError, match=r"recogniser .*not found"):
        load_recogniser(str(tmp_path / "absent.pt"), DIGITS, CPU)


def test_the_place_of_the_true_person(knowing: str) -> None:
    places = Identity(knowing, DIGITS)(torch.tensor([3, 3, 3, 3]), bright(3, 3.6, 4.2, 8.8))
    assert places.tolist() == [1, 2, 3, 7]
    tied = Identity(knowing, DIGITS)(torch.tensor([2]), bright(2.5))
    assert tied.tolist() == [2]  # the next person is as likely, and put first


def test_the_metrics_are_columns_beside_how_many_people_there_are(knowing: str) -> None:
    true = bright(0, 3, 6, 9)
    guess = bright(0.2, 3.9, 7.2, float("nan"))
    scorer = Scorer(("psnr", "top1", "top3", "top5"), recogniser=knowing, people=DIGITS)
    rows = scorer.score(true, torch.tensor([0, 3, 6, 9]), guess[[2, 0, 3, 1]], torch.zeros(4, dtype=torch.int64))
    assert [row["order"] for row in rows] == [1, 3, 0, 2]
    assert [[row[name] for name in TOP] for row in rows] == [[1, 1, 1], [0, 1, 1], [0, 1, 1], [None] * 3]
    assert {row["people"] for row in rows} == {10}
    assert scorer.unavailable() == []
    assert scorer.nothing(torch.tensor([4]))[0]["top1"] is None


@pytest.mark.engine
def test_noise_is_nobody() -> None:
    images, labels = faces(public_digits())
    network = train(images, labels, 10, seed=1, epochs=5)
    noise = torch.rand(2000, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        taken = network(noise).argmax(1)
    right = int((taken == torch.arange(2000) % 10).sum())
    assert stats.binomtest(right, 2000, chance("top1", 10)).pvalue > 1e-3


def test_chance() -> None:
    assert [chance(name, 40) for name in TOP] == [0.025, 0.075, 0.125]
    assert chance("top5", 2) == 1


@pytest.mark.parametrize(
    ("recogniser", "why"),
    [("absent.pt", "absent.pt"), (None, "rayfed train-recogniser")],
)
def test_without_a_network_the_columns_are_empty_with_one_warning(recogniser: str | None, why: str) -> None:
    score._functions.cache_clear()
    scorer, image, label = Scorer(("mse", *TOP), recogniser=recogniser, people=DIGITS), bright(4), torch.tensor([4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = [scorer.score(image, label, image, label)[0] for _ in range(2)]
    assert [row[name] for row in rows for name in TOP] == [None] * 6
    assert [row["mse"] for row in rows] == [0, 0]
    assert "people" not in rows[0]
    [message] = [str(warning.message) for warning in caught]
    assert all(part in message for part in (*TOP, why))
    assert scorer.unavailable() == [message]


def test_the_command_trains_once_and_says_how_good_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def pretended(images: np.ndarray, labels: np.ndarray, people: int, *, epochs: int, **_: object) -> Recogniser:
        asked.append((len(images), epochs))
        return Recogniser(people).eval()

    monkeypatch.setattr(training, "train", pretended)
    file, out = tmp_path / "s.yaml", str(tmp_path / "r.pt")
    file.write_text("name: t\ndata: {name: digits, size: 8, public: 0.25}\nfederation: {rounds: 1, clients: 4}\n")
    for arguments, said in (
        ([], "10 people; trained on 360 public images"),
        ([], "up to date"),
        (["--epochs", "20"], "different epochs"),
        (["--set", "data.public=0"], "data, epochs, images"),
    ):
        result = CliRunner().invoke(app, ["train-recogniser", str(file), *arguments, "--out", out])
        assert said in " ".join(result.output.split())
    assert asked == [(360, 100)]
    plain = str(tmp_path / "plain.pt")
    result = CliRunner().invoke(app, ["train-recogniser", str(file), "--set", "data.public=0", "--out", plain])
    assert "trained on 1438 images" in result.output
    assert "359 original images" in result.output
    assert "(chance 10.0 %)" in result.output
