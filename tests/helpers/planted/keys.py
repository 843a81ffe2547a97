"""Keys of the planted leaks: functions that compute the samples from the update, with knowledge of the plant.

A key takes the observation of an attacker and the model, and returns samples (N, *shape) in any order. It never sees
the true samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.update import Named, Observation
from tests.helpers.planted.defences import column_factors, draw_like, repaint, seeded

Key = Callable[[Observation, Any], Tensor]
Undo = Callable[[Named, Observation, Any], Named]


def read_input(sent: Named) -> Tensor:
    """Return the input of the first linear layer, (D,), from the row with the largest bias: dL/dW_j = (dL/db_j) x."""
    weight, bias = sent["first.weight"], sent["first.bias"]
    row = int(bias.abs().argmax())
    return weight[row].double() / bias[row].double()


def affine_map(front: Callable[[Tensor], Tensor], like: Observation) -> tuple[Tensor, Tensor]:
    """Return the matrix (F, D) and the shift (F,) of an affine map of samples, from its values at unit vectors."""
    shape = like.sample.shape
    size = int(torch.tensor(shape).prod())
    units = torch.cat([torch.zeros(1, size), torch.eye(size)]).view(-1, *shape)
    with torch.no_grad():
        values = front(units).flatten(1).double()
    return (values[1:] - values[0]).T, values[0]


def solve(matrix: Tensor, target: Tensor, seen: Observation) -> Tensor:
    """Return the sample (1, *shape) that solves a linear system in least squares."""
    found = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    return as_sample(found, seen)


def as_sample(values: Tensor, seen: Observation) -> Tensor:
    """Return values (D,) as a sample (1, *shape)."""
    return values.detach().view(1, *seen.sample.shape).float()


def dense(seen: Observation, model: Any) -> Tensor:
    """Compute the layer's input, and invert the affine map before it."""
    matrix, shift = affine_map(model.front, seen)
    return solve(matrix, read_input(seen.gradient) - shift, seen)


def after(undo: Undo) -> Key:
    """Return the key `dense` for updates from which `undo` first removes the effect of a defence."""
    return lambda seen, model: dense(replace(seen, update=undo(seen.update, seen, model)), model)


def statistics(seen: Observation, model: Any) -> Tensor:
    """Compute the batch mean from the running mean, (returned - (1 - m) sent) / m, and subtract 1 / 2."""
    name, m = "front.1.norm.running_mean", model.front[1].norm.momentum
    mean = (seen.returned_buffers[name] - (1 - m) * seen.buffers[name]) / m
    return as_sample(mean - 0.5, seen)


def stretched(seen: Observation, model: Any) -> Tensor:
    """Compute the layer's input, and stretch it to [0, 1]."""
    normed = read_input(seen.gradient)
    return as_sample((normed - normed.min()) / (normed.max() - normed.min()), seen)


def per_pixel(seen: Observation, model: Any) -> Tensor:
    """Divide the gradient of each pixel's scale by that of its shift."""
    return as_sample(seen.gradient["front.1.weight"] / seen.gradient["front.1.bias"], seen)


def scaled_row(seen: Observation, model: Any, whole: bool = False) -> Tensor:
    """Take the direction of the weight's gradient (rank 1), and search for the length whose gradient fits best.

    With `whole`, the directions of all tensors are compared. Otherwise, the values of the first weight are.
    """
    sent = seen.gradient if whole else {"first.weight": seen.gradient["first.weight"]}
    direction = torch.linalg.svd(sent["first.weight"].double(), full_matrices=False).Vh[0]
    direction = as_sample(direction * direction.sum().sign(), seen)

    def distance(own: Named) -> float:
        if whole:
            return -sum(float(torch.cosine_similarity(own[n].flatten(), t.flatten(), dim=0)) for n, t in sent.items())
        return float((own["first.weight"] - sent["first.weight"]).square().sum())

    def smallest_distance(length: Tensor) -> float:
        image, distances = length * direction, []
        for label in torch.arange(seen.classes):
            own, _ = gradients.gradient(model, seen.weights, dict(seen.buffers), image, label[None])
            distances.append(distance(own))
        return min(distances)

    low, high = 0.0, float(direction.numel()) ** 0.5
    for _ in range(6):
        grid = torch.linspace(low, high, 30)
        best = int(torch.tensor([smallest_distance(length) for length in grid]).argmin())
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 29)])
    return (low + high) / 2 * direction


