"""Constructions that `docs/style.md` bans, and how often each file has them.

`python -m tests.plain_words` rewrites `style_budgets.json`, in which numbers only go down; `python -m tests.plain_words
PATH...` lists the places.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parent.parent
BUDGETS = Path(__file__).with_name("style_budgets.json")
MOST_WORDS = 40
"""Words of a sentence beyond which it counts as long."""

_VERBS = r"(?:is|was|are|were|has|have|does|did|can|cannot|may|comes?|leaks?|stands?|knows?|sees?|saw|gets?|takes?)"
_ARTICLES = r"(?:it|they|that|this|these|no|a|an|the|nothing|there)"
PATTERNS: dict[str, tuple[str, str]] = {
    "what without a noun": (rf"\bwhat (?:{_VERBS}|{_ARTICLES}) ", "name the noun"),
    "who without a noun": (rf"(?:^|[.,:;(] ?)who(?:ever)? (?:{_VERBS}|[a-z]+s)\b", "an attacker that, a user who"),
    "told": (r"\b(?:told|tells? (?!you\b))", "identified; shows; receives"),
    "alone": (r"\b[a-z]{3,} alone\b", "only"),
    "behind": (r"\bbehind\b", "with, under, after, from"),
    "beside": (r"\bbesides?\b", "next to, in addition to, compared with"),
    "play": (r"\bplay(?:s|ed|ing)?\b", "run, rerun"),
    "answer": (r"\banswer(?:s|ed|ing)?\b", "update; result"),
    "stand, lie": (r"\b(?:stands?|stood|lies|lay)\b", "is; is listed in"),
    "inverted sentence": (r"(?:^|[.:] )(?:Of|Kept|Where|Behind|Whose|Whatever) [a-z]", "start with the subject"),
    "understatement": (r"\b(?:no more than|no less|nobody|neither|next to nothing|no merit)\b", "a positive statement"),
    "card table": (r"\b(?:deal(?:t|s)|drawn|draws?|met|meets?|hears?|heard)\b", "partition, sample, run against"),
    "for, but for, in place of": (rf", for {_ARTICLES}\b|\bbut for\b|\bin place of\b", "because; except; instead of"),
    "of its own": (r"\bof (?:its|their|his|your|our) own\b", "its own"),
    "passes a bound": (r"\bpass(?:es|ed)? (?:the|a|its|their|no|any) bound", "exceeds a bound, passes a gate"),
    "history": (r"\b(?:of today|since then|test_[a-z_]+)\b", "delete, or link a record"),
    "where for if": (rf", where {_ARTICLES} [a-z]+", "if, when"),
    "card name": (r"\b(?:catalogue|crew|staff|stranger|ballot|mend|wherein|thereof|utili[sz]e)\b", "the field's term"),
    "Latin": (r"\b(?:e\.g\.|i\.e\.|etc\.)", "for example, that is"),
    "filler": (r"\b(?:simply|obviously|of course|in order to|prior to|leverage)\b", "leave it out"),
    "American spelling": (r"\b(?:defenses?|normalize[ds]?|optimizers?|behaviors?|neighbors?|colors?)\b", "British"),
}
"""Name -> regular expression, what to write instead."""
_COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, (pattern, _) in PATTERNS.items()}


class Hit(NamedTuple):
    """A place with a banned construction."""

    path: str
    line: int
    name: str
    words: str


def files() -> list[Path]:
    """Return all files with prose: pages, code, templates, and the headers of scenarios."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    sources = [
        path
        for folder in ("rayfed", "actors", "scenarios", "reproductions")
        for suffix in ("py", "j2", "yaml")
        for path in (REPOSITORY / folder).rglob(f"*.{suffix}")
    ]
    return sorted(path for path in [*pages, *sources] if path.name != "style.md")


def prose(path: Path) -> list[tuple[int, str]]:
    """Return (line number, text) of a file's prose: lines of pages, strings of code, comments of scenarios."""
    text = path.read_text()
    if path.suffix == ".py":
        return list(_strings(text))
    if path.suffix == ".yaml":
        return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")]
    if path.suffix == ".j2":
        text = re.sub(
            r"\{[%#].*?[%#]\}|\{\{.*?\}\}|<[^>]*>", lambda tag: "\n" * tag[0].count("\n"), text, flags=re.DOTALL
        )
    return list(_lines(text))


def _strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield strings of Python code with at least four words, without examples and titles of papers that they quote."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 3:
            text = re.sub(r"^ *(>>>|\.\.\.) .*$", "", node.value, flags=re.MULTILINE)
            yield node.lineno, re.sub(r""""[^"]*"|'[A-Z][^']*'|`[^`]*`""", "TITLE", " ".join(text.split()))


def _lines(page: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page without code and targets of links."""
    inside = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            inside = not inside
        elif not inside and line.strip():
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", " CODE ", line)


def long_sentences(text: str) -> Iterator[str]:
    """Yield sentences with more than `MOST_WORDS` words; items of lists and cells of tables end one, too."""
    for part in re.split(r"\n\s*\n|\n(?=[-|#\d])|\|", text):
        for sentence in re.split(r"(?<=[.!?:])[*\")]*\s", part):
            if len(re.findall(r"\w[\w'’-]*", sentence)) > MOST_WORDS:
                yield " ".join(sentence.split())


def hits(path: Path) -> list[Hit]:
    """Return the banned constructions of a file."""
    place, text = str(path.relative_to(REPOSITORY)), prose(path)
    found = [
        Hit(place, line, name, match[0].strip())
        for line, words in text
        for name, pattern in _COMPILED.items()
        for match in pattern.finditer(words)
    ]
    whole = "\n\n".join(words for _, words in text) if path.suffix == ".py" else "\n".join(words for _, words in text)
    return found + [Hit(place, 0, "long sentence", sentence[:60]) for sentence in long_sentences(whole)]


def budgets() -> dict[str, int]:
    """Return the most hits that each file may have; files that are not named may have none."""
    budget: dict[str, int] = json.loads(BUDGETS.read_text())
    return budget


def main(paths: list[str]) -> None:
    """List the places of these files, or lower the budgets to what files have."""
    if paths:
        for path in paths:
            for hit in hits(Path(path).resolve()):
                print(f"{hit.path}:{hit.line}: {hit.name}: {hit.words}")
        return
    before = budgets() if BUDGETS.exists() else None
    counts = {str(path.relative_to(REPOSITORY)): len(hits(path)) for path in files()}
    lowered = {
        path: count if before is None else min(count, before.get(path, 0)) for path, count in counts.items() if count
    }
    BUDGETS.write_text(json.dumps({path: count for path, count in lowered.items() if count}, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
