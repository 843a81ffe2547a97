"""The structure of the code: rooms, floors, circles of imports, long functions, names that stand for several things.

    python -m benchmarks.structure [PATH ...] [--list]          # one column for each checkout
    python -m benchmarks.structure --draw docs/architecture.svg

Everything is measured on the parsed text, so any checkout can be measured, and none of its code is imported. A room is
a module or package directly in `rayfed`, or `actors`; floors are those of the checkout's own
`tests/helpers/layers.py`. An import counts wherever it is written, in a function and under `TYPE_CHECKING` too.
Lines are those that are not blank.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

LONG = 40
"""Lines of a function, from `def` to its end, beyond which it is listed."""
MANY = 6
"""Parameters beyond which it is listed; `self` and `cls` do not count."""

Graph = Mapping[str, set[str]]
"""Name -> the names that it imports."""


class Function(NamedTuple):
    name: str
    """With its module and class."""
    lines: int
    parameters: int


@dataclass(frozen=True)
class Code:
    """One checkout, measured."""

    root: Path

    @cached_property
    def sources(self) -> dict[str, str]:
        """Module -> its text."""
        files = [path for top in ("rayfed", "actors") for path in sorted((self.root / top).rglob("*.py"))]
        return {".".join(path.relative_to(self.root).with_suffix("").parts): path.read_text() for path in files}

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Module -> what it parses to; a package is named without its `__init__`."""
        return {name.removesuffix(".__init__"): ast.parse(text) for name, text in self.sources.items()}

    @cached_property
    def modules(self) -> Graph:
        """What modules import of each other."""
        graph = {name: {*self._imported(name, tree)} & self.trees.keys() for name, tree in self.trees.items()}
        return {name: others - {name} for name, others in graph.items()}

    def room(self, module: str) -> str:
        """Return the package of a module on the floors: a subpackage if the floors list it, or else the package."""
        subpackage = ".".join(module.split(".")[:3])
        if subpackage in self.floors:
            return subpackage
        return ".".join(module.split(".")[: 2 if module.startswith("rayfed.") else 1])

    @cached_property
    def rooms(self) -> Graph:
        """What rooms import of each other."""
        graph: dict[str, set[str]] = {self.room(name): set() for name in self.modules}
        for name, others in self.modules.items():
            graph[self.room(name)] |= {self.room(other) for other in others} - {self.room(name)}
        return graph

    @cached_property
    def lines(self) -> dict[str, int]:
        """Room -> its lines."""
        made = dict.fromkeys(self.rooms, 0)
        for name, text in self.sources.items():
            made[self.room(name.removesuffix(".__init__"))] += not_blank(text)
        return made

    @cached_property
    def floors(self) -> dict[str, int]:
        """Room -> its floor, 0 at the bottom; empty where `tests/helpers/layers.py` has no `FLOORS`."""
        file = self.root / "tests" / "helpers" / "layers.py"
        for node in ast.parse(file.read_text()).body if file.exists() else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
                floors = ast.literal_eval(node.value)
                return {name: level for level, names in enumerate(floors) for name in names.split()}
        return {}

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods, the longest first."""
        found = (function for name, tree in self.trees.items() for function in _functions(tree, name))
        return sorted(found, key=lambda function: (-function.lines, function.name))

    @cached_property
    def ambiguous(self) -> dict[str, list[str]]:
        """Public classes and functions that several modules define -> these modules."""
        homes: dict[str, set[str]] = {}
        for module, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                    homes.setdefault(node.name, set()).add(module)
        return {name: sorted(modules) for name, modules in sorted(homes.items()) if len(modules) > 1}

    def arrows(self, rise: int) -> list[str]:
        """Imports between rooms that lead up (`rise` 1), along a floor (0) or down (-1)."""
        steps = [(own, other) for own in sorted(self.rooms) for other in sorted(self.rooms[own])]
        known = [(a, b, self.floors[b] - self.floors[a]) for a, b in steps if {a, b} <= self.floors.keys()]
        return [f"{own} -> {other}" for own, other, by in known if (by > 0) - (by < 0) == rise]

    def figures(self) -> dict[str, str]:
        """What there is to print, by title."""
        tests = sum(not_blank(path.read_text()) for path in (self.root / "tests").rglob("*.py"))
        longest = self.functions[0]
        figures = {
            "lines of rayfed and actors": f"{sum(self.lines.values()):,}",
            "lines of tests": f"{tests:,}",
            "modules": str(len(self.modules)),
            "rooms": str(len(self.rooms)),
            "floors": str(len({*self.floors.values()}) or "none"),
            "arrows between rooms": str(sum(map(len, self.rooms.values()))),
            "arrows up": str(len(self.arrows(1))) if self.floors else "-",
            "arrows along a floor": str(len(self.arrows(0))) if self.floors else "-",
            "circles between rooms": str(len(circles(self.rooms))),
            "circles between modules": str(len(circles(self.modules))),
            "longest function, lines": str(longest.lines),
            "longest function": longest.name.removeprefix("rayfed."),
            f"functions over {LONG} lines": str(sum(function.lines > LONG for function in self.functions)),
            f"functions over {MANY} parameters": str(sum(function.parameters > MANY for function in self.functions)),
            "public names defined more than once": str(len(self.ambiguous)),
        }
        for name in sorted(self.rooms, key=lambda name: (-self.floors.get(name, -1), name)):
            figures[f"  {name}"] = f"floor {self.floors.get(name, '-')} {self.lines[name]:7,}"
        return figures

    def listed(self) -> Iterator[str]:
        """The findings behind the figures, one a line."""
        yield from (f"up: {arrow}" for arrow in self.arrows(1))
        yield from (f"along: {arrow}" for arrow in self.arrows(0))
        yield from (f"circle: {', '.join(names)}" for graph in (self.rooms, self.modules) for names in circles(graph))
        yield from (f"{one.lines} lines: {one.name}" for one in self.functions if one.lines > LONG)
        most = sorted(self.functions, key=lambda one: -one.parameters)
        yield from (f"{one.parameters} parameters: {one.name}" for one in most if one.parameters > MANY)
        often = sorted(self.ambiguous.items(), key=lambda item: -len(item[1]))
        yield from (f"{len(homes)} times {name}: {', '.join(homes)}" for name, homes in often)

    def _imported(self, module: str, tree: ast.Module) -> Iterator[str]:
        package = module if f"{module}.__init__" in self.sources else module.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = resolve_name("." * node.level + (node.module or ""), package)
                full = [f"{source}.{alias.name}" for alias in node.names]
                yield from (name if name in self.trees else source for name in full)


def not_blank(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def reached(graph: Graph, start: str, without: str = "") -> set[str]:
    """What one name imports, directly or not; itself only if it is in a circle. No path leads through `without`."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        ahead += (new := graph[ahead.pop()] - found - {without})
        found |= new
    return found


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Names that import each other, directly or not, in groups as large as possible."""
    after = {name: reached(graph, name) for name in graph}
    return sorted({tuple(sorted(m for m in after[name] if name in after[m])) for name in graph if name in after[name]})


def _functions(node: ast.AST, within: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}.{child.name}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            a = child.args
            taken = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]
            own = bool(taken) and taken[0].arg in ("self", "cls")
            yield Function(name, (child.end_lineno or child.lineno) - child.lineno + 1, len(taken) - own)
        yield from _functions(child, name)


def table(titled: Mapping[str, Code]) -> str:
    """The figures of several checkouts, side by side."""
    columns = {title: code.figures() for title, code in titled.items()}
    names = dict.fromkeys(name for figures in columns.values() for name in figures)
    rows = [["", *columns], *([name, *(figures.get(name, "") for figures in columns.values())] for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, default=[Path()], help="checkouts to measure")
    parser.add_argument("--list", action="store_true", help="print the findings behind the figures, too")
    parser.add_argument("--draw", metavar="FILE", type=Path, help="draw the first checkout's rooms as SVG instead")
    asked = parser.parse_args(None if arguments is None else [*arguments])
    titled = {str(path) if str(path) != "." else "here": Code(path.resolve()) for path in asked.paths}
    if asked.draw:
        from benchmarks.architecture import drawn

        asked.draw.write_text(drawn(next(iter(titled.values()))))
        return
    print(table(titled))
    for title, code in titled.items() if asked.list else ():
        print(f"\n{title}", *code.listed(), sep="\n  ")


if __name__ == "__main__":
    main()
