"""Comparison of runs and sweeps: their settings, the differences of their scenarios, and their comparability."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfed.analysis.loading import Results
from rayfed.errors import UserError
from rayfed.evidence.outcomes import yaml_line
from rayfed.evidence.paired import PairedDifference, compare_pairs
from rayfed.evidence.settings import Setting
from rayfed.report.text.paired import NO_PAIRS
from rayfed.store import exits

_NO_MATTER = ("name", "output")
"""Sections that do not affect results."""
_BASIS = {
    "data": "the data differ: accuracy and leakage cannot be compared",
    "seed": "the seeds differ: victims, batches and initial weights differ, so single runs also differ by chance",
    "partition": "the partition differs: clients have different samples",
    "model": "the models differ: updates of different models leak differently",
    "attacks": "the attacks differ: leakage depends on the attacks that were run",
    "metrics": "the metrics differ",
    "resources": "the resources differ: times may not be comparable",
}
"""Effect on the results if a section differs, by section."""
_PAIRED = ("data", "seed", "partition", "federation")
"""Sections that must be equal for runs to have the same victims."""
_SAME_VICTIMS = ("federation.rounds",)
"""Fields of these sections that do not change the victims; rounds of only one run form no pairs."""
_WIDEST = 60
"""Maximum number of characters of a value."""


@dataclass(frozen=True)
class Difference:
    """Field that differs between the compared scenarios."""

    path: str
    values: list[str]
    """Value in each scenario; empty if it has none."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of several runs or sweeps."""

    names: list[str]
    settings: list[Setting]
    differences: list[Difference]
    warnings: list[str]
    """Reasons why results are not fully comparable."""
    paired: list[PairedDifference]
    """Differences of arms on the same victims or seeds, to the first arm or the requested one."""
    unpaired: str
    """Reason why there are no paired differences; empty if there may be some."""


def compare(results: Sequence[Results], against: str | None = None) -> Comparison:
    """Compare several runs and sweeps in the given order, as differences from the arm `against`.

    Raises `UserError` for fewer than two runs or sweeps, and for an unknown arm.
    """
    if len({each.url for each in results}) < 2:
        raise UserError(
            "give at least two runs or sweeps to compare; to compare the arms of one run, use `rayfed export RUN "
            "--table paired --against ARM`"
        )
    names = _names(results)
    found = [each for name, one in zip(names, results, strict=True) for each in one.settings(name)]
    scenarios = [{k: v for k, v in one.scenario.items() if k not in _NO_MATTER} for one in results]
    by_section = {}
    for section in dict.fromkeys(key for one in scenarios for key in one):
        by_section[section] = list(differences([one.get(section) for one in scenarios], section))
    found_different = [each for changed in by_section.values() for each in changed]
    warnings = [said for section, said in _BASIS.items() if by_section.get(section)]
    for name, one in zip(names, results, strict=True):
        if not exits.over(one.status):
            warnings.append(f"{name} is not finished ({one.status.get('state') or 'not started'})")
    groups = [group for name, each in zip(names, results, strict=True) for group in each.groups(name)]
    reasons = []
    decisive = (each for section, changed in by_section.items() if section in _PAIRED for each in changed)
    if unlike := [each.path for each in decisive if each.path not in _SAME_VICTIMS]:
        reasons.append(f"the victims are not the same ({', '.join(unlike)} {'differ' if unlike[1:] else 'differs'})")
    if changed := attacks_changed(scenarios):
        reasons.append(f"attacks with the same name have different settings ({', '.join(changed)})")
    if reasons:
        reason = f"not compared as pairs, because {' and '.join(reasons)}"
        return Comparison(names, found, found_different, warnings, [], reason)
    pairs = compare_pairs(groups, against)
    reason = "" if any(one.pairs > 1 for one in pairs) else NO_PAIRS
    return Comparison(names, found, found_different, warnings, pairs, reason)


def attacks_changed(scenarios: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the attacks that all scenarios have, but with different settings."""
    own = [
        {str(attack.get("label") or attack["name"]): attack for attack in one.get("attacks") or []} for one in scenarios
    ]
    return [name for name in own[0] if all(name in o for o in own) and any(o[name] != own[0][name] for o in own)]


def _names(results: Sequence[Results]) -> list[str]:
    """Return the names of the folders, or the addresses of folders with equal names."""
    names = [each.name for each in results]
    return [name if names.count(name) == 1 else each.url for name, each in zip(names, results, strict=True)]


def differences(values: Sequence[Any], path: str = "") -> Iterator[Difference]:
    """Return the fields in which documents differ, at the deepest level at which their sections correspond."""
    if all(value == values[0] for value in values):
        return
    parts = [_parts(value) for value in values]
    if any(part is None for part in parts):
        yield Difference(path, [_short(value) for value in values])
        return
    known = [part for part in parts if part is not None]
    for key in dict.fromkeys(key for part in known for key in part):
        yield from differences([part.get(key) for part in known], f"{path}.{key}" if path else key)


def _parts(value: Any) -> Mapping[str, Any] | None:
    """Return the parts of a section or of a list of components with distinct names; None for other values."""
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) and "name" in entry for entry in value):
        named = {str(entry.get("label") or entry["name"]): entry for entry in value}
        return named if len(named) == len(value) else None
    return value if isinstance(value, Mapping) else None


def _short(value: Any) -> str:
    if value is None:
        return ""
    text = yaml_line(_bare(value))
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _bare(value: Any) -> Any:
    """Return a value without empty fields."""
    if isinstance(value, Mapping):
        return {key: _bare(inner) for key, inner in value.items() if inner not in (None, [], {})}
    return [_bare(inner) for inner in value] if isinstance(value, list) else value
