"""The names by which `rayfed.metrics` and `rayfed.scenario.forms` know `rayfed.samples`; to go with these names."""

from __future__ import annotations

from torch import Tensor

from rayfed.samples import MODALITIES as KINDS
from rayfed.samples import Modality as Kind
from rayfed.samples import Pixels, Records, SampleSpec, Tokens, held, taken

__all__ = ["KINDS", "PIXELS", "Form", "Kind", "Pixels", "Records", "Tokens", "held", "taken", "token_numbers"]

Form = SampleSpec
PIXELS = Pixels(1, 1, 1)


def token_numbers(texts: Tensor) -> Tensor:
    """Texts (N, L) are the numbers of their tokens."""
    return texts
