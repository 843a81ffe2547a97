"""Adam for many independent problems at once, with pixels limited to [0, 1].

Sources: Kingma and Ba 2015, "Adam", algorithm 1; Geiping et al. 2020, "Inverting Gradients", section 5 (Adam on the
sign of the gradient); Yin et al. 2021, "See through Gradients", section 3 (noise in every step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.attacks.progress import tell

_BETA1 = 0.9
BETA2 = 0.999
"""Published default for the decay of the mean square of the gradients."""
_TRACED = 50


@dataclass(frozen=True)
class Descent:
    """Result of Adam on P independent problems."""

    best: Tensor
    """(P, D), the point with the smallest finite value of each problem, or the start if no value was finite."""
    best_values: Tensor
    """(P,), the values at `best`, inf if none was finite."""
    last: Tensor
    """(P, D), the last point of each problem."""
    last_values: Tensor
    """(P,), the values at the last points."""
    trace: list[tuple[int, Tensor]]
    """Pairs (iteration, values (P,))."""
    iterations: int


def adam(
    objective: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    rates: Sequence[float | Tensor],
    signed: bool = False,
    noise: Callable[[], Tensor] | None = None,
    watch: Callable[[int, Tensor], None] | None = None,
    boxed: int | None = None,
    beta2: float = BETA2,
) -> Descent:
    """Run Adam on P independent problems (P, D), with one step for each step size in `rates`, a number or (D,).

    The first `boxed` numbers of a point (all if None) are limited to [0, 1]. `signed` descends along the sign of the
    gradients. `noise` samples (P, D), which is scaled by the step size and added to every step. Gradients that are not
    finite count as zero. `watch` is called with the index of every step and the best points. `beta2` is the decay of
    the mean square of the gradients.
    """
    x, best = start.clone(), start.clone()
    best_values = torch.full_like(start[:, 0], torch.inf)
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    trace = []
    for i, rate in enumerate([*rates, 0.0]):
        values, slopes = objective(x)
        better = values < best_values
        best = torch.where(better[:, None], x, best)
        best_values = torch.where(better, values, best_values)
        tell(i, len(rates), best_values)
        if watch is not None:
            watch(i, best)
        if i % max(1, len(rates) // _TRACED) == 0:
            trace.append((i, values))
        if i == len(rates):
            break
        push = (slopes.sign() if signed else slopes).nan_to_num(0, 0, 0)
        mean.lerp_(push, 1 - _BETA1)
        square.lerp_(push.square(), 1 - beta2)
        step = mean / (1 - _BETA1 ** (i + 1)) / ((square / (1 - beta2 ** (i + 1))).sqrt() + 1e-8)
        if noise is not None:
            step -= noise()
        x = x - rate * step
        x[:, :boxed] = x[:, :boxed].clamp(0, 1)
    return Descent(best, best_values, x, values, trace, len(rates))


def best_restarts(problem: Matching, descent: Descent, owners: Tensor, snapshots: Snapshots) -> list[Reconstruction]:
    """Return each victim's best restart. `owners` (P,) are the victims of the rows, in blocks of equal size."""
    victims = owners.unique_consecutive()
    restarts = len(owners) // len(victims)
    ranked = descent.best_values.reshape(-1, restarts).argmin(1)
    rows = ranked + restarts * torch.arange(len(ranked), device=ranked.device)
    images = problem.images(descent.best[rows]).cpu()
    labels = problem.hard_labels(descent.best[rows], victims).cpu()
    return [_reconstruction(images[v], labels[v], descent, row, snapshots) for v, row in enumerate(rows.tolist())]


def _reconstruction(images: Tensor, labels: Tensor, descent: Descent, row: int, snapshots: Snapshots) -> Reconstruction:
    finite = isfinite(descent.last_values[row].item())
    return Reconstruction(
        images=images,
        labels=labels,
        loss=descent.best_values[row].item(),
        trace=[(i, values[row].item()) for i, values in descent.trace],
        snapshots=snapshots.until(descent.iterations, images, row),
        iterations=descent.iterations,
        status="ok" if finite else "diverged",
        message="" if finite else "the objective became NaN or infinite; the images are the best before that step",
    )
