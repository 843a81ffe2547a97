"""ATS: clients train on images transformed by a searched policy of augmentations.

Source: Gao et al. 2021, "Privacy-preserving Collaborative Learning with Automatic Transformation Search". The command
`rayfed search-policy` is the search. The authors' additional random crops and flips are left out.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed.defences.base import Batch, DataMethod, Defence, Task
from rayfed.defences.transformations import NAMES, has_random_sign, transform
from rayfed.registry import component
from rayfed.samples import Modality


@component
class Ats(Defence):
    """Transform every image by a sequence sampled from the policy, anew in every round. Empirical."""

    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)

    policy: Annotated[str, Field(pattern=r"^\d+(-\d+)*(\+\d+(-\d+)*)*$")] = "3-1-7+43-18-18"
    """Numbers of the transformations to apply in order (`3-1-7`). A hybrid policy joins several sequences by `+`, one
    of which is sampled per image. The default is the authors' for CIFAR-100 and ResNet-20; `rayfed search-policy`
    searches for others."""

    def __post_init__(self) -> None:
        for number in self._numbers:
            for one in number:
                if one >= len(NAMES):
                    raise ValueError(f"policy: found transformation {one}; expected numbers from 0 to {len(NAMES) - 1}")

    @property
    def _numbers(self) -> list[list[int]]:
        return [[int(one) for one in sequence.split("-")] for sequence in self.policy.split("+")]

    @property
    def has_latents(self) -> bool:
        """Return whether the policy is random: several sequences, or transformations with a random sign."""
        sequences = self._numbers
        return len(sequences) > 1 or any(has_random_sign(number) for number in sequences[0])

    def transform_data(self, task: Task, batch: Batch) -> Batch:
        """Return the batch with transformed images."""
        return batch._replace(inputs=self.transformed(batch.inputs, task.generator))

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Replace the client's images by transformed images in every round."""
        return lambda task: self.transform_data(task, next(task))

    def transformed(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return images (N, C, H, W) in [0, 1], each transformed by a random sequence of the policy."""
        sequences = self._numbers
        picked = torch.randint(len(sequences), (len(images),), generator=generator).to(images.device)
        images = images.clone()
        for index, sequence in enumerate(sequences):
            rows = picked == index
            for number in sequence if rows.any() else ():
                images[rows] = transform(images[rows], number, generator)
        return images
