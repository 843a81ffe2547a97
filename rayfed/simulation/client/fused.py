"""Gradients of a cohort in one forward and one backward pass, with different weights for every client.

The backward pass is that of the sum of the clients' losses. In the forward pass, each operation runs once for all
clients: a linear layer as a batched product, a convolution as a grouped one with a group per client. Other operations
run under `torch.func.vmap`, one at a time. Results equal those of single clients up to the order of sums. Models with
custom autograd functions are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import vjp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from rayfed import gradients
from rayfed.core import losses
from rayfed.defences.base import Batch, Task
from rayfed.errors import UserError
from rayfed.update import Named


@torch.enable_grad()
def fused_gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
    """Compute the undefended gradients of K clients, by parameter name, and the clients' losses (K,).

    Weights, inputs, labels and mask have a leading dimension K; model and buffers are those of `task`. Raises
    `UserError` for a model with a custom autograd function, whose gradient would be wrong.
    """
    assert batch.mask is not None
    inputs, labels, mask = batch.inputs.detach(), batch.labels.detach(), batch.mask
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}

    def backward(model: nn.Module) -> tuple[Named, Tensor]:
        with gradients.collected_penalties(model) as penalties:
            outputs = _every(model(Stacked(inputs)))
        each = losses.get_loss(model)(outputs.flatten(0, 1), labels.flatten(0, 1), "none").view_as(mask)
        each = each + sum(_every(penalty) for penalty in penalties)
        means = (each * mask).sum(1) / mask.sum(1).clamp(min=1)
        slopes = torch.autograd.grad(means.sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, slopes, strict=True)), means.detach()

    stacked = {name: Stacked(leaf) for name, leaf in leaves.items()}
    return gradients.within(task.model, stacked | task.buffers, backward)


def fused_gradient_in_vmap(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
    """Compute the undefended gradient inside a vmap over clients, as one `fused_gradient` of all clients.

    Raises `UserError` if this gradient is differentiated, or inside another vmap.
    """
    mask = torch.ones(len(batch.inputs), device=batch.inputs.device) if batch.mask is None else batch.mask
    loss, *slopes = _Gradient.apply(task, tuple(weights), batch.inputs, batch.labels, mask, *weights.values())
    return dict(zip(weights, slopes, strict=True)), loss


_ONLY_IN_VMAP = (
    "training.vectorise: fused is not possible: a defence differentiates a gradient, or needs the gradient of each "
    "sample; use auto or loop"
)


class _Gradient(torch.autograd.Function):
    """The gradient as one operation, to which vmap passes the tensors of all clients."""

    @staticmethod
    def forward(task: Task, names: Sequence[str], *tensors: Tensor) -> Any:
        raise UserError(_ONLY_IN_VMAP)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise UserError(_ONLY_IN_VMAP)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], task: Task, names: Sequence[str], *tensors: Tensor) -> Any:
        if any(map(is_functorch_wrapped_tensor, tensors)):
            raise UserError(_ONLY_IN_VMAP)
        inputs, labels, mask, *weights = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[2:], strict=True)
        )
        slopes, loss = fused_gradient(task, dict(zip(names, weights, strict=True)), Batch(inputs, labels, mask))
        return (loss, *slopes.values()), (0,) * (1 + len(slopes))


class Stacked(Tensor):
    """K tensors, one per client, that a model uses as one tensor; `every` (K, *shape) contains all K."""

    every: Tensor

    @staticmethod
    def __new__(cls, every: Tensor) -> Stacked:
        """Wrap the tensors `every` (K, *shape) of all clients."""
        made: Stacked = Tensor._make_wrapper_subclass(
            cls, every.shape[1:], dtype=every.dtype, device=every.device, requires_grad=every.requires_grad
        )
        made.every = every
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PROPERTIES:
            return func(args[0].every[0], *args[1:], **kwargs)
        form = None if any(isinstance(value, Tensor) for value in kwargs.values()) else _FORMS.get(func)
        made = form(func, *args, **kwargs) if form else None
        return _mapped(func, args, kwargs) if made is None else made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} is not supported for the stacked tensors of a cohort")


def _every(tensor: Tensor) -> Tensor:
    """Return the tensors of all clients, (K, *shape).

    Raises `UserError` for the output of a custom autograd function, which would differentiate one tensor, not K.
    """
    assert isinstance(tensor, Stacked)
    with torch._C.DisableTorchFunctionSubclass():
        maker = tensor.grad_fn
    if maker is not None:
        raise UserError(
            f"training.vectorise: fused is not possible: the model has a custom autograd function "
            f"({type(maker).__name__}); use auto or loop"
        )
    return tensor.every


def _mapped(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], in_parts: bool = False) -> Any:
    """Run an operation with vmap over the clients; it may also return values that are not tensors.

    `in_parts` is for operations without a vmap rule: inside `vjp`, PyTorch decomposes them into parts that have one.
    """
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Stacked)]
    result: tuple[list[Any], Any] = [], None

    def of_one(*tensors: Tensor) -> list[Tensor]:
        nonlocal result
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        own_args, own_kwargs = tree_unflatten(leaves, spec)
        result = tree_flatten(func(*own_args, **own_kwargs))
        return [leaf for leaf in result[0] if isinstance(leaf, Tensor)]

    each = (lambda *tensors: vjp(of_one, *tensors)[0]) if in_parts else of_one
    # Contiguous, because group norm queries the memory format, which vmap does not support in PyTorch 2.11.
    stacked = iter(vmap(each)(*(_every(leaves[i]).contiguous() for i in places)))
    return tree_unflatten([Stacked(next(stacked)) if isinstance(r, Tensor) else r for r in result[0]], result[1])


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Stacked | None:
    if not _all_stacked(input, weight, bias) or input.ndim < 2:
        return None
    rows, w = _every(input).flatten(1, -2), _every(weight).transpose(1, 2)
    made = rows @ w if bias is None else torch.baddbmm(_every(bias).unsqueeze(1), rows, w)
    return Stacked(made.unflatten(1, input.shape[:-1]))


def _conv2d(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Stacked | None:
    if not _all_stacked(input, weight, bias) or input.ndim != 4:
        return None
    clients = len(_every(input))
    x, w = _as_channels(input), _every(weight).flatten(0, 1)
    x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))  # the fastest format on CPU
    b = None if bias is None else _every(bias).flatten()
    return _of_channels(F.conv2d(x, w, b, stride, padding, dilation, clients * groups), clients)


def _pool(func: Any, input: Stacked, *args: Any, **kwargs: Any) -> Stacked | None:
    if input.ndim != 4 or kwargs.get("return_indices"):
        return None
    return _of_channels(func(_as_channels(input), *args, **kwargs), len(input.every))


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Stacked | None:
    """Apply an elementwise operation, with broadcasting over the dimensions after K."""
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    if len({operand.dtype for operand in operands}) > 1:  # type promotion depends on the number of dimensions
        return None
    rank = max(operand.ndim for operand in operands)

    def aligned(arg: Any) -> Any:
        return _every(arg)[:, *[None] * (rank - arg.ndim)] if isinstance(arg, Stacked) else arg

    return Stacked(func(*map(aligned, args), **kwargs))


def _flatten(func: Any, input: Stacked, start_dim: int = 0, end_dim: int = -1) -> Stacked:
    return Stacked(_every(input).flatten(*(dim + (dim >= 0) for dim in (start_dim, end_dim))))


def _view(func: Any, input: Tensor, *sizes: Any) -> Stacked | None:
    """Reshape each client's tensor. A view may be impossible, as the stacked tensor need not be contiguous."""
    shape = sizes[0] if sizes and isinstance(sizes[0], Sequence) else sizes
    if not isinstance(input, Stacked) or not all(isinstance(size, int) for size in shape):
        return None
    every = _every(input)
    return Stacked(every.reshape(len(every), *shape))


