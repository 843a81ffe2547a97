"""Access to fields by their path: `training.lr`, `attacks.0.iterations`, `arms.noise.defences.gaussian.sigma`."""

from __future__ import annotations

from typing import Any


def put(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the field at a path of a document; raises `KeyError` where there is no such place.

    An entry of a list goes by its index or by its `name`, sections that are missing are made, and a component that is
    given by its bare name is written out to take the field.
    """
    *parents, last = path.split(".")
    place: Any = document
    for key in parents:
        at: Any = _index(place, key) if isinstance(place, list) else key
        held = place[at] if isinstance(place, list) else place.setdefault(key, {})
        if isinstance(held, str) and key != "name":
            held = place[at] = {"name": held}
        if not isinstance(held, dict | list):
            raise KeyError(path)
        place = held
    if isinstance(place, list):
        place[_index(place, last)] = value
    elif last.isdigit():
        raise KeyError(path)
    else:
        place[last] = value


def _index(entries: list[Any], key: str) -> int:
    """Return the index of the entry with this index or name; the first where several have the name."""
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
    index = int(key) if key.isdigit() else names.index(key) if key in names else len(entries)
    if index >= len(entries):
        raise KeyError(key)
    return index
