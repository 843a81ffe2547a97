"""What attackers see of a client's work, the truth behind it, and how right they are about it.

This is the simulator's, on the clients' side: only the `Observation` goes to an attacker.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rayfed import gradients, seeds
from rayfed.attacks.base import Inference, MaliciousServer
from rayfed.client import plan
from rayfed.client.clients import Sent, State
from rayfed.client.local import PRIVATE, batches, local_training, training_method, update_method
from rayfed.client.runtime import ClientRuntime
from rayfed.defences.base import Defence, Task
from rayfed.errors import UserError
from rayfed.metrics.inference import auc, class_share, correct, nearest
from rayfed.models.front import Front
from rayfed.models.private import only, private_names, without
from rayfed.scenario import AttackSpec, Training
from rayfed.update import Named, Observation, Shown, Update

MOST_CANDIDATES = 500
"""Candidates that a membership attack is asked about at most; one half are members."""


@dataclass(frozen=True)
class Truth:
    """What lies behind an observation; for scoring alone."""

    images: Tensor
    """(N, C, H, W) in [0, 1]."""
    labels: Tensor
    """(N,) int64."""
    distortion: float = 0.0
    """Distance of the observed update from the one without the arm's defences, over the latter's norm."""
    members: Tensor | None = None
    """(M,) bool, which of the observation's candidates are among the images; None where it has none."""


