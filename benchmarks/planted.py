"""Planted leaks: models and defences whose gradient gives samples away by construction, and controls that leak nothing.

    python -m benchmarks.planted [--only PATTERN ...] [--seed 0] [--minutes 0.4] [--out FOLDER]

The audit is run on each as a user runs it (`rayfed audit --executor local`), knowing nothing of what was planted, and
says "leaks" or not. A plant has a key (`benchmarks.planted_keys`), by which a test reads the sample out of what is
sent, so that none is empty. Printed are, for each, which attack found it and after how many seconds of its arm's
attacks, then the share found by so many seconds. What was not found stands there as not found.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from io import StringIO
from itertools import chain
from json import dumps
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import planted_keys as keys
from benchmarks.planted_defences import CONTROLS
from rayfed import registry
from rayfed.analysis.audit import UNDEFENDED, called
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import findings
from rayfed.evidence.rows import Row
from rayfed.report.text.reasons import attack_text
from rayfed.samples import held
from rayfed.store.finding import Finding

MODELS, DEFENCES = "benchmarks.planted_models", "benchmarks.planted_defences"
IMAGES: dict[str, Any] = {"name": "digits", "size": 8}
RECORDS: dict[str, Any] = {"name": "diabetes"}
TEXTS: dict[str, Any] = {"name": "text", "length": 8, "vocabulary": 300}
BUDGETS = (0.1, 0.3, 1, 3, 10, 30, 100)
"""Seconds of attacks, for the share that was found by then."""


@dataclass(frozen=True)
class Plant:
    """A planted leak, or a control, which has no key."""

    name: str
    model: str
    key: keys.Key | None
    options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the model."""
    defence: dict[str, Any] | None = None
    """The defence with the mistake, or the control; None where the leak is the model's own."""
    data: dict[str, Any] = field(default_factory=lambda: IMAGES)
    batch: int = 1
    loss: dict[str, Any] = field(default_factory=lambda: {"name": "cross_entropy"})

    def arguments(self, minutes: float, seed: int, out: str) -> list[str]:
        """Return the audit's command line."""
        options = [part for name, value in self.options.items() for part in ("--set", f"model.{name}={dumps(value)}")]
        shaped = {name: value for name, value in self.data.items() if name != "name"}
        options += [part for name, value in shaped.items() for part in ("--set", f"data.{name}={value}")]
        samples = ["--batch", str(self.batch), "--images", str(self.batch), "--seed", str(seed)]
        budget = ["--minutes", str(minutes), "--executor", "local", "--out", out, "--quiet"]
        audited = ["--model", self.module, "--data", self.data["name"], "--defence", dumps(self.pipeline)]
        audited += ["--loss", dumps(self.loss)]
        return ["audit", *audited, *options, *samples, *budget]

    @property
    def module(self) -> str:
        """Name of the model as scenarios have it."""
        return self.model if self.model.islower() else f"{MODELS}:{self.model}"

    @property
    def pipeline(self) -> list[dict[str, Any]]:
        """The defence, or none where the leak is the model's own."""
        return [] if self.defence is None else [self.defence]

    @property
    def criterion(self) -> Criterion:
        """What makes a reconstruction of such samples a leak."""
        return Criterion.of(held(registry.find("datasets", self.data["name"])), None)


def _defended(name: str, key: keys.Key | None, defence: str, **parameters: Any) -> Plant:
    return Plant(name, "Dense", key, defence={"name": f"{DEFENCES}:{defence}", **parameters})


