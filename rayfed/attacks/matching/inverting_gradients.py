"""Inverting gradients: maximise the cosine similarity of gradients by Adam, with a total-variation prior.

An attacker that knows the defence `refiner` can add its evaluation network as a prior against images that look like
noise.

Sources: Geiping et al. 2020, "Inverting Gradients - How easy is it to break privacy in federated learning?", equation 4
and section 5; Loshchilov and Hutter 2017, "SGDR", equation 5 without restarts, for the step size. Geiping et al. divide
the step size by ten at 3/8, 5/8 and 7/8 of the steps, which makes the last steps too small in a short search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import ceil, cos, pi
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.inference.labels import fits_labels
from rayfed.attacks.matching.adam import BETA2, adam, best_restarts
from rayfed.attacks.matching.distances import one_minus_cosine
from rayfed.attacks.matching.options import GradientMatching, model_dtype
from rayfed.attacks.matching.priors import total_variation
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.published import (
    SEARCHES,
    TV,
    noise_as_pixels,
    normalised_variation,
    published_rates,
    run_search,
    without_evidence,
)
from rayfed.attacks.matching.relative import RelativeVariation
from rayfed.attacks.matching.rounding import rounded
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.models.pretrained import load_evaluator
from rayfed.registry import component
from rayfed.samples import SampleSpec
from rayfed.update import Observation

_ROUNDED = 7 / 8
"""Share of the steps that run in bfloat16 if that is faster."""
_TRIAL = 1 / 4
"""Share of the steps in each trial search, which select the weight of the variation and signed or unsigned steps."""
_BETA2 = 0.85
"""Decay of the mean square of unsigned slopes. With Adam's 0.999, the large initial slopes shorten the next thousand
steps, and most searches end before the steps grow again."""
_LEAD = 32.0
"""Factor by which the objective of signed steps must be smaller for them to continue. Without the sign the objective
falls later: after 50 steps it was up to 19 times larger in searches that led to better images."""
_AS_GOOD = 2.0
"""Maximum ratio of the last to the smallest objective for which the last point is returned: large steps can hit small
values by chance. Last points gain 1.4 dB on an untrained ConvNet and nothing elsewhere (docs/benchmarks.md)."""


@component
class InvertingGradients(GradientMatching):
    """Fit images in [0, 1] to the direction of the observed gradient; labels are given or inferred."""

    iterations: Annotated[int, Field(ge=1)] = 4800
    """Number of Adam steps; the step size falls along half a cosine."""
    restarts: Annotated[int, Field(ge=1)] = 1
    """Number of random starts; the result with the smallest objective is returned."""
    signed: bool | None = None
    """Use only the sign of the slope in Adam. Default: try both with a quarter of the steps each. Signed steps continue
    if their objective is smaller by a factor of 32, because the objective falls later without the sign."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Initial step size, in units of the pixel range."""
    tv: Annotated[float, Field(ge=0)] | None = None
    """Weight of the total variation. Default: proportional to the current distance of the gradients. If the two
    possible factors differ much, searches with a quarter of the steps select one of them."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of the model and its gradients; images, objective and priors are always float32. Default: float32, or
    bfloat16 except in the last eighth of the steps if the processor supports it (AMX) and the model is large."""
    published: Literal["geiping", "dcs2"] | None = None
    """Run a search as its authors published it: `geiping` (signed steps, pixels in [0, 1]) or `dcs2` (attack `gs` of
    its code: unsigned steps, any pixels). Both divide the step size by ten at 3/8, 5/8 and 7/8 of the steps, use a
    variation weight of 0.0001 for normalised pixels, match each sent value as it is, and return the last images.
    `signed` and `tv` override these values. Default: rayfed's search."""
    noise: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the noise that an evaluation network detects in the images, for attackers that know `refiner`."""
    evaluator: Path | None = None
    """File of the evaluation network, as in `refiner`. Default: the network that comes with rayfed."""

    @model_validator(mode="after")
    def _published_without_more(self) -> Self:
        others = [name for name in ("noise", "precision") if getattr(self, name)]
        if self.published is not None and others:
            raise ValueError(f"published: the authors' search has no {', '.join(others)}: remove one of the two")
        return self

    def check(self, model: nn.Module, sample: SampleSpec, classes: int) -> None:
        """Raise `UserError` for an unknown layer, or if the evaluation network is needed but missing."""
        super().check(model, sample, classes)
        if self.noise:
            load_evaluator(self.evaluator, torch.device("cpu"))

    @fits_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        return self._where_it_can_start(lambda o, g: self._group(o, model, g), observations, generators)

    def _matching(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> Matching:
        problem = self._problem(
            observations, model, one_minus_cosine, self._prior, model_dtype=model_dtype(self.precision)
        )
        return self._weighted(problem, observations)

    def _weighted(self, problem: Matching, observations: Sequence[Observation]) -> Matching:
        """Return the problem with a relative total variation if `tv` is not set."""
        if self.tv is not None:
            return problem
        return replace(problem, relative=RelativeVariation.of(observations, problem.sent))

    def _group(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        problem = self._matching(observations, model, generators)
        if self.published is not None:
            return self._search_as_published(problem, observations, generators)
        start = torch.cat(
            [
                self._started(torch.rand(self.restarts, problem.dimension, generator=generator), observation)
                for observation, generator in zip(observations, generators, strict=True)
            ]
        )
        victims = torch.arange(len(observations), device=problem.device).repeat_interleave(self.restarts)
        start = problem.begun(start.to(problem.device), victims)
        weights = (None,) if problem.relative is None else problem.relative.weights
        signs = (True, False) if self.signed is None else (self.signed,)
        whole = [(replace(problem, relative=weight), signed) for weight in weights for signed in signs]
        if len(whole) == 1:
            return self._ends(problem, problem, start, victims, self.iterations, signs[0])[0]
        steps = ceil(_TRIAL * self.iterations)
        trials = [self._ends(one, problem, start, victims, steps, signed) for one, signed in whole]
        ends = [found for found, _ in trials]
        chosen = torch.tensor(
            [
                min(range(len(ends)), key=lambda w: ends[w][v].loss * (lead if whole[w][1] else 1))
                for v, lead in enumerate(_leads(problem, len(observations)))
            ]
        )
        for index, (one, signed) in enumerate(whole):
            rows = chosen[victims.cpu()] == index
            if rows.any():  # continue from the end of the trial
                begin = trials[index][1][rows]
                found = iter(self._ends(one, problem, begin, victims[rows], self.iterations, signed)[0])
                ends.append([next(found) if c == index else end for c, end in zip(chosen, ends[index], strict=True)])
        return [min(of_one, key=lambda end: end.loss) for of_one in zip(*ends, strict=True)]

    def _search_as_published(
        self, problem: Matching, observations: Sequence[Observation], generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return each victim's result of the search `published`."""
        assert self.published is not None
        search = SEARCHES[self.published]
        if self.signed is not None:
            search = replace(search, signed=self.signed)
        variation = normalised_variation(problem.model, TV if self.tv is None else self.tv)
        problem = without_evidence(problem, observations, variation)
        starts = []
        for observation, generator in zip(observations, generators, strict=True):
            noise = torch.randn(self.restarts, problem.dimension, generator=generator)
            starts.append(self._started(noise_as_pixels(problem, noise), observation))
        start = torch.cat(starts).to(problem.device)
        victims = torch.arange(len(observations), device=problem.device).repeat_interleave(self.restarts)
        start, snapshots = problem.begun(start, victims), Snapshots(problem.images)
        rates = published_rates(self.lr, self.iterations)
        descent = run_search(problem, start, victims, rates, search, snapshots)
        return best_restarts(problem, descent, victims, snapshots)

    def _ends(
        self, problem: Matching, judge: Matching, start: Tensor, victims: Tensor, iterations: int, signed: bool
    ) -> tuple[list[Reconstruction], Tensor]:
        """Return each victim's best result over `problem.ways`, compared by `judge`, and its end points (Q, D).

        Searches begin at `start` (Q, D) for victims (Q,).
        """
        ends = [self._found(way, judge, start, victims, iterations, signed) for way in problem.ways]
        found, points = zip(*ends, strict=True)
        best = [min(range(len(of_one)), key=lambda way: of_one[way].loss) for of_one in zip(*found, strict=True)]
        owners = victims.unique_consecutive(return_inverse=True)[1]
        rows = [points[best[owner]][row] for row, owner in enumerate(owners.tolist())]
        return [found[way][victim] for victim, way in enumerate(best)], torch.stack(rows)

    def _found(
        self, problem: Matching, judge: Matching, start: Tensor, victims: Tensor, iterations: int, signed: bool
    ) -> tuple[list[Reconstruction], Tensor]:
        """Return the best result of each victim's searches, and the end points of all searches (Q, D)."""
        snapshots, step = Snapshots(problem.images), count()
        rough, few = rounded(problem, start, victims) if self.precision is None else problem, _ROUNDED * iterations
        fine = problem.objective(victims)
        coarse = fine if rough is problem else rough.objective(victims)
        descent = adam(
            lambda points: (coarse if next(step) < few else fine)(points),
            start,
            decayed(self.lr, iterations),
            signed=signed,
            watch=snapshots.note,
            boxed=problem.pixels,
            beta2=BETA2 if signed else _BETA2,
        )
        settled = descent.last_values <= _AS_GOOD * descent.best_values
        descent = replace(
            descent,
            best=torch.where(settled[:, None], descent.last, descent.best),
            best_values=torch.where(settled, descent.last_values, descent.best_values),
        )
        if judge.relative is not None or len(judge.ways) > 1:
            values = judge.judged(descent.best, victims).nan_to_num(torch.inf)
            descent = replace(descent, best_values=torch.where(descent.best_values.isfinite(), values, torch.inf))
        return best_restarts(problem, descent, victims, snapshots), descent.best

    def _prior(self, images: Tensor) -> Tensor:
        """Return the weighted sum of priors (Q,) of images (Q, N, C, H, W)."""
        prior = images.new_zeros(len(images)) if self.tv is None else self.tv * total_variation(images).mean(1)
        if not self.noise:
            return prior
        evaluator = load_evaluator(self.evaluator, images.device)
        noise: Tensor = evaluator(images.flatten(0, 1)).unflatten(0, images.shape[:2]).mean(1)
        return prior + self.noise * noise


def _leads(problem: Matching, count: int) -> list[float]:
    """Return the factor by which the objective of signed steps must be smaller, for each of `count` victims.

    The factor is 1 if the update contains only signs: searches are then compared by nats, which do not fall to zero.
    """
    bare = None if problem.sent is None else problem.sent.signs
    return [1.0 if bare is not None and bool(bare[victim]) else _LEAD for victim in range(count)]


def decayed(lr: float, iterations: int) -> list[float]:
    """Return the step size of each iteration, which falls from `lr` along half a cosine."""
    return [lr * (1 + cos(pi * step / iterations)) / 2 for step in range(iterations)]