def _recurrent(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a recurrent layer, for which vmap has no rule."""
    return _mapped(func, args, kwargs, in_parts=True)


def _all_stacked(*tensors: Tensor | None) -> bool:
    return all(tensor is None or isinstance(tensor, Stacked) for tensor in tensors)


def _as_channels(images: Tensor) -> Tensor:
    """Return the clients' images as (N, K * C, H, W), without a copy after a convolution."""
    return _every(images).transpose(0, 1).flatten(1, 2)


def _of_channels(images: Tensor, clients: int) -> Stacked:
    return Stacked(images.unflatten(1, (clients, -1)).transpose(0, 1))


def _named(*names: str) -> list[Any]:
    """Return PyTorch's functions and methods with these names."""
    return [getattr(home, name) for name in names for home in (torch, Tensor, F) if hasattr(home, name)]


_PROPERTIES = {
    Tensor.dim,
    Tensor.size,
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")),
}
"""Properties that are equal for the tensors of all clients."""

_FORMS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_named("linear"), _linear),
    **dict.fromkeys(_named("conv2d"), _conv2d),
    **dict.fromkeys(_named("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"), _pool),
    **dict.fromkeys(_named("flatten"), _flatten),
    Tensor.view: _view,
    Tensor.reshape: _view,
    **dict.fromkeys(_named("add", "add_", "sub", "mul", "div"), _pointwise),
    **dict.fromkeys(_named("relu", "relu_", "leaky_relu", "elu", "gelu", "silu", "hardtanh", "softplus"), _pointwise),
    **dict.fromkeys(_named("sigmoid", "tanh"), _pointwise),
    **dict.fromkeys(_named("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell"), _recurrent),
}
"""Operation -> its implementation for all clients at once. If the implementation returns None, vmap is used."""
