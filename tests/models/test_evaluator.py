"""The evaluation network: its training data, the file that it is kept in, and that it tells noise in unseen images."""

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
from rayfed.errors import DataError, UserError
from rayfed.metrics import score
from rayfed.metrics.score import Scorer
from rayfed.models.dcgan import Generator
from rayfed.models.evaluator import Evaluator
from rayfed.models.pretrained import (
    EVALUATOR,
    NetworkUnavailable,
    Origin,
    is_trained,
    load_evaluator,
    save_evaluator,
    save_generator,
)
from rayfed.pretraining import evaluator as training
from rayfed.pretraining.evaluator import noisy, pyramid, train
from rayfed.registry import build
from tests.helpers.attack_fixtures import photo
from tests.helpers.data_fixtures import random_images

CPU = torch.device("cpu")
ORIGIN = Origin({"data": ["digits"]}, images="0" * 64, seed=0, epochs=1)
FIGURE_5 = [0.08, 0.18, 0.28, 0.40, 0.50, 0.61, 0.70, 0.80, 0.91]


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixed(images: Tensor, share: float, seed: int = 0) -> Tensor:
    return (1 - share) * images + share * torch.rand(images.shape, generator=drawn(seed))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 8, 9), (1, 100, 64)])
def test_images_of_any_size_and_colour(shape: tuple[int, int, int]) -> None:
    with torch.no_grad():
        shares = Evaluator()(torch.rand(2, *shape))
    assert shares.shape == (2,)
    assert 0 <= shares.min() <= shares.max() <= 1


def test_its_size_is_the_papers() -> None:
    kernels = [p.shape for name, p in Evaluator().named_parameters() if p.dim() == 4]
    assert kernels == [(128, 3, 3, 3), (256, 128, 3, 3), (512, 256, 3, 3)]


def test_a_pyramid_cuts_and_halves() -> None:
    images = random_images(2, 3, 70, 128)
    tiles = pyramid(images)
    assert tiles.shape == (2 * (2 * 4 + 1 * 2), 3, 32, 32)
    assert (tiles[1] == images[0, :, :32, 32:64]).all()
    quarter = images[0, :, :64, :64].reshape(3, 32, 2, 32, 2).mean((2, 4))
    assert np.abs(tiles[16].astype(float) - quarter).max() <= 0.5
    assert pyramid(random_images(5, 1, 8, 8)).shape == (5, 3, 32, 32)


def test_noise_is_uniform_and_has_its_share() -> None:
    shares = torch.tensor([0.0, 0.3, 1.0]).repeat_interleave(40)
    noise = noisy(torch.zeros(120, 3, 8, 8), shares, drawn())
    assert stats.kstest(noise[80:].flatten().numpy()[::3], "uniform").pvalue > 1e-3
    assert noise[:40].max() == 0
    assert noise[40:80].max() == pytest.approx(0.3, abs=1e-3)
    grey = (noise[40:] == noise[40:, :1]).all(1).flatten(1).all(1)
    assert 0.1 < grey.float().mean() < 0.4


@pytest.mark.engine
def test_training_follows_from_its_arguments_and_learns() -> None:
    tiles = np.concatenate([pyramid((photo(0, 0, 64).numpy() * 255).astype(np.uint8))] * 26)[..., ::8, ::8]
    losses: list[float] = []
    torch.manual_seed(5)
    first = train(tiles, seed=1, epochs=3, progress=lambda epoch, epochs, loss: losses.append(loss))
    torch.manual_seed(6)
    again, other = (train(tiles, seed=seed, epochs=3) for seed in (1, 2))
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(tensor, again.state_dict()[name], rtol=0, atol=0)
    assert not torch.equal(first.linear.weight, other.linear.weight)
    assert losses[2] < losses[1] < losses[0]
    with pytest.raises(DataError, match=r"128 tiles of 32 pixels.* 127"):
        train(tiles[:127], seed=0, epochs=1)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    network, path = Evaluator(), tmp_path / "new" / "e.pt"
    save_evaluator(path, network, ORIGIN)
    assert path.stat().st_size < 4e6
    images = photo(0, 0)
    loaded = load_evaluator(str(path), CPU)
    torch.testing.assert_close(loaded.logits(images), network.logits(images), rtol=0, atol=1e-3)  # half precision
    assert not any(p.requires_grad for p in loaded.parameters())
    assert is_trained(path, ORIGIN, EVALUATOR)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.pt"
    save_generator(path, Generator((1, 8, 8), 10, latent=4, width=4), ORIGIN)
    with pytest.raises(NetworkUnavailable, match=r"is not an evaluation network of rayfed: .*train-evaluator --out"):
        load_evaluator(str(path), CPU)
    with pytest.raises(UserError, match=r"evaluation network .* not found"):
        load_evaluator(str(tmp_path / "absent.pt"), CPU)


