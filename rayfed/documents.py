"""YAML and JSON: untrusted text becomes plain data or one `ValueError`, and data becomes YAML.

Floats with an exponent are as in YAML 1.2: PyYAML reads 1e-5, which YAML 1.1 writes 1.0e-5, as text.
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
"""Entries of a document, aliases written out: nested ones make billions of a few lines."""
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
"""Floats of YAML 1.2 with an exponent; those without are the same in 1.1."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the floats of YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which puts text in quotes that `_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_yaml(text: str) -> Any:
    """Return the data of a YAML document that rayfed itself wrote; raises `yaml.YAMLError` for what is none."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def dump_yaml(value: Any, width: int = 80) -> str:
    """Return data as a YAML document, which `load_yaml` reads back; raises `yaml.YAMLError` for other objects."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def yaml_flow(value: Any) -> str:
    """Return data as YAML in one line, as options take it; raises `yaml.YAMLError` for other objects."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")


def read_yaml(text: str) -> tuple[Any, list[tuple[Place, int]]]:
    """Return a YAML document and the lines of its paths; raises `ValueError` for invalid or self-referencing YAML."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        lines = list(islice(_lines(root), _MOST + 1))
        if len(lines) > _MOST:
            raise ValueError(f"it has more than {_MOST:,} entries with its aliases written out")
        return load_yaml(text), lines
    except RecursionError:
        raise ValueError("an anchor refers to itself, or the nesting is too deep") from None
    except ValueError:
        raise
    except Exception as error:  # beside its own errors, PyYAML raises what odd scalars lead Python to: `!!bool 7`
        raise ValueError(str(error) or type(error).__name__) from error


def read_json(text: str) -> Any:
    """Return a JSON document; raises `ValueError` for invalid JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the nesting is too deep") from None


def _lines(node: yaml.Node | None, path: Place = ()) -> Iterator[tuple[Place, int]]:
    """Yield every path of the document with its line, from 1; raises `ValueError` for text that no path can have."""
    if node is None:
        return
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {key.start_mark.line + 1}: a key is a list or a mapping, not a word")
            name = _text(key)
            yield (*path, name), key.start_mark.line + 1
            yield from (entry for entry in _lines(value, (*path, name)) if entry[0] != (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*path, index))
    else:
        _text(node)


def _text(node: yaml.Node) -> str:
    """Return a scalar as it is written; raises `ValueError` if no file or path could hold it."""
    value = str(node.value)
    if "\0" in value:
        raise ValueError(f"line {node.start_mark.line + 1}: there is a NUL character in it")
    value.encode()  # not so half of a surrogate pair: UnicodeEncodeError is a ValueError
    return value
