"""Uniform noise on chosen layers (Fan et al. 2024, "Refiner", table 2): which layer's gradient may be perturbed."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.errors import UserError, nearest
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class Uniform(Defence):
    """Add independent uniform noise to every value of some layers, or of the whole update.

    Empirical: uniform noise has no (epsilon, delta), and sent values bound the true ones. Source: Refiner (Fan 2024),
    table 2, which compares layers.
    """

    vectorises: ClassVar[bool] = True
    post_processes: ClassVar[bool] = True

    magnitude: Annotated[float, Field(ge=0)]
    """Maximum magnitude of the noise, in the units of the update."""
    layers: list[str] | None = None
    """Names or patterns (`conv1.*`) of the parameters that get noise. Null: all."""

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` for a pattern in `layers` that fits no parameter of the model."""
        names = [name for name, _ in model.named_parameters()]
        for pattern in self.layers or []:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(f"uniform: layers: no parameter matches '{pattern}': {nearest(pattern, names)}")

    @property
    def has_latents(self) -> bool:
        """Return True: a search cannot follow the density of the noise, which is constant and then 0."""
        return True

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the update unchanged, which is the mean of the sent values."""
        return tensors

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Add uniform noise to the chosen layers of the client's update."""

        def update(task: Task) -> Update:
            sent = next(task)
            tensors = {}
            for name, tensor in sent.tensors.items():
                if self.layers is None or any(fnmatchcase(name, pattern) for pattern in self.layers):
                    noise = 2 * torch.rand(tensor.shape, generator=task.generator).to(tensor) - 1
                    tensor = tensor + self.magnitude * noise
                tensors[name] = tensor
            return replace(sent, tensors=tensors)

        return update

    def exposed(self, update: Update) -> Named | None:
        """Return a mask of the layers without noise; None if all have noise."""
        if self.layers is None:
            return None
        patterns = self.layers
        return {
            name: torch.full_like(tensor, not any(fnmatchcase(name, one) for one in patterns), dtype=torch.bool)
            for name, tensor in update.tensors.items()
        }
