"""The clients' side of a run: hosts every virtual client's data and does their work, with or without Ray around it."""

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
from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.protected import Sealing
from rayfed.aggregation.secure_sum import Hosted, SecureSum
from rayfed.aggregation.server import TreeFold
from rayfed.client import plan
from rayfed.client.arm import protected_aggregation
from rayfed.client.clients import Clients, Sent, Split, State
from rayfed.client.cohort import CohortRecord, cohort_updates, works_together
from rayfed.client.diagnosis import private_layers
from rayfed.client.failures import Attempt, checked, until_none_fails
from rayfed.client.local import PRIVATE, update_method
from rayfed.crypto.keys import derive, lock, unlock
from rayfed.crypto.masking import Transcript
from rayfed.crypto.sealing import Keys
from rayfed.data.base import Dataset
from rayfed.defences.base import Batch, Task
from rayfed.errors import ProtectionError
from rayfed.models.private import without
from rayfed.scenario import Scenario
from rayfed.update import Named, Shown, Update


@dataclass(frozen=True)
class CohortReport:
    """What the simulator, and nobody in the federation, learns of a cohort's work."""

    rows: list[dict[str, Any]]
    """A row of the clients' table for each client."""
    seconds: float
    """Wall time of the whole cohort, partial result included."""
    states: dict[int, State] = field(default_factory=dict)
    """The clients' own memories, to be handed back to them next time."""

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
        """`parts[i]` are the training indices of client i, `validation[i]` those that it has held out, if any."""
        super().__init__(scenario, data, parts, device, validation)
        self._aggregations = {
            name: protected_aggregation(arm, plan.protecting(scenario, arm, self.parts.sizes))
            for name, arm in self.specs.items()
        }

    def cohorts(
        self, arm: str, sent: Sent, first: int, cohorts: Sequence[Sequence[int]], states: Mapping[int, State]
    ) -> tuple[CohortReport, dict[tuple[int, int], Any]]:
        """The work of consecutive cohorts, of which the first has this number: the report on all, and their partial
        results, merged as far as the server's tree merges them; see `cohort`.
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
        """The cohort's partial result for the aggregation, and the report on its clients.

        `states` are the memories of these clients, and of all malicious ones where they collude; they stay as they are.
        The partial result is None where all clients have failed. Raises `ClientError` for a failure that ends the run.
        """
        report, nodes = self.cohorts(arm, sent, 0, [clients], states)
        return nodes[0, 0], report

    def _cohort(
        self,
        rule: Aggregation,
        honest: Sequence[Update],
        arm: str,
        sent: Sent,
        clients: Sequence[int],
        states: Mapping[int, State],
    ) -> tuple[Any, CohortReport]:
        """One of `cohorts`, with what malicious clients that collude would send if they were `honest`."""
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
        """What the malicious clients of a round would send if they did as they are told, where they collude."""
        malicious = self.malicious[arm]
        members = malicious.among(plan.drawn_clients(self.scenario, sent.round)) if malicious.poisoning.colludes else []
        return self._made(arm, sent, members, states)

    def _made(self, arm: str, sent: Sent, clients: Sequence[int], states: Mapping[int, State]) -> list[Update]:
        """Updates made one by one, so that they do not depend on who shares a cohort, and without a trace in their
        clients' memories.
        """
        update = update_method(self.specs[arm].training, self.arm(arm).defences)
        return [update(self.task(arm, sent, c, self.parts[c], copy.deepcopy(states.get(c, {})))) for c in clients]

    def seen(self, arm: str, sent: Sent, states: Mapping[int, State]) -> Shown | None:
        """What every client of a round is shown of all others' updates; `states` are all their memories."""
        updates = self._made(arm, sent, plan.drawn_clients(self.scenario, sent.round), states)
        poisoned = self.malicious[arm].sent(updates, self._honest(arm, sent, states))
        return self.rule(arm, sent).seen(list(poisoned))

    def answer(
        self, arm: str, sent: Sent, payload: Any, client: int, state: State, transcript: Transcript | None = None
    ) -> Any:
        """What a client answers to a question of the arm's aggregation.

        `transcript` is what it remembers of the round's questions so far; what it answers is added there.
        """
        rule = self.rule(arm, sent, {} if transcript is None else {client: transcript})
        return rule.answer(payload, ClientProxy(self, arm, self.here(sent), client, state))

    def make_keys(self, arm: str) -> bytes:
        """A key pair for all clients of an arm that encrypts, made by one of them and locked for the others; nothing
        where they have none in common.
        """
        rule, secret = self._aggregations[arm], self._secret(arm)
        if not isinstance(rule, Sealing):
            return b""
        pair = rule.sealer.scheme.generate(derive(secret, "pair"))
        return lock(derive(secret, "box"), pair)

    def rule(self, arm: str, sent: Sent, transcripts: dict[int, Transcript] | None = None) -> Aggregation:
        """The arm's aggregation as a client of the round works with it; `transcripts` are by client."""
        rule, secret = self._aggregations[arm], self._secret(arm)
        if isinstance(rule, SecureSum):
            leaving, parts = plan.leaving(self.scenario, sent.round), {"weights": sent.weights, "buffers": sent.buffers}
            model = {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}
            return rule.at_clients(Hosted(derive(secret, "own"), sent.told, leaving, model, transcripts or {}))
        if isinstance(rule, Sealing):
            keys = Keys(derive(secret, "session", sent.digest), self._pair(arm, sent))
            drops = self.scenario.federation.failures.then == "drop"
            return rule.at_clients(keys, plan.drawn_clients(self.scenario, sent.round), drops)
        return rule

    def _pair(self, arm: str, sent: Sent) -> bytes:
        """The key pair that `make_keys` made; raises `ProtectionError` where the server sends another."""
        try:
            return unlock(derive(self._secret(arm), "box"), sent.keys)
        except ProtectionError:
            raise ProtectionError(
                f"the key pair of arm '{arm}' cannot be unlocked: it was tampered with, or locked by clients of "
                f"another secret; start the run again"
            ) from None

    def _secret(self, arm: str) -> bytes:
        """What an arm's clients know and nobody else: it stands for what they exchange before the first round."""
        return self.scenario.secret("encryption", arm)

    def evaluate(self, arm: str, sent: Sent, start: int, stop: int, split: Split = "test") -> tuple[float, int]:
        """Summed loss and correct predictions on a slice of the test set, or of all clients' own samples."""
        sent, rows = self.here(sent), np.arange(start, stop)
        state = {**sent.weights, **sent.buffers}
        return self._evaluated(arm, state, self._batches(split, rows if split == "test" else self.parts.indices[rows]))

    def evaluate_backdoor(self, arm: str, sent: Sent, start: int, stop: int) -> tuple[int, int]:
        """Of a slice of the test set with the trigger of the arm's backdoor: images taken for its target, and tried."""
        sent, poisoning = self.here(sent), self.malicious[arm].poisoning
        tried = [poisoning.triggered(Batch(*batch)) for batch in self._batches("test", np.arange(start, stop))]
        _, taken = self._evaluated(arm, {**sent.weights, **sent.buffers}, [(b.inputs, b.labels) for b in tried])
        return taken, sum(len(batch.labels) for batch in tried)

    def evaluate_member(
        self, arm: str, sent: Sent, client: int, state: State, splits: Sequence[Split]
    ) -> dict[Split, tuple[float, float]]:
        """Mean loss and accuracy of the weights with one client's private part, on the test set or its own samples."""
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
        """Mean loss and accuracy as a client finds them on samples that it has held out, or that it trains on: a
        malicious one, on what it has made of them.
        """
        weights, buffers = self._completed(arm, self.here(sent), client, state)
        data = self.own_data(arm, client, self.validation[client] if split == "validation" else self.parts[client])
        batches = zip(data.inputs.split(500), data.labels.split(500), strict=True)
        loss, correct = self._evaluated(arm, {**weights, **buffers}, batches)
        return loss / len(data.labels), correct / len(data.labels)

    def evaluate_stranger(self, arm: str, sent: Sent, states: Sequence[State]) -> tuple[float, float]:
        """Accuracy on the test set of who has the weights but no private part: with one as it begins, and with only
        what never changes (keys, passports) drawn anew, the rest being the mean of the clients' own.
        """
        sent, rows = self.here(sent), np.arange(len(self.data.test_labels))
        drawn = self.drawn_privately(arm, "stranger", sent.round)
        learnt = {n: t for n, t in without(drawn, self.arm(arm).keys).items() if t.is_floating_point()}
        mean = {name: torch.stack([s[PRIVATE][name].to(t) for s in states]).mean(0) for name, t in learnt.items()}
        whole = [{**sent.weights, **sent.buffers, **own} for own in (drawn, drawn | mean)]
        anew, averaged = (self._evaluated(arm, state, self._batches("test", rows))[1] for state in whole)
        return anew / len(rows), averaged / len(rows)

    def private_layers(self, arm: str, states: Sequence[State]) -> list[dict[str, Any]]:
        """How far some clients' private layers are apart, and how rich they are: rows of the table `private`."""
        return private_layers(self.arm(arm).model, [state[PRIVATE] for state in states])

    @torch.no_grad()
    def _evaluated(self, arm: str, state: Named, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """Summed loss and correct predictions of a whole model on some inputs and their labels."""
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


def _partial(rule: Aggregation, sent: Iterator[Any]) -> Any:
    """What a rule makes of what a cohort sends; None where that is nothing."""
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
        """The round that is asked about."""
        return self.sent.round

    def evaluate(
        self, update: Named, buffers: Named, split: Literal["validation", "train"] = "validation"
    ) -> tuple[float, float]:
        """Mean loss and accuracy, on some of the client's own samples, of the model that sent this update."""
        scale = self.runtime.specs[self.arm].update_scale
        weights = {name: w - scale * update[name].to(w) for name, w in self.sent.weights.items()}
        moved = replace(self.sent, weights=weights, buffers=self.sent.buffers | buffers)
        return self.runtime.evaluate_as(self.arm, moved, self.client, self.state, split)
