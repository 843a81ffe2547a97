"""Text on membership attacks: AUC, true positive rates, and whether members are identified."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.evidence.membership import Identification, Roc
from rayfed.metrics.roc import Estimate, needed

AUC_LEGEND = (
    "AUC: probability that a member scores above a non-member (0.5 by chance), with its 95 % interval. Control: the "
    "same candidates with an update that none of them is in."
)
"""Legend of membership attacks."""
_POOLED = (
    "Scores are pooled over clients and standardised for each client. TPR at 1 % FPR: share of members identified if "
    "1 % of non-members are taken for members; 1 % by chance."
)
IDENTIFICATIONS = {
    Identification.NOT_IDENTIFIED: "members not distinguished",
    Identification.ALSO_BY_CONTROL: "members distinguished, but also by the control",
    Identification.IDENTIFIED: "MEMBERS DISTINGUISHED",
}
"""Whether members are identified."""


def auc_text(auc: Estimate) -> str:
    """Return the area under a ROC curve (AUC) with the 95 % interval."""
    return f"{auc.value:.3f} ({auc.low:.3f} to {auc.high:.3f})"


def pooled_legend(curves: Sequence[Roc]) -> str:
    """Return the legend of pooled membership attacks, with the rates that are unknown; empty without attacks."""
    if not curves:
        return ""
    unknown = [text for curve in curves for text in unknown_rates_text(curve)]
    return " ".join([AUC_LEGEND, _POOLED, *(f"{text}." for text in dict.fromkeys(unknown))])


def rate_text(roc: Roc, rate: float) -> str:
    """Return the true positive rate of a ROC curve at the false positive rate `rate`."""
    tpr = roc.true_positives[rate]
    if tpr is None:
        few = f"it needs at least {needed(rate):,} non-members, but there are {roc.non_members:,}"
        return f"TPR at {100 * rate:g} % FPR not measurable: {few}"
    low, value, high = (f"{100 * share:.1f} %" for share in (tpr.low, tpr.value, tpr.high))
    return f"TPR at {100 * rate:g} % FPR {value} ({low} to {high})"


def unknown_rates_text(roc: Roc) -> list[str]:
    """Return a sentence for each false positive rate for which there are too few non-members."""
    return [rate_text(roc, rate) for rate in roc.unknown_rates]
