"""What a scenario stands for: its data, dealt to its clients, and the promise that every arm's model fits them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayfed import seeds
from rayfed.attacks.base import Checked
from rayfed.data.base import Dataset
from rayfed.scenario import DataSpec, Scenario
from rayfed.training import plan
from rayfed.training.arm import build_arm


@dataclass(frozen=True)
class Inputs:
    """A scenario's data, loaded and dealt."""

    data: Dataset
    parts: list[np.ndarray]
    """Training indices of each client."""


def load_data(spec: DataSpec) -> Dataset:
    """The data of a scenario, its public share set aside."""
    data: Dataset = spec.build().load()
    return data.with_public(spec.public) if spec.public else data


def prepare(scenario: Scenario) -> Inputs:
    """Load the data, deal it to the clients, try every arm's model and attack: mistakes show before a cluster starts.

    Raises `UserError` for what does not fit.
    """
    data = load_data(scenario.data)
    generator = seeds.numpy_generator(scenario.seed, "partition")
    parts = scenario.partition.build().split(data.train_labels, scenario.federation.clients, generator)
    checked = [method for method in (attack.build() for attack in scenario.attacks) if isinstance(method, Checked)]
    for stack in scenario.stacks.values():
        arm = build_arm(scenario.model, stack, data.image_shape, len(data.classes), scenario.seed)
        for method in checked:
            method.check(arm.model, data.image_shape, len(data.classes))
    plan.check_victims(scenario, [len(part) for part in parts])
    return Inputs(data, parts)
