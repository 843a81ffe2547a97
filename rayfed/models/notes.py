"""Notes for the user on the construction of a model, such as a newly initialised head."""

from __future__ import annotations

from torch import nn


def note(model: nn.Module, text: str) -> None:
    """Add a note for the user to a model, in place; copies of the model keep the note."""
    model.rayfed_notes = (*notes_of(model), text)  # type: ignore[assignment]  # not a tensor or module


def notes_of(model: nn.Module) -> tuple[str, ...]:
    """Return the notes on a model, in the order in which they were added."""
    found: tuple[str, ...] = getattr(model, "rayfed_notes", ())
    return found
