"""The names by which `rayfed.metrics` and `rayfed.scenario.forms` know `rayfed.samples`; to go with these names."""

from __future__ import annotations

from torch import Tensor

from rayfed.samples import Modality as Kind
from rayfed.samples import Pixels, Records, held, taken
from rayfed.samples import SampleSpec as Form

__all__ = ["PIXELS", "Form", "Kind", "Records", "held", "taken", "token_numbers"]

PIXELS = Pixels(1, 1, 1)


def token_numbers(texts: Tensor) -> Tensor:
    """Texts (N, L) are the numbers of their tokens."""
    return texts
