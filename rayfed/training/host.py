"""The clients' side of a run: hosts every virtual client's data and does their work, with or without Ray around it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from rayfed import seeds
from rayfed.aggregation.base import Aggregation
from rayfed.attacks.base import Inference, MaliciousServer
from rayfed.data.base import Dataset
from rayfed.defences.base import Batch, Task
from rayfed.errors import UserError
from rayfed.metrics.inference import auc, class_share, correct, nearest
from rayfed.models.front import Front
from rayfed.scenario import AttackSpec, Scenario, Training
from rayfed.training import plan
from rayfed.training.arm import Arm, build_arm
from rayfed.training.cohort import cohort_updates
from rayfed.training.local import batches, local_training, training_method, update_method
from rayfed.update import Named, Observation, Update

State = dict[str, Any]

MOST_CANDIDATES = 500
"""Candidates that a membership attack is asked about at most; one half are members."""


@dataclass(frozen=True)
class Sent:
    """What the server sends in one round of one arm."""

    round: int
    weights: Named
    buffers: Named


@dataclass(frozen=True)
class CohortReport:
    """What the simulator, and nobody in the federation, learns of a cohort's work."""

    rows: list[dict[str, Any]]
    """A row of the clients' table for each client."""
    states: dict[int, State] = field(default_factory=dict)
    """The clients' own memories, to be handed back to them next time."""


@dataclass(frozen=True)
class Truth:
    """What lies behind an observation; for scoring alone."""

    images: Tensor
    """(N, C, H, W) in [0, 1]."""
    labels: Tensor
    """(N,) int64."""
    members: Tensor | None = None
    """(M,) bool, which of the observation's candidates are among the images; None where it has none."""


