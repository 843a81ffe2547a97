"""The clients' side of a run: data and work of all virtual clients, with or without Ray."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from math import exp, inf, nan
from operator import add
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from rayfed.aggregation.base import AnyAggregation, InteractiveAggregation
from rayfed.aggregation.over_channel import OverChannel
from rayfed.aggregation.server import TreeFold
from rayfed.core import losses, seeds
from rayfed.core.memory import take_notes
from rayfed.crypto.masking import Transcript
from rayfed.data.base import Dataset, Images
from rayfed.data.partitions.base import Parts
from rayfed.defences.base import Batch, Task
from rayfed.models.build import CopiedModels, build_model
from rayfed.models.private import only, without
from rayfed.protections.channel import ClientRound
from rayfed.scenario import Scenario, resolve
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import Arm, build_arm, protected_aggregation
from rayfed.simulation.client.augmentation import augmented
from rayfed.simulation.client.cohort import CohortRecord, cohort_updates, works_together
from rayfed.simulation.client.failures import Attempt, attempt, checked, made_or_raise, until_none_fails
from rayfed.simulation.client.local import PRIVATE, privately_trained, update_method
from rayfed.simulation.client.malicious import Malicious
from rayfed.simulation.client.server_message import Sent, Split, State
from rayfed.simulation.client.update_cache import ClientUpdate, UpdateCache, make_key
from rayfed.update import Mixtures, Named, Update

_MOST_NATS = 700.0
"""Maximum mean cross entropy whose exponential is finite."""


@dataclass(frozen=True)
class CohortReport:
    """Report on the work of a cohort (a group of clients); not part of the simulated protocol."""

    rows: list[dict[str, Any]]
    """Rows of the table `clients`, one per client."""
    seconds: float
    """Wall time of the cohort and its partial result, in seconds."""
    states: dict[int, State] = field(default_factory=dict)
    """New states by client, to use in the next round."""
    notes: list[str] = field(default_factory=list)
    """Messages for the run's log."""
    warming: bool = False
    """Whether this was the process's first work for the arm, which takes longer."""

    def __add__(self, other: CohortReport) -> CohortReport:
        rows, states = [*self.rows, *other.rows], {**self.states, **other.states}
        notes, warming = [*self.notes, *other.notes], self.warming or other.warming
        return CohortReport(rows, self.seconds + other.seconds, states, notes, warming)


class Evaluation(NamedTuple):
    """Evaluation of a model on samples, as sums or means over them; all fields except `loss` may be NaN."""

    loss: float
    right: float
    """Accuracy: share of correct labels."""
    error: float
    """Absolute error, for regression."""
    nats: float = 0.0
    """Cross entropy of predicted tokens, for texts."""
    tokens: float = 0.0
    """Number of these tokens."""
    overlap: Tensor | float = 0  # an integer, so that sums of counts are exact
    """Intersections and unions of the pixels of each class, (2, K), for masks; else 0."""

    @property
    def perplexity(self) -> float:
        """Return the perplexity: the exponential of the tokens' mean cross entropy; NaN without tokens."""
        mean = self.nats / self.tokens if self.tokens else nan
        return exp(mean) if not mean > _MOST_NATS else inf

    @property
    def iou(self) -> float:
        """Return the mean intersection over union of the classes that are predicted or true; NaN without masks."""
        if not isinstance(self.overlap, Tensor):
            return nan
        both, either = self.overlap.double()
        return float((both / either)[either > 0].mean())

    def __add__(self, other: object) -> Evaluation:
        """Return the sums of two evaluations, over both sets of samples."""
        assert isinstance(other, Evaluation)
        sums = map(add, self[:-1], other[:-1])
        return Evaluation(*sums)._replace(overlap=self.overlap + other.overlap)

    def over(self, samples: int) -> Evaluation:
        """Return the evaluation's sums divided by the number of samples; the counts in `overlap` are not divided."""
        return Evaluation(*(value / samples for value in self[:-1]))._replace(overlap=self.overlap)


