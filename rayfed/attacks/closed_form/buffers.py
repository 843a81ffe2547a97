"""Buffers attack: reconstruct samples from the model's buffers, such as running statistics, that clients return.

Defences of the update do not change the buffers. After one step, the buffers are a known function of the batch, and the
samples solve an equation. The solution is exact if the function is affine, such as a running mean of pixels. Otherwise
it is found by Gauss-Newton.

Source: none; batch norm's moments are matched in Yin et al. 2021, "See through Gradients", section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.answer import answer, labelled, nothing_found, studied
from rayfed.attacks.closed_form.equations import is_affine, solve
from rayfed.attacks.closed_form.probe import Probe
from rayfed.attacks.closed_form.weight_norm import without_weight_norm
from rayfed.core.reasons import Reason
from rayfed.gradients import within
from rayfed.models.build import draw_nothing
from rayfed.models.copying import copy_model
from rayfed.registry import component
from rayfed.update import Named, Observation

_NOTHING = "no buffer that clients return depends on the samples"
_SEVERAL = "the client takes several local steps, and the attacker does not know the weights at the later steps"
_FEW = "the returned buffers hold {} values that depend on the batch, but one sample has {} values"
_SAME = 1e-9
"""Relative difference below which two batches leave a buffer at the same value, in double precision."""
_FITS = 1e-3
"""Maximum residual of a solution, as a share of that of grey samples."""


@component
class Buffers:
    """Solve for the samples from the buffers (such as running statistics) that a client returned."""

    place_labels: ClassVar[str] = "unneeded"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        model, observations = without_weight_norm(model, observations)

        def find(probed: Probe, observation: Observation, _: torch.Generator) -> Reconstruction:
            return _reconstruction(model, probed, observation)

        return studied(find, observations, model, generators)


def _reconstruction(model: nn.Module, probed: Probe, observation: Observation) -> Reconstruction:
    if observation.local.steps > 1:
        return not_applicable(observation, _SEVERAL, inherent=True)
    kept = _kept(model, probed, observation)
    shape = (observation.batch_size, *observation.sample.shape)
    one, other = (kept(probed.samples(shape[0], seed)) for seed in (1, 2))
    moved = [name for name in one if not (one[name] - other[name]).norm() <= _SAME * one[name].norm()]
    if not moved:
        return not_applicable(observation, _NOTHING, inherent=True)
    if (count := sum(one[name].numel() for name in moved)) < prod(observation.sample.shape):
        return not_applicable(observation, _FEW.format(count, prod(observation.sample.shape)), inherent=True)
    return labelled(partial(_solved, kept=kept, sizes={name: one[name].numel() for name in moved}), probed, observation)


def _solved(
    probed: Probe, observation: Observation, kept: Callable[[Tensor], Named], sizes: Mapping[str, int]
) -> Reconstruction:
    """Return the batch that yields the returned buffers: try the buffers affine in the batch, then all in `sizes`."""
    shape, moved = (observation.batch_size, *observation.sample.shape), list(sizes)
    names = [name for name in moved if is_affine(_of(kept, [name]), probed.samples(shape[0], 1))]
    for chosen, affine in ((names, True), (moved, False)):
        if sum(sizes[name] for name in chosen) < prod(observation.sample.shape):
            continue
        target = torch.cat([observation.returned_buffers[name].to(probed.dtype).flatten() for name in chosen])
        solution = solve(_of(kept, chosen), target.to(probed.device), shape, affine)
        if solution.residual < _FITS:
            return answer(probed, observation, solution.samples, aligned=shape[0] == 1)
    message = f"no samples found that fit the buffers {', '.join(moved)}"
    if sum(sizes.values()) < prod(shape):
        return nothing_found(observation, message)
    found = nothing_found(observation, f"the returned buffers could determine the samples: {message}")
    return replace(found, reason=Reason.BUFFERS_NOT_SOLVED)


def _kept(model: nn.Module, probed: Probe, observation: Observation) -> Callable[[Tensor], Named]:
    """Return the function from a batch (N, *shape) to the buffers that are returned after it, with their graph."""
    model = copy_model(model).to(probed.device, probed.dtype)
    draw_nothing(model)
    buffers = {n: t.to(probed.dtype) if t.is_floating_point() else t for n, t in observation.buffers.items()}

    def after(module: nn.Module, inputs: Tensor) -> Named:
        with _Followed():
            module(inputs)
        return {n: b for n, b in module.named_buffers() if n in observation.returned_buffers}

    def of(inputs: Tensor) -> Named:
        state = {**probed.weights, **{name: buffer.clone() for name, buffer in buffers.items()}}
        return within(model, state, lambda module: after(module, inputs))

    return of


def _of(kept: Callable[[Tensor], Named], names: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """Return the function from a batch to the named buffers, concatenated to one vector."""

    def function(inputs: Tensor) -> Tensor:
        found = kept(inputs)
        return torch.cat([found[name].flatten() for name in names])

    return function


class _Followed(TorchFunctionMode):
    """Keep the graph of values that a model writes into its buffers, even if the model detaches them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation with the autograd graph enabled, and replace `detach` by the identity."""
        if getattr(func, "__name__", "") == "detach" or getattr(func, "__self__", None) is Tensor.data:
            return args[0]
        with torch.enable_grad():
            return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _batch_norm(
    inputs: Tensor, mean: Tensor | None, variance: Tensor | None, training: bool, momentum: float, **others: Any
) -> Tensor:
    """Apply batch normalisation, and update the running statistics by differentiable operations."""
    if training and mean is not None and variance is not None:
        dimensions = [0, *range(2, inputs.ndim)]
        for kept, value in ((mean, inputs.mean(dimensions)), (variance, inputs.var(dimensions))):
            kept.mul_(1 - momentum).add_(momentum * value)
        mean = variance = None
    return F.batch_norm(inputs, mean, variance, training=training, momentum=momentum, **others)
