"""Arms of a scenario: names, opponents, settings, and whether an arm has a defence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayfed import registry
from rayfed.evidence.rows import Row
from rayfed.store.arms import Pair, name_arm, name_pairs
from rayfed.store.schemas import VERSUS


def arm_names(scenario: Row, *tables: Sequence[Row]) -> list[str]:
    """Return the arms in the order of the scenario, then any other arms in the order of the tables.

    With opponents, an arm is listed once per opponent.
    """
    names = [name for name, _ in name_pairs(scenario.get("arms") or {}, scenario.get("opponents") or {})]
    for table in tables:
        names += [row["arm"] for row in table]
    return list(dict.fromkeys(names))


def arm_and_opponent(scenario: Row, arm: str) -> tuple[str, str]:
    """Return an arm's name in the scenario, and its opponent (poisoning attack) or an empty text."""
    return pairs_by_name(scenario).get(arm, (arm, ""))


def pairs_by_name(scenario: Row) -> dict[str, Pair]:
    """Return the arms of a scenario and their opponents by the names of the pairs in tables."""
    if pairs := _pairs_of_earlier_versions(scenario):
        return pairs
    arms = scenario.get("arms") or [name_arm(one["name"] for one in scenario.get("defences") or [])]
    return dict(name_pairs(arms, scenario.get("opponents") or {}))


def _pairs_of_earlier_versions(scenario: Row) -> dict[str, Pair]:
    """Return the pairs of a scenario of an earlier version by their names; empty for other scenarios.

    Earlier versions stored each pair as an arm with the opponent's malicious clients, called by the name of the pair.
    """
    arms = scenario.get("arms") or {}
    if scenario.get("opponents") or not all(isinstance(spec, Mapping) for spec in arms.values()):
        return {}
    pairs = _split_names(arms)
    malicious: dict[str, Any] = {}
    for name, (_, opponent) in pairs.items():
        clients = arms[name].get("malicious")
        if not opponent or malicious.setdefault(opponent, clients) != clients:
            return {}
    if len(malicious) < 2 or not any(malicious.values()):
        return {}
    num_pairs = len({arm for arm, _ in pairs.values()}) * len(malicious)
    return pairs if len(set(pairs.values())) == num_pairs else {}


def _split_names(names: Iterable[str]) -> dict[str, Pair]:
    """Split the names of pairs that were stored without a scenario with opponents."""
    parts = {name: name.partition(VERSUS) for name in names}
    return {name: (arm, opponent) for name, (arm, _, opponent) in parts.items()}


def arm_spec(scenario: Row, arm: str) -> Row:
    """Return the settings of an arm in the scenario, without the arm's opponent (poisoning attack)."""
    arms = scenario.get("arms") or {}
    own = arms.get(arm, arms.get(arm_and_opponent(scenario, arm)[0], scenario.get("defences")))
    return own if isinstance(own, Mapping) else {"defences": own}


def attack_specs(scenario: Row) -> dict[str, Row]:
    """Return the settings of each attack in the scenario, by the attack's title: its label, or else its name."""
    specs = [spec for spec in scenario.get("attacks") or [] if isinstance(spec, Mapping)]
    return {str(spec.get("label") or spec["name"]): spec for spec in specs}


def attack_knowledge(scenario: Row, attack: str) -> set[str]:
    """Return the grants (given knowledge) of an attack with some title, from the scenario."""
    return set(attack_specs(scenario).get(attack, {}).get("knowledge") or ())


def is_secure(scenario: Row) -> bool:
    """Return whether every run of a scenario samples fresh noise and keys, independent of the seed."""
    return bool((scenario.get("privacy") or {}).get("secure"))


def is_undefended(scenario: Row, arm: str) -> bool:
    """Return whether an arm has no defence and no protection, including the federation's protection."""
    spec, federation = arm_spec(scenario, arm), scenario.get("federation") or {}
    return not spec.get("defences") and not spec.get("protection") and not federation.get("protection")


def is_recorded(scenario: Row, arm: str) -> bool:
    """Return whether an arm replays recorded updates of a federation, whose defences attackers do not know."""
    specs = arm_spec(scenario, arm).get("defences") or []
    return any(isinstance(spec, Mapping) and spec["name"] == "rayfed.audits.replay:Recorded" for spec in specs)


def has_user_defence(scenario: Mapping[str, Any], arm: str) -> bool:
    """Return whether an arm has a defence that the user wrote, which is not part of rayfed."""
    specs = arm_spec(scenario, arm).get("defences") or []
    names = [str(spec["name"] if isinstance(spec, Mapping) else spec) for spec in specs]
    known = registry.table("defences")
    return not all(known.get(name, name).startswith("rayfed.") for name in names)


def component_text(component: Row) -> str:
    """Return a component of an arm: `name (parameter value, ...)`."""
    parameters = ", ".join(f"{key} {value}" for key, value in component.items() if key != "name")
    return f"{component['name']} ({parameters})" if parameters else str(component["name"])
