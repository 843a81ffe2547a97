"""Is LoRA safer? What texts, bytes, accuracy and epsilon come to when all of a model is trained, adapters, or its head.

    python -m benchmarks.lora --out FOLDER [--cells 'lora*/none'] [--victims 4] [--rounds 11] [--batch 8]
                              [--further 1] [--others 7]

MiniLM (`scenarios/finetune_text.yaml`; it needs the extras `hub` and `weights`) is trained for each cell, a way to
train and a defence, in a run of its own under FOLDER, and attacked in the first round and in the last; then batches of
`--batch` texts, whose search takes far longer, of one client: `--batch 0` leaves these out. `--further` texts are then
sought by attackers who know the defence: `dager` on the mean of a hundred answers behind noise, and `tag` with 200
iterations, who is told what pruning cut, behind it and without a defence. With `--others` one asks what an update
tells of one token to those who know all the others: at how many places of two texts it points to the gradient with the
right token, and to none of so many drawn at random. That is no attack: it says what a search could still go by. A cell
that is there already is not played again, so several processes may share the work. What is there is printed as a
Markdown table: mean shares of tokens in their places, with 95 % intervals over texts (Student's t; exact ones where all
texts came to the same 0 or 1, and of accuracies), of the attack that got most. Seconds are a processor's, of the
training alone. Then accuracies are compared with that of the first cell, on the same test texts (McNemar's exact test):
of one training of each, with one seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.core.shipped import find_shipped
from rayfed.evidence.paired import holm
from rayfed.evidence.settings import estimate_mean
from rayfed.metrics.roc import share
from rayfed.results import loading
from rayfed.runs import runner
from rayfed.scenario.reading import load, parse
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ObservationRequest
from rayfed.simulation.executors.local import local
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.store import checkpoint
from rayfed.store.folder import SCENARIO, RunFolder
from rayfed.update import Observation

TRAINED: dict[str, dict[str, Any]] = {
    "full": {"training": {"lr": 1e-4}},
    "lora8": {"model": {"train": {"lora": {"rank": 8}}}},
    "lora16": {"model": {"train": {"lora": {"rank": 16}}}},
    "head": {"model": {"train": {"layers": ["head"]}}, "training": {"lr": 1e-2}},
}
DEFENCES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "dp_sgd": [{"name": "dp_sgd", "clip": 1.0, "epsilon": 8.0}],
    "gaussian": [{"name": "gaussian", "sigma": 1e-3}],
    "prune": [{"name": "prune", "ratio": 0.9}],
}
CLIENTS, TESTED = 4, 150
METHODS = "dager", "embedding_rows"
MOMENTS = "first", "last"
FURTHER: dict[str, list[dict[str, Any]]] = {
    "none": [{"name": "tag", "iterations": 200}],
    "prune": [{"name": "tag", "iterations": 200, "knowledge": ["defence"]}],
    "gaussian": [{"name": "dager", "averages": 100, "knowledge": ["defence"]}],
    "dp_sgd": [],
}
"""What attackers play who know of a defence, and those who fit where nothing can be read."""


class Clock(Progress):
    """Seconds of this process that go by between the beginning of a round and the last client's update."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def ready(self, first_round: int) -> None:
        """Begin to count."""
        self._begun = process_time()

    def clients_done(self, round: int, done: int, total: int) -> None:
        """Count what went by since the last update, or since the round began."""
        self.seconds += process_time() - self._begun
        self._begun = process_time()

    def round_done(self, rows: Any, attacks: Any, inferences: Any) -> None:
        """Begin to count again."""
        self._begun = process_time()


def played(cell: Path, trained: str, defence: str, rounds: int, victims: int) -> None:
    """Train and attack one cell's model, unless it is there or another process has begun it."""
    scenario = _scenario(trained, defence, rounds, reading((0, rounds - 1), victims))
    try:
        cell.mkdir(parents=True)
    except FileExistsError:
        return
    clock = Clock()
    folder = runner.launch(scenario, str(cell), local, clock)
    told = {"run": folder.url, "seconds": clock.seconds, "hits": hits(folder, trained)}
    (cell / "cell.json").write_text(json.dumps(told), encoding="utf-8")


