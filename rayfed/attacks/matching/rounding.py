"""Searches that run most passes through the model in bfloat16 on processors that are faster in it.

Steps along the sign of a slope need few of its digits: on ConvNets and ResNets, slopes in bfloat16 have the sign of
those in float32 at 93 to 99 of 100 pixels until the images are nearly found, and the last steps are in float32. Steps
without the sign end within 1 dB of those in float32 on CIFAR-10 and within 3 dB on MNIST (LeNet, 200 steps).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.second_derivatives import DIFFERENCED
from rayfed.models.copying import copy_model

_OPERATIONS = 1e9
"""Operations of a model's pass through one batch from which on rounding them saves more time than it takes."""
_ALIKE = 0.9
"""Least cosine of the slopes in both precisions where a search begins."""


def rounded(problem: Matching, points: Tensor, victims: Tensor) -> Matching:
    """Return the problem with passes in bfloat16, or as it is: where that is no faster, or its slopes are others.

    `points` (Q, D) of victims (Q,) are where the search begins. Statistics that clients returned, simulated steps and
    weight decay keep float32, and so does what is differentiated by differences.
    """
    if not _is_fast(problem) or not all(_can_be(one) for one in problem.rounds):
        return problem
    coarse = _in_bfloat16(problem)
    _, exact = problem.value_and_gradient(points, victims)
    _, slopes = coarse.value_and_gradient(points, victims)
    alike = torch.cosine_similarity(exact, slopes, 1) >= _ALIKE  # what is not finite is not alike
    return coarse if bool(alike.all()) else problem


def _is_fast(problem: Matching) -> bool:
    """Return whether the processor has units for matrices in bfloat16 (AMX), and the model enough work for them."""
    if problem.device.type != "cpu" or not torch.cpu._is_amx_tile_supported():
        return False
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        problem.model(torch.zeros(problem.images_shape, dtype=problem.model_dtype))
    return bool(counter.get_total_flops() >= _OPERATIONS)


def _can_be(one: Matching) -> bool:
    return (
        one.model_dtype is torch.float32
        and one.way is not DIFFERENCED
        and one.statistics is None
        and not one.simulated
        and not one.local.weight_decay
    )


def _in_bfloat16(problem: Matching) -> Matching:
    return replace(
        problem,
        model=copy_model(problem.model).to(torch.bfloat16),
        weights=_halved(problem.weights),
        buffers=_halved(problem.buffers),
        model_dtype=torch.bfloat16,
        earlier=tuple(_in_bfloat16(one) for one in problem.earlier),
    )


def _halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
