"""Resolution of file names in a scenario: relative paths to absolute ones, `FILE.py:Name` to a dotted path.

A value is a path if its field has the type `Path`, possibly in a list, a union or another component.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from rayfed import registry
from rayfed.core.files import exists, find_in, in_package, local_path
from rayfed.errors import UserError
from rayfed.scenario.components import ModelSpec, write_out_models
from rayfed.scenario.paths import get_field, set_field
from rayfed.scenario.problems import list_specs
from rayfed.scenario.sections import Metrics
from rayfed.scenario.system import System

Note = Callable[[str], None]
"""Function that shows the user a note about a file."""


def find_inputs(document: dict[str, Any], folders: Sequence[Path], note: Note = lambda _: None) -> None:
    """Replace the file names in a scenario document by absolute paths, in place.

    Each path is in the first of `folders` that contains the file, or in the first folder if none does. `note` is called
    for files that are not in the first folder. Raises `UserError` for a module hidden by another one of the same name.
    """
    InputFolders(folders, note).find(document)


@dataclass(frozen=True)
class InputFolders:
    """Folders in which the files of a scenario are searched, in order."""

    folders: Sequence[Path]
    note: Note

    def find(self, document: dict[str, Any]) -> None:
        """Replace all file names in a scenario document by absolute paths, in place."""
        write_out_models(document)
        self._modules(document)
        self._files(document)
        sweep = document.get("sweep")
        fields = sweep.get("fields") if isinstance(sweep, dict) else None
        if isinstance(fields, dict):
            for path, values in fields.items():
                if isinstance(values, list):
                    values[:] = [self._swept(document, path, value) for value in values]

    def _swept(self, document: dict[str, Any], path: str, value: Any) -> Any:
        """Return a swept value with its file names resolved."""
        trial = copy.deepcopy(document) | {"sweep": None}
        try:
            set_field(trial, path, value)
        except KeyError:
            return value  # the check of the sweep reports it
        write_out_models(trial)
        self._files(trial)
        return get_field(trial, path)

    def _modules(self, value: Any) -> None:
        """Resolve every `FILE.py:Name` in lists and mappings."""
        if isinstance(value, dict | list):
            for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if isinstance(inner, str) and (match := registry.FILE_PATH.fullmatch(inner)):
                    file = self._found(match["file"])
                    if exists(file):  # otherwise the lookup of the component reports it
                        value[key] = registry.dotted(file, match["name"])
                else:
                    self._modules(inner)

    def _files(self, document: dict[str, Any]) -> None:
        for hints, section in _sections(document):
            for key, hint in hints.items():
                if key in section:
                    section[key] = self._value(hint, section[key])

    def _value(self, hint: Any, value: Any) -> Any:
        """Return a field's value with its paths resolved, according to the field's type."""
        if get_origin(hint) is Annotated:
            return self._value(get_args(hint)[0], value)
        if get_origin(hint) in (Union, UnionType):
            if isinstance(value, str) and str in get_args(hint) and not exists(self._found(value)):
                return value  # not a path
            for option in get_args(hint):
                value = self._value(option, value)
            return value
        if isinstance(value, str) and hint is Path:
            return value if in_package(value) or local_path(value).is_absolute() else str(self._expected(value))
        if isinstance(value, list) and (inner := get_args(hint)):
            return [self._value(inner[0], item) for item in value]
        if isinstance(value, dict) and inspect.isclass(hint):
            hints = _hints(hint)
            return {key: self._value(hints[key], item) if key in hints else item for key, item in value.items()}
        return value

    def _expected(self, path: str) -> Path:
        found = self._found(path)
        if not exists(found) and len(self.folders) > 1:
            self.note(f"{found} not found, and the current folder has no such file; give another path with --set")
        return found

    def _found(self, path: str) -> Path:
        found, expected = find_in(self.folders, path), find_in(self.folders[:1], path)
        if exists(found) and found != expected:
            self.note(f"{expected} not found; using {found} from the current folder.")
        return found


def _sections(document: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Yield each section that may name files, with the types of its fields."""
    for _, spec, value in list_specs(document):
        if isinstance(value, dict):
            yield {**_hints(spec), **_hints_of(spec.kind, value.get("name"))}, value
    model, arms = document.get("model"), document.get("arms")
    shared = model.get("name") if isinstance(model, dict) else model
    for arm in arms.values() if isinstance(arms, dict) else ():
        if isinstance(arm, dict) and isinstance(own := arm.get("model"), dict):
            yield {**_hints(ModelSpec), **_hints_of(ModelSpec.kind, own.get("name", shared))}, own
    if isinstance(metrics := document.get("metrics"), dict):
        yield _hints(Metrics), metrics
    federation = document.get("federation")
    if isinstance(federation, dict) and isinstance(system := federation.get("system"), dict):
        yield _hints(System), system


def _hints_of(kind: str, name: Any) -> Mapping[str, Any]:
    try:
        return _hints(registry.find(kind, name)) if isinstance(name, str) else {}
    except UserError:
        return {}  # the check of components reports it


def _hints(target: Any) -> Mapping[str, Any]:
    """Return the types of a component's fields by name; empty if they cannot be read."""
    fields = getattr(target, "__pydantic_fields__", None)
    if fields is not None:
        return {name: field.annotation for name, field in fields.items()}
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # evaluating a user's annotations may raise anything
        return {}
