"""Detection of attacks that infer nothing without a defence, whose failure is then no evidence for a defence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayfed.evidence.arms import arm_and_opponent, arm_spec, is_undefended
from rayfed.evidence.rows import is_measured
from rayfed.evidence.settings import Setting


def mark_idle(settings: Sequence[Setting], scenario: Mapping[str, Any]) -> list[Setting]:
    """Return the settings, marked `idle` if no otherwise equal undefended arm shows that the attack works.

    An attack works if its whole 95 % interval, or both of two values, exceed chance. The interval of a single value is
    over its run's candidates or victims. If a run has no such interval, its value is used.
    """
    working = [one for one in settings if is_undefended(scenario, one.arm) and _beats_chance(one)]
    marked = []
    for setting in settings:
        works = any(_shows_effect(undefended, setting, scenario) for undefended in working)
        marked.append(replace(setting, idle=True) if "inferred" in setting.measures and not works else setting)
    return marked


def _beats_chance(setting: Setting) -> bool:
    estimate = setting.measures.get("inferred")
    if estimate is None:
        return False
    if interval := estimate.pair or estimate.spread:
        return interval[0] > 0
    lows = [row["inferred_low"] for row in setting.rows if is_measured(row.get("inferred_low"))]
    return min(lows, default=estimate.mean) > 0


def _shows_effect(undefended: Setting, setting: Setting, scenario: Mapping[str, Any]) -> bool:
    """Return whether an undefended arm shows that the attack of another setting works."""
    same_fields = all(
        setting.fields[path] == value for path, value in undefended.fields.items() if path in setting.fields
    )
    return same_fields and _circumstances(undefended, scenario) == _circumstances(setting, scenario)


def _circumstances(setting: Setting, scenario: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a setting's run, attack, model and opponent."""
    opponent = arm_and_opponent(scenario, setting.arm)[1]
    return setting.source, setting.attack, arm_spec(scenario, setting.arm).get("model"), opponent
