"""Low-rank adapters beside the layers of a model.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", equation 3, by `peft`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from rayfed.errors import UserError, needing

_SHOWN = 12


def add_lora(
    model: nn.Module, rank: int, alpha: float, targets: Sequence[str] | None, dropout: float
) -> frozenset[str]:
    """Put low-rank adapters beside layers of a model, in place, and return the names of their parameters.

    A layer's weight W, (out, in), becomes W + alpha / rank B A, with A (rank, in) drawn and B (out, rank) zero at
    first. `targets` are patterns of layers' names, or the last parts of them; None takes what `peft` has for such a
    model. Raises `UserError` for targets that choose nothing, or what no adapter can stand beside.
    """
    with needing("peft", "hub", "model.train.lora"):
        import peft
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known
    usual = known.get(getattr(getattr(model, "config", None), "model_type", ""))
    named = targets or usual
    if named is None:
        raise UserError(
            "model.train.lora.targets: name the layers that get adapters, for nothing is usual for this model: "
            f"{', '.join(_linear(model)[:_SHOWN])}, ..."
        )
    chosen = [path for path, _ in model.named_modules() if _is_target(path, named)]
    if not chosen:
        raise UserError(
            f"model.train.lora.targets: no layer is called {', '.join(named)}: "
            f"take of {', '.join(_linear(model)[:_SHOWN])}, ..."
        )
    scaled: Any = alpha  # annotated as a whole number, and divided by the rank
    config = peft.LoraConfig(r=rank, lora_alpha=scaled, target_modules=chosen, lora_dropout=dropout)
    before = {name for name, _ in model.named_parameters()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft finds out itself how GPT-2's layers lie
            peft.inject_adapter_in_model(config, model)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"model.train.lora: peft puts no adapters beside {', '.join(chosen[:3])}: {error}") from error
    return frozenset(name for name, _ in model.named_parameters() if ".lora_" in name and name not in before)


def _is_target(path: str, targets: Sequence[str]) -> bool:
    return any(fnmatchcase(path, target) or path.endswith(f".{target}") for target in targets)


def _linear(model: nn.Module) -> list[str]:
    """Return the paths of the layers with a weight matrix."""
    return [path for path, module in model.named_modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))]
