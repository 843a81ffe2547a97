"""Criterion of a leak: when a reconstruction counts as the original sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from rayfed.evidence.parts import beyond_chance
from rayfed.evidence.rows import Row, is_measured
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.known import NOUNS, leading
from rayfed.store.finding import Missing, Part

if TYPE_CHECKING:
    from rayfed.samples import Modality


class CriterionResult(StrEnum):
    """Result of the criterion for one reconstruction."""

    LEAK = "leak"
    NOT_COMPARED = "not_compared"
    """The baseline or the identification of the sample is missing."""
    BELOW_BASELINE = "below_baseline"
    PUBLIC_AS_CLOSE = "public_as_close"
    """A public sample is as close to the original as the reconstruction."""
    CLOSER_TO_ANOTHER = "closer_to_another"
    """The reconstruction is closer to another sample than to its original."""
    BELOW_THRESHOLD = "below_threshold"


@dataclass(frozen=True)
class Criterion:
    """Conditions of a leak: a reconstruction reaches the threshold, beats the baseline, and identifies the sample."""

    needs: ClassVar[tuple[str, ...]] = ("above_baseline", "identified")
    """Metrics that the criterion needs in addition to the leading one."""

    modality: Modality
    threshold: float

    @property
    def noun(self) -> str:
        """Return the noun for a sample of the modality: image, text or record."""
        return NOUNS[self.modality]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all metrics that the criterion uses; tables of earlier versions lack `above_public`."""
        return leading(self.modality).name, *self.needs, "above_public"

    @classmethod
    def from_modality(cls, modality: Modality, threshold: float | None) -> Criterion:
        """Return the criterion for a modality, with the modality's default threshold unless `threshold` is given."""
        usual = leading(modality).threshold
        assert usual is not None
        return cls(modality, usual if threshold is None else threshold)

    def nearness(self, row: Row) -> float | None:
        """Return the leading metric of a row of `attacks`, clipped at its ceiling; None for a missing value."""
        metric = leading(self.modality)
        value = row.get(metric.name)
        return min(value, metric.ceiling) if is_measured(value) else None

    def near(self, row: Row) -> bool:
        """Return whether the reconstruction in a row of `attacks` reaches the threshold and beats the baseline."""
        value = self.nearness(row)
        return value is not None and value >= self.threshold and (row["above_baseline"] or 0.0) > 0

    def leaks(self, row: Row) -> bool:
        """Return whether the reconstruction in a row of `attacks` is a leak."""
        return self.near(row) and row["identified"] == 1 and not self.like_public(row)

    def like_public(self, row: Row) -> bool:
        """Return whether a public sample is at least as close to the true sample as the row's reconstruction."""
        above = row.get("above_public")
        return above is not None and above <= 0

    def part(self, rows: Sequence[Row]) -> Part | None:
        """Return the parts of samples (columns, tokens, pixels) recovered by more than chance in some rows, or None."""
        return beyond_chance(rows)

    def missing(self, row: Row) -> Missing:
        """Return the reason why the row of a finished attack has no usable result."""
        return Missing.RECONSTRUCTION if self.nearness(row) is None else Missing.COMPARISON

    def judge(self, row: Row) -> CriterionResult:
        """Return whether the reconstruction in a row of `attacks` is a leak, or the first condition that fails."""
        if self.leaks(row):
            return CriterionResult.LEAK
        if self.nearness(row) is None or not all(is_measured(row[name]) for name in self.needs):
            return CriterionResult.NOT_COMPARED
        if row["above_baseline"] <= 0:
            return CriterionResult.BELOW_BASELINE
        if self.like_public(row):
            return CriterionResult.PUBLIC_AS_CLOSE
        if row["identified"] != 1:
            return CriterionResult.CLOSER_TO_ANOTHER
        return CriterionResult.BELOW_THRESHOLD

    def written(self, value: float) -> str:
        """Format a value of the leading metric with the metric's unit."""
        if self.modality != "pixels":
            return f"{100 * value:.0f} %"
        return f">{PSNR_CEILING:.0f} dB" if value >= PSNR_CEILING else f"{value:.1f} dB"


def infer_modality(attacks: Sequence[Row]) -> Modality:
    """Return the modality of the samples in rows of `attacks`, inferred from the measured metrics."""
    for form in NOUNS:
        if form != "pixels" and any(is_measured(row.get(leading(form).name)) for row in attacks):
            return form
    return "pixels"


def infer_noun(rows: Sequence[Row]) -> str:
    """Return the noun for the samples in rows of attacks or outcomes; `sample` if no metric was measured."""
    form = infer_modality(rows)
    return NOUNS[form] if any(is_measured(row.get(leading(form).name)) for row in rows) else "sample"
