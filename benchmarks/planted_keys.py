"""Keys of the planted leaks: the mathematics by which a planter reads the samples out of what is sent.

Each takes the observation, as an attacker gets it, and the model with the planter's knowledge of how it is built; it
returns samples (N, *shape) in any order. No key sees the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.planted_defences import drawn_like, factors_of, mirrored, repainted, seeded
from rayfed import gradients
from rayfed.client.grants.noise import least_absolute
from rayfed.update import Named, Observation

Key = Callable[[Observation, Any], Tensor]
Undo = Callable[[Named, Observation, Any], Named]


def row_of(sent: Named, layer: str, suffix: str = "") -> Tensor:
    """Return what entered a layer, (D,): dL/dW_j = (dL/db_j) x, by the row whose bias moves most."""
    weight, bias = sent[f"{layer}weight{suffix}"], sent[f"{layer}bias{suffix}"]
    row = int(bias.abs().argmax())
    return weight[row].double() / bias[row].double()


def matrix_of(front: Callable[[Tensor], Tensor], like: Observation) -> tuple[Tensor, Tensor]:
    """Return the matrix (F, D) and the shift (F,) of an affine map of samples, by trying it on unit vectors."""
    shape = like.sample.shape
    size = int(torch.tensor(shape).prod())
    tried = torch.cat([torch.zeros(1, size), torch.eye(size)]).view(-1, *shape)
    with torch.no_grad():
        seen = front(tried).flatten(1).double()
    return (seen[1:] - seen[0]).T, seen[0]


def solved(matrix: Tensor, target: Tensor, seen: Observation) -> Tensor:
    """Return the sample (1, *shape) at the head of the least-squares solution."""
    found = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    size = int(torch.tensor(seen.sample.shape).prod())
    return found[:size].view(1, *seen.sample.shape).float()


def dense(seen: Observation, model: Any, layer: str = "first.", suffix: str = "") -> Tensor:
    """Read a layer's input, and undo the affine map before it."""
    matrix, shift = matrix_of(model.front, seen)
    return solved(matrix, row_of(seen.gradient, layer, suffix) - shift, seen)


def undone(undo: Undo, key: Key = dense) -> Key:
    """Return a key for what is sent after a defence whose mistake `undo` knows."""
    return lambda seen, model: key(replace(seen, update=undo(seen.update, seen, model)), model)


def statistics(seen: Observation, model: Any) -> Tensor:
    """Read the mean that comes back, (returned - (1 - m) sent) / m, which is the image and a half."""
    name, m = "front.1.norm.running_mean", model.front[1].norm.momentum
    mean = (seen.returned_buffers[name] - (1 - m) * seen.buffers[name]) / m
    return (mean - 0.5).view(1, *seen.sample.shape)


def running_mean(seen: Observation, model: Any) -> Tensor:
    """Read the mean that comes back, of which a tenth is the image."""
    sent, returned = (tensors["front.1.mean"] for tensors in (seen.buffers, seen.returned_buffers))
    return ((returned - 0.9 * sent) / 0.1).view(1, *seen.sample.shape)


def stretched(seen: Observation, model: Any) -> Tensor:
    """Divide the first layer's row, and give what was normed all of [0, 1]."""
    normed = row_of(seen.gradient, "first.")
    return ((normed - normed.min()) / (normed.max() - normed.min())).view(1, *seen.sample.shape)


def per_pixel(seen: Observation, model: Any) -> Tensor:
    """Divide the slope in each pixel's scale by that in its shift."""
    sent = seen.gradient
    return (sent["front.1.weight"] / sent["front.1.bias"]).view(1, *seen.sample.shape)


