"""Random numbers for privacy guarantees: noise of mechanisms, and sampling of clients and samples.

By default, noise comes from PyTorch's generator, which is sufficient for measurements only: MT19937 is not
cryptographic, and its numbers have single precision. With `privacy.secure`, noise comes from ChaCha20. Its numbers are
in double precision and sums of several samples, so that the gaps between floating-point numbers do not reveal the value
to which they were added. Sampling of clients, and Poisson sampling of samples, always uses ChaCha20.

Sources: Mironov 2012, 'On significance of the least significant bits for differential privacy'; Holohan and Braghin
2021, 'Secure random sampling in differential privacy', sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rayfed.core import seeds
from rayfed.core.number_types import check_types
from rayfed.crypto.keys import Stream
from rayfed.update import Named

_AT_ONCE = 1 << 13
"""Number of secure random numbers generated at once, few enough for the CPU cache."""


class SecureGenerator(torch.Generator):
    """PyTorch generator that also has a cryptographically secure stream, seeded from the same key."""

    def __new__(cls, key: bytes) -> Self:
        """Create a generator from a key instead of PyTorch's device."""
        return super().__new__(cls)

    def __init__(self, key: bytes) -> None:
        seeds.seed_generator(self, seeds.derive_bytes(key, "words"))
        self._key = key

    @cached_property
    def _stream(self) -> Stream:
        """The cryptographic stream, created on first use because clients with shuffled samples do not need it."""
        return Stream(seeds.derive_bytes(self._key, "stream"))

    def uniform(self, *shape: int) -> np.ndarray:
        """Sample uniform numbers in [0, 1) of a given shape: multiples of 2^-53, all equally likely."""
        size = int(np.prod(shape))
        return (np.frombuffer(self._stream.read(8 * size), "<u8") >> 11).reshape(shape) * 2.0**-53


def make_generator(key: bytes, secure: bool) -> torch.Generator:
    """Return a generator for noise from a key, which is cryptographically secure if `secure` is true."""
    return SecureGenerator(key) if secure else seeds.torch_generator(key)


Draw = Callable[[torch.Size, torch.Generator], Tensor]
"""Function that samples noise of width 1, on the CPU so that all devices get equal values."""


def sample_gaussian(shape: torch.Size, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sample standard normal noise of a given shape and dtype.

    Secure numbers are (X1 + X2 + X3 + X4) / 2 in float64 for every dtype, each X from the cosine of Box and Muller. The
    sine of the same pair is not used, because the pair can be computed from both.
    """
    if isinstance(generator, SecureGenerator):
        return _in_pieces(shape, lambda n: _normal(*generator.uniform(2, 4, n)).sum(0) / 2)
    return torch.randn(shape, generator=generator, dtype=dtype)


def sample_laplace(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Sample Laplace noise of scale 1 and of a given shape.

    Secure numbers are computed in float64, as sums of two products of normal numbers. Other numbers are the difference
    of two exponentials, which never needs the logarithm of zero.
    """
    if isinstance(generator, SecureGenerator):
        return _in_pieces(shape, lambda n: _product(*generator.uniform(2, 2, n)).sum(0))
    first, second = (torch.empty(shape).exponential_(generator=generator) for _ in range(2))
    return first - second


def add_noise(values: Named, width: float, draw: Draw, generator: torch.Generator) -> Named:
    """Add noise of scale `width` to tensors, in the precision of the noise, and round each sum once.

    Raises `UserError` for values that are neither float32 nor float64.
    """
    check_types(values, "noise")
    return {name: (v + width * draw(v.shape, generator).to(v.device)).to(v.dtype) for name, v in values.items()}


def _in_pieces(shape: torch.Size, draw: Callable[[int], np.ndarray]) -> Tensor:
    """Sample independent numbers, (*shape) float64, piece by piece."""
    size = shape.numel()
    drawn = np.empty(size)
    for start in range(0, size, _AT_ONCE):
        drawn[start : start + _AT_ONCE] = draw(min(_AT_ONCE, size - start))
    return torch.from_numpy(drawn).reshape(shape)


def _normal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return normal numbers for uniform ones in [0, 1) (Box and Muller 1958)."""
    normal: np.ndarray = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    return normal


def _product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return products of two normal numbers; two products add up to a Laplace number (Holohan and Braghin 2021)."""
    product: np.ndarray = np.log1p(-first) * np.cos(np.pi * second)
    return product
