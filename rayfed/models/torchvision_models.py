"""Classifiers of `torchvision.models`, without pretrained weights; `state` loads weights from a local file.

Source: https://docs.pytorch.org/vision/stable/models.html (each architecture lists its paper there).
"""

from __future__ import annotations

from typing import Any

import torchvision
from pydantic import field_validator
from torch import Tensor, nn

from rayfed.errors import nearest
from rayfed.registry import component

# In training mode these two return a tuple unless their auxiliary heads are removed.
_WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def repeat_grey(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Repeat grey images (N, 1, H, W) to three channels; serves as a forward pre-hook."""
    (images,) = inputs
    return (images.expand(-1, 3, -1, -1),)


@component
class Torchvision:
    """Classifier of torchvision with `classes` outputs; the short form is `torchvision:ARCH`.

    Its first convolution takes three channels. Grey images are repeated to three, so that the architecture and its
    parameter names are exactly torchvision's.
    """

    arch: str
    """A name from `torchvision.models.list_models(module=torchvision.models)`, such as `resnet34`."""

    @field_validator("arch")
    @classmethod
    def _known(cls, arch: str) -> str:
        known = torchvision.models.list_models(module=torchvision.models)
        if arch not in known:
            raise ValueError(f"torchvision has no model '{arch}': {nearest(arch, known)}")
        return arch

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, 1 or 3, H, W), with logits (N, classes)."""
        options: dict[str, Any] = {"num_classes": classes}
        if self.arch in _WITH_AUXILIARY_HEADS:
            options |= {"aux_logits": False, "init_weights": True}
        model: nn.Module = torchvision.models.get_model(self.arch, weights=None, **options)
        if image_shape[0] == 1:
            model.register_forward_pre_hook(repeat_grey)
        return model
