"""L-BFGS with steps of length one, as the published code of DLG uses it: without a line search, it may diverge.

Source: Zhu et al. 2019, "Deep Leakage from Gradients", the authors' published code (`torch.optim.LBFGS`, lr 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rayfed.attacks.matching.lbfgs import Minima, Objective
from rayfed.attacks.progress import tell


def take_unit_steps(
    objective: Objective,
    start: Tensor,
    iterations: int,
    steps: int,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Minima:
    """Run `torch.optim.LBFGS` with lr 1 on P independent problems from the points `start` (P, D).

    Each of the `iterations` takes at most `steps` quasi-Newton steps. The result is the last point of each problem, not
    the best. A problem ends at the first value that is not finite. The history changes once per iteration. `watch` is
    called as in `minimise`.
    """
    problems = [_Problem(partial(_evaluate, objective, index), point, steps) for index, point in enumerate(start)]
    history, taken = list[Tensor](), torch.zeros(len(start), dtype=torch.int64, device=start.device)
    for iteration in range(iterations + 1):
        history.append(torch.stack([problem.evaluate() for problem in problems]))
        tell(iteration * steps, iterations * steps, history[-1])
        if watch is not None:
            watch(iteration * steps, torch.stack([problem.point.detach() for problem in problems]))
        going = history[-1].isfinite()
        if iteration == iterations or not going.any():
            break
        for index in going.nonzero()[:, 0].tolist():
            problems[index].advance()
        taken[going] += steps
    points = torch.stack([problem.point.detach() for problem in problems])
    changes = torch.stack(history).repeat_interleave(steps, 0)[: (len(history) - 1) * steps + 1]
    return Minima(points, history[-1], taken, changes)


class _Problem:
    """One problem with its own optimiser."""

    def __init__(self, evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, steps: int) -> None:
        self.point = start.clone().requires_grad_()
        self._evaluate = evaluate
        self._optimiser = torch.optim.LBFGS([self.point], lr=1, max_iter=steps)

    def evaluate(self) -> Tensor:
        """Return the value at the point, and store the slope there for the optimiser."""
        value, self.point.grad = self._evaluate(self.point.detach())
        return value

    def advance(self) -> None:
        """Take the steps of one iteration."""
        self._optimiser.step(self.evaluate)


def _evaluate(objective: Objective, index: int, point: Tensor) -> tuple[Tensor, Tensor]:
    values, slopes = objective(point[None], torch.tensor([index], device=point.device))
    return values[0], slopes[0]
