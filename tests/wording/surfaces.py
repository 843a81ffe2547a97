"""Text of each surface that shows the results of the runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from rich.console import Console

from rayfed import scenario as scenarios
from rayfed.attacks.progress import Standing
from rayfed.cli.bounds import parse_bounds
from rayfed.evidence.recommend import parse_bound, recommend_setting
from rayfed.evidence.rows import Row
from rayfed.evidence.settings import group_settings
from rayfed.report.export.tables import export_table
from rayfed.report.gate import GatedRun, Ruling
from rayfed.report.html.run import write_report
from rayfed.report.html.sweep import write_sweep_report
from rayfed.report.statement.content import Statement
from rayfed.report.statement.page import as_markdown
from rayfed.report.terminal import run
from rayfed.report.terminal.run import RunView
from rayfed.report.terminal.sweep import SweepView
from rayfed.report.text import recommendation
from rayfed.results.loading import open_results
from rayfed.store.exits import read_status
from rayfed.version import __version__
from tests.helpers.report_fixtures import make_sweep
from tests.helpers.result_fixtures import small_sweep
from tests.wording.runs import Case

CPU = "resources: {clients: {num_gpus: 0}, attackers: {num_gpus: 0}}"
STARTED = scenarios.parse(f"{{name: t, federation: {{rounds: 1, clients: 2}}, {CPU}}}")
BLOCKS = {
    "p", "h1", "h2", "h3", "h4", "li", "tr", "summary", "figure", "figcaption", "dt", "dd", "caption", "title",
}  # fmt: skip
"""Elements that begin a line of a page's text."""
UNSEEN = {"script", "style", "svg", "pre"}
SPACED = {"a", "button", "label", "option", "small"}
"""Inline elements that are apart from the text before them."""
ELLIPSIS = "[...]"
MASKS = (
    (r"-?\d{4}\d{2}\d{2}-\d{6}(-\w+)?", ""),
    (r"\b[0-9a-f]{64}\b", "HASH"),
    (r"data:image/png;base64,[\w+/=]+", "PNG"),
    (re.escape(__version__), "VERSION"),
)
"""Patterns of values that change from run to run, and their replacements."""