class ClientRuntime:
    """All virtual clients of a scenario, with the data set that they share."""

    def __init__(
        self,
        scenario: Scenario,
        data: Dataset,
        parts: Sequence[np.ndarray],
        device: torch.device,
        validation: Sequence[np.ndarray] = (),
    ) -> None:
        """Initialise the clients; client i trains on the indices `parts[i]`, and validates on `validation[i]`."""
        self.scenario, self.data, self.device = scenario, data, device
        self.parts, self.validation = Parts.from_indices(parts), Parts.from_indices(validation)
        self.specs = resolve(scenario)
        self.malicious = {name: Malicious.of(scenario, arm) for name, arm in self.specs.items()}
        self._arms: dict[str, Arm] = {}
        self.update_cache = UpdateCache()
        """Updates of attacked clients in the present round."""
        self._warm = set[str]()
        """Arms that this process has trained."""
        self._build_model = CopiedModels() if len(self.specs) > 1 else build_model
        self._aggregations: dict[str, AnyAggregation] = {
            name: protected_aggregation(arm, plan.protecting(scenario, arm, self.parts.sizes))
            for name, arm in self.specs.items()
        }

    def arm(self, name: str) -> Arm:
        """Return an arm by name, with model and defences; the arm is built on first use."""
        if name not in self._arms:
            data = self.data
            arm = build_arm(self.specs[name], data.sample, len(data.classes), self.scenario.seed, self._build_model)
            self._arms[name] = replace(arm, model=arm.model.to(self.device))
        return self._arms[name]

    def order(self, sent: Sent, client: int) -> int:
        """Return the seed that determines the order of a client's batches in a round."""
        return int.from_bytes(self.scenario.secret("client", sent.round, client, "order"))

    def task(self, arm: str, sent: Sent, client: int, indices: np.ndarray, state: State) -> Task:
        """Return a client's training task in a round: weights, buffers, state, and the samples with the given indices.

        Weights, buffers and samples are copies, which defences may change in place.
        """
        own = self.parts[client]
        data, rest = self._in_round(arm, sent, client), None
        if not np.array_equal(indices, own):  # skip the search in the common case; it takes as long as a local step
            left = np.setdiff1d(own, indices)
            rest = data.rows(self._places(own, left)) if len(left) else None
            data = data.rows(self._places(own, indices))
        weights, buffers = self._completed(arm, sent, client, state)
        return Task(
            client=client,
            round=sent.round,
            model=self.arm(arm).model,
            private=self.arm(arm).private,
            weights={name: w.clone() for name, w in weights.items()},
            buffers={name: b.clone() for name, b in buffers.items()},
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
        """Return the part of a secure run's noise key that depends on the model; empty for other runs.

        With equal noise for two models, the noise would cancel in the difference of the two updates.
        """
        return (sent.content,) if self.scenario.privacy.secure else ()

    def _in_round(self, arm: str, sent: Sent, client: int) -> Batch:
        """Return all samples of a client as used in a round: prepared by the loss, and augmented."""
        data = self.own_data(arm, client, self.parts[client])
        data = self._presented(arm, data, "client", sent.round, client, "shown")
        inputs, labels = self.augmented(arm, data.inputs, data.labels, self.order(sent, client), "own")
        return data._replace(inputs=inputs, labels=labels)

    def augmented(self, arm: str, inputs: Tensor, labels: Tensor, order: int, purpose: str) -> tuple[Tensor, Tensor]:
        """Return inputs (N, *shape) and labels after an arm's random augmentation, seeded by `order` and `purpose`."""
        augment = self.specs[arm].training.augment
        if augment is None:
            return inputs, labels
        return augmented(inputs, labels, augment, seeds.numpy_generator(order, "augment", purpose))

    def own_data(self, arm: str, client: int, rows: np.ndarray) -> Batch:
        """Return a client's training samples by index, poisoned if the client is malicious in the arm."""
        inputs, labels = self._training_data(rows)
        places = torch.arange(len(labels), device=self.device)
        return self.malicious[arm].data(client, Batch(inputs, labels, places=places), len(self.data.classes))

    def _presented(self, arm: str, data: Batch, *purpose: int | str) -> Batch:
        """Return samples as prepared by the arm's loss, such as with masked tokens, sampled from `purpose`."""
        loss = losses.get_loss(self.arm(arm).model)
        if type(loss).presented is losses.Loss.presented:
            return data
        generator = self.scenario.generator(*purpose)
        inputs, labels = loss.presented(data.inputs, data.labels, self.data.sample, generator)
        return data._replace(inputs=inputs, labels=labels)

    def drawn_privately(self, arm: str, *purpose: int | str) -> Named:
        """Sample an arm's initial private tensors, seeded by `purpose`; common tensors keep their common value."""
        key = self.scenario.secret("private", *purpose)
        drawn = build_arm(self.specs[arm], self.data.sample, len(self.data.classes), key).private_part
        return {name: t.to(self.device) for name, t in (drawn | self.arm(arm).common_start).items()}

    def _completed(self, arm: str, sent: Sent, client: int, state: State) -> tuple[Named, Named]:
        """Return all weights and buffers: received from the server, frozen, and private to the client."""
        built = self.arm(arm)
        if frozen := built.frozen:
            sent = replace(sent, buffers={**sent.buffers, **frozen})
        if not built.private:
            return sent.weights, sent.buffers
        kept: Named = state.get(PRIVATE) or self.drawn_privately(arm, client)
        own = {name: t.to(self.device) for name, t in kept.items()}
        weights = {**sent.weights, **only(own, built.trained_privately)}
        buffers = {**sent.buffers, **without(own, built.trained_privately)}
        epochs = max((defence.private_epochs for defence in built.defences), default=0)
        if epochs and sent.round:  # in round 0, the shared weights are still the initial ones
            task = Task(
                client=client,
                round=sent.round,
                model=built.model,
                weights=weights,
                buffers=buffers,
                data=self._in_round(arm, sent, client),
                generator=self.scenario.generator("private", sent.round, client, "training"),
                order=self.order(sent, client),
                private=built.private,
            )
            weights |= privately_trained(task, built.spec.training.in_round(sent.round), epochs)
        return weights, buffers

    def _batches(self, arm: str, split: Split, rows: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of a split in batches of 500, as prepared by the arm's loss with fixed random numbers."""
        return (self.shown(arm, split, rows[low : low + 500]) for low in range(0, len(rows), 500))

    def shown(self, arm: str, split: Split, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of a split's rows as prepared by the arm's loss (such as masked tokens).

        The random numbers are fixed.
        """
        batch = Batch(*self.samples(split, rows))
        inputs, labels, *_ = self._presented(arm, batch, "shown", split, *(int(n) for n in rows[:1]), len(rows))
        return inputs, labels

    def samples(self, split: Split, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs (M, *shape) and labels (M,) of some rows of the training or test split."""
        return self.test_data(rows) if split == "test" else self._training_data(rows)

    def untrained(self, client: int) -> tuple[Split, np.ndarray]:
        """Return a split and rows that no client trains on: the client's validation samples, or else the test split."""
        if not len(self.validation):
            return "test", np.arange(len(self.data.test_labels))
        own = self.validation[client]
        return "train", own[~np.isin(own, self.parts.indices)]

    def test_data(self, rows: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs (M, *shape) and labels (M,) of the test split, all or some rows."""
        every = np.arange(len(self.data.test_labels))
        return self._tensors(self.data.test_images, self.data.test_labels, every if rows is None else rows)

    def _places(self, own: np.ndarray, indices: np.ndarray) -> Tensor:
        """Return the positions of `indices` among all samples `own` of a client."""
        order = np.argsort(own)
        return torch.from_numpy(order[np.searchsorted(own, indices, sorter=order)]).to(self.device)

    def _training_data(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._tensors(self.data.train_images, self.data.train_labels, rows)

    def _tensors(self, stored: Images, labels: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        inputs = self.data.sample.tensor(stored[rows], self.device)
        return inputs, torch.from_numpy(labels[rows]).to(self.device)

    @cached_property
    def public(self) -> tuple[Tensor, Tensor]:
        """Return the public samples: inputs and labels, as one shared object."""
        images, labels = self.data.public_images, self.data.public_labels
        assert images is not None
        assert labels is not None
        return self._tensors(images, labels, np.arange(len(labels)))

    def here(self, sent: Sent) -> Sent:
        """Return the server's message with all tensors on this runtime's device."""
        weights = {name: w.to(self.device) for name, w in sent.weights.items()}
        buffers = {name: b.to(self.device) for name, b in sent.buffers.items()}
        tensors = zip((weights | buffers).values(), (sent.weights | sent.buffers).values(), strict=True)
        if all(moved is own for moved, own in tensors):
            return sent  # with its cached digests
        return replace(sent, weights=weights, buffers=buffers)

    def cohorts(
        self, arm: str, sent: Sent, first: int, cohorts: Sequence[Sequence[int]], states: Mapping[int, State]
    ) -> tuple[CohortReport, dict[tuple[int, int], Any]]:
        """Run the local training of consecutive cohorts of clients, numbered from `first`; see `cohort`.

        Returns a report on all cohorts, and the partial aggregates, merged as far as possible in the server's tree.
        """
        sent = self.here(sent)
        self.update_cache.begin_round(sent.round)
        rule, whole = self.rule(arm, sent), CohortReport([], 0.0)
        honest = self._honest(arm, sent, states) if self.malicious[arm].among(list(chain(*cohorts))) else []
        fold = TreeFold(rule, len(cohorts))
        for index, clients in enumerate(cohorts, first):
            partial, report = self._cohort(rule, honest, arm, sent, clients, states)
            fold.add(index, partial)
            whole = whole + report
        return whole, fold.nodes

    def cohort(
        self, arm: str, sent: Sent, clients: Sequence[int], states: Mapping[int, State]
    ) -> tuple[Any, CohortReport]:
        """Run a cohort's local training, and return the partial aggregate of the updates and a report on the clients.

        `states` contains the states of these clients, and of all malicious clients if they collude; it is not changed.
        The partial aggregate is None if all clients failed. Raises `ClientError` for a failure that ends the run.
        """
        report, nodes = self.cohorts(arm, sent, 0, [clients], states)
        return nodes[0, 0], report

    def _cohort(
        self,
        rule: AnyAggregation,
        honest: Sequence[Update],
        arm: str,
        sent: Sent,
        clients: Sequence[int],
        states: Mapping[int, State],
    ) -> tuple[Any, CohortReport]:
        """Run one of `cohorts`; `honest` contains the unpoisoned updates of colluding clients."""
        began = perf_counter()
        training, defences = self.specs[arm].training.in_round(sent.round), self.arm(arm).defences
        malicious = self.malicious[arm]

        def given(members: Sequence[int]) -> list[Task]:
            return [self.task(arm, sent, c, self.parts[c], copy.deepcopy(states.get(c, {}))) for c in members]

        def attempts(tasks: Sequence[Task]) -> Iterator[Attempt]:
            for task, made in zip(tasks, cohort_updates(tasks, training, defences), strict=True):
                yield task, checked(malicious.attempted(made, honest), task)

        tasks, asked = given(clients), perf_counter()
        attempted: Iterable[Attempt] = attempts(tasks)
        observed = self._observed_clients(sent.round)
        if works_together(tasks[0], training, defences):
            attempted = until_none_fails(list(attempted), lambda left: attempts(given(left)))
            observed = set()  # updates of joint training differ by rounding from those that attacks observe
        together = (perf_counter() - asked) / len(clients)  # time of joint training; else about 0, as work is lazy

        def cache(client: int, update: Update) -> None:
            if client in observed:
                key = make_key(arm, sent, client, states.get(client, {}), training, self.parts[client])
                self.update_cache.add(key, ClientUpdate(update))

        record = CohortRecord(arm, rule, self.scenario.federation.failures, cache)
        partial = _partial(rule, record.sent(attempted, together))
        rows = [row | {"malicious": row["client"] in malicious.clients} for row in record.rows]
        warming = arm not in self._warm
        self._warm.add(arm)
        return partial, CohortReport(rows, perf_counter() - began, record.states, take_notes(), warming)

    def _observed_clients(self, round: int) -> set[int]:
        """Return the clients, all honest, whose updates of a round are observed by attacks."""
        clients = set[int]()
        for attack in self.scenario.attacks:
            if round in attack.rounds and attack.view.of_round:
                clients.update(plan.victims(self.scenario, attack, round, self.parts.sizes))
        return clients

    def _honest(self, arm: str, sent: Sent, states: Mapping[int, State]) -> list[Update]:
        """Return the unpoisoned updates of a round's malicious clients if they collude, else an empty list."""
        malicious = self.malicious[arm]
        members = malicious.among(plan.drawn_clients(self.scenario, sent.round)) if malicious.poisoning.colludes else []
        return self.updates(arm, sent, members, states)

    def updates(self, arm: str, sent: Sent, clients: Sequence[int], states: Mapping[int, State]) -> list[Update]:
        """Return the updates of the given clients, computed one by one, without changing the clients' states.

        Raises `ClientError` if a client fails.
        """
        update = update_method(self.specs[arm].training.in_round(sent.round), self.arm(arm).defences)
        tasks = (self.task(arm, sent, c, self.parts[c], copy.deepcopy(states.get(c, {}))) for c in clients)
        attempts = (checked(attempt(task.client, partial(update, task)), task) for task in tasks)
        return [made_or_raise(made, arm, sent.round) for made in attempts]

    def mixtures(self, arm: str, sent: Sent, states: Mapping[int, State]) -> Mixtures | None:
        """Return the mixtures of updates that clients score in a round; None if the aggregation rule sends none.

        `states` contains the states of all clients.
        """
        rule = self.rule(arm, sent)
        if not isinstance(rule, InteractiveAggregation):
            return None
        updates = self.updates(arm, sent, plan.drawn_clients(self.scenario, sent.round), states)
        malicious, honest = self.malicious[arm], self._honest(arm, sent, states)
        return rule.mixtures([made_or_raise(malicious.attempted(u, honest), arm, sent.round) for u in updates])

    def answer(
        self, arm: str, sent: Sent, payload: Any, client: int, state: State, transcript: Transcript
    ) -> tuple[Transcript, Any]:
        """Return a client's transcript of the round, and the client's reply to a request of the aggregation rule.

        The reply is added to `transcript`.
        """
        rule = self.rule(arm, sent, {client: transcript})
        assert isinstance(rule, InteractiveAggregation)
        return transcript, rule.answer(payload, ClientProxy(self, arm, self.here(sent), client, state))

    def make_keys(self, arm: str) -> bytes:
        """Create a key pair for all clients of an arm, encrypted with their secret; empty if the arm needs no keys."""
        rule = self._aggregations[arm]
        return rule.channel.make_keys(self._secret(arm)) if isinstance(rule, OverChannel) else b""

    def rule(self, arm: str, sent: Sent, transcripts: dict[int, Transcript] | None = None) -> AnyAggregation:
        """Return the arm's aggregation rule with the clients' secrets for a round; `transcripts` are by client."""
        rule = self._aggregations[arm]
        if not isinstance(rule, OverChannel):
            return rule
        drawn, leaving = (those(self.scenario, sent.round) for those in (plan.drawn_clients, plan.leaving))
        drops = self.scenario.federation.dropping is not None
        return rule.at_clients(ClientRound(self._secret(arm), sent, drawn, leaving, drops, transcripts or {}))

    def _secret(self, arm: str) -> bytes:
        """Return the shared secret of an arm's clients, which replaces a key exchange before the first round."""
        return self.scenario.secret("encryption", arm)

    def evaluate_as(
        self, arm: str, sent: Sent, client: int, state: State, split: Literal["validation", "train"]
    ) -> tuple[float, float]:
        """Return mean loss and accuracy of a client's model on the client's samples of a split; NaN if undefined.

        A malicious client uses its poisoned samples.
        """
        weights, buffers = self._completed(arm, self.here(sent), client, state)
        data = self.own_data(arm, client, self.validation[client] if split == "validation" else self.parts[client])
        data = self._presented(arm, data, "evaluation", split, client, "shown")
        batches = zip(data.inputs.split(500), data.labels.split(500), strict=True)
        found = self._evaluated(arm, {**weights, **buffers}, batches).over(len(data.labels))
        return found.loss, found.right

    @torch.no_grad()
    def _evaluated(self, arm: str, state: Named, batches: Iterable[tuple[Tensor, Tensor]]) -> Evaluation:
        """Evaluate a model on batches of inputs and labels, and return sums over the samples."""
        model = self.arm(arm).model
        loss, found = losses.get_loss(model), Evaluation(0.0, 0.0, 0.0)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        for inputs, labels in batches:
            outputs = functional_call(model, state, (inputs,))
            right, error = (
                nan if each is None else float(each.sum())
                for each in (loss.right(outputs, labels), loss.error(outputs, labels))
            )
            found += Evaluation(float(loss(outputs, labels, "sum")), right, error)
            if (tokens := loss.tokens(labels)) is not None:
                nats = (loss(outputs, labels, "none").double() * tokens).sum()
                found += Evaluation(0.0, 0.0, 0.0, float(nats), float(tokens.sum()))
            if (overlap := loss.overlap(outputs, labels)) is not None:
                found += Evaluation(0.0, 0.0, 0.0, overlap=overlap.cpu())
        for module, mode in modes:
            module.training = mode
        return found


def _partial(rule: AnyAggregation, sent: Iterator[Any]) -> Any:
    """Return a rule's partial aggregate of a cohort's updates; None without updates."""
    first = next(sent, None)
    return None if first is None else rule.partial(chain([first], sent))


@dataclass(frozen=True)
class ClientProxy:
    """A client that evaluates models for the aggregation rule (`rayfed.aggregation.base.Member`)."""

    runtime: ClientRuntime
    arm: str
    sent: Sent
    client: int
    state: State

    @property
    def round(self) -> int:
        """Return the number of the round in which the rule sends its request."""
        return self.sent.round

    def evaluate(
        self, update: Named, buffers: Named, split: Literal["validation", "train"] = "validation"
    ) -> tuple[float, float]:
        """Return mean loss and accuracy, on the client's samples, of the model after `update`, with `buffers`."""
        scale = self.runtime.specs[self.arm].update_scale
        weights = {name: w - scale * update[name].to(w) for name, w in self.sent.weights.items()}
        moved = replace(self.sent, weights=weights, buffers=self.sent.buffers | buffers)
        return self.runtime.evaluate_as(self.arm, moved, self.client, self.state, split)
