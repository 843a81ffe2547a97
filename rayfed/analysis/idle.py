"""Detection of attacks that infer nothing without a defence, whose failure is then no evidence for a defence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayfed.analysis.summary import arm_and_opponent, arm_spec, undefended
from rayfed.evidence.rows import measured
from rayfed.evidence.settings import Setting


def with_idle(settings: Sequence[Setting], scenario: Mapping[str, Any]) -> list[Setting]:
    """Return the settings, marked `idle` if no otherwise equal undefended arm shows that the attack works.

    An attack works if its whole 95 % interval, or both of two values, exceed chance. The interval of a single value is
    over its run's candidates or victims. If a run has no such interval, its value is used.
    """
    working = [one for one in settings if undefended(scenario, one.arm) and _beats_chance(one)]

    def idle(one: Setting) -> bool:
        return "inferred" in one.measures and not any(_shows(bare, one, scenario) for bare in working)

    return [replace(one, idle=True) if idle(one) else one for one in settings]


def _beats_chance(one: Setting) -> bool:
    found = one.measures.get("inferred")
    if found is None:
        return False
    alone = min((row["inferred_low"] for row in one.rows if measured(row.get("inferred_low"))), default=found.mean)
    return (found.pair or found.spread or (alone,))[0] > 0


def _shows(bare: Setting, one: Setting, scenario: Mapping[str, Any]) -> bool:
    """Return whether an undefended arm shows that the attack of another setting works."""
    shared = all(one.fields[path] == value for path, value in bare.fields.items() if path in one.fields)
    return shared and _all_else(bare, scenario) == _all_else(one, scenario)


def _all_else(one: Setting, scenario: Mapping[str, Any]) -> Any:
    opponent = arm_and_opponent(scenario, one.arm)[1]
    return one.source, one.attack, arm_spec(scenario, one.arm).get("model"), opponent
