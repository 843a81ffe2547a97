"""Output of reproductions: JSON records, pages and their summary."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from rayfed.core.documents import read_json
from rayfed.errors import RunError
from rayfed.report.text.formats import NONE
from rayfed.reproductions.judging import MEANING, Judgement, Verdict, overall
from rayfed.reproductions.measuring import Finding
from rayfed.reproductions.reading import Reproduction, Scale

SUMMARY = "README.md"
HEADINGS = ("", "paper", "ours")
RANKED = "the paper gives only an order: its column has ranks, 1 for the lowest"


def made_with() -> str:
    """Return the environment on which results may depend: versions of packages and number of cores."""
    return f"rayfed {version('rayfed')}, torch {version('torch')}, {os.cpu_count()} cores"


@dataclass(frozen=True)
class Record:
    """Results of one reproduction."""

    name: str
    reproduction: Reproduction
    scale: Scale
    date: str
    """Day of the comparison, ISO."""
    made_with: str
    """Versions and cores, see `made_with`."""
    judgements: list[Judgement]
    seconds: float | None
    """Wall time of the run (s); None for an earlier run."""
    scenario: str = ""
    """YAML of the scenario; empty without one."""
    changes: tuple[str, ...] = ()
    """Changes made with `--set`."""

    @property
    def verdict(self) -> Verdict:
        """Return the least favourable verdict of the groups."""
        return overall([each.verdict for each in self.judgements])

    def document(self) -> dict[str, Any]:
        """Return the record as plain data, from which pages are written."""
        own = self.reproduction
        return {
            "name": self.name,
            "title": own.title,
            "paper": own.paper.model_dump(),
            "claim": own.claim,
            "remarks": own.remarks,
            "scale": self.scale,
            "verdict": self.verdict,
            "date": self.date,
            "seconds": None if self.seconds is None else round(self.seconds),
            "made_with": self.made_with,
            "changes": list(self.changes),
            "groups": [
                {
                    "title": each.group.title,
                    "tolerance": each.group.tolerance,
                    "relative_to": each.group.relative_to,
                    "ranked": each.group.ranked,
                    "true_measure": each.group.true_measure,
                    "verdict": each.verdict,
                    "because": each.because,
                    "figures": [asdict(finding) for finding in each.findings],
                }
                for each in self.judgements
            ],
            "absent": [each.model_dump() for each in own.not_compared(self.scale)],
            "scenario": self.scenario,
        }


def rows(findings: Iterable[Finding]) -> list[tuple[str, str, str]]:
    """Return one table row per value under `HEADINGS`, with our true value if the paper has its own convention."""
    return [_row(asdict(finding)) for finding in findings]


def page(record: dict[str, Any]) -> str:
    """Return the Markdown page of a record."""
    return "\n".join(_page(record))


def summary(records: Sequence[dict[str, Any]], known: Iterable[str] = ()) -> str:
    """Return the summary page of all records, with a list of the `known` reproductions that have no record."""
    counts = Counter(each["verdict"] for each in records)
    lines = [
        "# Reproduced tables and figures of papers",
        "",
        "Written by `rayfed reproduce` from the records in this folder. Verdicts, with their numbers:",
        "",
        *(f"- **{verdict}** ({counts[verdict]}): {meaning}." for verdict, meaning in MEANING.items()),
        "",
        "| reproduction | paper | verdict | comparisons | run | minutes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in records:
        compared = "; ".join(f"{_cell(group['title'])}: {group['verdict']}" for group in each["groups"]) or NONE
        lines.append(
            f"| [{each['name']}]({each['name']}.md) | {_cell(each['paper']['name'])}, {_cell(each['paper']['place'])} "
            f"| {each['verdict']} | {compared} | {each['scale']}, {each['date']} | {_minutes(each)} |"
        )
    lines += ["", "## Not reproduced", "", "| reproduction | part | reason |", "| --- | --- | --- |"]
    lines += [
        f"| [{each['name']}]({each['name']}.md) | {_cell(absent['what'])} | {_cell(absent['why'])} |"
        for each in records
        for absent in each["absent"]
    ]
    if waiting := [name for name in known if name not in {each["name"] for each in records}]:
        lines += ["", "## Not run yet", "", "Run them with `rayfed reproduce NAME --reduced`.", ""]
        lines += [f"- {name}" for name in waiting]
    return "\n".join(lines) + "\n"


def write(folder: Path, record: dict[str, Any], known: Iterable[str] = ()) -> None:
    """Write a record and the record's page into a folder, and rewrite the folder's summary; see `summary`.

    Raises `RunError` for a damaged record in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (folder / f"{record['name']}.json").write_text(text, encoding="utf-8")
    (folder / f"{record['name']}.md").write_text(page(record), encoding="utf-8")
    (folder / SUMMARY).write_text(summary(records(folder), known), encoding="utf-8")


