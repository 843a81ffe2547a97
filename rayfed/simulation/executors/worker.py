"""Client worker, which trains virtual clients, evaluates models, and scores the results of attacks.

Only client workers have the data, so they also evaluate and score. Between calls they only keep updates that they would
compute again with the same bits, so any worker can run any call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.aggregation.over_channel import OverChannel
from rayfed.aggregation.server import TreeFold
from rayfed.attacks.base import Guess, Inference, Reconstruction
from rayfed.attacks.fit import judged
from rayfed.core.memory import Peak, peak
from rayfed.defences.base import Batch
from rayfed.errors import ClientError, UserError, noting_errors
from rayfed.metrics.images import mse, wasserstein
from rayfed.metrics.score import Scorer
from rayfed.models.copying import copy_model
from rayfed.models.private import without
from rayfed.samples import Records, Tokens
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import aggregation_of
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.diagnosis import private_layers
from rayfed.simulation.client.local import PRIVATE, SENT_OUT
from rayfed.simulation.client.runtime import ClientRuntime, Evaluation
from rayfed.simulation.client.server_message import Sent, Split, State
from rayfed.simulation.client.visit import ObservationRequest, ObservedClient, Truth
from rayfed.simulation.inputs import make_scorer
from rayfed.simulation.tables import Rows, VictimRows
from rayfed.store.images import encode_png
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Observation

_EVALUATED = 500
"""Batch size of evaluations."""
_EXACT = 1e-4
"""Maximum fit of a result that explains the update."""
_SAME = 0.02
"""Maximum difference of values, such as pixels, between equal samples."""


class ClientWorker(ClientRuntime):
    """Worker that trains, evaluates and scores for virtual clients. The first returned value is for the driver."""

    @cached_property
    def _scorer(self) -> Scorer:
        return make_scorer(self.scenario, self.data)

    def fold(
        self, arm: str, sent: Sent, cohorts: int, *partials: Mapping[tuple[int, int], Any]
    ) -> tuple[None, dict[tuple[int, int], Any]]:
        """Sum partial results of a round's updates, and return None (for the driver) and the sums.

        The round has `cohorts` cohorts. Partial results are merged as far as the server's tree does (`TreeFold.nodes`).
        """
        fold = TreeFold(self.rule(arm, sent), cohorts)
        for (level, index), result in (place for some in partials for place in some.items()):
            fold.add(index, result, level)
        return None, fold.nodes

    def train_largest(self) -> None:
        """Train the largest cohorts of each arm on the initial weights, and evaluate each arm.

        The largest cohorts are the one with the largest client, and the one with the most samples.
        """
        for name, spec in self.specs.items():
            arm = self.arm(name)
            for round, cohort in plan.largest_cohorts(
                self.scenario, self.parts.sizes, aggregation_of(spec).asynchronous
            ):
                self._train(name, self.here(Sent(round, arm.weights, arm.buffers)), cohort)
            rows = min(_EVALUATED, len(self.data.test_labels))
            self.evaluate(name, Sent(0, arm.weights, arm.buffers), 0, rows)

    def _train(self, name: str, sent: Sent, cohort: Sequence[int]) -> None:
        """Train a cohort on an arm as in a round, but without encryption, which is slow and needs no GPU."""
        if not isinstance(self._aggregations[name], OverChannel):
            with suppress(ClientError):  # the run then reports the client
                self.cohort(name, sent, cohort, {})
            return
        arm, tasks = self.arm(name), [self.task(name, sent, client, self.parts[client], {}) for client in cohort]
        deque(cohort_updates(tasks, arm.spec.training.in_round(sent.round), arm.defences), maxlen=0)

    def peak(self) -> Peak:
        """Return the peak GPU memory of this process so far."""
        return peak()

    def first_observations(self, name: str, index: int) -> tuple[Sequence[int], Sequence[Observation]]:
        """Return the victims of an attack's first call on an arm, and their observations on the initial weights.

        `index` is the attack's position in the scenario. Returns no victims if a client cannot be observed; the run
        then reports the reason.
        """
        attack, arm = self.scenario.attacks[index], self.arm(name)
        round = min(attack.rounds, default=attack.earlier)
        victims = plan.victims(self.scenario, attack, round, self.parts.sizes)[: attack.victims_per_call]
        rounds, keys = range(round - attack.earlier, round + 1), self.make_keys(name)
        *earlier, sent = (Sent(r, arm.weights, arm.buffers, keys) for r in rounds)
        try:
            request = ObservationRequest(name, victims, attack, earlier=tuple(earlier))
            _, observations, _ = self.observe(sent, request)
        except UserError:
            return [], []
        return victims, observations

    def evaluate(self, arm: str, sent: Sent, start: int, stop: int, split: Split = "test") -> Evaluation:
        """Return the sums of an arm's loss and accuracy on a slice of the test set, or of all clients' samples."""
        sent, rows = self.here(sent), np.arange(start, stop)
        state = {**sent.weights, **sent.buffers}
        return self._evaluated(
            arm, state, self._batches(arm, split, rows if split == "test" else self.parts.indices[rows])
        )

    def evaluate_backdoor(self, arm: str, sent: Sent, start: int, stop: int) -> tuple[int, int]:
        """Return how many triggered images of a test slice are classified as the target, and how many were tried."""
        sent, poisoning = self.here(sent), self.malicious[arm].poisoning
        tried = [poisoning.triggered(Batch(*batch)) for batch in self._batches(arm, "test", np.arange(start, stop))]
        found = self._evaluated(arm, {**sent.weights, **sent.buffers}, [(b.inputs, b.labels) for b in tried])
        return int(found.right), sum(len(batch.labels) for batch in tried)

    def classify_encrypted(self, name: str, sent: Sent, count: int) -> dict[str, float]:
        """Classify the first test images under encryption, as a client and a server that cannot read them.

        Returns the columns `encrypted_*` of the table `rounds`.
        """
        from rayfed.crypto.inference import measure

        sent, arm = self.here(sent), self.arm(name)
        model = copy_model(arm.model).eval()
        model.load_state_dict({**sent.weights, **sent.buffers})
        images, labels = self.samples("test", np.arange(min(count, len(self.data.test_labels))))
        return measure(model.cpu(), images.cpu(), labels.cpu())

    def evaluate_member(
        self, arm: str, sent: Sent, client: int, state: State, splits: Sequence[Split]
    ) -> dict[Split, Evaluation]:
        """Evaluate the global weights with one client's private part of the model, and return the results by split."""
        task = self.task(arm, self.here(sent), client, self.parts[client], state)
        rows = {"test": np.arange(len(self.data.test_labels)), "train": self.parts[client]}
        state_of_all = {**task.weights, **task.buffers}
        return {
            split: self._evaluated(arm, state_of_all, self._batches(arm, split, rows[split])).over(len(rows[split]))
            for split in splits
        }

    def evaluate_non_member(self, arm: str, sent: Sent, states: Sequence[State]) -> tuple[float, ...]:
        """Return the test accuracies of three non-members, which do not have any client's private part of the model.

        The first has a newly initialised private part. The others sample only constant tensors (keys, passports) anew.
        Otherwise, the second uses the mean of the clients' private parts, and the third zeros.
        """
        sent, rows = self.here(sent), np.arange(len(self.data.test_labels))
        drawn = self.drawn_privately(arm, "stranger", sent.round)
        learnt = {n: t for n, t in without(drawn, self.arm(arm).keys).items() if t.is_floating_point()}
        mean = {name: torch.stack([s[PRIVATE][name].to(t) for s in states]).mean(0) for name, t in learnt.items()}
        zero = {name: torch.zeros_like(t) for name, t in learnt.items()}
        whole = [{**sent.weights, **sent.buffers, **own} for own in (drawn, drawn | mean, drawn | zero)]
        return tuple(self._evaluated(arm, state, self._batches(arm, "test", rows)).right / len(rows) for state in whole)

    def private_layers(self, arm: str, states: Sequence[State]) -> list[dict[str, Any]]:
        """Return rows of the table `private`: distance and rank of the clients' private layers."""
        parts = [state.get(PRIVATE) or state[SENT_OUT] for state in states]
        return private_layers(self.arm(arm).model, parts)

    def observe(self, sent: Sent, request: ObservationRequest) -> tuple[None, list[Observation], list[Truth]]:
        """Observe an attack's victims, and return None (for the driver), the observations, and the true samples."""
        builder, sent = ObservationBuilder(self), self.here(sent)
        visits = [request.visit(sent, victim) for victim in request.victims]
        seen = [builder.observe(visit, request.attack, request.repeat) for visit in visits]
        return None, [observation for observation, _ in seen], [truth for _, truth in seen]

    def score(
        self,
        truths: Sequence[Truth],
        guesses: Sequence[Guess],
        strip: bool,
        sent: Sent | None = None,
        request: ObservationRequest | None = None,
    ) -> list[VictimRows]:
        """Score an attack's results, and return each victim's rows of `attacks` or `inferences`, `images` and `texts`.

        The rows do not have the columns of the call. With `strip`, the first victim also has rows of snapshots.
        `sent` and `request` are the arguments of `observe`; without them `between` is not measured. Metrics and images
        that raise an exception are left empty.
        """
        observed: list[ObservedClient | None] = [None] * len(truths)
        if sent is not None and request is not None:
            visits = [request.visit(sent, victim) for victim in request.victims]
            observed = [ObservedClient(self, visit, request.attack, request.repeat) for visit in visits]
        scored = [
            self._inferred(t, g) if isinstance(g, Inference) else self._rebuilt(t, g, strip and not i, seen)
            for i, (t, g, seen) in enumerate(zip(truths, guesses, observed, strict=True))
        ]
        return [one._replace(failures=tuple(self._scorer.failures.items())) for one in scored]

    def _noting(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which errors are added to the metrics' failures instead of raised."""
        return noting_errors(partial(self._scorer.failures.setdefault, name))

    def _inferred(self, truth: Truth, guess: Inference) -> VictimRows:
        nothing = {"value": None, "candidates": 0, "control": None, "scores": None}
        row = {"metric": guess.metric, "chance": guess.chance, **nothing, "status": "failed"}
        pairs, images = list[tuple[Tensor, Tensor]](), Rows()
        with noting_errors(lambda why: row.update(message=f"the attack's result could not be scored: {why}")):
            row, pairs = ObservationBuilder(self).judge(truth, guess)
            if truth.reason is not None:
                row |= {"reason": truth.reason, "message": truth.detail}
        with self._noting("images"):
            images = [
                {"sample": i, "true": encode_png(true), "reconstructed": encode_png(made)}
                for i, (true, made) in enumerate(pairs)
            ]
        return VictimRows([row], images)

    def _rebuilt(self, truth: Truth, guess: Reconstruction, strip: bool, observed: ObservedClient | None) -> VictimRows:
        missed = {"distortion": truth.distortion, "fit": None, "between": None}
        missed |= {"log_likelihood": None, "true_log_likelihood": None}
        scored = VictimRows([row | missed for row in self._scorer.nothing(truth.labels)])
        if guess.status not in ("not applicable", "failed"):
            with self._noting("scores"):
                scored = self._scored(truth, guess, strip, observed)
        return scored

    def _scored(self, truth: Truth, guess: Reconstruction, strip: bool, observed: ObservedClient | None) -> VictimRows:
        true = truth.inputs.cpu()
        rows = self._scorer.score(true, truth.labels.cpu(), guess.images, guess.labels)
        if truth.decoys is not None:
            by_chance = self._scorer.identified(truth.decoys.cpu(), guess.images)
            rows = [row | {"decoy_identified": hit or 0.0} for row, hit in zip(rows, by_chance, strict=True)]
        orders = [row.pop("order") for row in rows]
        fit, between = None, None
        with self._noting("fit"):
            fit = judged(guess, truth.fit, truth.fits, truth.nats)
        if observed is not None and fit is not None and fit <= _EXACT:
            with self._noting("between"):
                between = self._between(truth, guess.images[orders].to(truth.inputs), observed)
        compared: dict[str, Any] = {"distortion": truth.distortion, "fit": fit, "between": between}
        compared |= {name: None if nats is None else -nats for name, nats in _nats(guess, truth).items()}
        if truth.reason is not None:
            compared |= {"reason": truth.reason, "message": truth.detail}
        rows = [row | compared for row in rows]
        sample = self.data.sample
        if isinstance(sample, Tokens | Records):
            texts = Rows()
            with self._noting("texts"):
                texts = self._in_words(sample, rows, true, guess.images[orders])
            return VictimRows(rows, texts=texts)
        images, snapshots = Rows(), Rows()
        with self._noting("images"):
            images = [
                {"sample": row["sample"], "true": encode_png(image), "reconstructed": encode_png(guess.images[order])}
                for row, image, order in zip(rows, true, orders, strict=True)
            ]
        with self._noting("snapshots"):
            snapshots = _snapshot_rows(guess.snapshots, rows, true, orders) if strip else Rows()
        return VictimRows(rows, images, snapshots=snapshots)

    def _between(self, truth: Truth, found: Tensor, observed: ObservedClient) -> float | None:
        """Return the `fit` of the midpoints between the true samples and reconstructions `found` (N, *shape).

        The result is infinite for texts, which have no midpoints, and None if all reconstructions equal the samples.
        """
        if bool(((found - truth.inputs).abs() < _SAME).all()):
            return None
        if not found.is_floating_point():
            return inf
        fit = ObservationBuilder(self).fit((truth.inputs + found) / 2, truth.labels, observed, truth)
        return inf if fit is None else fit  # None if the model rejects the midpoint

    @staticmethod
    def _in_words(sample: Tokens | Records, rows: Rows, true: Tensor, guess: Tensor) -> Rows:
        """Return rows of the table `texts`; `guess` is in the order of the true samples."""
        guess = guess.nan_to_num(0).to(true)
        right = sample.found(true, guess).tolist()
        texts = zip(rows, sample.read(true), sample.read(guess), right, strict=True)
        return [{"sample": row["sample"], "true": t, "reconstructed": f, "right": r} for row, t, f, r in texts]


def _snapshot_rows(snapshots: Sequence[tuple[int, Tensor]], rows: Rows, true: Tensor, orders: Sequence[int]) -> Rows:
    """Return rows of the table `snapshots`: the matched image at each iteration, and its distance to the true image."""
    found = Rows()
    for iteration, shown in snapshots:
        for row, image, order in zip(rows, true, orders, strict=True):
            if order >= len(shown):
                continue
            pair = image[None], shown[order][None]
            distances = {"mse": mse(*pair).item(), "wasserstein": wasserstein(*pair).item()}
            found.append(
                {"sample": row["sample"], "iteration": iteration, "image": encode_png(shown[order])} | distances
            )
    return found


def _nats(guess: Reconstruction, truth: Truth) -> dict[str, float | None]:
    """Return minus the log-likelihoods of a reconstruction and of the true samples, by column."""
    return {"log_likelihood": guess.nats, "true_log_likelihood": truth.nats}
