"""Shadow clients: compute the updates that the victim would have sent for an attacker's own samples.

An adaptive attacker (`knowledge: [defence]`) runs the victim's defences. A non-adaptive attacker replaces the values of
each tensor by the observed ones of equal rank, including zeros, levels and length. This reproduces any defence that
changes each value separately and preserves their order.

Source: Shokri et al. 2017, "Membership Inference Attacks Against Machine Learning Models", section 4, for shadows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rayfed.attacks.forward_probe import buffers_for
from rayfed.attacks.matching.local_steps import many_local_updates
from rayfed.attacks.matching.second_derivatives import IN_TURN, TOGETHER
from rayfed.gradients import flatten, vmap_refusal
from rayfed.update import Named, Observation

_SAMPLES_AT_ONCE = 256


def shadow_updates(
    observation: Observation, model: nn.Module, inputs: Tensor, labels: Tensor, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield the updates (p, D) of P shadow clients in chunks, with tensors in the order of the observed update.

    `inputs` is (P, N, *shape) and `labels` (P, N), on any device. `model` is the result of `without_tracking`.
    """
    device = next(iter(observation.weights.values())).device
    model, together = model.to(device), max(1, _SAMPLES_AT_ONCE // labels.shape[1])
    for some, of_some in zip(inputs.split(together), labels.split(together), strict=True):
        some, of_some = some.to(device), of_some.to(device)
        if "defended" in observation.extra:
            play = observation.extra["defended"].update
            made = [play(observation, model, x, y, generator) for x, y in zip(some, of_some, strict=True)]
            yield torch.stack([flatten({name: one[name] for name in observation.update}) for one in made])
        else:
            yield _undefended(observation, model, some, of_some)


def _undefended(observation: Observation, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    buffers, local = buffers_for(model, observation), observation.local
    refused = vmap_refusal(model, observation.weights, buffers, inputs[0], labels[0])
    way = IN_TURN if refused else TOGETHER
    made: Named = many_local_updates(model, observation.weights, buffers, inputs, labels, local, way=way)
    return torch.cat(
        [spread_as(made[name].reshape(len(inputs), -1), sent.flatten()) for name, sent in observation.update.items()], 1
    )


def spread_as(values: Tensor, sent: Tensor) -> Tensor:
    """Reorder the values `sent` (D,) for each row of `values` (P, D), so that the ranks equal the row's ranks."""
    places = values.argsort(1)
    return torch.empty_like(values).scatter_(1, places, sent.sort().values.to(values).expand_as(values))
