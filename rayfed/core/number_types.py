"""Check the number types of tensors: training, noise and norms use float32 or float64.

Other types are refused because their guarantees would be wrong. Noise on the real part of a complex tensor would
protect only half of it, and half precision may round a clipped gradient to a norm above its bound.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayfed.errors import UserError

KNOWN = (torch.float32, torch.float64)
"""Types in which gradients are clipped, noise is added and sums are encrypted."""
_HALF = (torch.float16, torch.bfloat16)


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a tensor's number type without the prefix `torch.`, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def check_types(tensors: Mapping[str, Tensor], action: str, half: bool = False) -> None:
    """Raise `UserError` for a tensor that is neither float32 nor float64.

    `action` names the operation in the message, such as "noise". With `half`, float16 and bfloat16 are accepted too:
    rounding is allowed in attacks, but not in privacy guarantees.

    >>> import torch
    >>> from rayfed.core.number_types import check_types
    >>> check_types({"weight": torch.zeros(2)}, "noise")
    >>> check_types({"filter": torch.zeros(2, dtype=torch.complex64)}, "noise")
    Traceback (most recent call last):
        ...
    rayfed.errors.UserError: noise needs float32 or float64 tensors, and 'filter' is complex64: convert 'filter'
    """
    known = (*KNOWN, *_HALF) if half else KNOWN
    for name, tensor in tensors.items():
        if tensor.dtype not in known:
            raise UserError(
                f"{action} needs float32 or float64 tensors, and '{name}' is {type_name(tensor.dtype)}: "
                f"convert '{name}'"
            )


def check_model(model: nn.Module, name: str) -> None:
    """Raise `UserError` if a model has complex parameters, or trainable parameters in half precision.

    `name` is the model's name in the message. Frozen parameters and buffers may have any real type, and constant
    buffers may be complex: clients neither add noise to them nor send them back.
    """
    for path, parameter in model.named_parameters():
        kind = type_name(parameter.dtype)
        if parameter.is_complex():
            raise UserError(
                f"model {name}: parameter '{path}' is {kind}, but defences, protections and attacks need real numbers: "
                f"store `torch.view_as_real(...)` of it as the parameter, and call `torch.view_as_complex` on it in "
                f"the forward pass"
            )
        if parameter.requires_grad and parameter.dtype not in KNOWN:
            raise UserError(
                f"model {name}: parameter '{path}' is {kind}, but gradients are clipped and matched in float32: "
                f"use a float32 copy, `copy.deepcopy(model).float()`"
            )