class Host:
    """Does the local rounds of any client of a scenario."""

    def __init__(self, scenario: Scenario, data: Dataset, parts: Sequence[np.ndarray], device: torch.device) -> None:
        """`parts[i]` are the training indices of client i."""
        self.scenario, self.data, self.parts, self.device = scenario, data, parts, device
        self.aggregation: Aggregation = scenario.federation.aggregation.build()
        self._arms: dict[str, Arm] = {}

    def arm(self, name: str) -> Arm:
        """An arm, built when it is first asked for."""
        if name not in self._arms:
            s, d = self.scenario, self.data
            arm = build_arm(s.model, s.stacks[name], d.image_shape, len(d.classes), s.seed)
            self._arms[name] = replace(arm, model=arm.model.to(self.device))
        return self._arms[name]

    def cohort(
        self, arm: str, sent: Sent, clients: Sequence[int], states: Mapping[int, State]
    ) -> tuple[Any, CohortReport]:
        """The cohort's partial result for the aggregation, and the report on its clients.

        Raises `UserError` when a client's update is not finite.
        """
        sent = self._here(sent)
        tasks = [self._task(arm, sent, c, self.parts[c], states.get(c, {})) for c in clients]
        rows: list[dict[str, Any]] = []
        updates = cohort_updates(tasks, self.scenario.training, self.arm(arm).defences)
        partial = self.aggregation.partial(_recorded(arm, updates, rows))
        return partial, CohortReport(rows, {t.client: t.state for t in tasks if t.state})

    def observe(
        self, arm: str, sent: Sent, client: int, attack: AttackSpec, states: Mapping[int, State]
    ) -> tuple[Observation, Truth]:
        """What the attack sees of one client in this round, and the truth behind it.

        The client's work is done again from the same keys, so under `observes: update` this is the very update that it
        sent, and nothing has to be kept for attackers while a round is played. A malicious server's victims work on
        the model that it tampered with; the run itself goes on with what they do on the true one.
        """
        sent = self._here(sent)
        training, indices = self.scenario.training, self.parts[client]
        if attack.observes == "gradient":
            training = Training(algorithm="fedsgd", batch_size=None)
            draw = seeds.numpy_generator(self.scenario.seed, "victim", sent.round, client)
            indices = draw.choice(indices, attack.batch_size, replace=False)
        task = self._task(arm, sent, client, indices, copy.deepcopy(states.get(client, {})))
        task = self._tampered(task, attack)
        update = update_method(training, self.arm(arm).defences)(task)
        used = torch.cat(list(batches(len(indices), training, task.order))).unique().to(self.device)
        truth = Truth(task.data.images[used], task.data.labels[used])
        granted = self._granted(arm, sent, client, attack, truth.images, states)
        if "candidates" in attack.knowledge:
            granted["candidates"], members = self._candidates(truth, sent.round, client)
            truth = replace(truth, members=members)
        local = local_training(len(indices), training)
        observation = Observation(
            victim=client,
            round=sent.round,
            weights=task.weights,
            buffers=task.buffers,
            update=update.tensors,
            scale=local.scale,
            batch_size=len(truth.labels),
            image_shape=self.data.image_shape,
            classes=len(self.data.classes),
            # sorted: which labels is knowledge, which image has which is not
            labels=truth.labels.sort().values if "labels" in attack.knowledge else None,
            local=local,
            extra=granted,
        )
        return observation, truth

    def judge(self, truth: Truth, guess: Inference) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
        """An inference's row for the inferences' table, less the columns of its call; pairs of a true image, the
        nearest of that class in the victim's data, and an image that the attack made.
        """
        asked = {"auc": len(guess.scores), "accuracy": len(guess.scores), "class_share": len(guess.images)}
        row = {"metric": guess.metric, "value": None, "chance": guess.chance, "candidates": asked[guess.metric]}
        if guess.status != "ok":
            return row, []
        if guess.metric == "auc":
            assert truth.members is not None
            return row | {"value": auc(guess.scores, truth.members)}, []
        of_class = truth.labels == guess.label
        if guess.metric == "accuracy":
            return row | {"value": correct(guess.scores, bool(of_class.any()))}, []
        every = np.arange(len(self.data.test_labels))
        images, known = guess.images.to(self.device), self._tensors(self.data.test_images, self.data.test_labels, every)
        row["value"] = class_share(images, guess.label, *known)
        if not of_class.any():
            return row, []
        return row, list(zip(nearest(images, truth.images[of_class]), images, strict=True))

    @torch.no_grad()
    def evaluate(self, arm: str, sent: Sent, start: int, stop: int) -> tuple[float, int]:
        """Summed loss and correct predictions on a slice of the test set."""
        sent, model = self._here(sent), self.arm(arm).model
        loss, correct = 0.0, 0
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        for low in range(start, stop, 500):
            rows = np.arange(low, min(low + 500, stop))
            images, labels = self._tensors(self.data.test_images, self.data.test_labels, rows)
            logits = functional_call(model, {**sent.weights, **sent.buffers}, (images,))
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            correct += int((logits.argmax(dim=1) == labels).sum())
        for module, mode in modes:
            module.training = mode
        return loss, correct

    def _granted(
        self, arm: str, sent: Sent, client: int, attack: AttackSpec, images: Tensor, states: Mapping[int, State]
    ) -> dict[str, Any]:
        """What the scenario's threat model grants beyond the protocol, by the name of the knowledge."""
        granted: dict[str, Any] = {}
        if "public" in attack.knowledge:
            granted["public"] = self._public
        if "activations" in attack.knowledge:
            state = self._trained(arm, sent, client, states)
            with torch.no_grad(), torch.random.fork_rng():  # dropout knows the global stream only
                torch.manual_seed(self._order(sent, client))
                granted["activations"] = self._front(arm, attack)(state, images)
        if "colluder" in attack.knowledge:
            state = self._trained(arm, sent, plan.colluder(self.scenario, sent.round, client), states)
            names = self._front(arm, attack).names(self.data.image_shape)
            granted["colluder"] = {name: state[name] for name in names}
        return granted

    def _front(self, arm: str, attack: AttackSpec) -> Front:
        return Front(self.arm(arm).model, attack.parameters["cut"])

    def _trained(self, arm: str, sent: Sent, client: int, states: Mapping[int, State]) -> Named:
        """A client's own weights and buffers after its local training of this round, before what defends the update."""
        training = self.scenario.training
        task = self._task(arm, sent, client, self.parts[client], copy.deepcopy(states.get(client, {})))
        update = training_method(training, self.arm(arm).defences)(task)
        step = training.lr if training.algorithm == "fedsgd" else 1.0
        weights = {name: w - step * update.tensors[name] for name, w in sent.weights.items()}
        return weights | {name: b.clone() for name, b in (sent.buffers | update.buffers).items()}

    def _order(self, sent: Sent, client: int) -> int:
        return seeds.torch_generator(self.scenario.seed, "client", sent.round, client, "order").initial_seed()

    def _task(self, arm: str, sent: Sent, client: int, indices: np.ndarray, state: State) -> Task:
        key = (self.scenario.seed, "client", sent.round, client)
        return Task(
            client=client,
            round=sent.round,
            model=self.arm(arm).model,
            weights=sent.weights,
            buffers=sent.buffers,
            data=Batch(*self._tensors(self.data.train_images, self.data.train_labels, indices)),
            generator=seeds.torch_generator(*key, "defences"),
            order=self._order(sent, client),
            state=state,
        )

    def _tampered(self, task: Task, attack: AttackSpec) -> Task:
        """The task with what a malicious server sends; all victims of a round are sent the same."""
        server = attack.build()
        if not isinstance(server, MaliciousServer):
            return task
        extra = {"public": self._public} if "public" in attack.knowledge else {}
        generator = seeds.torch_generator(self.scenario.seed, "tamper", attack.title, task.round)
        model, weights, buffers = server.tamper(
            task.model, task.weights, task.buffers, self.data.image_shape, extra, generator
        )
        return task.replace(model=model, weights=weights, buffers=buffers)

    def _candidates(self, truth: Truth, round: int, client: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """As many samples that the victim trained on as of the test split, shuffled; and which are the former."""
        count = min(len(truth.labels), len(self.data.test_labels), MOST_CANDIDATES // 2)
        draw = seeds.numpy_generator(self.scenario.seed, "candidates", round, client)
        members = torch.from_numpy(draw.choice(len(truth.labels), count, replace=False)).to(self.device)
        others = draw.choice(len(self.data.test_labels), count, replace=False)
        images, labels = self._tensors(self.data.test_images, self.data.test_labels, others)
        order = torch.from_numpy(draw.permutation(2 * count)).to(self.device)
        candidates = (
            torch.cat([truth.images[members], images])[order],
            torch.cat([truth.labels[members], labels])[order],
        )
        return candidates, order < count

    def _tensors(self, images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(images[rows]).to(self.device)
        return pixels.float().div_(255), torch.from_numpy(labels[rows]).to(self.device)

    @cached_property
    def _public(self) -> tuple[Tensor, Tensor]:
        """The public images and labels: one object, which observations sent together share."""
        images, labels = self.data.public_images, self.data.public_labels
        assert images is not None
        assert labels is not None
        return self._tensors(images, labels, np.arange(len(labels)))

    def _here(self, sent: Sent) -> Sent:
        weights = {name: w.to(self.device) for name, w in sent.weights.items()}
        return Sent(sent.round, weights, {name: b.to(self.device) for name, b in sent.buffers.items()})


def _recorded(arm: str, updates: Iterable[Update], rows: list[dict[str, Any]]) -> Iterator[Update]:
    """The updates as they come, each checked and noted in `rows`."""
    began = perf_counter()
    for update in updates:
        if not all(bool(torch.isfinite(t).all()) for t in update.tensors.values()):
            raise UserError(
                f"client {update.client} sent an update that is not finite in round {update.round} of arm '{arm}': "
                f"training has diverged; lower training.lr, or look at the arm's defences"
            )
        now = perf_counter()
        rows.append(
            {
                "arm": arm,
                "round": update.round,
                "client": update.client,
                "samples": update.samples,
                "loss": update.loss,
                "seconds": now - began,
                "sent_bytes": update.sent_bytes,
            }
        )
        yield update
        began = perf_counter()
