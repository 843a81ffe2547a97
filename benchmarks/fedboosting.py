"""FedBoosting against federated averaging: on points in the plane, with poisoned clients, with unlike clients.

    python -m benchmarks.fedboosting toy [--seeds 1 2 3] [--out docs/toy-boundaries.png]
    python -m benchmarks.fedboosting poison [--seeds 1 2 3] [--set PATH=VALUE ...] [--arms fedavg paper ...]
    python -m benchmarks.fedboosting unlike [--seeds 1 2 3] [--set PATH=VALUE ...] [--arms fedavg paper ...]
    python -m benchmarks.fedboosting encrypted [--seeds 1 2 3] [--set PATH=VALUE ...]

`toy`: scenarios/toy.yaml, then with one client that has all points; plots the decision boundaries of the first seed.
`poison`: ten clients, of whom the first three call every digit by the next one's name, in what they validate on, too; a
weight of theirs over the honest mean, the mean of all rounds and of the last. `unlike`: digits dealt by a Dirichlet
distribution. `encrypted`: the same data under protections and fusion, and how far a mixture points away from its own
update in the first round; sums are exact, so short keys change nothing but the time. `--set data.root=FOLDER` with
`--set data.name=...:FlippedMnist` or `mnist` takes MNIST instead of scikit-learn's digits. No Ray, one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from rayfed import scenario as scenarios
from rayfed.aggregation.base import InteractiveAggregation
from rayfed.aggregation.server import GlobalModel, TreeFold
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.core import seeds
from rayfed.data.base import Dataset
from rayfed.data.sets.digits import Digits
from rayfed.data.sets.gaussian_toy import EXTENT
from rayfed.data.sets.mnist import MNIST
from rayfed.registry import component
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import aggregation_of
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import Inputs, prepare_inputs

FLIPPERS, CLIENTS = 3, 10
TOY = Path(__file__).parent.parent / "scenarios" / "toy.yaml"
ARMS: dict[str, dict[str, Any] | None] = {
    "fedavg": None,
    "paper": {},
    "paper-by-loss": {"score": "loss"},
    "paper-without-T": {"training_loss": False},
    "sharp": {"training_loss": False, "sharpness": 10},
    "sharp-smooth": {"training_loss": False, "sharpness": 10, "smoothing": 0.1},
    "code": {"rule": "code"},
    "code-without-T": {"rule": "code", "training_loss": False},
    "code-by-loss": {"rule": "code", "score": "loss"},
}
"""Arm -> FedBoosting's parameters; `T` is the training loss."""
_PAPER: dict[str, Any] = {"name": "fedboosting"}
_SHARP: dict[str, Any] = {"name": "fedboosting", "training_loss": False, "sharpness": 10}
_FUSED = {"fusion": 0.9}
_PAILLIER = {"name": "paillier", "key_bits": 256, "insecure": True}
ENCRYPTED: dict[str, dict[str, Any]] = {
    "plain": {"aggregation": _PAPER},
    "fused": {"aggregation": _PAPER | _FUSED},
    "ckks": {"aggregation": _PAPER, "protection": "ckks"},
    "ckks, fused": {"aggregation": _PAPER | _FUSED, "protection": "ckks"},
    "sharp": {"aggregation": _SHARP},
    "sharp, fused": {"aggregation": _SHARP | _FUSED},
    "sharp, bfv, fused": {"aggregation": _SHARP | _FUSED, "protection": "bfv"},
    "paillier": {"aggregation": _PAPER, "protection": _PAILLIER},
    "paillier, fused": {"aggregation": _PAPER | _FUSED, "protection": _PAILLIER},
}
POISON = """
name: poison
data: {name: 'benchmarks.fedboosting:FlippedDigits', size: 8}
partition: 'benchmarks.fedboosting:EveryTenth'
model: {name: mlp, hidden: [64]}
training: {batch_size: 8, epochs: 2, lr: 0.1}
federation: {rounds: 10, clients: 10, validation: 0.2}
"""
UNLIKE = """
name: unlike
data: {name: digits, size: 8}
partition: {name: dirichlet, alpha: 0.3}
model: {name: mlp, hidden: [64]}
training: {batch_size: 8, epochs: 5, lr: 0.1}
federation: {rounds: 10, clients: 10, validation: 0.2}
"""


