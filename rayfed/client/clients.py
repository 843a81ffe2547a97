"""The virtual clients of a run: their samples, their private parts, and their tasks in a round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rayfed.client.arm import Arm, build_arm
from rayfed.client.local import PRIVATE, privately_trained
from rayfed.client.malicious import Malicious
from rayfed.data.base import Dataset, Images
from rayfed.data.partitions.base import Parts
from rayfed.defences.base import Batch, Task
from rayfed.models.private import only, without
from rayfed.scenario import Scenario, resolve
from rayfed.update import Named, digest_of

State = dict[str, Any]
Split = Literal["test", "train"]


@dataclass(frozen=True)
class Sent:
    """The weights, buffers and keys that the server sends in one round of one arm."""

    round: int
    weights: Named
    buffers: Named
    keys: bytes = b""
    """The clients' key pair where they encrypt, locked with what only they know: the server passes it on."""
    broadcast: Any = None
    """Of the session of the arm's aggregation (`rayfed.questions.RoundSession`); None where it has none."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without digests: a client hashes what it is sent, and believes nobody's digest of it."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def content(self) -> str:
        """SHA-256 of the model that clients are asked about: round, weights and buffers."""
        parts = (digest_of(dict(sorted(tensors.items()))) for tensors in (self.weights, self.buffers))
        return hashlib.sha256(repr((self.round, *parts)).encode()).hexdigest()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that clients must have in common for their updates to be added.

        It is of round, weights, buffers and the box of their keys, which is another in every run.

        Source: Pasquini 2022, 'Eluding secure aggregation in federated learning via model inconsistency': a server
        that sends clients different weights gets single updates out of sums, unless what hides an update depends
        on the weights.
        """
        return hashlib.sha256(repr((self.content, self.keys)).encode()).hexdigest()


class Clients:
    """All clients of a scenario, which share one data set."""

    def __init__(
        self,
        scenario: Scenario,
        data: Dataset,
        parts: Sequence[np.ndarray],
        device: torch.device,
        validation: Sequence[np.ndarray] = (),
    ) -> None:
        """Take in `parts[i]` the training indices of client i, and in `validation[i]` those that it has held out."""
        self.scenario, self.data, self.device = scenario, data, device
        self.parts, self.validation = Parts.of(parts), Parts.of(validation)
        self.specs = resolve(scenario)
        self.malicious = {name: Malicious.of(scenario, arm) for name, arm in self.specs.items()}
        self._arms: dict[str, Arm] = {}

    def arm(self, name: str) -> Arm:
        """Return an arm, built when it is first asked for."""
        if name not in self._arms:
            data = self.data
            arm = build_arm(self.specs[name], data.sample, len(data.classes), self.scenario.seed)
            self._arms[name] = replace(arm, model=arm.model.to(self.device))
        return self._arms[name]

    def order(self, sent: Sent, client: int) -> int:
        """Return the seed of a client's batches in a round."""
        return int.from_bytes(self.scenario.secret("client", sent.round, client, "order"))

    def task(self, arm: str, sent: Sent, client: int, indices: np.ndarray, state: State) -> Task:
        """Return a client's task in a round, on some of the training samples."""
        own = self.parts[client]
        data, rest = self.own_data(arm, client, own), None
        if not np.array_equal(indices, own):  # all of them in a round, and a search for each costs as much as a step
            left = np.setdiff1d(own, indices)
            rest = data.rows(self._places(own, left)) if len(left) else None
            data = data.rows(self._places(own, indices))
        weights, buffers = self._completed(arm, sent, client, state)
        return Task(
            client=client,
            round=sent.round,
            model=self.arm(arm).model,
            private=self.arm(arm).private,
            weights=weights,
            buffers=buffers,
            data=data,
            generator=self.scenario.generator("client", sent.round, client, "defences", arm, *self._asked(sent)),
            order=self.order(sent, client),
            others=rest,
            classes=len(self.data.classes),
            clients_per_round=self.scenario.clients_per_round,
            public=Batch(*self.public) if self.scenario.data.public else None,
            state=state,
        )

    def _asked(self, sent: Sent) -> tuple[str, ...]:
        """Return what a secure run's noise depends on beside round and client; empty otherwise.

        It is the model that a client is asked about: the same noise at other weights would cancel in the difference of
        two answers. Elsewhere noise follows from the seed alone.
        """
        return (sent.content,) if self.scenario.privacy.secure else ()

    def own_data(self, arm: str, client: int, rows: np.ndarray) -> Batch:
        """Return some of a client's samples as it uses them in an arm: a malicious one may have poisoned them."""
        inputs, labels = self._training_data(rows)
        places = torch.arange(len(labels), device=self.device)
        return self.malicious[arm].data(client, Batch(inputs, labels, places=places), len(self.data.classes))

    def drawn_privately(self, arm: str, *purpose: int | str) -> Named:
        """Draw the private tensors of an arm as they begin, anew for each purpose but those that begin alike at all."""
        key = self.scenario.secret("private", *purpose)
        drawn = build_arm(self.specs[arm], self.data.sample, len(self.data.classes), key).private_part
        return {name: t.to(self.device) for name, t in (drawn | self.arm(arm).common_start).items()}

    def _completed(self, arm: str, sent: Sent, client: int, state: State) -> tuple[Named, Named]:
        """Return the weights and buffers that were sent, with the client's private part as it meets them."""
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
                data=self.own_data(arm, client, self.parts[client]),
                generator=self.scenario.generator("private", sent.round, client, "training"),
                order=self.order(sent, client),
                private=built.private,
            )
            weights |= privately_trained(task, built.spec.training, epochs)
        return weights, buffers

    def _batches(self, split: Split, rows: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some rows of a split, 500 at a time."""
        read = self.test_data if split == "test" else self._training_data
        return (read(rows[low : low + 500]) for low in range(0, len(rows), 500))

    def test_data(self, rows: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs (M, *shape) and labels (M,) of the test split: some rows of it, or all."""
        every = np.arange(len(self.data.test_labels))
        return self._tensors(self.data.test_images, self.data.test_labels, every if rows is None else rows)

    def _places(self, own: np.ndarray, indices: np.ndarray) -> Tensor:
        """Return the places of some of a client's samples among all of them."""
        order = np.argsort(own)
        return torch.from_numpy(order[np.searchsorted(own, indices, sorter=order)]).to(self.device)

    def _training_data(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._tensors(self.data.train_images, self.data.train_labels, rows)

    def _tensors(self, stored: Images, labels: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        inputs = self.data.sample.tensor(stored[rows], self.device)
        return inputs, torch.from_numpy(labels[rows]).to(self.device)

    @cached_property
    def public(self) -> tuple[Tensor, Tensor]:
        """Return the public inputs and labels: one object, which observations sent together share."""
        images, labels = self.data.public_images, self.data.public_labels
        assert images is not None
        assert labels is not None
        return self._tensors(images, labels, np.arange(len(labels)))

    def here(self, sent: Sent) -> Sent:
        """Return what the server sent, on this runtime's device."""
        weights = {name: w.to(self.device) for name, w in sent.weights.items()}
        return replace(sent, weights=weights, buffers={name: b.to(self.device) for name, b in sent.buffers.items()})
