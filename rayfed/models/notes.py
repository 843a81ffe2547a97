"""Notes for the user on how a model was made, such as a newly initialised head."""

from __future__ import annotations

from torch import nn


def note(model: nn.Module, text: str) -> None:
    """Add a note to a model, in place; copies of the model keep it."""
    model.rayfed_notes = (*notes_of(model), text)  # type: ignore[assignment]  # no tensor and no module


def notes_of(model: nn.Module) -> tuple[str, ...]:
    """Return the notes on a model in the order in which they were added."""
    found: tuple[str, ...] = getattr(model, "rayfed_notes", ())
    return found
