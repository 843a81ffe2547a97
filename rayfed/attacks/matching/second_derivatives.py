"""Compute gradients with respect to the weights that can be differentiated again, for any model.

There are three ways, the fastest first. `TOGETHER` runs many problems in one vmap call. `IN_TURN` runs autograd on one
problem after the other, for models that vmap does not support: recurrent layers, branches on values, checkpoints.
`DIFFERENCED` uses only first derivatives, for kernels and functions that have no others. For a loss L(w, x) and any
vector v in the space of the weights,

    d/dx <v, dL/dw (w, x)>  =  d/de dL/dx (w + e v, x)  at e = 0,

which is a central difference of two ordinary backward passes. Attention uses its formula instead of the fused kernels,
which have first derivatives only.

A missing second derivative does not always raise an error: the result may be zero or incomplete. `fitting_way`
therefore compares each way with differences of the gradients before an attack uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.linalg import vector_norm
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.attacks.base import NotApplicable
from rayfed.attacks.remembered import once_for
from rayfed.core.vectorised import map_in_turn
from rayfed.gradients import batch_loss, flatten, gradient, loss_of, within
from rayfed.update import Named

_Result = TypeVar("_Result")
OneGradient = Callable[[nn.Module, Named, Named, Tensor, Tensor], Named]
"""Model, weights, buffers, inputs and labels of one batch -> gradient in the weights, with its graph."""

_DRAWS = 3
"""Number of trial points. A kink (ReLU, max pooling) close to a trial point invalidates the differences there."""
_NONE = (
    "the model's gradient cannot be differentiated with respect to the inputs ({}), which gradient matching needs; use "
    "a closed-form attack, or write the layer with operations that PyTorch can differentiate twice"
)
_OTHER = "autograd does not return the derivative of the gradient"
_JUMPS = "the gradient changes only in steps, as after a threshold or a quantisation table"
_AT_ONCE = 2
"""Number of samples per batch, and of batches, in a trial."""


@dataclass(frozen=True)
class Way:
    """Method to compute the gradients of many problems with their autograd graphs."""

    gradient: OneGradient
    together: bool = False
    """Whether `gradient` works inside vmap."""

    def each(self, one: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that applies `one` along the leading dimension Q of tensors, or dictionaries of tensors."""
        return vmap(one) if self.together else map_in_turn(one)

    def differentiate(self, value: Tensor, point: Tensor) -> None:
        """Add the derivative of a value, computed from `gradients`, to the `grad` of the leaf tensor `point`.

        Backward passes to the weights are skipped, which saves a sixth of the work. `DIFFERENCED` cannot skip them,
        because reentrant checkpoints support only full passes.
        """
        value.backward(inputs=None if self is DIFFERENCED else [point])

    def gradients(
        self, model: nn.Module, weights: Named, buffers: Named, images: Tensor, labels: Tensor, own: Named
    ) -> Named:
        """Return the gradients of Q batches at the same weights: images (Q, N, *shape), labels (Q, N) or (Q, N, K).

        Each tensor has a leading dimension Q, including those of `own`, which are buffers that differ between batches.
        """
        # a single problem is up to 1.6 times as fast without vmap
        way = self if len(images) > 1 or not self.together else IN_TURN
        found: Named = way.each(lambda b, x, y: way.gradient(model, weights, buffers | b, x, y))(own, images, labels)
        return found


def _functional(model: nn.Module, weights: Named, buffers: Named, inputs: Tensor, labels: Tensor) -> Named:
    with sdpa_kernel(SDPBackend.MATH):
        found: Named = grad(lambda w: batch_loss(model, w, buffers, inputs, labels))(weights)
    return found


def _autograd(model: nn.Module, weights: Named, buffers: Named, inputs: Tensor, labels: Tensor) -> Named:
    with sdpa_kernel(SDPBackend.MATH):
        return gradient(model, weights, buffers, inputs, labels, create_graph=True)[0]


def _differenced(model: nn.Module, weights: Named, buffers: Named, inputs: Tensor, labels: Tensor) -> Named:
    parts = *weights.values(), *buffers.values(), inputs, labels
    return dict(zip(weights, _Differenced.apply(model, list(weights), list(buffers), *parts), strict=True))