def mask(text: str, folder: str) -> str:
    """Replace paths, times, hashes and the version in a text."""
    text = text.replace(folder, "RUNS")
    for pattern, replacement in MASKS:
        text = re.sub(pattern, replacement, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _in_sections(cases: Sequence[Case], texts: Sequence[str]) -> str:
    """Return the texts under headings. Lines that were shown before are replaced by one ellipsis."""
    known: set[str] = set()
    lines: list[str] = []
    for case, text in zip(cases, texts, strict=True):
        lines += ["", f"=== {case.name} ==="]
        for line in text.strip().splitlines():
            if line not in known:
                lines.append(line)
            elif lines[-1] != ELLIPSIS:
                lines.append(ELLIPSIS)
            known.add(line)
    return "\n".join(lines[1:])


def terminal(cases: Sequence[Case]) -> str:
    """Return the terminal output at the end of each run, or at its interruption."""
    return _in_sections(cases, [_printed(case) for case in cases])


def _printed(case: Case) -> str:
    output = StringIO()
    view = RunView(Console(file=output, width=200))
    view.starting(STARTED, case.folder, "here")
    view._scenario = case.folder.scenario()
    tables = [case.folder.read_table(name).to_pylist() for name in ("rounds", "attacks", "inferences")]
    view.accounted(case.folder.read_table("privacy").to_pylist())
    if read_status(case.folder)["state"] != "finished":
        view.interrupted("training")
        view.interrupted("attack")
        view.stopped("killed", "training")
    else:
        view.round_done(*tables)
        view.finished("report.html")
    return output.getvalue()


class _VisibleText(HTMLParser):
    """Visible text of a page, one paragraph, heading, list item or table row per line."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.lines = [""]
        self.unseen = 0
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.unseen += tag in UNSEEN
        if tag in BLOCKS:
            self.lines.append("")
        elif tag in ("td", "th") and self.lines[-1]:
            self.lines[-1] += " | "
        elif tag in SPACED:
            self.lines[-1] += " "

    def handle_endtag(self, tag: str) -> None:
        self.unseen -= tag in UNSEEN
        if tag in BLOCKS:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if not self.unseen:
            self.lines[-1] += data


def _visible(source: str) -> str:
    lines = (" ".join(line.split()) for line in _VisibleText(source).lines)
    return "\n".join(line for line in lines if line)


def page(cases: Sequence[Case]) -> str:
    """Return the visible text of the report of each run."""
    texts = []
    for case in cases:
        write_report(case.folder)
        texts.append(_visible(case.folder.read_text("report.html")))
    return _in_sections(cases, texts)


def statement(cases: Sequence[Case]) -> str:
    """Return the statement on each run."""
    answers = {"system": "A ward", "people": "40 patients"}
    return _in_sections(cases, [as_markdown(Statement(case.folder, answers, case.folder)) for case in cases])


def gate(cases: Sequence[Case]) -> str:
    """Return the result of a gate on each run."""
    texts = []
    for case in cases:
        gated = GatedRun(case.folder, "untrained weights")
        bounds = parse_bounds(list(case.bounds), gated.evidence.modality, gated.evidence.measures)
        texts.append("\n".join([*Ruling([gated], bounds).lines, gated.next_step]))
    return _in_sections(cases, texts)


def tables(cases: Sequence[Case]) -> str:
    """Return the exported table of results of each run, and the tables of a sweep."""
    texts = [export_table(open_results(case.folder.url), "markdown") for case in cases]
    latex = export_table(open_results(cases[0].folder.url), "latex").splitlines()
    captions = [line for line in latex if line.startswith("\\caption")]
    return "\n".join([_in_sections(cases, texts), *captions])


def sweep() -> str:
    """Return the page, the terminal output, the recommendations and the tables of a sweep."""
    with TemporaryDirectory() as folder:
        made, simple = make_sweep(folder, sigmas=3, repeats=2), small_sweep(Path(folder))
        status = {"state": "interrupted", "trials_done": 2, "trials": 5, "unplayed": ["noise, sigma 1", "none"]}
        made.files.write_text("status.json", json.dumps(status))
        write_sweep_report(made)
        rows = simple.outcomes().to_pylist()
        output = StringIO()
        SweepView(Console(file=output, width=200)).finished(rows, simple.fields, "report.html")
        results = open_results(simple.url)
        texts = {
            "page": _visible(made.files.read_text("report.html")),
            "terminal": output.getvalue(),
            "recommendation": "\n".join(_recommended(rows, simple.fields)),
            "unfinished": str(open_results(make_sweep(f"{folder}/whole", 2, 1).url).unfinished),
            "table": export_table(results, "markdown"),
            "paired differences": export_table(results, "markdown", "paired"),
        }
        return mask("\n".join(f"=== {name} ===\n{text.strip()}\n" for name, text in texts.items()), folder)


def _recommended(rows: Sequence[Row], fields: Sequence[str]) -> Iterator[str]:
    """Return a recommendation that satisfies the bounds, and one that exceeds them."""
    for limit in (15, 1):
        found = recommend_setting(
            group_settings(rows, fields), [parse_bound(f"psnr<={limit}"), parse_bound("test_accuracy>=0.9")]
        )
        yield recommendation.recommendation_text(found)
        yield from (" | ".join(recommendation.check_cells(check)) for check in found.chosen.checks)
        yield from recommendation.remarks(found)


def progress() -> str:
    """Return the terminal output during a run, with a clock that the test sets."""
    clock, output = [0.0], StringIO()
    with patch.object(run, "monotonic", lambda: clock[0]):
        view = RunView(Console(file=output, width=200), bar=False)
        view.pulse()
        view._begin_bar("starting actors")
        for clock[0] in (10.0, 20.0, 30.0):
            view.pulse()
        view.ready(0)
        for clock[0], clients in ((31.0, 1), (50.0, 2)):
            view.clients_done(0, clients, 3)
        clock[0] = 170.0
        view.pulse()
        clock[0] = 190.0
        view.observations_done(0, 3, 3)
        waiting, done = ["closed", "search", "long"], [("closed", 1.0), ("search", 19.0)]
        for place, clock[0] in enumerate((191.0, 211.0, 230.0)):
            view.attacks_done(0, done[:place], waiting[place:])
        clock[0] = 250.0
        view.search_goes_on(0, "long", "none", Standing(2, 100, 400, 0.25, 10.0))
        view.deadline, best = 300.0, {"none": "29.0 dB", "noise": "9.1 dB"}
        view.best_so_far(best)
        clock[0] = 270.0
        view.search_goes_on(0, "long", "none", Standing(2, 200, 400, 0.2, 20.0))
        view.pass_done(100, {True: 38.0, False: 12.0}, 200, best)
        view.pass_done(200, {True: 80.0, False: 0.0}, None, best)
        view.close()
        clock[0] = 400.0
        view.pulse()
    return output.getvalue()
