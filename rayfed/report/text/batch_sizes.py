"""Table of text of the labels recovered at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.evidence.batch_sizes import LABEL_MEASURE, label_shares
from rayfed.evidence.settings import Setting
from rayfed.report.text.figures import cell_text
from rayfed.report.text.formats import NONE
from rayfed.report.text.tables import OF_TWO, SINGLE, Grid


def label_grid(settings: Sequence[Setting]) -> Grid | None:
    """Return a table of the share of recovered labels, with one column for every batch size.

    There is a row for every attack on an arm (and set of other swept values) with at least two batch sizes. Returns
    None if there is no such row.
    """
    attacks = label_shares(settings)
    if not attacks:
        return None
    sizes: set[int] = set()
    repeats = 0
    for one in attacks:
        sizes.update(one.shares)
        repeats = max(repeats, *(share.n for share in one.shares.values()))
    rows = []
    for one in attacks:
        cells = [cell_text(LABEL_MEASURE, one.shares.get(size)) for size in sorted(sizes)]
        rows.append([one.setting.title, str(one.setting.attack), *cells])
    headings = ["setting", "attack", *(f"batch {size}" for size in sorted(sizes))]
    return Grid(headings, 2, rows, f"{NONE}: not measured. {_repeats_text(repeats)}")


def _repeats_text(repeats: int) -> str:
    if repeats == 1:
        return SINGLE
    if repeats == 2:
        return OF_TWO.format("repeats")
    return f"Mean and half the 95 % interval over up to {repeats} repeats."
