"""Assignment of reconstructions to true images: a batch's gradient does not know the order of its samples."""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.samples import Modality


def assign(true: Tensor, reconstructed: Tensor, modality: Modality = "pixels") -> Tensor:
    """Return the permutation (N,) int64 for which `reconstructed[p]` lines up with `true`, both (N, *shape).

    It minimises the sum of the pairs' distances (the roots of their mean squared errors, of texts the numbers of tokens
    that differ): by the triangle inequality no exact copy is then given to another image, as squares would do. A
    reconstruction that is not finite comes last.
    """
    from scipy.optimize import linear_sum_assignment  # half a second of imports, in processes that may never score

    usable = reconstructed.flatten(1).isfinite().all(1)
    if modality == "tokens":
        cost = torch.cdist(true.double(), reconstructed.nan_to_num(0).double(), p=0)
    else:
        pixels, guesses = true.double().flatten(1), reconstructed.double().flatten(1)
        # Not by matrix product, whose rounding error is of the order of a good reconstruction's distance.
        cost = torch.cdist(pixels, guesses, compute_mode="donot_use_mm_for_euclid_dist")
    cost[:, ~usable] = cost[:, usable].amax() + 1 if usable.any() else 0.0
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.from_numpy(columns).to(reconstructed.device)
