"""Pages, docstrings and messages keep to `docs/style.md`: banned constructions per file only become fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plain_words import MOST_WORDS, REPOSITORY, budgets, files, hits, long_sentences, prose


def place(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", files(), ids=place)
def test_a_file_has_no_more_banned_constructions_than_its_budget(path: Path) -> None:
    found = hits(path)
    budget = budgets().get(place(path), 0)
    assert len(found) <= budget, found
    assert len(found) == budget, "lower the budget: python -m tests.plain_words"


def test_budgets_are_of_files_that_exist() -> None:
    assert {place(path) for path in files()} >= budgets().keys()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("An attacker that knows the model reconstructs images.", []),
        ("What leaks is told apart behind noise.", ["what without a noun", "told", "behind"]),
        ("`what is` and [page](behind.md)\n```\nplayed\n```\n", []),
        ("Of texts the attack alone stands.", ["inverted sentence", "alone", "stand, lie"]),
        ("Use e.g. a catalogue, for it is small.", ["Latin", "card name", "for, but for, in place of"]),
        ("It passes the bound, where it leaks.", ["passes a bound", "where for if"]),
        ("word " * (MOST_WORDS + 1), ["long sentence"]),
        ("A word. " * 50 + "word " * MOST_WORDS, []),
    ],
)
def test_constructions_of_a_page(text: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.plain_words.REPOSITORY", tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert sorted(hit.name for hit in hits(tmp_path / "page.md")) == sorted(names)


def test_prose_of_code_is_its_strings(tmp_path: Path) -> None:
    source = tmp_path / "code.py"
    source.write_text(
        "def played(told):\n    '''Look at a page of it.'''\n    return f'{told} parts of a whole, e.g. this'\n"
    )
    assert [text for _, text in prose(source)] == ["Look at a page of it.", "parts of a whole, e.g. this"]
    source.write_text("""x = 'Wang 2023, "Behind Closed Doors", and this paper'""")
    assert "Behind" not in prose(source)[0][1]
    assert not list(long_sentences(prose(source)[0][1]))
