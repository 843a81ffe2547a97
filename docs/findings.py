"""Write the first page of the findings from its records, and add a defence to them.

    python docs/findings.py                    # docs/findings/: index.md, defences.json, defences.parquet
    python docs/findings.py --add RUN [--paper TEXT] [--claim TEXT]

`docs/findings/records.json` holds what was measured: the runs with their command and commit, and for each defence one
cell for each column. A cell names its run, or a figure of a reproduction in `docs/reproductions/`; null is "not
measured". RUN is the folder of a run, such as one of `rayfed attack scenarios/every_defence.yaml`: each of its arms
that has no row yet gets one. A test fails when the files are not what the records make.
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

FOLDER = Path(__file__).resolve().parent / "findings"
REPRODUCTIONS = FOLDER.parent / "reproductions"
COLUMNS = {
    "replayed": "attacker of its paper, replayed",
    "informed": "informed attacker",
    "accuracy": "accuracy",
    "bytes": "bytes up",
    "seconds": "time of a step",
}
"""Column of the records -> its heading on the page."""
MISSING = "not measured"
INFORMED = {"defence", "code"}
"""Grants that tell an attacker of the defence."""

HEADER = """\
---
hide: [toc]
---

# What each defence buys, and what it costs

Made by `python docs/findings.py` from [`records.json`](records.json), one row for every published defence that rayfed
has. The same as [JSON](defences.json) and as [Parquet](defences.parquet), with a row for every cell.

