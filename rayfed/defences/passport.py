"""FDL-PP: private front layers whose scale and shift are computed from passports that only the client has.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", section 4.1, algorithm 1 and appendix A.3.2.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.defences.split import PrivateFront
from rayfed.models.passport import BlockKind, Distribution, PassportShape, PenalisedPassport
from rayfed.models.passport import Passport as PassportConv
from rayfed.models.private_conv import PrivateConv
from rayfed.registry import component


@component
class Passport(PrivateFront):
    """Keep the first convolutions private and compute their scale and shift from secret passports.

    Empirical. Each client samples its passports once and never trains them. The autoencoder that maps passports to
    scale and shift is private, too, and trained with the private layers.
    """

    size: Annotated[int, Field(ge=1)] = 8
    """Side of a passport in pixels. Minimum: the kernel size. In the paper's code, it is the side of the images."""
    deviation: Annotated[float, Field(gt=0)] = 8.0
    """Standard deviation of a normal passport's values, or half the width of a uniform one's range. Scale and shift are
    proportional to deviation / size. If this is small, later layers without norms receive almost no signal and learn
    slowly."""
    mean: float = 0.0
    """Mean of a passport's values. If it is far from 0, the clients' scales are almost equal."""
    distribution: Distribution = "normal"
    """Distribution of a passport's values. `uniform`: the same probability from mean - deviation to mean +
    deviation."""
    block: BlockKind = "linear"
    """Computation of scale and shift. `linear`: the autoencoder is linear, with half as many channels inside (equation
    13). `published`: a quarter as many, LeakyReLU inside, and a batch norm without its own scale before the passport's
    scale, as in the code that the paper cites."""
    consistency: Annotated[float, Field(gt=0)] | None = None
    """Weight, in the loss, of the distance between scale and shift and the passports' output. Scale and shift are then
    separate parameters (equation 25, which would be zero otherwise). Null: they equal the passports' output (equation
    13)."""

    def _block(self, conv: nn.Conv2d, norm: nn.Module | None) -> PrivateConv:
        common = self.start == "common"
        shape = PassportShape(self.size, self.mean, self.deviation, self.distribution, self.block)
        if self.consistency is None:
            return PassportConv(conv, norm, common, shape)
        return PenalisedPassport(conv, norm, common, shape, self.consistency)