def traps(seen: Observation, model: Any) -> Tensor:
    """Read samples that are the only ones between two thresholds: (dW_j - dW_j+1) / (db_j - db_j+1)."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    weights, biases = -weight.diff(dim=0), -bias.diff()
    chosen = biases.abs().topk(seen.batch_size).indices
    return (weights[chosen] / biases[chosen, None]).view(-1, *seen.sample.shape).float()


def convolution(seen: Observation, model: Any) -> Tensor:
    """Compute the features, and invert activation, norm and convolution.

    The mean and deviation of a batch norm follow from the returned statistics.
    """
    features = read_input(seen.gradient)
    before = torch.where(features > 0, features, features / model.act.negative_slope)
    matrix, shift = affine_map(model.conv, seen)
    if isinstance(model.norm, nn.BatchNorm2d):
        m, count = model.norm.momentum or 0.0, len(before) // model.norm.num_features
        sent, returned = seen.buffers, seen.returned_buffers
        mean, variance = (
            (returned[f"norm.{name}"] - (1 - m) * sent[f"norm.{name}"]).double() / m
            for name in ("running_mean", "running_var")
        )
        deviation = (variance * (count - 1) / count + model.norm.eps).sqrt()
        before = before * deviation.repeat_interleave(count) + mean.repeat_interleave(count)
    return solve(matrix, before - shift, seen)


def patches(seen: Observation, model: Any) -> Tensor:
    """Solve D^T X = dW for the patches X, where D, the gradient of the positions, is that of the embedded patches."""
    slope = seen.gradient["places"][0, 1:].double()
    weight = seen.gradient["patch.weight"].flatten(1).double()
    found = torch.linalg.lstsq(slope.T, weight, driver="gelsd").solution.T[None]
    image: Tensor = nn.functional.fold(found, seen.sample.shape[1:], 2, stride=2)
    return image.float()


def placed(seen: Observation, model: Any) -> Tensor:
    """Solve E = A G for A, whose entries are 1 where a token is at a position."""
    table, places = seen.gradient["table.weight"].double(), seen.gradient["places.weight"].double()
    return (table @ torch.linalg.pinv(places)).argmax(0)[None]


def tables(seen: Observation, model: Any) -> Tensor:
    """Return the only row with a gradient in each position's table."""
    return seen.gradient["table.weight"].norm(dim=1).view(seen.sample.shape[0], -1).argmax(1)[None]


def read(seen: Observation, model: Any) -> Tensor:
    """Try all texts of the tokens whose rows have a gradient."""
    tokens = seen.gradient["table.weight"].any(1).nonzero()[:, 0]
    label = seen.gradient["head.bias"].argmin()[None]

    def distance(text: Tensor) -> float:
        own = gradients.gradient(model, seen.weights, dict(seen.buffers), text[None], label)[0]
        return float((own["table.weight"] - seen.gradient["table.weight"]).norm())

    texts = (tokens[list(places)] for places in product(range(len(tokens)), repeat=seen.sample.shape[0]))
    return min((text for text in texts if len(text.unique()) == len(tokens)), key=distance)[None]


def flat(seen: Observation, model: Any) -> Tensor:
    """Compute the layer's input, and look up the nearest token at each position."""
    vectors = read_input(seen.gradient).view(seen.sample.shape[0], -1)
    return torch.cdist(vectors, seen.weights["table.weight"].double()).argmin(1)[None]


def numbers(seen: Observation, model: Any) -> Tensor:
    """Compute the layer's input, and round it to numbers of tokens."""
    return (read_input(seen.gradient) * model.vocabulary).round().long()[None]


def levels(seen: Observation, model: Any) -> Tensor:
    """Return the only level of each pixel whose vector has a gradient."""
    return as_sample(seen.gradient["table.weight"].norm(dim=1).view(-1, 17).argmax(1) / 16, seen)


def low_rank(seen: Observation, model: Any) -> Tensor:
    """Divide by the gradient of the thin layer's output, which follows from the gradient of the second bias."""
    slopes = seen.gradient["up.bias"] @ seen.weights["up.weight"]
    row = int(slopes.abs().argmax())
    return as_sample(seen.gradient["down.weight"][row] / slopes[row], seen)


def squares(seen: Observation, model: Any) -> Tensor:
    """Divide by the gradient of the bias: products of all pairs of pixels, with squares on the diagonal."""
    weight, bias = seen.gradient["first.weight"], seen.gradient["first.bias"]
    row = int(bias.abs().argmax())
    return as_sample((weight[row] / bias[row]).diagonal().clamp(min=0).sqrt(), seen)


def norm_alone(seen: Observation, model: Any) -> Tensor:
    """Divide the gradient of the scale by that of the shift, and solve for the image, the mean and the deviation."""
    normalised = (seen.gradient["norm.weight"] / seen.gradient["norm.bias"]).double()
    weight, bias = model.frozen.weight.double(), model.frozen.bias.double()
    system = torch.cat([weight, -torch.ones(len(weight), 1).double(), -normalised[:, None]], 1)
    return as_sample(torch.linalg.lstsq(system, -bias[:, None]).solution[:-2, 0], seen)


# Keys of defences.


def without_noise(update: Named, seen: Observation, model: Any, seed: int | None = None) -> Named:
    """Subtract the noise of a seed, by default the client's number."""
    drawn = draw_like(update, seen.victim if seed is None else seed)
    return {name: tensor - drawn[name] for name, tensor in update.items()}


def without_number(update: Named, seen: Observation, model: Any) -> Named:
    """Subtract the most frequent value of the first weight, as ReLU units without a gradient send only the noise."""
    number = update["first.weight"].flatten().mode().values
    return {name: tensor - number for name, tensor in update.items()}


