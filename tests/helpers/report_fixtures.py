"""Make folders of runs and sweeps without training, in which reconstructions are the true digits with noise.

`Page` reads a report as a browser without scripts does.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from datetime import datetime
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import numpy as np
import torch
import yaml
from sklearn.datasets import load_digits
from torch.nn import functional as F

from rayfed.evidence.outcomes import compute_outcomes, with_pmm
from rayfed.results.sweep_folder import SweepFolder
from rayfed.store.folder import RunFolder
from rayfed.store.images import encode_png

ARMS = {"none": [], "gaussian": [{"name": "gaussian", "sigma": 0.01}], "prune": ["prune"]}
NOISE = {"none": 0.02, "gaussian": 0.18, "prune": 0.08}
HOSTILE = "<script>alert('x')</script>"
ATTACKS = {"idlg": 1.0, "inverting_gradients": 1.4}
ROUNDS, CLIENTS, BATCH = 5, 6, 4


def make_run(out: str, arms: dict[str, Any] = ARMS, attacks: dict[str, float] = ATTACKS) -> RunFolder:
    """Make the folder of a run, with digits and noisy digits as reconstructions."""
    folder = RunFolder.create(out, "digits-example", datetime(2025, 3, 1, 12, 30, 5))
    generator = torch.Generator().manual_seed(3)
    listed = "".join(f"  {json.dumps(name)}: {json.dumps(stack)}\n" for name, stack in arms.items())
    folder.write_text("scenario.yaml", f"name: digits-example\nseed: 0\narms:\n{listed}")
    folder.write_text("environment.json", json.dumps({"seed": 0, "torch": "2.6.0", "platform": "Linux", "cpus": 2.0}))
    status = {"state": "finished", "rounds_done": ROUNDS, "rounds": ROUNDS, "error": None}
    folder.write_text("status.json", json.dumps(status))
    folder.write_part("partition", 0, _partition())
    for round in range(ROUNDS):
        folder.write_part("rounds", round, [_round(arm, round) for arm in arms])
        folder.write_part("clients", round, [_client(arm, round, client) for arm in arms for client in range(CLIENTS)])
    for round in (0, 4) if attacks else ():
        scored, images = _attacked(round, arms, attacks, generator)
        folder.write_part("attacks", round, scored)
        folder.write_part("images", round, images)
    return folder


def _partition() -> list[dict[str, Any]]:
    shares = np.random.default_rng(3).dirichlet(np.full(10, 0.4), CLIENTS)
    counts = [(share * (120 + 40 * client)).astype(int).tolist() for client, share in enumerate(shares)]
    return [
        {"client": client, "label": label, "class_name": f"digit {label}", "count": counts[client][label]}
        for client in range(CLIENTS)
        for label in range(10)
    ]


def _round(arm: str, round: int) -> dict[str, Any]:
    noise = NOISE.get(arm, 0.1)
    loss = 2.3 * math.exp(-0.5 * round) + noise
    accuracy = 0.97 - noise / 2 - 0.6 * math.exp(-0.8 * round)
    return {
        "arm": arm, "round": round, "train_loss": loss, "test_loss": 1.1 * loss, "test_accuracy": accuracy,
        "train_accuracy": accuracy / 2, "non_member_accuracy": 0.11, "non_member_mean_accuracy": 0.234,
        "clients": CLIENTS, "samples": 1000, "actor_seconds": 2.5, "bytes_up": 6 * 63176, "bytes_down": 6 * 63176,
    }  # fmt: skip


def _client(arm: str, round: int, client: int) -> dict[str, Any]:
    row = {"arm": arm, "round": round, "client": client, "samples": 120 + 40 * client}
    return row | {"loss": 0.5, "seconds": 0.4, "sent_bytes": 63176, "status": "ok"}


def _attacked(
    round: int, arms: dict[str, Any], attacks: dict[str, float], generator: torch.Generator
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    digits = load_digits()
    truth = F.interpolate(torch.tensor(digits.images[:, None] / 16).float(), size=28, mode="bilinear")
    scored, images = [], []
    for arm in arms:
        for attack, factor in attacks.items():
            for victim in (1, 4):
                for sample in range(BATCH):
                    index = 40 * victim + 10 * round + sample
                    key = {
                        "arm": arm,
                        "round": round,
                        "attack": attack,
                        "victim": victim,
                        "repeat": 0,
                        "sample": sample,
                    }
                    spread = NOISE.get(arm, 0.1) * factor * (1 + 0.5 * sample)
                    guess = (truth[index] + spread * torch.randn(1, 28, 28, generator=generator)).clamp(0, 1)
                    scored.append(key | _scores(truth[index], guess, int(digits.target[index]), sample, attack))
                    images.append(key | {"true": encode_png(truth[index]), "reconstructed": encode_png(guess)})
    return scored, images


def _scores(true: torch.Tensor, guess: torch.Tensor, label: int, sample: int, attack: str) -> dict[str, Any]:
    mse = float(((true - guess) ** 2).mean())
    return {
        "batch_size": BATCH, "observes": "gradient", "knowledge": ["labels"] if attack == "idlg" else "",
        "true_label": label, "label": label if sample or attack == "idlg" else (label + 1) % 10,
        "label_accuracy": 1.0 if attack == "idlg" else 0.75,
        "mse": mse, "psnr": -10 * math.log10(mse), "ssim": math.exp(-12 * mse), "objective": mse,
        "iterations": 400, "seconds": 12.5, "status": "ok", "message": "", "above_baseline": 5.0, "identified": 1.0,
    }  # fmt: skip


def make_sweep(
    out: str, sigmas: int = 4, repeats: int = 3, failed: int = 1, stopped: int = 1, pairs: int = BATCH
) -> SweepFolder:
    """Make a sweep over the noise of one arm, with an undefended arm. The last trials failed or were stopped."""
    files = RunFolder.create(out, "noise-sweep", datetime(2025, 3, 1, 12, 30, 5))
    field = "arms.noise.defences.gaussian.sigma"
    values = [float(f"{10 ** (-3 + 3 * i / max(sigmas - 1, 1)):.3g}") for i in range(sigmas)]
    arms = {"none": [], "noise": [{"name": "gaussian", "sigma": 0.1}]}
    scenario = {
        "name": "noise-sweep",
        "seed": 0,
        "arms": arms,
        "sweep": {"fields": {field: values}, "repeats": repeats},
    }
    files.write_text("scenario.yaml", yaml.safe_dump(scenario, sort_keys=False))
    files.write_text("status.json", json.dumps({"state": "finished", "error": None}))
    sweep = SweepFolder(files)
    settings: list[tuple[str, float | None]] = [("none", None), *(("noise", sigma) for sigma in values)]
    plan = [(place, arm, sigma, repeat) for place, (arm, sigma) in enumerate(settings) for repeat in range(repeats)]
    rows: list[dict[str, Any]] = []
    for count, (place, arm, sigma, repeat) in enumerate(plan):
        run = f"trials/{place:04d}-{repeat}"
        trial = {"trial": f"{place:04d}-{repeat}", "repeat": repeat, "seed": repeat, field: sigma, "error": None}
        left = len(plan) - count
        if left <= failed:
            error = "DataError: no images <b>here</b>"
            rows.append(trial | {"arm": arm, "attack": None, "status": "failed", "error": error, "run": run})
            continue
        _trial(sweep.trial(run), arm, sigma, repeat, pairs)
        status = "stopped" if left <= failed + stopped else "finished"
        rows += [row | trial | {"status": status, "run": run} for row in compute_outcomes(sweep.trial(run))]
    sweep.write_outcomes(with_pmm(rows, sweep.scenario, lambda row: row["repeat"]))
    return sweep


def _trial(folder: RunFolder, arm: str, sigma: float | None, repeat: int, pairs: int) -> None:
    stack = [] if sigma is None else [{"name": "gaussian", "sigma": sigma}]
    folder.write_text("scenario.yaml", yaml.safe_dump({"name": "noise-sweep", "arms": {arm: stack}}))
    folder.write_text("environment.json", json.dumps({"seed": repeat, "torch": "2.6.0"}))
    generator = torch.Generator().manual_seed(1000 * repeat)
    noise = sigma or 0.0005
    row = _round(arm, ROUNDS - 1)
    row |= {"test_accuracy": 0.97 - 0.4 * noise + 0.01 * repeat, "actor_seconds": 2.5 + repeat / 10}
    folder.write_part("rounds", 0, [row])
    scored, images = [], []
    for sample in range(pairs):
        true, png, label = _digit(sample)
        guess = (true + noise * (1 + sample / 8) * torch.randn(1, 28, 28, generator=generator)).clamp(0, 1)
        key = {"arm": arm, "round": 0, "attack": "idlg", "victim": sample, "repeat": 0, "sample": 0}
        scored.append(key | _scores(true, guess, label, 1, "idlg"))
        images.append(key | {"true": png, "reconstructed": encode_png(guess)})
    folder.write_part("attacks", 0, scored)
    folder.write_part("images", 0, images)


@cache
def _digit(index: int) -> tuple[torch.Tensor, bytes, int]:
    """Return a digit (1, 28, 28), its PNG and its label."""
    digits = load_digits()
    image = torch.tensor(digits.images[index][None, None] / 16).float()
    scaled = F.interpolate(image, size=28, mode="bilinear")[0]
    return scaled, encode_png(scaled), int(digits.target[index])


VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """The structure of a page: its tags, attributes, scripts and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.images: list[dict[str, str | None]] = []
        self.figures: list[list[tuple[str, str | None]]] = []
        """Attributes of the gallery's figures."""
        self.pieces: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        """Type and text of each script."""
        self.feed(source)
        self.close()
        self.text = re.sub(r"\s+", " ", " ".join(self.pieces))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "figure" and "data-entry" in dict(attrs):
            self.figures.append(attrs)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        elif self.open and self.open[-1] != "style":
            self.pieces.append(data)

    def data(self) -> Any:
        """Return the data that the page passes to its script."""
        return next(json.loads(text) for kind, text in self.scripts if kind == "application/json")

    def check_that_it_stands_alone(self) -> None:
        """Check that the page loads nothing, and runs only its own scripts, by their hashes."""
        for name, value in self.attributes:
            if name in {"src", "href", "xlink:href", "action", "data", "poster", "srcset"}:
                assert value is not None
                assert value.startswith(("data:image/png;base64,", "#")), value
            assert not name.startswith("on")
        assert not {"link", "iframe", "object", "embed", "form"} & set(self.tags)
        policy = next(value for name, value in self.attributes if name == "content" and value and "src" in value)
        run = [text for kind, text in self.scripts if kind is None]
        hashes = {f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in run}
        assert set(policy.partition("script-src ")[2].split()) == hashes
        assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src")
