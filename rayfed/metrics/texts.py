"""Metrics of texts: correct tokens at their positions, and shared phrases at any position.

Source of ROUGE: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", as defined by the `rouge-score`
package (F-measure). The metrics use the data's tokens, without stemming or further splitting.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from torch import Tensor

Rouge = Literal["rouge1", "rouge2", "rougeL"]


def token_accuracy(true: Tensor, guess: Tensor) -> Tensor:
    """Return the share of correct tokens at their positions: texts (N, L) int64 twice to (N,) float64.

    Positions where the true text is padded (-1) are ignored.
    """
    there = true >= 0
    return ((true == guess) & there).sum(1).double() / there.sum(1)


def rouge(kind: Rouge, true: Tensor, guess: Tensor) -> Tensor:
    """Return the F-measure of shared tokens (rouge1), pairs (rouge2), or the longest common subsequence (rougeL).

    Takes texts (N, L) int64 twice, the true ones first. Returns (N,) float64 in [0, 1].
    """
    scorer = _scorer(kind)
    pairs = zip(_written(true), _written(guess), strict=True)
    values = [scorer.score(*pair)[kind].fmeasure for pair in pairs]
    return true.double().new_tensor(values)


def _written(texts: Tensor) -> list[str]:
    return [" ".join(str(token) for token in row if token >= 0) for row in texts.tolist()]


class _AsWritten:
    """Tokeniser that splits at spaces, with the interface of `rouge_score`."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


@lru_cache
def _scorer(kind: Rouge) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # slow, because it imports nltk

    return RougeScorer([kind], tokenizer=_AsWritten())


TOKEN_ACCURACY = Metric(
    name="token_accuracy",
    description="share of a text's tokens that are correct at their positions, 0..1",
    title="tokens in place",
    short="tokens",
    function=token_accuracy,
    higher_is_closer=True,
    modalities=("tokens",),
    format="share",
    tables=("run",),
    default_of=("tokens",),
    leads=True,
    success="threshold",
    threshold=0.9,
)


def _rouge(kind: Rouge, shared: str, tables: tuple[Literal["run"], ...] = ("run",)) -> Metric:
    return Metric(
        name=kind,
        description=f"F-measure of {shared}, 0..1",
        title=f"ROUGE-{kind.removeprefix('rouge')}",
        function=partial(rouge, kind),
        bounds=(0.0, 1.0),
        higher_is_closer=True,
        modalities=("tokens",),
        tables=tables,
        default_of=("tokens",),
        success="threshold",
    )


ROUGE_1 = _rouge("rouge1", "shared tokens, in any order")
ROUGE_2 = _rouge("rouge2", "shared pairs of neighbouring tokens", tables=())
ROUGE_L = _rouge("rougeL", "the longest common subsequence of tokens")
