"""What is said of a component's fields: read when it is asked for, and inherited."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rayfed.registry import component, parameters


@component
class Base:
    """A component."""

    width: Annotated[float, Field(ge=0, lt=9)] = 1.0
    """Width
    of it."""
    depth: int = 1
    """Depth of it."""


@component
class Derived(Base):
    """One that changes a field."""

    width: Annotated[float, Field(gt=2)] = 3.0
    """Another width."""


def test_a_class_is_made_without_reading_its_source() -> None:
    fields: dict[str, Any] = vars(Base)["__pydantic_fields__"]
    assert {field.description for field in fields.values()} == {None}


def test_fields_are_described_with_those_of_bases() -> None:
    assert [(one.name, one.type, one.doc) for one in parameters(Base)] == [
        ("width", "number >= 0, < 9", "Width of it."),
        ("depth", "integer", "Depth of it."),
    ]
    assert [(one.name, one.type, one.doc) for one in parameters(Derived)] == [
        ("width", "number > 2", "Another width."),  # not within the bounds of the base's as well
        ("depth", "integer", "Depth of it."),
    ]


def test_a_class_that_cannot_be_parsed_by_itself_has_no_texts_and_no_error() -> None:
    @component
    class Nested:
        """One whose text
goes back to the margin."""  # fmt: skip

        width: float = 1.0
        """Width of it."""

    assert [(one.name, one.doc) for one in parameters(Nested)] == [("width", "")]
