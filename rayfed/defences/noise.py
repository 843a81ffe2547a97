"""Base of the noise defences: clip an update to a norm, add noise to every value, and compute the guarantee."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rayfed.core.number_types import check_types
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.defences.declarations import laplace_log_likelihood, normal_log_likelihood
from rayfed.privacy.accountant import Release
from rayfed.privacy.printing import format_lower
from rayfed.privacy.sampling import Draw, add_noise, sample_gaussian, sample_laplace
from rayfed.privacy.spending import PrivacySetting, Spending
from rayfed.registry import component
from rayfed.update import Named, Update

_DRAWS: dict[str, Draw] = {"gaussian": sample_gaussian, "laplace": sample_laplace}


_BLOCK = 1024
"""Number of values whose squares are added in single precision; adding all in double precision is ten times slower."""
_LEAST_NORM = 1e-12
"""Norm below which squares may have underflowed in single precision."""


@component
class LocalNoise(Defence):
    """Base of the defences that clip a client's update to a norm, then add independent noise to every value.

    With a clip bound, every single update has a privacy guarantee, also against the server, and the guarantees of all
    rounds are composed. Without a clip bound the defence is empirical.
    """

    vectorises: ClassVar[bool] = True
    post_processes: ClassVar[bool] = True
    family: ClassVar[Literal["gaussian", "laplace"]]
    order: ClassVar[float]
    """Order of the norm of the mechanism's sensitivity, which `clip` bounds by default."""
    measure: ClassVar[str]
    """Name of the field that sets the width of the noise."""

    clip: Annotated[float, Field(gt=0)] | None = None
    """Maximum norm of the whole update before the noise (L2 for Gaussian, L1 for Laplace). Null: no clipping."""
    epsilon_per_update: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of one update, from which the width of the noise is computed. Needs `clip`."""
    delta: Annotated[float, Field(ge=0, lt=0.1)] = 0.0
    """Probability that the guarantee fails."""

    @model_validator(mode="after")
    def _one_measure_of_noise(self) -> Self:
        if (getattr(self, self.measure) is None) == (self.epsilon_per_update is None):
            raise ValueError(f"give either {self.measure} or epsilon_per_update")
        if self.epsilon_per_update is not None and self.clip is None:
            raise ValueError("epsilon_per_update needs a clip bound: give clip")
        return self

    @property
    def width(self) -> float:
        """Return the noise scale: as set, or computed from epsilon for a sensitivity of twice the clip bound."""
        if self.epsilon_per_update is None:
            return float(getattr(self, self.measure))
        assert self.clip is not None
        return 2 * self.clip * self.multiplier(self.epsilon_per_update)

    def multiplier(self, epsilon: float) -> float:
        """Return the noise multiplier (noise scale divided by sensitivity) at which one update satisfies an epsilon."""
        raise NotImplementedError

    @property
    def clip_order(self) -> float:
        """Return the order of the norm that `clip` bounds."""
        return self.order

    @property
    def adds_noise(self) -> bool:
        """Return whether the noise has a width above 0."""
        return self.width > 0

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the clipped update."""
        return tensors if self.clip is None else clipped(tensors, self.clip, self.clip_order)

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        """Return the log density of each sent value: normal or Laplace around the clipped update."""
        log_density = normal_log_likelihood if self.family == "gaussian" else laplace_log_likelihood
        return log_density(sent, expected, self.width)

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip the client's update and add independent noise to every value."""
        width = self.width

        def update(task: Task) -> Update:
            sent = next(task)
            tensors = self.transform(task, sent.tensors)
            return replace(sent, tensors=add_noise(tensors, width, _DRAWS[self.family], task.generator), bits=32)

        return update

    def spends(self, setting: PrivacySetting) -> Spending | None:
        """Return the privacy accounting of the client that is sampled most often; None without a clip bound."""
        if self.clip is None:
            return None
        release = Release(self.family, self.width / (2 * self.clip), setting.most_rounds)
        return Spending(
            (release,),
            self.delta,
            unit="client",
            adjacency="each single client (replace-one adjacency, all its samples)",
            against="anyone who sees the client's updates, including the server",
            mechanism=f"{self.family.capitalize()} noise of {format_lower(release.multiplier)} times the sensitivity "
            f"(twice the clip bound) on each of up to {release.count} updates of a client",
        )


def clipped(tensors: Named, bound: float, order: float) -> Named:
    """Scale all tensors by the same factor, so that their joint norm of the given order is at most `bound`."""
    check_types(tensors, "a clip bound")
    norms = torch.stack([torch.linalg.vector_norm(t, ord=order, dtype=torch.float64) for t in tensors.values()])
    factor = clip_factors(torch.linalg.vector_norm(norms, ord=order), bound)
    return {name: finite(t) * factor.to(t.dtype) for name, t in tensors.items()}


def sample_norms(gradients: Tensor) -> Tensor:
    """Return the L2 norms (N,), float64, of N gradients (N, ...) of one tensor."""
    check_types({"the gradient": gradients}, "a clip bound")
    flat = gradients.reshape(len(gradients), -1)
    whole = flat.shape[1] - flat.shape[1] % _BLOCK
    blocks, rest = flat[:, :whole].unflatten(1, (-1, _BLOCK)), flat[:, whole:]
    parts = [torch.linalg.vector_norm(blocks, dim=2), torch.linalg.vector_norm(rest, dim=1, keepdim=True)]
    norms: Tensor = torch.linalg.vector_norm(torch.cat(parts, 1), dim=1, dtype=torch.float64)
    doubtful = ~((norms > _LEAST_NORM) & norms.isfinite())
    if doubtful.any():
        again = torch.linalg.vector_norm(flat[doubtful], dim=1, dtype=torch.float64)
        norms = norms.index_put((doubtful,), again)  # not in place, because the derivative of a norm reads the norm
    return norms


def clip_factors(norms: Tensor, bound: float) -> Tensor:
    """Return the factors that scale vectors with the given norms to norms of at most `bound`.

    The factor is 0 if the norm is not finite or the factor would underflow in single precision. Norms are in double
    precision: in single precision the sum of a million values loses up to 1 %, and small squares underflow.
    """
    # A norm of 0 has the factor 1. Division by it would make the derivative NaN.
    factors = torch.clamp(bound / torch.where(norms > 0, norms, bound), max=1.0)
    return torch.where(norms.isfinite() & (factors >= torch.finfo(torch.float32).tiny), factors, 0.0)


def scaled_sum(gradients: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of N gradients (N, ...), each multiplied by its factor (N,). A factor of 0 removes infinities."""
    used = factors > 0
    if not used.all():  # rare; copying all gradients takes longer than summing them
        gradients, factors = gradients[used], factors[used]
    total: Tensor = torch.tensordot(factors.to(gradients.dtype), gradients, dims=1)
    return total


def finite(tensor: Tensor) -> Tensor:
    """Return the tensor with NaN and infinite values set to 0, so that a clip factor of 0 removes such values."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)
