"""Batch-norm prior: a batch's statistics against the running ones that the server keeps of earlier batches.

Source: Yin et al. 2021, "See through Gradients", section 3 (fidelity regularisation).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.linalg import vector_norm
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.attacks.matching.priors import Prior
from rayfed.update import Observation


def batch_norm_prior(model: nn.Module, observation: Observation) -> Prior | None:
    """Return the prior: distances of mean and variance (divided by N) to the running ones, summed over batch norms.

    None for a model without running statistics. All victims of the problem were sent the observation's weights.
    """
    names = [n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not names:
        return None
    network = without_tracking(model).to(next(iter(observation.weights.values())).device)
    state = observation.weights | buffers_for(network, observation)
    distances: list[Tensor] = []
    for name in names:
        running = observation.buffers[f"{name}.running_mean"], observation.buffers[f"{name}.running_var"]
        network.get_submodule(name).register_forward_pre_hook(_measuring(*running, distances))

    def of_one(images: Tensor) -> Tensor:
        distances.clear()
        functional_call(network, state, (images,))
        return torch.stack(distances).sum()

    return vmap(of_one)


def _measuring(mean: Tensor, variance: Tensor, distances: list[Tensor]) -> Callable[..., None]:
    """Return a hook that notes how far a module's input (N, C, ...) is from `mean` and `variance`."""

    def measure(_: nn.Module, inputs: tuple[Tensor]) -> None:
        over = [axis for axis in range(inputs[0].ndim) if axis != 1]
        seen, spread = inputs[0].mean(over), inputs[0].var(over, correction=0)
        distances.append(vector_norm(seen - mean) + vector_norm(spread - variance))

    return measure
