"""DLDP: Gaussian noise at the two levels that the paper on private passports compares with (Gu 2021, section 5)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayfed.defences.gaussian import Gaussian
from rayfed.registry import component


@component
class DldpA(Gaussian):
    """Add weak Gaussian noise to the update: `gaussian` with sigma 0.002 and, as in the paper, without clipping."""

    sigma: Annotated[float, Field(ge=0)] | None = 0.002
    """Standard deviation of the noise, in the units of the update."""


@component
class DldpB(Gaussian):
    """Add strong Gaussian noise to the update: `gaussian` with sigma 0.128 and, as in the paper, without clipping."""

    sigma: Annotated[float, Field(ge=0)] | None = 0.128
    """Standard deviation of the noise, in the units of the update."""