def flipped(data: Dataset) -> Dataset:
    """The first three of every ten training samples called by the next class's name."""
    wrong = np.arange(len(data.train_labels)) % CLIENTS < FLIPPERS
    return replace(data, train_labels=(data.train_labels + wrong) % len(data.classes))


@component
class FlippedDigits(Digits):
    def load(self) -> Dataset:
        return flipped(super().load())


@component
class FlippedMnist(MNIST):
    def load(self) -> Dataset:
        return flipped(super().load())


@component
class EveryTenth:
    """Client i has the samples whose index ends in i: the first three have all those that are flipped."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [rng.permutation(np.arange(client, len(labels), clients)) for client in range(clients)]


@dataclass(frozen=True)
class Played:
    """One round of one arm."""

    accuracy: float
    weights: dict[int, float]
    """By client; empty where the rule has none to tell."""
    model: GlobalModel


def play(inputs: Inputs, arm: str) -> Iterator[Played]:
    """The rounds of one arm, as the actors play them."""
    s, samples = inputs.scenario, len(inputs.data.test_labels)
    runtime = ClientWorker(s, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    rule = aggregation_of(runtime.specs[arm])
    keys = b""
    if protecting := plan.protecting(s, runtime.specs[arm], inputs.parts.sizes):
        rule, keys = protecting.wrap(rule), runtime.make_keys(arm)
    built = runtime.arm(arm)
    model = GlobalModel(built.weights, built.buffers, ServerOptimiser("sgd", built.spec.server_lr))
    for round in range(s.federation.rounds):
        sent, cohorts = Sent(round, model.weights, model.buffers, keys), plan.cohorts(s, round)
        fold = TreeFold(rule, len(cohorts))
        for index, clients in enumerate(cohorts):
            fold.add(index, runtime.cohort(arm, sent, clients, {})[0])
        total, weights = fold.total(), {}
        if isinstance(rule, InteractiveAggregation):
            members = plan.drawn_clients(s, round)
            total = rule.begin_round(members, model.memory).finalise(total)
            while question := total.request():
                asked = members[: 1 if question.of == "one" else None]
                total = total.receive({c: runtime.answer(arm, sent, question.payload, c, {}, {})[1] for c in asked})
            model.memory = total.remembered()
            weights = {row["client"]: row["weight"] for row in total.rows().get("weights", [])}
        model.apply(*rule.combine(total, seeds.torch_generator(s.seed, "server", round, arm)))
        right = runtime.evaluate(arm, Sent(round + 1, model.weights, model.buffers), 0, samples)[1]
        yield Played(right / samples, weights, model)


def prepared(text: str, seed: int, changes: Sequence[str], arms: Sequence[str]) -> Inputs:
    """A scenario with these of `ARMS`."""
    listed = {
        arm: {} if (own := ARMS[arm]) is None else {"aggregation": {"name": "fedboosting", **own}} for arm in arms
    }
    return prepare_inputs(scenarios.parse(text, changes=[*changes, f"seed={seed}", f"arms={listed}"]))


def shares(played: Played) -> float:
    """The mean weight of those who flip labels, over the mean of the others."""
    weights = list(played.weights.values())
    return fmean(weights[:FLIPPERS]) / fmean(weights[FLIPPERS:]) if weights else 1.0


def compare(chosen: argparse.Namespace) -> None:
    """A line for every arm: accuracy by seed after the last round; of whom flips labels, the weight."""
    text = {"poison": POISON, "unlike": UNLIKE}[chosen.what]
    for arm in chosen.arms:
        runs = [list(play(prepared(text, seed, chosen.set, [arm]), arm)) for seed in chosen.seeds]
        last = [run[-1].accuracy for run in runs]
        line = f"{arm:16} accuracy {fmean(last):.1%} ({', '.join(f'{100 * a:.1f}' for a in last)})"
        early = fmean(run[2].accuracy for run in runs)
        line += f"; after 3 rounds {early:.1%}"
        if chosen.what == "poison":
            ends = fmean(shares(run[-1]) for run in runs)
            line += f"; weight {fmean(shares(p) for run in runs for p in run):.2f}, last {ends:.2f}"
        elif runs[0][-1].weights:
            spread = [max(p.weights.values()) / min(p.weights.values()) for run in runs for p in run]
            line += f"; largest weight over smallest {fmean(spread):.2f}"
        print(line, flush=True)


def encrypted(chosen: argparse.Namespace) -> None:
    """A line for every arm: accuracy by seed, and the least cosine between an update and what is shown for it."""
    for arm, own in ENCRYPTED.items():
        accuracies, cosines = [], []
        for seed in chosen.seeds:
            inputs = prepare_inputs(
                scenarios.parse(UNLIKE, changes=[f"seed={seed}", f"arms={ {arm: own} }", *chosen.set])
            )
            accuracies.append(list(play(inputs, arm))[-1].accuracy)
            cosines.append(least_cosine(inputs, arm))
        by_seed = ", ".join(f"{accuracy:.1%}" for accuracy in accuracies)
        print(f"{arm:24} accuracy {fmean(accuracies):.1%} ({by_seed}); cosine {min(cosines):.4f}", flush=True)


def least_cosine(inputs: Inputs, arm: str) -> float:
    """Between a client's update of the first round and what stands for it."""
    runtime = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    keys = runtime.make_keys(arm) if runtime.specs[arm].protection else b""
    seen = runtime.mixtures(arm, Sent(0, runtime.arm(arm).weights, runtime.arm(arm).buffers, keys), {})
    assert seen is not None
    shown = torch.stack([torch.cat([t.ravel() for t in update.values()]) for update in seen.updates.values()]).double()
    return float(torch.cosine_similarity(torch.linalg.solve(seen.shares, shown), shown).min())


