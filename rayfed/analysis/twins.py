"""Comparison of two attackers with the same attack, one of which has more knowledge than the other (twins).

An attacker with more knowledge can ignore it, so it should not reconstruct less. If it does, its search failed, and its
result is no evidence for a defence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

from rayfed.analysis.summary import undefended
from rayfed.evidence.rows import Knowledge, knowledge_in
from rayfed.evidence.settings import Setting, of_attacks
from rayfed.metrics.measures import JUDGED, MEASURES, extreme_of

_OF_DEFENCES = {Knowledge.DEFENCE, Knowledge.CODE}
"""Grants that add no knowledge if there is no defence."""
_MASK = "; if the defence exposes a mask (`exposed`), check that first"
_WORST = {extreme_of(metric.name) for metric in JUDGED}
_NEARLY = 0.01
"""Maximum relative difference that does not count as a failure."""
_OF_ATTACKERS = ("label", "family", "knowledge", "averages")
"""Fields that may differ between twins."""


def with_twins(settings: Sequence[Setting], scenario: Mapping[str, Any]) -> list[Setting]:
    """Return the settings, each with the measures in which a twin with less knowledge did better (`outdone`)."""
    attacks = {str(one.get("label") or one["name"]): one for one in scenario.get("attacks") or []}
    by_attack = {(one.identity, one.attack): one for one in settings}

    def outdone(one: Setting) -> dict[str, str]:
        others = (by_attack.get((one.identity, name)) for name in attacks)
        twins = [twin for twin in others if twin and _knows_more(one, twin, attacks, scenario)]
        return {name: str(twin.attack) for name in one.measures for twin in twins if _got_less(name, one, twin)}

    return [replace(one, outdone=outdone(one)) if one.attack in attacks else one for one in settings]


def failures(settings: Sequence[Setting]) -> list[str]:
    """Return a sentence for every attack that did worse than a twin with less knowledge, with arms and measures."""
    known = {one.attack: set(knowledge_in(one.rows[0])) for one in settings}
    arms: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in settings:
        for measure, twin in one.outdone.items():
            if measure not in _WORST:
                met = arms.setdefault((str(one.attack), twin), {})
                met.setdefault(one.title, []).append(MEASURES[measure].title)
    return [
        f"{attack} did worse than {twin} on {_named(met)}, although it has more knowledge, so this attack failed"
        f"{_MASK * ('defence' in known[attack] - known[twin])}."
        for (attack, twin), met in arms.items()
    ]


def _named(met: Mapping[str, Collection[str]]) -> str:
    return "; ".join(f"{arm} ({', '.join(measures)})" for arm, measures in met.items())


def _knows_more(one: Setting, other: Setting, attacks: Mapping[str, Any], scenario: Mapping[str, Any]) -> bool:
    """Return whether two settings' attacks are twins and the first has all knowledge of the second, and more."""
    mine, theirs = attacks[str(one.attack)], attacks[str(other.attack)]
    known, less = set(mine.get("knowledge") or []), set(theirs.get("knowledge") or [])
    more = known - less - (_OF_DEFENCES if undefended(scenario, one.arm) else set())
    alike = [{key: value for key, value in spec.items() if key not in _OF_ATTACKERS} for spec in (mine, theirs)]
    return bool(more) and less <= known and alike[0] == alike[1]


def _got_less(measure: str, one: Setting, other: Setting) -> bool:
    """Return whether an attack did worse than another for every common seed, by more than `_NEARLY`."""
    if not of_attacks(measure):
        return False
    mine, theirs = (
        {row.get("seed"): row[measure] for row in each.rows if row.get(measure) is not None} for each in (one, other)
    )
    sign = -1 if MEASURES[measure].higher_is_better else 1
    both = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    return bool(both) and all(sign * a < sign * b and not isclose(a, b, rel_tol=_NEARLY) for a, b in both)
