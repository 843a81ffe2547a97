"""Write the first page of the findings from its records, and add a defence to them.

    python docs/findings.py                    # docs/findings/: index.md, defences.json, defences.parquet
    python docs/findings.py --add RUN --arm NAME [--paper TEXT] [--claim TEXT]

`docs/findings/records.json` holds what was measured: the runs with their command and commit (null: not recorded), and
for each defence one cell for each column. A cell is a list of parts; each names its run, or a figure of a reproduction
in `docs/reproductions/`. Null is "not measured". RUN is the folder of a run, such as one of `rayfed attack
every_defence`: its arm NAME gets a row. A test fails when the files are not what the records make.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

import rayfed
from rayfed.core.shipped import find_shipped
from rayfed.errors import UserError
from rayfed.evidence.settings import MeanEstimate
from rayfed.metrics import roc
from rayfed.reproductions.findings import Finding
from rayfed.reproductions.pages import NAMES
from rayfed.reproductions.reading import load
from rayfed.reproductions.records import read_record
from rayfed.reproductions.results import result_of

FOLDER = Path(__file__).resolve().parent / "findings"
REPRODUCTIONS = FOLDER.parent / "reproductions"
COLUMNS = {
    "replayed": "attacker of its paper, replayed",
    "blind": "blind attacker",
    "informed": "informed attacker",
    "accuracy": "accuracy",
    "bytes": "bytes up",
    "seconds": "time of a step",
}
"""Column of the records -> its heading on the page."""
MISSING = "not measured"
UNKNOWN = "not looked up"
UNRECORDED = "commit not recorded"
RECORD = "record"
"""Place of the commit of a reproduction, whose record has it."""
INFORMED = {"defence", "code"}
"""Grants that tell an attacker of the defence."""

HEADER = """\
---
hide: [toc]
---

# What each defence buys, and what it costs

Made by `python docs/findings.py` from [`records.json`](records.json), one row for every defence that has a record.
The same as [JSON](defences.json) and as [Parquet](defences.parquet), with a row for every figure.

Read a row from left to right. What does the paper claim, and where? What does the attacker of that paper get here? What
do rayfed's own attackers get without knowledge of the defence (*blind*), and with it (*informed*)? What does it cost?

Leakage is the mean PSNR in dB to the client's own image, unless a cell says otherwise; higher is nearer, and a guess
without an update has about 13.5 dB. An image is *told apart* where it came out nearer to itself than to any other, by
the attack that tells most of them apart. Brackets with two figures are 95 % intervals: over seeds, or exact for a share
of images. Accuracy is against no defence in the same run. Bytes and time are multiples of those without a defence.

