"""Transformation policies and their search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageEnhance, ImageOps
from pydantic import ValidationError
from skimage.data import chelsea
from torch import Tensor
from typer.testing import CliRunner

from rayfed import scenario as scenarios
from rayfed.cli import app
from rayfed.core import seeds
from rayfed.data.packing import pack_dataset
from rayfed.data.sets.digits import Digits
from rayfed.defences.ats import Ats
from rayfed.defences.base import Batch, Task
from rayfed.defences.transformations import NAMES, transform
from rayfed.errors import UserError
from rayfed.pretraining.policy_search import Examiner, examiner_of, random_policies
from rayfed.simulation.client.local import data_method
from tests.helpers.attack_fixtures import digit, photo, seeded

SCENARIO = """
name: t
data: {name: digits, size: 8, public: 0.3}
training: {batch_size: 16, lr: 0.05, momentum: 0.9}
federation: {rounds: 1, clients: 4}
"""


def number_of(name: str, least: int = 1) -> int:
    """The first transformation of that name and at least that magnitude."""
    return next(i for i, (known, magnitude) in enumerate(NAMES) if known == name and magnitude >= least)


def cat() -> tuple[Image.Image, Tensor]:
    pixels = chelsea()[50:98, 100:148]
    return Image.fromarray(pixels), torch.tensor(pixels).permute(2, 0, 1)[None] / 255


def apart(image: Image.Image, found: Tensor) -> float:
    """The mean absolute difference, of 255."""
    return float((torch.tensor(np.array(image)).permute(2, 0, 1) - 255 * found[0]).abs().mean())


@pytest.mark.engine
def test_there_are_fifty_and_every_one_keeps_shape_and_range() -> None:
    assert len(NAMES) == 50
    for number in range(50):
        for images in (torch.cat([digit(3), digit(5)]), torch.cat([photo(10, 10), photo(30, 60)])):
            found = transform(images, number, seeded(1)[0])
            assert found.shape == images.shape
            assert 0 <= found.min() <= found.max() <= 1


def test_transformations_are_those_of_pillow() -> None:
    image, pixels = cat()
    generator = seeded(0)[0]
    expected = {
        "invert": ImageOps.invert(image),
        "equalise": ImageOps.equalize(image),
        "autocontrast": ImageOps.autocontrast(image),
        "posterise": ImageOps.posterize(image, round(8 - 4 * 5 / 9)),
        "solarise": ImageOps.solarize(image, 256 - 256 * NAMES[number_of("solarise")][1] / 9),
    }
    for name, wanted in expected.items():
        assert apart(wanted, transform(pixels, number_of(name), generator)) < 1.5, name
    for name, enhance in (("contrast", ImageEnhance.Contrast), ("brightness", ImageEnhance.Brightness)):
        number = number_of(name)
        strength = 0.5 * NAMES[number][1] / 9
        found = transform(pixels, number, generator)
        assert min(apart(enhance(image).enhance(1 + sign * strength), found) for sign in (1, -1)) < 2, name


def test_moves_go_either_way_and_by_what_was_asked_for() -> None:
    line = torch.zeros(1, 1, 20, 20)
    line[..., 10] = 1
    found = {int(transform(line, 3, g).sum((0, 1, 2)).argmax()) for g in seeded(*range(20))}
    shift = round(20 * 150 / 331)
    assert found == {10 - shift, 10 + shift}


def test_an_image_picks_one_sequence_of_the_policy_and_its_own_signs() -> None:
    invert, autocontrast = number_of("invert", 0), number_of("autocontrast", 0)
    policy = f"{invert}+{invert}-{invert}+{autocontrast}"
    images = digit(3).expand(300, -1, -1, -1)
    found = Ats(policy=policy).transformed(images, seeded(1)[0])
    inverted = [torch.allclose(image, 1 - images[0]) for image in found]
    assert np.mean(inverted) == pytest.approx(1 / 3, abs=0.08)
    moved = Ats(policy="3").transformed(images, seeded(1)[0])
    assert len(moved.flatten(1).unique(dim=0)) == 2


def test_clients_train_on_transformed_images_with_their_own_labels() -> None:
    batch = Batch(torch.cat([digit(3), digit(5)]), torch.tensor([3, 5]))
    first, again, other = (
        data_method([Ats()])(Task(0, 0, torch.nn.Identity(), {}, {}, batch, generator, order=0))
        for generator in seeded(1, 1, 3)
    )
    assert torch.equal(first.labels, batch.labels)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert torch.equal(batch.inputs, torch.cat([digit(3), digit(5)]))


@pytest.mark.parametrize("policy", ["50", "3-", "", "3--1", "a", "3+-1"])
def test_a_policy_that_is_none_is_refused(policy: str) -> None:
    with pytest.raises(ValidationError):
        Ats(policy=policy)


@pytest.fixture(scope="module")
def examiner() -> Examiner:
    return examiner_of(scenarios.parse(SCENARIO), images=8, epochs=5, seed=0)


def test_scores_of_images_that_tell_nothing_and_of_those_that_do(examiner: Examiner) -> None:
    plain = examiner.score(None)
    assert -1 <= plain.privacy <= 1
    assert plain.accuracy <= -1
    equal = examiner.images[:1].expand_as(examiner.images) + 1e-4 * torch.rand(examiner.images.shape)
    assert examiner.accuracy(equal) < 10 * plain.accuracy
    assert examiner.score(str(number_of("invert", 0))).privacy != plain.privacy
    assert examiner.score("3-1-7") == examiner.score("3-1-7")


def test_the_privacy_score_is_one_where_noise_has_the_images_gradient(examiner: Examiner) -> None:
    assert examiner.privacy(torch.rand(examiner.images[:2].shape, generator=seeded(9)[0])) < 1
    same = torch.rand(examiner.images[0].shape, generator=seeds.torch_generator(examiner.seed, "noise"))
    assert examiner.privacy(same[None]) == pytest.approx(1, abs=1e-5)


def test_random_policies_differ_and_follow_from_the_seed() -> None:
    found = random_policies(200, seed=1)
    assert len(set(found)) == 200
    assert found == random_policies(200, seed=1)
    assert found != random_policies(200, seed=2)
    assert {len(policy.split("-")) for policy in found} == {1, 2, 3}
    for policy in found:
        Ats(policy=policy)


def command(file: Path, out: Path, *more: str) -> tuple[int, str]:
    arguments = ["search-policy", str(file), "--out", str(out), "--candidates", "12", "--images", "4", "--epochs", "5"]
    result = CliRunner().invoke(app, [*arguments, *more])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.engine
def test_the_command_writes_what_a_scenario_takes_over(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    code, output = command(tmp_path / "s.yaml", tmp_path / "p.yaml", "--quiet")
    assert code == 0, output
    text = (tmp_path / "p.yaml").read_text()
    defended = scenarios.parse(SCENARIO + text)
    [spec] = defended.defences
    assert spec.parameters["policy"] == yaml.safe_load(text)["defences"][0]["policy"]
    assert len(spec.parameters["policy"].split("+")) == 2
    _, again = command(tmp_path / "s.yaml", tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == text
    assert "scored 12/12 policies" in again


def test_images_in_a_file_are_searched_as_those_in_memory(examiner: Examiner, tmp_path: Path) -> None:
    pack_dataset(Digits(size=8), tmp_path / "x.arrow", lambda *_: None)
    text = SCENARIO.replace("name: digits, size: 8", f"name: arrow, path: {tmp_path / 'x.arrow'}")
    found = examiner_of(scenarios.parse(text), images=8, epochs=5, seed=0)
    assert torch.equal(found.images, examiner.images)


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("public: 0.3", "public: 0"))
    code, output = command(tmp_path / "s.yaml", tmp_path / "p.yaml")
    assert code == 2
    assert "data.public" in output
    with pytest.raises(UserError, match=r"\d+%.*training\.lr"):
        examiner_of(scenarios.parse(SCENARIO.replace("0.05", "1e-6")), images=8, epochs=1, seed=0)
    with pytest.raises(UserError, match="300 images"):
        examiner_of(scenarios.parse(SCENARIO.replace("0.3", "0.1")), images=8, epochs=1, seed=0)