class _Differenced(torch.autograd.Function):
    """Gradient whose derivative is a central difference (see the module docstring)."""

    @staticmethod
    def forward(ctx: Any, model: nn.Module, weights: list[str], buffers: list[str], *parts: Tensor) -> Any:
        ctx.model, ctx.weights, ctx.buffers = model, weights, buffers
        ctx.save_for_backward(*parts)
        state = dict(zip(chain(weights, buffers), parts[:-2], strict=True))
        own = {name: state.pop(name) for name in weights}
        with torch.enable_grad():
            found, _ = gradient(model, own, state, parts[-2], parts[-1])
        ctx.reached = [bool(g.any()) for g in found.values()]  # no derivative either for tensors without gradient
        return tuple(found.values())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        parts, count = ctx.saved_tensors, len(ctx.weights)
        slopes = tuple(v * reached for v, reached in zip(slopes, ctx.reached, strict=True))
        size = _length(slopes)
        if size == 0:
            return None, None, None, *map(torch.zeros_like, parts)
        step = torch.finfo(size.dtype).eps ** 0.5 * _length(parts[:count]) / size
        ahead, behind = (
            _Differenced._slopes(ctx, [*(w + s * v for w, v in zip(parts, slopes, strict=False)), *parts[count:]])
            for s in (step, -step)
        )
        return None, None, None, *((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))

    @staticmethod
    def _slopes(ctx: Any, parts: list[Tensor]) -> list[Tensor]:
        """Return the derivatives of the loss in all parts, zeros for parts without one."""
        leaves = [p.detach().requires_grad_(p.is_floating_point()) for p in parts]
        state = dict(zip(chain(ctx.weights, ctx.buffers), leaves[:-2], strict=True))
        with torch.enable_grad():
            within(ctx.model, state, lambda module: loss_of(module, *leaves[-2:]).backward())
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def _length(tensors: Iterable[Tensor]) -> Tensor:
    length: Tensor = vector_norm(torch.stack([vector_norm(t) for t in tensors]))
    return length


TOGETHER = Way(_functional, together=True)
IN_TURN = Way(_autograd)
DIFFERENCED = Way(_differenced)


def way_of(model: nn.Module, network: nn.Module, weights: Named, images_shape: tuple[int, ...], labels: Tensor) -> Way:
    """Return `fitting_way` of `network`, a differentiable copy of `model`, computed once per model.

    `weights` are the trainable weights, in the precision to test. The trial uses the model's state moved at random,
    because zeros would hide errors. It does not use the observation, so results for one observation do not depend on
    another.
    """
    modes = tuple(module.training for module in model.modules())
    first = next(iter(weights.values()))
    case = (modes, tuple(weights), first.dtype, first.device, images_shape, labels.is_floating_point())

    def find() -> Way:
        own = {
            name: tensor.detach().to(first) if tensor.is_floating_point() else tensor
            for name, tensor in chain(network.named_parameters(), network.named_buffers())
        }
        trained = _moved({name: own.pop(name) for name in weights})
        return fitting_way(network, trained, own, images_shape, labels)

    return once_for(model, "way", case, find)


def _moved(weights: Named) -> Named:
    """Return weights plus noise of half the scale of an initialisation, for vectors a scale of one half."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        moved[name] = weight + noise.to(weight) / (2 * (weight[0].numel() if weight.ndim > 1 else 1) ** 0.5)
    return moved


def fitting_way(model: nn.Module, weights: Named, buffers: Named, images_shape: tuple[int, ...], labels: Tensor) -> Way:
    """Return the fastest `Way` whose second derivatives of the model are correct at random inputs (N, *shape).

    `labels` is (N,) int64 or (N, K), or only those of the first sample. Raises `NotApplicable` if no way is correct.
    """
    trials = [_Trial.draw(model, weights, buffers, images_shape, labels, seed) for seed in range(_DRAWS)]
    with _without_tf32() if trials[0].images.is_cuda else nullcontext():
        return _fitting_way(trials)


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Turn off TF32 in the block, in which derivatives of deep models differ by several per cent."""
    kinds: Sequence[Any] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [kind.allow_tf32 for kind in kinds]
    try:
        for kind in kinds:
            kind.allow_tf32 = False
        yield
    finally:
        for kind, allowed in zip(kinds, before, strict=True):
            kind.allow_tf32 = allowed


def _fitting_way(trials: Sequence[_Trial]) -> Way:
    turns, fault = _tried(lambda: trials[0].slope(IN_TURN))
    if turns is not None and not turns.any() and _jumps(trials):
        raise NotApplicable(_NONE.format(_JUMPS))
    if turns is not None and not (fault := _fault(IN_TURN, trials)):
        alike, _ = _tried(lambda: all(_close(t.slope(TOGETHER), t.slope(IN_TURN)) for t in trials))
        return TOGETHER if alike else IN_TURN
    if _tried(lambda: trials[0].slope(DIFFERENCED))[0] is None or _fault(DIFFERENCED, trials):
        trials[0].alone.gradients()  # fails the attack if the model has no first derivatives either
        raise NotApplicable(_NONE.format(fault))
    return DIFFERENCED


def _jumps(trials: Sequence[_Trial]) -> bool:
    """Return whether gradients differ between batches but have zero derivative at every trial point.

    A search would then stay at its start, and its end would not depend on the gradient.
    """
    one, other = (trial.alone.gradients() for trial in trials[:2])
    return not torch.equal(one, other) and not any(trial.slope(IN_TURN).any() for trial in trials[1:])


