"""Comparison of runs and sweeps: their settings, the differences of their scenarios, and their comparability."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayfed.errors import UserError
from rayfed.evidence.arms import attack_specs
from rayfed.evidence.paired import PairedDifference, PairGroup, compare_pairs
from rayfed.evidence.settings import Setting
from rayfed.store import exits

_WITHOUT_EFFECT = ("name", "output")
"""Sections that do not affect results."""
_PAIRED_SECTIONS = ("data", "seed", "partition", "federation")
"""Sections that must be equal for runs to have the same victims."""
_SAME_VICTIMS = ("federation.rounds",)
"""Fields of these sections that do not change the victims; rounds of only one run form no pairs."""


class Comparable(Protocol):
    """Run or sweep, as far as a comparison reads it."""

    @property
    def name(self) -> str:
        """Return the name of the folder."""

    @property
    def url(self) -> str:
        """Return the address of the folder."""

    @property
    def status(self) -> Mapping[str, Any]:
        """Return the progress of the run or sweep."""

    @property
    def scenario(self) -> Mapping[str, Any]:
        """Return the scenario."""

    def settings(self, source: str = "") -> list[Setting]:
        """Return the outcomes by arm, attack and swept values."""

    def groups(self, source: str = "") -> list[PairGroup]:
        """Return the values to pair between arms."""


@dataclass(frozen=True)
class Difference:
    """Field that differs between the compared scenarios."""

    path: str
    values: list[Any]
    """Value in each scenario; None if it has none."""


@dataclass(frozen=True)
class Unpaired:
    """Reasons why there are no paired differences; without fields and attacks, there are no common victims or seeds."""

    fields: tuple[str, ...] = ()
    """Differing fields that change the victims."""
    attacks: tuple[str, ...] = ()
    """Attacks with the same name and different settings."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of several runs or sweeps."""

    names: list[str]
    settings: list[Setting]
    differences: dict[str, list[Difference]]
    """Differing fields by section, for sections that differ."""
    unfinished: dict[str, str | None]
    """State of runs and sweeps that are not finished, by name; None before the start."""
    paired: list[PairedDifference]
    """Differences of arms on the same victims or seeds, to the first arm or the requested one."""
    unpaired: Unpaired | None
    """Why there are no paired differences; None if there may be some."""


def compare_results(results: Sequence[Comparable], against: str | None = None) -> Comparison:
    """Compare several runs and sweeps in the given order, as differences from the arm `against`.

    Raises `UserError` for fewer than two runs or sweeps, and for an unknown arm.
    """
    if len({one.url for one in results}) < 2:
        raise UserError(
            "give at least two runs or sweeps to compare; to compare the arms of one run, use `rayfed export RUN "
            "--table paired --against ARM`"
        )
    names = _names(results)
    settings, groups, unfinished = [], [], {}
    for name, one in zip(names, results, strict=True):
        settings += one.settings(name)
        groups += one.groups(name)
        if not exits.is_complete(one.status):
            unfinished[name] = one.status.get("state")
    scenarios = [one.scenario for one in results]
    changed = _differences_by_section(scenarios)
    unpaired = _other_victims(changed, scenarios)
    pairs = [] if unpaired else compare_pairs(groups, against)
    if not any(one.pairs > 1 for one in pairs):
        unpaired = unpaired or Unpaired()
    return Comparison(names, settings, changed, unfinished, pairs, unpaired)


def _names(results: Sequence[Comparable]) -> list[str]:
    """Return the names of the folders, or the addresses of folders with equal names."""
    names = [one.name for one in results]
    return [name if names.count(name) == 1 else one.url for name, one in zip(names, results, strict=True)]


def _differences_by_section(scenarios: Sequence[Mapping[str, Any]]) -> dict[str, list[Difference]]:
    by_section = {}
    for section in dict.fromkeys(key for scenario in scenarios for key in scenario if key not in _WITHOUT_EFFECT):
        changed = list(compare_documents([scenario.get(section) for scenario in scenarios], section))
        if changed:
            by_section[section] = changed
    return by_section


def _other_victims(
    differences: Mapping[str, Sequence[Difference]], scenarios: Sequence[Mapping[str, Any]]
) -> Unpaired | None:
    """Return why victims or attacks of the scenarios are not the same; None if they are."""
    sections = [section for section in differences if section in _PAIRED_SECTIONS]
    paths = [one.path for section in sections for one in differences[section]]
    fields = tuple(path for path in paths if path not in _SAME_VICTIMS)
    attacks = tuple(changed_attacks(scenarios))
    return Unpaired(fields, attacks) if fields or attacks else None


def changed_attacks(scenarios: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the attacks that all scenarios have, but with different settings."""
    specs = [attack_specs(scenario) for scenario in scenarios]
    common = [name for name in specs[0] if all(name in own for own in specs)]
    return [name for name in common if any(own[name] != specs[0][name] for own in specs)]


def compare_documents(values: Sequence[Any], path: str = "") -> Iterator[Difference]:
    """Return the fields in which documents differ, at the deepest level at which their sections correspond."""
    if all(value == values[0] for value in values):
        return
    sections = [section for section in map(_section, values) if section is not None]
    if len(sections) < len(values):
        yield Difference(path, list(values))
        return
    for key in dict.fromkeys(key for section in sections for key in section):
        yield from compare_documents([section.get(key) for section in sections], f"{path}.{key}" if path else key)


def _section(value: Any) -> Mapping[str, Any] | None:
    """Return a section, or a list of components with distinct names by name; None for other values."""
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) and "name" in entry for entry in value):
        by_name = {str(entry.get("label") or entry["name"]): entry for entry in value}
        return by_name if len(by_name) == len(value) else None
    return value if isinstance(value, Mapping) else None
