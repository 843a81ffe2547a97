"""Charts of the report of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rayfed.evidence.attack_results import Leakage
from rayfed.evidence.label_mix import LabelMix
from rayfed.evidence.proved_bounds import BoundComparison
from rayfed.evidence.rows import Row, is_measured
from rayfed.evidence.training import ArmSummary
from rayfed.metrics.images import PSNR_CEILING
from rayfed.report.html.svg import CLASSES, INK, SURFACE, Chart, class_colour, clean, dashes, line, series, short

MOST_CLIENTS = 60
"""Maximum number of clients in the chart of labels."""
FEWEST = 3
"""Minimum number of points that a line joins."""
MOST_MODELS = 30
"""Maximum number of models and validators in the map of scores."""


def plot_rounds(
    rounds: Sequence[Row],
    arms: Sequence[ArmSummary],
    column: str,
    label: str,
    as_share: bool = False,
    by: Literal["round", "simulated_minutes"] = "round",
) -> Chart | None:
    """Return a chart of one column of the table `rounds`, one line per arm; None below `FEWEST` rounds.

    The x-axis is the round, or the simulated time at the end of the round (`by`).
    """
    order = [arm.name for arm in arms]
    along = "round" if by == "round" else "simulated time (min)"
    rows = [
        {"arm": row["arm"], by: row[by], column: row[column]}
        for row in sorted(rounds, key=lambda row: (order.index(row["arm"]), row["round"]))
        if is_measured(row[column])
    ]
    if max(Counter(row["arm"] for row in rows).values(), default=0) < FEWEST:
        return None

    def draw(drawn: Figure) -> None:
        axes = drawn.add_subplot()
        for index, arm in enumerate(order):
            mine = [row for row in rows if row["arm"] == arm]
            xs, ys = [row[by] + (by == "round") for row in mine], [row[column] for row in mine]  # rounds count from 1
            marker = "o" if len(xs) <= 15 else ""
            axes.plot(xs, ys, color=series(index), dashes=dashes(index), linewidth=2, marker=marker, markersize=4.5)
        axes.set_xlabel(along)
        axes.set_title(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=by == "round", min_n_ticks=1))
        axes.margins(x=0.03)
        if as_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))

    legend = [(arm, line(index)) for index, arm in enumerate(order)]
    name = column if by == "round" else f"{column}_by_time"
    return Chart(name, f"{label} by {along}, one line per arm", (3.6, 2.6), draw, rows, legend)


def plot_proved_bounds(curves: Sequence[Row], found: Sequence[BoundComparison]) -> Chart | None:
    """Return a chart of measured success shares and proved bounds over the share by chance; None without shares."""
    names = list(dict.fromkeys((one.arm, one.attack) for one in found))
    if not names:
        return None
    rows = [
        {"arm": one.arm, "attack": one.attack, "chance": one.chance.high, "share": one.share.value, "proved": one.bound}
        for one in found
    ]

    def draw(drawn: Figure) -> None:
        axes = drawn.add_subplot()
        for index, (arm, attack) in enumerate(names):
            line_of = [row for row in curves if (row["arm"], row["attack"]) == (arm, attack)]
            measured = [one for one in found if (one.arm, one.attack) == (arm, attack)]
            of_samples = any(one.rate is None for one in measured)
            xs, ys = ([row[name] for row in line_of] for name in ("chance", "another" if of_samples else "present"))
            axes.plot(xs, ys, color=series(index), dashes=dashes(index), linewidth=2)
            for one in measured:
                ends = [[one.share.value - one.share.low], [one.share.high - one.share.value]]
                axes.errorbar(one.chance.high, one.share.value, yerr=ends, fmt="o", markersize=4.5, color=series(index))
        axes.set_xscale("log")
        axes.set_xlabel("share by chance (upper end)")
        axes.set_title("Measured (points), proved bound (lines)")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))

    legend = [(f"{arm}, {attack}", line(index)) for index, (arm, attack) in enumerate(names)]
    description = "Measured share and proved bound over the share by chance, one line per arm and attack"
    return Chart("proved", description, (3.6, 2.6), draw, rows, legend)


def every_image(
    attacks: Sequence[Row], leaks: Sequence[Leakage], arms: Sequence[ArmSummary], most: int = 200
) -> Chart | None:
    """Return a chart of the PSNR of all reconstructions, ranked: one row per arm and attack, at most `most` ranks."""
    order = [arm.name for arm in arms]
    known = [leak for leak in leaks if leak.scores["psnr"]]
    if not known:
        return None
    values = [
        sorted(
            min(row["psnr"], PSNR_CEILING)
            for row in attacks
            if (row["arm"], row["attack"]) == (leak.arm, leak.attack) and is_measured(row["psnr"])
        )
        for leak in known
    ]

    def draw(drawn: Figure) -> None:
        axes = drawn.add_subplot()
        for place, (leak, found) in enumerate(zip(known, values, strict=True)):
            shown = found if len(found) <= most else [found[i * (len(found) - 1) // (most - 1)] for i in range(most)]
            heights = [place + 0.11 * (i % 3 - 1) for i in range(len(shown))]
            axes.plot(
                shown, heights, "o", color=series(order.index(leak.arm)), markersize=5, alpha=0.6, markeredgewidth=0
            )
            axes.plot([median(found)] * 2, [place - 0.32, place + 0.32], color=INK, linewidth=1.6)
        names = [clean(f"{short(leak.arm)} · {short(leak.attack)}") for leak in known]
        axes.set_yticks(range(len(known)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("PSNR (dB)   leaks more →")

    rows = [
        {"arm": leak.arm, "attack": leak.attack, "psnr": value}
        for leak, found in zip(known, values, strict=True)
        for value in found
    ]
    words = "PSNR of each reconstruction by arm and attack"
    return Chart("every_image", words, (4.6, 1.0 + 0.34 * max(len(known), 4)), draw, rows)


def plot_label_bars(mix: LabelMix) -> Chart:
    """Return a stacked bar chart of each client's number of samples per class."""
    clients = mix.clients[:MOST_CLIENTS]
    layers = [(name, counts[: len(clients)]) for name, counts in merge_small_classes(mix)]

    def draw(drawn: Figure) -> None:
        axes = drawn.add_subplot()
        base = np.zeros(len(clients), np.int64)
        for index, (_, heights) in enumerate(layers):
            axes.bar(
                range(len(clients)), heights, 0.82, base, color=class_colour(index), edgecolor=SURFACE, linewidth=0.6
            )
            base = base + heights
        axes.set_xticks(range(len(clients)), [str(client) for client in clients])
        if len(clients) > 30:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("client")
        axes.set_title("Training samples")
        axes.grid(axis="x", visible=False)
        axes.margins(x=0.01)

    rows = [
        {"client": client, "class": name, "samples": int(count)}
        for name, counts in layers
        for client, count in zip(clients, counts, strict=True)
    ]
    legend = [
        (name, {"color": class_colour(index), "marker": "s", "linestyle": ""}) for index, (name, _) in enumerate(layers)
    ]
    return Chart("label_mix", "Training samples of each client by class, stacked", (9.4, 2.9), draw, rows, legend)


