"""ClientActor: hosts virtual clients. It alone holds data, so reconstructions are scored here too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from actors.process import Renewable, Share, set_up
from actors.tables import Rows, Scored
from rayfed.attacks.base import Guess, Inference, Reconstruction
from rayfed.client.clients import Sent, Split, State
from rayfed.client.observations import ObservationBuilder, Truth
from rayfed.client.runtime import ClientRuntime, CohortReport
from rayfed.crypto.masking import Transcript
from rayfed.data.base import Dataset
from rayfed.data.forms import Pixels, Records, Tokens
from rayfed.engine.inputs import scorer
from rayfed.metrics.score import Scorer
from rayfed.scenario import AttackSpec, Scenario
from rayfed.store.images import encode_png
from rayfed.update import Observation


class ClientActor(Renewable):
    """Runs the local rounds of any client; keeps nothing between calls, so any actor can do any call."""

    def __init__(
        self,
        scenario: Scenario,
        data: Dataset,
        parts: Sequence[np.ndarray],
        share: Share,
        validation: Sequence[np.ndarray] = (),
    ) -> None:
        self._runtime = ClientRuntime(scenario, data, parts, set_up(share), validation)
        self._observer = ObservationBuilder(self._runtime)

    @cached_property
    def _scorer(self) -> Scorer:
        return scorer(self._runtime.scenario, self._runtime.data)

    def cohorts(
        self, arm: str, sent: Sent, first: int, cohorts: Sequence[Sequence[int]], states: Mapping[int, State]
    ) -> tuple[CohortReport, Any]:
        """The report for the driver on consecutive cohorts, and their partial results for the server."""
        partials, report = self._runtime.cohorts(arm, sent, first, cohorts, states)
        return report, partials

    def make_keys(self, arm: str) -> bytes:
        """A key pair for the arm's clients, locked for them."""
        return self._runtime.make_keys(arm)

    def observe(
        self, arm: str, sent: Sent, victims: Sequence[int], attack: AttackSpec, states: Mapping[int, State], repeat: int
    ) -> tuple[None, list[Observation], list[Truth]]:
        """A sign that it is done; what attackers see; and the truth, which goes to `score` alone."""
        seen = [self._observer.observe(arm, sent, v, attack, states, repeat) for v in victims]
        return None, [observation for observation, _ in seen], [truth for _, truth in seen]

    def answer(
        self, arm: str, sent: Sent, payload: Any, client: int, state: State, transcript: Transcript
    ) -> tuple[Transcript, Any]:
        """What the client remembers of the round now, and its answer to what the server's rule asks, which goes to the
        server.
        """
        answer = self._runtime.answer(arm, sent, payload, client, state, transcript)
        return transcript, answer

    def evaluate(self, arm: str, sent: Sent, start: int, stop: int, split: Split) -> tuple[float, int]:
        """Summed loss and correct predictions on a slice of the test set, or of all clients' own samples."""
        return self._runtime.evaluate(arm, sent, start, stop, split)

    def evaluate_backdoor(self, arm: str, sent: Sent, start: int, stop: int) -> tuple[int, int]:
        """Test images of a slice that are taken for a backdoor's target, and those that were tried."""
        return self._runtime.evaluate_backdoor(arm, sent, start, stop)

    def evaluate_member(
        self, arm: str, sent: Sent, client: int, state: State, splits: Sequence[Split]
    ) -> dict[Split, tuple[float, float]]:
        """Mean loss and accuracy of the weights with one client's private part."""
        return self._runtime.evaluate_member(arm, sent, client, state, splits)

    def evaluate_stranger(self, arm: str, sent: Sent, states: Sequence[State]) -> tuple[float, float]:
        """Test accuracy with random private parts; with random keys and the mean of all else that is private."""
        return self._runtime.evaluate_stranger(arm, sent, states)

    def private_layers(self, arm: str, states: Sequence[State]) -> list[dict[str, Any]]:
        """The rows of the table `private` for an arm's clients, less arm and round."""
        return self._runtime.private_layers(arm, states)

    def score(self, truths: Sequence[Truth], guesses: Sequence[Guess], strip: bool) -> list[Scored]:
        """For each victim, its rows for the tables of attacks (or inferences), of images (or texts) and, where a
        `strip` of them is asked for, of the first victim's snapshots, less the call's columns.
        """
        return [
            self._inferred(t, g) if isinstance(g, Inference) else self._scored(t, g, strip and not i)
            for i, (t, g) in enumerate(zip(truths, guesses, strict=True))
        ]

    def _inferred(self, truth: Truth, guess: Inference) -> Scored:
        row, pairs = self._observer.judge(truth, guess)
        images = [
            {"sample": i, "true": encode_png(true), "reconstructed": encode_png(made)}
            for i, (true, made) in enumerate(pairs)
        ]
        return Scored([row], images)

    def _scored(self, truth: Truth, guess: Reconstruction, strip: bool) -> Scored:
        if guess.status == "not applicable":
            return Scored([row | {"distortion": truth.distortion} for row in self._scorer.nothing(truth.labels)])
        true = truth.images.cpu()
        rows = self._scorer.score(true, truth.labels.cpu(), guess.images, guess.labels)
        orders = [row.pop("order") for row in rows]
        rows = [row | {"distortion": truth.distortion} for row in rows]
        form = self._runtime.data.form
        if not isinstance(form, Pixels):
            return Scored(rows, texts=self._in_words(form, rows, true, guess.images[orders]))
        images = [
            {"sample": row["sample"], "true": encode_png(image), "reconstructed": encode_png(guess.images[order])}
            for row, image, order in zip(rows, true, orders, strict=True)
        ]
        snapshots = [
            {"sample": row["sample"], "iteration": iteration, "image": encode_png(shown[order])}
            for iteration, shown in (guess.snapshots if strip else ())
            for row, order in zip(rows, orders, strict=True)
            if order < len(shown)
        ]
        return Scored(rows, images, snapshots=snapshots)

    @staticmethod
    def _in_words(form: Tokens | Records, rows: Rows, true: Tensor, guess: Tensor) -> Rows:
        """Rows for the table of texts; `guess` is in the order of the true samples."""
        guess = guess.nan_to_num(0).to(true)
        right = form.found(true, guess).tolist()
        texts = zip(rows, form.read(true), form.read(guess), right, strict=True)
        return [{"sample": row["sample"], "true": t, "reconstructed": f, "right": r} for row, t, f, r in texts]
