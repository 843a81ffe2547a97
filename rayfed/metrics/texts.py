"""How much of a text an attack has found: its tokens in their places, and its phrases anywhere.

Source of ROUGE: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", in the definition of the
`rouge-score` package (F-measure). What is counted are the data's tokens, neither stemmed nor split again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rayfed.data.forms import token_numbers

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Rouge = Literal["rouge1", "rouge2", "rougeL"]
ROUGES: tuple[Rouge, ...] = ("rouge1", "rouge2", "rougeL")


def token_accuracy(true: Tensor, guess: Tensor) -> Tensor:
    """The share of tokens that are right and in their places: texts (N, 1, 2, L) twice to (N,) float64."""
    return (token_numbers(true) == token_numbers(guess)).double().mean(1)


def rouge(kind: Rouge) -> Callable[[Tensor, Tensor], Tensor]:
    """The F-measure of shared tokens (rouge1), of pairs (rouge2), or of the longest common subsequence (rougeL).

    The metric takes texts (N, 1, 2, L) twice, the true ones first, to (N,) float64 in [0, 1].
    """
    return partial(_rouge, kind)


def _rouge(kind: Rouge, true: Tensor, guess: Tensor) -> Tensor:
    scorer = _scorer(kind)
    pairs = zip(_written(true), _written(guess), strict=True)
    values = [scorer.score(*pair)[kind].fmeasure for pair in pairs]
    return torch.tensor(values, dtype=torch.float64, device=true.device)


def _written(texts: Tensor) -> list[str]:
    return [" ".join(map(str, row)) for row in token_numbers(texts).tolist()]


class _AsWritten:
    """The package's protocol of a tokeniser: what stands between spaces."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


@lru_cache
def _scorer(kind: Rouge) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which takes seconds

    return RougeScorer([kind], tokenizer=_AsWritten())
