"""Define a model, a defence and an attack that fail at a chosen stage, for tests of exit codes and gates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import torch
import typer
from torch import Tensor, nn

from rayfed.attacks.base import NotApplicable, Reconstruction
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.registry import component
from rayfed.update import Observation, Update

EXITS = ("sys.exit(0)", "sys.exit()", "exit()", "SystemExit", "typer.Exit")
ERRORS = ("ValueError", "RuntimeError", "MemoryError", "AssertionError", "NotApplicable", "StopIteration")
LATE = 6
"""Number of forward passes before the stage `late`."""


def misbehave(fault: str) -> None:
    """Exit or raise the named exception."""
    match fault:
        case "sys.exit(0)":
            sys.exit(0)
        case "sys.exit()":
            sys.exit()
        case "exit()":
            exit()
        case "SystemExit":
            raise SystemExit
        case "typer.Exit":
            raise typer.Exit
        case "NotApplicable":
            raise NotApplicable("not for this model")
        case _:
            raise {kind.__name__: kind for kind in (ValueError, RuntimeError, MemoryError, AssertionError)}.get(
                fault, StopIteration
            )("a fault")


class Net(nn.Module):
    """A linear model that fails when it is built, or in some of its forward passes."""

    def __init__(
        self, image_shape: Sequence[int], classes: int, stage: str = "", fault: str = "", hidden: int = 0
    ) -> None:
        super().__init__()
        self.stage, self.fault, self.passes = stage, fault, 0
        inputs = image_shape[0] * image_shape[1] * image_shape[2]
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.Sigmoid()) if hidden else nn.Identity()
        self.head = nn.Linear(hidden or inputs, classes)
        if stage == "init":
            misbehave(fault)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        wrong = {
            "forward": True,
            "training": self.training,
            "late": self.passes > LATE,
            "single": len(x) == 1,
            "double": x.dtype == torch.float64,
            "gradient": torch.is_grad_enabled(),
        }
        if wrong.get(self.stage, False):
            misbehave(self.fault)
        return self.head(self.body(x.flatten(1)))


@component
class Shaky(Defence):
    """A defence that fails, returns an invalid update, or adds noise."""

    stage: str = ""
    fault: str = ""
    noise: float = 0.0

    def check(self, model: nn.Module) -> None:
        if self.stage == "check":
            misbehave(self.fault)

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        if self.stage == "wrap":
            misbehave(self.fault)

        def update(task: Task) -> Update:
            if self.stage == "update":
                misbehave(self.fault)
            made = next(task)
            tensors = {
                name: t + self.noise * torch.randn(t.shape, generator=task.generator)
                for name, t in made.tensors.items()
            }
            return made if self.stage else made.replace(tensors=tensors)

        return update


@component
class Guess:
    """An attack that fails, or returns images of the given kind."""

    fault: str = ""
    images: Literal["grey", "nan", "infinite", "fewer", "other shape", "none"] = "grey"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        if self.fault:
            misbehave(self.fault)
        if self.images == "none":
            return []
        return [self._guess(observation) for observation in observations]

    def _guess(self, observation: Observation) -> Reconstruction:
        images = observation.sample.blank(observation.batch_size) + 0.5
        if self.images in ("nan", "infinite"):
            images = images * float("nan" if self.images == "nan" else "inf")
        if self.images == "fewer":
            images = images[:0]
        if self.images == "other shape":
            images = images[..., :1]
        return Reconstruction(images, torch.zeros(observation.batch_size, dtype=torch.int64))