Read a row from left to right. What does the paper claim? What does the attacker of that paper get here? What does an
attacker get who knows the defence? What does it cost? Leakage is the mean PSNR in dB to the client's own image,
unless a cell says otherwise; higher is nearer, and a guess without an update has about 13.5 dB. *Blind* stands before
a figure of rayfed's own attackers, who know nothing of the defence, where its paper's attacker was not replayed.
Accuracy is against no defence in the same run. Bytes and time are multiples of those without a defence. Behind
each cell stands the commit or version that it was measured at, and leads to the run, [below](#runs). Where nobody has
measured, it says so.

What a low figure does not say: that a stronger attack would get no more. Attackers of 0.1.0 find less than those of
today, so a low figure of theirs is no merit of the defence. An (epsilon, delta) alone holds against
every attack ([threat models](../threat-models.md)). Settings and models differ from row to row, so compare rows of
one run alone.
"""
ADD = """\
## Add a defence

Put an arm with your defence beside `none` into a copy of `scenarios/every_defence.yaml`, play it, and add the run:

```
rayfed new mine --from every_defence
rayfed attack mine.yaml
python docs/findings.py --add runs/mine-<time> --paper "Name, year" --claim "what it claims"
```

`rayfed launch` in place of `rayfed attack` measures accuracy, bytes and time as well. Attackers with `knowledge:
[defence]` or `[code]` count as informed, all others as blind.
"""


def made(records: dict[str, Any]) -> tuple[str, list[dict[str, Any]], pa.Table]:
    """Return the page, what the JSON file holds, and the Parquet file's table."""
    runs = dict(records["runs"])
    rows = [_row(record, runs) for record in records["defences"]]
    return "\n".join(_page(rows, runs)) + "\n", rows, _table(rows)


def _row(record: dict[str, Any], runs: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return a record with each cell spelled out: text, value, unit, and the command and commit of its run."""
    row: dict[str, Any] = {name: record[name] for name in ("name", "paper", "claim")}
    for column in COLUMNS:
        row[column] = _cell(record.get(column), runs)
    return row


def _cell(cell: dict[str, Any] | None, runs: dict[str, dict[str, str]]) -> dict[str, Any]:
    if cell is None:
        return {"text": MISSING, "value": None, "unit": None, "run": None, "command": None, "commit": None}
    if "reproduction" in cell:
        cell = _reproduced(cell, runs)
    run = runs[cell["run"]]
    numbers = {name: cell.get(name) for name in ("value", "unit")}
    return {"text": cell["text"], **numbers, "run": cell["run"], "command": run["command"], "commit": run["commit"]}


def _reproduced(cell: dict[str, Any], runs: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return the cell of a figure that a reproduction measured, and note the reproduction among the runs."""
    name = cell["reproduction"]
    record = json.loads((REPRODUCTIONS / f"{name}.json").read_text(encoding="utf-8"))
    figures = {f["label"]: f for g in record["groups"] if g["title"] == cell["group"] for f in g["figures"]}
    ours, unit = figures[cell["label"]]["ours"], cell["unit"]
    runs[name] = {
        "command": f"rayfed reproduce {name} --{record['scale']}",
        "commit": record["made_with"].split(",")[0].removeprefix("rayfed "),
        "page": f"../reproductions/{name}.md",
        "what": f"{record['paper']['name']}, {record['paper']['place']}; {record['verdict']}, {record['date']}",
    }
    beside = []
    if "against" in cell:
        beside.append(f"undefended {_number(figures[cell['against']]['ours']['mean'])}")
    if not cell.get("order"):  # a paper that has an order alone has places for figures
        beside.append(f"paper {_number(figures[cell['label']]['paper'])}")
    half = (ours["high"] - ours["low"]) / 2
    measured = f"{cell['by']}: {_number(ours['mean'])} ± {_number(half)} {unit}".rstrip()
    text = f"{measured} ({', '.join(beside)})" + (f"; {cell['note']}" if "note" in cell else "")
    return {"text": text, "value": ours["mean"], "unit": unit or cell["by"], "run": name}


def _number(value: float) -> str:
    return f"{value:.3g}"


def _page(rows: list[dict[str, Any]], runs: dict[str, dict[str, str]]) -> Iterator[str]:
    yield HEADER
    yield f"| defence | its paper claims | {' | '.join(COLUMNS.values())} |"
    yield f"| --- | --- | {' | '.join('---' for _ in COLUMNS)} |"
    for row in rows:
        cells = [_shown(row[column]) for column in COLUMNS]
        yield f"| `{row['name']}`, {row['paper']} | {row['claim']} | {' | '.join(cells)} |"
    yield f"\n{ADD}"
    yield "## Runs\n"
    used = {row[column]["run"] for row in rows for column in COLUMNS}
    for name, run in runs.items():
        if name in used:
            where = f"[described here]({run['page']})" if run.get("page") else "described nowhere else"
            yield f"### `{name}`\n\n{run['what']}. At {run['commit']}, {where}.\n\n```\n{run['command']}\n```\n"


def _shown(cell: dict[str, Any]) -> str:
    return cell["text"] if cell["run"] is None else f"{cell['text']} [{cell['commit']}](#{_anchor(cell['run'])})"


def _anchor(name: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return "".join(c for c in name.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return a row for each cell of the table, the claims among them."""
    cells = [
        {"defence": row["name"], "paper": row["paper"], "column": column, **row[column]}
        for row in rows
        for column in COLUMNS
    ]
    claims = [{"defence": row["name"], "paper": row["paper"], "column": "claim", "text": row["claim"]} for row in rows]
    text = ("defence", "paper", "column", "text", "unit", "run", "command", "commit")
    schema = pa.schema([(name, pa.string()) for name in text] + [("value", pa.float64())])
    return pa.Table.from_pylist([*claims, *cells], schema=schema)


def added(records: dict[str, Any], folder: Path, paper: str, claim: str) -> dict[str, Any]:
    """Return the records with a row for each arm of a run that has a defence and no row yet."""
    run = rayfed.load(folder)
    outcomes = run.outcomes().to_pandas()
    known = {record["name"] for record in records["defences"]}
    arms = [arm for arm in outcomes["arm"].unique() if arm not in known]
    arms = [arm for arm in arms if _of(outcomes, arm)["defences"].iloc[0]]
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    name = folder.name
    code = environment["hashes"]["code"]["rayfed"][:12]
    played = {
        "command": f"rayfed {environment['command'].partition(' ')[2]}".strip(),
        "commit": f"{environment['rayfed']}, code {code}",
        "what": f"Played {environment['started'][:10]}, seed {environment['seed']}",
    }
    plain = outcomes[outcomes["defences"] == ""]
    new = [{"name": arm, "paper": paper, "claim": claim} | _measured(_of(outcomes, arm), plain, name) for arm in arms]
    return {"runs": records["runs"] | {name: played}, "defences": [*records["defences"], *new]}


def _of(outcomes: pd.DataFrame, arm: str) -> pd.DataFrame:
    return outcomes[outcomes["arm"] == arm]


def _measured(rows: pd.DataFrame, plain: pd.DataFrame, run: str) -> dict[str, dict[str, Any] | None]:
    """Return the cells of an arm: the best of blind and of informed attacks, and the costs beside the plain arm's."""
    told = rows["knowledge"].fillna("").map(lambda names: bool(INFORMED & set(names.split(","))))
    cells: dict[str, dict[str, Any] | None] = {
        "replayed": _leakage(rows[~told], run, "blind"),
        "informed": _leakage(rows[told], run, "informed"),
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
            cells[column] = {"text": text, "value": points, "unit": unit, "run": run}
        else:
            cells[column] = {"text": _number(ours / theirs), "value": ours / theirs, "unit": unit, "run": run}
    return cells


def _leakage(rows: pd.DataFrame, run: str, who: str) -> dict[str, Any] | None:
    """Return the cell of the attack with the highest mean PSNR; None where none was scored."""
    scored = rows.dropna(subset=["psnr"])
    if scored.empty:
        return None
    best = scored.loc[scored["psnr"].idxmax()]
    text = f"{who} `{best['attack']}`: {best['psnr']:.1f} dB"
    return {"text": text, "value": float(best["psnr"]), "unit": "dB", "run": run}


def write(records: dict[str, Any], folder: Path) -> None:
    """Write the page, the JSON file and the Parquet file."""
    page, rows, table = made(records)
    (folder / "index.md").write_text(page, encoding="utf-8")
    (folder / "defences.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pq.write_table(table, folder / "defences.parquet")


def main() -> None:
    """Read the records, add a run to them if one is given, and write what they make."""
    parser = argparse.ArgumentParser(description="Write the first page of the findings from its records.")
    parser.add_argument("--add", type=Path, metavar="RUN", help="the folder of a run whose new arms get a row")
    parser.add_argument("--paper", default="unpublished", help="authors and year, of the arms that are added")
    parser.add_argument("--claim", default="not stated", help="what the paper claims")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where records.json lies and files are written")
    given = parser.parse_args()
    path = given.folder / "records.json"
    records = json.loads(path.read_text(encoding="utf-8"))
    if given.add:
        records = added(records, given.add, given.paper, given.claim)
        path.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write(records, given.folder)


if __name__ == "__main__":
    main()
