"""Overlap of recovered segmentation masks with the true masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor


def mask_iou(true: Tensor, found: Tensor) -> Tensor:
    """Return the intersection over union of masks (N, H, W) int64, averaged over the classes in either mask, (N,).

    Pixels without a class in either mask are ignored. The result is NaN if no pixel is left.
    """
    import torch

    from rayfed.core.objective import NO_TARGET

    shares = []
    for one, other in zip(true, found, strict=True):
        counted = (one != NO_TARGET) & (other != NO_TARGET)
        own, other = one[counted], other[counted]
        if not len(own):
            shares.append(torch.nan)
            continue
        classes = int(max(own.max(), other.max())) + 1
        both = own[own == other].bincount(minlength=classes).double()
        either = own.bincount(minlength=classes) + other.bincount(minlength=classes) - both
        shares.append(float((both / either)[either > 0].mean()))
    return torch.tensor(shares, dtype=torch.float64)


MASK_IOU = Metric(
    name="mask_iou",
    description="intersection over union of the recovered mask and the true one, mean over the classes, 0..1",
    title="mask recovered",
    function=mask_iou,
    compares="masks",
    higher_is_closer=True,
    modalities=("pixels",),
    format="share",
    outcome=False,
    success=None,
)
