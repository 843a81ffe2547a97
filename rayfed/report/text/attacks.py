"""Text on attacks and arms: input of an attack, success thresholds, and components of an arm."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed import registry
from rayfed.evidence.attack_results import AttackInput
from rayfed.evidence.rows import Row
from rayfed.metrics.known import METRICS
from rayfed.report.text.formats import format_count


def attack_input_text(attack: AttackInput) -> str:
    """Return the input of an attack: `the gradient of 4 samples and the labels`, `only the update`."""
    observed = _description("views", attack.observes) + _samples_text(attack.batch_sizes)
    if not attack.knowledge:
        return f"only {observed}"
    return " and ".join([observed, *(_description("grants", name) for name in attack.knowledge)])


def _samples_text(batch_sizes: tuple[int, ...]) -> str:
    if not batch_sizes:
        return ""
    first, last = batch_sizes[0], batch_sizes[-1]
    if first == last:
        return f" of {format_count(last, 'sample')}"
    return f" of {first}–{last} samples"


def _description(kind: str, name: str) -> str:
    """Return a component's description, or its name if it is not registered (user code is not imported)."""
    return str(registry.find(kind, name).describe) if name in registry.table(kind) else name


def threshold_text(metric: str, threshold: float) -> str:
    """Return the success threshold of a metric: `psnr ≥ 15`."""
    return f"{metric} {'≥' if METRICS[metric].higher_is_closer else '≤'} {threshold:g}"


def attack_results_text(attack: str, rows: Sequence[Row], noun: str) -> str:
    """Return a line on one attack in one round: arms, samples, and missing results with the first reason."""
    arms = len({row["arm"] for row in rows})
    missing = [row for row in rows if row["status"] != "ok"]
    reason = ""
    if missing:
        reason = f"; {len(missing)} without a result ({missing[0]['status']}: {missing[0]['message']})"
    return f"  attack {attack}: {format_count(arms, 'arm')} x {format_count(len(rows) // arms, noun)}{reason}"
