"""Number types of tensors: training, noise and norms are in float32 or float64.

A parameter of another type is refused by name. A complex tensor is two real ones, and noise on its real part or a norm
of it alone would protect half of it. Half precision rounds a clipped gradient to a norm above its bound.
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
    """Return the name of a number type without `torch.`."""
    return str(dtype).removeprefix("torch.")


def check_types(tensors: Mapping[str, Tensor], action: str, half: bool = False) -> None:
    """Raise `UserError` for a tensor that is neither float32 nor float64.

    `action` names the operation on the tensors, such as "noise". With `half`, float16 and bfloat16 pass as well: an
    attacker may round gradients, a privacy guarantee may not.

    >>> import torch
    >>> from rayfed.number_types import check_types
    >>> check_types({"weight": torch.zeros(2)}, "noise")
    >>> check_types({"filter": torch.zeros(2, dtype=torch.complex64)}, "noise")
    Traceback (most recent call last):
        ...
    rayfed.errors.UserError: noise needs float32 or float64 tensors, and 'filter' is complex64: convert it
    """
    known = (*KNOWN, *_HALF) if half else KNOWN
    for name, tensor in tensors.items():
        if tensor.dtype not in known:
            raise UserError(
                f"{action} needs float32 or float64 tensors, and '{name}' is {type_name(tensor.dtype)}: convert it"
            )


def check_model(model: nn.Module, name: str) -> None:
    """Raise `UserError` for complex parameters, and for trained parameters in half precision.

    `name` is that of the model in the message. Frozen parameters and buffers may have any real type, and buffers that
    no forward pass changes may be complex: nobody adds noise to them or sends them back.
    """
    for path, parameter in model.named_parameters():
        kind = type_name(parameter.dtype)
        if parameter.is_complex():
            raise UserError(
                f"model {name}: parameter '{path}' is {kind}, and defences, protections and attacks work on real "
                f"numbers: store `torch.view_as_real(...)` of it as the parameter, and call `torch.view_as_complex` on "
                f"it in the forward pass"
            )
        if parameter.requires_grad and parameter.dtype not in KNOWN:
            raise UserError(
                f"model {name}: parameter '{path}' is {kind}, and gradients are clipped and matched in float32: "
                f"use a float32 copy, `copy.deepcopy(model).float()`"
            )
