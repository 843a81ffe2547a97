"""The conditional DCGAN: what it makes, that it learns, and the file that it is kept in."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from typer.testing import CliRunner

from rayfed.cli import app
from rayfed.data.base import Dataset
from rayfed.errors import DataError, UserError
from rayfed.models.dcgan import Critic, Generator
from rayfed.models.pretrained import Origin, is_trained, load_generator, save_generator
from rayfed.pretraining.generator import GeneratorSize, train
from rayfed.registry import build

SHAPE = (1, 8, 8)
ORIGIN = Origin({"name": "digits"}, images="0" * 64, seed=0, epochs=1)
SCENARIO = """
name: t
data: {name: digits, size: 8, public: 0.1}
federation: {rounds: 1, clients: 4}
"""


@pytest.fixture(scope="module")
def digits() -> Dataset:
    loaded: Dataset = build("datasets", "digits", {"size": 8}).load()
    return loaded.with_public(0.5)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    save_generator(tmp_path / "g.pt", Generator(SHAPE, 10, latent=4, width=4), ORIGIN)
    return tmp_path / "g.pt"


def command(file: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train-generator", str(file), "--epochs", "2", *more])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 9, 14)])
def test_images_of_any_size_and_colour(shape: tuple[int, int, int]) -> None:
    images = Generator(shape, 5, latent=6, width=4)(torch.randn(3, 6), torch.tensor([0, 4, 4]))
    assert images.shape == (3, *shape)
    assert 0 <= images.min() <= images.max() <= 1
    assert Critic(shape, 5, width=4)(images, torch.tensor([0, 4, 4])).shape == (3,)


def test_an_image_depends_on_its_own_latent_and_label_alone() -> None:
    generator = Generator(SHAPE, 10, latent=4, width=4).eval()
    latents, labels = torch.randn(3, 4), torch.tensor([1, 2, 3])
    together = generator(latents, labels)
    torch.testing.assert_close(generator(latents[1:2], labels[1:2]), together[1:2])
    assert not torch.allclose(generator(latents[1:2], labels[2:3]), together[1:2])
    assert not torch.allclose(generator(latents[2:3], labels[1:2]), together[1:2])


def test_training_follows_from_its_arguments(digits: Dataset) -> None:
    images, labels = digits.public_images[:128], digits.public_labels[:128]  # type: ignore[index]
    torch.manual_seed(5)
    first = train(images, labels, 10, seed=1, epochs=2, size=GeneratorSize(width=4))
    torch.manual_seed(6)
    again, other = (train(images, labels, 10, seed=seed, epochs=2, size=GeneratorSize(width=4)) for seed in (1, 2))
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(tensor, again.state_dict()[name], rtol=0, atol=0)
    assert not torch.equal(first.latent_in.weight, other.latent_in.weight)
    assert not first.training


def test_too_few_images_are_refused(digits: Dataset) -> None:
    with pytest.raises(DataError, match=r"64 images.* 63"):
        train(digits.train_images[:63], digits.train_labels[:63], 10, seed=0, epochs=1)


@pytest.mark.slow
def test_it_learns_the_classes_and_their_variety(digits: Dataset) -> None:
    """Judged by neighbours among real images that it was not trained on."""
    images, labels = digits.public_images, digits.public_labels
    assert images is not None
    assert labels is not None
    generator = train(images, labels, 10, seed=0, epochs=150, size=GeneratorSize(16, 16))
    asked = torch.arange(10).repeat_interleave(20)
    with torch.no_grad():
        made = generator(torch.randn(200, 16, generator=torch.Generator().manual_seed(0)), asked).flatten(1)
    judge = KNeighborsClassifier(3).fit(digits.train_images.reshape(-1, 64) / 255, digits.train_labels)
    assert (judge.predict(made.numpy()) == asked.numpy()).mean() > 0.9
    real = [torch.from_numpy(images[labels == k][:20].reshape(20, -1) / 255) for k in range(10)]
    varied = [torch.pdist(made[asked == k]).mean() / torch.pdist(real[k]).mean() for k in range(10)]
    assert np.mean(varied) > 0.5


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    generator = Generator(SHAPE, 10, latent=4, width=4).eval()
    save_generator(tmp_path / "new" / "g.pt", generator, ORIGIN)
    loaded = load_generator(tmp_path / "new" / "g.pt", SHAPE, 10)
    latents, labels = torch.randn(2, 4), torch.tensor([3, 4])
    torch.testing.assert_close(loaded(latents, labels), generator(latents, labels))
    assert not any(p.requires_grad for p in loaded.parameters())


def test_what_is_wrong_with_a_file_is_said(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"generator .*absent\.pt.*rayfed train-generator SCENARIO --out .*absent\.pt"):
        load_generator(tmp_path / "absent.pt", SHAPE, 10)
    with pytest.raises(UserError, match="1x8x8 in 10 classes, but the data have 3x32x32 in 10 classes"):
        load_generator(kept, (3, 32, 32), 10)
    with pytest.raises(UserError, match="in 10 classes, but the data have 1x8x8 in 40"):
        load_generator(kept, SHAPE, 40)
    shutil.copy(kept, tmp_path / "alone.pt")
    with pytest.raises(UserError, match=r"alone\.pt\.sha256 cannot be read"):
        load_generator(tmp_path / "alone.pt", SHAPE, 10)
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)
    with pytest.raises(UserError, match="truncated or altered"):
        load_generator(kept, SHAPE, 10)


def test_a_file_of_something_else_is_refused(kept: Path, tmp_path: Path) -> None:
    from hashlib import sha256

    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "list.pt.sha256").write_text(sha256((tmp_path / "list.pt").read_bytes()).hexdigest())
    with pytest.raises(UserError, match="is not a generator of rayfed"):
        load_generator(tmp_path / "list.pt", SHAPE, 10)


def test_a_trained_file_is_known_again(kept: Path, tmp_path: Path) -> None:
    assert is_trained(kept, ORIGIN)
    assert not is_trained(tmp_path / "absent.pt", ORIGIN)
    with pytest.raises(UserError, match="different epochs, seed"):
        is_trained(kept, replace(ORIGIN, epochs=2, seed=3))


def test_the_command_trains_once(tmp_path: Path) -> None:
    file, out = tmp_path / "s.yaml", tmp_path / "g.pt"
    file.write_text(SCENARIO)
    code, said = command(file, "--out", str(out))
    assert code == 0, said
    assert "epoch 1/2" in said
    assert load_generator(out, SHAPE, 10).classes == 10
    before = out.stat().st_mtime_ns
    code, said = command(file, "--out", str(out))
    assert code == 0, said
    assert "up to date" in said
    assert out.stat().st_mtime_ns == before
    code, said = command(file, "--out", str(out), "--seed", "7")
    assert code == 2
    assert "different seed" in said


def test_the_command_needs_public_data(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO.replace(", public: 0.1", ""))
    code, said = command(file, "--out", str(tmp_path / "g.pt"))
    assert code == 2
    assert "data.public" in said
