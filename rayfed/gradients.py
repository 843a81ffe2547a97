"""Compute gradients of a loss with respect to a model's weights: by name, per sample or for many batches at once.

Attacks and defences use these functions. They read the weights that are passed in, not those stored in `model`, and do
not change the model. Only buffers that are passed in may change, as batch norm does in training mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from rayfed.core import losses
from rayfed.core.number_types import check_types
from rayfed.core.vectorised import find_refusal, map_in_turn
from rayfed.update import Named

Result = TypeVar("Result")


def weights_of(model: nn.Module) -> Named:
    """Return detached copies of a model's trainable parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def buffers_of(model: nn.Module) -> Named:
    """Return detached copies of a model's buffers and frozen parameters, by name."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return {name: t.detach().clone() for name, t in [*model.named_buffers(), *frozen]}


class Penalised(ABC):
    """Base class of modules that add a penalty to the loss. All losses and gradients of this file include it."""

    @abstractmethod
    def penalty(self, output: Tensor) -> Tensor:
        """Return each sample's penalty (N,) from the output of the module's forward pass."""


def batch_loss(
    model: nn.Module, weights: Named, buffers: Named, inputs: Tensor, labels: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return the mean loss of a model over a batch, a scalar, with the penalties of `Penalised` modules.

    `inputs` is (N, *shape), such as images (N, C, H, W) in [0, 1]. `labels` are classes (N,) int64, probabilities
    (N, K), words (N, L) int64 or numbers (N, k). `mask` (N,) weights the samples, with 0 for padding.
    """
    return within(model, {**weights, **buffers}, lambda module: loss_of(module, inputs, labels, mask))


def within(model: nn.Module, state: Named, act: Callable[[nn.Module], Result]) -> Result:
    """Return `act(model)`, computed while the tensors of `state` replace the model's own. Tied tensors stay tied.

    Unlike with `functional_call`, `act` may run a backward pass, in which `torch.utils.checkpoint` computes outputs
    again from the model's tensors. Raises `ValueError` if tied names have different values.
    """
    places = [
        (f"{path}.{key}" if path else key, table, key)
        for path, module in model.named_modules(remove_duplicate=False)
        for table in (module._parameters, module._buffers)
        for key in table
    ]
    given: dict[int, Tensor] = {}
    for name, table, key in places:
        if name in state and given.setdefault(id(table[key]), state[name]) is not state[name]:
            raise ValueError(f"'{name}' is tied to a tensor with another value: give the same tensor for both names")
    own = [(table, key, tensor) for _, table, key in places if id(tensor := table[key]) in given]
    try:
        for table, key, tensor in own:
            table[key] = given[id(tensor)]
        return act(model)
    finally:
        for table, key, tensor in own:
            table[key] = tensor


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean loss of a batch (see `batch_loss`), computed with the model's current tensors."""
    with collected_penalties(model) as penalties:
        logits = model(inputs)
    loss = losses.get_loss(model)
    if mask is None:
        mean = loss(logits, labels)
        return mean + sum(penalty.mean() for penalty in penalties) if penalties else mean
    each = loss(logits, labels, "none") + sum(penalties)
    return (each * mask).sum() / mask.sum().clamp(min=1)


