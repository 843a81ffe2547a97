"""Private layers and passports against their paper: what is learnt, what attackers see, what it costs.

    python -m benchmarks.private_models table --data FOLDER [--case lenet|lenet5|alexnet] [--arms none passport ...]
                                              [--rounds 20] [--samples 1000] [--victims 4] [--attacks dlg ...]
    python -m benchmarks.private_models cost [--case lenet5|alexnet|lenet_batch|resnet20] [--defences key_lock ...]
    python -m benchmarks.private_models scales

FOLDER holds `mnist` (IDX files) and `cifar10/lossless-train.parquet`. `table`: accuracy, seconds a round (the private
stage is one more pass over the data), BP_MSE and BP_KI of the attacks before the first and after the last round, one
image a victim, and the numbers of the paper's figures 4 and 5. `cost`: CPU seconds of a training step beside those
of the model without private parts, taken in turns. `scales`: initial size of the passports' scale, and its relative
difference between two clients with the same weights, over 200 initialisations of AlexNet's first convolution. One
process, one thread, no Ray.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from time import process_time
from typing import Any

import torch

from rayfed.aggregation.server import GlobalModel
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.attacks.base import Reconstruction
from rayfed.core.documents import load_yaml
from rayfed.core.seeds import torch_generator
from rayfed.defences.base import Batch, Task
from rayfed.gradients import buffers_of, weights_of
from rayfed.metrics.bayesian import knowledge_increment
from rayfed.metrics.images import mse
from rayfed.models.build import build_model
from rayfed.models.passport import Passport as PassportConv
from rayfed.models.passport import PassportShape
from rayfed.models.private import freeze
from rayfed.scenario import AttackSpec, DefenceSpec, ModelSpec, Scenario, Training, parse
from rayfed.simulation.client.arm import Arm, aggregation_of, build_arm
from rayfed.simulation.client.local import update_method
from rayfed.simulation.client.server_message import Sent, State
from rayfed.simulation.client.visit import ClientVisit, Truth
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Observation

ARMS = {
    "none": "[]",
    "dldp_a": "[dldp_a]",
    "dldp_b": "[dldp_b]",
    "split": "[split]",
    "split_own": "[{name: split, start: own}]",
    "passport": "[passport]",
    "passport_own": "[{name: passport, start: own}]",
    "passport_penalised": "[{name: passport, consistency: 1}]",
    "passport_published": "[{name: passport, size: 28, deviation: 1, block: published}]",
}
CASES: dict[str, tuple[str, tuple[int, int, int]]] = {
    "lenet": ("{name: lenet, activation: sigmoid, init: uniform}", (1, 28, 28)),
    "lenet_batch": ("{name: lenet, norm: batch}", (1, 28, 28)),
    "lenet_group": ("{name: lenet, norm: group}", (1, 28, 28)),
    "lenet5": ("{name: lenet5}", (1, 28, 28)),
    "lenet5_batch": ("{name: lenet5, norm: batch}", (1, 28, 28)),
    "alexnet": ("{name: alexnet}", (3, 32, 32)),
    "alexnet_smooth": ("{name: alexnet, activation: sigmoid}", (3, 32, 32)),
    "alexnet_group": ("{name: alexnet, norm: group}", (3, 32, 32)),
    "resnet18": ("{name: resnet18}", (3, 32, 32)),
    "resnet20": ("{name: resnet20}", (3, 32, 32)),
}
"""Model and shape of the images; `lenet` is the one that DLG was published with."""


def scenario(chosen: argparse.Namespace) -> Scenario:
    """The paper's table 3 but for the numbers of clients, samples and rounds, and the decay of the learning rate."""
    model, shape = CASES[chosen.case]
    mnist = f"{{name: mnist, root: {chosen.data}/mnist"
    cifar = f"{{name: parquet, train: {chosen.data}/cifar10/lossless-train.parquet"
    data = f"{mnist if shape[0] == 1 else cifar}, test_samples: {chosen.tests}"
    seen = f"observes: gradient, victims: {chosen.victims}, victims_per_call: {chosen.victims}, tv: {chosen.tv}"
    return parse(f"""
name: private-models
seed: {chosen.seed}
data: {data}, train_samples: {chosen.samples}}}
model: {model}
training: {{epochs: 1, batch_size: 10, lr: {chosen.lr}, momentum: 0.9}}
federation: {{rounds: {chosen.rounds}, clients: {chosen.clients}}}
arms: {{{", ".join(f"{arm}: {ARMS[arm]}" for arm in chosen.arms)}}}
attacks:
  - {{name: dlg, {seen.rpartition(",")[0]}, iterations: {chosen.iterations}, restarts: {chosen.restarts}}}
  - {{name: model_inversion, {seen}, knowledge: [activations, colluder], cut: act1}}
""")


