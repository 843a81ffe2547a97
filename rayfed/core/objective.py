"""Compute losses and accuracies from outputs and labels of three kinds: classes, words, and a class per position.

Words use connectionist temporal classification (CTC, Graves et al. 2006), which does not need the positions of letters.
The model predicts a letter or a blank at each of T positions. The word results from removing repetitions, then blanks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

BLANK = 0
"""Class of the CTC blank, which also pads labels."""
NO_TARGET = -100
"""Target of positions that losses ignore, such as padding. PyTorch's losses use the same value."""


def are_words(labels: Tensor) -> bool:
    """Return whether labels are words, (N, L) int64, rather than classes (N,) or probabilities (N, K)."""
    return labels.ndim == 2 and not labels.is_floating_point()


def loss(
    logits: Tensor,
    labels: Tensor,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits (N, K), or the CTC loss of logits (N, T, K) for words, in nats.

    `label_smoothing` is the share of a class that is spread over all classes; ignored for words. A word that needs more
    than T positions has loss 0.
    """
    if not are_words(labels):
        return F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=label_smoothing)
    steps = torch.full((len(labels),), logits.shape[1])
    letters = (labels != BLANK).sum(1)
    shares = logits.log_softmax(2).transpose(0, 1).cpu()  # the gradient on CUDA is not deterministic
    losses = F.ctc_loss(shares, labels.cpu(), steps, letters.cpu(), BLANK, reduction="none", zero_infinity=True).to(
        logits.device
    )
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def needed_places(labels: Tensor) -> Tensor:
    """Return the number of positions that CTC needs per word (N, L): its letters, and blanks between equal letters."""
    letters = labels != BLANK
    return letters.sum(1) + ((labels[:, 1:] == labels[:, :-1]) & letters[:, 1:]).sum(1)


def are_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether each sample's predicted class, or predicted word, is correct, (N,) bool."""
    if not are_words(labels):
        return logits.argmax(dim=1) == labels
    right = [torch.equal(word, label[label != BLANK]) for word, label in zip(decode_words(logits), labels, strict=True)]
    return torch.tensor(right, device=labels.device)


def decode_words(logits: Tensor) -> list[Tensor]:
    """Decode CTC logits (N, T, K) to words, from the most likely class at each position.

    Source: Graves et al. 2006, best path decoding.
    """
    best = logits.argmax(2)
    new = best != F.pad(best, (1, 0), value=BLANK)[:, :-1]
    return [row[kept] for row, kept in zip(best, new & (best != BLANK), strict=True)]


def reshape_by_place(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape outputs to scores (N, P, K) and targets to (N, P), for the P positions (tokens or pixels) of a sample.

    Outputs are (N, L, K) for the tokens of texts, with targets (N, L). They are (N, K, H, W) for pixels, with targets
    (N, H, W).
    """
    scores = outputs if outputs.ndim == 3 else outputs.movedim(1, -1)
    return scores.flatten(1, -2), targets.flatten(1)


def correct_places(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's share of correctly predicted positions, (N,) float64. Ignores positions with `NO_TARGET`."""
    scores, targets = reshape_by_place(outputs, targets)
    counted = targets != NO_TARGET
    return ((scores.argmax(2) == targets) & counted).sum(1).double() / counted.sum(1).clamp(min=1)


def count_overlap(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each class's intersection and union (for the IoU), in pixels of a batch, (2, K) int64.

    These compare the pixels of a class in the targets (N, H, W) with its pixels in the prediction from outputs
    (N, K, H, W). Pixels with `NO_TARGET` are ignored. Add the counts of batches before you divide.
    """
    scores, targets = reshape_by_place(outputs, targets)
    counted = targets != NO_TARGET
    classes, found, true = scores.shape[2], scores.argmax(2)[counted], targets[counted]
    both = true[found == true].bincount(minlength=classes)
    return torch.stack([both, found.bincount(minlength=classes) + true.bincount(minlength=classes) - both])
