"""Passports: scale and shift of a private convolution, computed from its weights and the client's secret tensors.

Sources: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", equations 13 and 25; after Fan et al. 2019,
"Rethinking Deep Neural Network Ownership Verification: Embedding Passports to Defeat Ambiguity Attacks". The block
`published` is that of the code of Zhang et al. 2020, "Passport-aware Normalization for Deep Model Protection", which Gu
cites, and of FATE, the authors' framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.gradients import Penalised
from rayfed.models.norm import without_affine
from rayfed.models.private_conv import PrivateConv

BlockKind = Literal["linear", "published"]
Distribution = Literal["normal", "uniform"]


@dataclass(frozen=True)
class PassportShape:
    """How a block samples its passports and computes scale and shift from them."""

    size: int
    """Side of a passport in pixels."""
    mean: float
    deviation: float
    """Standard deviation of a normal passport, or half the width of a uniform one's range."""
    distribution: Distribution
    block: BlockKind

    def sample(self, channels: int) -> Tensor:
        """Sample two passports, for scale and shift: (2, channels, size, size)."""
        shape = (2, channels, self.size, self.size)
        noise = torch.randn(shape) if self.distribution == "normal" else 2 * torch.rand(shape) - 1
        return self.mean + self.deviation * noise


class Passport(PrivateConv):
    """Private convolution with scale and shift derived from secret passports: `gamma (W * x) + beta`.

    `gamma = D(E(avg(W * P_gamma)))` and `beta = D(E(avg(W * P_beta)))`, with the mean over positions. E and D are
    linear maps of the channels, without biases. The block `linear` has half as many channels between E and D, so the
    order of the mean does not matter and this is equation 13. The block `published` has a quarter as many channels, and
    LeakyReLU after E. A normalisation after the convolution loses its own scale and shift, and is applied before gamma
    and beta. `published` adds a batch norm if the model has none. The convolution loses its bias, which beta replaces.
    """

    def __init__(self, conv: nn.Conv2d, norm: nn.Module | None, common_start: bool, shape: PassportShape) -> None:
        """Sample the passports; raise `UserError` if they are smaller than the kernel."""
        published = shape.block == "published"
        bare = norm and without_affine(norm)
        if bare is None and published:
            bare = nn.BatchNorm2d(conv.out_channels, affine=False)
        super().__init__(conv, bare, common_start)
        if shape.size < max(conv.kernel_size):
            raise UserError(
                f"passports of {shape.size}x{shape.size} are smaller than the kernel {conv.kernel_size}: "
                "increase `size`"
            )
        conv.bias = None
        channels = conv.out_channels
        width = max(1, channels // 4) if published else -(-channels // 2)
        self.encode = nn.Linear(channels, width, bias=False)
        self.between = nn.LeakyReLU() if published else nn.Identity()
        self.decode = nn.Linear(width, channels, bias=False)
        self.register_buffer("passports", shape.sample(conv.in_channels))

    def forward(self, images: Tensor) -> Tensor:
        """Return the convolution's scaled and shifted activations, (N, C', H', W')."""
        gamma, beta = self.scale_and_shift()
        if isinstance(self.norm, nn.Identity):  # the same function, but kernels have fewer values than features
            features: Tensor = self.conv._conv_forward(images, gamma[:, None, None, None] * self.conv.weight, beta)
            return features
        return torch.addcmul(beta[:, None, None], gamma[:, None, None], self.norm(self.conv(images)))

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Return the scale gamma and the shift beta, (C',) each."""
        return self.derived()

    def derived(self) -> tuple[Tensor, Tensor]:
        """Return the scale gamma and the shift beta as derived from the passports, (C',) each."""
        mean = self.conv(self.passports).mean((2, 3))
        gamma, beta = self.decode(self.between(self.encode(mean)))
        return gamma, beta

    def scale(self) -> Tensor:
        """Return the factor gamma of each output channel, (C',)."""
        return self.scale_and_shift()[0]


class PenalisedPassport(Passport, Penalised):
    """Passport with trainable gamma and beta, and a penalty on their distance from the derived gamma and beta.

    As in a normalisation, gamma starts at one and beta at zero.
    """

    def __init__(
        self, conv: nn.Conv2d, norm: nn.Module | None, common_start: bool, shape: PassportShape, price: float
    ) -> None:
        """Create a passport with `price` as the weight of the two distances in the loss."""
        super().__init__(conv, norm, common_start, shape)
        self.gamma = nn.Parameter(torch.ones(conv.out_channels))
        self.beta = nn.Parameter(torch.zeros(conv.out_channels))
        self.price = price

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Return the trainable scale gamma and shift beta, (C',) each."""
        return self.gamma, self.beta

    def penalty(self, output: Tensor) -> Tensor:
        """Return the penalty on the distances of gamma and beta (eq. 25), equal for all samples: (N,)."""
        gamma, beta = self.derived()
        apart = torch.linalg.vector_norm(self.gamma - gamma) + torch.linalg.vector_norm(self.beta - beta)
        penalties: Tensor = (self.price * apart).expand(len(output))
        return penalties
