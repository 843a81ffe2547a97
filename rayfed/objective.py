"""Functions of outputs and labels: of samples that are classified, of words that are read, of places that are labelled.

Whether a sample is classified or read follows from the labels. Words are found without knowing where their letters
stand, by connectionist temporal classification (Graves et al. 2006, CTC): a model gives each of T places of an image a
letter or the blank, and reads the word off by leaving out repetitions, then blanks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

BLANK = 0
"""The class that stands for no letter; labels are filled up with it."""
NO_TARGET = -100
"""Target of a place that counts in no loss, such as padding: what PyTorch's losses ignore."""


def are_words(labels: Tensor) -> bool:
    """Return whether labels are words (N, L) int64, letters from 1, not classes (N,) or probabilities (N, K)."""
    return labels.ndim == 2 and not labels.is_floating_point()


def loss(
    logits: Tensor,
    labels: Tensor,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits (N, K), or for (N, T, K) the word's negative log-probability, in nats.

    `label_smoothing` is the share of a class that is spread over all; words have none. A word that needs more than T
    places (equal letters need a blank between them) costs nothing.
    """
    if not are_words(labels):
        return F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=label_smoothing)
    steps = torch.full((len(labels),), logits.shape[1])
    letters = (labels != BLANK).sum(1)
    shares = logits.log_softmax(2).transpose(0, 1).cpu()  # on CUDA its gradient is another every time
    losses = F.ctc_loss(shares, labels.cpu(), steps, letters.cpu(), BLANK, reduction="none", zero_infinity=True).to(
        logits.device
    )
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def needed_places(labels: Tensor) -> Tensor:
    """Return the places that words (N, L) need, (N,) int64: one for each letter, and for a blank between equal ones."""
    letters = labels != BLANK
    return letters.sum(1) + ((labels[:, 1:] == labels[:, :-1]) & letters[:, 1:]).sum(1)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which samples are classified right, or read right in every letter: (N,) bool."""
    if not are_words(labels):
        return logits.argmax(dim=1) == labels
    right = [torch.equal(word, label[label != BLANK]) for word, label in zip(read(logits), labels, strict=True)]
    return torch.tensor(right, device=labels.device)


def read(logits: Tensor) -> list[Tensor]:
    """Return the words that logits (N, T, K) spell, by the likeliest class of each place.

    Source: Graves 2006, best path decoding.
    """
    best = logits.argmax(2)
    new = best != F.pad(best, (1, 0), value=BLANK)[:, :-1]
    return [row[kept] for row, kept in zip(best, new & (best != BLANK), strict=True)]


def by_place(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (N, P, K) and targets (N, P) of the P places of each sample, such as its tokens or pixels.

    Outputs are (N, L, K) for targets (N, L), as transformers have them, and (N, K, H, W) for targets (N, H, W), as
    PyTorch's losses take them.
    """
    scores = outputs if outputs.ndim == 3 else outputs.movedim(1, -1)
    return scores.flatten(1, -2), targets.flatten(1)


def correct_places(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of each sample's places that is labelled right, (N,) float64; `NO_TARGET` does not count."""
    scores, targets = by_place(outputs, targets)
    counted = targets != NO_TARGET
    return ((scores.argmax(2) == targets) & counted).sum(1).double() / counted.sum(1).clamp(min=1)


def overlap(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return two counts for each class over all pixels of a batch, (2, K) int64: intersections and unions.

    They are of the pixels of the class in the targets (N, H, W) and of those where its score is the largest in outputs
    (N, K, H, W); pixels of `NO_TARGET` count in neither. Sums over batches give the intersection over union.
    """
    scores, targets = by_place(outputs, targets)
    counted = targets != NO_TARGET
    classes, found, true = scores.shape[2], scores.argmax(2)[counted], targets[counted]
    both = true[found == true].bincount(minlength=classes)
    return torch.stack([both, found.bincount(minlength=classes) + true.bincount(minlength=classes) - both])
