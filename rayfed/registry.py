"""Find components, such as attacks or defences, by the names that scenarios use.

A component is a frozen dataclass whose fields are the parameters that a scenario sets. Its name is a short name of
rayfed's, an entry point of another installed package (group `rayfed.attacks`, `rayfed.defences`, ...), or a dotted path
such as `my_module:MyDefence`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar, dataclass_transform

import pydantic
from pydantic import ConfigDict, TypeAdapter

from rayfed.core.modules import find_module
from rayfed.core.user_exits import exits_refused
from rayfed.errors import UserError, nearest

T = TypeVar("T")

KINDS = (
    "attacks",
    "grants",
    "views",
    "defences",
    "aggregations",
    "protections",
    "models",
    "losses",
    "datasets",
    "partitions",
    "poisonings",
    "metrics",
)
DOTTED_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
"""Form of a name in a module. Only names of this form are imported."""
FILE_PATH = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)", re.DOTALL)
"""Form of a name in a Python file, in any folder."""
SEARCHED: list[str] = []
"""Folders given to `search`, in search order. A run stores them, so that it can be resumed elsewhere."""
NAMED: set[str] = set()
"""Modules of the components that `find` has returned."""
_ROOMS = {
    "aggregations": "aggregation",
    "datasets": "data.sets",
    "grants": "threat_model.grants",
    "losses": "core.losses",
    "partitions": "data.partitions",
    "poisonings": "poisoning",
    "views": "threat_model.views",
}
_METHODS = {
    "attacks": ("reconstruct", "infer"),
    "grants": ("grant",),
    "views": ("shows",),
    "defences": ("wrap_update",),
    "aggregations": ("combine",),
    "protections": ("summing",),
    "datasets": ("load",),
    "partitions": ("split",),
    "poisonings": ("poison_update",),
    "metrics": ("function",),
}
"""Methods of which a component of a kind has one. A model and a loss may be any callable."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def component(cls: type[T]) -> type[T]:
    """Convert a class to a component: a frozen dataclass that checks its arguments, and that scenarios can name.

    Write ranges as `Annotated[float, Field(gt=0)]`, and descriptions as a string under the field. Unknown names and
    values out of range raise `pydantic.ValidationError`.

    >>> from typing import Annotated
    >>> from pydantic import Field
    >>> from rayfed.registry import component
    >>> @component
    ... class Shrink:
    ...     factor: Annotated[float, Field(gt=0)] = 0.5
    >>> Shrink(factor=0.1)
    Shrink(factor=0.1)
    >>> Shrink(factor=-1.0)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
        ...
    pydantic.ValidationError: Input should be greater than 0
    """
    config = ConfigDict(extra="forbid", json_schema_extra=describe, arbitrary_types_allowed=True, allow_inf_nan=False)
    return pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)  # type: ignore[return-value]


def describe(schema: dict[str, Any], cls: type) -> None:
    """Add the docstrings of a class's fields to its JSON schema, as descriptions.

    pydantic's `use_attribute_docstrings` does the same, but parses the source of every class in every process.
    """
    for name, said in said_of_fields(cls).items():
        if name in schema.get("properties", {}):
            schema["properties"][name].setdefault("description", said)


