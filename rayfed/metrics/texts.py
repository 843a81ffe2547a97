"""Metrics of texts: tokens in their places, and phrases in any place.

Source of ROUGE: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", in the definition of the
`rouge-score` package (F-measure). What is counted are the data's tokens, neither stemmed nor split again.
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
    """Return the share of correct tokens in their places: texts (N, L) int64 twice to (N,) float64.

    Places where the true text is filled up (-1) do not count.
    """
    there = true >= 0
    return ((true == guess) & there).sum(1).double() / there.sum(1)


def rouge(kind: Rouge, true: Tensor, guess: Tensor) -> Tensor:
    """Return the F-measure of shared tokens (rouge1), pairs (rouge2), or the longest common subsequence (rougeL).

    Texts (N, L) int64 twice, the true ones first, to (N,) float64 in [0, 1].
    """
    scorer = _scorer(kind)
    pairs = zip(_written(true), _written(guess), strict=True)
    values = [scorer.score(*pair)[kind].fmeasure for pair in pairs]
    return true.double().new_tensor(values)


def _written(texts: Tensor) -> list[str]:
    return [" ".join(str(token) for token in row if token >= 0) for row in texts.tolist()]


class _AsWritten:
    """Tokeniser that splits at spaces, in the package's protocol."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


@lru_cache
def _scorer(kind: Rouge) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which takes seconds

    return RougeScorer([kind], tokenizer=_AsWritten())


TOKEN_ACCURACY = Metric(
    name="token_accuracy",
    description="share of a text's tokens that are right and in their places, 0..1",
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


ROUGE_1 = _rouge("rouge1", "the tokens that both texts have, in any order")
ROUGE_2 = _rouge("rouge2", "the pairs of neighbouring tokens that both texts have", tables=())
ROUGE_L = _rouge("rougeL", "the longest common subsequence of tokens")