def _tried(act: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Return the result of a call to the user's model, or None and the error that it raised."""
    try:
        return act(), ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]


def _fault(way: Way, trials: Sequence[_Trial]) -> str:
    """Return the error in a way's second derivatives, or an empty string if they are correct in at least one trial.

    They are compared with differences in double precision if the model supports it. Kernels differ by precision, so
    they are also compared with results in the way's precision. One batch per trial suffices. Without finite gradients
    there is nothing to compare: the result is an empty string, and the attack reports that it diverged.
    """
    precise: Sequence[_Trial] = [trial.alone.to(torch.float64) for trial in trials]
    if _tried(precise[0].gradients)[0] is None:
        precise = [trial.alone for trial in trials]
    _, raised = _tried(lambda: precise[0].slope(way))
    if raised:
        return raised
    pairs = zip(trials, precise, strict=True)
    if any(_tried(partial(_is_right, way, *pair))[0] for pair in pairs):
        return ""
    return _OTHER if any(trial.is_finite() for trial in precise) else ""


def _is_right(way: Way, trial: _Trial, precise: _Trial) -> bool:
    slope = precise.slope(way)
    return precise.shows(slope) and (way is DIFFERENCED or _close(trial.alone.slope(way), slope))


def _close(rounded: Tensor, slope: Tensor) -> bool:
    bound = torch.finfo(rounded.dtype).eps ** 0.25 * vector_norm(slope)
    return bool(bound.isfinite()) and bool(vector_norm(rounded - slope) <= bound)


@dataclass(frozen=True)
class _Trial:
    """Random batches, and a random direction along which to measure changes of their gradients."""

    model: nn.Module
    weights: Named
    buffers: Named
    images: Tensor
    """(P, N, *shape)"""
    labels: Tensor
    along: Named

    @classmethod
    def draw(
        cls,
        model: nn.Module,
        weights: Named,
        buffers: Named,
        images_shape: tuple[int, ...],
        labels: Tensor,
        seed: int,
    ) -> Self:
        """Return a random trial in the precision of the weights."""
        generator = torch.Generator().manual_seed(seed)
        first = next(iter(weights.values()))
        size = _AT_ONCE, min(_AT_ONCE, images_shape[0]), *images_shape[1:]
        images = torch.rand(size, generator=generator, dtype=torch.float64).to(first)
        along = {n: torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w) for n, w in weights.items()}
        return cls(
            model, weights, buffers, images, labels[: size[1]].expand(_AT_ONCE, size[1], *labels.shape[1:]), along
        )

    @property
    def alone(self) -> Self:
        """Return the trial with only the first batch."""
        return replace(self, images=self.images[:1], labels=self.labels[:1])

    def to(self, dtype: torch.dtype) -> Self:
        """Return the trial converted to another dtype."""

        def cast(tensors: Named) -> Named:
            return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}

        inputs = cast({"images": self.images, "labels": self.labels})
        weights, buffers, along = cast(self.weights), cast(self.buffers), cast(self.along)
        return type(self)(self.model, weights, buffers, inputs["images"], inputs["labels"], along)

    def gradients(self, moved: Tensor | float = 0.0) -> Tensor:
        """Return the gradients at `images + moved` as one vector, computed as a client does."""
        pairs = zip(self.images + moved, self.labels, strict=True)
        return torch.cat([flatten(gradient(self.model, self.weights, self.buffers, x, y)[0]) for x, y in pairs])

    def slope(self, way: Way) -> Tensor:
        """Return the derivative of <`along`, gradients> with respect to the images, computed by `way`."""
        images = self.images.clone().requires_grad_()
        found = way.gradients(self.model, self.weights, self.buffers, images, self.labels, {})
        way.differentiate(torch.stack([(g * self.along[name]).sum() for name, g in found.items()]).sum(), images)
        return torch.zeros_like(images) if images.grad is None else images.grad

    def shows(self, slope: Tensor) -> bool:
        """Return whether a derivative agrees with finite differences of the gradients along a random direction."""
        epsilon = torch.finfo(self.images.dtype).eps
        direction = torch.randn(slope.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(slope)
        step, along = epsilon**0.5, flatten(self.along).repeat(len(self.images))
        ahead, behind = self.gradients(step * direction), self.gradients(-step * direction)
        changed, size = along @ (ahead - behind) / (2 * step), vector_norm(ahead)
        rounding = epsilon**0.25 * vector_norm(slope) + 100 * epsilon**0.5 * size
        return bool(rounding.isfinite()) and bool(((slope * direction).sum() - changed).abs() <= rounding)

    def is_finite(self) -> bool:
        """Return whether the gradients at the images are finite."""
        return bool(self.gradients().isfinite().all())
