"""Entries of the user for a statement: a YAML file that is kept in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rayfed.core.documents import read_yaml
from rayfed.errors import UserError, nearest
from rayfed.store.folder import RunFolder

FILE = "about.yaml"
"""Name of the file in the run's folder."""
QUESTIONS = {
    "system": "The system and its function",
    "controller": "Controller",
    "purposes": "Purposes of the processing, and legitimate interests",
    "data": "Personal data that are processed",
    "people": "Data subjects, and their number",
    "access": "Parties with access to updates or the model, and their other knowledge",
    "necessity": "Necessity and proportionality of the processing",
    "measures": "Other measures than those of the arms: contracts, access, deletion",
}
"""Questions by key of the file."""


def read_about(folder: RunFolder, given: Path | None) -> dict[str, str]:
    """Return the entries of the user's file and copy the file to the run's folder; by default, read the copy.

    Raises `UserError` for a file that cannot be read, and for unknown keys.
    """
    if given is not None:
        try:
            text = given.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(
                f"--about {given}: no such file; write a YAML file with the keys {', '.join(QUESTIONS)}"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError(f"--about {given}: cannot be read: {reason}") from error
        answers = parse_about(text, f"--about {given}")
        folder.write_text(FILE, text)
        return answers
    return parse_about(folder.read_text(FILE), f"{folder.url}/{FILE}") if folder.exists(FILE) else {}


def parse_about(text: str, origin: str) -> dict[str, str]:
    """Return a YAML text's entries by key. Raises `UserError` for unknown keys and for values that are not text."""
    try:
        found, _ = read_yaml(text)
    except ValueError as error:
        raise UserError(f"{origin}: not valid YAML: {error}") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{origin}: write entries as `key: text`; valid keys are {', '.join(QUESTIONS)}")
    for key, value in found.items():
        if key not in QUESTIONS:
            raise UserError(f"{origin}: {key}: unknown key; {nearest(str(key), QUESTIONS)}")
        if not isinstance(value, str | int | float | None):
            raise UserError(f"{origin}: {key}: found {type(value).__name__}; give a text")
    return {key: " ".join(str(found[key]).split()) for key in QUESTIONS if found.get(key) not in (None, "")}
