"""What an attacker learns by running the model that it was shown on images of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rayfed.attacks.matching import buffers_for, without_tracking
from rayfed.update import Observation


@torch.no_grad()
def run(model: nn.Module, observation: Observation, layer: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """The input (n, ...) of the module called `layer` and the logits (n, K), at the observed weights.

    `images` is (n, C, H, W), on any device.
    """
    device = next(iter(observation.weights.values())).device
    model = without_tracking(model).to(device)
    seen: list[Tensor] = []
    model.get_submodule(layer).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    state = {**observation.weights, **buffers_for(model, observation)}
    logits = functional_call(model, state, (images.to(device),))
    return seen[0], logits
