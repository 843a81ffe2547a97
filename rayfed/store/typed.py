"""Conversion between frozen dataclasses and Arrow tables: one class is one table, and one instance is one row.

`column` and `key` give each field its description. Values may be enums, lists and structs (dataclasses, named tuples).
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

RowType = TypeVar("RowType")
Int32 = Annotated[int, pa.int32()]
"""Integer of 32 bits; `int` is stored with 64 bits."""
_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_(), bytes: pa.binary()}


def key(description: str) -> Any:
    """Return a field that every row has."""
    return field(metadata={"description": description})


def column(description: str, name: str = "", default: Any = None) -> Any:
    """Return a field that may be missing; `name` is the column's name if it differs from the field's.

    Null means not measured or not applicable.
    """
    return field(default=default, metadata={"description": description, "name": name})


def inlined(prefix: str = "", **descriptions: str) -> Any:
    """Return a field with an optional struct whose members are columns of the table, with their descriptions."""
    return field(default=None, metadata={"prefix": prefix, "members": descriptions})


def unstored(default: Any = None) -> Any:
    """Return a field that is not a column of the table."""
    return field(default=default, metadata={"stored": False})


@cache
def schema_from(row_type: type) -> pa.Schema:
    """Return the Arrow schema of a dataclass, with a description for each column."""
    hints = get_type_hints(row_type, include_extras=True)
    columns = []
    for each in _stored(row_type):
        if "members" in each.metadata:
            columns += _inlined_fields(each, _without_none(hints[each.name]))
        else:
            required = each.default is MISSING
            description = each.metadata["description"]
            columns.append(_arrow_field(_name(each), hints[each.name], not required, description))
    return pa.schema(columns)


def table_from(rows: Iterable[object], row_type: type) -> pa.Table:
    """Return an Arrow table with one row for each instance of a dataclass."""
    documents = []
    for row in rows:
        document: dict[str, Any] = {}
        for each in _stored(row_type):
            value = _plain(getattr(row, each.name))
            if "members" in each.metadata:
                members = value or {}
                document |= {each.metadata["prefix"] + name: members.get(name) for name in each.metadata["members"]}
            else:
                document[_name(each)] = value
        documents.append(document)
    return pa.Table.from_pylist(documents, schema_from(row_type))


def rows_from(table: pa.Table, row_type: type[RowType]) -> list[RowType]:
    """Return the rows of an Arrow table as instances of a dataclass.

    A missing column or a null gives the field's default.
    """
    hints = get_type_hints(row_type)
    rows = []
    for document in table.to_pylist():
        values = {}
        for each in _stored(row_type):
            value = _typed(_stored_value(document, each), hints[each.name])
            if value is not None:
                values[each.name] = value
        rows.append(row_type(**values))
    return rows


def _stored(row_type: type) -> list[Field[Any]]:
    assert is_dataclass(row_type)
    return [each for each in fields(row_type) if each.metadata.get("stored", True)]


def _name(each: Field[Any]) -> str:
    return each.metadata.get("name") or each.name


def _stored_value(document: Mapping[str, Any], each: Field[Any]) -> Any:
    """Return the value of a field in a row of a table; None for a struct without members."""
    if "members" not in each.metadata:
        return document.get(_name(each))
    members = {name: document.get(each.metadata["prefix"] + name) for name in each.metadata["members"]}
    return members if any(value is not None for value in members.values()) else None


def _inlined_fields(each: Field[Any], struct: type) -> list[pa.Field]:
    hints = _members(struct)
    described = each.metadata["members"].items()
    return [_arrow_field(each.metadata["prefix"] + name, hints[name], True, text) for name, text in described]


def _arrow_field(name: str, annotation: Any, nullable: bool, description: str) -> pa.Field:
    return pa.field(name, _arrow_type(annotation), nullable, {"description": description})


def _arrow_type(annotation: Any) -> pa.DataType:
    """Return the Arrow type of an annotation."""
    annotation = _without_none(annotation)
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[1]
    if get_origin(annotation) is tuple:
        return pa.list_(_arrow_type(get_args(annotation)[0]))
    if annotation in _TYPES:
        return _TYPES[annotation]
    if issubclass(annotation, Enum):
        return pa.string()
    members = [pa.field(name, _arrow_type(hint)) for name, hint in _members(annotation).items()]
    return pa.struct(members)


def _members(struct: type) -> dict[str, Any]:
    """Return the stored members of a dataclass or named tuple with their annotations."""
    hints = get_type_hints(struct, include_extras=True)
    if is_dataclass(struct):
        return {each.name: hints[each.name] for each in _stored(struct)}
    return {name: hints[name] for name in struct._fields}  # type: ignore[attr-defined]


def _without_none(annotation: Any) -> Any:
    """Return the type of an optional value."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(each for each in get_args(annotation) if each is not type(None))
    return annotation


def _plain(value: Any) -> Any:
    """Return a value with texts instead of enums and dictionaries instead of structs."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) or hasattr(value, "_fields"):
        return {name: _plain(getattr(value, name)) for name in _members(type(value))}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value


def _typed(value: Any, annotation: Any) -> Any:
    """Return a value of an Arrow table with the types of an annotation."""
    annotation = _without_none(annotation)
    if value is None:
        return None
    if get_origin(annotation) is Annotated:
        return value
    if get_origin(annotation) is tuple:
        return tuple(_typed(each, get_args(annotation)[0]) for each in value)
    if annotation in _TYPES:
        return value
    if issubclass(annotation, Enum):
        return annotation(value)
    values = {}
    for name, hint in _members(annotation).items():
        values[name] = _typed(value.get(name), hint)
    return annotation(**values)
