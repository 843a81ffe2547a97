"""Deep leakage from gradients (DLG): fit images and soft labels to the observed gradient by L-BFGS.

Source: Zhu et al. 2019, "Deep Leakage from Gradients" (DLG), algorithm 1. Two changes make the search robust: a line
search replaces the authors' step size of 1, and another random start follows if one ends in a local minimum. The option
`line_search: false` is the search of the authors' published code.
The total variation is that of Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite, isnan
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.lbfgs import Minima, minimise
from rayfed.attacks.matching.options import GradientMatching
from rayfed.attacks.matching.priors import total_variation
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.attacks.matching.unit_steps import take_unit_steps
from rayfed.registry import component
from rayfed.update import Observation

_STEPS = 20
"""Quasi-Newton steps per iteration, as `torch.optim.LBFGS` and the papers count them."""
_SOLVED = 1e-6
"""Objective, as a share of the observed gradient's squared norm, below which no further start is needed."""
_ROUNDING = 1e-14
"""Share of the squared norm below which only float32 rounding of the observed gradient is left and a start ends."""
_PRECISION = torch.float64
"""In float32, rounding stops the line search of one colour image in six between 30 and 40 dB."""
_TRACED = 50


@component
class Dlg(GradientMatching):
    """Fit images, and soft labels if the labels are unknown, to the gradient in squared L2 distance by L-BFGS.

    Pixels are unbounded during the search and clamped to [0, 1] at the end.
    """

    iterations: Annotated[int, Field(ge=1)] = 300
    """Maximum number of iterations per start, each of 20 L-BFGS steps; a start ends early if it no longer improves."""
    restarts: Annotated[int, Field(ge=1)] = 3
    """Maximum number of random starts from N(0, 1); another start is run only if none has matched the gradient."""
    line_search: bool = True
    """Choose the length of each L-BFGS step by a line search, in float64. False: steps of length 1 in float32, as in
    the authors' published code, which also has one start (`restarts: 1`). This search diverges for many images. Its
    result is the last point of the start with the lowest objective, and a point that is not finite is a black image."""

    tv: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the images' total variation, added to the squared distance of the gradients. With 0, the search stops
    when the gradients match."""

    @property
    def evaluations(self) -> int:
        """Return the maximum number of successive evaluations of the attack's objective."""
        return self.restarts * self.iterations * _STEPS

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        return self._where_it_can_start(lambda o, g: self._group(o, model, g), observations, generators)

    def _matching(self, observations: Sequence[Observation], model: nn.Module) -> Matching:
        prior = self._prior if self.tv else None
        return self._problem(observations, model, squared_l2, prior, dtype=self._precision)

    @property
    def _precision(self) -> torch.dtype:
        return _PRECISION if self.line_search else torch.float32

    def _prior(self, images: Tensor) -> Tensor:
        """Return the weighted total variation (Q,) of images (Q, N, C, H, W)."""
        return self.tv * total_variation(images).mean(1)

    def _group(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        problem = self._matching(observations, model)
        norms = problem.target_norms()
        starts = torch.stack([self._starts(problem, o, g) for o, g in zip(observations, generators, strict=True)])
        best: dict[int, Reconstruction] = {}
        for attempt in range(self.restarts):
            unsolved = [v for v in range(len(observations)) if v not in best or not best[v].loss <= _SOLVED * norms[v]]
            if not unsolved:
                break
            results = self._attempt(problem, unsolved, starts[unsolved, attempt])
            best |= {v: r for v, r in results.items() if v not in best or isnan(best[v].loss) or r.loss < best[v].loss}
        return [best[v] for v in range(len(observations))]

    def _starts(self, problem: Matching, observation: Observation, generator: torch.Generator) -> Tensor:
        """Sample the starting points of a victim's search, (restarts, D)."""
        noise = torch.stack([torch.randn(problem.dimension, generator=generator) for _ in range(self.restarts)])
        return self._started(noise, observation)

    def _attempt(self, problem: Matching, members: list[int], start: Tensor) -> dict[int, Reconstruction]:
        """Run the search from another start (Q, D) for each victim in `members`."""
        victims = torch.tensor(members, device=problem.device)
        snapshots = Snapshots(problem.images, _STEPS)
        begun = problem.begun(start.to(problem.device, self._precision), victims)

        def objective(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return problem.value_and_gradient(points, victims[rows])

        if self.line_search:
            target = _ROUNDING * problem.target_norms()[victims]
            minima = minimise(objective, begun, self.iterations * _STEPS, target, snapshots.note)
        else:
            minima = take_unit_steps(objective, begun, self.iterations, _STEPS, snapshots.note)
        return dict(zip(members, _reconstructions(problem, minima, victims, snapshots), strict=True))


def _reconstructions(problem: Matching, minima: Minima, victims: Tensor, snapshots: Snapshots) -> list[Reconstruction]:
    images = problem.images(minima.points).nan_to_num(0.0).clamp(0, 1).float().cpu()
    labels = problem.hard_labels(minima.points, victims).cpu()
    history, steps = minima.history.cpu(), minima.iterations.tolist()
    return [
        Reconstruction(
            images=images[row],
            labels=labels[row],
            loss=loss,
            trace=_trace(history[:, row], steps[row]),
            snapshots=snapshots.until(ceil(steps[row] / _STEPS), images[row], row),
            iterations=ceil(steps[row] / _STEPS),
            status="ok" if isfinite(loss) else "diverged",
            message="" if isfinite(loss) else f"the objective is not finite after {steps[row]} steps of the search",
        )
        for row, loss in enumerate(minima.values.tolist())
    ]


def _trace(values: Tensor, steps: int) -> list[tuple[int, float]]:
    """Return (iteration, objective) at about `_TRACED` iterations, including the first and the last."""
    last = ceil(steps / _STEPS)
    chosen = sorted({*range(0, last, max(1, last // _TRACED)), last})
    return [(i, values[min(i * _STEPS, steps)].item()) for i in chosen]
