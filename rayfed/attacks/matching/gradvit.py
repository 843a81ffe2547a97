"""GradViT: gradient matching for vision transformers that also searches for the order of the patches.

A search reconstructs the content of patches sooner than their positions, and swapped patches are a local minimum. So a
prior makes pixels on both sides of a patch border similar. Between the parts of a search, two patches swap places if
that brings the gradients closer.

Source: Hatamizadeh et al. 2022, "GradViT: Gradient Inversion of Vision Transformers", for the border prior and a
schedule between priors and gradients. The details of the schedule, the constants, the relative distance and the swaps
are our own. The paper's image prior (batch-norm statistics of a pretrained CNN) is omitted. The other priors reduce
quality late in a search, so they are used only in its first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.linalg import vector_norm

from rayfed.attacks.base import NotApplicable, Reconstruction
from rayfed.attacks.closed_form.probe import Probe, probe
from rayfed.attacks.inference.labels import fits_labels
from rayfed.attacks.matching.adam import adam, best_restarts
from rayfed.attacks.matching.inverting_gradients import decayed
from rayfed.attacks.matching.options import GradientMatching
from rayfed.attacks.matching.priors import total_variation
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named, Observation

_PARTS = 4
"""Number of parts of a search, with swaps between them; the second half has no priors."""
_STEPS_A_CHANGE = 3
"""Steps per tried swap; a swap needs one evaluation, about a third of the time of a step."""
_LEAST = 1e-3
"""Minimum length of a parameter's gradient in the distance, as a share of the whole; some are only rounding errors."""
_NO_PATCHES = "the model's first trainable operation on more than one pixel does not cut images into patches"


class Patches(NamedTuple):
    """Height and width of the patches into which a model cuts images."""

    height: int
    width: int

    def borders(self, images: Tensor) -> Tensor:
        """Return the mean absolute pixel difference across vertical plus horizontal patch borders of (..., C, H, W)."""
        down = images[..., self.height :: self.height, :] - images[..., self.height - 1 : -1 : self.height, :]
        across = images[..., self.width :: self.width] - images[..., self.width - 1 : -1 : self.width]
        variation = images.new_zeros(images.shape[:-3])
        for part in (down, across):
            if part.numel():
                variation = variation + part.abs().mean((-3, -2, -1))
        return variation

    def places(self, shape: Sequence[int]) -> list[tuple[int, slice, slice]]:
        """Return the image index, rows and columns of every whole patch in images of shape (N, C, H, W)."""
        return [
            (image, slice(top, top + self.height), slice(left, left + self.width))
            for image in range(shape[0])
            for top in range(0, shape[2] - self.height + 1, self.height)
            for left in range(0, shape[3] - self.width + 1, self.width)
        ]


