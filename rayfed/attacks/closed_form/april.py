"""APRIL: reconstruct one sample of a transformer with learned position embeddings, in closed form.

A parameter p that is added entry by entry to a tensor u has the gradient dL/dp = dL/du = D. So the update contains the
gradient of the loss with respect to u. A weight W that contributes only to u has the gradient dL/dW = d<u(x), D>/dW.
The left side is sent, and the right side is a function of the sample x, linear if u is linear in x. So x solves a
linear system.

With patches X and patch-embedding weight W, the system is dL/dW = D^T X with the solution X = pinv(D^T) dL/dW. It is
exact if there are at most as many patches as rows of W. Otherwise undetermined pixels stay grey.

Source: Lu et al. 2022, "APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers", section 3. The paper
uses the gradients of the first attention layer, this attack those of all layers before the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.answer import answer, labelled, nothing_found, studied
from rayfed.attacks.closed_form.equations import is_affine, solve
from rayfed.attacks.closed_form.probe import Probe
from rayfed.registry import component
from rayfed.update import Named, Observation

_SEVERAL = "the attack needs a batch of one sample, because the gradient of learned positions is summed over the batch"
_NOTHING_ADDED = (
    "no gradient in the update belongs to a parameter that the model adds to an affine function of the sample, such as "
    "a learned position embedding"
)
_AFFINE = 1e-4
"""Maximum relative deviation of a gradient from linear interpolation if it is affine."""
_GOLDEN = (5**0.5 - 1) / 2
"""Interpolation point that is irrational, so that counts (such as of active units) never interpolate by accident."""
_RESIDUAL = 0.99
"""Residual, as a share of a grey sample's, from which on the equations determine nothing."""


class _Sum(NamedTuple):
    """A tensor of the forward pass to which a parameter is added."""

    parameter: str
    use: int
    order: Tensor
    """Index into the flat parameter for each entry of the tensor, (numel,)."""


@component
class April:
    """Solve for the sample from the gradients of the layers before a learned position embedding.

    The gradient of the positions is the gradient of the loss with respect to the tokens. The position
    parameter and the earlier weights are detected by checking which gradients at a random sample satisfy the equations.
    """

    place_labels: ClassVar[str] = "unneeded"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        return studied(_reconstruction, observations, model, generators)


def _reconstruction(probed: Probe, observation: Observation, _: torch.Generator) -> Reconstruction:
    if observation.batch_size > 1:
        return not_applicable(observation, _SEVERAL, inherent=True)
    return labelled(_of_one, probed, observation)


def _of_one(probed: Probe, observation: Observation) -> Reconstruction:
    gradient = {name: tensor.to(probed.dtype) for name, tensor in observation.gradient.items()}
    if not all(tensor.isfinite().all() for tensor in gradient.values()):
        return nothing_found(observation, "the update contains values that are not finite")
    names = tuple(gradient)
    if probed.once(("no equation", names), lambda: _no_equation(probed, names)):
        return not_applicable(observation, _NOTHING_ADDED, inherent=True)
    added: list[_Sum] = probed.once(("sums", names), lambda: list(_sums(probed, names)))
    for place, one in enumerate(added):
        weights: tuple[str, ...] = probed.once(("before", names, place), partial(_weights_before, probed, one, names))
        if not weights:
            continue
        function = _equations(probed, one, weights, gradient)
        if is_affine(function, probed.samples(1, seed=1)):
            target = torch.cat([gradient[name].flatten() for name in weights])
            telling = _telling(function, probed.samples(1, seed=1))
            told = partial(_chosen, function, telling)
            solution = solve(told, target[telling], (1, *probed.shape), affine=True)
            if solution.residual < _RESIDUAL:
                return answer(probed, observation, solution.samples, aligned=True)
            return nothing_found(observation, f"no sample fits the gradients of {', '.join(weights)}")
    return not_applicable(observation, _NOTHING_ADDED)


def _equations(probed: Probe, added: _Sum, weights: Sequence[str], gradient: Named) -> Callable[[Tensor], Tensor]:
    """Return the function from a sample to the gradients of the weights before the sum, in one vector."""
    leaves = probed.leaves()

    def function(inputs: Tensor) -> Tensor:
        output = probed.reached(inputs, leaves, added.use).output
        found = torch.autograd.grad(
            output,
            [leaves[name] for name in weights],
            _slope(added, output, gradient),
            create_graph=True,
            materialize_grads=True,
        )
        return torch.cat([part.flatten() for part in found])

    return function


