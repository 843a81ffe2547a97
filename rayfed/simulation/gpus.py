"""GPUs that a run uses: how many there are, and whether `num_gpus: auto` means GPU or CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rayfed.core.simulated_gpus import simulated_gpus
from rayfed.scenario import Scenario

KINDS = ("clients", "attackers")
"""Kinds of actors that may compute on a GPU."""


def visible_gpus() -> int:
    """Return the number of GPUs that PyTorch finds in this process, or the number of simulated GPUs."""
    return simulated_gpus() or (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def gpus_here() -> dict[str, int]:
    """Return the number of GPUs of this process for each kind of actor (clients, attackers)."""
    return dict.fromkeys(KINDS, visible_gpus())


def with_devices(scenario: Scenario, gpus: Mapping[str, int]) -> Scenario:
    """Return the scenario with `num_gpus: auto` replaced by 0 for each kind of actor that has no GPUs."""
    automatic = [kind for kind in KINDS if getattr(scenario.resources, kind).num_gpus == "auto"]
    return with_num_gpus(scenario, {kind: 0.0 for kind in automatic if not gpus[kind]})


def with_num_gpus(scenario: Scenario, num_gpus: Mapping[str, float]) -> Scenario:
    """Return the scenario with `num_gpus` set for the given kinds of actors (clients, attackers)."""
    changed = {
        kind: getattr(scenario.resources, kind).model_copy(update={"num_gpus": number})
        for kind, number in num_gpus.items()
    }
    resources = scenario.resources.model_copy(update=changed)
    return scenario.model_copy(update={"resources": resources})
