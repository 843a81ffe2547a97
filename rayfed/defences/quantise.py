"""Gradient quantisation to a few bits (Refiner, Fan 2024, section 5.1, 'GQ'; one bit: Seide 2014; QSGD)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from rayfed.defences.base import Task
from rayfed.defences.error_feedback import Compression
from rayfed.registry import component
from rayfed.update import Named, Update

_IMPOSSIBLE = 2e-22
"""Probability that is declared for a value that is a step or more away: a finite logarithm, about -50."""
_LEAST_STEP = 1e-300
"""Step of a tensor of zeros, by which distances can be divided."""


@component
class Quantise(Compression):
    """Round each tensor to evenly spaced levels between plus and minus its largest magnitude.

    With b bits there are 2^b - 1 levels including zero, so pruned values stay zero. With one bit a value becomes its
    sign times the tensor's mean magnitude. Empirical. Sources: Refiner, section 5.1; Seide 2014 for one bit; Alistarh
    2017, 'QSGD', for stochastic rounding (QSGD scales by the Euclidean norm, which spaces the levels further apart).
    """

    bits: Annotated[int, Field(ge=1, le=28)]
    """Number of bits per value."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """`nearest`: round to the nearest level. `stochastic`: round up or down at random, without bias."""

    def __post_init__(self) -> None:
        if self.rounding == "stochastic" and self.bits == 1:
            raise ValueError(
                "rounding: stochastic needs 2 bits or more: the only levels of bits: 1 are plus and minus the mean "
                "magnitude, so larger values cannot be rounded without bias"
            )
        if self.rounding == "stochastic" and self.error_feedback:
            raise ValueError(
                "error_feedback corrects the bias of rounding, but rounding: stochastic has no bias: with few bits its "
                "error exceeds the update, and the residual would grow without bound: use only one of the two"
            )

    def compress(self, task: Task, update: Update) -> Update:
        """Return the update with each tensor's values rounded to evenly spaced levels."""
        tensors = {name: self._quantised(t, task.generator) for name, t in update.tensors.items()}
        return replace(update, tensors=tensors, bits=self.bits)

    @property
    def adds_noise(self) -> bool:
        """Return whether values are rounded at random."""
        return self.rounding == "stochastic"

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the rounded values with the derivative of the identity; their mean if rounding is stochastic."""
        return tensors if self.adds_noise else super().transform(task, tensors)

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        """Return the log probability that stochastic rounding gives each sent value."""
        likelihoods = {}
        for name, tensor in sent.items():
            # The largest value is a level, so it is sent exactly.
            step = (tensor.abs().max().double() / self._largest_level).clamp(min=_LEAST_STEP)
            error = torch.finfo(tensor.dtype).eps * tensor.abs().double()  # of the level in the tensor's type
            distance = ((tensor.double() - expected[name].double()).abs() - error).clamp(min=0) / step
            likelihoods[name] = (1 - distance).clamp(min=_IMPOSSIBLE).log()
        return likelihoods

    @property
    def _largest_level(self) -> int:
        """Number of levels above zero."""
        return int(2 ** (self.bits - 1) - 1)

    def _quantised(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        if self.bits == 1:
            return tensor.sign() * tensor.abs().mean()
        largest = tensor.abs().max().double()  # float32 cannot represent all levels of 24 bits or more
        if largest == 0:
            return tensor
        step = largest / self._largest_level
        levels = tensor.double() / step
        if self.rounding == "stochastic":
            levels = torch.floor(levels + torch.rand(tensor.shape, generator=generator).to(levels))
        else:
            levels = torch.round(levels)
        quantised: Tensor = (levels * step).to(tensor)
        return quantised
