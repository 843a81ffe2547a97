"""The input of a fully connected first layer, in closed form.

For a layer `W x + b`, the gradient of row j is `dL/dW_j = (dL/db_j) x`: divide. In a batch, a row gives one image
where a single sample activates its neuron, and a weighted mean of images elsewhere.

Sources: Phong et al. 2018, "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", section 3;
Boenisch et al. 2023, "When the Curious Abandon Honesty", section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.forward_probe import run
from rayfed.attacks.groups import in_groups
from rayfed.attacks.labels import needs_labels
from rayfed.registry import component
from rayfed.update import Named, Observation

_NO_LAYER = "the model's first layer is not a linear layer with bias on the pixels"
_SAME = 1e-3
"""Root mean square difference, on [0, 1], below which two rows show the same image."""


@component
class Analytic:
    """Rows of the first linear layer's weight gradient divided by its bias gradient.

    One sample: the row with the largest bias gradient, exact. More: those rows whose image another row repeats (two
    mixtures would differ, so one sample stands behind both), then those nearest to another row's; rows inside
    [0, 1] before the others; no image twice.
    """

    @needs_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """One reconstruction for each observation (see `Attack`)."""
        layer = _first_linear(observations[0])
        affine = None if layer is None else _affine(model, observations[0], layer)
        if layer is None or affine is None:
            return [not_applicable(observation, _NO_LAYER) for observation in observations]
        return in_groups(lambda group, _: [_reconstruction(o, layer, *affine) for o in group], observations, generators)


def _reconstruction(observation: Observation, layer: str, black: Tensor, white: Tensor) -> Reconstruction:
    rows = (_rows(observation.gradient, layer) - black) / (white - black)
    assert observation.labels is not None
    labels = observation.labels.cpu()
    shape = (observation.batch_size, *observation.sample.shape)
    if len(rows) == 0:
        message = f"no entry of the gradient of '{layer}.bias' is finite and not 0"
        return Reconstruction(images=torch.full(shape, 0.5), labels=labels, status="diverged", message=message)
    chosen = rows[:1] if observation.batch_size == 1 else rows[_isolated(rows, observation.batch_size)]
    return Reconstruction(images=chosen.reshape(shape).clamp(0, 1).cpu(), labels=labels)


def _rows(gradient: Named, layer: str) -> Tensor:
    """Weight gradient over bias gradient of all rows where that is finite, largest bias gradient first: (R, D)."""
    weight, bias = gradient[f"{layer}.weight"], gradient[f"{layer}.bias"]
    ratios = (weight / bias[:, None])[bias.abs().argsort(descending=True)]
    return ratios[ratios.isfinite().all(1)]


def _isolated(rows: Tensor, size: int) -> list[int]:
    """The indices of `size` rows, most surely single samples first (see `Analytic`); they repeat if there are fewer."""
    precise = rows.double()  # the fast form of cdist cancels
    apart = torch.cdist(precise, precise) / rows.shape[1] ** 0.5
    nearest = apart.clone().fill_diagonal_(torch.inf).amin(1)
    outside = (rows - rows.clamp(0, 1)).abs().amax(1) > 10 * _SAME
    chosen: list[int] = []
    for row in (nearest + outside * rows.abs().max() * 1e3).argsort(stable=True).tolist():
        if all(apart[row, other] > _SAME for other in chosen):
            chosen.append(row)
    return [chosen[i % len(chosen)] for i in range(size)]


def _first_linear(observation: Observation) -> str | None:
    """Return the module of the first parameter, if that is a matrix over all pixels and has a bias."""
    name, tensor = next(iter(observation.update.items()))
    layer = name.rpartition(".")[0]
    fits = tensor.ndim == 2 and tensor.shape[1] == prod(observation.sample.shape)
    return layer if fits and f"{layer}.bias" in observation.update else None


def _affine(model: nn.Module, observation: Observation, layer: str) -> tuple[Tensor, Tensor] | None:
    """The layer's input for a black and for a white image, (D,) each; None unless each entry is its pixel in between.

    This undoes a normalisation that the model applies before its first layer.
    """
    grey = torch.linspace(0, 1, prod(observation.sample.shape)).reshape(observation.sample.shape)
    probes = torch.stack([torch.zeros_like(grey), torch.ones_like(grey), grey])
    seen, _ = run(model, observation, layer, probes)
    black, white, between = seen.flatten(1)
    expected = black + grey.flatten().to(black.device) * (white - black)
    return (black, white) if torch.allclose(between, expected, atol=1e-5) and (white != black).all() else None
