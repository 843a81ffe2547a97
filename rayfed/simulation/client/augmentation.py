"""Augmentation of a client's images: random crops and horizontal flips, sampled once per round.

Augmentation comes before all defences. The augmented image is the image that the client trains on, and the original
with which reconstructions are compared. Each sample has one version per round, so the sensitivity of privacy mechanisms
is unchanged.

Sources of the crops: He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2 (zero border);
Szegedy et al. 2015, "Going Deeper with Convolutions", section 6 (share of the area, sampled as in torchvision).
"""

from __future__ import annotations

from math import log

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rayfed.core.objective import NO_TARGET
from rayfed.scenario import Augment

Box = tuple[int, int, int, int]
"""Top, left, height and width of a crop, in pixels."""
_TRIES = 10
"""Maximum number of sampled crops before a centre crop is used."""
_RATIOS = 3 / 4, 4 / 3
"""Minimum and maximum aspect ratio (width / height) of a crop by area."""
_DRAWS = 2 * _TRIES + 5
"""Random numbers per sample, always the same number, so that the random numbers of each field are independent."""


def augmented(images: Tensor, labels: Tensor, augment: Augment, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return images (N, C, H, W) in [0, 1] and labels after a random crop and flip of each image.

    Masks (N, H, W), with one class per pixel, are cropped and flipped with their images, and padded with `NO_TARGET`.
    Other labels are unchanged.
    """
    drawn = draw.random((len(images), _DRAWS))
    made = [_moved(image, 0.0, numbers, augment) for image, numbers in zip(images, drawn, strict=True)]
    if labels.shape[1:] == images.shape[2:]:
        masks = zip(labels[:, None], drawn, strict=True)
        labels = torch.stack([_moved(mask, NO_TARGET, numbers, augment)[0] for mask, numbers in masks])
    return torch.stack(made), labels


def _moved(image: Tensor, border: float, numbers: np.ndarray, augment: Augment) -> Tensor:
    """Return an image or mask (C, H, W) after a crop and flip given by random `numbers` in [0, 1)."""
    height, width = image.shape[-2:]
    top, left = (int(number * (2 * augment.crop + 1)) for number in numbers[:2])
    image = F.pad(image, [augment.crop] * 4, value=border)[:, top : top + height, left : left + width]
    if augment.scale is not None:
        image = _resized(image, area_box(numbers[2:-1], augment.scale, height, width))
    return image.flip(-1) if augment.flip and numbers[-1] < 0.5 else image


def area_box(numbers: np.ndarray, scale: float, height: int, width: int) -> Box:
    """Return a crop box with at least a share `scale` of the image's area, from random numbers in [0, 1).

    The last two numbers give the position. The other numbers are pairs of a share and an aspect ratio, of which the
    first pair that fits is used.
    """
    low, high = map(log, _RATIOS)
    for share, shape in numbers[:-2].reshape(-1, 2):
        area, ratio = (scale + share * (1 - scale)) * height * width, np.exp(low + shape * (high - low))
        tall, wide = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        if 0 < tall <= height and 0 < wide <= width:
            top, left = int(numbers[-2] * (height - tall + 1)), int(numbers[-1] * (width - wide + 1))
            return top, left, tall, wide
    tall, wide = min(height, round(width / _RATIOS[0])), min(width, round(height * _RATIOS[1]))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _resized(image: Tensor, box: Box) -> Tensor:
    """Return a crop resized to the image's size (bilinear with antialias; nearest neighbour for masks)."""
    top, left, height, width = box
    part = image[None, :, top : top + height, left : left + width]
    if not image.is_floating_point():
        classes: Tensor = F.interpolate(part.double(), image.shape[-2:], mode="nearest-exact")[0].to(image.dtype)
        return classes
    whole: Tensor = F.interpolate(part, image.shape[-2:], mode="bilinear", antialias=True)[0]
    return whole.clamp(0, 1)  # rounding may leave the range
