"""Planted leaks, controls, and the audit of both as a user runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from json import dumps
from pathlib import Path
from typing import Any

from rayfed import registry
from rayfed.audits.plan import UNDEFENDED, name_pipeline
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import compute_findings
from rayfed.evidence.rows import Row
from rayfed.samples import dataset_modality
from rayfed.store.finding import Finding
from tests.helpers.planted import keys

MODELS, DEFENCES = "tests.helpers.planted.models", "tests.helpers.planted.defences"
IMAGES: dict[str, Any] = {"name": "digits", "size": 8}
RECORDS: dict[str, Any] = {"name": "diabetes"}
TEXTS: dict[str, Any] = {"name": "text", "length": 8, "vocabulary": 300}
SHORT_TEXTS = {**TEXTS, "length": 5}


@dataclass(frozen=True)
class Plant:
    """A planted leak with its key, or a control, which has no key."""

    name: str
    model: str
    key: keys.Key | None
    options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the model."""
    defence: dict[str, Any] | None = None
    """Defence with a mistake, or the control. None if the model leaks without a defence."""
    data: dict[str, Any] = field(default_factory=lambda: IMAGES)
    batch: int = 1
    loss: dict[str, Any] = field(default_factory=lambda: {"name": "cross_entropy"})

    def arguments(self, minutes: float, seed: int, out: str) -> list[str]:
        """Return the command line of the audit."""
        arguments = ["audit", "--model", f"{MODELS}:{self.model}", "--data", self.data["name"]]
        arguments += ["--defence", dumps(self.pipeline), "--loss", dumps(self.loss)]
        for name, value in self.options.items():
            arguments += ["--set", f"model.{name}={dumps(value)}"]
        for name, value in self.data.items():
            arguments += ["--set", f"data.{name}={value}"] if name != "name" else []
        arguments += ["--batch", str(self.batch), "--images", str(self.batch), "--seed", str(seed)]
        return [*arguments, "--minutes", str(minutes), "--executor", "local", "--out", out, "--quiet"]

    @property
    def pipeline(self) -> list[dict[str, Any]]:
        """Return the defences."""
        return [] if self.defence is None else [self.defence]

    @property
    def criterion(self) -> Criterion:
        """Return the criterion of a leak."""
        return Criterion.from_modality(dataset_modality(registry.find("datasets", self.data["name"])), None)


def defended(name: str, key: keys.Key | None, defence: str, model: str = "Dense", **parameters: Any) -> Plant:
    """Return a plant in a defence of images."""
    return Plant(name, model, key, defence={"name": f"{DEFENCES}:{defence}", **parameters})


SIGMOID = {"activation": "Sigmoid"}
ARCHITECTURES = (
    Plant("linear layer", "Dense", keys.dense),
    Plant("orthogonal front", "Dense", keys.dense, {"front": "rotate"}),
    Plant("rounding front", "Dense", keys.dense, {"front": "round"}),
    Plant("norm front", "Dense", keys.stretched, {"front": "norm"}),
    Plant("cosine head", "Dense", keys.dense, {"cosine": True}),
    Plant("linear layer without bias", "Dense", keys.scaled_row, {**SIGMOID, "bias": False}),
    Plant("scale of each pixel", "Dense", keys.per_pixel, {"activation": "Tanh", "front": "per pixel"}),
    Plant("norm alone", "NormAlone", keys.norm_alone),
    Plant("traps, batch 4", "Traps", keys.traps, batch=4),
    Plant("convolution", "Convolutional", keys.convolution),
    Plant("convolution, batch norm", "Convolutional", keys.convolution, {"norm": True}),
    Plant("convolution, pooled", "Convolutional", keys.dense, {"channels": 16, "pooled": True}),
    Plant("ViT", "Patches", keys.patches),
    Plant("low-rank layer", "LowRank", keys.low_rank),
    Plant("bilinear layer", "Squares", keys.squares),
    Plant("levels of pixels", "Levels", keys.levels),
    Plant("transformer on tokens", "Placed", keys.placed, data=TEXTS),
    Plant("table of each position", "Tables", keys.tables, data=TEXTS),
    Plant("LSTM on tokens", "Read", keys.read, data=SHORT_TEXTS),
    Plant("linear layer on vectors of tokens", "Flat", keys.flat, data=TEXTS),
    Plant("linear layer on numbers of tokens", "Numbers", keys.numbers, data=TEXTS),
    Plant("records", "Dense", keys.dense, data=RECORDS),
    Plant(
        "records with a number as target",
        "Dense",
        keys.dense,
        data={**RECORDS, "regression": True},
        loss={"name": "mean_squared_error"},
    ),
)
GAUSSIAN = {"name": "gaussian", "sigma": 10.0}
CLIPPED = {"name": f"{DEFENCES}:Clipped"}
MISTAKES = (
    defended("noise on all layers but the first", keys.dense, "NoiseOn", to="not first"),
    defended("noise on biases", keys.scaled_row, "NoiseOn", to="biases"),
    defended("biases not sent", keys.scaled_row, "Zeroed"),
    defended("noise of the client's number", keys.after(keys.without_noise), "KnownNoise"),
    defended("one number on all values", keys.after(keys.without_number), "OneNumber"),
    defended("half of the values", keys.masked, "Masked"),
    defended("random signs", keys.without_signs, "Signs"),
    Plant("clip of each tensor", "Dense", partial(keys.scaled_row, whole=True), SIGMOID, CLIPPED),
    defended("8 bits", keys.dense, "Steps"),
    defended("known order", keys.after(keys.in_order), "Shuffled"),
    defended("signs of all layers but the first", keys.dense, "SignsOf"),
    defended("plus the gradient of a black image", keys.after(keys.without_public), "PlusPublic"),
    defended("reflection", keys.after(keys.mirrored), "Mirrored"),
    defended("new weights", keys.after(keys.without_weights), "NewWeights"),
    defended("cubes", keys.after(keys.roots), "Cubed"),
    defended("same noise in all rows", keys.between_rows, "NoiseOfRows"),
    defended("noise of columns", keys.darkest, "NoiseOfColumns"),
    defended("opposite noise", keys.together, "Opposite", model="GatedUnit"),
    defended("noise in proportion", keys.dense, "InProportion"),
    defended("noise on one value in ten", keys.medians, "NoiseOn", share=0.1),
    defended("noise that cancels in sums", keys.summed, "Cancelling"),
    defended("shuffled columns", keys.summed, "ColumnsShuffled"),
    defended("32 seeds", keys.few_seeds, "FewSeeds"),
    defended("last digits", keys.after(keys.last_digits), "LastDigits"),
    defended("noise of rank two", keys.low_rank_noise, "LowRankNoise"),
    defended("shuffled pixels", partial(keys.repainted, brighten=False), "Pixels"),
    defended("brightened pixels", partial(keys.repainted, brighten=True), "Pixels", brighten=True),
)
PLANTS = (
    *ARCHITECTURES,
    *MISTAKES,
    Plant("statistics beside noise", "Dense", keys.statistics, {"front": "statistics"}, GAUSSIAN),
)
UNSOUND = (
    defended("undeclared noise of rows", keys.between_rows, "UndeclaredRows"),
    defended("undeclared order", keys.after(keys.in_order), "UndeclaredOrder"),
    defended("undeclared noise on images", keys.dense, "NoisyImages"),
    defended("wrong noise", keys.after(keys.without_noise), "WrongNoise"),
    defended("wrong order", keys.after(keys.in_order), "WrongOrder"),
    defended("wrong pixels", partial(keys.repainted, brighten=False), "WrongPixels"),
)
"""Plants with a missing or a wrong declaration."""