def _architectures() -> Iterator[Plant]:
    for activation in ("ReLU", "Sigmoid", "Tanh", "GELU"):
        yield Plant(f"mlp, {activation}", "Dense", keys.dense, {"activation": activation})
    for front in ("normalise", "permute", "rotate", "widen", "round"):
        yield Plant(f"mlp behind a fixed map: {front}", "Dense", keys.dense, {"front": front})
    yield Plant("mlp behind a norm", "Dense", keys.stretched, {"front": "norm"})
    large = {**IMAGES, "size": 28}  # of fewer pixels too few are seen to be told from chance
    for part in ("the middle", "the upper half"):
        yield Plant(f"mlp that sees {part}", "Dense", keys.dense, {"front": part}, data=large)
    for head in ("nobias", "cosine", "twice", "deep", "conv"):
        yield Plant(f"mlp, head: {head}", "Dense", keys.dense, {"head": head})
    yield Plant("mlp without a first bias", "Dense", keys.scaled_row, {"bias": False, "activation": "Sigmoid"})
    yield Plant("a trained scale and shift of each pixel", "Scaled", keys.per_pixel)
    yield Plant("a norm's scale and shift alone, behind a frozen layer", "NormAlone", keys.unnormed)
    yield Plant("slopes and biases alone, behind a frozen layer", "SlopesAlone", keys.below_zero)
    yield Plant("one linear layer", "Regression", keys.dense)
    yield Plant("units that open by brightness, batch 4", "Traps", keys.traps, batch=4)
    for kind in ("RNN", "GRU", "LSTM"):
        yield Plant(f"recurrent, {kind}", "Recurrent", keys.recurrent, {"kind": kind})
    for activation, channels in (("LeakyReLU", 4), ("ReLU", 16), ("Sigmoid", 4), ("Tanh", 4)):
        options = {"activation": activation, "channels": channels}
        yield Plant(f"convnet, {activation}", "Convolutional", keys.convolution, options)
    for norm in ("batch", "group", "layer"):
        yield Plant(f"convnet, {norm} norm", "Convolutional", keys.convolution, {"norm": norm})
    strided = {"stride": 2, "channels": 16}
    yield Plant("convnet, stride 2", "Convolutional", keys.convolution, strided)
    separable = {"separable": True, "channels": 8}
    yield Plant("convnet, separable", "Convolutional", keys.convolution, separable)
    yield Plant("convnet, mean pooling", "Pooled", keys.pooled)
    yield Plant("residual network", "Residual", keys.residual)
    for token, fused in ((False, False), (True, False), (False, True)):
        name = "ViT" + ", class token" * token + ", PyTorch's layer" * fused
        yield Plant(name, "Patches", keys.patches, {"token": token, "fused": fused})
    yield Plant("ViT, patches without bias", "Patches", keys.patches, {"bias": False})
    for model, key in (
        ("Local", keys.local),
        ("LowRank", keys.low_rank),
        ("Sparse", keys.sparse),
        ("Normed", keys.normed),
        ("Squares", keys.squares),
        ("Gated", keys.gated),
        ("Lines", keys.lines),
        ("Thermometer", keys.thermometer),
        ("Levels", keys.levels),
        ("Waves", keys.waves),
    ):
        yield Plant(f"first layer: {model}", model, key)


def _texts_and_records() -> Iterator[Plant]:
    small, key = {"vocabulary": 300, "width": 32, "hidden": 64, "layers": 1}, partial(keys.placed, table="embed.table.")
    yield Plant("transformer on tokens", "text_transformer", key, small, data=TEXTS)
    yield Plant("PyTorch's transformer on tokens", "Placed", keys.placed, data=TEXTS)
    yield Plant("a table of tokens for each place", "Tables", keys.tables, data=TEXTS)
    for kind in ("LSTM", "GRU"):
        yield Plant(f"{kind} that reads tokens", "Read", keys.read, {"kind": kind}, data={**TEXTS, "length": 5})
    yield Plant("tokens as dummies", "Dummies", keys.dummies, data=TEXTS)
    yield Plant("the vectors of all places beside each other", "Joined", keys.joined, data=TEXTS)
    yield Plant("a table of tokens for each place, added", "Added", keys.added, data=TEXTS)
    yield Plant("tokens as numbers", "Numbers", keys.numbers, data=TEXTS)
    yield Plant("records, mlp", "Dense", keys.dense, data=RECORDS)
    yield Plant("records, one linear layer", "Regression", keys.dense, data=RECORDS)
    yield Plant("records, cosine head", "Dense", keys.dense, {"head": "cosine"}, data=RECORDS)


def _losses() -> Iterator[Plant]:
    binary, quantity = {"name": "binary_cross_entropy"}, {**RECORDS, "regression": True}
    smoothed = {"name": "cross_entropy", "label_smoothing": 0.1}
    yield Plant("records, one output", "Dense", keys.dense, data=RECORDS, loss=binary)
    yield Plant("records, a quantity", "Dense", keys.dense, data=quantity, loss={"name": "mean_squared_error"})
    yield Plant("records, a loss of one's own", "Dense", keys.dense, data=quantity, loss={"name": "torch.nn:HuberLoss"})
    yield Plant("several labels, convnet", "Convolutional", keys.convolution, loss=binary)
    yield Plant("smoothed labels", "Dense", keys.dense, loss=smoothed)