def scaled_row(seen: Observation, model: Any, whole: bool = False) -> Tensor:
    """Take the direction of the weight's gradient, of rank one, and the length at which the model's own is the same.

    The length is sought over a grid, then over finer ones around its best, for the class that fits best. With `whole`
    the directions of all tensors are compared, and not the first one as it is.
    """
    sent = seen.gradient if whole else {"first.weight": seen.gradient["first.weight"]}
    direction = torch.linalg.svd(sent["first.weight"].double(), full_matrices=False).Vh[0]
    direction = (direction * direction.sum().sign()).float().view(1, *seen.sample.shape)

    def apart(own: Named) -> float:
        if whole:
            return -sum(float(torch.cosine_similarity(own[n].flatten(), t.flatten(), dim=0)) for n, t in sent.items())
        return float((own["first.weight"] - sent["first.weight"]).square().sum())

    def gap(length: Tensor) -> float:
        labels = torch.arange(seen.classes)[:, None]
        image = length * direction
        every = (gradients.gradient(model, seen.weights, dict(seen.buffers), image, label)[0] for label in labels)
        return min(map(apart, every))

    low, high = 0.0, float(direction.numel()) ** 0.5
    for _ in range(6):
        grid = torch.linspace(low, high, 30)
        best = int(torch.tensor([gap(length) for length in grid]).argmin())
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 29)])
    return (low + high) / 2 * direction


def traps(seen: Observation, model: Any) -> Tensor:
    """Read the samples that stand alone between two thresholds: (dW_j - dW_j+1) / (db_j - db_j+1)."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    apart_weight, apart_bias = weight[:-1] - weight[1:], bias[:-1] - bias[1:]
    chosen = apart_bias.abs().topk(seen.batch_size).indices
    return (apart_weight[chosen] / apart_bias[chosen, None]).view(-1, *seen.sample.shape).float()


def convolution(seen: Observation, model: Any) -> Tensor:
    """Undo activation, norm and convolution of the features that the linear layer behind them has given away.

    u = (A x + c - mean) / deviation for the features u before the activation is linear in x, the deviations and the
    means, of each group of the norm; behind a batch norm these come back.
    """
    features = row_of(seen.gradient, "first.")
    keep, before = _inverse(model.act, features)
    with torch.no_grad():
        channels, height, width = model.conv(seen.sample.blank(1)).shape[1:]
    matrix, shift = matrix_of(model.conv, seen)
    places = height * width
    if isinstance(model.norm, nn.BatchNorm2d):
        mean, deviation = (part.repeat_interleave(places) for part in _returned(seen, model.norm, places))
        return solved(matrix[keep], (before * deviation + mean - shift)[keep], seen)
    if isinstance(model.norm, nn.GroupNorm):
        groups = torch.arange(model.norm.num_groups).repeat_interleave(channels // model.norm.num_groups * places)
        member = nn.functional.one_hot(groups).double()
        whole = torch.cat([matrix, -before[:, None] * member, -member], 1)
        return solved(whole[keep], -shift[keep], seen)
    return solved(matrix[keep], (before - shift)[keep], seen)


def pooled(seen: Observation, model: Any) -> Tensor:
    """Undo convolution and pooling, which are linear."""
    matrix, shift = matrix_of(model.front, seen)
    return solved(matrix, row_of(seen.gradient, "first.") - shift, seen)


def _inverse(activation: nn.Module, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return where an activation can be undone, (F,) bool, and the values before it."""
    everywhere = torch.ones_like(after, dtype=torch.bool)
    if isinstance(activation, nn.Sigmoid):
        return everywhere, after.clamp(1e-9, 1 - 1e-9).logit()
    if isinstance(activation, nn.Tanh):
        return everywhere, after.clamp(-1 + 1e-9, 1 - 1e-9).atanh()
    if isinstance(activation, nn.ReLU):
        return after > 1e-4, after
    if isinstance(activation, nn.LeakyReLU):
        return everywhere, torch.where(after > 0, after, after / activation.negative_slope)
    return everywhere, after


def _returned(seen: Observation, norm: nn.BatchNorm2d, count: int) -> tuple[Tensor, Tensor]:
    """Return the batch's mean and deviation of each channel, as the statistics that came back say; `count` values."""
    m = norm.momentum or 0.0
    mean, variance = (
        (seen.returned_buffers[f"norm.{name}"] - (1 - m) * seen.buffers[f"norm.{name}"]).double() / m
        for name in ("running_mean", "running_var")
    )
    return mean, (variance * (count - 1) / count + norm.eps).sqrt()


def residual(seen: Observation, model: Any) -> Tensor:
    """Undo the blocks one after the other: x = y - f(x) is a contraction."""
    state = row_of(seen.gradient, "first.").view(1, *seen.sample.shape).float()
    with torch.no_grad():
        for block in reversed(model.blocks):
            image = state
            for _ in range(60):
                image = state - 0.2 * block(image).tanh()
            state = image
    return state


