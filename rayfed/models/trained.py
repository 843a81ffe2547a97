"""What of a model is trained: its head, which other classes have another one of."""

from __future__ import annotations

from torch import nn


def head_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model's head.

    Of a Hugging Face model they are those outside its base model, elsewhere those of the last layer with a matrix.
    """
    names = [name for name, _ in model.named_parameters()]
    base = getattr(model, "base_model_prefix", "")
    if isinstance(base, str) and isinstance(getattr(model, base or "-", None), nn.Module):
        outside = frozenset(name for name in names if not name.startswith(f"{base}."))
        if outside:
            return outside
    layers = [
        path for path, module in model.named_modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))
    ]
    return frozenset(name for name in names if layers and name.startswith(f"{layers[-1]}."))
