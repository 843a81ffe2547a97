"""Backdoors (Gu 2017, 'BadNets'; for federated learning Bagdasaryan 2020, 'How to backdoor federated learning')."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed.aggregation.weighted_sum import scaled
from rayfed.defences.base import Batch
from rayfed.errors import UserError
from rayfed.poisoning.base import Insight, Poisoning
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Update


@component
class Backdoor(Poisoning):
    """Stamp a white square on some images and label them as the target class.

    Source: Gu et al. 2017, section 4 (the trigger); Bagdasaryan et al. 2020, equation 3 (`scale`).
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)
    has_trigger: ClassVar[bool] = True

    target: Annotated[int, Field(ge=0)] = 0
    """Class to which the model shall assign every image with the trigger."""
    size: Annotated[int, Field(ge=1)] = 4
    """Side of the square in the lower right corner, in pixels."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the client's samples to stamp, the same samples in every round."""
    scale: Annotated[float, Field(ge=1)] = 1.0
    """Factor on the trained update. With the number of clients, the mean becomes the client's model."""

    def check(self, image_shape: tuple[int, ...], classes: int, clients: int, malicious: int) -> None:
        """Raise `UserError` if the target class does not exist or the square does not fit into the image."""
        if self.target >= classes:
            raise UserError(
                f"backdoor: target {self.target} is not a class of the data; use a class from 0 to {classes - 1}"
            )
        if self.size >= min(image_shape[1:]):
            raise UserError(
                f"backdoor: size {self.size} must be below the images' {image_shape[1]} x {image_shape[2]} pixels"
            )

    def poison_data(self, data: Batch, classes: int, generator: torch.Generator) -> Batch:
        """Return the client's samples, of which a share is stamped with the square and labelled as the target class."""
        count = len(data.labels)
        some = torch.randperm(count, generator=generator)[: ceil(self.share * count)].to(data.labels.device)
        images, labels = data.inputs.clone(), data.labels.clone()
        images[some], labels[some] = self._stamped(images[some]), self.target
        return data._replace(inputs=images, labels=labels)

    def poison_update(self, update: Update, insight: Insight) -> Update:
        """Return the update multiplied by `scale`."""
        return replace(update, tensors=scaled(update.tensors, self.scale))

    def triggered(self, test: Batch) -> Batch:
        """Return the test images of other classes, stamped with the square and labelled as the target class."""
        others = test.rows((test.labels != self.target).nonzero().flatten())
        return Batch(self._stamped(others.inputs), torch.full_like(others.labels, self.target))

    def _stamped(self, images: Tensor) -> Tensor:
        stamped = images.clone()
        stamped[..., -self.size :, -self.size :] = 1
        return stamped