@dataclass
class Run:
    """A federation in this process: what the actors do, one after the other."""

    scenario: Scenario
    runtime: ClientWorker
    arm: str
    model: GlobalModel
    states: dict[int, State] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """Wall time of each round's training, private stage included."""

    @classmethod
    def of(cls, scenario: Scenario, runtime: ClientWorker, arm: str) -> Run:
        built, lr = runtime.arm(arm), runtime.specs[arm].server_lr
        return cls(
            scenario, runtime, arm, GlobalModel(built.weights, built.buffers, optimiser=ServerOptimiser("sgd", lr, 0.0))
        )

    def play(self) -> Iterator[Sent]:
        """What is sent in each round, and last what would be sent in one more."""
        clients, rule = range(self.scenario.federation.clients), aggregation_of(self.runtime.specs[self.arm])
        for round in range(self.scenario.federation.rounds):
            sent = Sent(round, self.model.weights, self.model.buffers)
            yield sent
            partial, report = self.runtime.cohort(self.arm, sent, clients, self.states)
            self.states |= report.states
            self.seconds.append(report.seconds)
            self.model.apply(*rule.combine(partial, torch_generator(round)))
        yield Sent(self.scenario.federation.rounds, self.model.weights, self.model.buffers)

    def accuracy(self, sent: Sent) -> float:
        """On the test set; the mean over the clients, each with its own private part, where they have one."""
        if not self.runtime.arm(self.arm).private:
            size = len(self.runtime.data.test_labels)
            return self.runtime.evaluate(self.arm, sent, 0, size)[1] / size
        return mean(
            self.runtime.evaluate_member(self.arm, sent, client, state, ["test"])["test"][1]
            for client, state in self.states.items()
        )

    def attack(self, spec: AttackSpec, sent: Sent) -> list[tuple[Truth, Reconstruction]]:
        """What comes of an attack on the first clients, with what an attacker's own actor would be given."""
        seen: list[Observation] = []
        truths: list[Truth] = []
        assert isinstance(spec.victims, int)
        for victim in range(spec.victims):
            observation, truth = ObservationBuilder(self.runtime).observe(
                ClientVisit(self.arm, sent, victim, self.states), spec
            )
            seen.append(observation)
            truths.append(truth)
        arm = attackers_view(self.arm, self.runtime)
        freeze(arm.model, arm.private - seen[0].weights.keys())
        generators = [torch.Generator().manual_seed(victim) for victim in range(len(seen))]
        return list(zip(truths, spec.build().reconstruct(seen, arm.model, generators), strict=True))


def attackers_view(arm: str, runtime: ClientWorker) -> Arm:
    data = runtime.data
    return build_arm(runtime.specs[arm], data.sample, len(data.classes), seed=0)


def error(outcomes: Sequence[tuple[Truth, Reconstruction]]) -> str:
    """The paper's two measures over the images: mean squared error in [0, 1], and the increase in knowledge."""
    found = [float(mse(truth.inputs.cpu(), guess.images)) for truth, guess in outcomes]
    learnt = mean(float(knowledge_increment(truth.inputs.cpu(), guess.images)) for truth, guess in outcomes)
    spread = stdev(found) if len(found) > 1 else 0
    return f"BP_MSE {mean(found):.1e} +- {spread:.1e} (median {median(found):.1e}), BP_KI {learnt:.2f}"