def said_of_fields(cls: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class and its base classes, by field name."""
    return {name: said for base in reversed(cls.__mro__) for name, said in _said(base).items()}


@cache
def _said(cls: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class without its bases. Cached, as this parses the whole file."""
    try:
        [made] = ast.parse(dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # written in C, typed into an interpreter, or not a complete statement
        return {}
    said = {}
    for field, below in pairwise(getattr(made, "body", [])):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                said[name] = inspect.cleandoc(text)
    return said


@dataclass(frozen=True)
class Parameter:
    """One field of a component: name, type, default and description, as `rayfed describe` prints them."""

    name: str
    type: str
    default: str
    doc: str


def table(kind: str) -> Mapping[str, str]:
    """Return the components of a kind, including those of other packages, as a table of name -> `module:Class`."""
    if kind not in KINDS:
        raise UserError(f"unknown kind of component '{kind}': {nearest(kind, KINDS)}")
    own: dict[str, str] = dict(import_module(f"rayfed.{_ROOMS.get(kind, kind)}").TABLE)
    for name, path in _registered()[kind]:
        if name in own:
            raise UserError(
                f"two {kind} have the name '{name}': {own[name]} and {path}. "
                f"Use the dotted path of the second one, or uninstall one package"
            )
        own[name] = path
    return own


@cache
def _registered() -> Mapping[str, list[tuple[str, str]]]:
    """Return the components of other packages, by kind. Cached, as this reads the metadata of all packages."""
    found = entry_points()
    return {kind: [(entry.name, entry.value) for entry in found.select(group=f"rayfed.{kind}")] for kind in KINDS}


def _one(kind: str) -> str:
    """Return the singular of a kind."""
    return "loss" if kind == "losses" else kind.removesuffix("s")


def search(folder: str, last: bool = False) -> None:
    """Make the modules in a folder importable. The folder is searched first or, with `last`, after all others."""
    for folders in (sys.path, SEARCHED):
        if folder not in folders:
            folders.insert(len(folders) if last else 0, folder)


def dotted(file: Path, name: str) -> str:
    """Return the dotted path of an object in a Python file, and make the file importable.

    Raises `UserError` if Python would import another module by this name.
    """
    module = find_module(file, SEARCHED)
    search(str(module.folder))
    for folder in module.others:
        search(str(folder), last=True)
    invalidate_caches()
    module.check()
    return f"{module.name}:{name}"


def _remedy(module: str, attribute: str, error: ImportError) -> str:
    """Return advice for a failed import. Relative imports need the names of all packages."""
    top = module.partition(".")[0]
    spec = find_spec(top) if "relative import" in str(error) else None
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    if not places or places[0] is None:
        return "install the missing package, or put its folder on PYTHONPATH"
    if module == top:
        inside = find_module(Path(places[0]))
        name, folder = inside.name, inside.folder
    else:  # the package is inside another package
        name, folder = f"{Path(places[0]).parent.name}.{module}", Path(places[0]).parents[1]
    return f"the module is part of a package: write `{name}:{attribute}`, with {folder} on PYTHONPATH"


def find(kind: str, name: str) -> Any:
    """Return the class or function of a component's short name or dotted path.

    Raises `UserError` for an unknown name, for a module whose import fails, and for an object that is not a component
    of this kind.
    """
    known = table(kind)
    path = known.get(name, name)
    if named := FILE_PATH.fullmatch(path):
        raise UserError(
            f"there is no file {named['file']} for {_one(kind)} '{name}' in the scenario's folder or the current "
            f"folder: correct the path"
        )
    if path.endswith(".py"):
        raise UserError(f"'{name}' is a file: add the name of the {_one(kind)} in the file, as {name}:Name")
    if not DOTTED_PATH.fullmatch(path):
        is_file = kind == "datasets" and ("/" in name or Path(name).suffix)
        of_data = "; give a data file in its own field, as {name: parquet, train: FILE}" if is_file else ""
        raise UserError(
            f"unknown {_one(kind)} '{name}': {nearest(name, known)}, or a dotted path `my_module:Name`, or "
            f"`FILE.py:Name`{of_data}"
        )
    module, _, attribute = path.partition(":")
    try:
        with exits_refused():
            imported = import_module(module)
    except UserError as error:
        raise UserError(f"the module '{module}' of {_one(kind)} '{name}' cannot be imported: {error}") from error
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            file = f"{module.replace('.', '/')}.py"
            raise UserError(
                f"cannot import '{module}' for {_one(kind)} '{name}': no {file} in the current folder, the scenario's "
                f"folder or PYTHONPATH, and no installed package of this name. Give the path of a file elsewhere, as "
                f"FOLDER/{file}:{attribute}"
            ) from error
        raise UserError(
            f"cannot import '{module}' for {_one(kind)} '{name}': {error}; {_remedy(module, attribute, error)}"
        ) from error
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"the module '{module}' of {_one(kind)} '{name}' fails when it is imported: "
            f"{type(error).__name__}: {error}; correct the module (--debug shows the traceback)"
        ) from error
    NAMED.add(module)
    try:
        found = getattr(imported, attribute)
    except AttributeError as error:
        own = [key for key, value in vars(imported).items() if getattr(value, "__module__", None) == module]
        public = [key for key in own if not key.startswith("_")]
        raise UserError(
            f"{_one(kind)} '{name}': module '{module}' has no '{attribute}'; {nearest(attribute, public)}"
        ) from error
    methods = _METHODS.get(kind, ())
    if methods and not (is_dataclass(found) and any(hasattr(found, method) for method in methods)):
        raise UserError(
            f"'{name}' cannot be used as {_one(kind)}: expected a class with @component and {' or '.join(methods)}()"
        )
    return found


def build(kind: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """Build a component by name. Raises `UserError` for the name, `pydantic.ValidationError` for the parameters."""
    return TypeAdapter(find(kind, name)).validate_python(dict(parameters))


def parameters(target: Callable[..., Any]) -> list[Parameter]:
    """Return a component's parameters in order of definition; empty for metrics, which are objects, not classes."""
    if not callable(target):
        return []
    described: dict[str, Any] = {}
    if isinstance(target, type) and hasattr(target, "__pydantic_fields__"):
        described = TypeAdapter(target).json_schema().get("properties", {})
    found = []
    for name, parameter in inspect.signature(target).parameters.items():
        field = described.get(name, {})
        required = parameter.default is inspect.Parameter.empty
        default = "required" if required else repr(field.get("default", parameter.default))
        doc = " ".join(field.get("description", "").split())
        found.append(Parameter(name, _type_name(field) or str(parameter.annotation), default, doc))
    return found


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _type_name(schema: Mapping[str, Any]) -> str:
    if options := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(_type_name(option) for option in options)
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    if "const" in schema:
        return repr(schema["const"])
    bounds = ", ".join(f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema)
    name = schema.get("type", "")
    if name == "array":
        name = f"list of {_type_name(schema.get('items', {})) or 'anything'}"
    return f"{name} {bounds}".strip()
