"""Pairs of a true image and its reconstruction, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfed.store.images import decode_png
from rayfed.store.schemas import image_key


@dataclass(frozen=True)
class Picture:
    """Pair of a true image and its reconstruction: arrays (H, W, C) of uint8 with C 1 (grey) or 3 (RGB)."""

    arm: str
    round: int
    attack: str
    victim: int
    """Id of the client."""
    repeat: int
    sample: int
    """Index of the true image in the victim's batch."""
    true: np.ndarray
    reconstructed: np.ndarray

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Picture:
        """Return the picture from a row of the table `images`."""
        return cls(**image_key(row), true=decode_png(row["true"]), reconstructed=decode_png(row["reconstructed"]))

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key of the picture in the table `attacks`: arm, round, attack, victim, repeat, sample."""
        return tuple(image_key(vars(self)).values())