def _mistakes() -> Iterator[Plant]:
    first, biases = ["first.weight", "first.bias"], [".bias"]
    yield _defended("noise on all layers but the first", keys.dense, "NoiseOn", ends=first, but=True)
    patches = {"name": f"{DEFENCES}:NoiseOn", "ends": ["patch.weight", "places"], "but": True}
    yield Plant("noise on all but patches and places", "Patches", keys.patches, {"token": True}, patches)
    yield _defended("noise on the last layer alone", keys.dense, "NoiseOn", ends=["rest.1.weight", "rest.1.bias"])
    yield _defended("noise on biases alone", keys.scaled_row, "NoiseOn", ends=biases)
    yield _defended("biases not sent", keys.scaled_row, "Zeroed", ends=biases)
    yield _defended("noise of the client's number", keys.undone(keys.known_noise), "KnownNoise")
    yield _defended("noise drawn once", keys.undone(keys.fixed_noise), "KnownNoise", seed=42)
    yield _defended("one number on all values", keys.undone(keys.without_number), "OneNumber")
    yield _defended("noise too small", keys.dense, "NoiseOn", sigma=1e-5, ends=[], but=True)
    yield _defended("values left out, visibly", keys.masked, "Masked")
    yield _defended("rows scaled", keys.dense, "Rows")
    yield _defended("rows left out", keys.dense, "Rows", drop=0.5)
    yield _defended("signs of weights flipped", keys.signless, "Signs")
    yield _defended("times a constant", keys.dense, "Times", factor=1e3)
    yield _defended("times minus one", keys.dense, "Times", factor=-1.0)
    yield _defended("clip alone", keys.dense, "Clipped")
    each = {"name": f"{DEFENCES}:ClippedEach"}
    yield Plant("clip of each tensor", "Dense", partial(keys.scaled_row, whole=True), {"activation": "Sigmoid"}, each)
    yield _defended("16 bits", keys.dense, "Half")
    yield _defended("steps of 8 bits", keys.dense, "Steps")
    yield _defended("values shuffled by a known seed", keys.undone(keys.in_order), "Shuffled")
    yield _defended("rows shuffled", keys.dense, "Shuffled", rows=True)
    yield _defended("signs of all layers but the first", keys.dense, "SignsOf", but=first)
    yield _defended("plus the gradient of a black image", keys.undone(keys.without_public), "PlusPublic")
    yield _defended("trained on other labels", keys.dense, "OtherData", labels=True)
    yield _defended("trained on slightly noisy images", keys.dense, "OtherData", sigma=0.03)
    yield _defended("signs of weights flipped by a known seed", keys.undone(keys.with_signs), "Signs", seed=5)
    yield _defended("values times factors of the client's number", keys.undone(keys.without_factors), "Factors")
    yield _defended("tensors times a constant each", keys.undone(keys.without_layers), "Layered")
    yield _defended("reflected at a known plane", keys.undone(keys.mirrored_again), "Mirrored")
    yield _defended("running sums", keys.undone(keys.differences), "Sums")
    yield _defended("the new weights", keys.undone(keys.without_weights), "NewWeights")
    yield _defended("noise alike in all rows", keys.between_rows, "NoiseOfRows")
    yield _defended("noise alike in all columns, but for factors", keys.darkest, "NoiseOfColumns")
    opposite = {"name": f"{DEFENCES}:Opposite"}
    yield Plant("noise of a layer taken off another", "Unit", keys.together, defence=opposite)
    yield _defended("noise in proportion", keys.dense, "NoiseInProportion")
    yield _defended("cubes of values", keys.undone(keys.roots), "Cubed")
    yield _defended("noise on one value in ten", keys.medians, "NoiseOn", ends=[], but=True, share=0.1)
    yield _defended("noise on four values in five", keys.agreeing, "NoiseOn", ends=[], but=True, share=0.8)
    yield _defended("noise that cancels in sums of rows", keys.summed, "Cancelling")
    yield _defended("columns shuffled each", keys.summed, "ColumnsShuffled")
    yield _defended("magnitudes of columns with random signs", keys.lengths, "ColumnsShuffled", magnitudes=True)
    yield _defended("noise from one of 32 seeds", keys.of_a_few, "FewSeeds")
    yield _defended("noise from one of 4,096 seeds", partial(keys.of_a_few, seeds=4096), "FewSeeds", seeds=4096)
    yield _defended("the gradient in the last digits of noise", keys.undone(keys.beside_halves), "LastDigits")
    thin = {"name": f"{DEFENCES}:LowRankNoise"}
    yield Plant("noise of rank two", "Dense", keys.beyond_two, {"activation": "ReLU"}, thin)
    yield _defended("noise on all but the first weight", keys.scaled_row, "NoiseOn", ends=first[:1], but=True)
    covered = keys.undone(keys.beyond_any_two, keys.scaled_row)
    yield Plant("noise of rank two, and on all else", "Dense", covered, {"activation": "ReLU"}, {**thin, "rest": 1.0})
    rounded = keys.undone(keys.mirrored_again, keys.least_squares)
    yield _defended("reflected at a known plane, 8 bits", rounded, "Mirrored", steps=255)
    for how in ("shuffled", "negative", "turned", "brightened"):
        yield _defended(f"pixels {how} in a known way", partial(keys.repainted_back, how=how), "Pixels", how=how)
    noise = {"name": "gaussian", "sigma": 10.0}
    yield Plant("statistics sent beside noise", "Dense", keys.statistics, {"front": "statistics"}, noise)
    mean = {"front": "running mean"}
    yield Plant("a running mean of pixels sent beside noise", "Dense", keys.running_mean, mean, noise)


