"""Functions for the declarations of defences: `transform` and `log_likelihood` of `Defence`.

An attacker with `knowledge: [code]` searches through these declarations (`rayfed.threat_model.observation_model`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.update import Named

_EXACT = 1e-6
"""Standard deviation of the rounding error of values without noise, relative to their root mean square."""


def straight_through(values: Tensor, tensor: Tensor) -> Tensor:
    """Return `values`, with the derivative of the identity with respect to `tensor` (Bengio 2013, section 2)."""
    # The difference is exactly 0, so the values are not rounded.
    return values.detach() + (tensor - tensor.detach())


def normal_log_likelihood(sent: Named, expected: Named, deviation: float | Named) -> Named:
    """Return the log density of each sent value under normal noise, without the constant log sqrt(2 pi).

    `deviation` is the standard deviation, of all values or of each one. Values with deviation 0 have rounding errors
    only.
    """
    likelihoods = {}
    for name, tensor in sent.items():
        own = deviation[name] if isinstance(deviation, dict) else torch.tensor(deviation)
        width = _at_least_rounding(own.to(tensor), tensor)
        likelihoods[name] = -((tensor - expected[name]) / width).double().square() / 2 - width.double().log()
    return likelihoods


def laplace_log_likelihood(sent: Named, expected: Named, scale: float) -> Named:
    """Return the log density of each sent value under Laplace noise, up to a constant."""
    likelihoods = {}
    for name, tensor in sent.items():
        width = _at_least_rounding(torch.tensor(scale).to(tensor), tensor)
        likelihoods[name] = -((tensor - expected[name]) / width).double().abs()
    return likelihoods


def _at_least_rounding(width: Tensor, tensor: Tensor) -> Tensor:
    """Return a width of noise, at least that of rounding errors of a tensor."""
    rounding = _EXACT * tensor.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return width.clamp(min=rounding)
