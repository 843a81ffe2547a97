"""Front part of a model, from the model's inputs to the output or input of one module.

Split models keep it with the client, and Soteria uses it to compute the input of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from rayfed.errors import UserError, nearest
from rayfed.models.copying import copy_model
from rayfed.samples import SampleSpec
from rayfed.update import Named


class _Reached(Exception):
    """Signal that ends a forward pass at the cut."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class Front:
    """Front part of a model, up to the module `cut`, as a pure function of weights and inputs."""

    def __init__(self, model: nn.Module, cut: str, before: bool = False) -> None:
        """Copy `model` including its modes; with `before`, the front ends at the input of the cut.

        Raises `UserError` for a module that the model does not have.
        """
        modules = dict(model.named_modules())
        del modules[""]
        if cut not in modules:
            raise UserError(f"cut: the model has no module '{cut}': {nearest(cut, modules)}")
        self.cut, self._model = cut, copy_model(model)
        last = self._model.get_submodule(cut)
        if before:
            last.register_forward_pre_hook(_stop_before)
        else:
            last.register_forward_hook(_stop)

    def __call__(self, state: Named, inputs: Tensor) -> Tensor:
        """Return the output (or input) of the cut, (N, ...), for inputs (N, *shape) and the tensors in `state`.

        Supports derivatives and vmap. Raises `UserError` if the forward pass does not reach the cut.
        """
        try:
            functional_call(self._model, state, (inputs,))
        except _Reached as reached:
            return reached.output
        raise UserError(f"cut: the model never calls the module '{self.cut}': choose another module")

    def names(self, sample: SampleSpec) -> list[str]:
        """Return the names of the parameters and buffers that the front part uses on samples like `sample`.

        These are all tensors of a module that has finished before the cut, because it may use its submodules'
        parameters without calling them. For a module that is still running, they are only its own tensors.
        """
        probe, begun, done = Front(self._model, self.cut), set[str](), {self.cut}
        for name, module in probe._model.named_modules():
            module.register_forward_pre_hook(_noting(name, begun))
            module.register_forward_hook(_noting(name, done))
        probe({}, sample.trial().to(next(self._model.parameters()).device))
        tensors = [name for name, _ in chain(self._model.named_parameters(), self._model.named_buffers())]
        return [n for n in tensors if n.rpartition(".")[0] in begun or any(n.startswith(f"{m}.") for m in done)]


def _stop(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    raise _Reached(output)


def _stop_before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    raise _Reached(inputs[0])


def _noting(name: str, ran: set[str]) -> Callable[[nn.Module, Any], None]:
    return lambda *_: ran.add(name)
