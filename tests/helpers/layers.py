"""Levels of the packages: imports point down only."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import resolve_name
from typing import NamedTuple

from tests.conftest import REPOSITORY

FLOORS = (
    # what users import from modules of their own stays in the top folder
    "rayfed.core rayfed.errors rayfed.samples rayfed.update rayfed.registry rayfed.gradients rayfed.version",
    "rayfed.models rayfed.data rayfed.crypto rayfed.privacy rayfed.metrics rayfed.store",
    # channels, over which rules go; they know no rule
    "rayfed.protections rayfed.evidence",
    "rayfed.attacks rayfed.defences rayfed.aggregation rayfed.poisoning rayfed.scenario rayfed.report.text"
    " rayfed.recording",
    "rayfed.results rayfed.simulation.client",
    "rayfed.threat_model",
    "rayfed.simulation rayfed.report rayfed.integrations",
    "rayfed.simulation.executors rayfed.report.html rayfed.report.terminal rayfed.reproductions",
    "rayfed.simulation.virtual_time rayfed.report.export",
    "rayfed.simulation.rounds rayfed.report.statement",
    "rayfed.runs rayfed.pretraining",
    "rayfed.audits",
    # `rayfed` is the package's own `__init__.py`: the functions that Python users call
    "rayfed.cli rayfed.__main__ rayfed.tune rayfed",
    # nothing imports them: rayfed finds its executor on Ray among the entry points of installed packages
    "actors",
)
"""All rooms, from the bottom up: the modules and packages in `rayfed`, and `actors`. A room may import from lower
floors; from its own floor only what `ARROWS` has. A new room is to be named here."""


ARROWS = {
    "rayfed.core": {"rayfed.errors", "rayfed.registry", "rayfed.samples", "rayfed.update"},
    # an attacker knows what samples are
    "rayfed.update": {"rayfed.core.reasons", "rayfed.errors", "rayfed.samples"},
    "rayfed.registry": {"rayfed.core.modules", "rayfed.core.user_exits", "rayfed.errors"},
    "rayfed.gradients": {
        "rayfed.core.losses",
        "rayfed.core.number_types",
        "rayfed.core.vectorised",
        "rayfed.update",
    },
    # secure noise is made of a cipher's key stream
    "rayfed.privacy": {"rayfed.crypto.keys"},
    "rayfed.metrics": {"rayfed.models.pretrained"},
    # a column for every metric, every measure and every prior of a bound
    "rayfed.store": {
        "rayfed.metrics.known",
        "rayfed.metrics.measures",
        "rayfed.metrics.renamed",
        "rayfed.privacy.tradeoff",
    },
    # a defence on the server's side is a rule of aggregation; malicious clients meet both
    "rayfed.defences": {"rayfed.aggregation.base", "rayfed.aggregation.fedavg", "rayfed.aggregation.noisy_sum"},
    "rayfed.poisoning": {"rayfed.aggregation.weighted_sum", "rayfed.defences.base"},
    # an update is looked over as it is recorded
    "rayfed.recording": {"rayfed.attacks.external_update"},
    "rayfed.__main__": {"rayfed.cli"},
}
"""Known exceptions: room -> the modules of its own floor that it imports. One that nobody needs any more is to go."""


LEVELS = {name: level for level, names in enumerate(FLOORS) for name in names.split()}


OURS = {"rayfed", "actors", "tests", "benchmarks"}
"""The repository's packages; the last two are no rooms, so nothing that is installed can import them."""


class Import(NamedTuple):
    """One name that a module imports."""

    module: str
    name: str
    """The module that is imported, as far as it is ours; otherwise what the statement names."""
    where: str
    """`FILE:LINE`, for messages."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of `rayfed` and `actors` by its name, parsed."""
    files = (path for top in ("rayfed", "actors") for path in sorted((REPOSITORY / top).rglob("*.py")))
    names = {path: path.relative_to(REPOSITORY).with_suffix("").parts for path in files}
    return {".".join(parts).removesuffix(".__init__"): ast.parse(path.read_bytes()) for path, parts in names.items()}


def _file(module: str) -> str:
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if (REPOSITORY / path).is_dir() else f"{path}.py"


def _named(module: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    """What a statement imports, by full name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = module if _file(module).endswith("__init__.py") else module.rpartition(".")[0]
    source = resolve_name("." * node.level + (node.module or ""), package)
    full = [f"{source}.{alias.name}" for alias in node.names]
    return [name if name in modules() else source for name in full]


@cache
def imports() -> list[Import]:
    """All imports, a module's in the order of its text."""
    return [
        Import(module, name, f"{_file(module)}:{node.lineno}")
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in dict.fromkeys(_named(module, node))
    ]


def own_imports() -> list[Import]:
    return [found for found in imports() if found.name.partition(".")[0] in OURS]


def room(module: str) -> str:
    within = ".".join(module.split(".")[:3])
    if within in LEVELS:
        return within
    return ".".join(module.split(".")[: 2 if module.startswith("rayfed.") else 1])


def broken(found: Import) -> str:
    """The rule that an import breaks, empty where it breaks none."""
    own, other = room(found.module), room(found.name)
    if own not in LEVELS or other not in LEVELS:
        return f"'{own if own not in LEVELS else other}' is no room in FLOORS"
    if LEVELS[own] < LEVELS[other]:
        return f"{own} is on floor {LEVELS[own]}, below {other} on floor {LEVELS[other]}"
    if own != other and LEVELS[own] == LEVELS[other] and found.name not in ARROWS.get(own, ()):
        return f"both are on floor {LEVELS[own]}, and ARROWS does not let {own} import it"
    return ""
