"""Access to the fields of a scenario document by path, such as `training.lr` or `attacks.0.iterations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayfed.core.documents import Place
from rayfed.scenario.sections import ArmSpec

_Holder = dict[str, Any] | list[Any]


def set_field(document: dict[str, Any], path: str, value: Any) -> Place:
    """Set a document's field at a path such as `training.lr`, and return the keys and indices of the field.

    A list entry is identified by its index, its `label`, or its `name` if that is unique. Missing sections are created.
    Short forms (a component's name, an arm's list of defences) are expanded. The key `defences` of an arm is optional:
    `arms.noise.gaussian.sigma`. Raises `KeyError` with the existing keys if there is no such path.
    """
    holder: Any
    holder, place = _find(document, path.split("."), ())
    holder[place[-1]] = value
    return place


def get_field(document: dict[str, Any], path: str) -> Any:
    """Return the value of a document's field at a path such as `training.lr`, written as for `set_field`."""
    holder: Any
    holder, place = _find(document, path.split("."), ())
    return holder[place[-1]]


def find_place(document: dict[str, Any], path: str) -> Place:
    """Return the keys and indices of a document's field at a path such as `training.lr`, written as for `put`."""
    _, place = _find(document, path.split("."), ())
    return place


def _find(place: Any, keys: Sequence[str], passed: Place) -> tuple[_Holder, Place]:
    """Return the section or list that contains the last of `keys`, and the full path, which starts with `passed`."""
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
    """Return the first key of a path and the remaining ones. A key may contain dots, as the name of an arm."""
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
    """Return the index of the list entry with this index, label or name; None for no match or several."""
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
    """Return the name of a list entry, with its label if it has one."""
    if not isinstance(one, dict):
        return str(one)
    return f"{one.get('name')}, label {one['label']}" if one.get("label") else str(one.get("name"))
