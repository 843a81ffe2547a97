"""Answers of the user for a statement: a small YAML file, kept in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rayfed.documents import read_yaml
from rayfed.errors import UserError, nearest
from rayfed.store.folder import RunFolder

FILE = "about.yaml"
"""Where the answers are kept in the run's folder."""
QUESTIONS = {
    "system": "What the system is and does",
    "controller": "Who is responsible",
    "purposes": "What the data are processed for, and in whose interest",
    "data": "Which personal data",
    "people": "Whose data, and how many people",
    "access": "Who sees updates or the model, and what else they may have",
    "necessity": "Why this processing, of these data, is needed and proportionate",
    "measures": "Measures beside those of the arms: contracts, access, deletion",
}
"""What is asked, by key of the file."""


def read_about(folder: RunFolder, given: Path | None) -> dict[str, str]:
    """Return the answers of a file and keep it in the run's folder; without a file, return those that are kept.

    Raises `UserError` for a file that has no such answers.
    """
    if given is not None:
        try:
            text = given.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"--about {given}: there is no such file; write one with {', '.join(QUESTIONS)}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise UserError(f"--about {given}: cannot be read: {reason}") from error
        answers = parsed(text, f"--about {given}")
        folder.write_text(FILE, text)
        return answers
    return parsed(folder.read_text(FILE), f"{folder.url}/{FILE}") if folder.exists(FILE) else {}


def parsed(text: str, origin: str) -> dict[str, str]:
    """Return the answers of a file's text by key; raises `UserError` for keys that nobody asks for, and no answers."""
    try:
        found, _ = read_yaml(text)
    except ValueError as error:
        raise UserError(f"{origin}: not valid YAML: {error}") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{origin}: give answers as `key: text`, with keys of {', '.join(QUESTIONS)}")
    for key, value in found.items():
        if key not in QUESTIONS:
            raise UserError(f"{origin}: nothing is asked by the name '{key}'; {nearest(str(key), QUESTIONS)}")
        if not isinstance(value, str | int | float | None):
            raise UserError(f"{origin}: {key}: found {type(value).__name__}; give a text")
    return {key: " ".join(str(found[key]).split()) for key in QUESTIONS if found.get(key) not in (None, "")}
