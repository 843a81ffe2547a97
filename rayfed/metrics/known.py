"""Registry of all metrics: those in `rayfed.metrics.TABLE` and in other packages (entry points `rayfed.metrics`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayfed import registry
from rayfed.errors import UserError
from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from collections.abc import Collection

    from rayfed.samples import Modality


NOUNS: dict[Modality, str] = {"pixels": "image", "tokens": "text", "records": "record"}
"""Noun for one sample of each modality."""


def _found() -> dict[str, Metric]:
    found = {name: registry.find("metrics", name) for name in registry.table("metrics")}
    for name, metric in found.items():
        if not (isinstance(metric, Metric) and metric.name == name and name.isidentifier()):
            raise UserError(
                f"the registered metric '{name}' is not a `rayfed.metrics.base.Metric` with this name; correct the "
                f"entry point in the group `rayfed.metrics`"
            )
    return found


METRICS = _found()
"""Metrics by name, in the order of columns."""


def metrics_of(modality: Modality) -> tuple[str, ...]:
    """Return the names of the metrics for samples of a modality, those with this main modality first."""
    fitting = [metric for metric in METRICS.values() if modality in metric.modalities]
    return tuple(metric.name for metric in sorted(fitting, key=lambda metric: metric.modalities[0] != modality))


def default_names(modality: Modality) -> list[str]:
    """Return the names of the metrics that are computed by default for samples of a modality."""
    return [name for name in metrics_of(modality) if modality in METRICS[name].default_of]


def default_success(modality: Modality) -> dict[str, float]:
    """Return the default thresholds of success for samples of a modality, by metric."""
    return {m.name: m.threshold for m in METRICS.values() if m.threshold is not None and m.modalities[0] == modality}


def leading(modality: Modality) -> Metric:
    """Return the metric by which samples of a modality are ranked."""
    return next(metric for metric in METRICS.values() if metric.leads and metric.modalities[0] == modality)


def modality_by(names: Collection[str]) -> Modality:
    """Return the modality for which the metrics `names` were computed: pixels unless a leading metric shows another."""
    led = (metric for metric in METRICS.values() if metric.leads and metric.modalities[0] != "pixels")
    return next((metric.modalities[0] for metric in led if metric.name in names), "pixels")
