"""The report of a run: one HTML file that needs nothing else, made from the run's tables alone.

Read are the tables, `scenario.yaml` and, where they exist, `environment.json` and `status.json` (its keys `state`,
`rounds_done`, `rounds` and `error`). A run that failed, or has not come far, gets a report of what there is.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from rayfed import __version__
from rayfed.errors import RunError
from rayfed.results import plots, summary
from rayfed.results.folder import SCENARIO, RunFolder
from rayfed.results.formats import FILTERS
from rayfed.results.robustness import matrix
from rayfed.results.summary import Arm, Claim, Leak, Row
from rayfed.results.verdicts import verdicts

SHOWN = 8
"""Pairs of images shown for each arm and attack: those with the highest PSNR, of the first repeat."""
REPORT = "report.html"
PERCEPTUAL = {
    "ssim": "SSIM",
    "lpips_alex": "LPIPS (AlexNet)",
    "lpips_vgg": "LPIPS (VGG)",
    "noise_ratio": "Noise ratio",
    "bp_ki": "BP_KI",
    "bp_ki_posterior": "BP_KI (posterior)",
}
"""Column of `attacks` -> heading; shown where a run measured it."""
INFERRED = {
    "auc": "members among candidates (AUC)",
    "accuracy": "questions answered right",
    "class_share": "generated images of the class",
}
"""Metric of `inferences` -> what it counts."""


@dataclass(frozen=True)
class Pair:
    """A true image beside its reconstruction."""

    true: str
    """As a `data:` URL."""
    reconstructed: str
    row: Row
    """The row of `attacks` that scores it."""


@dataclass(frozen=True)
class Gallery:
    """The pairs of one arm and attack."""

    arm: str
    attack: str
    setting: str
    pairs: list[Pair]
    hidden: int
    """How many more there are in the tables."""


@dataclass(frozen=True)
class Vote:
    """How the clients of one arm weighed, and what they gave one another's models."""

    arm: str
    clients: list[int]
    weights: str
    """The chart of all rounds."""
    scores: str
    """The map of the last round."""
    round: int


