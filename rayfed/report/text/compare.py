"""Text on a comparison of runs and sweeps: differing values, and why results are not comparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfed.core.documents import yaml_flow
from rayfed.evidence.compare import Comparison, Unpaired
from rayfed.report.text.paired import NO_PAIRS

_EFFECTS = {
    "data": "the data differ: accuracy and leakage cannot be compared",
    "seed": "the seeds differ: victims, batches and initial weights differ, so single runs also differ by chance",
    "partition": "the partition differs: clients have different samples",
    "model": "the models differ: updates of different models leak differently",
    "attacks": "the attacks differ: leakage depends on the attacks that were run",
    "metrics": "the metrics differ",
    "resources": "the resources differ: times may not be comparable",
}
"""Effect on the results if a section differs, by section."""
_MAX_WIDTH = 60
"""Maximum number of characters of a value."""


def warnings_text(comparison: Comparison) -> list[str]:
    """Return why results of runs and sweeps are not fully comparable, and why there are no paired differences."""
    texts = [text for section, text in _EFFECTS.items() if section in comparison.differences]
    for name, state in comparison.unfinished.items():
        texts.append(f"{name} is not finished ({state or 'not started'})")
    return [*texts, unpaired_text(comparison.unpaired)] if comparison.unpaired else texts


def unpaired_text(unpaired: Unpaired) -> str:
    """Return why there are no paired differences."""
    reasons = []
    if unpaired.fields:
        verb = "differ" if len(unpaired.fields) > 1 else "differs"
        reasons.append(f"the victims are not the same ({', '.join(unpaired.fields)} {verb})")
    if unpaired.attacks:
        reasons.append(f"attacks with the same name have different settings ({', '.join(unpaired.attacks)})")
    return f"not compared as pairs, because {' and '.join(reasons)}" if reasons else NO_PAIRS


def scenario_value_text(value: Any) -> str:
    """Return a value of a scenario as one short line of YAML, without empty fields; empty for None."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else yaml_flow(_without_empty(value))
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 1]}…"


def _without_empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_empty(inner) for key, inner in value.items() if inner not in (None, [], {})}
    return [_without_empty(inner) for inner in value] if isinstance(value, list) else value
