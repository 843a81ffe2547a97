"""Image transformations that the policies of `ats` select by number.

The fifty operations of the CIFAR-10 policy of Cubuk et al. 2019, "AutoAugment: Learning Augmentation Strategies from
Data", two per line of the policy, without their probabilities. The numbers from 0 are those of Gao et al. 2021,
"Privacy-preserving Collaborative Learning with Automatic Transformation Search". Magnitudes range from 0 to 9. Colour,
contrast, brightness and sharpness change by at most 0.5, half as much as in AutoAugment, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from math import atan, degrees

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as T

Operation = Callable[[Tensor, float], Tensor]
"""Function of images (N, C, H, W) in [0, 1] and a signed strength that returns images of the same shape."""


def _moved(images: Tensor, across: float = 0.0, down: float = 0.0, shear: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """Shift by shares of the size and shear about the corner; fill with black."""
    height, width = images.shape[-2:]
    moved: Tensor = T.affine(
        images,
        angle=0.0,
        translate=[round(across * width), round(down * height)],
        scale=1.0,
        shear=[degrees(atan(slope)) for slope in shear],
        interpolation=InterpolationMode.BILINEAR,
        center=[0.0, 0.0],
    )
    return moved


def _posterised(images: Tensor, strength: float) -> Tensor:
    posterised: Tensor = T.posterize(images, bits=round(8 - 4 * strength))
    return posterised


def _solarised(images: Tensor, strength: float) -> Tensor:
    return torch.where(images >= (1 - strength) * 256 / 255, 1 - images, images)


_SIGNED: dict[str, tuple[float, Operation]] = {
    "shear_x": (0.3, lambda images, s: _moved(images, shear=(s, 0.0))),
    "shear_y": (0.3, lambda images, s: _moved(images, shear=(0.0, s))),
    "translate_x": (150 / 331, lambda images, s: _moved(images, across=s)),
    "translate_y": (150 / 331, lambda images, s: _moved(images, down=s)),
    "colour": (0.5, lambda images, s: T.adjust_saturation(images, 1 + s)),
    "contrast": (0.5, lambda images, s: T.adjust_contrast(images, 1 + s)),
    "brightness": (0.5, lambda images, s: T.adjust_brightness(images, 1 + s)),
    "sharpness": (0.5, lambda images, s: T.adjust_sharpness(images, 1 + s)),
}
"""Operation -> its maximum strength, and the function. Each image gets a random sign of the strength."""
_UNSIGNED: dict[str, tuple[float, Operation]] = {
    "rotate": (30.0, lambda images, s: T.rotate(images, s, InterpolationMode.BILINEAR, fill=0.5)),
    "posterise": (1.0, _posterised),
    "solarise": (1.0, _solarised),
    "autocontrast": (0.0, lambda images, _: T.autocontrast(images)),
    "equalise": (0.0, lambda images, _: T.equalize(images)),
    "invert": (0.0, lambda images, _: 1 - images),
}

_LISTED = """
    invert 7, contrast 6, rotate 2, translate_x 9, sharpness 1, sharpness 3, shear_y 2, translate_y 2, autocontrast 5,
    equalise 2, shear_y 5, posterise 5, colour 3, brightness 5, sharpness 9, brightness 9, equalise 5, equalise 1,
    contrast 7, sharpness 5, colour 5, translate_x 5, equalise 7, autocontrast 8, translate_y 3, sharpness 6,
    brightness 6, colour 8, solarise 0, invert 0, equalise 0, autocontrast 0, equalise 8, equalise 4, colour 5,
    equalise 5, autocontrast 4, solarise 4, brightness 3, colour 0, solarise 1, autocontrast 0, translate_y 3,
    translate_y 3, autocontrast 1, solarise 1, equalise 5, invert 0, translate_y 3, autocontrast 1
"""
NAMES: tuple[tuple[str, int], ...] = tuple(
    (name, int(magnitude)) for name, magnitude in (entry.split() for entry in _LISTED.split(","))
)
"""(operation, magnitude from 0 to 9) of every number."""


def has_random_sign(number: int) -> bool:
    """Return whether transformation `number` gives each image a random sign of the strength."""
    return NAMES[number][0] in _SIGNED


def transform(images: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Apply transformation `number` to images (N, C, H, W) in [0, 1], with a random sign per image if signed."""
    name, magnitude = NAMES[number]
    if name in _UNSIGNED:
        largest, operation = _UNSIGNED[name]
        return operation(images, largest * magnitude / 9).clamp(0, 1)
    largest, operation = _SIGNED[name]
    up = (torch.rand(len(images), generator=generator) < 0.5).to(images.device)
    result = torch.empty_like(images)
    for rows, sign in ((up, 1), (~up, -1)):
        if rows.any():
            result[rows] = operation(images[rows], sign * largest * magnitude / 9).clamp(0, 1)
    return result