def merge_small_classes(mix: LabelMix) -> list[tuple[str, np.ndarray]]:
    """Return (class, samples by client) for each bar segment; merge classes beyond the `CLASSES` largest."""
    layers = list(zip(mix.classes.values(), mix.counts, strict=True))
    if len(layers) <= CLASSES:
        return layers
    large = sorted(layers, key=lambda layer: int(layer[1].sum()), reverse=True)[:CLASSES]
    kept = {name for name, _ in large}
    rest = [counts for name, counts in layers if name not in kept]
    return [*large, (f"{len(rest)} other classes", np.sum(rest, axis=0))]


def plot_weights(arm: str, rows: Sequence[Row]) -> Chart:
    """Return a chart of the clients' aggregation weights by round, one line per client."""
    clients = sorted({row["client"] for row in rows})

    def draw(drawn: Figure) -> None:
        axes = drawn.add_subplot()
        for index, client in enumerate(clients):
            xs, ys = zip(*((row["round"] + 1, row["weight"]) for row in rows if row["client"] == client), strict=True)
            look = "o-" if len(xs) >= FEWEST else "o"
            axes.plot(xs, ys, look, color=class_colour(min(index, CLASSES)), linewidth=1.6, markersize=3.5)
        axes.set_xlabel("round")
        axes.set_ylabel("weight")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.margins(x=0.03)

    values = [{name: row[name] for name in ("arm", "round", "client", "weight")} for row in rows]
    legend = [
        ("other clients" if index == CLASSES else f"client {client}", {"color": class_colour(index), "marker": "o"})
        for index, client in enumerate(clients[: CLASSES + 1])
    ]
    return Chart(f"weights-{arm}", "Weight of each client by round", (4.6, 3.3), draw, values, legend)


def plot_scores(arm: str, rows: Sequence[Row]) -> Chart:
    """Return a heat map of one round: each model's accuracy (rows) on each validator's data (columns)."""
    clients = sorted({row["model"] for row in rows})[:MOST_MODELS]
    places = {client: place for place, client in enumerate(clients)}
    shown = [row for row in rows if row["model"] in places and row["validator"] in places]

    def draw(drawn: Figure) -> None:
        axes = drawn.add_subplot()
        for row in shown:
            x, y, share = places[row["validator"]], places[row["model"]], row["accuracy"]
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=series(0), alpha=share))
            if len(clients) <= 12:
                ink = SURFACE if share > 0.5 else INK
                axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color=ink, fontsize=8)
        names = [str(client) for client in clients]
        axes.set_xticks(range(len(clients)), names)
        axes.set_yticks(range(len(clients)), names)
        axes.set_xlim(-0.5, len(clients) - 0.5)
        axes.set_ylim(len(clients) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.set_xlabel("on the held-out samples of client")
        axes.set_ylabel("model of client")

    values = [{name: row[name] for name in ("arm", "round", "model", "validator", "accuracy")} for row in shown]
    words = "Accuracy of each client's model on each client's held-out samples"
    return Chart(f"scores-{arm}", words, (4.6, 3.8), draw, values)
