"""Gradient quantisation to a few bits (Refiner, Fan 2024, section 5.1, 'GQ'; one bit as Seide 2014)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed.catalogue import component
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.update import Update


@component
class Quantise(Defence):
    """Round each tensor to evenly spaced levels, symmetric about zero, between plus and minus its largest magnitude.

    With b bits there are 2^b - 1 levels, zero among them, so pruned values stay zero; with one bit a value keeps its
    sign alone and takes the tensor's mean magnitude. Empirical. Source: Refiner, section 5.1; Seide 2014 for one bit.
    """

    post_processes: ClassVar[bool] = True

    bits: Annotated[int, Field(ge=1, le=28)]
    """Bits of one sent value."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Quantise what is sent."""

        def update(task: Task) -> Update:
            sent = next(task)
            tensors = {name: self._quantised(t) for name, t in sent.tensors.items()}
            return replace(sent, tensors=tensors, bits=self.bits)

        return update

    def _quantised(self, tensor: Tensor) -> Tensor:
        if self.bits == 1:
            return tensor.sign() * tensor.abs().mean()
        largest = tensor.abs().max().double()  # float32 cannot count the levels of 24 bits and more
        if largest == 0:
            return tensor
        step = largest / (2 ** (self.bits - 1) - 1)
        return (torch.round(tensor.double() / step) * step).to(tensor)
