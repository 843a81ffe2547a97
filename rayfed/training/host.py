"""The clients' side of a run: hosts every virtual client's data and does their work, with or without Ray around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from rayfed import objective, seeds
from rayfed.data.base import Dataset
from rayfed.defences.base import Batch, Task
from rayfed.errors import UserError
from rayfed.models.private import only, without
from rayfed.scenario import Scenario
from rayfed.training.arm import Arm, aggregation_of, build_arm
from rayfed.training.cohort import cohort_updates
from rayfed.training.diagnosis import private_layers
from rayfed.training.local import PRIVATE, privately_trained
from rayfed.update import Named, Update

State = dict[str, Any]
Split = Literal["test", "train"]


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
    seconds: float
    """Wall time of the whole cohort, partial result included."""
    states: dict[int, State] = field(default_factory=dict)
    """The clients' own memories, to be handed back to them next time."""


class Host:
    """Does the local rounds of any client of a scenario."""

    def __init__(self, scenario: Scenario, data: Dataset, parts: Sequence[np.ndarray], device: torch.device) -> None:
        """`parts[i]` are the training indices of client i."""
        self.scenario, self.data, self.parts, self.device = scenario, data, parts, device
        self._arms: dict[str, Arm] = {}
        self._aggregations = {
            arm: aggregation_of(scenario.aggregation_of(arm), stack, scenario.clients_per_round)
            for arm, stack in scenario.stacks.items()
        }

    def arm(self, name: str) -> Arm:
        """An arm, built when it is first asked for."""
        if name not in self._arms:
            s, d = self.scenario, self.data
            arm = build_arm(s.model_of(name), s.stacks[name], d.image_shape, len(d.classes), s.seed)
            self._arms[name] = replace(arm, model=arm.model.to(self.device))
        return self._arms[name]

    def cohort(
        self, arm: str, sent: Sent, clients: Sequence[int], states: Mapping[int, State]
    ) -> tuple[Any, CohortReport]:
        """The cohort's partial result for the aggregation, and the report on its clients.

        Raises `UserError` when a client's update is not finite.
        """
        began, sent = perf_counter(), self.here(sent)
        tasks = [self.task(arm, sent, c, self.parts[c], states.get(c, {})) for c in clients]
        rows: list[dict[str, Any]] = []
        defences, asked = self.arm(arm).defences, perf_counter()
        updates = cohort_updates(tasks, self.scenario.training_of(arm), defences)
        together = (perf_counter() - asked) / len(tasks)  # under vmap the training of all clients, else nothing
        partial = self._aggregations[arm].partial(_recorded(arm, updates, rows, together))
        return partial, CohortReport(rows, perf_counter() - began, {t.client: t.state for t in tasks if t.state})

    def answer(self, arm: str, sent: Sent, payload: Any, client: int, state: State) -> Any:
        """What a client answers to a question of the arm's aggregation."""
        return self._aggregations[arm].answer(payload, _Member(self, arm, self.here(sent), client, state))

    def evaluate(self, arm: str, sent: Sent, start: int, stop: int, split: Split = "test") -> tuple[float, int]:
        """Summed loss and correct predictions on a slice of the test set, or of all clients' own samples."""
        sent, rows = self.here(sent), np.arange(start, stop)
        state = {**sent.weights, **sent.buffers}
        return self._evaluated(arm, state, split, rows if split == "test" else self._owned[rows])

    def evaluate_member(
        self, arm: str, sent: Sent, client: int, state: State, splits: Sequence[Split]
    ) -> dict[Split, tuple[float, float]]:
        """Mean loss and accuracy of the weights with one client's private part, on the test set or its own samples."""
        task = self.task(arm, self.here(sent), client, self.parts[client], state)
        rows = {"test": np.arange(len(self.data.test_labels)), "train": self.parts[client]}
        found: dict[Split, tuple[float, float]] = {}
        for split in splits:
            loss, correct = self._evaluated(arm, {**task.weights, **task.buffers}, split, rows[split])
            found[split] = loss / len(rows[split]), correct / len(rows[split])
        return found

    def evaluate_stranger(self, arm: str, sent: Sent, states: Sequence[State]) -> tuple[float, float]:
        """Accuracy on the test set of who has the weights but no private part: with one as it begins, and with only
        what never changes (keys, passports) drawn anew, the rest being the mean of the clients' own.
        """
        sent, rows = self.here(sent), np.arange(len(self.data.test_labels))
        drawn = self.drawn_privately(arm, "stranger", sent.round)
        learnt = {n: t for n, t in without(drawn, self.arm(arm).keys).items() if t.is_floating_point()}
        mean = {name: torch.stack([s[PRIVATE][name].to(t) for s in states]).mean(0) for name, t in learnt.items()}
        public = {**sent.weights, **sent.buffers}
        anew, averaged = (self._evaluated(arm, {**public, **own}, "test", rows)[1] for own in (drawn, drawn | mean))
        return anew / len(rows), averaged / len(rows)

    def private_layers(self, arm: str, states: Sequence[State]) -> list[dict[str, Any]]:
        """How far some clients' private layers are apart, and how rich they are: rows of the table `private`."""
        return private_layers(self.arm(arm).model, [state[PRIVATE] for state in states])

    @torch.no_grad()
    def _evaluated(self, arm: str, state: Named, split: Split, rows: np.ndarray) -> tuple[float, int]:
        """Summed loss and correct predictions of a whole model on some rows of a split."""
        model = self.arm(arm).model
        loss, correct = 0.0, 0
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        for low in range(0, len(rows), 500):
            some = rows[low : low + 500]
            images, labels = self.test_data(some) if split == "test" else self._training_data(some)
            logits = functional_call(model, state, (images,))
            loss += float(objective.loss(logits, labels, "sum"))
            correct += int(objective.correct(logits, labels).sum())
        for module, mode in modes:
            module.training = mode
        return loss, correct

    def order(self, sent: Sent, client: int) -> int:
        """The seed of a client's batches in a round."""
        return seeds.torch_generator(self.scenario.seed, "client", sent.round, client, "order").initial_seed()

    def task(self, arm: str, sent: Sent, client: int, indices: np.ndarray, state: State) -> Task:
        """A client's work in a round on some of the training samples."""
        key = (self.scenario.seed, "client", sent.round, client)
        own = self.parts[client]
        rest = np.setdiff1d(own, indices)
        weights, buffers = self._completed(arm, sent, client, state)
        return Task(
            client=client,
            round=sent.round,
            model=self.arm(arm).model,
            private=self.arm(arm).private,
            weights=weights,
            buffers=buffers,
            data=Batch(*self._training_data(indices), places=self._places(own, indices)),
            generator=seeds.torch_generator(*key, "defences", arm),
            order=self.order(sent, client),
            others=Batch(*self._training_data(rest), places=self._places(own, rest)) if len(rest) else None,
            classes=len(self.data.classes),
            clients_per_round=self.scenario.clients_per_round,
            public=Batch(*self.public) if self.scenario.data.public else None,
            state=state,
        )

    def drawn_privately(self, arm: str, *key: int | str) -> Named:
        """The private tensors of an arm as they begin: drawn anew from the run's seed and the key, but for those that
        begin alike at all clients.
        """
        s, d = self.scenario, self.data
        seed = seeds.torch_generator(s.seed, "private", *key).initial_seed()
        drawn = build_arm(s.model_of(arm), s.stacks[arm], d.image_shape, len(d.classes), seed).private_part
        return {name: t.to(self.device) for name, t in (drawn | self.arm(arm).common_start).items()}

    def _completed(self, arm: str, sent: Sent, client: int, state: State) -> tuple[Named, Named]:
        """The weights and buffers that were sent, with the client's private part as it meets them."""
        built = self.arm(arm)
        if not built.private:
            return sent.weights, sent.buffers
        kept: Named = state.get(PRIVATE) or self.drawn_privately(arm, client)
        own = {name: t.to(self.device) for name, t in kept.items()}
        weights = {**sent.weights, **only(own, built.trained_privately)}
        buffers = {**sent.buffers, **without(own, built.trained_privately)}
        epochs = max(defence.private_epochs for defence in built.defences)
        if epochs and sent.round:  # in round 0 nothing has been averaged that it could adapt to
            task = Task(
                client=client,
                round=sent.round,
                model=built.model,
                weights=weights,
                buffers=buffers,
                data=Batch(*self._training_data(self.parts[client])),
                generator=seeds.torch_generator(self.scenario.seed, "private", sent.round, client, "training"),
                order=self.order(sent, client),
                private=built.private,
            )
            weights |= privately_trained(task, self.scenario.training_of(arm), epochs)
        return weights, buffers

    def test_data(self, rows: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Images (M, C, H, W) in [0, 1] and labels (M,) of the test split: some rows of it, or all."""
        every = np.arange(len(self.data.test_labels))
        return self._tensors(self.data.test_images, self.data.test_labels, every if rows is None else rows)

    def _places(self, own: np.ndarray, indices: np.ndarray) -> Tensor:
        """Where each of some of a client's samples stands among all of them."""
        order = np.argsort(own)
        return torch.from_numpy(order[np.searchsorted(own, indices, sorter=order)]).to(self.device)

    @cached_property
    def _owned(self) -> np.ndarray:
        """The training indices of all clients."""
        return np.concatenate(self.parts)

    def _training_data(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._tensors(self.data.train_images, self.data.train_labels, rows)

    def _tensors(self, images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(images[rows]).to(self.device)
        return pixels.float().div_(255), torch.from_numpy(labels[rows]).to(self.device)

    @cached_property
    def public(self) -> tuple[Tensor, Tensor]:
        """The public images and labels: one object, which observations sent together share."""
        images, labels = self.data.public_images, self.data.public_labels
        assert images is not None
        assert labels is not None
        return self._tensors(images, labels, np.arange(len(labels)))

    def here(self, sent: Sent) -> Sent:
        """The same on this host's device."""
        weights = {name: w.to(self.device) for name, w in sent.weights.items()}
        return Sent(sent.round, weights, {name: b.to(self.device) for name, b in sent.buffers.items()})


@dataclass(frozen=True)
class _Member:
    """A client that answers questions of the aggregation (`rayfed.aggregation.base.Member`)."""

    host: Host
    arm: str
    sent: Sent
    client: int
    state: State

    @property
    def round(self) -> int:
        """The round that is asked about."""
        return self.sent.round

    def evaluate(self, step: Named, buffers: Named) -> tuple[float, float]:
        """Mean loss and accuracy on the client's own data, were the server to take this step from what it sent."""
        lr = self.host.scenario.server_lr(self.arm)
        weights = {name: w - lr * step[name].to(w) for name, w in self.sent.weights.items()}
        moved = Sent(self.round, weights, self.sent.buffers | buffers)
        return self.host.evaluate_member(self.arm, moved, self.client, self.state, ["train"])["train"]


def _recorded(arm: str, updates: Iterable[Update], rows: list[dict[str, Any]], together: float) -> Iterator[Update]:
    """The updates as they come, each checked and noted in `rows`; `together` is a client's part of common work (s)."""
    began = perf_counter()
    for update in updates:
        if not all(bool(torch.isfinite(t).all()) for t in [*update.tensors.values(), *update.buffers.values()]):
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
                "seconds": together + now - began,
                "sent_bytes": update.sent_bytes,
            }
        )
        yield update
        began = perf_counter()
