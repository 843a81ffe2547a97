"""Analytic attack: compute a linear layer's input from its gradient in closed form, then the sample from that input.

For a layer `W h + b` that sees one vector h per sample, the gradient of row j is `dL/dW_j = (dL/db_j) h`. Dividing by
the bias gradient gives h. Without a bias, the gradient of one sample still has rank one, so h is known up to scale.
In a batch, a row gives one input if a single sample activates its neuron, and otherwise a weighted mean of inputs.

The ratio of the gradients of two other parameters, such as the scale and shift of a norm layer, can give h as well
(`closed_form/ratios.py`).

Affine operations before the layer (a normalisation, frozen linear layers) are inverted exactly. Others are inverted by
Gauss-Newton if h has at least as many numbers as the sample.

Sources: Phong et al. 2018, "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", section 3;
Boenisch et al. 2023, "When the Curious Abandon Honesty", section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf, prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.answer import (
    agreement,
    answer,
    distance,
    fitted_numbers,
    labelled,
    nothing_found,
    studied,
)
from rayfed.attacks.closed_form.equations import solve
from rayfed.attacks.closed_form.kept import kept
from rayfed.attacks.closed_form.layers import Layer, front, linear_layers
from rayfed.attacks.closed_form.lines import best_points
from rayfed.attacks.closed_form.probe import Probe
from rayfed.attacks.closed_form.ratios import pairs, solved
from rayfed.attacks.closed_form.rows import alike, inside, least_squares, middle
from rayfed.registry import component
from rayfed.update import Observation

NO_LAYER = "no linear layer in the update receives each sample as one vector that determines the sample"
_NO_BIAS = "the linear layer '{}' has no bias, so the samples of a batch cannot be separated"
_NO_SCALE = (
    "the linear layer '{}' has no bias, so the gradient gives only the direction of the layer's input; the length "
    "can be computed only from labels, and labels per position were not given"
)
_NO_RATIOS = "the ratios of the gradients of '{}' and '{}' determine the sample, but solving for the sample failed ({})"
_RANK_ONE = 0.1
"""Maximum relative residual of a matrix after its rank-one part, for a gradient of a single sample."""
_NO_ACCIDENT = 1e-2
"""Relative residual below which a matrix counts as rank one even if all other gradients are noise."""
_PART = 0.9
"""Sine of the angle to the layer's gradient below which a rank-one product may be a part of that gradient."""
_PLAINLY = 0.05
"""Minimum decrease of the distance for which another label replaces the given or inferred one."""
_FITS = 1e-2
"""Sine of the angle between gradients below which no further method is tried."""
_CHANCE = 0.02
"""Share of values that may agree by chance."""
_MOST_LABELS = 100
"""Maximum number of labels tried on each reconstruction, in addition to the inferred one."""
_SAME = 1e-3
"""Root mean square difference, on [0, 1], below which two rows show the same image."""


@component
class Analytic:
    """Divide a linear layer's weight gradient by the bias gradient, then invert the operations before the layer.

    One sample: exact least squares over all rows. If there is no bias, or the weight gradient contradicts it, the scale
    with the best-fitting gradient is used. If the result does not fit the whole gradient, the attack also tries robust
    estimates over rows, unchanged values, later layers, and ratios of other gradients.

    Several samples: rows whose image another row repeats come first, because two mixtures would differ. Then come rows
    closest to another row. Rows inside [0, 1] precede others. Images repeat only if there are fewer than samples.
    """

    place_labels: ClassVar[str] = "unneeded"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        return studied(_reconstruction, observations, model, generators)


def _reconstruction(probed: Probe, observation: Observation, _: torch.Generator) -> Reconstruction:
    if observation.batch_size == 1:
        return labelled(_of_one, probed, observation)
    reason = NO_LAYER
    for layer, affine in _determining(probed, observation):
        if affine and layer.bias:
            return labelled(partial(_batch, layer=layer), probed, observation)
        reason = (
            f"the operations before the linear layer '{layer.weight}' are not affine and mix the samples of a batch"
            if layer.bias
            else _NO_BIAS.format(layer.weight)
        )
    return not_applicable(observation, reason, inherent=True)


def _determining(probed: Probe, observation: Observation) -> Iterator[tuple[Layer, bool]]:
    """Yield the linear layers whose input determines a sample, and whether that input is affine in the sample."""
    for layer in linear_layers(probed, observation.update):
        affine, size = front(probed, layer)
        if affine or size >= prod(observation.sample.shape):
            yield layer, affine


