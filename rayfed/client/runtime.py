"""The clients' side of a run: holds every virtual client's data and does their work, with or without Ray."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from rayfed import objective
from rayfed.aggregation.base import AnyAggregation, InteractiveAggregation
from rayfed.aggregation.over_channel import OverChannel
from rayfed.aggregation.server import TreeFold
from rayfed.client import plan
from rayfed.client.arm import protected_aggregation
from rayfed.client.clients import Clients, Sent, Split, State
from rayfed.client.cohort import CohortRecord, cohort_updates, works_together
from rayfed.client.diagnosis import private_layers
from rayfed.client.failures import Attempt, checked, until_none_fails
from rayfed.client.local import PRIVATE, update_method
from rayfed.crypto.masking import Transcript
from rayfed.data.base import Dataset
from rayfed.defences.base import Batch, Task
from rayfed.models.private import without
from rayfed.protections.channel import ClientRound
from rayfed.scenario import Scenario
from rayfed.update import Mixtures, Named, Update


@dataclass(frozen=True)
class CohortReport:
    """Report on a cohort's work, for the simulator and nobody in the federation."""

    rows: list[dict[str, Any]]
    """Rows of the table `clients`, one for each client."""
    seconds: float
    """Wall time of the whole cohort (s), partial result included."""
    states: dict[int, State] = field(default_factory=dict)
    """States of the clients, to be handed back to them next time."""

    def __add__(self, other: CohortReport) -> CohortReport:
        return CohortReport([*self.rows, *other.rows], self.seconds + other.seconds, {**self.states, **other.states})


