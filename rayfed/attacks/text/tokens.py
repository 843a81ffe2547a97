"""Tokens in the gradient of a model's table: a row moves only where its token is in the batch.

Source: Melis et al. 2019, "Exploiting Unintended Feature Leakage in Collaborative Learning", section 4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Named, Observation

NO_TABLE = "the update has no gradient of a table of tokens (an embedding layer)"
_BEYOND = 5.0
"""Number of deviations of the rows' norms, from the median, beyond which a row is more than noise."""


def table_of(model: nn.Module) -> tuple[str, nn.Embedding] | None:
    """Return the first embedding layer of a model, that of the tokens, with its path; None if it has none."""
    tables = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Embedding))
    return next(tables, None)


def tokens_in(rows: Tensor, most: int) -> Tensor:
    """Return the tokens whose rows of the table's gradient (V, width) are not zero, strongest first; at most so many.

    Where noise has left no row at zero, those whose norms stand out from the others' (median absolute deviation).
    """
    norms = rows.norm(dim=1)
    floor = norms.new_zeros(())
    if (norms > 0).all():
        middle = norms.median()
        floor = middle + _BEYOND * 1.4826 * (norms - middle).abs().median()
    count = int((norms > floor).sum().clamp(1, most))
    numbers: Tensor = norms.topk(min(count, len(norms))).indices
    return numbers


def texts(numbers: Tensor, observation: Observation) -> Tensor:
    """Return token numbers (N * L,) or (N, L), as a reconstruction has them, as (N, L) on the CPU."""
    return numbers.reshape(observation.batch_size, -1).cpu()


def is_finite(observation: Observation) -> bool:
    """Return whether all values of an update are numbers: those of a diverged model are not."""
    return all(bool(torch.isfinite(t).all()) for t in observation.update.values())


def gradient_of_noise(observation: Observation, model: nn.Module) -> Named:
    """Return the gradient at a text of the attacker's own: what is zero in it does not depend on the text."""
    device = next(iter(observation.weights.values())).device
    network = without_tracking(model).to(device)
    text = observation.sample.noise(1, torch.Generator().manual_seed(2)).to(device)
    label = torch.zeros(1, observation.classes) if observation.has_numbers else torch.zeros(1, dtype=torch.int64)
    if observation.has_places:
        label = torch.zeros_like(text)
    buffers = buffers_for(network, observation)
    return gradients.gradient(network, observation.weights, buffers, text, label.to(device))[0]
