"""Base class of inference attacks that handle one observation at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import nn

from rayfed.attacks.base import Inference
from rayfed.attacks.forward_probe import without_tracking
from rayfed.update import Observation


class OneByOne(ABC):
    """Base class of an inference attack that handles observations one at a time and measures the time of each."""

    def infer(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Inference]:
        """Return one inference for each observation (see `InferenceAttack`)."""
        model = self._own(model)
        found = []
        for observation, generator in zip(observations, generators, strict=True):
            began = perf_counter()
            inference = self._inference(observation, model, generator)
            found.append(replace(inference, seconds=perf_counter() - began))
        return found

    def _own(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model in the form that the attack uses."""
        return without_tracking(model)

    @abstractmethod
    def _inference(self, observation: Observation, model: nn.Module, generator: torch.Generator) -> Inference: ...
