"""Peel: recover a batch from a linear layer's gradient, one sample after the other, with any activation.

The gradient of z_i = W h_i + b over N samples is M = D^T [H 1], of rank N. D holds the derivatives of the loss in z.
Every input h_i lies in the span of M's rows, and its derivatives lie in the span of M's columns. A random h fails this
test, so a single sample can be tested: O - N equations for N unknowns, the coordinates of h. Levenberg-Marquardt solves
them from mixtures of the gradient's rows, for every class. Each sample found is removed from M, which lowers the rank:
M - U (V^T M+ U)^-1 V^T for its derivatives U and inputs V. Only solutions for the remaining samples are left.

Sources: Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", section 4, for the span test
(of tokens); Wedderburn 1934, "Lectures on Matrices", section 5.06, for the removal. The search over the span of the
derivatives is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.answer import nothing_found, studied
from rayfed.attacks.closed_form.batch import samples_behind
from rayfed.attacks.closed_form.factors import Factors, factorise, outputs_of
from rayfed.attacks.closed_form.layers import Layer, front, linear_layers
from rayfed.attacks.closed_form.probe import Probe
from rayfed.registry import component
from rayfed.update import Observation

_NO_LAYER = "no linear layer in the update receives each sample as one vector that determines the sample"
_NONE = "no sample found at which the model's derivatives are in the span of the gradient of '{}'"
_STARTS = 192
_STEPS = 40
_IDLE_ROUNDS = 4
"""Number of rounds without a new sample after which the search ends."""
_AT_ONCE = 8
"""Number of directions whose derivatives are computed in one call."""
_FOUND = 1e-5
"""Relative distance of derivatives from the span below which it is float32 rounding."""
_APART = 1e-2
"""Relative distance below which two descents count as the same sample."""

Residual = Callable[[Tensor], Tensor]
"""Function from coordinates (S, n) to relative residuals of derivatives (S, O). S may be multiplied."""


@component
class Peel:
    """Reconstruct samples whose input and derivatives lie in the spans of a layer's gradient, one after the other.

    Exact for batches smaller than the layer's inputs and outputs if the activations are smooth (sigmoid, tanh, GELU,
    ...). For piecewise flat activations such as ReLU, `spear` reconstructs more. Labels are recovered with the samples.
    """

    place_labels: ClassVar[str] = "unneeded"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        return studied(_reconstruction, observations, model, generators)


def _reconstruction(probed: Probe, observation: Observation, generator: torch.Generator) -> Reconstruction:
    for layer in linear_layers(probed, observation.update):
        affine, size = front(probed, layer)
        if affine or size >= prod(probed.shape):
            factors = factorise(layer, observation)
            if isinstance(factors, str):
                return nothing_found(observation, factors)
            outputs = outputs_of(probed, layer, factors)
            if outputs is None:
                continue
            guesses = probed.hypotheses(observation.classes)
            if guesses is None:
                return not_applicable(observation, _COUNTLESS, inherent=True)
            inputs = _Search(probed, layer, factors, outputs, guesses, generator).all() @ factors.right
            if len(inputs) == 0:
                return nothing_found(observation, _NONE.format(layer.weight))
            slopes = factors.left @ (factors.values[:, None] * factors.right @ torch.linalg.pinv(inputs))
            return samples_behind(probed, observation, layer, inputs, slopes.T)
    return not_applicable(observation, _NO_LAYER, inherent=True)


_COUNTLESS = "the attack tries all labels of a sample, but labels are numeric or have too many combinations"


class _Search:
    """Search for the samples of one batch."""

    def __init__(
        self,
        probed: Probe,
        layer: Layer,
        factors: Factors,
        outputs: Tensor,
        guesses: Tensor,
        generator: torch.Generator,
    ) -> None:
        self._probed, self._use, self._factors, self._outputs = probed, layer.use, factors, outputs
        self._generator, self._biased = generator, layer.bias is not None
        self._guesses = guesses
        samples = probed.samples(8, seed=4)
        with torch.no_grad():
            self._length = float(layer.features(probed, samples).norm(dim=1).mean())

    def all(self) -> Tensor:
        """Search for all samples of the batch, and return the coordinates (n, b) of the layer inputs found."""
        full = self._factors
        vectors, labels = full.right[:0] @ full.right.T, self._guesses[:0]
        idle = 0
        while len(vectors) < len(full.values) and idle < _IDLE_ROUNDS:
            basis, left = self._rest(vectors, labels)
            starts, classes = self._started(basis, left)
            ends, _ = self._descended(starts, classes, basis, left)
            ends, misses = self._descended(ends, classes, torch.eye(len(full.values)).to(basis), full.left, steps=6)
            before = len(vectors)
            for place in misses.argsort(stable=True).tolist():
                if misses[place] < _FOUND and len(vectors) < len(full.values):
                    vectors, labels = _with(vectors, labels, ends[place], classes[place])
            idle = idle + 1 if len(vectors) == before else 0
        return vectors

    def _slopes(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Return the model's derivatives (S, R, O) at inputs with coordinates (S, b), for R labels each (R, S)."""
        slopes: Tensor = self._probed.slopes(self._use, vectors @ self._outputs.T, labels).double()
        return slopes

    def _rest(self, vectors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return orthonormal bases of inputs (k, b) and derivatives (O, k) of the samples not yet found."""
        left, values, _, _ = self._factors
        if len(vectors) == 0:
            return torch.eye(len(values)).to(left), left
        slopes = self._slopes(vectors, labels[None])[:, 0]
        one, other = left.T @ slopes.T, vectors.T
        core = torch.diag(values) - one @ torch.linalg.solve(other.T @ (one / values[:, None]), other.T)
        columns, _, rows = torch.linalg.svd(core)
        rank = len(values) - len(vectors)
        return rows[:rank], left @ columns[:, :rank]

    def _started(self, basis: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """Return start vectors (S, b), from pairs of random guides within the remaining span, and labels (S,)."""
        guides, _ = self._factors.guides(self._biased)
        pairs = torch.randint(len(guides), (2, _STARTS), generator=self._generator).to(guides.device)
        share = 2 * torch.rand(_STARTS, 1, generator=self._generator).to(guides) - 0.5
        vectors = share * guides[pairs[0]] + (1 - share) * guides[pairs[1]]
        vectors = vectors + 0.1 * guides.std(0, correction=0) * torch.randn(
            vectors.shape, generator=self._generator
        ).to(guides)
        if not self._biased:
            signs = torch.tensor([1.0, -1.0]).to(guides).repeat(_STARTS // 2)[:, None]
            vectors = vectors / vectors.norm(dim=1, keepdim=True) * signs * self._length
        vectors = self._scaled(vectors @ basis.T @ basis)
        every = self._guesses[:, None].expand(-1, _STARTS, *self._guesses.shape[1:])
        slopes = self._slopes(vectors, every)
        best = _outside(slopes, left).norm(dim=2).argmin(1).cpu()
        cycled = torch.arange(_STARTS) // 2 % len(self._guesses)
        return vectors, self._guesses[torch.where(torch.arange(_STARTS) % 2 == 0, best, cycled)]

    def _scaled(self, vectors: Tensor) -> Tensor:
        """Return vectors scaled so that the bias entry of the input is 1, unchanged if the layer has no bias."""
        return vectors / (vectors @ self._factors.right[:, -1:]) if self._biased else vectors

    def _descended(
        self, vectors: Tensor, labels: Tensor, basis: Tensor, left: Tensor, steps: int = _STEPS
    ) -> tuple[Tensor, Tensor]:
        """Return the end points (S, b) of descents within a span, and their residual norms (S,)."""
        ways = basis
        if self._biased:  # directions that keep the bias entry at 1
            one = basis @ self._factors.right[:, -1:]
            ways = torch.linalg.svd(one, full_matrices=True)[0][:, 1:].T @ basis

        def residual(moves: Tensor) -> Tensor:
            times = len(moves) // len(vectors)
            moved, same = vectors.repeat(times, 1) + moves @ ways, torch.cat([labels] * times)
            return _outside(self._slopes(moved, same[None])[:, 0], left)

        moves = levenberg_marquardt(residual, vectors.new_zeros(len(vectors), len(ways)), steps)
        return vectors + moves @ ways, residual(moves).norm(dim=1)


def _outside(slopes: Tensor, left: Tensor) -> Tensor:
    """Return the part of derivatives (..., O) outside the span of `left` (O, b), relative to their length."""
    length = slopes.norm(dim=-1, keepdim=True)
    outside = (slopes - slopes @ left @ left.T) / length
    nowhere = torch.full_like(outside, slopes.shape[-1] ** -0.5)  # zero derivatives count as outside any span
    return torch.where(length > 1e-12, outside, nowhere)


def _with(vectors: Tensor, labels: Tensor, vector: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors and labels with one sample more, unless an equal vector is among them (up to `_APART`)."""
    if ((vectors - vector).norm(dim=1) < _APART * vector.norm()).any():
        return vectors, labels
    return torch.cat([vectors, vector[None]]), torch.cat([labels, label[None]])


def levenberg_marquardt(residual: Residual, moves: Tensor, steps: int) -> Tensor:
    """Return coordinates (S, n) that reduce S independent sums of squared residuals, starting at `moves`.

    Derivatives are finite differences in double precision.
    """
    values = residual(moves)
    costs, damping = values.square().sum(1), torch.full_like(values[:, 0], 1e-3)
    directions = torch.eye(moves.shape[1]).to(moves)
    for _ in range(steps if moves.shape[1] else 0):
        beside = [residual(torch.cat([moves + 1e-6 * way for way in ways])) for ways in directions.split(_AT_ONCE)]
        slopes = ((torch.cat(beside).view(-1, *values.shape) - values) / 1e-6).movedim(0, 2)
        curves = slopes.transpose(1, 2) @ slopes
        size = curves.diagonal(dim1=1, dim2=2).mean(1)
        ridge = (damping * size + 1e-12 * size + 1e-14)[:, None, None] * directions
        step = torch.linalg.solve(curves + ridge, slopes.transpose(1, 2) @ values[:, :, None])[..., 0]
        moved = residual(moves - step)
        better = moved.square().sum(1) < costs
        moves = torch.where(better[:, None], moves - step, moves)
        values = torch.where(better[:, None], moved, values)
        costs = values.square().sum(1)
        damping = torch.where(better, 0.3 * damping, 4 * damping).clamp(1e-10, 1e6)
        if (costs < _FOUND**2 / 100).double().mean() > 0.5:
            break
    return moves