def patches(seen: Observation, model: Any) -> Tensor:
    """Solve D^T X = dW for the patches X, where D, the slope in the places, is that in what the patches became."""
    sent, (_, height, width) = seen.gradient, seen.sample.shape
    slope = sent["places"][0].double()
    slope = slope[1:] if "token" in sent else slope
    weight = sent["patch.weight"].flatten(1).double()
    found = torch.linalg.lstsq(slope.T, weight, driver="gelsd").solution.T[None]
    image: Tensor = nn.functional.fold(found, (height, width), 2, stride=2)
    return image.float()


def placed(seen: Observation, model: Any, table: str = "table.") -> Tensor:
    """Solve E = A G for A, 1 where a token stands at a place, of the slopes in tokens and places."""
    sent = seen.gradient
    stands = sent[f"{table}weight"].double() @ torch.linalg.pinv(sent["places.weight"].double())
    return stands.argmax(0)[None]


def tables(seen: Observation, model: Any) -> Tensor:
    """Find the one row of each place's table that moves."""
    moved = seen.gradient["table.weight"].norm(dim=1).view(seen.sample.shape[0], -1)
    return moved.argmax(1)[None]


def read(seen: Observation, model: Any) -> Tensor:
    """Try all texts of the tokens whose rows move."""
    tokens = seen.gradient["table.weight"].any(1).nonzero()[:, 0]
    label = seen.gradient["head.bias"].argmin()[None]

    def apart(text: Tensor) -> float:
        own = gradients.gradient(model, seen.weights, dict(seen.buffers), text[None], label)[0]
        return float((own["table.weight"] - seen.gradient["table.weight"]).norm())

    every = (tokens[list(places)] for places in product(range(len(tokens)), repeat=seen.sample.shape[0]))
    return min((text for text in every if len(text.unique()) == len(tokens)), key=apart)[None]


def dummies(seen: Observation, model: Any) -> Tensor:
    """Find the one column of each place that moves."""
    moved = seen.gradient["first.weight"].norm(dim=0).view(seen.sample.shape[0], -1)
    return moved.argmax(1)[None]


def without_noise(update: Named, seen: Observation, model: Any, sigma: float, seed: int | None = None) -> Named:
    """Draw the noise again and subtract it."""
    drawn = drawn_like(update, seen.victim if seed is None else seed)
    return {name: tensor - sigma * drawn[name] for name, tensor in update.items()}


def without_number(update: Named, seen: Observation, model: Any) -> Named:
    """Subtract the number that units without a slope show: the commonest value of the first layer."""
    number = update["first.weight"].flatten().mode().values
    return {name: tensor - number for name, tensor in update.items()}


def in_order(update: Named, seen: Observation, model: Any) -> Named:
    """Undo the permutation of the known seed."""
    found = {}
    for name, tensor in update.items():
        order = torch.randperm(tensor.numel(), generator=seeded(7))
        found[name] = torch.empty_like(tensor.flatten()).scatter(0, order, tensor.flatten()).view_as(tensor)
    return found


def without_public(update: Named, seen: Observation, model: Any) -> Named:
    """Subtract the gradient of the black image of class 0."""
    black, label = seen.sample.blank(1), torch.zeros(1, dtype=torch.int64)
    public, _ = gradients.gradient(model, seen.weights, dict(seen.buffers), black, label)
    return {name: tensor - public[name] for name, tensor in update.items()}


def without_factors(update: Named, seen: Observation, model: Any) -> Named:
    """Divide by the factors of the client's number."""
    drawn = drawn_like(update, seen.victim)
    return {name: tensor / drawn[name].exp() for name, tensor in update.items()}


def without_layers(update: Named, seen: Observation, model: Any) -> Named:
    """Divide by each tensor's constant."""
    return {name: tensor / 3.0**k for k, (name, tensor) in enumerate(update.items())}


def with_signs(update: Named, seen: Observation, model: Any) -> Named:
    """Flip the signs again by the known seed."""
    return {
        name: t * torch.randn(t.shape, generator=seeded(5)).sign() if t.ndim > 1 else t for name, t in update.items()
    }


def mirrored_again(update: Named, seen: Observation, model: Any) -> Named:
    """Reflect once more."""
    return {name: mirrored(tensor) for name, tensor in update.items()}


