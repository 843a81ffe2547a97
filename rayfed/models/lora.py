"""Low-rank adapters (LoRA) for the layers of a model.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", equation 3, with `peft`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from rayfed.errors import UserError, require_extra

_SHOWN = 12


def add_lora(
    model: nn.Module, rank: int, alpha: float, targets: Sequence[str] | None, dropout: float
) -> frozenset[str]:
    """Add low-rank adapters to layers of a model, in place, and return the names of the adapters' parameters.

    A layer's weight W, (out, in), becomes W + alpha / rank B A, with a random A (rank, in) and B (out, rank)
    initialised to zero. `targets` are patterns of layers' names, or their last parts. None uses the targets that `peft`
    has for such a model. Raises `UserError` for targets that match no layer, or layers that `peft` does not support.
    """
    require_extra("hub", "model.train.lora", "peft")
    import peft
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known

    usual = known.get(getattr(getattr(model, "config", None), "model_type", ""))
    named = targets or usual
    if named is None:
        raise UserError(
            "model.train.lora.targets: peft has no default for this model, so list the layers that get adapters, such "
            f"as {', '.join(_linear(model)[:_SHOWN])}, ..."
        )
    chosen = [path for path, _ in model.named_modules() if _is_target(path, named)]
    if not chosen:
        raise UserError(
            f"model.train.lora.targets: the model has no layer named {', '.join(named)}: "
            f"choose from {', '.join(_linear(model)[:_SHOWN])}, ..."
        )
    scaled: Any = alpha  # annotated as an integer, but only divided by the rank
    config = peft.LoraConfig(r=rank, lora_alpha=scaled, target_modules=chosen, lora_dropout=dropout)
    before = {name for name, _ in model.named_parameters()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft detects the layout of GPT-2's layers
            peft.inject_adapter_in_model(config, model)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"model.train.lora: peft cannot add adapters to {', '.join(chosen[:3])}: {error}") from error
    return frozenset(name for name, _ in model.named_parameters() if ".lora_" in name and name not in before)


def _is_target(path: str, targets: Sequence[str]) -> bool:
    return any(fnmatchcase(path, target) or path.endswith(f".{target}") for target in targets)


def _linear(model: nn.Module) -> list[str]:
    """Return the paths of the layers with a weight matrix."""
    return [path for path, module in model.named_modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))]