def _telling(function: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
    """Return a mask of the equations that depend on the sample; those of biases and class tokens do not.

    Noise on equations without the sample would count as distance for every sample.
    """
    with torch.no_grad():
        return function(samples) != function(1 - samples)


def _chosen(function: Callable[[Tensor], Tensor], which: Tensor, inputs: Tensor) -> Tensor:
    """Return the values of a function at `inputs`, restricted to the equations in a mask."""
    return function(inputs)[which]


def _slope(added: _Sum, output: Tensor, gradient: Named) -> Tensor:
    """Return the gradient of the loss with respect to a tensor: that of the parameter that is added to it."""
    return gradient[added.parameter].flatten()[added.order].view_as(output)


def _sums(probed: Probe, names: Sequence[str]) -> Iterator[_Sum]:
    """Yield the tensors to which a parameter is added, in the order of the forward pass."""
    uses, leaves, _ = probed.run(probed.samples(1))
    for place, use in enumerate(uses):
        for parameter in sorted(use.names & set(names)):
            order = _order(use.output, leaves[parameter])
            if order is not None:
                yield _Sum(parameter, place, order)


def _weights_before(probed: Probe, added: _Sum, names: Sequence[str]) -> tuple[str, ...]:
    """Return the weights that affect the loss only through one tensor."""
    own, leaves = probed.own_gradient, probed.leaves()
    output = probed.reached(probed.samples(1), leaves, added.use).output
    wanted = [leaves[name] for name in names]
    found = torch.autograd.grad(output, wanted, _slope(added, output, own), allow_unused=True)
    parts = ((n, p) for n, p in zip(names, found, strict=True) if n != added.parameter and p is not None)
    return tuple(n for n, part in parts if part.any() and _same(part, own[n]))


def _no_equation(probed: Probe, names: Sequence[str]) -> bool:
    """Return whether no weight before a sum has a gradient that is affine in the sample.

    The test uses a random slope of the loss, because a head initialised to 0 has no gradient to test. Whole tensors are
    tested, because single entries can look affine by chance. Return False if the operations depend on the sample.
    """
    one, other = probed.samples(1, seed=1), probed.samples(1, seed=2)
    if not one.is_floating_point():
        return False
    for found in zip_longest(*(_of_sums(probed, at, names) for at in (one, other, _between(one, other)))):
        if None in found or len({(place, name, part is None) for place, name, part in found}) > 1:
            return False
        parts = [part for _, _, part in found if part is not None]
        if not parts:
            continue
        low, high, between = parts
        moved = (high - low).norm()
        if moved > 0 and (between - _between(low, high)).norm() <= _AFFINE * moved:
            return False
    return True


def _between(one: Tensor, other: Tensor) -> Tensor:
    return one + _GOLDEN * (other - one)


def _of_sums(probed: Probe, sample: Tensor, names: Sequence[str]) -> Iterator[tuple[int, str, Tensor | None]]:
    """Yield the index of each sum with the gradient of each weight before it, for a random slope of the loss."""
    uses, leaves, _ = probed.run(sample)
    for place, use in enumerate(uses):
        for parameter in sorted(use.names & set(names)):
            if _order(use.output, leaves[parameter]) is not None:
                slope = torch.rand(use.output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                wanted = [leaves[name] for name in names]
                parts = torch.autograd.grad(
                    use.output, wanted, slope.to(use.output), retain_graph=True, allow_unused=True
                )
                yield from ((place, name, part) for name, part in zip(names, parts, strict=True))


def _order(output: Tensor, parameter: Tensor) -> Tensor | None:
    """Return the parameter index for each entry of a tensor, or None if the parameter is not added to the tensor."""
    if output.numel() != parameter.numel():
        return None
    drawn = torch.rand(output.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(output)
    (moved,) = torch.autograd.grad(output, parameter, drawn.view_as(output), retain_graph=True, materialize_grads=True)
    (values, places), (expected, wanted) = moved.flatten().sort(), drawn.sort()
    return places[wanted.argsort()] if torch.equal(values, expected) else None


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 1e-5 * other.norm())
