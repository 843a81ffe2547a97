"""Imprint: a malicious server inserts a layer before the model and reconstructs images from its gradient.

All rows of the layer measure the brightness h(x), the mean pixel. They differ only in their thresholds
c_1 < c_2 < ..., which cut the distribution of brightness into bins of equal mass. With g_i the slope of the loss in a
row's activation by image i, row l has the gradients sum g_i x_i (weight) and sum g_i (bias) over these images:

    relu:    all images with h(x_i) > c_l, with the same g_i in every row, so rows l and l + 1 differ only by bin l;
    sparse:  the images of bin l, because the activation is flat outside of the bin.

The ratio of weight to bias is exactly the image if it is the only one in its bin, and otherwise a weighted mean. With n
images in k bins of equal mass, n (1 - 1/k)^(n - 1) are expected to be the only one in their bin.

Source: Fowl et al. 2022, "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified
Models", section 3 (`relu`) and its sparse variant for federated averaging.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.groups import in_groups
from rayfed.attacks.inference.labels import filled, with_labels
from rayfed.core import losses
from rayfed.registry import component
from rayfed.update import Named, Observation

_NO_BLOCK = "the client's model has no imprint block: the server must modify the model first (see `MaliciousServer`)"
_PHOTOGRAPHS = (0.45, 0.13)
"""Mean and standard deviation of brightness over natural photographs; CIFAR-10 has 0.473 and 0.121."""
_TOLERANCE = 1e-3
"""Distance, on [0, 1], by which rounding may move an image's brightness out of its bin."""


class ImprintBlock(nn.Module):
    """Imprint block: linear layer, activation, and linear layer back to the image's shape (N, C, H, W)."""

    def __init__(self, pixels: int, bins: int, sparse: bool) -> None:
        super().__init__()
        self.encode = nn.Linear(pixels, bins)
        self.decode = nn.Linear(bins, pixels)
        self.sparse = sparse

    def forward(self, images: Tensor) -> Tensor:
        """Return the input of the model after the block: a fixed pattern scaled by the brightness of the images."""
        measured = self.encode(images.flatten(1))
        pattern: Tensor = self.decode(measured.clamp(0, 1) if self.sparse else measured.relu()).view_as(images)
        return pattern