@contextmanager
def collected_penalties(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the penalties of `Penalised` modules in the block's forward pass, through temporary hooks."""
    found: list[Tensor] = []
    modules = [module for module in model.modules() if isinstance(module, Penalised)]
    hooks = [m.register_forward_hook(lambda m, _, output: found.append(m.penalty(output))) for m in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def gradient(
    model: nn.Module,
    weights: Named,
    buffers: Named,
    inputs: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    create_graph: bool = False,
) -> tuple[Named, Tensor]:
    """Return the gradient of `batch_loss` with respect to the weights, by name, and the loss (a detached scalar).

    With `create_graph` the gradient can be differentiated again with respect to `inputs`, `labels` and weights that
    require gradients.

    >>> import torch
    >>> from rayfed.gradients import buffers_of, gradient, weights_of
    >>> model = torch.nn.Linear(2, 2)
    >>> weights = {name: torch.zeros_like(tensor) for name, tensor in weights_of(model).items()}
    >>> found, loss = gradient(model, weights, buffers_of(model), torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    >>> found["weight"]
    tensor([[-0.5000, -1.0000],
            [ 0.5000,  1.0000]])
    >>> loss
    tensor(0.6931)
    """
    leaves = {
        name: w if create_graph and w.requires_grad else w.detach().requires_grad_() for name, w in weights.items()
    }

    def backward(module: nn.Module) -> tuple[Named, Tensor]:
        if create_graph:
            loss = loss_of(module, inputs, labels, mask)
            grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
            return dict(zip(leaves, grads, strict=True)), loss.detach()
        loss = loss_of(module, inputs.detach(), labels.detach(), mask)
        loss.backward()  # reentrant checkpoints do not support `torch.autograd.grad`
        return {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}, loss.detach()

    return within(model, {**leaves, **buffers}, backward)


def many_gradients(
    model: nn.Module, weights: Named, buffers: Named, inputs: Tensor, labels: Tensor, own: Named | None = None
) -> Named:
    """Return the differentiable gradients of P batches at the same weights.

    `inputs` is (P, N, *shape), `labels` (P, N) int64 or (P, N, K) probabilities. `own` are buffers that differ per
    batch. Their tensors and the returned ones have a leading dimension P. Runs one vmap call, or a loop for a model
    that vmap does not support.
    """
    leaves, own = {name: w.detach() for name, w in weights.items()}, own or {}
    if not vmap_refusal(model, leaves, buffers | {n: b[0] for n, b in own.items()}, inputs[0], labels[0]):
        one = grad(lambda w, b, x, y: batch_loss(model, w, buffers | b, x, y))
        gradients: Named = vmap(one, in_dims=(None, 0, 0, 0))(leaves, own, inputs, labels)
        return gradients
    again = inputs.requires_grad or labels.requires_grad
    one_by_one = map_in_turn(lambda b, x, y: gradient(model, leaves, buffers | b, x, y, create_graph=again)[0])
    with torch.enable_grad():  # `torch.func.grad` also ignores the caller's mode
        found: Named = one_by_one(own, inputs, labels)
    return found


def per_sample_gradients(model: nn.Module, weights: Named, buffers: Named, inputs: Tensor, labels: Tensor) -> Named:
    """Return the gradient of each sample's loss with respect to the weights, by name, each of shape (N, ...)."""
    return many_gradients(model, weights, buffers, inputs.unsqueeze(1), labels.unsqueeze(1))


def vmap_refusal(model: nn.Module, weights: Named, buffers: Named, inputs: Tensor, labels: Tensor) -> str:
    """Return why vmap cannot compute a model's gradients of several batches, as one line; empty if vmap can.

    Tried once per model, with inputs and labels of zeros, so that the values of a batch have no influence.
    """

    def trial() -> None:
        own = {name: b.detach().clone() for name, b in buffers.items()}
        fixed = {name: w.detach() for name, w in weights.items()}
        one = grad(lambda w, x, y: batch_loss(model, w, own, x, y))
        blank, none = (torch.zeros_like(t.detach()).expand(2, *t.shape) for t in (inputs, labels))
        vmap(one, in_dims=(None, 0, 0), randomness="different")(fixed, blank, none)

    first = next(iter(weights.values()))
    case = "gradient", tuple(weights), first.dtype, first.device, labels.dtype, repr(losses.get_loss(model))
    return find_refusal(model, case, trial)


def sample_rows(tensors: Named) -> Tensor:
    """Concatenate tensors (N, ...) of N samples to a matrix with one row per sample, in the dictionary's order."""
    return torch.cat([t.reshape(len(t), -1) for t in tensors.values()], 1)


def flatten(tensors: Named) -> Tensor:
    """Concatenate all tensors of a dictionary to one vector, in the dictionary's order."""
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def unflatten(vector: Tensor, like: Named) -> Named:
    """Split a vector into views with the names and shapes of the tensors `like`. This is the inverse of `flatten`."""
    pieces = vector.split([t.numel() for t in like.values()])
    return {name: piece.view_as(t) for (name, t), piece in zip(like.items(), pieces, strict=True)}


def norm(tensors: Named) -> Tensor:
    """Return the joint Euclidean norm of all tensors of a dictionary, a scalar."""
    check_types(tensors, "a norm", half=True)
    total: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors.values()]))
    return total


def clipped(tensors: Named, bound: float, leading: int = 0) -> Named:
    """Scale a gradient down to the norm `bound` if its norm is larger, as `torch.nn.utils.clip_grad_norm_` does.

    The first `leading` dimensions index several gradients, each of which is clipped separately.
    """
    check_types(tensors, "a clip bound", half=True)
    squares = torch.stack([t.reshape(*t.shape[:leading], -1).square().sum(-1) for t in tensors.values()]).sum(0)
    norms = squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()  # the root has no derivative at 0
    share = (bound / (norms + 1e-6)).clamp(max=1)
    return {name: t * share.view((*share.shape, *[1] * (t.dim() - leading))) for name, t in tensors.items()}
