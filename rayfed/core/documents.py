"""Read YAML and JSON safely from untrusted text, and write YAML.

Floats with an exponent follow YAML 1.2, so 1e-5 is a number. PyYAML follows YAML 1.1 and reads it as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import yaml

Place = tuple[Any, ...]
"""Keys and indices."""
_MOST = 200_000
"""Maximum number of entries after aliases are expanded: nested aliases make billions of entries from a few lines."""
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
"""Floats with an exponent in YAML 1.2. Floats without one are the same in YAML 1.1."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the floats of YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which also quotes text that `_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_yaml(text: str) -> Any:
    """Return the data of a YAML document that rayfed wrote. Raises `yaml.YAMLError` for invalid YAML."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def dump_yaml(value: Any, width: int = 80) -> str:
    """Convert plain data to a YAML document for `load_yaml`. Raises `yaml.YAMLError` for other objects."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def yaml_flow(value: Any) -> str:
    """Convert plain data to one line of YAML, as in `--set`. Raises `yaml.YAMLError` for other objects."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")


def read_yaml(text: str) -> tuple[Any, list[tuple[Place, int]]]:
    """Return the data of a YAML document, and the line of each path of keys. Raises `ValueError` for invalid YAML."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        lines = list(islice(_lines(root), _MOST + 1))
        if len(lines) > _MOST:
            raise ValueError(f"more than {_MOST:,} entries after aliases are expanded; use fewer aliases")
        return load_yaml(text), lines
    except RecursionError:
        raise ValueError("an anchor refers to itself, or lists and mappings are nested too deeply") from None
    except ValueError:
        raise
    except Exception as error:  # PyYAML also raises KeyError and others, for example for `!!bool 7`
        raise ValueError(str(error) or type(error).__name__) from error


def read_json(text: str) -> Any:
    """Return the data of a JSON document of untrusted text. Raises `ValueError` for invalid JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def _lines(node: yaml.Node | None, path: Place = ()) -> Iterator[tuple[Place, int]]:
    """Yield every path of the document with its line, from 1. Raises `ValueError` for invalid keys and text."""
    if node is None:
        return
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {key.start_mark.line + 1}: found a list or a mapping as a key; use a word")
            name = _text(key)
            yield (*path, name), key.start_mark.line + 1
            yield from (entry for entry in _lines(value, (*path, name)) if entry[0] != (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*path, index))
    else:
        _text(node)


def _text(node: yaml.Node) -> str:
    """Return the text of a scalar. Raises `ValueError` for text that no file or path can contain."""
    value = str(node.value)
    if "\0" in value:
        raise ValueError(f"line {node.start_mark.line + 1}: found a NUL character; remove it")
    value.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return value
