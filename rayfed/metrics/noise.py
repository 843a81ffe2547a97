"""Share of noise in an image, estimated by an evaluation network.

Source: Fan et al. 2024, "Refiner", section 5.3: above about 0.6, people see only noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.errors import UserError
from rayfed.models.pretrained import load_evaluator

_CHUNK = 64


class NoiseRatio:
    """Share of noise in images, estimated by an evaluation network from a file, by default the network in rayfed.

    Raises `NetworkUnavailable` if there is no such file. The message shows how to train one.
    """

    def __init__(self, evaluator: str | None = None) -> None:
        load_evaluator(evaluator, torch.device("cpu"))
        self.evaluator = evaluator

    def __call__(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return the estimated share of noise in the images `guess` (N, C, H, W), C = 1 or 3: (N,) in [0, 1]."""
        if guess.shape[1] not in (1, 3):
            raise UserError(f"noise_ratio needs images of 1 or 3 channels, found {guess.shape[1]}; remove the metric")
        network = load_evaluator(self.evaluator, guess.device)
        with torch.no_grad():
            return torch.cat([network(images.float()) for images in guess.split(_CHUNK)])
