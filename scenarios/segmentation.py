"""Define the network of `segmentation.yaml`. As a script, write the scenario's images with masks.

The images are patches of scikit-image's photograph of coins from Pompeii, an example of its user guide.
"""

from __future__ import annotations

from io import BytesIO
from itertools import product
from pathlib import Path

import numpy as np
from torch import nn

SIZE = 32
"""Height and width of a patch in pixels."""
BACKGROUND, COIN = 30, 150
"""Grey levels below and above which a pixel's class is certain, as in scikit-image's example."""
UNCOUNTED = 255
"""Value of ignored pixels in a mask."""


def fcn(image_shape: tuple[int, int, int], classes: int, width: int = 8) -> nn.Module:
    """Return a fully convolutional network for images (N, C, H, W), with logits (N, classes, H, W).

    The sides of the images must be multiples of four, as inner layers have a fourth of the resolution.
    """
    channels, *_ = image_shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, stride=2, padding=2), nn.GELU(),
        nn.Conv2d(width, 2 * width, 5, stride=2, padding=2), nn.GELU(),
        nn.Conv2d(2 * width, 2 * width, 5, padding=2), nn.GELU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.GELU(),
        nn.ConvTranspose2d(width, classes, 4, stride=2, padding=1),
    )  # fmt: skip


def patches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return images and masks (SIZE, SIZE): background 0, coin 1, and 255 for pixels along a coin's edge.

    The classes are computed by a watershed of the edges that starts from the certain pixels.
    """
    from scipy.ndimage import binary_dilation, binary_erosion, binary_fill_holes
    from skimage.data import coins
    from skimage.filters import sobel
    from skimage.segmentation import watershed

    photo = coins()
    sure = np.where(photo < BACKGROUND, 1, np.where(photo > COIN, 2, 0))
    coin = binary_fill_holes(watershed(sobel(photo), sure) == 2)
    mask = np.where(binary_dilation(coin) & ~binary_erosion(coin), UNCOUNTED, coin).astype(np.uint8)
    grid = ([slice(low, low + SIZE) for low in range(0, side - SIZE + 1, SIZE)] for side in photo.shape)
    return [(photo[place], mask[place]) for place in product(*grid)]


def write_parquet(path: Path) -> None:
    """Write the patches with the columns `image` and `mask`, in the format for your own data."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    def encoded(pixels: np.ndarray) -> dict[str, bytes | None]:
        buffer = BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    images, masks = zip(*patches(), strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": list(map(encoded, images)), "mask": list(map(encoded, masks))}), path)


if __name__ == "__main__":
    write_parquet(Path(__file__).parent / "user_data" / "coins.parquet")