def unnormed(seen: Observation, model: Any) -> Tensor:
    """Divide the scale's gradient by the shift's, and solve for the image, mean and deviation that give it."""
    entering = (seen.gradient["norm.weight"] / seen.gradient["norm.bias"]).double()
    weight, bias = model.frozen.weight.double(), model.frozen.bias.double()
    system = torch.cat([weight, -torch.ones(len(weight), 1).double(), -entering[:, None]], 1)
    found = torch.linalg.lstsq(system, -bias[:, None]).solution[:-2, 0]
    return found.view(1, *seen.sample.shape).float()


def below_zero(seen: Observation, model: Any) -> Tensor:
    """Divide the slopes' gradient by the biases', which gives what entered of the units below 0, times their slope."""
    ratios = (seen.gradient["rectified.weight"] / seen.gradient["bias"]).double()
    below = ratios < 0
    entering = (model.rectified.weight.double() * ratios - model.bias.double() - model.frozen.bias.double())[below]
    found = torch.linalg.lstsq(model.frozen.weight.double()[below], entering[:, None]).solution[:, 0]
    return found.detach().view(1, *seen.sample.shape).float()


def summed(seen: Observation, model: Any) -> Tensor:
    """Divide the sums over all rows, in which the noise cancels."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    return (weight.sum(0) / bias.sum()).view(1, *seen.sample.shape).float()


def of_a_few(seen: Observation, model: Any, seeds: int = 32) -> Tensor:
    """Subtract the noise of each seed, and take what leaves the smallest values."""
    updates = (without_noise(seen.update, seen, model, 1.0, seed) for seed in range(seeds))
    smallest = min(updates, key=lambda update: float(update["first.weight"].abs().median()))
    return dense(replace(seen, update=smallest), model)


def beside_halves(update: Named, seen: Observation, model: Any) -> Named:
    """Subtract the nearest half from each value."""
    return {name: tensor - (2 * tensor).round() / 2 for name, tensor in update.items()}


def beyond_two(seen: Observation, model: Any) -> Tensor:
    """Take the direction of the two rows without gradient off a row with one, so that most pixels are black."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    noise = torch.linalg.qr(weight[bias == 0][:2].T).Q
    row = int(bias.abs().argmax())
    left = weight[row] - noise @ least_absolute(noise, weight[row])
    return (left / bias[row]).view(1, *seen.sample.shape).float()


def beyond_any_two(update: Named, seen: Observation, model: Any) -> Named:
    """Find the two rows in whose plane most others are, which have no gradient, and take that plane off all."""
    weight = update["first.weight"].double()
    rows, planes = weight / weight.norm(dim=1, keepdim=True), []
    for one in range(len(rows) - 1):
        plane = torch.linalg.qr(rows[one : one + 2].T).Q
        planes.append((int(((rows - rows @ plane @ plane.T).norm(dim=1) < 1e-5).sum()), plane))
    noise = max(planes, key=lambda plane: plane[0])[1]
    left = torch.stack([row - noise @ least_absolute(noise, row) for row in weight])
    return {**update, "first.weight": left.float()}


def medians(seen: Observation, model: Any) -> Tensor:
    """Take of each pixel the middle one of what the rows say."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    return (weight / bias[:, None]).nanmedian(0).values.view(1, *seen.sample.shape).float()


def agreeing(seen: Observation, model: Any) -> Tensor:
    """Link rows of which two columns have one ratio, take factors along the links, and what most rows then say."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    rows = len(weight)
    links: dict[int, dict[int, Tensor]] = {row: {} for row in range(rows)}
    for one, other in product(range(rows), repeat=2):
        ratios = (weight[one] / weight[other])[(weight[one] != 0) & (weight[other] != 0)].sort().values
        if one != other and len(ratios) > 1:
            apart, place = (ratios.diff() / ratios[1:].abs()).min(0)
            if apart < 1e-6:
                links[other][one] = ratios[place]
    known = {max(links, key=lambda row: len(links[row])): torch.ones(()).double()}
    ahead = list(known)
    while ahead:
        for row, ratio in links[last := ahead.pop(0)].items():
            if row not in known:
                known[row] = ratio * known[last]
                ahead.append(row)
    found, factors = torch.tensor(list(known)), torch.stack(list(known.values()))
    scale = _said_twice((bias[found] / factors)[None])
    return (_said_twice((weight[found] / factors[:, None] / scale).T)).view(1, *seen.sample.shape).float()


