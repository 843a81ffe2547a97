"""Detection of the encoding of text files: Unicode, or else Windows-1252."""

from __future__ import annotations

import codecs
import re

from rayfed.errors import DataError

UTF_8 = "UTF-8"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig", UTF_8),
    (codecs.BOM_UTF32_LE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF32_BE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16", "UTF-16"),
)
"""Byte order marks, longer ones first, with codecs that remove them."""
_SEEN = 4096
"""Number of bytes checked for UTF-16 without a byte order mark."""
_OTHER_ALPHABET = re.compile(rb"[\x80-\xff]{4}")
"""Bytes that do not occur in practice in Windows-1252, as its languages write most letters in ASCII."""
_FIX = "save the file as UTF-8"


def is_wide(content: bytes) -> bool:
    """Return whether a file's content is UTF-16 or UTF-32, whose zero bytes look like a binary file."""
    marked = any(content.startswith(mark) for mark, _, name in _MARKS if name != UTF_8)
    return marked or _wide(content) is not None


def decode_text(where: str, content: bytes) -> tuple[str, str]:
    """Return a file's text and the name of the encoding.

    Raises `DataError`, naming `where`, for encodings other than UTF-8, UTF-16, UTF-32 and Windows-1252.
    """
    for mark, codec, name in _MARKS:
        if content.startswith(mark):
            return _strictly(where, content, codec, name), name
    wide = _wide(content)
    if wide is not None:
        return _strictly(where, content, wide, "UTF-16"), "UTF-16"
    try:
        return content.decode(), UTF_8
    except UnicodeDecodeError as error:
        _check_damage(where, content, error)
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        text = ""
    if not text or _OTHER_ALPHABET.search(content):
        raise DataError(f"{where} has an encoding other than UTF-8, UTF-16 or Windows-1252 (Latin-1): {_FIX}")
    return text, "Windows-1252 (Latin-1)"


def _strictly(where: str, content: bytes, codec: str, name: str) -> str:
    try:
        return content.decode(codec)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} starts like {name}, but byte {error.start} is not valid {name}: {_FIX}") from error


def _wide(content: bytes) -> str | None:
    """Return the codec of UTF-16 without a byte order mark, recognised by zeros in every other byte; else None."""
    for first, codec in ((0, "utf-16-be"), (1, "utf-16-le")):
        zeros, letters = content[first:_SEEN:2], content[1 - first : _SEEN : 2]
        if zeros.count(0) > 0.7 * len(zeros) and not letters.count(0):
            return codec
    return None


def _check_damage(where: str, content: bytes, error: UnicodeDecodeError) -> None:
    """Raise `DataError` if most non-ASCII characters are valid UTF-8, so the file is damaged UTF-8."""
    replaced = content.decode(errors="replace")
    wrong = replaced.count("\ufffd")
    right = sum(character > "\x7f" for character in replaced) - wrong
    if right > wrong:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{where}, line {line}: {wrong} characters are not UTF-8, but {right} other non-ASCII characters are: "
            f"{_FIX}"
        )
