"""Classifiers of `timm`, without pretrained weights; `state` loads weights from a local file.

Source: Wightman 2019, "PyTorch Image Models", https://github.com/huggingface/pytorch-image-models (each architecture
lists its paper there).
"""

from __future__ import annotations

from typing import Any

from pydantic import field_validator
from torch import nn

from rayfed.errors import nearest, require_extra
from rayfed.models.torchvision_models import repeat_grey
from rayfed.registry import component


@component
class Timm:
    """Classifier of timm with `classes` outputs; the short form is `timm:ARCH`. Needs the extra `hub`.

    Its first layer takes three channels. Grey images are repeated to three, so that the architecture and its parameter
    names are exactly timm's.
    """

    arch: str
    """A name from `timm.list_models()`, such as `efficientnet_lite0` or `vit_tiny_patch16_224`."""

    @field_validator("arch")
    @classmethod
    def _known(cls, arch: str) -> str:
        known = _timm().list_models()
        if arch not in known:
            close = nearest(arch, known)
            raise ValueError(f"timm has no model '{arch}': {close if len(close) < 300 else 'see timm.list_models()'}")
        return arch

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, 1 or 3, H, W), with logits (N, classes)."""
        timm = _timm()
        options: dict[str, Any] = {}
        if timm.models.get_pretrained_cfg(self.arch, allow_unregistered=True).fixed_input_size:
            options["img_size"] = tuple(image_shape[1:])  # a ViT has one position per patch
        model: nn.Module = timm.create_model(self.arch, pretrained=False, num_classes=classes, **options)
        if image_shape[0] == 1:
            model.register_forward_pre_hook(repeat_grey)
        return model


def _timm() -> Any:
    require_extra("hub", "a model of timm", "timm")
    import timm

    return timm
