"""Access to fields by their path: `training.lr`, `attacks.0.iterations`, `arms.noise.defences.gaussian.sigma`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayfed.documents import Place
from rayfed.scenario.sections import ArmSpec

_Holder = dict[str, Any] | list[Any]


def put(document: dict[str, Any], path: str, value: Any) -> Place:
    """Set the field at a path of a document, and return its keys and indices.

    An entry of a list goes by its index, its `label`, or its `name` where no other has that. Sections that are missing
    are made, and a component that is given by its bare name, or an arm that is a list of defences, is written out to
    take the field. The defences of an arm may be left out: `arms.noise.gaussian.sigma`. Raises `KeyError`, which says
    what is there, for a place that is not.
    """
    holder: Any
    holder, place = _find(document, path.split("."), ())
    holder[place[-1]] = value
    return place


def get(document: dict[str, Any], path: str) -> Any:
    """Return the field at the keys and indices that `put` returned."""
    holder: Any
    holder, place = _find(document, path.split("."), ())
    return holder[place[-1]]


def _find(place: Any, keys: Sequence[str], passed: Place) -> tuple[_Holder, Place]:
    """Return the section or list that holds a path's last key, and the whole path, which begins with `passed`."""
    key, rest = _first(place, keys, passed)
    if not rest:
        return place, (*passed, key)
    if passed == ("arms",) and key not in place and rest[0] not in ArmSpec.model_fields:
        raise KeyError(_content(place, passed))
    held = place[key] if isinstance(place, list) else place.setdefault(key, {})
    if isinstance(held, str) and key != "name":
        held = place[key] = {"name": held}
    if passed == ("arms",):
        if isinstance(held, list) and rest[0] in ArmSpec.model_fields:
            held = place[key] = {"defences": held}
        elif isinstance(held, dict) and rest[0] not in ArmSpec.model_fields:
            rest = ("defences", *rest)
    inside = (*passed, key)
    if not isinstance(held, dict | list):
        raise KeyError(_content(held, inside))
    return _find(held, rest, inside)


def _first(place: Any, keys: Sequence[str], passed: Place) -> tuple[Any, Sequence[str]]:
    """Return the first key of a path and the rest; arms' names may contain dots."""
    if isinstance(place, list):
        index = _index(place, keys[0])
        if index is None:
            raise KeyError(_content(place, passed))
        return index, keys[1:]
    known = [count for count in range(len(keys), 1, -1) if ".".join(keys[:count]) in place]
    count = known[0] if known else 1
    key = ".".join(keys[:count])
    if key.isdigit() and key not in place:
        raise KeyError(_content(place, passed))
    return key, keys[count:]


def _index(entries: list[Any], key: str) -> int | None:
    """Return the index of a list entry by index, label or name; None for no or an ambiguous match."""
    if key.isdigit():
        return int(key) if int(key) < len(entries) else None
    fields = [entry if isinstance(entry, dict) else {"name": entry} for entry in entries]
    labels = [one.get("label") or one.get("name") for one in fields]
    names = [one.get("name") for one in fields]
    found = next((values for values in (labels, names) if values.count(key) == 1), None)
    return found.index(key) if found else None


def _content(held: Any, passed: Place) -> str:
    """Return a description of the value at a path."""
    if isinstance(held, list):
        entries = [f"{i} ({_entry(one)})" for i, one in enumerate(held)]
    else:
        entries = list(map(str, held)) if isinstance(held, dict) else [repr(held)]
    return f"{'.'.join(map(str, passed)) or 'the scenario'} has {', '.join(entries) or 'nothing in it'}"


def _entry(one: Any) -> str:
    """Return a list entry's name, with its label if it has one."""
    if not isinstance(one, dict):
        return str(one)
    return f"{one.get('name')}, label {one['label']}" if one.get("label") else str(one.get("name"))