@component
class Imprint:
    """Insert an imprint block before the victims' model (active attack) and reconstruct images from its gradient.

    The thresholds of the bins follow a normal distribution of brightness. Images whose brightness matches their bin
    come first, ordered by the size of the bias gradient. Labels are inferred from the gradient.
    """

    place_labels: ClassVar[str] = "unneeded"

    bins: Annotated[int, Field(ge=2)] = 128
    """Number of bins. Use several times the batch size, because images that share a bin are lost."""
    variant: Literal["relu", "sparse"] = "relu"
    """`relu` for gradients; `sparse` for updates after several local steps, where images change only their own bin."""
    gain: Annotated[float, Field(gt=0)] = 1.0
    """Scale of the block's output. A larger gain lifts images above noise, but shifts bins during local steps."""
    brightness: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0)]] | None = None
    """Mean and standard deviation of the images' mean pixel. Default: those of the public images with `knowledge:
    [public]`, else 0.45 and 0.13, as for photographs."""

    def tamper(
        self,
        model: nn.Module,
        weights: Named,
        buffers: Named,
        image_shape: tuple[int, ...],
        extra: Mapping[str, Any],
        generator: torch.Generator,
    ) -> tuple[nn.Module, Named, Named]:
        """Return the model with an imprint block before it (see `MaliciousServer`)."""
        tampered = self._in_front_of(model, image_shape)
        device = next(iter(weights.values())).device
        block = {f"imprint.{name}": w.to(device) for name, w in self._block(image_shape, extra, generator).items()}
        weights = block | {f"model.{name}": w for name, w in weights.items()}
        return tampered.to(device), weights, {f"model.{name}": b for name, b in buffers.items()}

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        if "imprint.encode.weight" not in observations[0].weights:
            return [not_applicable(observation, _NO_BLOCK) for observation in observations]
        tampered = self._in_front_of(model, observations[0].sample.shape)
        labelled = [filled(observation) for observation in with_labels(observations, tampered)]
        return in_groups(lambda group, _: [self._reconstruction(o) for o in group], labelled, generators)

    def _in_front_of(self, model: nn.Module, image_shape: tuple[int, ...]) -> nn.Module:
        block = ImprintBlock(prod(image_shape), self.bins, self.variant == "sparse")
        whole = nn.Sequential(OrderedDict(imprint=block, model=model))
        losses.attach_loss(whole, losses.get_loss(model))
        return whole

    def _block(self, image_shape: tuple[int, ...], extra: Mapping[str, Any], generator: torch.Generator) -> Named:
        """Return the block's weights, by name."""
        pixels, sparse = prod(image_shape), self.variant == "sparse"
        mean, deviation = self.brightness or _of_public(extra) or _PHOTOGRAPHS
        edges = thresholds(mean, deviation, self.bins)
        # a sparse row rises from 0 to 1 within its bin; a relu row rises from its threshold without a limit
        slopes = 1 / edges.diff() if sparse else torch.full((self.bins,), 1 / (self.bins * deviation)).double()
        # equal columns give equal slopes; sparse rows do not need these, so signs alternate to keep the sum small
        signs = torch.ones(self.bins)
        signs[1::2] = -1 if sparse else 1
        pattern = self.gain * torch.randn(pixels, generator=generator)
        return {
            "encode.weight": (slopes / pixels)[:, None].expand(-1, pixels).float().contiguous(),
            "encode.bias": (-slopes * edges[:-1]).float(),
            "decode.weight": pattern[:, None] * signs,
            "decode.bias": torch.full((pixels,), 0.5),
        }

    def _reconstruction(self, observation: Observation) -> Reconstruction:
        assert observation.labels is not None
        labels = observation.labels.cpu()
        shape = (observation.batch_size, *observation.sample.shape)
        found = _by_trust(*self._bins(observation))
        if len(found) == 0:
            message = "no bin of the imprint block contains a finite image"
            return Reconstruction(images=torch.full(shape, 0.5), labels=labels, status="diverged", message=message)
        chosen = found[torch.arange(observation.batch_size) % len(found)]
        return Reconstruction(images=chosen.reshape(shape).clamp(0, 1).float().cpu(), labels=labels)

    def _bins(self, observation: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Return the content of each bin: weight gradient (k, D), bias gradient (k,), and the thresholds (k + 1,)."""
        weight, bias = (observation.weights[f"imprint.encode.{name}"].double() for name in ("weight", "bias"))
        rows, sums = (observation.undecayed[f"imprint.encode.{name}"].double() for name in ("weight", "bias"))
        if self.variant == "relu":
            rows = rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])
            sums = sums - torch.cat([sums[1:], torch.zeros_like(sums[:1])])
        edges = -bias / weight.sum(1)
        return rows, sums, torch.cat([edges, edges.new_full((1,), torch.inf)])


def thresholds(mean: float, deviation: float, bins: int) -> Tensor:
    """Return the edges (bins + 1,) of bins of equal mass under a normal distribution of brightness, ascending, float64.

    The outermost two are beyond all images: at 0 and 1, or one standard deviation beyond their neighbours.
    """
    shares = torch.arange(1, bins, dtype=torch.float64) / bins
    inner = mean + deviation * torch.special.ndtri(shares)
    lowest, highest = inner[:1] - deviation, inner[-1:] + deviation
    return torch.cat([lowest.clamp(max=0), inner, highest.clamp(min=1)])


def _of_public(extra: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return mean and standard deviation of the public images' brightness, or None without public images."""
    if "public" not in extra:
        return None
    brightness = extra["public"][0].flatten(1).mean(1)
    return float(brightness.mean()), float(brightness.std())


def _by_trust(rows: Tensor, sums: Tensor, edges: Tensor) -> Tensor:
    """Return the finite images (R, D) in the bins, most reliable first (see `Imprint`).

    The brightness computed from the bias gradient is clamped to the bin, because rounding affects it in narrow bins.
    """
    brightness = rows.mean(1) / sums
    inside = brightness.clamp(edges[:-1], edges[1:])
    images = rows * (inside / rows.mean(1))[:, None]
    plausible = (brightness - inside).abs() < _TOLERANCE
    order = (plausible * sums.abs().amax() + sums.abs()).argsort(descending=True, stable=True)
    return images[order[images[order].isfinite().all(1)]]
