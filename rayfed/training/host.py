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
from torch.nn import functional as F

from rayfed import seeds
from rayfed.data.base import Dataset
from rayfed.defences.base import Batch, Task
from rayfed.errors import UserError
from rayfed.scenario import Scenario
from rayfed.training.arm import Arm, aggregation_of, build_arm
from rayfed.training.cohort import cohort_updates
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
        rule, clients = scenario.federation.aggregation, scenario.clients_per_round
        self._aggregations = {arm: aggregation_of(rule, stack, clients) for arm, stack in scenario.stacks.items()}

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

    @torch.no_grad()
    def evaluate(self, arm: str, sent: Sent, start: int, stop: int, split: Split = "test") -> tuple[float, int]:
        """Summed loss and correct predictions on a slice of the test set, or of all clients' own samples."""
        sent, model = self.here(sent), self.arm(arm).model
        loss, correct = 0.0, 0
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        for low in range(start, stop, 500):
            rows = np.arange(low, min(low + 500, stop))
            images, labels = self.test_data(rows) if split == "test" else self._training_data(self._owned[rows])
            logits = functional_call(model, {**sent.weights, **sent.buffers}, (images,))
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            correct += int((logits.argmax(dim=1) == labels).sum())
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
        return Task(
            client=client,
            round=sent.round,
            model=self.arm(arm).model,
            weights=sent.weights,
            buffers=sent.buffers,
            data=Batch(*self._training_data(indices), places=self._places(own, indices)),
            generator=seeds.torch_generator(*key, "defences", arm),
            order=self.order(sent, client),
            others=Batch(*self._training_data(rest), places=self._places(own, rest)) if len(rest) else None,
            classes=len(self.data.classes),
            clients_per_round=self.scenario.clients_per_round,
            public=Batch(*self.public) if self.scenario.data.public else None,
            state=state,
        )

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
