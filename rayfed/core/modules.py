"""Find the module name under which Python imports a user's file, including its packages for relative imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rayfed.errors import UserError


@dataclass(frozen=True)
class Module:
    """Python file as an importable module, with the name and the folder that Python needs to import the file."""

    file: Path
    folder: Path
    """The folder that contains the module, or its outermost package."""
    parts: tuple[str, ...]
    """Names of the packages and of the module."""
    others: tuple[Path, ...] = ()
    """Folders of enclosing packages that the file imports by name."""

    @property
    def name(self) -> str:
        """Return the module's dotted name, such as `package.module`."""
        return ".".join(self.parts)

    def check(self) -> None:
        """Raise `UserError` if Python cannot import the file by the module's name, or would import another module."""
        if not all(part.isidentifier() for part in self.parts):
            if len(self.parts) == 1:
                raise UserError(
                    f"{self.file} cannot be imported: rename the file, with only letters, digits and '_' in its name"
                )
            raise UserError(
                f"{self.file} has relative imports, so Python has to import it as '{self.name}', which is not a valid "
                f"name: rename the folders, with only letters, digits and '_'"
            )
        found = self._found()
        if found is None or not found.exists() or not found.samefile(self.file):
            raise UserError(
                f"{self.file} cannot be imported: another module is called '{self.parts[0]}', {found}; rename the file"
                f"{' or its package' * (len(self.parts) > 1)}"
            )

    def _found(self) -> Path | None:
        """Return the file that Python would import by this name."""
        spec = find_spec(self.parts[0])
        if spec is None:
            return None
        if self.file.parent == self.folder:
            return Path(spec.origin) if spec.origin else None
        within = self.file.relative_to(self.folder / self.parts[0])
        places = [Path(place) / within for place in spec.submodule_search_locations or ()]
        named = Path(spec.origin) if spec.origin else None
        return next((place for place in places if place.exists()), named)


def find_module(file: Path, searched: Sequence[str] = ()) -> Module:
    """Return a Python file as a module of its folder, or of a package if the file has relative imports.

    Packages are folders with an `__init__.py`, and as many parent folders as the relative imports need. Without an
    `__init__.py`, the outermost package is directly in the innermost of the `searched` folders that contains the file.
    """
    level, roots = _imports(file)
    if file.name == "__init__.py":
        level = max(level, 1)
    if not level:
        others = (folder.parent for folder in file.parents if folder.name in roots and find_spec(folder.name) is None)
        return Module(file, file.parent, (file.stem,), tuple(others))
    folder = file.parents[min(level, len(file.parents) - 1)]
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    if not (file.parent / "__init__.py").is_file():
        around = [Path(one) for one in searched if folder.is_relative_to(one)]
        nearest = max(around, key=lambda one: len(one.parts), default=folder)
        if all(part.isidentifier() for part in folder.relative_to(nearest).parts):
            folder = nearest
    parts = file.relative_to(folder).with_suffix("").parts
    return Module(file, folder, parts[:-1] if file.name == "__init__.py" else parts)


def _imports(file: Path) -> tuple[int, set[str]]:
    """Return the maximum number of dots of a file's relative imports, and the top packages of its absolute imports.

    Imports in `try` and `if TYPE_CHECKING` are ignored.
    """
    try:
        found = list(_needed(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return 0, set()  # the later import reports the error
    relative = [one.level for one in found if isinstance(one, ast.ImportFrom)]
    names = [one.module or "" for one in found if isinstance(one, ast.ImportFrom) and not one.level]
    names += [alias.name for one in found if isinstance(one, ast.Import) for alias in one.names]
    return max(relative, default=0), {name.partition(".")[0] for name in names}


def _needed(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements in a node, except those in `try` and in `if TYPE_CHECKING`."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            yield inner
        elif isinstance(inner, ast.Try) or (isinstance(inner, ast.If) and "TYPE_CHECKING" in ast.unparse(inner.test)):
            continue
        else:
            yield from _needed(inner)
