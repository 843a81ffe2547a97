"""Label flipping (Biggio 2012, 'Support vector machines under adversarial label noise')."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from rayfed.defences.base import Batch
from rayfed.errors import UserError
from rayfed.poisoning.base import Poisoning
from rayfed.registry import component

Class = Annotated[int, Field(ge=0)]


@component
class LabelFlip(Poisoning):
    """Train on false labels: class y becomes the last class minus y, or one class becomes another.

    Source: Fang et al. 2020, 'Local model poisoning attacks to Byzantine-robust federated learning', for all classes.
    """

    pair: tuple[Class, Class] | None = None
    """True class and the class that replaces it. Other classes stay unchanged. Default: flip all classes."""

    def check(self, image_shape: tuple[int, ...], classes: int, clients: int, malicious: int) -> None:
        """Raise `UserError` if the data lack a class of `pair`."""
        if self.pair and max(self.pair) >= classes:
            raise UserError(
                f"label_flip: pair {list(self.pair)} has unknown classes; use classes from 0 to {classes - 1}"
            )

    def poison_data(self, data: Batch, classes: int, generator: torch.Generator) -> Batch:
        """Return the client's samples with flipped labels."""
        if self.pair is None:
            return data._replace(labels=classes - 1 - data.labels)
        before, after = self.pair
        return data._replace(labels=torch.where(data.labels == before, after, data.labels))
