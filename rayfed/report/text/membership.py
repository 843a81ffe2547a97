"""Text on membership attacks: AUC, true positive rates, and whether members are identified."""

from __future__ import annotations

from rayfed.evidence.membership import Identification, Roc
from rayfed.metrics.roc import Estimate, needed


def auc_text(auc: Estimate) -> str:
    """Return the area under a ROC curve (AUC) with the 95 % interval."""
    return f"{auc.value:.3f} ({auc.low:.3f} to {auc.high:.3f})"


def identification_text(roc: Roc) -> str:
    """Return whether members are identified."""
    if roc.identification == Identification.NOT_IDENTIFIED:
        return "members not identified within this budget (the interval of the AUC contains 0.5)"
    direction = ", by lower scores" if roc.auc.high < 0.5 else ""
    also_by_control = roc.identification == Identification.ALSO_BY_CONTROL
    control = ", but the control identifies them without the update as well" if also_by_control else ""
    return f"MEMBERS IDENTIFIED{direction}{control}"


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
