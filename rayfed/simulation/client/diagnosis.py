"""Statistics of clients' private layers (Gu 2021, figures 4 and 5, theorem 1), for reports only."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from torch import nn

from rayfed.metrics.private import compute_lower_bound, compute_upper_bound, distance, rank
from rayfed.models.copying import copy_model
from rayfed.models.private_conv import PrivateConv, private_convs
from rayfed.update import Named


@torch.no_grad()
def private_layers(model: nn.Module, parts: Sequence[Named]) -> list[dict[str, Any]]:
    """Return one row of the table `private` per private convolution of a model, without the columns arm and round.

    `parts` contains the private tensors of each client.
    """
    rows = []
    for path, block in private_convs(model).items():
        blocks = [_filled(block, path, part) for part in parts]
        matrices = [b.matrix() for b in blocks]
        rows.append(
            {
                "layer": path,
                "distance": distance([b.conv.weight for b in blocks]),
                "rank": mean(rank(matrix) for matrix in matrices),
                "scale": mean(float(b.scale().abs().mean()) for b in blocks),
                "bound_above": compute_upper_bound(matrices),
                "bound_below": compute_lower_bound(matrices),
            }
        )
    return rows


def _filled(block: PrivateConv, path: str, part: Named) -> PrivateConv:
    """Return a CPU copy of a block with one client's tensors."""
    own = copy_model(block).cpu()
    own.load_state_dict({name.removeprefix(f"{path}."): t for name, t in part.items() if name.startswith(f"{path}.")})
    return own