@component
class GradVit(GradientMatching):
    """Fit images in [0, 1] to the gradient of a vision transformer, and reorder their patches.

    Labels are given or inferred. The patch size is detected by test inputs. The attack is not applicable to models
    without patches, such as a CNN with overlapping convolutions. Priors are used in the first half of the steps.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)
    several_rounds: ClassVar[bool] = False

    iterations: Annotated[int, Field(ge=1)] = 3000
    """Number of Adam steps; the step size falls along half a cosine. One swap of patches is tried per three steps."""
    restarts: Annotated[int, Field(ge=1)] = 1
    """Number of random starts; the result with the smallest objective is returned."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Initial step size, in units of the pixel range."""
    tv: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the total variation relative to the distance of the gradients."""
    borders: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the variation across patch borders."""
    moves: bool = True
    """Swap patches within an image or between images of the batch."""

    @fits_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        return self._where_it_can_start(lambda o, g: self._group(o, model, g), observations, generators)

    def _group(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        patches = patches_of(probe(model, observations[0]), observations[0].batch_size)
        whole = self._problem(observations, model, relative_distance, partial(self._prior, patches))
        start = torch.cat(
            [
                self._started(torch.rand(self.restarts, whole.dimension, generator=generator), observation)
                for observation, generator in zip(observations, generators, strict=True)
            ]
        )
        victims = torch.arange(len(observations), device=whole.device).repeat_interleave(self.restarts)
        points = whole.begun(start.to(whole.device), victims)
        snapshots, rates, trace = Snapshots(whole.images), decayed(self.lr, self.iterations), []
        ends = [part * self.iterations // _PARTS for part in range(_PARTS + 1)]
        for part, (first, last) in enumerate(pairwise(ends)):
            problem = whole if part < _PARTS // 2 else replace(whole, prior=None)
            if part and self.moves:
                points = _moved(problem, points, victims, patches, (last - first) // _STEPS_A_CHANGE, generators)
            descent = adam(
                problem.objective(victims),
                points,
                rates[first:last],
                watch=lambda step, best, first=first: snapshots.note(first + step, best),  # type: ignore[misc]
                boxed=whole.pixels,
            )
            points = descent.best
            trace += [(first + step, values) for step, values in descent.trace]
        descent = replace(descent, trace=trace, iterations=self.iterations)
        return best_restarts(whole, descent, victims, snapshots)

    def _prior(self, patches: Patches, images: Tensor) -> Tensor:
        """Return the weighted sum of priors (Q,) of images (Q, N, C, H, W)."""
        return (self.tv * total_variation(images) + self.borders * patches.borders(images)).mean(1)


def relative_distance(gradients: Named, targets: Named) -> Tensor:
    """Return the distance (Q,) of gradients from targets, relative to the target's norm, averaged over parameters."""
    pairs = [(g.reshape(len(g), -1), targets[name].reshape(len(g), -1)) for name, g in gradients.items()]
    lengths = torch.stack([vector_norm(target, dim=1) for _, target in pairs])
    apart = torch.stack([vector_norm(gradient - target, dim=1) for gradient, target in pairs])
    least = (_LEAST * vector_norm(lengths, dim=0)).clamp(min=torch.finfo(lengths.dtype).tiny)
    distance: Tensor = (apart / torch.maximum(lengths, least)).mean(0)
    return distance


def patches_of(probed: Probe, samples: int) -> Patches:
    """Return the patches into which a model cuts images, detected on a random batch; raise `NotApplicable` if none.

    A patch is a set of pixels that affect the same outputs of an operation. No output may depend on two neighbouring
    patches.
    """
    images, leaves = probed.samples(samples), probed.leaves()
    for use in range(len(probed.run(images)[0])):
        seen = _seen_with_corner(probed, leaves, use, images)
        if seen.sum() <= 1:
            continue
        patches = Patches(int(seen.any(1).sum()), int(seen.any(0).sum()))
        alone = seen.all() or not seen[: patches.height, : patches.width].all()
        if alone or not _are_apart(probed, leaves, use, images, patches):
            break
        return patches
    raise NotApplicable(_NO_PATCHES, inherent=True)


def _seen_with_corner(probed: Probe, leaves: Named, use: int, images: Tensor) -> Tensor:
    """Return the pixels (H, W) that affect the same outputs of an operation as the first image's first pixel."""
    corner = torch.zeros(images.shape[-2:], dtype=torch.bool, device=images.device)
    corner[0, 0] = True
    changed = _changed(probed, leaves, use, images, corner)
    moving = images.clone().requires_grad_()
    numbers = probed.reached(moving, leaves, use).output[changed]
    (slopes,) = torch.autograd.grad(numbers.square().sum(), moving, materialize_grads=True)
    return slopes[0].any(0)


def _are_apart(probed: Probe, leaves: Named, use: int, images: Tensor, patches: Patches) -> bool:
    """Return whether no output depends on both black and white patches of a chequerboard."""
    rows, columns = (torch.arange(size, device=images.device) for size in images.shape[-2:])
    white = (rows[:, None] // patches.height + columns // patches.width) % 2 == 0
    return not (_changed(probed, leaves, use, images, white) & _changed(probed, leaves, use, images, ~white)).any()


def _changed(probed: Probe, leaves: Named, use: int, images: Tensor, pixels: Tensor) -> Tensor:
    """Return which outputs of an operation change if some pixels (H, W) of the first image change."""
    other = images.clone()
    other[0] = torch.where(pixels, 1 - images[0], images[0])
    return probed.reached(other, leaves, use).output.detach() != probed.reached(images, leaves, use).output.detach()


def _moved(
    problem: Matching,
    points: Tensor,
    victims: Tensor,
    patches: Patches,
    tries: int,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """Return points (Q, D) of victims (Q,) after `tries` random swaps of two patches.

    A swap is kept only if it decreases the objective.
    """
    places, values = patches.places(problem.images_shape), problem.values(points, victims)
    for _ in range(tries):
        pairs = [torch.randint(len(places), (2,), generator=generators[victim]).tolist() for victim in victims.tolist()]
        others = points.clone()
        for old, new, (one, other) in zip(problem.images(points), problem.images(others), pairs, strict=True):
            for source, target in ((places[one], places[other]), (places[other], places[one])):
                new[target[0], :, target[1], target[2]] = old[source[0], :, source[1], source[2]]
        found = problem.values(others, victims)
        better = found < values
        points, values = torch.where(better[:, None], others, points), torch.where(better, found, values)
    return points