def _said_twice(values: Tensor) -> Tensor:
    """Return for each row (N, M) the one of two neighbouring values, in order, that are most alike."""
    ordered = values.sort(1).values
    place = (ordered.diff(dim=1) / ordered[:, 1:].abs().clamp(min=1e-9)).nan_to_num(torch.inf).argmin(1)
    return ordered.gather(1, place[:, None])[:, 0]


def least_squares(seen: Observation, model: Any) -> Tensor:
    """Fit all rows at once, in which rounding averages out."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    return (bias @ weight / bias.square().sum()).view(1, *seen.sample.shape).float()


def repainted_back(seen: Observation, model: Any, how: str) -> Tensor:
    """Change back the sample that was trained on."""
    return repainted(dense(seen, model).clamp(0, 1), how, back=True)


def differences(update: Named, seen: Observation, model: Any) -> Named:
    """Take the differences of running sums."""
    return {n: t.flatten().diff(prepend=t.new_zeros(1)).view_as(t) for n, t in update.items()}


def without_weights(update: Named, seen: Observation, model: Any) -> Named:
    """Subtract what was there before the step."""
    return {name: (seen.weights[name] - tensor) / 0.1 for name, tensor in update.items()}


def between_rows(seen: Observation, model: Any) -> Tensor:
    """Subtract one row from another, and with it the noise that both have."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    high, low = int(bias.argmax()), int(bias.argmin())
    return ((weight[high] - weight[low]) / (bias[high] - bias[low])).view(1, *seen.sample.shape).float()


def darkest(seen: Observation, model: Any) -> Tensor:
    """Take off a row what its darkest pixel says, as that is black."""
    weight, bias = seen.gradient["first.weight"].double(), seen.gradient["first.bias"].double()
    row = int(bias.abs().argmax())
    alike = weight[row] * bias[row].sign() / factors_of(weight.shape[1])
    image = (alike - alike.min()) * factors_of(weight.shape[1]) / bias[row].abs()
    return image.view(1, *seen.sample.shape).float()


def together(seen: Observation, model: Any) -> Tensor:
    """Add the gradients of two layers that see the same, so that opposite noise goes."""
    weight, bias = (seen.gradient[f"one.{end}"] + seen.gradient[f"other.{end}"] for end in ("weight", "bias"))
    row = int(bias.abs().argmax())
    return (weight[row] / bias[row]).view(1, *seen.sample.shape)


def roots(update: Named, seen: Observation, model: Any) -> Named:
    """Take cube roots."""
    return {name: tensor.sign() * tensor.abs() ** (1 / 3) for name, tensor in update.items()}


def masked(seen: Observation, model: Any) -> Tensor:
    """Take each pixel from the row with the largest slope in the bias of those that kept both."""
    weight, bias = seen.gradient["first.weight"], seen.gradient["first.bias"]
    slope = bias[:, None].abs() * (weight != 0)
    rows = slope.argmax(0)
    pixels = torch.where(slope.amax(0) > 0, weight[rows, torch.arange(weight.shape[1])] / bias[rows], 0.0)
    return pixels.nan_to_num(0, 0, 0).view(1, *seen.sample.shape)


def signless(seen: Observation, model: Any) -> Tensor:
    """Take absolute values: no pixel is under zero."""
    return row_of(seen.gradient, "first.").abs().view(1, *seen.sample.shape).float()


def local(seen: Observation, model: Any) -> Tensor:
    """Divide the slopes in each patch's weights by those in its bias."""
    weight, bias = seen.gradient["weight"], seen.gradient["bias"]
    row = bias.abs().argmax(1)
    places = torch.arange(len(row))
    patches = (weight[places, row] / bias[places, row][:, None]).T[None]
    image: Tensor = nn.functional.fold(patches, seen.sample.shape[1:], 2, stride=2)
    return image


def thermometer(seen: Observation, model: Any) -> Tensor:
    """Count the thresholds that each pixel has passed."""
    return row_of(seen.gradient, "first.").view(-1, 16).round().sum(1).div(16).view(1, *seen.sample.shape).float()


