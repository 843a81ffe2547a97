"""Forward passes of an attacker: run the model that clients were sent on the attacker's own samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.gradients import buffers_of, within
from rayfed.models.build import draw_nothing
from rayfed.models.copying import copy_model
from rayfed.update import Named, Observation


def without_tracking(model: nn.Module) -> nn.Module:
    """Return a copy of a model that an attacker can differentiate with respect to the images.

    Only modules in training mode change. Batch norms use the statistics of the batch and keep no running statistics,
    which cannot be updated under `torch.func.vmap`. Random modules run as in evaluation mode, because the client's
    random numbers are unknown: dropout passes values on, and a variational bottleneck returns its mean. Other modules
    that write into buffers (such as a spectral norm) start every pass with the buffers that the client was sent.
    """
    model = copy_model(model)
    draw_nothing(model)
    for module in model.modules():
        if module.training and isinstance(module, _BatchNorm):
            torch.func.replace_all_batch_norm_modules_(module)
        elif module.training and any(b is not None and b.is_floating_point() for b in module.buffers(recurse=False)):
            module.register_forward_pre_hook(_lend, prepend=True)
            module.register_forward_hook(_give_back, always_call=True)
    return model


def _lend(module: nn.Module, _: Any) -> None:
    """Replace a module's buffers by copies for one pass."""
    module.__dict__["_lent"] = dict(module._buffers)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.clone()


def _give_back(module: nn.Module, *_: Any) -> None:
    module._buffers.update(module.__dict__.pop("_lent", {}))


def buffers_for(model: nn.Module, observation: Observation) -> Named:
    """Return the observed values of the buffers and frozen parameters of `model`, a result of `without_tracking`."""
    return {name: observation.buffers[name] for name in buffers_of(model)}


@torch.no_grad()
def returned(model: nn.Module, observation: Observation, inputs: Tensor) -> Named:
    """Return a client's buffers after one forward pass on inputs (N, *shape), with random modules disabled."""
    device = next(iter(observation.weights.values())).device
    model = copy_model(model).to(device)
    draw_nothing(model)
    buffers = {name: tensor.to(device).clone() for name, tensor in observation.buffers.items()}

    def after(module: nn.Module) -> Named:
        module(inputs.to(device))
        return {name: t for name, t in module.named_buffers() if name in observation.returned_buffers}

    return within(model, {**observation.weights, **buffers}, after)


@torch.no_grad()
def run(model: nn.Module, observation: Observation, layer: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Run the model at the observed weights; return the input (n, ...) of the module `layer` and the logits (n, K).

    `inputs` is (n, *shape) on any device.
    """
    device = next(iter(observation.weights.values())).device
    model = without_tracking(model).to(device)
    seen: list[Tensor] = []
    model.get_submodule(layer).register_forward_pre_hook(lambda _, entered: seen.append(entered[0]))
    state = {**observation.weights, **buffers_for(model, observation)}
    logits = functional_call(model, state, (inputs.to(device),))
    return seen[0], logits
