"""Fingerprints of a record: hashes of the scenario, the compared figures, and the code of components.

A record is stale if its fingerprints differ from those of the present code. Only code that decides the values counts:
modules of attacks, defences, models, metrics and aggregation rules, and the modules of these packages that they import.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from rayfed import registry
from rayfed.reproductions.reading import Group
from rayfed.scenario import Scenario
from rayfed.scenario.arms import resolve
from rayfed.scenario.trials import make_trial_scenario, plan_trials

PACKAGES = (
    "rayfed.attacks",
    "rayfed.defences",
    "rayfed.models",
    "rayfed.metrics",
    "rayfed.aggregation",
    "rayfed.gradients",
    "rayfed.privacy.sampling",
    "rayfed.core.losses",
    "rayfed.core.number_types",
    "rayfed.core.objective",
    "rayfed.core.subsets",
    "rayfed.core.vectorised",
)
"""Packages and modules whose code counts if a component imports it."""
_LENGTH = 16
"""Number of hexadecimal digits of a fingerprint: 64 bits."""


def fingerprints(document: Mapping[str, Any], scenario: Scenario, groups: Sequence[Group]) -> dict[str, str]:
    """Return part -> fingerprint of a reproduction: `scenario`, `figures`, and each component as `KIND.NAME`.

    The seed and the number of seeds do not count, so that a record can be continued with further seeds.
    """
    settings = {**document, "seed": None, "sweep": {**document["sweep"], "repeats": None}}
    figures = {group.key: group.selection() for group in groups}
    parts = {"scenario": _hash_values(settings), "figures": _hash_values(figures)}
    for kind, name in sorted(components(scenario, groups)):
        parts[f"{kind}.{name}"] = hash_component(registry.table(kind).get(name, name))
    return parts


def components(scenario: Scenario, groups: Sequence[Group]) -> set[tuple[str, str]]:
    """Return (kind, name) of the components that decide the compared values, over all trials of a sweep."""
    metrics = registry.table("metrics")
    used = {("metrics", name) for group in groups for name in group.measures if name in metrics}
    for trial in plan_trials(scenario):
        if trial.repeat == 0:
            used |= _components_of(make_trial_scenario(scenario, trial))
    return used


def _components_of(scenario: Scenario) -> set[tuple[str, str]]:
    used = {("attacks", attack.name) for attack in scenario.attacks}
    for arm in resolve(scenario).values():
        used |= {("models", arm.model.name), ("aggregations", arm.aggregation.name)}
        used |= {("defences", defence.name) for defence in arm.defences}
    return used


@cache
def hash_component(path: str) -> str:
    """Return the fingerprint of a component `module:Name`: its module, and all modules of `PACKAGES` that it imports.

    Names of modules do not count, so moving a module changes nothing.
    """
    digests = sorted(_hash_code(file) for file in _closure(path.partition(":")[0]).values())
    return _hash_values(digests)


def _closure(module: str) -> dict[str, Path]:
    """Return module -> file of a module and of the modules in `PACKAGES` that it imports, directly or not."""
    closure: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file_of(name)
        if name in closure or file is None:
            continue
        closure[name] = file
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        waiting.extend(one for one in _imports(file, package) if _in_packages(one))
    return closure


def _in_packages(module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in PACKAGES)


@cache
def _file_of(module: str) -> Path | None:
    """Return the source file of a module; None if it has none, for example for a class of a package."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


@cache
def _imports(file: Path, package: str) -> frozenset[str]:
    """Return the names of modules that a file imports, except those for type checkers only."""
    names = set()
    for node in _walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names |= {_module_of(base, alias.name) for alias in node.names}
    return frozenset(names)


def _module_of(base: str, name: str) -> str:
    """Return the module of `from base import name`: `base.name` if it is a module, otherwise `base`."""
    inside = f"{base}.{name}"
    return inside if _in_packages(inside) and _file_of(inside) is not None else base


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without blocks for type checkers."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


@cache
def _hash_code(file: Path) -> str:
    """Return the hash of a file's code without imports, docstrings, comments and layout."""
    return _hash_values(_plain(ast.parse(file.read_bytes())))


def _plain(value: Any) -> Any:
    """Return a syntax tree as lists. Empty fields are left out, because Python versions differ in them."""
    if isinstance(value, list):
        return [_plain(item) for item in value if not _is_irrelevant(item)]
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [(name, _plain(child)) for name, child in ast.iter_fields(value) if child not in (None, [])]
    return [type(value).__name__, *fields]


def _is_irrelevant(node: Any) -> bool:
    """Return whether a statement is an import or a docstring."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)


def _hash_values(values: Any) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:_LENGTH]