def records(folder: Path) -> list[dict[str, Any]]:
    """Return all records of a folder by name. Raises `RunError` for a damaged record."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(cast(dict[str, Any], read_json(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read '{path}': {error}; rerun the reproduction") from error
    return found


def _page(record: dict[str, Any]) -> Iterator[str]:
    command = " ".join(["rayfed reproduce", record["name"], *(["--reduced"] if record["scale"] == "reduced" else [])])
    yield f"# {record['title']}\n"
    yield f"{record['paper']['name']}, {record['paper']['place']}: {record['claim']}\n"
    yield f"**{record['verdict'].capitalize()}.**\n"
    if record["scenario"]:
        took = "" if record["seconds"] is None else f" in {_minutes(record)} minutes"
        yield f"Written by `{command}` on {record['date']}{took} with {record['made_with']}.\n"
    if record["changes"]:
        yield f"Changed with `--set`: {', '.join(f'`{change}`' for change in record['changes'])}.\n"
    if record["remarks"]:
        yield f"{record['remarks'].strip()}\n"
    for group in record["groups"]:
        relative = f", relative to {group['relative_to']}" if group["relative_to"] else ""
        yield f"## {group['title']}{relative}\n"
        yield f"| {' | '.join(HEADINGS)} |\n| --- | ---: | ---: |"
        yield from (f"| {' | '.join(map(_cell, _row(figure)))} |" for figure in group["figures"])
        because = f" ({group['because']})" if group["because"] else ""
        terms = RANKED if group.get("ranked") else f"tolerance {group['tolerance']:g}"
        if group.get("true_measure"):
            terms += f"; true: `{group['true_measure']}` of the same images"
        yield f"\n{group['verdict'].capitalize()}{because}; {terms}.\n"
    if record["absent"]:
        yield "## Not reproduced\n"
        yield from (f"- {absent['what']}: {absent['why']}" for absent in record["absent"])
        yield ""
    if record["scenario"]:
        yield f"## The scenario\n\n```yaml\n{record['scenario'].strip()}\n```\n"


def _row(figure: dict[str, Any]) -> tuple[str, str, str]:
    """Return a figure's table line from its record."""
    paper, ours = f"{figure['paper']:.4g}", figure["ours"]
    if figure["paper"] != figure["printed"]:
        paper = f"{paper} (printed {figure['printed']:g})"
    if ours is None:
        return figure["label"], paper, figure["why"]
    said = f"{ours['mean']:.4g}"
    if ours["high"] is not None:
        said += f" ± {ours['high'] - ours['mean']:.2g}"
    beside = {"true": figure.get("ours_true"), "default attack": figure.get("default_attack")}
    if shown := [f"{name} {value:.4g}" for name, value in beside.items() if value is not None]:
        said += f" ({', '.join(shown)})"
    return figure["label"], paper, said


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _minutes(record: dict[str, Any]) -> str:
    return NONE if record["seconds"] is None else f"{record['seconds'] / 60:.1f}"