def without_public(update: Named, seen: Observation, model: Any) -> Named:
    """Subtract the gradient of the black image of class 0."""
    black, label = seen.sample.blank(1), torch.zeros(1, dtype=torch.int64)
    public, _ = gradients.gradient(model, seen.weights, dict(seen.buffers), black, label)
    return {name: tensor - public[name] for name, tensor in update.items()}


def in_order(update: Named, seen: Observation, model: Any) -> Named:
    """Undo the permutation of the known seed."""
    found = {}
    for name, tensor in update.items():
        order = torch.randperm(tensor.numel(), generator=seeded(7))
        found[name] = torch.empty_like(tensor.flatten()).scatter(0, order, tensor.flatten()).view_as(tensor)
    return found


def mirrored(update: Named, seen: Observation, model: Any) -> Named:
    """Reflect at the known plane again."""
    found = {}
    for name, tensor in update.items():
        plane = torch.randn(tensor.shape, generator=seeded(11))
        found[name] = tensor - 2 * plane * (plane * tensor).sum() / plane.square().sum()
    return found


def without_weights(update: Named, seen: Observation, model: Any) -> Named:
    """Subtract the old weights from the new ones."""
    return {name: (seen.weights[name] - tensor) / 0.1 for name, tensor in update.items()}


def roots(update: Named, seen: Observation, model: Any) -> Named:
    """Take cube roots."""
    return {name: tensor.sign() * tensor.abs() ** (1 / 3) for name, tensor in update.items()}


def last_digits(update: Named, seen: Observation, model: Any) -> Named:
    """Subtract the nearest multiple of one half from each value."""
    return {name: tensor - (2 * tensor).round() / 2 for name, tensor in update.items()}


def repainted(seen: Observation, model: Any, brighten: bool) -> Tensor:
    """Undo the change of the samples."""
    return repaint(dense(seen, model).clamp(0, 1), brighten, back=True)


def masked(seen: Observation, model: Any) -> Tensor:
    """Read each pixel from the row with the largest bias among those that sent both values."""
    weight, bias = seen.gradient["first.weight"], seen.gradient["first.bias"]
    slope = bias[:, None].abs() * (weight != 0)
    pixels = weight[slope.argmax(0), torch.arange(weight.shape[1])] / bias[slope.argmax(0)]
    return as_sample(torch.where(slope.amax(0) > 0, pixels, 0.0).nan_to_num(0, 0, 0), seen)


def without_signs(seen: Observation, model: Any) -> Tensor:
    """Take absolute values, as no pixel is negative."""
    return as_sample(read_input(seen.gradient).abs(), seen)


def between_rows(seen: Observation, model: Any) -> Tensor:
    """Subtract one row from another, which removes the noise of both."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    high, low = int(bias.argmax()), int(bias.argmin())
    return as_sample((weight[high] - weight[low]) / (bias[high] - bias[low]), seen)


def darkest(seen: Observation, model: Any) -> Tensor:
    """Divide a row by the known factors, and subtract the noise of its darkest pixel, which is black."""
    weight, bias = seen.gradient["first.weight"], seen.gradient["first.bias"]
    row = int(bias.abs().argmax())
    factors = column_factors(weight)
    values = weight[row] * bias[row].sign() / factors
    return as_sample((values - values.min()) * factors / bias[row].abs(), seen)


def together(seen: Observation, model: Any) -> Tensor:
    """Add the gradients of two layers with the same input, which removes opposite noise."""
    sums = {f"first.{end}": seen.gradient[f"one.{end}"] + seen.gradient[f"other.{end}"] for end in ("weight", "bias")}
    return as_sample(read_input(sums), seen)


def summed(seen: Observation, model: Any) -> Tensor:
    """Divide the sums over all rows."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    return as_sample(weight.sum(0) / bias.sum(), seen)


def medians(seen: Observation, model: Any) -> Tensor:
    """Take the median over rows for each pixel."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    return as_sample((weight / bias[:, None]).nanmedian(0).values, seen)


def few_seeds(seen: Observation, model: Any) -> Tensor:
    """Subtract the noise of each seed, and take the result with the smallest values."""
    updates = (without_noise(seen.update, seen, model, seed) for seed in range(32))
    smallest = min(updates, key=lambda update: float(update["first.weight"].abs().median()))
    return dense(replace(seen, update=smallest), model)


def low_rank_noise(seen: Observation, model: Any) -> Tensor:
    """Subtract from a row the rows without a gradient, which are noise, so that most pixels are black."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    noise = weight[bias == 0][:2].T
    row = int(bias.abs().argmax())
    factors = torch.ones(len(weight[row])).double()
    for _ in range(60):  # least absolute values by weighted least squares
        solution = torch.linalg.lstsq(factors[:, None] * noise, (factors * weight[row])[:, None]).solution
        left = weight[row] - (noise @ solution)[:, 0]
        factors = left.abs().clamp(min=1e-9).rsqrt()
    return as_sample(left / bias[row], seen)
