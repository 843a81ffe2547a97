"""Labels from the gradient of the last linear layer.

With mean cross entropy over N samples, the bias gradient of class k is g_k = mean_i(p_ik) - n_k / N: p_ik is what the
model gives sample i for class k, n_k how often the class occurs. The sum of row k of the weight gradient is the same
with every sample weighted by the sum of its features.

Sources: Zhao et al. 2020, "iDLG" (sign rule); Yin et al. 2021, "See through Gradients", equation 8 (column minima);
Wainakh et al. 2022, "User-Level Label Leakage from Gradients in Federated Learning" (LLG, counts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Attack, Reconstruction, not_applicable
from rayfed.attacks.forward_probe import run
from rayfed.update import Named, Observation

NO_HEAD = "the update has no last linear layer to read labels from; grant them with `knowledge: [labels]`"
_DUMMIES = 64

Reconstruct = TypeVar("Reconstruct", bound=Callable[..., list[Reconstruction]])


def last_linear(tensors: Named, classes: int) -> str | None:
    """Return the module whose weight is the last matrix with `classes` rows, None if there is none."""
    names = [
        n for n, t in tensors.items() if t.ndim == 2 and t.shape[0] == classes and n.rpartition(".")[2] == "weight"
    ]
    return names[-1].rpartition(".")[0] if names else None


def sign_rule(rows: Tensor) -> Tensor:
    """Return the label of a single sample, (1,) int64: only its class has a negative entry.

    `rows` (K,) is the bias gradient, or the row sums of the weight gradient where the features are not negative.
    """
    return rows.argmin().reshape(1)


def column_minima(weight_gradient: Tensor, size: int) -> Tensor:
    """Return the `size` classes whose rows of the weight gradient (K, F) have the smallest minima, (size,) int64.

    For batches in which no label repeats.
    """
    return weight_gradient.amin(1).topk(size, largest=False).indices.sort().values


def counted_labels(rows: Tensor, probabilities: Tensor, size: int) -> Tensor:
    """Return the labels behind estimated counts n_k = N (p_k - g_k), sorted, (N,) int64; labels may repeat.

    `rows` (K,) is g, `probabilities` (K,) the attacker's estimate of p, `size` is N. Rounding: one sample after the
    other goes to the class with the largest remainder. A negative g_k proves that class k occurs: it goes first.
    """
    remainders = size * (probabilities - rows)
    proven = rows < 0
    counts = torch.zeros_like(remainders, dtype=torch.int64)
    for _ in range(size):
        missing = proven & (counts == 0)
        open_ = missing if missing.any() else torch.ones_like(proven)
        k = remainders.where(open_, -torch.inf).argmax()
        counts[k] += 1
        remainders[k] -= 1
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def infer(observation: Observation, model: nn.Module, head: str, generator: torch.Generator) -> Tensor:
    """Return the labels of an observation whose last linear module is `head`, (N,) int64.

    One sample: the sign rule. More: counts, with the probabilities (and without a bias the features) of noise.
    """
    gradient = observation.gradient
    bias = gradient.get(f"{head}.bias")
    sums = gradient[f"{head}.weight"].sum(1)
    if observation.batch_size == 1:
        return sign_rule(sums if bias is None else bias)
    noise = observation.sample.noise(_DUMMIES, generator)
    features, logits = run(model, observation, head, noise)
    rows = sums / features.sum(1).mean() if bias is None else bias
    return counted_labels(rows, logits.softmax(1).mean(0), observation.batch_size)


def with_labels(
    observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
) -> list[Observation] | None:
    """Return the observations with labels, inferred where not given; None where they cannot be (see `NO_HEAD`)."""
    labelled = []
    for observation, generator in zip(observations, generators, strict=True):
        if observation.labels is None:
            head = last_linear(observation.update, observation.classes)
            if head is None:
                return None
            observation = replace(observation, labels=infer(observation, model, head, generator))
        labelled.append(observation)
    return labelled


def needs_labels(reconstruct: Reconstruct) -> Reconstruct:
    """Wrap an attack that needs labels: they are inferred, or the attack is not applicable where they cannot be."""

    @wraps(reconstruct)
    def inferring(
        attack: Attack, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        labelled = with_labels(observations, model, generators)
        if labelled is None:
            return [not_applicable(observation, NO_HEAD) for observation in observations]
        return reconstruct(attack, labelled, model, generators)

    return cast(Reconstruct, inferring)
