"""Sections of a run's page on guarantees and on malicious clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayfed.evidence.proved_bounds import BoundComparison, attacks_without_bound, compare_bounds, nontrivial_comparisons
from rayfed.evidence.robustness import robustness_matrix
from rayfed.evidence.rows import Row
from rayfed.privacy.printing import caution_text, format_share_bound, format_upper
from rayfed.report.html import plots
from rayfed.report.html.run_data import RunData
from rayfed.report.html.svg import Chart
from rayfed.report.text.cells import PageCell, PageColumn, PageTable, estimate_cell
from rayfed.report.text.formats import NONE, format_count, format_share
from rayfed.report.text.proved_bounds import BOUNDS, bound_rows, measure_text, uncovered_text


@dataclass(frozen=True)
class Comparisons:
    """Measured results and their proved bounds."""

    chart: Chart
    series: Sequence[str]
    """Names in the order of their colours."""
    table: PageTable


@dataclass(frozen=True)
class GuaranteeSection:
    """Guarantees of the arms, proved bounds, and measured results under a bound."""

    guarantees: PageTable | None
    bounds: PageTable | None
    uncovered: str
    """Attacks without a proved bound."""
    comparisons: Comparisons | None


def make_guarantee_section(data: RunData) -> GuaranteeSection | None:
    """Return the section; None if no arm has a guarantee or a note on one, and no result has a bound."""
    compared = nontrivial_comparisons(compare_bounds(data.proved, data.attacks, data.inferences))
    guarantees = _guarantee_table(data.privacy)
    if not guarantees and not compared:
        return None
    uncovered = attacks_without_bound(data.privacy, data.proved, data.attacks, data.inferences)
    return GuaranteeSection(
        guarantees=guarantees,
        bounds=_bounds_table(data.privacy),
        uncovered=uncovered_text(uncovered),
        comparisons=_comparisons(data.proved, compared) if compared else None,
    )


def _guarantee_table(privacy: Sequence[Row]) -> PageTable | None:
    """Return the guarantees, then the arms with a reason why they have none; None without such arms."""
    held, missing = [], []
    for row in privacy:
        if row["epsilon"] is not None:
            held.append(_guarantee_row(row))
        elif row["note"] is not None:
            missing.append(_missing_row(row))
    columns = [PageColumn("ε"), PageColumn("δ")]
    columns += [PageColumn(title, is_text=True) for title in ("Protects", "Against", "Defence", "Accountant")]
    return PageTable(columns, [*held, *missing]) if held or missing else None


def _guarantee_row(row: Row) -> tuple[str, list[PageCell]]:
    note = f"; {row['note']}" if row["note"] else ""
    return row["arm"], [
        PageCell(format_upper(row["epsilon"])),
        PageCell(format_upper(row["delta"])),
        PageCell(row["adjacency"]),
        PageCell(f"{row['against']}{caution_text(row['epsilon'])}"),
        PageCell(row["defence"], f"{row['mechanism']}, {format_count(row['rounds'], 'round')}{note}"),
        PageCell(row["accountant"].upper(), row["conversion"] or ""),
    ]


def _missing_row(row: Row) -> tuple[str, list[PageCell]]:
    return row["arm"], [PageCell(NONE), PageCell(NONE), PageCell(row["note"], row["defence"] or "")]


def _bounds_table(privacy: Sequence[Row]) -> PageTable | None:
    rows = [
        (arm, [PageCell(unit, defence), *map(PageCell, bounds)]) for arm, defence, unit, *bounds in bound_rows(privacy)
    ]
    columns = [PageColumn("Protects", is_text=True), *map(PageColumn, BOUNDS)]
    return PageTable(columns, rows) if rows else None


def _comparisons(proved: Sequence[Row], compared: Sequence[BoundComparison]) -> Comparisons:
    chart = plots.plot_proved_bounds(proved, compared)
    assert chart is not None
    names = dict.fromkeys(f"{one.arm}, {one.attack}" for one in compared)
    columns = [PageColumn("Attack", is_text=True), PageColumn("Measure", is_text=True)]
    columns += [PageColumn("Measured"), PageColumn("Chance"), PageColumn("Proved bound")]
    rows = []
    for one in compared:
        cells = [
            PageCell(one.attack),
            PageCell(measure_text(one), f"{one.hits} of {one.count}"),
            estimate_cell(one.share, format_share),
            PageCell(format_share(one.chance.value), f"to {format_share(one.chance.high)}"),
            PageCell(format_share_bound(one.bound), "exceeded" if one.exceeds else ""),
        ]
        rows.append((one.arm, cells))
    return Comparisons(chart, list(names), PageTable(columns, rows))


def make_robustness_table(data: RunData) -> PageTable | None:
    """Return the accuracy of each arm against each kind of malicious client; None without malicious clients."""
    matrix = robustness_matrix(sorted(data.rounds, key=lambda row: row["round"]), data.scenario)
    if not matrix.results:
        return None
    rows = []
    for arm in matrix.arms:
        cells = []
        for opponent in matrix.opponents:
            result = matrix.results.get((arm, opponent))
            backdoor = result.backdoor if result else None
            note = "" if backdoor is None else f"backdoor {format_share(backdoor)}"
            cells.append(PageCell(format_share(result.accuracy if result else None), note))
        rows.append((arm, cells))
    return PageTable([PageColumn(name) for name in matrix.opponents], rows, by_arm=False)
