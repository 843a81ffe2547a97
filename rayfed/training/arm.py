"""One arm of a scenario: the model as its defences adapt it, and the defences themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rayfed.defences.base import Defence
from rayfed.errors import UserError
from rayfed.models.build import build_model
from rayfed.scenario import DefenceSpec, ModelSpec


@dataclass(frozen=True)
class Arm:
    """What every process that plays a role in an arm builds for itself."""

    model: nn.Module
    """The architecture in the clients' mode; the weights drawn from the seed."""
    defences: tuple[Defence, ...]


def build_arm(
    model: ModelSpec, stack: Sequence[DefenceSpec], image_shape: tuple[int, int, int], classes: int, seed: int
) -> Arm:
    """Build an arm; raises `UserError` where the model does not fit data or defences, or has nothing to train."""
    defences = tuple(spec.build() for spec in stack)
    normalise = (model.normalise.mean, model.normalise.std) if model.normalise else None
    net = build_model(model.name, model.parameters, image_shape, classes, seed, normalise)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for defence in defences:
            net = defence.adapt_model(net)
    if not any(p.requires_grad for p in net.parameters()):
        raise UserError(f"model '{model.name}' has nothing to train: let one of its parameters have requires_grad=True")
    net.train()
    if model.batch_norm == "eval":
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
    for defence in defences:
        defence.check(net)
    return Arm(net, defences)
