"""Find tokens in the gradient of an embedding table: a row has a gradient only if its token is in the batch.

Source: Melis et al. 2019, "Exploiting Unintended Feature Leakage in Collaborative Learning", section 4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Named, Observation

NO_TABLE = "the attack needs the gradient of the token embedding table, which the update does not contain"
_BEYOND = 5.0
"""Number of deviations from the median above which the norm of a row is more than noise."""


def table_of(model: nn.Module) -> tuple[str, nn.Embedding] | None:
    """Return the path and module of a model's first embedding layer, the token table, or None if there is none."""
    tables = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Embedding))
    return next(tables, None)


def tokens_in(rows: Tensor, most: int) -> Tensor:
    """Return at most `most` tokens whose rows in the table's gradient (V, width) are not zero, largest norms first.

    If noise has made every row non-zero, only rows with outlying norms count (median absolute deviation).
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
    """Return token numbers (N * L,) or (N, L) in a reconstruction's format, (N, L) on the CPU."""
    return numbers.reshape(observation.batch_size, -1).cpu()


def is_finite(observation: Observation) -> bool:
    """Return whether all values of a client's update are finite."""
    return all(bool(torch.isfinite(t).all()) for t in observation.update.values())


def gradient_of_noise(observation: Observation, model: nn.Module) -> Named:
    """Return the gradient at a random text. Which gradient rows are zero does not depend on the text."""
    device = next(iter(observation.weights.values())).device
    network = without_tracking(model).to(device)
    text = observation.sample.noise(1, torch.Generator().manual_seed(2)).to(device)
    label = torch.zeros(1, observation.classes) if observation.has_numbers else torch.zeros(1, dtype=torch.int64)
    if observation.has_places:
        label = torch.zeros_like(text)
    buffers = buffers_for(network, observation)
    return gradients.gradient(network, observation.weights, buffers, text, label.to(device))[0]
