"""Facts about arms and attacks that a run's scenario states; a scenario is the document in `scenario.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayfed import registry
from rayfed.evidence.methods import CLOSED_FORMS, FEWEST, METHODS
from rayfed.evidence.rows import Row
from rayfed.store.arms import Pair, name_arm, name_pairs
from rayfed.store.schemas import VERSUS


def arm_names(scenario: Row, *tables: Sequence[Row]) -> list[str]:
    """Return the arms in the order of the scenario, then any other arms in the order of the tables.

    With opponents, an arm is listed once per opponent.
    """
    named = [name for name, _ in name_pairs(scenario.get("arms") or {}, scenario.get("opponents") or {})]
    return list(dict.fromkeys(named) | dict.fromkeys(row["arm"] for table in tables for row in table))


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
    pairs = split_names(arms)
    clients: dict[str, Any] = {}
    for name, (_, opponent) in pairs.items():
        if not opponent or clients.setdefault(opponent, arms[name].get("malicious")) != arms[name].get("malicious"):
            return {}
    every = len({arm for arm, _ in pairs.values()}) * len(clients)
    return pairs if any(clients.values()) and len(clients) > 1 and len(set(pairs.values())) == every else {}


def split_names(names: Iterable[str]) -> dict[str, Pair]:
    """Split the names of pairs that were stored without a scenario with opponents."""
    parts = {name: name.partition(VERSUS) for name in names}
    return {name: (arm, opponent) for name, (arm, _, opponent) in parts.items()}


def arm_spec(scenario: Row, arm: str) -> Row:
    """Return the settings of an arm in the scenario, without the arm's opponent (poisoning attack)."""
    arms = scenario.get("arms") or {}
    own = arms.get(arm, arms.get(arm_and_opponent(scenario, arm)[0], scenario.get("defences")))
    return own if isinstance(own, Mapping) else {"defences": own}


def knowledge_of(scenario: Row, attack: str) -> set[str]:
    """Return the grants (given knowledge) of an attack with some title, from the scenario."""
    specs = [one for one in scenario.get("attacks") or [] if isinstance(one, Mapping)]
    own = (one for one in specs if attack == str(one.get("label") or one["name"]))
    return set(next(own, {}).get("knowledge") or ())


def undefended(scenario: Row, arm: str) -> bool:
    """Return whether an arm has no defence and no protection, including the federation's protection."""
    spec, federation = arm_spec(scenario, arm), scenario.get("federation") or {}
    return not spec.get("defences") and not spec.get("protection") and not federation.get("protection")


def recorded(scenario: Row, arm: str) -> bool:
    """Return whether an arm replays recorded updates of a federation, whose defences attackers do not know."""
    specs = arm_spec(scenario, arm).get("defences") or []
    return any(isinstance(spec, Mapping) and spec["name"] == "rayfed.engine.replaying:Recorded" for spec in specs)


def closed_forms(scenario: Mapping[str, Any]) -> frozenset[str]:
    """Return the titles of a scenario's closed-form attacks, for which 'diverged' is a valid result."""
    attacks = [one for one in scenario.get("attacks") or [] if isinstance(one, Mapping)]
    return frozenset(str(one.get("label") or one["name"]) for one in attacks if one["name"] in CLOSED_FORMS)


def has_own(scenario: Mapping[str, Any], arm: str) -> bool:
    """Return whether an arm has a defence that the user wrote, which is not part of rayfed."""
    specs = arm_spec(scenario, arm).get("defences") or []
    names = [str(spec["name"] if isinstance(spec, Mapping) else spec) for spec in specs]
    known = registry.table("defences")
    return not all(known.get(name, name).startswith("rayfed.") for name in names)


def short_searches(scenario: Mapping[str, Any]) -> list[str]:
    """Return the titles of searches that ran at most `FEWEST` evaluations."""
    evaluations = {method.name: method.evaluations for method in METHODS if method.evaluations}
    return [
        str(attack.get("label") or attack["name"])
        for attack in scenario.get("attacks") or []
        if isinstance(attack, Mapping) and attack.get("name") in evaluations
        if attack.get("iterations", FEWEST + 1) * evaluations[attack["name"]] <= FEWEST
    ]