def table(chosen: argparse.Namespace) -> None:
    """A block for every arm, as in the paper's table 1 and its figures 4 and 5."""
    s = scenario(chosen)
    inputs = prepare_inputs(s)
    attacks = [attack for attack in s.attacks if attack.name in chosen.attacks]
    for arm in chosen.arms:
        runtime = ClientWorker(s, inputs.data, inputs.parts, torch.device("cpu"))
        run = Run.of(s, runtime, arm)
        layers: list[str] = []
        for sent in run.play():
            if sent.round in (1, s.federation.rounds) and runtime.arm(arm).private:
                [row] = runtime.private_layers(arm, list(run.states.values()))
                layers.append(", ".join(f"{name} {row[name]:.3g}" for name in ("distance", "rank", "scale")))
            if sent.round in (0, s.federation.rounds):
                for attack in attacks:
                    found = error(run.attack(attack, sent))
                    print(f"{chosen.case} {arm}: round {sent.round}, {attack.name}: {found}", flush=True)
        seconds = median(run.seconds[1:] or run.seconds)
        print(f"{chosen.case} {arm}: accuracy {run.accuracy(sent):.1%}, {seconds:.1f} s a round", flush=True)
        for when, words in zip(("after the first round", "at the end"), layers, strict=False):
            print(f"{chosen.case} {arm}: {when} {words}", flush=True)


def cost(chosen: argparse.Namespace) -> None:
    """CPU seconds of a local round of 20 steps over those of the model as it was, in turns."""
    written, shape = CASES[chosen.case]
    name, parameters = (spec := ModelSpec(**load_yaml(written))).name, spec.parameters
    images = torch.rand(20 * chosen.batch, *shape, generator=torch.Generator().manual_seed(0))
    data = Batch(images, torch.arange(len(images)) % 10)
    training = Training(epochs=1, batch_size=chosen.batch, lr=0.01, momentum=0.9)

    def side(defence: str | None) -> Callable[[], Any]:
        model = build_model(name, parameters, shape, 10, seed=0)
        if defence:
            model = DefenceSpec(name=defence).build().adapt_model(model)
        task = Task(0, 0, model.train(), weights_of(model), buffers_of(model), data, torch.Generator(), order=0)
        return lambda: update_method(training, [])(task)

    sides = {defence or "none": side(defence) for defence in (None, *chosen.defences)}
    seconds: dict[str, list[float]] = {defence: [] for defence in sides}
    for act in sides.values():
        act()
    for _ in range(chosen.repeats):
        for defence, act in sides.items():
            began = process_time()
            act()
            seconds[defence].append((process_time() - began) / 20)
    for defence, spent in seconds.items():
        least = min(spent)  # of many: what else computes on the machine only adds
        ratio = least / min(seconds["none"])
        print(f"{chosen.case} batch {chosen.batch} {defence:9} {1000 * least:.2f} ms, {ratio:.2f} times plain")


def scales(chosen: argparse.Namespace) -> None:
    """A line for each kind of passport."""
    kinds = {
        "linear, 8x8, N(0, 8^2)": PassportShape(8, 0.0, 8.0, "normal", "linear"),
        "linear, 32x32, N(0, 1)": PassportShape(32, 0.0, 1.0, "normal", "linear"),
        "published, 32x32, N(0, 1)": PassportShape(32, 0.0, 1.0, "normal", "published"),
        "published, 32x32, U(-1, 1)": PassportShape(32, 0.0, 1.0, "uniform", "published"),
        "published, 32x32, N(-1, 1)": PassportShape(32, -1.0, 1.0, "normal", "published"),
    }
    for kind, shape in kinds.items():
        sizes, apart = [], []
        for seed in range(200):
            torch.manual_seed(seed)
            block = PassportConv(torch.nn.Conv2d(3, 64, 5, padding=2), None, True, shape)
            own = block.scale().detach()
            block.passports = shape.sample(3)
            others = block.scale().detach()
            sizes.append(float(own.abs().mean()))
            apart.append(float((own - others).norm() / own.norm()))
        print(f"{kind}: mean |gamma| {mean(sizes):.4f}, relative difference of two clients {median(apart):.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("table", "cost", "scales"))
    parser.add_argument("--data")
    parser.add_argument("--case", choices=CASES, default="lenet5")
    parser.add_argument("--arms", nargs="*", default=["none", "dldp_a", "dldp_b", "split", "passport"], choices=ARMS)
    parser.add_argument("--defences", nargs="*", default=["split", "passport"], help="of cost; key_lock takes norms")
    parser.add_argument("--attacks", nargs="*", default=["dlg", "model_inversion"])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--tests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=30, help="of DLG")
    parser.add_argument("--restarts", type=int, default=1, help="of DLG")
    parser.add_argument("--tv", type=float, default=0.1, help="of model inversion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=10, help="of cost")
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    {"table": table, "cost": cost, "scales": scales}[chosen.what](chosen)


if __name__ == "__main__":
    main()
