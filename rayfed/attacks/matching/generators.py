"""Untrained generator of GRNN: map a latent to an image and the logits of its label.

Source: Ren 2022, thesis, section 3.2.2, figure 3.2 and table 3.1. Widths follow the authors' published code: 32
channels at half the image's size, and twice as many at every halving. The code makes the image in the last upsampling
block. As in the thesis, the image is made after that block, which has 16 channels.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2

from torch import Tensor, nn

LATENT = 128
"""Length of a latent, as in the authors' published code."""
_COARSEST = 4
_WIDTH = 16


class Generator(nn.Module):
    """Generator with an image branch (upsampling blocks and a sigmoid) and a label branch (one linear layer).

    The image branch starts from 4x4 features and doubles their size until the image fits. Other image sizes are
    cropped from the centre, because resampling would leave fewer free numbers than pixels.
    """

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        blocks = max(1, ceil(log2(max(height, width) / _COARSEST)))
        widths = [_WIDTH * 2**i for i in reversed(range(blocks + 1))]
        self.size = (height, width)
        self.coarse = nn.Sequential(nn.ConvTranspose2d(LATENT, 2 * widths[0], _COARSEST), nn.GLU(dim=1))
        self.blocks = nn.Sequential(*(_upsampling(before, after) for before, after in pairwise(widths)))
        self.to_image = nn.Conv2d(widths[-1], channels, 3, padding=1)
        self.to_label = nn.Linear(LATENT, classes)

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Generate images (N, C, H, W) in [0, 1] and label logits (N, K) from latents (N, LATENT)."""
        square = self.to_image(self.blocks(self.coarse(latents[:, :, None, None]))).sigmoid()
        height, width = self.size
        top, left = (square.shape[-2] - height) // 2, (square.shape[-1] - width) // 2
        return square[..., top : top + height, left : left + width], self.to_label(latents)


def _upsampling(channels_in: int, channels_out: int) -> nn.Module:
    """Return an upsampling block of table 3.1; its batch norm always uses the statistics of the batch."""
    return nn.Sequential(
        nn.Upsample(scale_factor=2),
        nn.Conv2d(channels_in, 2 * channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels_out, track_running_stats=False),
        nn.GLU(dim=1),
    )
