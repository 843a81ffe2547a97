"""Replace scenario fields in error messages by options of `rayfed audit`, which has no scenario file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayfed.errors import NotPortable, ScenarioError, UserError

OPTIONS = {
    **dict.fromkeys(("data", "data.name", "data.path", "data.root", "data.table", "data.train"), "--data"),
    **dict.fromkeys(("data.label", "data.label_column"), "--label"),
    "data.targets": "--target",
    "data.text_column": "--text",
    "data.size": "--size",
    **dict.fromkeys(("model", "model.name"), "--model"),
    **dict.fromkeys(("loss", "loss.name"), "--loss"),
    "federation.clients": "--images",
    "metrics.success": "--threshold",
    "seed": "--seed",
}
"""Path of a scenario field -> option of `rayfed audit`. All other fields are set by `--set`."""
_SECTIONS = "data|defences|federation|loss|metrics|model|output|partition|resources|seed|training"
_QUOTED = re.compile(rf"`((?:{_SECTIONS})(?:\.\w+)*)(?:: ([^`]+))?`")
"""A field in a message, with or without a value: `data.size`, `loss: mean_squared_error`."""
_BARE = re.compile(rf"(?<![\w./'`-])({'|'.join(path for path in OPTIONS if '.' in path)})(?![\w./(]|:\w)")
"""A field at the beginning of a message, or without quotes."""


@contextmanager
def in_options(typed: Sequence[str | None]) -> Iterator[None]:
    """Replace scenario fields in error messages by options, and dotted paths by the `FILE.py:Name` that was `typed`."""
    try:
        yield
    except NotPortable:
        raise  # `main` handles it
    except ScenarioError as error:
        told = [_of_problem(place, message) for place, message in error.problems] or [name_options(str(error))]
        raise UserError("\n".join(_as_typed(line, typed) for line in told)) from error
    except UserError as error:
        raise UserError(_as_typed(name_options(str(error)), typed)) from error


def name_options(message: str) -> str:
    """Return an error message with scenario fields replaced by options of `rayfed audit`."""
    said = _QUOTED.sub(lambda found: option(found[1], found[2]), message)
    return _BARE.sub(lambda found: OPTIONS[found[1]], said)


def option(path: str, value: str | None = None) -> str:
    """Return the option of `rayfed audit` that sets a scenario field, followed by the value if given."""
    if path in OPTIONS:
        return OPTIONS[path] + (f" {value}" if value else "")
    return f"--set {path}={value or 'VALUE'}"


def _of_problem(place: Sequence[Any], message: str) -> str:
    """Return a problem of the audit's scenario as a message about an option."""
    path = ".".join(map(str, place))
    if place[:1] == ("arms",):
        rest = [str(key) for key in place[2:] if key != "defences" and not isinstance(key, int)]
        return f"--defence '{place[1]}': " + "".join(f"{key}: " for key in rest) + name_options(message)
    own = option(path)
    return f"{own}: {name_options(message.replace(f' (or {own})', ''))}"


def _as_typed(message: str, typed: Sequence[str | None]) -> str:
    from rayfed.registry import FILE_PATH

    for given in typed:
        for found in FILE_PATH.finditer(given or ""):
            dotted = rf"'(?:\w+\.)*{re.escape(Path(found['file']).stem)}:{found['name']}'"
            message = f"'{given}'".join(re.split(dotted, message))
    return message
