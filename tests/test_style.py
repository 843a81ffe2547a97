"""Pages, docstrings and messages keep to the style: no word of the table in `docs/style.md`, no very long sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
MOST_WORDS = 40
EXEMPT = {
    # made from code: what they say is edited there
    *("reference/scenarios", "scenario"),
}
PAGES = [page for page in [*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md")] if page.name != "style.md"]
SOURCES = [
    path
    for room in ("actors", "rayfed", "scenarios", "reproductions")
    for suffix in ("py", "j2", "yaml")
    for path in (REPOSITORY / room).rglob(f"*.{suffix}")
]
"""Docstrings, errors, help texts, what is printed and shown, headers of scenarios."""
TABLE = re.findall(r"^\| (?!not |---)(.+) \| (.+) \|$", (DOCS / "style.md").read_text(), re.MULTILINE)


def prose(text: str) -> str:
    """The text of a page without code, targets of links, and what it marks up."""
    text = re.sub(r"^```.*?^```$|^---\n.*?^---\n", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", text))


def strings(source: str) -> str:
    """All string literals of Python code, a paragraph each, without titles of papers that they quote."""
    literals = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    sentences = [text for text in literals if isinstance(text, str) and " " in text]
    return re.sub(r""""[^"]*"|'[A-Z][^']*'""", "TITLE", "\n\n".join(sentences))


def unwanted(text: str) -> Iterator[str]:
    """Yield each word that is not used, with what to use for it."""
    for word, instead in TABLE:
        for found in re.finditer(rf"(?<!\w){re.escape(word)}(?:s|d|ed|ing)?(?!\w)", prose(text), re.IGNORECASE):
            yield f"'{found[0]}': {instead}"


def long_sentences(text: str) -> Iterator[str]:
    """Yield sentences that are too long. Items of lists, cells of tables and paragraphs end one, too."""
    for part in re.split(r"\n\s*\n|\n(?=[-|#\d])|\|", prose(text)):
        for sentence in re.split(r"(?<=[.!?:])[*\")]*\s", part):
            if len(re.findall(r"\w[\w'’-]*", sentence)) > MOST_WORDS:
                yield " ".join(sentence.split())


def place(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_a_page_keeps_to_the_style(page: Path) -> None:
    text = page.read_text()
    assert not list(unwanted(text))
    name = place(page).removeprefix("docs/")
    made = "reproductions" in page.parts  # from their records
    if not (made or page.name in EXEMPT or name.removesuffix(".md") in EXEMPT):
        assert not list(long_sentences(text))


@pytest.mark.parametrize("path", SOURCES, ids=place)
def test_docstrings_and_messages_keep_to_the_words(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".py":
        text = strings(text)
    elif path.suffix == ".yaml":
        text = "\n".join(re.findall(r"#.*", text))
    else:
        text = re.sub(r"\b\w+\.\w+", "FIELD", text)
    assert not list(unwanted(text))


def test_the_style_is_looked_for() -> None:
    assert len(TABLE) > 20
    assert list(unwanted("We leverage a catalogue.")) == ["'catalogue': registry", "'leverage': use"]
    assert list(unwanted("e.g. this, stamend")) == ["'e.g.': for example"]
    assert not list(unwanted("`catalogue` and [registry](catalogue.md)\n```\nmend\n```\n"))
    assert list(unwanted(strings("def f():\n    '''Look at a catalogue.'''"))) == ["'catalogue': registry"]
    assert list(unwanted(strings("print(f'{n} parts, wherein')"))) == ["'wherein': in which"]
    assert not list(unwanted(strings("""x = 'Wang 2023, "Adaptive Defenses", and this'""")))
    assert not list(long_sentences("A word. " * 50 + "word " * MOST_WORDS))
    assert list(long_sentences("word " * (MOST_WORDS + 1)))


def test_only_pages_that_are_there_are_exempt() -> None:
    pages = [REPOSITORY / name if name.endswith(".md") else DOCS / f"{name}.md" for name in EXEMPT]
    for path in pages:
        assert path.exists(), path