def hits(folder: RunFolder, arm: str) -> list[bool]:
    """Return of each test text whether the model that a finished run has trained names its author."""
    saved = checkpoint.load(folder)
    assert saved is not None
    inputs = prepare_inputs(parse(folder.read_text(SCENARIO), folder.url))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
    model = saved.server[arm]
    sent = Sent(saved.round + 1, model["weights"], model["buffers"])
    return [worker.evaluate(arm, sent, text, text + 1).right == 1 for text in range(TESTED)]


class Difference(NamedTuple):
    """A share of texts less another share of the same texts."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval, given how many texts one of the two alone got right (exact)."""
    p: float
    """The p value of McNemar's exact test."""
    gained: int
    lost: int


def difference(one: Sequence[bool], other: Sequence[bool]) -> Difference:
    """Return how much more of the same texts `one` gets right than `other`.

    Sources: McNemar 1947; Fagerland et al. 2013, "The McNemar test for binary matched-pairs data".
    """
    from scipy.stats import binomtest  # an import of a second

    gained = sum(a and not b for a, b in zip(one, other, strict=True))
    lost = sum(b and not a for a, b in zip(one, other, strict=True))
    apart, size = gained + lost, len(one)
    if not apart:
        return Difference(0.0, 0.0, 0.0, 1.0, 0, 0)
    ends = share(gained, apart)
    low, high = ((2 * end - 1) * apart / size for end in (ends.low, ends.high))
    return Difference((gained - lost) / size, low, high, float(binomtest(gained, apart).pvalue), gained, lost)


def played_after(cell: Path, called: str, scenario: Any) -> None:
    """Attack the first clients at the first weights and at the last, in folders of that name."""
    if not (cell / "cell.json").exists():
        return
    run = json.loads((cell / "cell.json").read_text(encoding="utf-8"))["run"]
    for moment, after in zip(MOMENTS, (None, run), strict=True):
        try:
            (cell / f"{called}-{moment}").mkdir()
        except FileExistsError:
            continue
        folder = runner.attack(scenario, after, str(cell / f"{called}-{moment}"), local, Progress())
        (cell / f"{called}-{moment}.json").write_text(json.dumps({"run": folder.url}), encoding="utf-8")


def asked(cell: Path, scenario: Any, others: int, texts: int = 2) -> None:
    """Ask at how many places an update tells its token from others, at the first weights and at the last."""
    if not (cell / "cell.json").exists() or (cell / "asked.json").exists():
        return
    saved = checkpoint.load(RunFolder.open(json.loads((cell / "cell.json").read_text(encoding="utf-8"))["run"]))
    assert saved is not None
    told = {}
    for moment, round in zip(MOMENTS, (0, saved.round + 1), strict=True):
        inputs = prepare_inputs(scenario.attacked_in(round), rounds=scenario.federation.rounds)
        [account], [spec, *_] = inputs.accounts, inputs.scenario.attacks
        worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
        arm = worker.arm(account.name)
        model = saved.server[account.name] if round else {"weights": arm.weights, "buffers": arm.buffers}
        sent = Sent(round, model["weights"], model["buffers"])
        _, seen, truths = worker.observe(sent, ObservationRequest(account.name, range(texts), spec))
        told[moment] = sum(named(o, arm.model, t.inputs, t.labels, others) for o, t in zip(seen, truths, strict=True))
        told["of"] = sum(truth.inputs.numel() for truth in truths)
    (cell / "asked.json").write_text(json.dumps(told), encoding="utf-8")


