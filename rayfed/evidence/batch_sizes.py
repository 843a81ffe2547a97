"""Label inference in a sweep: the share of labels recovered, by batch size.

Source: Ren 2022 (thesis), table 3.13.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from rayfed.evidence.settings import MeanEstimate, Setting, estimate_mean

LABEL_MEASURE = "label_accuracy"


@dataclass(frozen=True)
class SharesByBatchSize:
    """Shares of labels recovered by one attack at several batch sizes."""

    setting: Setting
    """Setting without the batch size among its swept values."""
    shares: dict[int, MeanEstimate]


def label_shares(settings: Sequence[Setting]) -> list[SharesByBatchSize]:
    """Return the shares of recovered labels for every attack on an arm with at least two batch sizes.

    Settings with different values of other swept fields are separate.
    """
    groups: dict[Hashable, list[Setting]] = {}
    for setting in settings:
        if setting.attack and LABEL_MEASURE in setting.measures:
            fields = {path: value for path, value in setting.fields.items() if path.rpartition(".")[2] != "batch_size"}
            alike = replace(setting, fields=fields)
            groups.setdefault((alike.identity, alike.attack), []).append(alike)
    by_attack = [SharesByBatchSize(group[0], _shares(group)) for group in groups.values()]
    return [one for one in by_attack if len(one.shares) > 1]


def _shares(group: Sequence[Setting]) -> dict[int, MeanEstimate]:
    values: dict[int, list[float | None]] = {}
    for setting in group:
        for row in setting.rows:
            if row.get("batch_size") is not None:
                values.setdefault(row["batch_size"], []).append(row[LABEL_MEASURE])
    estimates = {size: estimate_mean(values[size]) for size in sorted(values)}
    return {size: one for size, one in estimates.items() if one}