The link after each figure leads to its run, [below](#runs). Its text is the commit or version of the run, or
*record* for a reproduction. 0.1.0 is 5475aa4 or a commit before it.

What a low figure does not say: that a stronger attack would get no more. Attackers of 0.1.0 find less than those of
today, so a low figure of theirs is no merit of the defence. An (epsilon, delta) alone holds against
every attack ([threat models](../threat-models.md)). Settings and models differ from row to row, so compare rows of
one run alone.
"""
ADD = """\
## Add a defence

Play the attackers of `every_defence` on your defence, beside no defence, and add the arm:

```
rayfed attack every_defence --set 'arms={none: [], mine: [{name: "my_defences:Mine"}]}'
python docs/findings.py --add runs/every_defence-<time> --arm mine --paper "Name, year" --claim "what it claims"
```

`rayfed launch` in place of `rayfed attack` measures accuracy, bytes and time as well. Attackers with `knowledge:
[defence]` or `[code]` count as informed, all others as blind.
"""


def made(records: dict[str, Any]) -> tuple[str, list[dict[str, Any]], pa.Table]:
    """Return the page, what the JSON file holds, and the Parquet file's table."""
    runs = dict(records["runs"])
    rows = [_row(record, runs) for record in records["defences"]]
    return "\n".join(_page(rows, runs)) + "\n", rows, _table(rows)


def _row(record: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a record with each cell as a list of parts, spelled out with the command and commit of their runs."""
    row: dict[str, Any] = {name: record[name] for name in ("name", "paper", "claim", "place")}
    for column in COLUMNS:
        row[column] = [_part(part, runs) for part in record.get(column) or [None]]
    return row


def _part(part: dict[str, Any] | None, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    empty = dict.fromkeys(("text", "value", "unit", "attacker", "run", "command", "commit"))
    if part is None:
        return empty | {"text": MISSING}
    if "reproduction" in part:
        part = _reproduced(part, runs)
    if part is None:
        return empty | {"text": MISSING}
    run = runs[part["run"]]
    return empty | part | {"command": run["command"], "commit": run["commit"]}


def _reproduced(part: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the part of a figure that a reproduction measured, or None without a measurement; note it among the
    runs."""
    name = part["reproduction"]
    own = load(find_shipped("reproductions") / f"{name}.yaml")
    best = result_of(name, own, read_record(REPRODUCTIONS, name)).best
    assert best is not None
    same = [one for one in best.judgements if one.group.title == part["group"]]
    figures = {finding.label: finding for one in same for finding in one.findings if finding.measured}
    if not {part["label"], part.get("against", part["label"])} <= figures.keys():
        return None
    ours, unit, images = _estimate(figures[part["label"]]), part["unit"], part.get("images")
    runs[name] = {
        "command": f"rayfed reproduce {name} --size {best.size}",
        "commit": RECORD,
        "page": f"../reproductions/{name}.md",
        "what": f"{own.paper.name}, {own.paper.place}; {NAMES[best.paper.verdict]}",
    }
    measured = _hits(ours, images) if images else _mean(ours, unit)
    texts = [f"{part['by']}: {measured}"]
    if "against" in part:
        plain = _estimate(figures[part["against"]]).mean
        texts.append(f"undefended {_share(plain, images) if images else _number(plain)}")
    if not images:  # a paper that has an order alone has places for figures
        texts.append(f"paper {_number(figures[part['label']].paper)}")
    return {
        "text": ", ".join(texts),
        "value": ours.mean,
        "unit": unit,
        "attacker": part["attacker"],
        "run": name,
    }


def _estimate(finding: Finding) -> MeanEstimate:
    assert finding.ours is not None
    return finding.ours


def _mean(ours: MeanEstimate, unit: str) -> str:
    """Return a mean with its interval, cut at 0, which none of these measures goes below."""
    symbol = f" {unit}" if unit == "dB" else ""
    if ours.low is None or ours.high is None:
        return f"{_number(ours.mean)}{symbol}"
    return f"{_number(ours.mean)}{symbol} ({_number(max(ours.low, 0.0))} to {_number(ours.high)})"


def _hits(ours: MeanEstimate, images: int) -> str:
    """Return a share in per cent as a count of images, with its exact interval."""
    exact = roc.share(round(ours.mean * images / 100), images)
    return f"{_share(ours.mean, images)} ({100 * exact.low:.0f} to {100 * exact.high:.0f} %)"


def _share(percent: float, images: int) -> str:
    return f"{round(percent * images / 100)} of {images}"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _page(rows: list[dict[str, Any]], runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield HEADER
    yield f"| defence | its paper claims | {' | '.join(COLUMNS.values())} |"
    yield f"| --- | --- | {' | '.join('---' for _ in COLUMNS)} |"
    for row in rows:
        cells = ["; ".join(_shown(part) for part in row[column]) for column in COLUMNS]
        yield f"| `{row['name']}`, {row['paper']} | {_claimed(row)} | {' | '.join(cells)} |"
    yield f"\n{ADD}"
    yield "## Runs\n"
    used = {part["run"] for row in rows for column in COLUMNS for part in row[column]}
    for name, run in runs.items():
        if name in used:
            where = f"[described here]({run['page']})" if run.get("page") else "described nowhere else"
            at = f"At {run['commit']}" if run["commit"] else UNRECORDED.capitalize()
            at = "As recorded" if run["commit"] == RECORD else at
            command = f"```\n{run['command']}\n```" if run["command"] else "Command not recorded."
            yield f"### `{name}`\n\n{run['what']}. {at}, {where}.\n\n{command}\n"


def _claimed(row: dict[str, Any]) -> str:
    """Return the claim and its place in the paper."""
    if row["claim"] == UNKNOWN:
        return UNKNOWN
    place = f"place {UNKNOWN}" if row["place"] == UNKNOWN else row["place"]
    return f"{row['claim']} ({place})"


def _shown(part: dict[str, Any]) -> str:
    """Return a part's text with a link to its run."""
    if part["run"] is None:
        return str(part["text"])
    return f"{part['text']} [{(part['commit'] or UNRECORDED).split(',')[0]}](#{_anchor(part['run'])})"


def _anchor(name: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return "".join(c for c in name.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return a row for each part of a cell, and for each claim."""
    parts = [
        {"defence": row["name"], "paper": row["paper"], "column": column, **part}
        for row in rows
        for column in COLUMNS
        for part in row[column]
    ]
    claims = [
        {"defence": row["name"], "paper": row["paper"], "column": "claim", "text": row["claim"], "place": row["place"]}
        for row in rows
    ]
    text = ("defence", "paper", "column", "text", "place", "unit", "attacker", "run", "command", "commit")
    schema = pa.schema([(name, pa.string()) for name in text] + [("value", pa.float64())])
    return pa.Table.from_pylist([*claims, *parts], schema=schema)


def added(records: dict[str, Any], folder: Path, arm: str, paper: str, claim: str) -> dict[str, Any]:
    """Return the records with a row for an arm of a run.

    Raises `UserError` where the run has no such arm, or the arm has a row already.
    """
    run = rayfed.load(folder)
    outcomes = run.outcomes().to_pandas()
    rows, plain = outcomes[outcomes["arm"] == arm], outcomes[outcomes["defences"] == ""]
    if rows.empty:
        raise UserError(f"the run has no arm '{arm}': name one of {', '.join(outcomes['arm'].unique())}")
    if arm in {record["name"] for record in records["defences"]}:
        raise UserError(f"'{arm}' has a row already: give the arm of the scenario another name")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    name = folder.name
    code = environment["hashes"]["code"]["rayfed"][:12]
    played = {
        "command": f"rayfed {environment['command'].partition(' ')[2]}".strip(),
        "commit": f"{environment['rayfed']}, code {code}",
        "what": f"Played {environment['started'][:10]}, seed {environment['seed']}",
    }
    new = {"name": arm, "paper": paper, "claim": claim, "place": UNKNOWN} | _measured(rows, plain, name)
    return {"runs": records["runs"] | {name: played}, "defences": [*records["defences"], new]}


def _measured(rows: pd.DataFrame, plain: pd.DataFrame, run: str) -> dict[str, list[dict[str, Any]] | None]:
    """Return the cells of an arm: the best of blind and of informed attacks, and the costs beside the plain arm's."""
    informed = rows["knowledge"].map(lambda names: names is not None and bool(INFORMED & set(names)))
    cells: dict[str, list[dict[str, Any]] | None] = {
        "replayed": None,
        "blind": _leakage(rows[~informed], run),
        "informed": _leakage(rows[informed], run),
    }
    for column, measure, unit in (
        ("accuracy", "test_accuracy", "points"),
        ("bytes", "bytes_up", "times"),
        ("seconds", "train_seconds", "times"),
    ):
        ours, theirs = rows[measure].iloc[0], plain[measure].iloc[0] if len(plain) else float("nan")
        if pd.isna(ours) or pd.isna(theirs):
            cells[column] = None
        elif unit == "points":
            points = 100 * (ours - theirs)
            text = f"{100 * ours:.1f} % where plain has {100 * theirs:.1f} %"
            cells[column] = [{"text": text, "value": points, "unit": unit, "run": run}]
        else:
            cells[column] = [{"text": _number(ours / theirs), "value": ours / theirs, "unit": unit, "run": run}]
    return cells


def _leakage(rows: pd.DataFrame, run: str) -> list[dict[str, Any]] | None:
    """Return the cell of the attack with the highest mean PSNR; None where none was scored."""
    scored = rows.dropna(subset=["psnr"])
    if scored.empty:
        return None
    best = scored.loc[scored["psnr"].idxmax()]
    text = f"`{best['attack']}`: {best['psnr']:.1f} dB"
    return [{"text": text, "value": float(best["psnr"]), "unit": "dB", "attacker": best["attack"], "run": run}]


def write(records: dict[str, Any], folder: Path) -> None:
    """Write the page, the JSON file and the Parquet file."""
    page, rows, table = made(records)
    (folder / "index.md").write_text(page, encoding="utf-8")
    (folder / "defences.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pq.write_table(table, folder / "defences.parquet")


def main() -> None:
    """Read the records, add a run to them if one is given, and write what they make."""
    parser = argparse.ArgumentParser(description="Write the first page of the findings from its records.")
    parser.add_argument("--add", type=Path, metavar="RUN", help="the folder of a run, one of whose arms gets a row")
    parser.add_argument("--arm", metavar="NAME", help="the arm that gets a row, required with --add")
    parser.add_argument("--paper", default="unpublished", help="authors and year")
    parser.add_argument("--claim", default=UNKNOWN, help="what the paper claims")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where records.json lies and files are written")
    given = parser.parse_args()
    path = given.folder / "records.json"
    records = json.loads(path.read_text(encoding="utf-8"))
    if given.add:
        if given.arm is None:
            parser.error("--add needs --arm: name the arm that gets a row")
        try:
            records = added(records, given.add, given.arm, given.paper, given.claim)
        except UserError as error:
            parser.error(str(error))
        path.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write(records, given.folder)


if __name__ == "__main__":
    main()
