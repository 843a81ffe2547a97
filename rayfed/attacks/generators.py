"""The untrained generator of GRNN: from a latent to an image and the logits of its label.

Source: Ren 2022, thesis, section 3.2.2, figure 3.2 and table 3.1. Widths are those of the authors' published code: 32
channels at half the image's size, twice as many at every halving; the code makes the image in the last upsampling
block, the thesis behind it, where 16 channels continue the row.
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
    """Image branch: 4x4 features, doubled until the image fits, a sigmoid; label branch: one linear layer.

    Images whose sides are no power of two are cut from the middle of the next larger square: a resampled image would
    have fewer free numbers than pixels along each edge, a cut one has all of them.
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
        """Latents (N, LATENT) to images (N, C, H, W) in [0, 1] and label logits (N, K)."""
        square = self.to_image(self.blocks(self.coarse(latents[:, :, None, None]))).sigmoid()
        height, width = self.size
        top, left = (square.shape[-2] - height) // 2, (square.shape[-1] - width) // 2
        return square[..., top : top + height, left : left + width], self.to_label(latents)


def _upsampling(channels_in: int, channels_out: int) -> nn.Module:
    """Return a block of table 3.1, with batch norm by the batch's statistics: there are no data but these latents."""
    return nn.Sequential(
        nn.Upsample(scale_factor=2),
        nn.Conv2d(channels_in, 2 * channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels_out, track_running_stats=False),
        nn.GLU(dim=1),
    )
