"""Label inference in a sweep: the share of labels recovered, by batch size.

Source: Ren 2022 (thesis), table 3.13.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from rayfed.analysis.formats import NONE
from rayfed.evidence.settings import Estimate, Setting, estimate
from rayfed.report.text.figures import cell_text
from rayfed.report.text.tables import OF_TWO, SINGLE, Grid

_MEASURE = "label_accuracy"


def by_batch_size(settings: Sequence[Setting]) -> Grid | None:
    """Return a table of the share of recovered labels, with one column for every batch size.

    There is a row for every attack on an arm (and set of other swept values) with at least two batch sizes. Returns
    None if there is no such row.
    """
    found: dict[Hashable, list[Setting]] = {}
    for one in settings:
        if one.attack and _MEASURE in one.measures:
            others = {path: value for path, value in one.fields.items() if path.rpartition(".")[2] != "batch_size"}
            alike = replace(one, fields=others)
            found.setdefault((alike.identity, alike.attack), []).append(alike)
    by_size = [(group[0], _by_size(group)) for group in found.values()]
    by_size = [(one, known) for one, known in by_size if len(known) > 1]
    if not by_size:
        return None
    sizes = sorted(set().union(*(known for _, known in by_size)))
    table = []
    for one, known in by_size:
        table.append([one.title, str(one.attack), *(cell_text(_MEASURE, known.get(size)) for size in sizes)])
    repeats = max(each.n for _, known in by_size for each in known.values())
    of_more = f"Mean and half the 95 % interval over up to {repeats} repeats."
    note = SINGLE if repeats == 1 else OF_TWO.format("repeats") if repeats == 2 else of_more
    return Grid(["setting", "attack", *(f"batch {size}" for size in sizes)], 2, table, f"{NONE}: not measured. {note}")


def _by_size(group: Sequence[Setting]) -> dict[int, Estimate]:
    rows = [row for one in group for row in one.rows]
    sizes = sorted({row["batch_size"] for row in rows if row.get("batch_size") is not None})
    found = {size: estimate([row[_MEASURE] for row in rows if row.get("batch_size") == size]) for size in sizes}
    return {size: each for size, each in found.items() if each}
