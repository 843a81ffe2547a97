"""Learned perceptual image patch similarity (LPIPS), with weights from a local file.

Source: Zhang et al. 2018, "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric". The linear heads,
version 0.1, come with the `lpips` package. The package would download the backbone's ImageNet weights. Here they come
from a file, a folder or torch's hub cache, without network access.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rayfed.core.files import local_path
from rayfed.errors import UserError
from rayfed.update import list_nonfinite

if TYPE_CHECKING:
    from lpips import LPIPS

Net = Literal["alex", "vgg"]

# File names to search for. The first is the name in torch's hub cache.
_FILES: dict[Net, tuple[str, ...]] = {
    "alex": ("alexnet-owt-7be5be79.pth", "alexnet_features.pth", "alexnet_features_f16.pth"),
    "vgg": ("vgg16-397923af.pth", "vgg16_features.pth", "vgg16_features_f16.pth"),
}
# Smallest side (pixels) of images: below it, the input of the last pooling layer is too small.
_SMALLEST: dict[Net, int] = {"alex": 31, "vgg": 16}
_ENLARGED = 64
_CHUNK = 16


class LpipsUnavailable(UserError):
    """Error for a backbone network of LPIPS whose weights are missing or invalid."""


class Lpips:
    """Learned perceptual distance between images (LPIPS), computed with one backbone network.

    `weights` is a file, or a folder to search for the usual file names. None searches torch's hub cache. Files may
    contain a whole torchvision state dict (`features.0.weight`) or that of `features` only (`0.weight`), in any
    precision. Raises `LpipsUnavailable`, which lists the file names, if there is no such file.
    """

    def __init__(self, net: Net, weights: str | Path | None = None) -> None:
        self.net = net
        path = _weights_file(net, weights)
        backbone = _read(net, path)
        self._network = _network(net)
        _fill(self._network, backbone, path)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the distances (N,) of two batches of images (N, C, H, W) in [0, 1], C = 1 or 3. Equal images give 0.

        Grey images are repeated to three channels. Images too small for the network (AlexNet: under 31 pixels, VGG:
        under 16) are enlarged bilinearly until their shorter side has 64 pixels.
        """
        network = self._network.to(a.device)
        with torch.no_grad():
            chunks = zip(self._prepare(a).split(_CHUNK), self._prepare(b).split(_CHUNK), strict=True)
            return torch.cat([network(x, y).flatten() for x, y in chunks])

    def _prepare(self, images: Tensor) -> Tensor:
        if images.shape[1] not in (1, 3):
            raise UserError(
                f"LPIPS needs images of 1 or 3 channels, found {images.shape[1]}; remove LPIPS from the metrics"
            )
        images = images.float().expand(-1, 3, -1, -1)
        side = min(images.shape[-2:])
        if side < _SMALLEST[self.net]:
            images = F.interpolate(images, scale_factor=_ENLARGED / side, mode="bilinear", align_corners=False)
        return images * 2 - 1


def _weights_file(net: Net, weights: str | Path | None) -> Path:
    """Return the path of the backbone's weights. Raises `LpipsUnavailable` if there are none."""
    place = Path(torch.hub.get_dir(), "checkpoints") if weights is None else local_path(weights)
    for path in [place] if place.is_file() else [place / name for name in _FILES[net]]:
        if path.is_file():
            return path
    raise LpipsUnavailable(
        f"no weights for LPIPS ({net}) in '{place}': put torchvision's '{_FILES[net][0]}' there, or set "
        f"metrics.lpips_weights to the file or to a folder with one of {', '.join(_FILES[net])}"
    )


def _read(net: Net, path: Path) -> dict[str, Tensor]:
    """Return the backbone's convolutions, named as in torchvision's `features`, as float32."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise LpipsUnavailable(f"cannot read '{path}' as weights for LPIPS ({net}): {error}") from error
    if not isinstance(state, Mapping):
        raise LpipsUnavailable(f"'{path}' contains a {type(state).__name__}, not a state dict for LPIPS ({net})")
    backbone = {key.removeprefix("features."): t.float() for key, t in state.items() if isinstance(t, Tensor)}
    if bad := list_nonfinite(backbone):
        raise LpipsUnavailable(f"'{path}' has NaN or infinite values in '{bad[0]}', so LPIPS ({net}) cannot use it")
    return backbone


def _network(net: Net) -> LPIPS:
    """Return the package's network with trained heads and a random backbone."""
    from lpips import LPIPS  # slow to import, and few runs need it

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*'(pretrained|weights)'")  # deprecated arguments in the package
        return LPIPS(net=net, pnet_rand=True, verbose=False).requires_grad_(False)


def _fill(network: LPIPS, backbone: dict[str, Tensor], path: Path) -> None:
    """Load the backbone's weights. `slice2.3.weight` of the package is `3.weight` of torchvision."""
    names = {name: name.split(".", 1)[1] for name in network.net.state_dict()}
    try:
        network.net.load_state_dict({name: backbone[source] for name, source in names.items()})
    except (KeyError, RuntimeError) as error:
        raise LpipsUnavailable(
            f"'{path}' does not contain the backbone of LPIPS ({network.pnet_type}): {error}"
        ) from error