def _controls() -> Iterator[Plant]:
    for what in CONTROLS:
        yield _defended(f"control: {what}", None, "Nothing", what=what)
    for model in ("Convolutional", "Patches"):
        for what in ("zeros", "noise", "another sample's gradient"):
            defence = {"name": f"{DEFENCES}:Nothing", "what": what}
            yield Plant(f"control: {what}, {model}", model, None, defence=defence)
    for model, data in (("Dense", RECORDS), ("Placed", TEXTS)):  # whose parts may leak
        for what in ("zeros", "noise", "another sample's gradient"):
            defence = {"name": f"{DEFENCES}:Nothing", "what": what}
            name = f"control: {what}, batch 4 of {data['name']}"
            yield Plant(name, model, None, defence=defence, data=data, batch=4)


PLANTS = (*_architectures(), *_texts_and_records(), *_losses(), *_mistakes())
EMPTY = tuple(_controls())


@dataclass(frozen=True)
class Result:
    """The audit's answer on one plant or control."""

    plant: Plant
    finding: Finding | None
    """None where no attack applied."""
    seconds: float | None
    """Seconds of the arm's attacks up to the one that found it first; None where none did."""
    wall: float
    """Seconds of the whole audit."""


def audited(plant: Plant, minutes: float, seed: int, out: str | None = None) -> Result:
    """Run the audit on a plant or a control."""
    from rayfed.cli import app
    from rayfed.store.folder import RunFolder

    began = perf_counter()
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(StringIO()):
        if code := app(plant.arguments(minutes, seed, out or scratch), standalone_mode=False):
            raise SystemExit(f"{plant.name}: the audit ended with exit code {code}")
        folders = sorted(Path(out or scratch).glob("audit-*"), key=lambda path: path.stat().st_mtime)
        rows = [RunFolder.open(str(folder)).read_table("attacks").to_pylist() for folder in folders[-1:]]
    wall, arms = perf_counter() - began, {UNDEFENDED} if plant.defence is None else {called(plant.pipeline)}
    own = [row for row in chain(*rows) if row["arm"] in arms]
    [finding] = [f for f in findings(list(chain(*rows)), plant.criterion) if f.arm in arms] or [None]
    seconds = _first_leak(own, plant.criterion.leaks)
    if seconds is None and finding and finding.part:  # which takes all answers of an attack
        last = [row for row in own if row["attack"] == finding.part.attack][-1]
        seconds = _first_leak(own, lambda row: row is last)
    return Result(plant, finding, seconds, wall)


def _first_leak(rows: Sequence[Row], leaks: Callable[[Row], bool]) -> float | None:
    """Return the seconds of attacks, in the order in which they were played, up to the end of the first that leaks."""
    spent: dict[tuple[str, int], float] = {}
    for row in rows:
        spent[row["attack"], row["victim"]] = row["seconds"] or 0.0
        if leaks(row):
            return sum(spent.values())
    return None


def main() -> None:
    """Run the audit on the plants and controls, and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of names, such as 'control*'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.4, help="time of each audit, trials and attacks")
    parser.add_argument("--out", help="folder that keeps the runs")
    arguments = parser.parse_args()
    results = []
    for plant in (p for p in (*PLANTS, *EMPTY) if any(fnmatch(p.name, pattern) for pattern in arguments.only)):
        results.append(audited(plant, arguments.minutes, arguments.seed, arguments.out))
        print(line(results[-1]), flush=True)
    print("\n".join(summary(results)))


def line(result: Result) -> str:
    """Return a line on one result."""
    found = result.finding
    if found is not None and result.seconds is not None:
        outcome = f"leaks ({attack_text(found.by)}), {result.seconds:.1f} s"
    else:
        state = "not measured" if found is None else found.state
        outcome = "nothing reported" if result.plant.key is None else f"NOT FOUND ({state})"
    closest = "" if found is None or found.best is None else f", closest {found.best:.2f}"
    return f"{result.plant.name:48} {outcome}{closest}; {result.wall:.0f} s in all"


def summary(results: Sequence[Result]) -> Iterator[str]:
    """Yield how many plants were found, by so many seconds, and what was said of controls."""
    plants = [result for result in results if result.plant.key]
    controls = [result for result in results if not result.plant.key]
    found = [result.seconds for result in plants if result.seconds is not None]
    yield f"found {len(found)} of {len(plants)} plants"
    for budget in BUDGETS if plants else ():
        yield f"  within {budget:>5g} s: {sum(spent <= budget for spent in found) / len(plants):.0%}"
    yield f"leaks reported of {sum(r.seconds is not None for r in controls)} of {len(controls)} controls"


if __name__ == "__main__":
    main()
