"""Comparison of two attackers with the same attack, one of which has more knowledge than the other.

An attacker with more knowledge can ignore it, so it should not reconstruct less. If it does, its search failed, and its
result is no evidence for a defence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Any

from rayfed.evidence.arms import attack_specs, is_undefended
from rayfed.evidence.rows import Knowledge, knowledge_in
from rayfed.evidence.settings import Setting, describes_attacks
from rayfed.metrics.measures import JUDGED, MEASURES, extreme_of

_DEFENCE_GRANTS = {Knowledge.DEFENCE, Knowledge.CODE}
"""Grants that add no knowledge if there is no defence."""
_EXTREMES = {extreme_of(metric.name) for metric in JUDGED}
_TOLERANCE = 0.01
"""Maximum relative difference that does not count as a failure."""
_ATTACKER_FIELDS = ("label", "family", "knowledge", "averages")
"""Fields that may differ between the two attackers."""


@dataclass
class FailedAttack:
    """Attack that did worse than the same attack with less knowledge."""

    attack: str
    weaker: str
    """Attack with less knowledge."""
    knows_defence: bool
    """Whether the failed attack knows the defence and the weaker one does not."""
    measures: dict[str, list[str]] = field(default_factory=dict)
    """Names of the measures in which it did worse, by title of the setting."""


def mark_outdone(settings: Sequence[Setting], scenario: Mapping[str, Any]) -> list[Setting]:
    """Return the settings, each with the measures in which the attack with less knowledge did better (`outdone`)."""
    specs = attack_specs(scenario)
    by_attack = {(setting.identity, setting.attack): setting for setting in settings}
    marked = []
    for setting in settings:
        if setting.attack not in specs:
            marked.append(setting)
            continue
        others = filter(None, (by_attack.get((setting.identity, name)) for name in specs))
        weaker = [other for other in others if _knows_more(setting, other, specs, scenario)]
        marked.append(replace(setting, outdone=_measures_done_worse(setting, weaker)))
    return marked


def _measures_done_worse(setting: Setting, weaker: Sequence[Setting]) -> dict[str, str]:
    """Return the measures in which a setting's attack did worse than a weaker attack, with that attack."""
    outdone = {}
    for measure in setting.measures:
        for other in weaker:
            if _did_worse(measure, setting, other):
                outdone[measure] = str(other.attack)
    return outdone


def failed_attacks(settings: Sequence[Setting]) -> list[FailedAttack]:
    """Return the attacks that did worse than the same attack with less knowledge, except in extreme values."""
    knowledge = {setting.attack: set(knowledge_in(setting.rows[0])) for setting in settings}
    failed: dict[tuple[str, str], FailedAttack] = {}
    for setting in settings:
        for measure, weaker in setting.outdone.items():
            if measure in _EXTREMES:
                continue
            attack = str(setting.attack)
            knows_defence = Knowledge.DEFENCE in knowledge[attack] - knowledge[weaker]
            one = failed.setdefault((attack, weaker), FailedAttack(attack, weaker, knows_defence))
            one.measures.setdefault(setting.title, []).append(measure)
    return list(failed.values())


def _knows_more(setting: Setting, weaker: Setting, specs: Mapping[str, Any], scenario: Mapping[str, Any]) -> bool:
    """Return whether the first of two settings has the same attack, and an attacker with more knowledge."""
    spec, weaker_spec = specs[str(setting.attack)], specs[str(weaker.attack)]
    knowledge, less = set(spec.get("knowledge") or []), set(weaker_spec.get("knowledge") or [])
    more = knowledge - less
    if is_undefended(scenario, setting.arm):
        more -= _DEFENCE_GRANTS
    return bool(more) and less <= knowledge and _without_attacker(spec) == _without_attacker(weaker_spec)


def _without_attacker(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key not in _ATTACKER_FIELDS}


def _did_worse(measure: str, setting: Setting, weaker: Setting) -> bool:
    """Return whether an attack did worse than another for every common seed, by more than `_TOLERANCE`."""
    if not describes_attacks(measure):
        return False
    values, weaker_values = _values_by_seed(measure, setting), _values_by_seed(measure, weaker)
    seeds = values.keys() & weaker_values.keys()
    return bool(seeds) and all(_is_less_leakage(measure, values[seed], weaker_values[seed]) for seed in seeds)


def _values_by_seed(measure: str, setting: Setting) -> dict[Any, float]:
    return {row.get("seed"): row[measure] for row in setting.rows if row.get(measure) is not None}


def _is_less_leakage(measure: str, value: float, other: float) -> bool:
    if isclose(value, other, rel_tol=_TOLERANCE):
        return False
    return value > other if MEASURES[measure].higher_is_better else value < other