def levels(seen: Observation, model: Any) -> Tensor:
    """Find the one level of each pixel whose vector moves."""
    moved = seen.gradient["table.weight"].norm(dim=1).view(-1, 17)
    return moved.argmax(1).div(16).view(1, *seen.sample.shape)


def waves(seen: Observation, model: Any) -> Tensor:
    """Take the angle of the slowest wave."""
    sine, cosine = row_of(seen.gradient, "first.").view(6, 2, -1)[0]
    return (torch.atan2(sine, cosine).remainder(2 * torch.pi) / 3.1).view(1, *seen.sample.shape).float()


def numbers(seen: Observation, model: Any) -> Tensor:
    """Read the numbers, and round them."""
    return (row_of(seen.gradient, "first.") * model.vocabulary).round().long()[None]


def lengths(seen: Observation, model: Any) -> Tensor:
    """Divide the magnitudes of columns by that of the bias."""
    weight, bias = seen.gradient["first.weight"].abs(), seen.gradient["first.bias"].abs()
    return (weight.amax(0) / bias.amax()).view(1, *seen.sample.shape)


def low_rank(seen: Observation, model: Any) -> Tensor:
    """Divide by the slopes in what the thin matrix gives, which follow from those behind the other."""
    slopes = seen.gradient["up.bias"] @ seen.weights["up.weight"]
    row = int(slopes.abs().argmax())
    return (seen.gradient["down.weight"][row] / slopes[row]).view(1, *seen.sample.shape)


def sparse(seen: Observation, model: Any) -> Tensor:
    """Take each pixel from the row with the largest slope of those in which it counts."""
    return masked(seen, model)


def normed(seen: Observation, model: Any) -> Tensor:
    """Add up the part of the image along a row's direction, which its length tells, and the part across."""
    path = "first.parametrizations.weight.original"
    sent, row = seen.gradient, int(seen.gradient["first.bias"].abs().argmax())
    slope, length = sent["first.bias"][row], seen.weights[f"{path}0"][row, 0]
    vector = seen.weights[f"{path}1"][row]
    along = sent[f"{path}0"][row, 0] / slope * vector / vector.norm()
    across = sent[f"{path}1"][row] * vector.norm() / (length * slope)
    return (along + across).view(1, *seen.sample.shape)


def squares(seen: Observation, model: Any) -> Tensor:
    """Divide by the bias's slope for the products of all pairs of pixels; those on the diagonal are squares."""
    weight, bias = seen.gradient["first.weight"], seen.gradient["first.bias"]
    row = int(bias.abs().argmax())
    return (weight[row] / bias[row]).diagonal().clamp(min=0).sqrt().view(1, *seen.sample.shape)


def gated(seen: Observation, model: Any) -> Tensor:
    """Divide the slope in each pixel's gate by that in its shift."""
    gate = seen.weights["gate"].sigmoid()
    return (seen.gradient["gate"] / seen.gradient["shift"] / (gate * (1 - gate))).view(1, *seen.sample.shape)


def lines(seen: Observation, model: Any) -> Tensor:
    """Solve D^T X = dW for the rows X of the image, where D is the slope in the places."""
    slope, weight = seen.gradient["places"].double(), seen.gradient["embed.weight"].double()
    channels, height, width = seen.sample.shape
    rows = torch.linalg.lstsq(slope.T, weight, driver="gelsd").solution
    return rows.view(height, channels, width).transpose(0, 1)[None].float()


def joined(seen: Observation, model: Any) -> Tensor:
    """Look up what entered the linear layer in the table, place by place."""
    table = seen.weights["table.weight"].double()
    entered = row_of(seen.gradient, "first.").view(seen.sample.shape[0], -1)
    return torch.cdist(entered, table).argmin(1)[None]


def added(seen: Observation, model: Any) -> Tensor:
    """Find the one row of each place's table that moves."""
    return seen.gradient["table"].norm(dim=2).argmax(1)[None]


def recurrent(seen: Observation, model: Any) -> Tensor:
    """Read what entered a recurrent layer in its first step."""
    return dense(seen, model, "layer.", "_ih_l0")


known_noise = partial(without_noise, sigma=1.0)
"""Undoes `KnownNoise` with the client's number."""
fixed_noise = partial(without_noise, sigma=1.0, seed=42)
"""Undoes `KnownNoise` with seed 42."""
