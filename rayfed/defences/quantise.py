"""Gradient quantisation to a few bits (Refiner, Fan 2024, section 5.1, 'GQ'; one bit as Seide 2014; QSGD)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from rayfed.defences.base import Task
from rayfed.defences.error_feedback import Compression
from rayfed.registry import component
from rayfed.update import Update


@component
class Quantise(Compression):
    """Round each tensor to evenly spaced levels between plus and minus its largest magnitude.

    With b bits there are 2^b - 1 levels, zero among them, so pruned values stay zero; with one bit a value keeps its
    sign alone and takes the tensor's mean magnitude. Empirical. Sources: Refiner, section 5.1; Seide 2014 for one bit;
    Alistarh 2017, 'QSGD', for stochastic rounding (it scales by the Euclidean norm, where the levels are wider apart).
    """

    bits: Annotated[int, Field(ge=1, le=28)]
    """Number of bits of one sent value."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Round to the nearest level, or to one of the two next levels at random, so that the mean is the value itself."""

    def __post_init__(self) -> None:
        if self.rounding == "stochastic" and self.bits == 1:
            raise ValueError(
                "bits: 1 has no level beyond the mean magnitude, so larger values cannot be met in the mean: "
                "rounding: stochastic needs 2 bits or more"
            )
        if self.rounding == "stochastic" and self.error_feedback:
            raise ValueError(
                "error_feedback makes up for the bias of rounding, and rounding: stochastic has none; with few bits "
                "its error is larger than the update, and the memory would grow for ever: choose one of the two"
            )

    def compress(self, task: Task, update: Update) -> Update:
        """Return the quantised update."""
        tensors = {name: self._quantised(t, task.generator) for name, t in update.tensors.items()}
        return replace(update, tensors=tensors, bits=self.bits)

    def _quantised(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        if self.bits == 1:
            return tensor.sign() * tensor.abs().mean()
        largest = tensor.abs().max().double()  # float32 cannot count the levels of 24 bits and more
        if largest == 0:
            return tensor
        step = largest / (2 ** (self.bits - 1) - 1)
        levels = tensor.double() / step
        if self.rounding == "stochastic":
            levels = torch.floor(levels + torch.rand(tensor.shape, generator=generator).to(levels))
        else:
            levels = torch.round(levels)
        quantised: Tensor = (levels * step).to(tensor)
        return quantised
