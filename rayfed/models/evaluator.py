"""Evaluation network, which estimates the share of noise in an image.

Source: Fan et al. 2024, "Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning", section 3.3
and appendix D. The paper's linear layer reads the flattened last feature map, which limits a network to images of one
size. Here the map is averaged first, so that all positions share the layer's weights: noise looks alike everywhere.
"""

from __future__ import annotations

from torch import Tensor, nn

_WIDTHS = (128, 256, 512)


class Evaluator(nn.Module):
    """Network that estimates the share of noise in an image: three 3x3 convolutions and a linear layer.

    The convolutions have stride 2. The network has 1.5M parameters. Images may have any size.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *_WIDTHS), _WIDTHS, strict=False):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.linear = nn.Linear(_WIDTHS[-1], 1)

    def forward(self, images: Tensor) -> Tensor:
        """Estimate the share of noise, (N,) in [0, 1], of images (N, C, H, W) in [0, 1] with C = 1 or 3."""
        return self.logits(images).sigmoid()

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of the images' shares of noise, (N,); grey images are repeated to three channels."""
        logits: Tensor = self.linear(self.features(images.expand(-1, 3, -1, -1)).mean((2, 3)))[:, 0]
        return logits
