"""Observation of a client's PyTorch training: inputs of the model, labels, and steps of the optimiser.

For frameworks in which the user's function trains a whole local round. Hooks are active during the round only.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from rayfed.errors import UserError
from rayfed.update import LocalTraining

_SETTINGS = "lr", "momentum", "weight_decay", "nesterov", "dampening"


@dataclass(frozen=True)
class Seen:
    """Data and settings observed in one local training round."""

    local: LocalTraining
    inputs: Tensor
    """(N, *shape): distinct inputs of the model."""
    labels: Tensor | None
    """(N,) int64; None if the loss was not PyTorch's cross entropy."""


class Watch(TorchFunctionMode):
    """Context manager that observes the training steps of models of one class."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self._kind = kind
        self._inputs: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._steps: list[tuple[type[Optimizer], frozenset[tuple[float, ...]]]] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for hook in (register_module_forward_pre_hook(self._fed), register_optimizer_step_pre_hook(self._stepped)):
            self._hooks.callback(hook.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record the targets of a differentiable cross entropy, then call the function."""
        given = kwargs or {}
        if func is F.cross_entropy and torch.is_grad_enabled():
            target = given.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor) and not target.is_floating_point():
                self._labels.append(target.detach().cpu().clone())
        return func(*args, **given)

    def _fed(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, self._kind) and module.training and torch.is_grad_enabled():
            if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
                raise UserError(
                    f"{self._kind.__name__} was called with {len(inputs)} positional arguments; expected one tensor, "
                    f"as in model(inputs)"
                )
            self._inputs.append(inputs[0].detach().cpu().clone())

    def _stepped(self, optimiser: Optimizer, *_: Any) -> None:
        every = {tuple(float(group.get(name) or 0) for name in _SETTINGS) for group in optimiser.param_groups}
        self._steps.append((type(optimiser), frozenset(every)))

    def seen(self, local: LocalTraining | None = None) -> Seen:
        """Return the observed data and settings; `local` replaces the observed steps.

        Raises `UserError` if nothing was observed, or if no attack supports the steps.
        """
        if not self._inputs:
            raise UserError(
                f"no training of a {self._kind.__name__} was observed; give the class of the trained model, and train "
                f"in the client's process"
            )
        matched = [len(labels) for labels in self._labels] == [len(inputs) for inputs in self._inputs]
        labels = torch.cat(self._labels) if matched else None
        if len(shapes := {tuple(inputs.shape[1:]) for inputs in self._inputs}) > 1:
            raise UserError(f"found inputs of shapes {sorted(shapes)}; give all samples the same shape")
        every = torch.cat(self._inputs)
        first: dict[bytes, int] = {}
        for place, sample in enumerate(every):
            first.setdefault(sample.contiguous().flatten().view(torch.uint8).numpy().tobytes(), place)
        places = torch.tensor(list(first.values()))
        return Seen(local or self._local(), every[places], None if labels is None else labels[places])

    def _local(self) -> LocalTraining:
        if not self._steps:
            raise UserError(
                "no training step of a torch.optim optimiser was observed; give the local steps with `local`"
            )
        kinds = {(kind, settings) for kind, every in self._steps for settings in every}
        if len(kinds) > 1:
            raise UserError(
                "found training steps with different optimisers, learning rates or decays; give the local steps with "
                "`local`"
            )
        [(kind, (lr, momentum, decay, nesterov, dampening))] = kinds
        if kind is not SGD or nesterov or dampening:
            raise UserError(
                f"the client trains with {kind.__name__}, but attacks support only SGD with plain momentum: use "
                f"torch.optim.SGD"
            )
        if len(self._inputs) != len(self._steps):
            raise UserError(
                f"found {len(self._inputs)} batches in {len(self._steps)} steps; only one batch per step can be "
                f"recorded"
            )
        return LocalTraining(len(self._steps), max(map(len, self._inputs)), lr, momentum, decay)