def named(observation: Observation, model: nn.Module, text: Tensor, label: Tensor, others: int) -> int:
    """Return at how many places of a text (1, L) the update points to its token, and to none of so many others.

    Nearness is the cosine, over the values of the update that are not 0, of the gradients with each.
    """
    model, generator = without_tracking(model), torch.Generator().manual_seed(0)
    kept = {name: tensor != 0 for name, tensor in observation.update.items()}

    def nearness(numbers: Tensor) -> float:
        weights, buffers = observation.weights, buffers_for(model, observation)
        found, _ = gradients.gradient(model, weights, buffers, numbers, label)
        found = {name: tensor * kept[name] for name, tensor in found.items()}
        inner = sum(float((found[name] * tensor).sum()) for name, tensor in observation.update.items())
        return inner / float(gradients.norm(found))

    own, count = nearness(text), 0
    for place in range(text.shape[1]):
        drawn = torch.randint(observation.sample.largest, (others,), generator=generator)
        drawn += drawn >= text[0, place]
        changed = text.repeat(others, 1)
        changed[:, place] = drawn
        count += all(nearness(numbers[None]) < own for numbers in changed)
    return count


def reading(rounds: Sequence[int], victims: int, batch: int = 1) -> list[dict[str, Any]]:
    """Return the attacks that read texts, on so many of them in each of these rounds."""
    common = {"rounds": list(rounds), "victims": victims, "batch_size": batch}
    return [{"name": name, **common, **({"starts": 8} if name == "dager" and batch > 1 else {})} for name in METHODS]


def _scenario(trained: str, defence: str, rounds: int, attacks: list[dict[str, Any]]) -> Any:
    attacks = [{"victims_per_call": 1, "observes": "gradient", "rounds": [0], **attack} for attack in attacks]
    changes = {
        "arms": {trained: {**TRAINED[trained], "defences": DEFENCES[defence]}},
        "attacks": attacks,
        "data.test_samples": TESTED,
        "training.steps": 2,
        "training.batch_size": 8,
        "training.sampling": "poisson",
        "federation.rounds": rounds,
        "federation.clients": CLIENTS,
        "federation.evaluate_every": rounds,
    }
    given = [f"{path}={json.dumps(value)}" for path, value in changes.items()]
    return load(find_shipped("scenarios") / "finetune_text.yaml", given)


def _rows(file: Path, table: str) -> list[dict[str, Any]]:
    run = loading.open_results(json.loads(file.read_text(encoding="utf-8"))["run"])
    rows: list[dict[str, Any]] = run.table(table).to_pylist()
    return rows


def found(rows: Sequence[dict[str, Any]], why: set[str]) -> str:
    """Return what the attack that got most found of the tokens; reasons go to `why` where none applies."""
    best: tuple[float, str] | None = None
    for name in dict.fromkeys(row["attack"] for row in rows):
        of_one = [row for row in rows if row["attack"] == name]
        values = [
            row["token_accuracy"] for row in of_one if row["status"] == "ok" and row["token_accuracy"] is not None
        ]
        if not values:
            why.update(f"{name}: {row['message']}" for row in of_one if row["message"])
            continue
        mean = fmean(values)
        if best is None or mean > best[0]:
            best = mean, f"{mean:.0%} [{_interval(values)}], {len(values)} texts, `{name}`"
    return best[1] if best else "NOT MEASURED"


def _interval(values: Sequence[float]) -> str:
    same = len(set(values)) == 1
    if same and values[0] in (0.0, 1.0):
        exact = share(int(sum(values)), len(values))
        return f"{exact.low:.0%}, {exact.high:.0%}"
    told = estimate_mean(values)
    assert told is not None
    if told.low is None or told.high is None:
        return "one text"
    return f"{max(0.0, told.low):.0%}, {min(1.0, told.high):.0%}"