def _of_one(probed: Probe, observation: Observation) -> Reconstruction:
    reason, single, products = NO_LAYER, list[Reconstruction](), list[Reconstruction]()
    for layer, affine in _determining(probed, observation):
        if not affine and not layer.bias:
            reason = _NO_BIAS.format(layer.weight)
            continue
        single.append(_single(probed, observation, layer, affine))
        if single[-1].loss < _FITS:
            break
        if affine and not _unlabelled(observation) and _contradicts(layer, observation, _NO_ACCIDENT):
            products.append(_of_one_product(probed, observation, replace(layer, bias=None)))
    if not any(one.loss < _FITS for one in single):
        single += _by_ratios(probed, observation)
    if not single:
        return not_applicable(observation, reason, inherent=True)
    return _nearest(probed, observation, single, [one for one in products if one.loss < _PART])


def _by_ratios(probed: Probe, observation: Observation) -> list[Reconstruction]:
    """Return samples solved from ratios of two parameters' gradients, up to the first that fits the whole gradient."""
    found: list[Reconstruction] = []
    told = [] if observation.sample.modality == "tokens" else pairs(probed, observation.update)
    for weighted, pair in product((False, True), told):
        try:
            samples = solved(probed, observation, pair, weighted)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # vmap does not support every model
            message = _NO_RATIOS.format(*pair, str(error).partition("\n")[0])
            found.append(replace(nothing_found(observation, message), status="failed"))
            continue
        found.append(answer(probed, observation, samples, aligned=True))
        if found[-1].loss < _FITS:
            break
    return found


def _nearest(
    probed: Probe,
    observation: Observation,
    found: Sequence[Reconstruction],
    products: Sequence[Reconstruction] = (),
) -> Reconstruction:
    """Return the reconstruction whose gradient, with any label, is closest to the sent values, or else the first.

    A defence that changes most values may also have changed the inferred label, so all labels are tried. If some values
    were sent unchanged, the reconstruction that reproduces most of them is chosen. Otherwise one of the `products`,
    which explain a whole layer, is preferred.
    """
    if (len(found) == 1 and not products) or _unlabelled(observation):
        return found[0]
    guesses = probed.hypotheses(observation.classes)

    def apart(one: Reconstruction) -> tuple[float, bool, float]:
        explains = any(one is product for product in products)
        if one.status != "ok":
            return 0.0, True, inf
        every = [one.labels] if guesses is None else [one.labels, *guesses.split(1)[:_MOST_LABELS]]
        found = [agreement(probed, observation, one.images, labels) for labels in every]
        kept = max(share for share, _ in found)
        away = min((away for _, away in found if away == away), default=inf)
        return -kept if kept > _CHANCE else 0.0, not explains, away

    return min([*found, *products], key=apart)


def _unlabelled(observation: Observation) -> bool:
    """Return whether labels per position are needed but were not given, so that no gradient can be compared."""
    return observation.has_places and observation.labels is None


def _single(probed: Probe, observation: Observation, layer: Layer, affine: bool) -> Reconstruction:
    found = [_of_layer(probed, observation, layer, affine, least_squares(layer, observation))]
    if layer.bias is not None and not found[0].loss < _FITS:
        for say in (middle, alike, inside):
            if (features := say(layer, observation)) is not None:
                found.append(_of_layer(probed, observation, layer, affine, features))
        if affine and _contradicts(layer, observation, _RANK_ONE):
            unbiased = replace(layer, bias=None)
            found.append(_of_layer(probed, observation, unbiased, affine, least_squares(unbiased, observation)))
    if not found[0].loss < _FITS and (left := kept(layer, observation)) is not None:
        features, scaled = left
        if scaled or affine:
            used = layer if scaled else replace(layer, bias=None)
            found.append(_of_layer(probed, observation, used, affine, features))
    return _nearest(probed, observation, found)


def _contradicts(layer: Layer, observation: Observation, share: float) -> bool:
    """Return whether the weight gradient has rank one but does not match the bias gradient, which a defence changed.

    A matrix has rank one if its relative residual after one product is below `share`.
    """
    weight, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    if bias is None or min(weight.shape) == 1 or not (weight.isfinite().all() and weight.any()):
        return False
    values = torch.linalg.svdvals(weight)
    left = (weight - bias[:, None] * least_squares(layer, observation)).norm()
    return bool(values[1:].norm() < share * values[0] and not left < _RANK_ONE * values[0])