def toy(chosen: argparse.Namespace) -> None:
    """Accuracy, and where the boundary differs from that of the model that was trained on all points."""
    text, drawn = TOY.read_text(), {}
    for seed in chosen.seeds:
        changes = [f"seed={seed}", f"data.seed={seed}", *chosen.set]
        alone = ["federation.clients=1", "arms={centralised: []}"]
        all_inputs = prepare_inputs(scenarios.parse(text, changes=[*changes, *alone]))
        inputs = prepare_inputs(scenarios.parse(text, changes=changes))
        runs = {arm: list(play(inputs, arm)) for arm in inputs.scenario.played}
        runs["centralised"] = list(play(all_inputs, "centralised"))
        planes = {arm: plane(all_inputs, rounds[-1].model) for arm, rounds in runs.items()}
        for arm, rounds in runs.items():
            apart = float((planes[arm] != planes["centralised"]).float().mean())
            weights = [round(w, 3) for w in rounds[-1].weights.values()]
            print(f"seed {seed} {arm:12} accuracy {rounds[-1].accuracy:.2%}, plane apart {apart:.2%} {weights or ''}")
        drawn = drawn or {arm: (inputs.data, found) for arm, found in planes.items()}
    if chosen.out:
        draw(drawn, chosen.out)


@torch.no_grad()
def plane(inputs: Inputs, model: GlobalModel) -> Tensor:
    """(256, 256) the class of every point of the grid, rows from below."""
    runtime = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
    axis = torch.linspace(0, 1, 256)
    points = torch.cartesian_prod(axis, axis).flip(1).reshape(-1, 1, 1, 2)
    logits = functional_call(runtime.arm("centralised").model, {**model.weights, **model.buffers}, (points,))
    return logits.argmax(1).reshape(256, 256)


def draw(planes: dict[str, tuple[Dataset, Tensor]], out: str) -> None:
    """The boundaries beside one another, over the test points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (arm, (data, found)) in zip(figure.subplots(1, len(planes)), planes.items(), strict=True):
        x, y = 2 * EXTENT * data.test_images.reshape(-1, 2).T / 255 - EXTENT
        axes.scatter(x, y, 3, np.array(["tab:blue", "tab:orange"])[data.test_labels], alpha=0.5, linewidths=0)
        axis = np.linspace(-EXTENT, EXTENT, 256)
        axes.contour(axis, axis, found.numpy(), levels=[0.5], colors="black")
        axes.set_title(arm)
        axes.set_aspect("equal")
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["toy", "poison", "unlike", "encrypted"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--out", help="where the toy's picture goes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    {"toy": toy, "encrypted": encrypted}.get(chosen.what, compare)(chosen)


if __name__ == "__main__":
    main()