def test_without_data_it_takes_photographs_that_are_free() -> None:
    loaded = training.FREE_PHOTOGRAPHS.build().load()
    assert loaded.classes == ("astronaut", "cat", "coffee", "flower", "rocket", "temple")
    assert loaded.sample.shape == (3, 128, 128)


def test_the_command_trains_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def pretended(tiles: np.ndarray, *, seed: int, epochs: int, **_: object) -> Evaluator:
        asked.append((len(tiles), epochs))
        return Evaluator()

    monkeypatch.setattr(training, "train", pretended)
    file, out = tmp_path / "s.yaml", str(tmp_path / "e.pt")
    file.write_text("name: t\ndata: {name: digits, public: 0.1}\nfederation: {rounds: 1, clients: 4}\n")
    for arguments, said in (
        ([str(file), "photos"], "wrote"),
        ([str(file), "photos"], "up to date"),
        ([str(file), "photos", "--epochs", "20"], "different epochs"),
        ([str(file)], "data, epochs, images"),
    ):
        result = CliRunner().invoke(app, ["train-evaluator", *arguments, "--out", out])
        assert said in " ".join(result.output.split())
    assert asked == [(144 + 1379, 4)]


def held_out(name: str, shared_data: Path) -> Tensor:
    if name == "digits":
        loaded = build("datasets", "digits", {"size": 28, "test_samples": 200}).load()
    elif name == "mnist":
        loaded = build("datasets", "mnist", {"root": str(shared_data / "mnist"), "test_samples": 200}).load()
    else:
        files = {part: str(shared_data / "cifar10" / f"lossless-{part}.parquet") for part in ("train", "test")}
        loaded = build("datasets", "parquet", files | {"train_samples": 10, "test_samples": 200}).load()
    return torch.from_numpy(loaded.test_images).float() / 255


def judged(images: Tensor) -> Tensor:
    """The mean predictions of the network that comes with rayfed, at the shares 0.1 ... 0.9."""
    network = load_evaluator(None, CPU)
    with torch.no_grad():
        return torch.stack([network(mixed(images, tenths / 10)).mean() for tenths in range(1, 10)])


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_the_shipped_network_tells_noise_in_images_that_it_never_saw(name: str, shared_data: Path) -> None:
    found = judged(held_out(name, shared_data)[:100])
    assert stats.spearmanr(found, range(9)).statistic > 0.99
    assert (found - torch.tensor(FIGURE_5)).abs().max() < 0.1


def test_it_is_monotone_without_any_other_data_at_hand() -> None:
    found = judged(held_out("digits", Path())[:100])
    assert stats.spearmanr(found, range(9)).statistic > 0.99


def test_the_noise_ratio_is_a_metric_of_the_reconstruction() -> None:
    true = torch.cat([photo(0, 0), photo(100, 100), photo(50, 150), photo(20, 60)])
    guess = torch.cat([mixed(image[None], share) for image, share in zip(true, (0.0, 0.3, 0.6, 1.0), strict=True)])
    rows = Scorer(("noise_ratio",)).score(true, torch.arange(4), guess, torch.arange(4))
    ratios = [row["noise_ratio"] for row in sorted(rows, key=lambda row: row["order"])]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.2
    assert ratios[-1] > 0.8


def test_without_a_network_the_column_is_empty_with_one_warning(tmp_path: Path) -> None:
    score._functions.cache_clear()
    scorer, image = Scorer(("mse", "noise_ratio"), evaluator=str(tmp_path / "absent.pt")), photo(0, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = [scorer.score(image, torch.tensor([0]), image, torch.tensor([0]))[0] for _ in range(2)]
    assert [row["noise_ratio"] for row in rows] == [None, None]
    assert [row["mse"] for row in rows] == [0, 0]
    [message] = [str(warning.message) for warning in caught]
    assert "the column noise_ratio stays empty: evaluation network" in message
    assert scorer.unavailable() == [message]
