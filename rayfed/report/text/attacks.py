"""Text on attacks and arms: input of an attack, success thresholds, and components of an arm."""

from __future__ import annotations

from rayfed import registry
from rayfed.evidence.attack_results import AttackInput
from rayfed.metrics.known import METRICS


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
    count = f"{first}" if first == last else f"{first}–{last}"
    return f" of {count} sample" + ("" if last == 1 else "s")


def _description(kind: str, name: str) -> str:
    """Return a component's description, or its name if it is not registered (user code is not imported)."""
    return str(registry.find(kind, name).describe) if name in registry.table(kind) else name


def threshold_text(metric: str, threshold: float) -> str:
    """Return the success threshold of a metric: `psnr ≥ 15`."""
    return f"{metric} {'≥' if METRICS[metric].higher_is_closer else '≤'} {threshold:g}"
