"""Passports: scale and shift of a private convolution, computed from its weights and the client's secret tensors.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", equations 13 and 25; after Fan et al. 2019,
"Rethinking Deep Neural Network Ownership Verification: Embedding Passports to Defeat Ambiguity Attacks".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.gradients import Penalised
from rayfed.models.norm import without_affine
from rayfed.models.private_conv import PrivateConv


class Passport(PrivateConv):
    """Private convolution with scale and shift derived from secret passports: `gamma (W * x) + beta`.

    `gamma = avg(D(E(W * P_gamma)))`, `beta = avg(D(E(W * P_beta)))`. E and D are linear maps of a position's channels,
    to half as many and back. The mean is over positions. The passports are N(0, deviation^2). With biases, or an
    activation between E and D, gamma would hardly depend on the passport. A normalisation after the convolution loses
    its own scale and shift, and is applied before gamma and beta. The convolution loses its bias, which beta replaces.
    """

    def __init__(
        self, conv: nn.Conv2d, norm: nn.Module | None, common_start: bool, size: int, deviation: float
    ) -> None:
        """Sample the passports; raise `UserError` if they are smaller than the kernel."""
        super().__init__(conv, norm and without_affine(norm), common_start)
        if size < max(conv.kernel_size):
            raise UserError(
                f"passports of {size}x{size} are smaller than the kernel {conv.kernel_size}: increase `size`"
            )
        conv.bias = None
        code = -(-conv.out_channels // 2)
        self.encode = nn.Linear(conv.out_channels, code, bias=False)
        self.decode = nn.Linear(code, conv.out_channels, bias=False)
        self.register_buffer("passports", deviation * torch.randn(2, conv.in_channels, size, size))

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
        mean = self.conv(self.passports).mean((2, 3))  # faster than after D and E, which are linear
        gamma, beta = self.decode(self.encode(mean))
        return gamma, beta

    def scale(self) -> Tensor:
        """Return the factor gamma of each output channel, (C',)."""
        return self.scale_and_shift()[0]


class PenalisedPassport(Passport, Penalised):
    """Passport with trainable gamma and beta, and a penalty on their distance from the derived gamma and beta.

    As in a normalisation, gamma starts at one and beta at zero.
    """

    def __init__(
        self, conv: nn.Conv2d, norm: nn.Module | None, common_start: bool, size: int, deviation: float, price: float
    ) -> None:
        """Create a passport with `price` as the weight of the two distances in the loss."""
        super().__init__(conv, norm, common_start, size, deviation)
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
