"""'A little is enough: circumventing defenses for distributed learning' (Baruch 2019, algorithm 3)."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed.errors import UserError
from rayfed.poisoning.base import Insight, Poisoning
from rayfed.registry import component
from rayfed.update import Update


@component
class ALittleIsEnough(Poisoning):
    """Send the mean of the colluders' honest updates, shifted by a few standard deviations.

    Source: Baruch et al. 2019, algorithm 3. In every coordinate, enough honest clients are further from the mean than
    the malicious value, so a majority rule accepts it. A single colluder has no deviation and sends its honest update.
    """

    colludes: ClassVar[bool] = True

    z: Annotated[float, Field(gt=0)] | None = None
    """Number of standard deviations to shift the mean. Default: the maximum under a normal distribution, 0 for too few
    colluders."""

    def check(self, image_shape: tuple[int, ...], classes: int, clients: int, malicious: int) -> None:
        """Raise `UserError` if most clients of a round are malicious, because the default of `z` is then undefined."""
        if self.z is None and 2 * malicious >= clients:
            raise UserError(
                f"a_little_is_enough: {malicious} of the {clients} clients of a round are malicious, but the default "
                f"of z requires a minority; use fewer malicious clients, or set z"
            )

    def poison_update(self, update: Update, insight: Insight) -> Update:
        """Return the shifted mean of the honest updates, equal for all malicious clients, with the client's buffers."""
        z = deviations(insight.clients, len(insight.honest)) if self.z is None else self.z

        def lie(name: str) -> Tensor:
            values = torch.stack([honest.tensors[name] for honest in insight.honest])
            return values.mean(dim=0) - z * values.std(dim=0, correction=0)

        return replace(update, tensors={name: lie(name) for name in update.tensors}, bits=32)


def deviations(clients: int, malicious: int) -> float:
    """Return the largest z >= 0 at which a majority, including malicious clients, is beyond the shifted mean."""
    supporters = clients // 2 + 1 - malicious
    return max(0.0, NormalDist().inv_cdf((clients - malicious - supporters) / (clients - malicious)))