def write_report(folder: RunFolder) -> str:
    """Make `report.html` of a run and return where it is; raises `RunError` for what cannot be read or written."""
    environment = Environment(
        loader=PackageLoader("rayfed.results", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    folder.write_text(REPORT, environment.get_template("report.html.j2").render(_contents(folder)))
    return f"{folder.url}/{REPORT}"


def _contents(folder: RunFolder) -> dict[str, Any]:
    """Everything that the template shows."""
    scenario_text = folder.read_text(SCENARIO)
    scenario = _mapping(folder, SCENARIO, yaml.safe_load, scenario_text)
    status = _json(folder, "status.json")
    tables = ("rounds", "clients", "attacks", "inferences", "privacy", "private", "weights")
    rounds, clients, attacks, inferences, privacy, private, weights = (
        folder.read_table(name).to_pylist() for name in tables
    )
    names = summary.arm_names(scenario, rounds, attacks, inferences)
    arms = summary.arms(names, scenario, rounds, clients, attacks)
    thresholds = (scenario.get("metrics") or {}).get("success") or {}
    leaks = summary.leaks(attacks, names, thresholds)
    claims = summary.claims(inferences, names)
    guesses: list[Leak | Claim] = [*leaks, *claims]
    mix = summary.label_mix(folder.read_table("partition").to_pylist())
    worst = summary.worst(attacks)
    # Pictures are the bulk of a run: only those that are shown are turned into text.
    chosen = [row for leak in leaks for row in _most_leaked(attacks, leak)]
    pictures = _pictures(folder, [*chosen, *(arm.worst for arm in arms if arm.worst)])
    return {
        "version": __version__,
        "name": str(scenario.get("name", folder.name)),
        "folder": folder.url,
        "status": status,
        "arms": arms,
        "leaks": leaks,
        "verdicts": verdicts(arms, leaks),
        "robustness": matrix(sorted(rounds, key=lambda row: row["round"])),
        "claims": claims,
        "inference_metrics": INFERRED,
        "made": _made(folder, claims),
        "worst": worst,
        "guarantees": [row for row in privacy if row["epsilon"] is not None],
        "private": [row for row in private if row["round"] in (private[0]["round"], private[-1]["round"])],
        "votes": _votes(weights, folder),
        "unguaranteed": [row for row in privacy if row["epsilon"] is None and row["note"] is not None],
        "setting": summary.setting,
        "worst_pairs": {arm.name: pictures.get(_key(arm.worst)) for arm in arms if arm.worst},
        "failures": [(guess, *failure, n) for guess in guesses for failure, n in guess.failures.items()],
        "galleries": [_gallery(leak, _most_leaked(attacks, leak), pictures) for leak in leaks],
        "class_names": mix.classes if mix else {},
        "mix": mix,
        "mix_layers": plots.drawn_classes(mix) if mix else [],
        "mix_shown": plots.MOST_CLIENTS,
        "classes": plots.CLASSES,
        "models_shown": plots.MOST_MODELS,
        "charts": _charts(rounds, attacks, arms, leaks, mix),
        "dash": plots.dash,
        "series": plots.SERIES,
        "ceiling": summary.PSNR_CEILING,
        "columns": {name: title for name, title in PERCEPTUAL.items() if any(getattr(leak, name) for leak in leaks)},
        "passing": {
            metric: summary.passing(metric, threshold)
            for metric, threshold in thresholds.items()
            if any(leak.success[metric] is not None for leak in leaks)
        },
        "environment": list(_flat(_json(folder, "environment.json"))),
        "scenario": scenario_text,
    }


def _charts(
    rounds: Sequence[Row],
    attacks: Sequence[Row],
    arms: Sequence[Arm],
    leaks: Sequence[Leak],
    mix: summary.LabelMix | None,
) -> dict[str, str | None]:
    return {
        "accuracy": plots.curve(rounds, arms, "test_accuracy", "Test accuracy", as_share=True),
        "train_loss": plots.curve(rounds, arms, "train_loss", "Training loss"),
        "test_loss": plots.curve(rounds, arms, "test_loss", "Test loss"),
        "trade_off": plots.trade_off(leaks, arms),
        "every_image": plots.every_image(attacks, leaks, arms),
        "mix": plots.label_bars(mix) if mix else None,
    }


def _most_leaked(attacks: Sequence[Row], leak: Leak) -> list[Row]:
    mine = (row for row in attacks if (row["arm"], row["attack"], row["repeat"]) == (leak.arm, leak.attack, 0))
    return sorted(mine, key=lambda row: row["psnr"] if summary.measured(row["psnr"]) else -inf, reverse=True)[:SHOWN]


def _gallery(leak: Leak, chosen: Sequence[Row], pictures: Mapping[tuple[Any, ...], Pair]) -> Gallery:
    pairs = [pictures[_key(row)] for row in chosen if _key(row) in pictures]
    return Gallery(leak.arm, leak.attack, leak.setting, pairs, hidden=max(leak.images - len(pairs), 0))


def _pictures(folder: RunFolder, rows: Sequence[Row]) -> dict[tuple[Any, ...], Pair]:
    """The images of some rows of `attacks`, by row; rows without images are left out."""
    wanted = {_key(row): row for row in rows}
    found = {}
    for batch in folder.read_table("images").to_batches(max_chunksize=64):
        for image in batch.to_pylist():
            row = wanted.get(_key(image))
            if row:
                found[_key(row)] = Pair(_data_url(image["true"]), _data_url(image["reconstructed"]), row)
    return found


def _votes(weights: Sequence[Row], folder: RunFolder) -> list[Vote]:
    """What clients voted, by arm; none where no rule has asked them."""
    scores = folder.read_table("scores").to_pylist() if weights else []
    votes = []
    for arm in dict.fromkeys(row["arm"] for row in weights):
        mine, last = ([row for row in rows if row["arm"] == arm] for rows in (weights, scores))
        round = mine[-1]["round"]
        shown = plots.score_map([row for row in last if row["round"] == round])
        votes.append(Vote(arm, sorted({row["client"] for row in mine}), plots.weight_lines(mine), shown, round))
    return votes


def _made(folder: RunFolder, claims: Sequence[Claim]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(arm, attack) -> the first generated images, each as (nearest true image, generated image)."""
    wanted = {(claim.arm, claim.attack) for claim in claims if claim.metric == "class_share"}
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for batch in folder.read_table("images").to_batches(max_chunksize=64) if wanted else ():
        for image in batch.to_pylist():
            pairs = found.setdefault((image["arm"], image["attack"]), [])
            if (image["arm"], image["attack"]) in wanted and len(pairs) < SHOWN:
                pairs.append((_data_url(image["true"]), _data_url(image["reconstructed"])))
    return {key: pairs for key, pairs in found.items() if pairs}


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[column] for column in ("arm", "round", "attack", "victim", "repeat", "sample"))


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _json(folder: RunFolder, name: str) -> dict[str, Any]:
    return _mapping(folder, name, json.loads, folder.read_text(name)) if folder.exists(name) else {}


def _mapping(folder: RunFolder, name: str, parse: Any, text: str) -> dict[str, Any]:
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError) as error:
        raise RunError(f"'{folder.url}/{name}' cannot be read: {error}; restore it from a copy") from error
    if not isinstance(value, dict):
        raise RunError(f"'{folder.url}/{name}' should hold `key: value` pairs, not {type(value).__name__}; restore it")
    return value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as lines of (path, value)."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)