def lines(out: Path, batch: int, further: int, others: int) -> Iterator[str]:
    """Yield the table of all cells that are there, and the reasons for what is not measured."""
    after = {f"{batch} texts": "batch"} if batch else {}
    after |= {"further": "further"} if further else {}
    titles = ["trained", "defence", "accuracy", "kB up", "s", "epsilon", "first step", "last round"]
    titles += [f"{title}, {moment}" for title in after for moment in MOMENTS]
    titles += [f"token told from {others} others, {moment}" for moment in MOMENTS] if others else []
    yield f"| {' | '.join(titles)} |"
    yield "| --- " * len(titles) + "|"
    why: set[str] = set()
    for trained in TRAINED:
        for defence in DEFENCES:
            file = out / trained / defence / "cell.json"
            if not file.exists():
                yield f"| {trained} | {defence} |" + " not measured |" * (len(titles) - 2)
                continue
            told = json.loads(file.read_text(encoding="utf-8"))
            rounds, attacks = _rows(file, "rounds"), _rows(file, "attacks")
            account = [row["epsilon"] for row in _rows(file, "privacy") if row["epsilon"] is not None]
            accuracy = [row["test_accuracy"] for row in rounds if row["test_accuracy"] is not None][-1]
            right = share(round(accuracy * TESTED), TESTED)
            cells = [
                f"{accuracy:.0%} [{right.low:.0%}, {right.high:.0%}]",
                f"{rounds[-1]['bytes_up'] / rounds[-1]['clients'] / 1e3:,.1f}",
                f"{told['seconds']:.0f}",
                f"{account[-1]:.2f}" if account else "none",
            ]
            first, last = (of(row["round"] for row in attacks) for of in (min, max))
            cells += [found([row for row in attacks if row["round"] == at], why) for at in (first, last)]
            for called, moment in product(after.values(), MOMENTS):
                played_so = file.parent / f"{called}-{moment}.json"
                cells.append(found(_rows(played_so, "attacks"), why) if played_so.exists() else "not played")
            if others:
                told = (
                    json.loads(known.read_text(encoding="utf-8"))
                    if (known := file.parent / "asked.json").exists()
                    else {}
                )
                cells += [f"{told[moment]} of {told['of']}" if told else "not played" for moment in MOMENTS]
            yield f"| {trained} | {defence} | {' | '.join(cells)} |"
    yield from ("", "Not measured:", *(f"- {reason}" for reason in sorted(why)))


def compared(out: Path) -> Iterator[str]:
    """Yield the table of accuracies against that of the first cell, where both are there."""
    files = {f"{t} {d}": out / t / d / "cell.json" for t in TRAINED for d in DEFENCES}
    found = {n: json.loads(f.read_text(encoding="utf-8"))["hits"] for n, f in files.items() if f.exists()}
    first = next(iter(files))
    if first not in found:
        return
    differences = {name: difference(own, found[first]) for name, own in found.items() if name != first}
    corrected = holm([one.p for one in differences.values()])
    yield f"| accuracy less that of {first} | points | texts gained | lost | p (McNemar) | p (Holm) |"
    yield "| --- " * 6 + "|"
    for (name, one), p in zip(differences.items(), corrected, strict=True):
        points = f"{100 * one.value:+.1f} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
        yield f"| {name} | {points} | {one.gained} | {one.lost} | {one.p:.2g} | {p:.2g} |"


def main() -> None:
    """Play the cells that are not there and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", default="*", help="pattern of TRAINED/DEFENCE; `none` plays nothing")
    for name, default in (("victims", CLIENTS), ("rounds", 11), ("batch", 8), ("further", 1), ("others", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    wanted = [(t, d) for d in DEFENCES for t in TRAINED if fnmatch(f"{t}/{d}", given.cells)]
    for trained, defence in wanted:
        played(given.out / trained / defence, trained, defence, given.rounds, given.victims)
    for trained, defence in wanted:
        cell = given.out / trained / defence
        if given.batch:
            attacks = reading([0], 1, given.batch)
            played_after(cell, "batch", _scenario(trained, defence, given.rounds, attacks))
        if given.further and FURTHER[defence]:
            attacks = [{**attack, "victims": given.further} for attack in FURTHER[defence]]
            played_after(cell, "further", _scenario(trained, defence, given.rounds, attacks))
        if given.others:
            asked(cell, _scenario(trained, defence, given.rounds, reading([0], CLIENTS)), given.others)
    print("\n".join([*lines(given.out, given.batch, given.further, given.others), "", *compared(given.out)]))


if __name__ == "__main__":
    main()