def control(title: str, defence: str, model: str = "Dense", data: dict[str, Any] = IMAGES, **parameters: Any) -> Plant:
    """Return a control: a batch of four samples if they are not images, as parts of those may leak."""
    name = defence if defence == "gaussian" else f"{DEFENCES}:{defence}"
    batch = 1 if data is IMAGES else 4
    return Plant(f"control: {title}", model, None, defence={"name": name, **parameters}, data=data, batch=batch)


CONTROLS = (
    control("zeros", "Nothing", what="zeros"),
    control("zeros, convolution", "Nothing", "Convolutional", what="zeros"),
    control("zeros, texts", "Nothing", "Placed", TEXTS, what="zeros"),
    control("labels", "Nothing", what="labels"),
    control("noise", "Noise"),
    control("noise, records", "Noise", data=RECORDS),
    control("noise, texts", "Noise", "Placed", TEXTS),
    control("strong noise", "gaussian", sigma=100.0),
    control("another sample", "Unrelated"),
    control("another sample, ViT", "Unrelated", "Patches"),
    control("another sample, records", "Unrelated", data=RECORDS),
    control("random order", "Unrelated", shuffle=True),
)


@dataclass(frozen=True)
class Result:
    """Result of the audit on one plant or control."""

    plant: Plant
    finding: Finding | None
    """None if no attack applied."""
    seconds: float | None
    """Seconds of attacks until the first leak. None without a leak."""


def audit(plant: Plant, minutes: float, seed: int, out: str | None = None) -> Result:
    """Run the audit on a plant or a control."""
    from rayfed.cli import app
    from rayfed.store.folder import RunFolder

    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(StringIO()):
        code = app(plant.arguments(minutes, seed, out or scratch), standalone_mode=False)
        assert not code, f"{plant.name}: the audit ended with exit code {code}"
        folder = max(Path(out or scratch).glob("audit-*"), key=lambda path: path.stat().st_mtime)
        rows = RunFolder.open(str(folder)).read_table("attacks").to_pylist()
    arm = UNDEFENDED if plant.defence is None else name_pipeline(plant.pipeline)
    own = [row for row in rows if row["arm"] == arm]
    finding = next((one for one in compute_findings(rows, plant.criterion) if one.arm == arm), None)
    seconds = seconds_to_leak(own, plant.criterion.leaks)
    if seconds is None and finding and finding.part:  # parts are counted in all results of an attack
        last = [row for row in own if row["attack"] == finding.part.attack][-1]
        seconds = seconds_to_leak(own, lambda row: row is last)
    return Result(plant, finding, seconds)


def seconds_to_leak(rows: Sequence[Row], leaks: Callable[[Row], bool]) -> float | None:
    """Return the seconds of attacks, in the order in which they ran, up to the end of the first that leaks."""
    spent: dict[tuple[str, int], float] = {}
    for row in rows:
        spent[row["attack"], row["victim"]] = row["seconds"] or 0.0
        if leaks(row):
            return sum(spent.values())
    return None
