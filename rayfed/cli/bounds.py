"""Bounds that users give to `--fail-above`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

from rayfed.errors import UserError, nearest
from rayfed.evidence.bounds import Bound
from rayfed.metrics.known import METRICS, leading

if TYPE_CHECKING:
    from rayfed.samples import Modality


def parse_bounds(texts: Iterable[str], modality: Modality, measured: Collection[str]) -> list[Bound]:
    """Parse bounds from texts such as `ssim=0.5`, or `15` for the leading metric.

    A name is that of a metric, or its short name in tables. Raises `UserError` for metrics that are not measured, and
    for values outside the range of the metric.
    """
    short = {METRICS[name].short.lower(): name for name in measured if name in METRICS and METRICS[name].short}
    bounds = (_parse(text, modality, measured, short) for text in texts)
    return list(dict.fromkeys(bounds))


def _parse(text: str, modality: Modality, measured: Collection[str], short: Mapping[str, str]) -> Bound:
    given, _, number = text.rpartition("=")
    name = short.get(given.strip().lower(), given.strip()) or leading(modality).name
    if name not in measured:
        raise UserError(f"--fail-above {text}: '{name}' is not measured here; {nearest(name, {*measured, *short})}")
    try:
        limit = float(number)
    except ValueError:
        limit = float("nan")
    if not isfinite(limit):
        raise UserError(f"--fail-above {text}: '{number}' is not a number; give METRIC=X, or a number for {name}")
    share = name not in METRICS or METRICS[name].format == "share"
    if share and not 0 < limit <= 1:
        raise UserError(f"--fail-above {text}: {name} is a share, so give a bound above 0 and at most 1")
    return Bound(name, limit)
