"""The generator of a curious client: images that an independent judge takes for the class, if the model knows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rayfed import scenario as scenarios
from rayfed.attacks.base import Inference
from rayfed.attacks.inference.gan import Gan
from rayfed.gradients import buffers_of, weights_of
from rayfed.metrics.inference import class_share, nearest
from rayfed.models.build import build_model
from rayfed.runs import runner
from rayfed.samples import Pixels
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.visit import Truth
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Observation


def seen(net: torch.nn.Module, shape: tuple[int, int, int]) -> Observation:
    return Observation(0, 0, weights_of(net), buffers_of(net), {}, 1.0, 1, Pixels(*shape), 10)


@pytest.mark.engine
@pytest.mark.parametrize("shape", [(1, 13, 9), pytest.param((3, 32, 32), marks=pytest.mark.slow)])
def test_images_have_the_models_shape_and_convince_it(shape: tuple[int, int, int]) -> None:
    """Of every class more than after one step; how much more, and whether there is such an image, is the network's."""
    net = build_model("lenet", {"init": "uniform"}, shape, 10, seed=1)  # with opinions, unlike a default one
    observation = seen(net, shape)

    def likelihood(target: int, iterations: int) -> float:
        attack = Gan(target_class=target, iterations=iterations, images=3)
        [found] = attack.infer([observation], net, [torch.Generator()])
        assert found.images.shape == (3, *shape)
        assert 0 <= found.images.min() <= found.images.max() <= 1
        assert found.chance == 0.1
        return float(net(found.images).detach().log_softmax(1)[:, target].mean())

    before, after = (np.array([likelihood(target, n) for target in range(10)]) for n in (1, 60))
    assert (after >= before - 0.1).all()
    assert np.median(after - before) > 5


def test_the_same_generator_gives_the_same_images() -> None:
    net = build_model("lenet", {}, (1, 8, 8), 10, seed=1)
    attack = Gan(iterations=3)
    first, again, other = (
        attack.infer([seen(net, (1, 8, 8))], net, [torch.Generator().manual_seed(s)])[0].images for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_class_that_is_not_there_is_not_applicable() -> None:
    net = build_model("lenet", {}, (1, 8, 8), 10, seed=1)
    [found] = Gan(target_class=10).infer([seen(net, (1, 8, 8))], net, [torch.Generator()])
    assert found.status == "not applicable"


def test_the_judge_knows_digits_and_shows_the_nearest_of_the_victims() -> None:
    scenario = scenarios.parse("{name: t, data: digits, federation: {rounds: 1, clients: 2}}")
    inputs = prepare_inputs(scenario)
    runtime = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    images, labels = runtime._tensors(inputs.data.train_images, inputs.data.train_labels, inputs.parts[0][:200])
    known = runtime._tensors(inputs.data.test_images, inputs.data.test_labels, range(len(inputs.data.test_labels)))
    sevens = images[labels == 7]
    assert class_share(sevens, 7, *known) > 0.9
    assert class_share(sevens, 3, *known) < 0.1
    assert class_share(sevens, 7, *(part[:4] for part in known)) in (0.0, 1.0), "of fewer images than vote"
    assert torch.equal(nearest(sevens[:3] + 0.01, images), sevens[:3])
    row, pairs = ObservationBuilder(runtime).judge(
        Truth(images, labels), Inference(metric="class_share", images=sevens[:3], label=7)
    )
    assert row["candidates"] == 3
    assert all(torch.equal(true, made) for true, made in pairs)


def test_a_class_of_which_no_test_image_is_has_no_share(tmp_path: Path) -> None:
    """Which would be 0, whatever was generated."""
    scenario = scenarios.parse(
        "{name: t, data: {name: digits, size: 8, train_samples: 40, test_samples: 4}, federation: {rounds: 1, clients: "
        "2}, attacks: [{name: gan, target_class: 1, iterations: 1}, {name: gan, label: zero, iterations: 1}]}"
    )
    assert set(prepare_inputs(scenario).data.test_labels) == {1, 3, 6, 8}
    rows = runner.attack(scenario, None, str(tmp_path), local, Progress()).read_table("inferences").to_pylist()
    assert [(row["status"], row["value"] is None) for row in rows] == [("ok", False), ("not applicable", True)]
    assert "no test image has class 0" in rows[1]["message"]
