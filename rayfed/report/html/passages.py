"""Passages of a report: original and reconstruction of texts and records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rayfed.evidence.attack_results import leading_metric
from rayfed.evidence.rows import Row, is_measured
from rayfed.report.html.pictures import picture_key, select_most_leaked
from rayfed.report.samples import Samples
from rayfed.store.folder import RunFolder

SHOWN = 3
"""Number of samples per arm and attack: those with the highest score, from the first repeat."""


@dataclass(frozen=True)
class PassagePair:
    """Words of an original text or record and of the reconstruction."""

    row: Row
    """Row of `attacks` with the scores."""
    true: list[str] | None
    """None if the page does not show it."""
    reconstructed: list[tuple[str, bool]]
    """Tokens or columns of the reconstruction, each with whether it is correct."""


def read_passages(
    folder: RunFolder, attacks: Sequence[Row], samples: Samples, worst: Collection[tuple[Any, ...]]
) -> list[PassagePair]:
    """Return the best reconstructions of texts or records per arm and attack, best first; empty for images.

    `worst` are the keys of those that are shown if `output.images` is `worst`.
    """
    texts = {picture_key(row): row for row in folder.read_table("texts").to_pylist()} if samples.any else {}
    attacked = dict.fromkeys((row["arm"], row["attack"]) for row in attacks)
    chosen = [row for pair in attacked for row in select_most_leaked(attacks, *pair, SHOWN)] if texts else []
    allowed = worst if samples.mode == "worst" else texts
    leading = leading_metric(chosen)
    nearest = sorted(chosen, key=lambda row: row[leading] if is_measured(row.get(leading)) else -inf, reverse=True)
    return [
        _passage(row, texts[picture_key(row)], samples)
        for row in nearest
        if picture_key(row) in texts and picture_key(row) in allowed
    ]


def _passage(row: Row, text: Row, samples: Samples) -> PassagePair:
    rebuilt = zip(samples.words(text["reconstructed"]), text["right"], strict=True)
    return PassagePair(row, samples.true_words(text["true"]), list(rebuilt))
