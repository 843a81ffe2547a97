"""Sections of a run's page on the training, the clients' data and the cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayfed.evidence.label_mix import LabelMix
from rayfed.evidence.rows import Row
from rayfed.evidence.training import ArmSummary, add_virtual_time
from rayfed.evidence.verdicts import Verdict
from rayfed.report.html import plots
from rayfed.report.html.run_data import RunData
from rayfed.report.html.svg import CLASSES, Chart
from rayfed.report.text.cells import PageCell, PageColumn, PageTable
from rayfed.report.text.formats import (
    NONE,
    format_bytes,
    format_counts,
    format_duration,
    format_mean_bytes,
    format_mean_duration,
    format_number,
    format_share,
    format_similarity,
)
from rayfed.report.text.verdicts import badge_text
from rayfed.store.finding import State

_STEPS = {
    "clients": "Sampled",
    "advertised": "Sent keys",
    "shared": "Shared secrets",
    "sent": "In the sum",
    "revealed": "Unmasked the sum",
}
"""Heading of each step of secure aggregation, by column of `secure_sums`."""


@dataclass(frozen=True)
class VoteCharts:
    """Votes of the clients in one arm: the weights of their updates, and their scores of one another's models."""

    arm: str
    weights: Chart
    """Chart of the weights over all rounds."""
    scores: Chart
    """Heat map of the scores in the last round."""
    legend: Sequence[str]
    """Names in the order of the colours of classes."""
    caption: str
    """Caption of the heat map."""


@dataclass(frozen=True)
class TrainingSection:
    """Charts of the training, and tables of private layers, secure aggregation and votes."""

    charts: Sequence[Chart]
    """Empty if too few rounds were evaluated."""
    private: PageTable | None
    sums: PageTable | None
    votes: Sequence[VoteCharts]
    empty: str
    """Why there are no charts."""


@dataclass(frozen=True)
class ClientSection:
    """Samples and classes of the clients."""

    title: str
    facts: Sequence[tuple[str, str]]
    chart: Chart
    legend: Sequence[str]
    """Classes in the order of their colours."""
    caption: str
    """Text if the chart shows only the first clients."""


@dataclass(frozen=True)
class CostSection:
    """Time and traffic of the training and the attacks."""

    arms: PageTable | None
    attacks: PageTable | None
    simulated: bool
    """Whether the devices of the clients are simulated."""


def training_charts(rounds: Sequence[Row], arms: Sequence[ArmSummary]) -> list[Chart]:
    """Return the charts of the training whose values were measured."""
    timed = add_virtual_time(rounds)
    charts = [
        plots.plot_rounds(rounds, arms, "test_accuracy", "Test accuracy", as_share=True),
        plots.plot_rounds(timed, arms, "test_accuracy", "Test accuracy", True, "simulated_minutes"),
        plots.plot_rounds(rounds, arms, "train_loss", "Training loss"),
        plots.plot_rounds(rounds, arms, "test_loss", "Test loss"),
        plots.plot_rounds(rounds, arms, "test_error", "Test error"),
        plots.plot_rounds(rounds, arms, "test_perplexity", "Test perplexity"),
        plots.plot_rounds(rounds, arms, "test_iou", "Test intersection over union", as_share=True),
    ]
    return [chart for chart in charts if chart]


def vote_charts(data: RunData) -> list[VoteCharts]:
    """Return the clients' votes by arm; empty if no aggregation rule of the run uses votes."""
    weights = data.rows("weights")
    scores = data.rows("scores") if weights else []
    charts = []
    for arm in dict.fromkeys(row["arm"] for row in weights):
        own = [row for row in weights if row["arm"] == arm]
        last = own[-1]["round"]
        score_map = plots.plot_scores(arm, [row for row in scores if (row["arm"], row["round"]) == (arm, last)])
        clients = sorted({row["client"] for row in own})
        legend = [f"client {client}" for client in clients[:CLASSES]]
        if len(clients) > CLASSES:
            legend.append("other clients")
        first = f", the first {plots.MOST_MODELS} clients" if len(clients) > plots.MOST_MODELS else ""
        caption = f"Accuracy (%) in round {last + 1}{first}. The table `scores` has all rounds."
        charts.append(VoteCharts(arm, plots.plot_weights(arm, own), score_map, legend, caption))
    return charts


def make_training_section(data: RunData) -> TrainingSection:
    """Return the section on the training."""
    empty = "No round is complete yet."
    if data.trained:
        empty = "Too few rounds were evaluated for a curve. The overview has the last round."
    return TrainingSection(
        charts=training_charts(data.rounds, data.arms),
        private=_private_table(data.rows("private")),
        sums=_sums_table(data.rows("secure_sums")),
        votes=vote_charts(data),
        empty=empty,
    )