class ClientRuntime(Clients):
    """Does the local rounds of any client of a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        data: Dataset,
        parts: Sequence[np.ndarray],
        device: torch.device,
        validation: Sequence[np.ndarray] = (),
    ) -> None:
        """Take in `parts[i]` the training indices of client i, and in `validation[i]` those that it has held out."""
        super().__init__(scenario, data, parts, device, validation)
        self._aggregations: dict[str, AnyAggregation] = {
            name: protected_aggregation(arm, plan.protecting(scenario, arm, self.parts.sizes))
            for name, arm in self.specs.items()
        }

    def cohorts(
        self, arm: str, sent: Sent, first: int, cohorts: Sequence[Sequence[int]], states: Mapping[int, State]
    ) -> tuple[CohortReport, dict[tuple[int, int], Any]]:
        """Do the work of consecutive cohorts, of which the first has the number `first`; see `cohort`.

        Returns the report on all, and their partial results, merged as far as the server's tree merges them.
        """
        sent = self.here(sent)
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
        """Do a cohort's work and return its partial result for the aggregation, and the report on its clients.

        `states` are those of these clients, and of all malicious ones where they collude; they stay as they are.
        The partial result is None where all clients have failed. Raises `ClientError` for a failure that ends the run.
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
        """Do the work of one of `cohorts`; `honest` is what malicious clients that collude would send otherwise."""
        began = perf_counter()
        training, defences, malicious = self.specs[arm].training, self.arm(arm).defences, self.malicious[arm]

        def given(members: Sequence[int]) -> list[Task]:
            return [self.task(arm, sent, c, self.parts[c], copy.deepcopy(states.get(c, {}))) for c in members]

        def attempts(tasks: Sequence[Task]) -> Iterator[Attempt]:
            for task, made in zip(tasks, cohort_updates(tasks, training, defences), strict=True):
                yield task, checked(malicious.attempted(made, honest), task)

        tasks, asked = given(clients), perf_counter()
        attempted: Iterable[Attempt] = attempts(tasks)
        if works_together(tasks[0], training, defences):
            attempted = until_none_fails(list(attempted), lambda left: attempts(given(left)))
        together = (perf_counter() - asked) / len(clients)  # under vmap the training of all clients, else nothing
        record = CohortRecord(arm, rule, self.scenario.federation.failures)
        partial = _partial(rule, record.sent(attempted, together))
        rows = [row | {"malicious": row["client"] in malicious.clients} for row in record.rows]
        return partial, CohortReport(rows, perf_counter() - began, record.states)

    def _honest(self, arm: str, sent: Sent, states: Mapping[int, State]) -> list[Update]:
        """Return the honest updates of the malicious clients of a round, where they collude."""
        malicious = self.malicious[arm]
        members = malicious.among(plan.drawn_clients(self.scenario, sent.round)) if malicious.poisoning.colludes else []
        return self._made(arm, sent, members, states)

    def _made(self, arm: str, sent: Sent, clients: Sequence[int], states: Mapping[int, State]) -> list[Update]:
        """Return updates made one by one, whatever the clients' cohorts, and without a trace in their states."""
        update = update_method(self.specs[arm].training, self.arm(arm).defences)
        return [update(self.task(arm, sent, c, self.parts[c], copy.deepcopy(states.get(c, {})))) for c in clients]

    def mixtures(self, arm: str, sent: Sent, states: Mapping[int, State]) -> Mixtures | None:
        """Return what every client of a round is shown of all others' updates; `states` are those of all."""
        rule = self.rule(arm, sent)
        if not isinstance(rule, InteractiveAggregation):
            return None
        updates = self._made(arm, sent, plan.drawn_clients(self.scenario, sent.round), states)
        poisoned = self.malicious[arm].sent(updates, self._honest(arm, sent, states))
        return rule.mixtures(list(poisoned))

    def answer(
        self, arm: str, sent: Sent, payload: Any, client: int, state: State, transcript: Transcript | None = None
    ) -> Any:
        """Return a client's answer to a question of the arm's aggregation.

        `transcript` is its record of the round's questions so far, to which the answer is added.
        """
        rule = self.rule(arm, sent, {} if transcript is None else {client: transcript})
        assert isinstance(rule, InteractiveAggregation)
        return rule.answer(payload, ClientProxy(self, arm, self.here(sent), client, state))

    def make_keys(self, arm: str) -> bytes:
        """Make a key pair for all clients of an arm, locked with their secret; empty where they share none."""
        rule = self._aggregations[arm]
        return rule.channel.make_keys(self._secret(arm)) if isinstance(rule, OverChannel) else b""

    def rule(self, arm: str, sent: Sent, transcripts: dict[int, Transcript] | None = None) -> AnyAggregation:
        """The arm's aggregation as a client of the round works with it; `transcripts` are by client."""
        rule = self._aggregations[arm]
        if not isinstance(rule, OverChannel):
            return rule
        drawn, leaving = (those(self.scenario, sent.round) for those in (plan.drawn_clients, plan.leaving))
        drops = self.scenario.federation.failures.then == "drop"
        return rule.at_clients(ClientRound(self._secret(arm), sent, drawn, leaving, drops, transcripts or {}))

    def _secret(self, arm: str) -> bytes:
        """Return the secret that only an arm's clients know, in place of what they exchange before the first round."""
        return self.scenario.secret("encryption", arm)

    def evaluate(self, arm: str, sent: Sent, start: int, stop: int, split: Split = "test") -> tuple[float, int]:
        """Return summed loss and correct predictions on a slice of the test set, or of all clients' own samples."""
        sent, rows = self.here(sent), np.arange(start, stop)
        state = {**sent.weights, **sent.buffers}
        return self._evaluated(arm, state, self._batches(split, rows if split == "test" else self.parts.indices[rows]))

    def evaluate_backdoor(self, arm: str, sent: Sent, start: int, stop: int) -> tuple[int, int]:
        """Count, in a slice of the test set with the backdoor's trigger, the images taken for its target, and all."""
        sent, poisoning = self.here(sent), self.malicious[arm].poisoning
        tried = [poisoning.triggered(Batch(*batch)) for batch in self._batches("test", np.arange(start, stop))]
        _, taken = self._evaluated(arm, {**sent.weights, **sent.buffers}, [(b.inputs, b.labels) for b in tried])
        return taken, sum(len(batch.labels) for batch in tried)

    def evaluate_member(
        self, arm: str, sent: Sent, client: int, state: State, splits: Sequence[Split]
    ) -> dict[Split, tuple[float, float]]:
        """Return mean loss and accuracy of the weights with one client's private part, by split."""
        task = self.task(arm, self.here(sent), client, self.parts[client], state)
        rows = {"test": np.arange(len(self.data.test_labels)), "train": self.parts[client]}
        found: dict[Split, tuple[float, float]] = {}
        for split in splits:
            loss, correct = self._evaluated(arm, {**task.weights, **task.buffers}, self._batches(split, rows[split]))
            found[split] = loss / len(rows[split]), correct / len(rows[split])
        return found

    def evaluate_as(
        self, arm: str, sent: Sent, client: int, state: State, split: Literal["validation", "train"]
    ) -> tuple[float, float]:
        """Return mean loss and accuracy as a client finds them on its held-out or training samples.

        A malicious client finds them on its poisoned samples.
        """
        weights, buffers = self._completed(arm, self.here(sent), client, state)
        data = self.own_data(arm, client, self.validation[client] if split == "validation" else self.parts[client])
        batches = zip(data.inputs.split(500), data.labels.split(500), strict=True)
        loss, correct = self._evaluated(arm, {**weights, **buffers}, batches)
        return loss / len(data.labels), correct / len(data.labels)

    def evaluate_non_member(self, arm: str, sent: Sent, states: Sequence[State]) -> tuple[float, float]:
        """Return the test accuracies of a non-member, who has the weights but no private part of a client.

        The first is with a private part as it begins; the second with only what never changes (keys, passports) drawn
        anew, the rest being the mean of the clients' own.
        """
        sent, rows = self.here(sent), np.arange(len(self.data.test_labels))
        drawn = self.drawn_privately(arm, "stranger", sent.round)
        learnt = {n: t for n, t in without(drawn, self.arm(arm).keys).items() if t.is_floating_point()}
        mean = {name: torch.stack([s[PRIVATE][name].to(t) for s in states]).mean(0) for name, t in learnt.items()}
        whole = [{**sent.weights, **sent.buffers, **own} for own in (drawn, drawn | mean)]
        anew, averaged = (self._evaluated(arm, state, self._batches("test", rows))[1] for state in whole)
        return anew / len(rows), averaged / len(rows)

    def private_layers(self, arm: str, states: Sequence[State]) -> list[dict[str, Any]]:
        """Return rows of the table `private`: how far some clients' private layers are apart, and how rich they are."""
        return private_layers(self.arm(arm).model, [state[PRIVATE] for state in states])

    @torch.no_grad()
    def _evaluated(self, arm: str, state: Named, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """Return summed loss and correct predictions of a whole model on some inputs and their labels."""
        model = self.arm(arm).model
        loss, correct = 0.0, 0
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        for inputs, labels in batches:
            logits = functional_call(model, state, (inputs,))
            loss += float(objective.loss(logits, labels, "sum"))
            correct += int(objective.correct(logits, labels).sum())
        for module, mode in modes:
            module.training = mode
        return loss, correct


def _partial(rule: AnyAggregation, sent: Iterator[Any]) -> Any:
    """Return a rule's partial result of what a cohort sends; None where that is nothing."""
    first = next(sent, None)
    return None if first is None else rule.partial(chain([first], sent))


@dataclass(frozen=True)
class ClientProxy:
    """A client that answers questions of the aggregation (`rayfed.aggregation.base.Member`)."""

    runtime: ClientRuntime
    arm: str
    sent: Sent
    client: int
    state: State

    @property
    def round(self) -> int:
        """Number of the round that is asked about."""
        return self.sent.round

    def evaluate(
        self, update: Named, buffers: Named, split: Literal["validation", "train"] = "validation"
    ) -> tuple[float, float]:
        """Return mean loss and accuracy, on some of the client's own samples, of the model that sent this update."""
        scale = self.runtime.specs[self.arm].update_scale
        weights = {name: w - scale * update[name].to(w) for name, w in self.sent.weights.items()}
        moved = replace(self.sent, weights=weights, buffers=self.sent.buffers | buffers)
        return self.runtime.evaluate_as(self.arm, moved, self.client, self.state, split)