def _of_one_product(probed: Probe, observation: Observation, layer: Layer) -> Reconstruction:
    """Return the sample if noise hides every gradient except the rank-one product of this layer.

    The angle to the model's own gradient of this layer determines label and length. The product's size is not used,
    because a defence may have left only a part of the layer.
    """
    alone = replace(observation, update={layer.weight: observation.update[layer.weight]})
    origin, direction = _line(probed, alone, layer, True, least_squares(layer, alone))
    if (guesses := probed.hypotheses(observation.classes)) is not None:
        # with a wrong label, all lengths may be equally far
        longest = best_points(origin, direction, lambda images, _: -(images - origin).flatten(1).norm(dim=1))[0]
        known = [] if alone.labels is None else [alone.labels]
        labels = [*known, *guesses.split(1)[:_MOST_LABELS]]
        away = [distance(probed, alone, longest, label, scaled=False) for label in labels]
        if not known or min(away) < away[0] - _PLAINLY:
            alone = replace(alone, labels=labels[away.index(min(away))])
    return answer(probed, alone, _scaled(probed, alone, origin, direction, by_angle=True), True)


def _of_layer(probed: Probe, observation: Observation, layer: Layer, affine: bool, features: Tensor) -> Reconstruction:
    if not features.isfinite().all() or not features.any():
        message = f"the gradient of '{layer.bias or layer.weight}' has no finite non-zero entry"
        return nothing_found(observation, message)
    if layer.bias is None and _unlabelled(observation):
        return not_applicable(observation, _NO_SCALE.format(layer.weight))
    if layer.bias is None:
        line = _line(probed, observation, layer, affine, features)
        return answer(probed, observation, _scaled(probed, observation, *line), True)
    shape = (1, *observation.sample.shape)
    solution = solve(lambda x: layer.features(probed, x), features.to(probed.dtype)[None], shape, affine)
    return answer(probed, observation, solution.samples, aligned=True)


def _line(
    probed: Probe, observation: Observation, layer: Layer, affine: bool, features: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a point and a direction (1, *shape) of the line that contains the sample, from its features' direction."""

    def before(features: Tensor) -> Tensor:
        shape = (1, *observation.sample.shape)
        return solve(lambda x: layer.features(probed, x), features.to(probed.dtype)[None], shape, affine).samples

    origin = before(torch.zeros_like(features))
    return origin, before(features) - origin


def _scaled(
    probed: Probe, observation: Observation, origin: Tensor, direction: Tensor, by_angle: bool = False
) -> Tensor:
    """Return the image on a line, inside [0, 1], whose gradient is closest to the observed one."""
    given = probed.blank(1) if observation.labels is None else observation.labels
    fitted = observation.labels is None and observation.has_numbers

    def miss(images: Tensor, _: Tensor) -> Tensor:
        labels = fitted_numbers(probed, observation, images) if fitted else given
        return images.new_tensor([distance(probed, observation, images, labels, scaled=not by_angle)])

    return best_points(origin, direction, miss)[0]


def _batch(probed: Probe, observation: Observation, layer: Layer) -> Reconstruction:
    rows = _rows(layer, observation)
    if len(rows) == 0:
        return nothing_found(observation, f"the gradient of '{layer.bias}' has no finite non-zero entry")
    shape = (len(rows), *observation.sample.shape)
    images = solve(lambda x: layer.features(probed, x), rows.to(probed.dtype), shape, affine=True).samples
    return answer(probed, observation, images[_isolated(images.flatten(1), observation.batch_size)], aligned=False)


def _rows(layer: Layer, observation: Observation) -> Tensor:
    """Return the finite rows of weight gradient divided by bias gradient, (R, F), largest bias gradient first."""
    weight, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    assert bias is not None
    ratios = (weight / bias[:, None])[bias.abs().argsort(descending=True)]
    return ratios[ratios.isfinite().all(1)]


def _isolated(rows: Tensor, size: int) -> list[int]:
    """Return the indices of `size` rows, those most likely to be single samples first (see `Analytic`).

    Indices repeat if there are fewer rows.
    """
    precise = rows.double()  # the fast form of cdist loses digits in float32
    apart = torch.cdist(precise, precise) / rows.shape[1] ** 0.5
    nearest = apart.clone().fill_diagonal_(torch.inf).amin(1)
    outside = (rows - rows.clamp(0, 1)).abs().amax(1) > 10 * _SAME
    chosen: list[int] = []
    for row in (nearest + outside * rows.abs().max() * 1e3).argsort(stable=True).tolist():
        if all(apart[row, other] > _SAME for other in chosen):
            chosen.append(row)
    return [chosen[i % len(chosen)] for i in range(size)]