def _private_table(rows: Sequence[Row]) -> PageTable | None:
    """Return the measures of private layers in the first and in the last round."""
    if not rows:
        return None
    columns = [PageColumn("Layer", is_text=True), PageColumn("Round"), PageColumn("Distance between clients")]
    columns += [PageColumn("Rank"), PageColumn("Scale")]
    cells = []
    for row in rows:
        if row["round"] in (rows[0]["round"], rows[-1]["round"]):
            values = [PageCell(format_number(row[name], 3)) for name in ("distance", "rank", "scale")]
            cells.append((row["arm"], [PageCell(row["layer"]), PageCell(str(row["round"] + 1)), *values]))
    return PageTable(columns, cells)


def _sums_table(rows: Sequence[Row]) -> PageTable | None:
    """Return the number of clients at each step of secure aggregation."""
    if not rows:
        return None
    columns = [
        PageColumn("Round"),
        *map(PageColumn, _STEPS.values()),
        PageColumn("Protocol bytes"),
        PageColumn("Aborted", is_text=True),
    ]
    cells = []
    for row in rows:
        steps = [PageCell(NONE if row[name] is None else str(row[name])) for name in _STEPS]
        last = [PageCell(format_bytes(row["protocol_bytes"])), PageCell(row["aborted"] or "no")]
        cells.append((row["arm"], [PageCell(str(row["round"] + 1)), *steps, *last]))
    return PageTable(columns, cells, label="Secure aggregation")


def make_client_section(mix: LabelMix | None) -> ClientSection | None:
    """Return the section on the clients' data; None if the partition is not recorded."""
    if mix is None:
        return None
    clients, most = len(mix.clients), plots.MOST_CLIENTS
    facts = [
        ("Clients", str(clients)),
        ("Classes", str(len(mix.classes))),
        ("Samples per client", f"{mix.samples[0]} to {mix.samples[2]}, median {format_number(mix.samples[1], 6)}"),
        (
            "Classes per client",
            f"{mix.classes_held[0]} to {mix.classes_held[2]}, median {format_number(mix.classes_held[1], 4)}",
        ),
    ]
    return ClientSection(
        title=f"{clients} clients: samples and classes",
        facts=facts,
        chart=plots.plot_label_bars(mix),
        legend=[name for name, _ in plots.merge_small_classes(mix)],
        caption=f"The first {most} of {clients} clients." if clients > most else "",
    )


def make_cost_section(data: RunData, noun: str) -> CostSection:
    """Return the section on time and traffic; `noun` names the samples."""
    simulated = any(arm.simulated for arm in data.arms)
    verdicts = {verdict.arm: verdict for verdict in data.evidence.verdicts}
    columns = [PageColumn("Rounds"), PageColumn("Actor time per round", "without rounds in which processes warm up")]
    if simulated:
        titles = ("Simulated time per round", "Simulated time, all rounds", "Waiting time of clients", "Left out")
        columns += [PageColumn(title) for title in (*titles, "Accuracy", "Best reconstruction")]
    columns += [PageColumn("One client's update"), PageColumn("Clients → server"), PageColumn("Server → clients")]
    rows = []
    for arm in data.arms:
        cells = [PageCell(str(arm.rounds)), PageCell(format_mean_duration(arm.actor_seconds))]
        if simulated:
            cells += _simulated_cells(arm, verdicts.get(arm.name))
        cells += [
            PageCell(format_mean_bytes(arm.update_bytes)),
            PageCell(format_bytes(arm.bytes_up)),
            PageCell(format_bytes(arm.bytes_down)),
        ]
        rows.append((arm.name, cells))
    arms = PageTable(columns, rows) if data.trained else None
    return CostSection(arms, _attack_times(data, noun), simulated)


def _simulated_cells(arm: ArmSummary, verdict: Verdict | None) -> list[PageCell]:
    """Return the simulated times of an arm, with its accuracy and its best reconstruction."""
    times = [NONE] * 4
    if arm.simulated:
        one = arm.simulated
        times = [
            format_mean_duration(one.rounds),
            format_duration(one.seconds),
            format_mean_duration(one.idle),
            format_share(one.dropped),
        ]
    leakage = "not measured"
    if verdict:
        leaks = verdict.state == State.LEAKS and verdict.closest
        leakage = format_similarity(verdict.closest) if leaks and verdict.closest else badge_text(verdict)
    return [*map(PageCell, times), PageCell(format_share(arm.accuracy)), PageCell(leakage)]


def _attack_times(data: RunData, noun: str) -> PageTable | None:
    if not data.scored:
        return None
    columns = [PageColumn("Attack", is_text=True), PageColumn(f"{noun.capitalize()}s")]
    columns += [PageColumn("Iterations"), PageColumn("Time per batch")]
    rows = []
    for leak in data.scored:
        numbers = [
            PageCell(str(leak.images)),
            PageCell(format_counts(leak.iterations)),
            PageCell(format_mean_duration(leak.seconds)),
        ]
        rows.append((leak.arm, [PageCell(leak.attack), *numbers]))
    return PageTable(columns, rows, label="Time of the attacks")
