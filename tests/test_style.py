"""Pages keep to the style: no word of the table in `docs/style.md`, no sentence of more than 40 words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
MOST_WORDS = 40
EXEMPT = {
    # not edited yet
    *("CONTRIBUTING.md", "CHANGELOG.md"),
    *("aggregation", "architecture", "attacks", "benchmarks", "choosing-a-defence", "cluster", "concepts", "data"),
    *("defences", "existing-federations", "faults", "finetuning", "gate", "gpu", "report", "reproducing", "results"),
    *("scaling", "security", "sweeps", "text", "threat-models", "virtual-time"),
    *(
        f"findings/{name}"
        for name in ("audit", "averaging", "baselines", "channels", "closed-forms", "dcs2", "fedboosting")
    ),
    *(f"findings/{name}" for name in ("guarantees", "inferences", "key-lock", "labels", "people", "refiner", "robust")),
    *(
        f"findings/{name}"
        for name in ("representation", "searches", "soteria", "split-models", "text", "vae", "visible")
    ),
    # made from code: what they say is edited there
    *("scenario", "reference/commands", "reference/exit-codes", "reference/scenarios", "reference/tables"),
}
PAGES = [
    page
    for page in [*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md")]
    if page.name not in EXEMPT
    and str(page.relative_to(DOCS if page.is_relative_to(DOCS) else REPOSITORY).with_suffix("")) not in EXEMPT
    and "reproductions" not in page.parts
]
TABLE = re.findall(r"^\| (?!not |---)(.+) \| (.+) \|$", (DOCS / "style.md").read_text(), re.MULTILINE)


def prose(text: str) -> str:
    """The text of a page without code, targets of links, and what it marks up."""
    text = re.sub(r"^```.*?^```$|^---\n.*?^---\n", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", text))


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_keeps_to_the_style(page: Path) -> None:
    text = page.read_text()
    if page == DOCS / "style.md":
        text = re.sub(r"^\|.*\|$", "", text, flags=re.MULTILINE)  # it names the words
    assert not list(unwanted(text))
    assert not list(long_sentences(text))


def test_the_style_is_looked_for() -> None:
    assert len(TABLE) > 20
    assert list(unwanted("We leverage a catalogue.")) == ["'catalogue': registry", "'leverage': use"]
    assert list(unwanted("e.g. this, stamend")) == ["'e.g.': for example"]
    assert not list(unwanted("`catalogue` and [registry](catalogue.md)\n```\nmend\n```\n"))
    assert not list(long_sentences("A word. " * 50 + "word " * MOST_WORDS))
    assert list(long_sentences("word " * (MOST_WORDS + 1)))


def test_only_pages_that_are_there_are_exempt() -> None:
    for name in EXEMPT:
        path = REPOSITORY / name if name.endswith(".md") else DOCS / f"{name}.md"
        assert path.exists(), name
