"""All metrics that there are: those of `rayfed.metrics.TABLE` and of other packages (entry points `rayfed.metrics`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayfed import registry
from rayfed.errors import UserError
from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from rayfed.data.forms import Kind


def _found() -> dict[str, Metric]:
    found = {name: registry.find("metrics", name) for name in registry.table("metrics")}
    for name, metric in found.items():
        if not (isinstance(metric, Metric) and metric.name == name and name.isidentifier()):
            raise UserError(f"'{name}' is registered as a metric, and is no `rayfed.metrics.base.Metric` of that name")
    return found


METRICS = _found()
"""Name -> metric, in the order of columns."""


def metrics_of(form: Kind) -> tuple[str, ...]:
    """The metrics that mean something of samples of a form, those that were made for it first."""
    fitting = [metric for metric in METRICS.values() if form in metric.forms]
    return tuple(metric.name for metric in sorted(fitting, key=lambda metric: metric.forms[0] != form))


def default_names(form: Kind) -> list[str]:
    """What is measured of samples of a form where a scenario does not say."""
    return [name for name in metrics_of(form) if form in METRICS[name].default_of]


def default_success(form: Kind) -> dict[str, float]:
    """The thresholds of success likewise."""
    return {m.name: m.threshold for m in METRICS.values() if m.threshold is not None and m.forms[0] == form}


def leading(form: Kind) -> Metric:
    """What samples of a form are ranked by."""
    return next(metric for metric in METRICS.values() if metric.leads and metric.forms[0] == form)
