"""Metrics of what a reconstruction says beyond a guess that needs no update: two figures beside its nearness.

A blur of average brightness comes near to many images. So a reconstruction is set beside the best of two guesses, and
beside samples that are not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.samples import SampleSpec

Score = Callable[["Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True, eq=False)
class Others:
    """Samples of the same kind that no victim holds."""

    inputs: Tensor
    """(M, *shape), as the data's `sample` says."""


def above_guessing(sample: SampleSpec, others: Others) -> Score:
    """Return a function for how much nearer reconstructions are than the best guess: in dB, of texts a share.

    It takes samples (N, *shape) twice, the true ones first, to (N,) float64. Guesses are what the other samples have in
    common, and the true mean of each channel: the best constant.
    """
    from rayfed.metrics.images import PSNR_CEILING, psnr
    from rayfed.metrics.texts import token_accuracy

    in_words = sample.modality == "tokens"
    typical = others.inputs.mode(0).values if in_words else others.inputs.mean(0)
    score: Score = token_accuracy if in_words else lambda a, b: psnr(a, b).clamp(max=PSNR_CEILING)

    def gain(true: Tensor, guess: Tensor) -> Tensor:
        import torch

        tried = [typical.to(true).expand_as(true)]
        if not in_words:
            tried.append(true.mean((2, 3), keepdim=True).expand_as(true))
        return score(true, guess) - torch.stack([score(true, one) for one in tried]).amax(0)

    return gain


def told_apart(sample: SampleSpec, others: Others) -> Score:
    """Return a function for whether reconstructions are nearer to their own samples than to any other one.

    It takes samples (N, *shape) twice, the true ones first, to (N,) float64 of 1 and 0. The others are those of the
    batch, too; copies of the true sample are not among them.
    """
    exact = sample.modality == "tokens"

    def told(true: Tensor, guess: Tensor) -> Tensor:
        import torch

        known = torch.cat([true, others.inputs.to(true)]).double().flatten(1)
        hits = []
        for own, found in zip(true.double().flatten(1), guess.double().flatten(1), strict=True):
            apart = ((known != found) if exact else (known - found).square()).double().mean(1)
            foreign = (known != own).any(1)
            hits.append(not foreign.any() or bool(apart[~foreign].amin() < apart[foreign].amin()))
        return torch.tensor(hits, dtype=torch.float64)

    return told


ABOVE_GUESSING = Metric(
    name="above_guessing",
    description="PSNR less that of the best guess made without the update (dB); of texts, share of tokens in place",
    title="above guessing",
    function=above_guessing,
    needs=("sample", "others"),
    higher_is_closer=True,
    modalities=("pixels", "tokens", "records"),
    tables=(),
    outcome=False,
    success="threshold",
)
TOLD_APART = Metric(
    name="told_apart",
    description="1 where the reconstruction is nearer to its sample than to other samples, 0 where not",
    title="told apart",
    function=told_apart,
    needs=("sample", "others"),
    higher_is_closer=True,
    modalities=("pixels", "tokens", "records"),
    format="hit",
    tables=(),
    outcome=False,
    success=None,
)