@dataclass(frozen=True)
class ObservationBuilder:
    """Looks at the clients of one runtime."""

    runtime: ClientRuntime

    def observe(
        self, arm: str, sent: Sent, client: int, attack: AttackSpec, states: Mapping[int, State], repeat: int = 0
    ) -> tuple[Observation, Truth]:
        """What the attack sees of one client in this round, and the truth behind it.

        In a repeat nothing is different but what the attacker draws.

        The client's work is done again from the same keys, so under `observes: update` this is the update that it sent
        (up to rounding where its cohort was one vmap call), and nothing has to be kept for attackers while a round is
        played. A malicious server's victims work on the model that it tampered with; the run itself goes on with what
        they do on the true one.
        """
        runtime, sent = self.runtime, self.runtime.here(sent)
        training, indices = runtime.specs[arm].training, runtime.parts[client]
        if attack.observes == "gradient":
            training = Training(algorithm="fedsgd", batch_size=None)
            draw = seeds.numpy_generator(runtime.scenario.seed, "victim", sent.round, client)
            indices = draw.choice(indices, attack.batch_size, replace=False)

        noise = ("client", sent.round, client, "defences", arm)

        def honest() -> Task:
            fresh = runtime.task(arm, sent, client, indices, copy.deepcopy(states.get(client, {})))
            if attack.observes == "gradient":  # an answer of its own: the noise of the round's update hides that alone
                fresh = fresh.replace(generator=runtime.scenario.generator(*noise, "gradient"))
            if "lock" in attack.knowledge:  # sent like any other layer
                fresh = fresh.replace(private=fresh.private & runtime.arm(arm).keys)
            return fresh

        def task() -> Task:
            return self._tampered(honest(), attack)

        asked, defences = task(), runtime.arm(arm).defences
        shown = asked
        if asked.private:
            shown = self._tampered(self._supposed(arm, sent, honest(), attack, states, repeat), attack)
        answer = update_method(training, defences)
        returned = answer(asked)
        for again in range(1, attack.averages):
            repeated = answer(task().replace(generator=runtime.scenario.generator(*noise, attack.observes, again)))
            returned = replace(returned, tensors=_running_mean(returned.tensors, repeated.tensors, again))
        seen = None
        if attack.observes == "shown":
            seen = runtime.seen(arm, sent, states)
            returned = _as_shown(returned, seen)
        used = torch.cat(list(batches(len(indices), training, asked.order))).unique().to(runtime.device)
        if not len(used):
            raise UserError(
                f"client {client} draws no sample in round {sent.round} (training.sampling: poisson), so "
                f"'{attack.title}' has nothing to find: attack another round, or with `observes: gradient`"
            )
        truth = Truth(asked.data.images[used], asked.data.labels[used])
        if returned.tensors and (defences or seen):
            truth = replace(truth, distortion=_apart(returned.tensors, update_method(training, ())(task()).tensors))
        extra = self._granted(arm, sent, client, attack, truth.images, states)
        if "defence" in attack.knowledge:
            extra["defence"] = _unspoilt(returned, defences)
        if "candidates" in attack.knowledge:
            extra["candidates"], members = self._candidates(truth, sent.round, client)
            truth = replace(truth, members=members)
        local = local_training(len(indices), training)
        sealed = None if attack.observes == "shown" else runtime.rule(arm, sent).observed(returned)
        observation = Observation(
            victim=client,
            round=sent.round,
            weights=without(shown.weights, shown.private),
            buffers=shown.buffers | only(shown.weights, shown.private),
            update={} if sealed else returned.tensors,
            scale=local.scale,
            batch_size=len(truth.labels),
            image_shape=runtime.data.image_shape,
            classes=len(runtime.data.classes),
            # sorted: which labels is knowledge, which image has which is not
            labels=truth.labels.sort().values if "labels" in attack.knowledge else None,
            local=local,
            extra=extra,
            returned_buffers={} if sealed else returned.buffers,
            sealed=sealed,
            shown=seen if attack.unmix else None,
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
        images = guess.images.to(self.runtime.device)
        row["value"] = class_share(images, guess.label, *self.runtime.test_data())
        if not of_class.any():
            return row, []
        return row, list(zip(nearest(images, truth.images[of_class]), images, strict=True))

    def _tampered(self, task: Task, attack: AttackSpec) -> Task:
        """The task with what a malicious server sends; all victims of a round are sent the same."""
        server, runtime = attack.build(), self.runtime
        if not isinstance(server, MaliciousServer):
            return task
        generator = seeds.torch_generator(runtime.scenario.seed, "tamper", attack.title, task.round)
        extra = {"public": runtime.public} if "public" in attack.knowledge else {}
        model, weights, buffers = server.tamper(
            task.model, task.weights, task.buffers, runtime.data.image_shape, extra, generator
        )
        kept = (name for name in private_names(model) if name.endswith(tuple(task.private)))
        return task.replace(model=model, weights=weights, buffers=buffers, private=frozenset(kept))

    def _granted(
        self, arm: str, sent: Sent, client: int, attack: AttackSpec, images: Tensor, states: Mapping[int, State]
    ) -> dict[str, Any]:
        """What the scenario's threat model grants beyond the protocol, by the name of the knowledge."""
        runtime = self.runtime
        granted: dict[str, Any] = {}
        if "public" in attack.knowledge:
            granted["public"] = runtime.public
        if "activations" in attack.knowledge:
            state = self._trained(arm, sent, client, states)
            with torch.no_grad(), seeds.global_stream(runtime.order(sent, client), "activations", cuda=True):
                granted["activations"] = self._front(arm, attack)(state, images)
        if "colluder" in attack.knowledge and "cut" in attack.parameters:
            state = self._trained(arm, sent, plan.colluder(runtime.scenario, sent.round, client), states)
            granted["colluder"] = {
                name: state[name] for name in self._front(arm, attack).names(runtime.data.image_shape)
            }
        return granted

    def _supposed(
        self, arm: str, sent: Sent, task: Task, attack: AttackSpec, states: Mapping[int, State], repeat: int
    ) -> Task:
        """The task as an attacker supposes it: in place of the client's private part one as it begins, or a colluder's,
        but for what he is given. All victims of an attack in a round meet the same draw.
        """
        guess = self.runtime.drawn_privately(arm, "attacker", attack.title, sent.round, *seeds.again(repeat))
        if "colluder" in attack.knowledge:
            guess |= self._trained(arm, sent, plan.colluder(self.runtime.scenario, sent.round, task.client), states)
        hidden = task.private - self.runtime.arm(arm).keys if "key" in attack.knowledge else task.private
        guess = only(guess, hidden)
        return task.replace(
            weights=task.weights | only(guess, task.weights), buffers=task.buffers | only(guess, task.buffers)
        )

    def _front(self, arm: str, attack: AttackSpec) -> Front:
        return Front(self.runtime.arm(arm).model, attack.parameters["cut"])

    def _trained(self, arm: str, sent: Sent, client: int, states: Mapping[int, State]) -> Named:
        """A client's own weights and buffers after its local training of this round, before what defends the update."""
        runtime, training = self.runtime, self.runtime.specs[arm].training
        task = runtime.task(arm, sent, client, runtime.parts[client], copy.deepcopy(states.get(client, {})))
        update = training_method(training, runtime.arm(arm).defences)(task)
        scale = runtime.specs[arm].update_scale
        weights = {name: w - scale * update.tensors[name] for name, w in sent.weights.items()}
        buffers = {name: b.clone() for name, b in (sent.buffers | update.buffers).items()}
        return {**weights, **buffers, **task.state.get(PRIVATE, {})}

    def _candidates(self, truth: Truth, round: int, client: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """As many samples that the victim trained on as of the test split, shuffled; and which are the former."""
        runtime = self.runtime
        count = min(len(truth.labels), len(runtime.data.test_labels), MOST_CANDIDATES // 2)
        draw = seeds.numpy_generator(runtime.scenario.seed, "candidates", round, client)
        members = torch.from_numpy(draw.choice(len(truth.labels), count, replace=False)).to(runtime.device)
        images, labels = runtime.test_data(draw.choice(len(runtime.data.test_labels), count, replace=False))
        order = torch.from_numpy(draw.permutation(2 * count)).to(runtime.device)
        candidates = (
            torch.cat([truth.images[members], images])[order],
            torch.cat([truth.labels[members], labels])[order],
        )
        return candidates, order < count


def _as_shown(update: Update, seen: Shown | None) -> Update:
    """What stands for an update where clients are shown it; without any values where they are not."""
    tensors, buffers = (seen.updates[update.client], seen.buffers[update.client]) if seen else ({}, {})
    return replace(update, tensors=tensors, buffers=buffers)


def _apart(defended: Named, plain: Named) -> float:
    difference = {name: tensor - plain[name] for name, tensor in defended.items()}
    return float(gradients.norm(difference) / gradients.norm(plain))


def _running_mean(mean: Named, value: Named, count: int) -> Named:
    """The mean of `count` values, with one more."""
    return {name: t + (value[name] - t) / (count + 1) for name, t in mean.items()}


def _unspoilt(update: Update, defences: Sequence[Defence]) -> Named:
    """Which values of the update all of the defences have left to an attacker who knows them."""
    masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in update.tensors.items()}
    for defence in defences:
        for name, mask in (defence.exposed(update) or {}).items():
            masks[name] = masks[name] & mask
    return masks
