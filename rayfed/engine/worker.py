"""A worker for clients: does any call of a round for any virtual client, and scores what attackers guess.

It alone has the data, so reconstructions are scored here too. It keeps nothing between calls: any worker can do any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from rayfed.attacks.base import Guess, Inference, Reconstruction
from rayfed.client.clients import Sent, State
from rayfed.client.observations import ObservationBuilder
from rayfed.client.runtime import ClientRuntime
from rayfed.client.visit import ClientVisit, Truth
from rayfed.crypto.masking import Transcript
from rayfed.engine.inputs import scorer
from rayfed.engine.tables import Rows, Scored
from rayfed.metrics.score import Scorer
from rayfed.samples import Records, Tokens
from rayfed.scenario import AttackSpec
from rayfed.store.images import encode_png
from rayfed.update import Observation


class ClientWorker(ClientRuntime):
    """Worker that executors call for clients; of several values that a call returns, the first is for the rounds."""

    @cached_property
    def _scorer(self) -> Scorer:
        return scorer(self.scenario, self.data)

    def reply(
        self, arm: str, sent: Sent, payload: Any, client: int, state: State, transcript: Transcript
    ) -> tuple[Transcript, Any]:
        """Return the client's new transcript of the round, and its answer to the rule, which goes to the server."""
        answer = self.answer(arm, sent, payload, client, state, transcript)
        return transcript, answer

    def observe(
        self, arm: str, sent: Sent, victims: Sequence[int], attack: AttackSpec, states: Mapping[int, State], repeat: int
    ) -> tuple[None, list[Observation], list[Truth]]:
        """Return None as a sign that it is done, what attackers see, and the truth, which goes to `score` alone."""
        builder = ObservationBuilder(self)
        seen = [builder.observe(ClientVisit(arm, sent, v, states), attack, repeat) for v in victims]
        return None, [observation for observation, _ in seen], [truth for _, truth in seen]

    def score(self, truths: Sequence[Truth], guesses: Sequence[Guess], strip: bool) -> list[Scored]:
        """Return each victim's rows for the tables of attacks or inferences, and of images or texts.

        With `strip`, also those of the first victim's snapshots; all without the columns of the call.
        """
        return [
            self._inferred(t, g) if isinstance(g, Inference) else self._scored(t, g, strip and not i)
            for i, (t, g) in enumerate(zip(truths, guesses, strict=True))
        ]

    def _inferred(self, truth: Truth, guess: Inference) -> Scored:
        row, pairs = ObservationBuilder(self).judge(truth, guess)
        images = [
            {"sample": i, "true": encode_png(true), "reconstructed": encode_png(made)}
            for i, (true, made) in enumerate(pairs)
        ]
        return Scored([row], images)

    def _scored(self, truth: Truth, guess: Reconstruction, strip: bool) -> Scored:
        if guess.status in ("not applicable", "failed"):
            return Scored([row | {"distortion": truth.distortion} for row in self._scorer.nothing(truth.labels)])
        true = truth.inputs.cpu()
        rows = self._scorer.score(true, truth.labels.cpu(), guess.images, guess.labels)
        orders = [row.pop("order") for row in rows]
        rows = [row | {"distortion": truth.distortion} for row in rows]
        sample = self.data.sample
        if isinstance(sample, Tokens | Records):
            return Scored(rows, texts=self._in_words(sample, rows, true, guess.images[orders]))
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
    def _in_words(sample: Tokens | Records, rows: Rows, true: Tensor, guess: Tensor) -> Rows:
        """Return rows for the table of texts; `guess` is in the order of the true samples."""
        guess = guess.nan_to_num(0).to(true)
        right = sample.found(true, guess).tolist()
        texts = zip(rows, sample.read(true), sample.read(guess), right, strict=True)
        return [{"sample": row["sample"], "true": t, "reconstructed": f, "right": r} for row, t, f, r in texts]
