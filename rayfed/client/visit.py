"""One client of a round as the attacking simulator sees it, whose work it can repeat from the same keys."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rayfed import seeds
from rayfed.attacks.base import MaliciousServer
from rayfed.client.arm import Arm
from rayfed.client.failures import Failed, attempt, formed
from rayfed.client.local import PRIVATE, training_method, update_method
from rayfed.client.runtime import ClientRuntime
from rayfed.client.sent import Sent, Split, State
from rayfed.defences.base import Task
from rayfed.models.front import Front
from rayfed.models.private import only, private_names, without
from rayfed.scenario import AttackSpec, Training
from rayfed.update import Named, Update


@dataclass(frozen=True)
class ClientVisit:
    """One client of an arm in one round, with the server's message to it."""

    arm: str
    sent: Sent
    client: int
    states: Mapping[int, State] = field(default_factory=dict)
    """Client states when the round begins: of this client, and of others whose work is repeated."""
    earlier: tuple[Sent, ...] = ()
    """What it was sent in the earlier rounds that an attack on this one looks back on."""


class Candidate(NamedTuple):
    """A sample in a membership attack, which the victim trained on or not."""

    kind: str
    """`member` (it did) or `non-member`."""
    sample: int
    """Number in the training split, or of one that is no member in the split that it is from."""


@dataclass(frozen=True)
class Truth:
    """The truth behind an observation, used for scoring only."""

    inputs: Tensor
    """Inputs (N, *shape), as the data's `sample` says."""
    labels: Tensor
    """Labels (N,) int64."""
    distortion: float = 0.0
    """Distance of the observed update from the one without the arm's defences, over the latter's norm."""
    indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Numbers (N,) of the inputs in the training split."""
    candidates: tuple[Candidate, ...] = ()
    """What the observation's candidates are, in their order."""
    decoys: Tensor | None = None
    """Inputs (N, *shape) of other samples of the victim with the same labels, none of which is behind the observation;
    None where it has not as many."""
    fit: float | None = None
    """`fit` of these inputs under what an attacker knows from the defences' code; None where it does not."""
    fits: Tensor | None = None
    """Their `fits`, also where nothing is defended."""
    nats: float | None = None
    """Nats by which the update is less likely at these inputs than without noise, as that attacker knows the noise."""
    holding: Tensor | None = None
    """Shares (K,) of the batches of all victims of the attack that hold each class; None where no attack asks that."""

    def replace(self, **changes: Any) -> Truth:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class ObservedClient:
    """A client under one attack with all that the simulator knows; grants and views filter it for the attacker.

    The client's work is done again from the same keys, so nothing has to be kept for attackers while a round is played,
    and the client state stays as it is.
    """

    runtime: ClientRuntime
    visit: ClientVisit
    """The client's visit, with what it is sent on the runtime's device."""
    attack: AttackSpec
    repeat: int = 0
    later: int | None = None
    """The round that is attacked, where this is an earlier one."""

    @property
    def client(self) -> int:
        """Number of the client."""
        return self.visit.client

    @property
    def round(self) -> int:
        """Number of the round that is observed."""
        return self.visit.sent.round

    @property
    def attacked(self) -> int:
        """Number of the round that is attacked."""
        return self.round if self.later is None else self.later

    def before(self, sent: Sent) -> ObservedClient:
        """Return the client in an earlier round that the same attack observes, in which it was sent `sent`."""
        visit = replace(self.visit, sent=self.runtime.here(sent), earlier=())
        return replace(self, visit=visit, later=self.attacked)

    @cached_property
    def arm(self) -> Arm:
        """The client's arm, with its model and defences."""
        return self.runtime.arm(self.visit.arm)

    @property
    def arms_training(self) -> Training:
        """Local training of the arm's clients in the round."""
        return self.arm.spec.training.in_round(self.round)

    @cached_property
    def training(self) -> Training:
        """Local training behind the observed answer."""
        training: Training = self.attack.view.training(self.arms_training)
        return training

    @cached_property
    def indices(self) -> np.ndarray:
        """Indices of the training samples behind the answer."""
        indices: np.ndarray = self.attack.view.indices(self)
        return indices

    def noise(self, *answer: int | str) -> torch.Generator:
        """Return the generator of the client's defences, with a separate stream for each repeated answer."""
        key = ("client", self.round, self.client, "defences", self.visit.arm)
        return self.runtime.scenario.generator(*key, *answer)

    def asked(self, model: nn.Module | None = None) -> Task:
        """Return the client's task under the attack, on the model that a malicious server sends.

        `model` stands in place of the arm's.
        """
        honest = self._honest()
        return self._tampered(honest if model is None else honest.replace(model=model))

    def supposed(self) -> Task:
        """Return the task as the attacker assumes it, with a guess for the client's private part.

        The guess is a private part as it begins, or what grants say. All victims of an attack in a round meet the same
        draw.
        """
        task, grants = self._honest(), self.attack.grants.values()
        draw = ("attacker", self.attack.title, self.round)
        guess = self.runtime.drawn_privately(self.visit.arm, *draw, *seeds.again(self.repeat))
        for grant in grants:
            guess |= grant.supposes(self)
        guess = only(guess, task.private.difference(*(grant.knows(self.arm) for grant in grants)))
        weights, buffers = task.weights | only(guess, task.weights), task.buffers | only(guess, task.buffers)
        return self._tampered(task.replace(weights=weights, buffers=buffers))

    def answer(self) -> Update:
        """Return the client's answer: the mean of the number that the attack asks for, with separate noise.

        Each is the work on a task of its own, for defences may write on theirs. Raises `ClientError` for a client that
        fails.
        """
        return self._answers[0]

    def error(self) -> Named | None:
        """Return the standard error of each value of `answer`, from the spread; None for a single answer."""
        return self._answers[1]

    @cached_property
    def _answers(self) -> tuple[Update, Named | None]:
        mean, count = self._answered(self.asked()), self.attack.averages
        if count == 1:
            return mean, None
        squares = {name: torch.zeros_like(t) for name, t in mean.tensors.items()}  # of distances from the mean so far
        for again in range(1, count):
            answer = self._answered(self.asked().replace(generator=self.noise(self.attack.observes, again)))
            away = {name: t - mean.tensors[name] for name, t in answer.tensors.items()}
            tensors = {name: t + away[name] / (again + 1) for name, t in mean.tensors.items()}
            squares = {name: s + away[name] * (answer.tensors[name] - tensors[name]) for name, s in squares.items()}
            mean = replace(mean, tensors=tensors)
        return mean, {name: (s.clamp(min=0) / (count - 1) / count).sqrt() for name, s in squares.items()}

    def _answered(self, task: Task) -> Update:
        work = partial(update_method(self.training, self.arm.defences), task)
        made = formed(attempt(self.client, work), task)  # what is not finite is for the attacker to judge
        if isinstance(made, Failed):
            raise made.error_under(self.attack.title, self.visit.arm, self.round)
        return made

    def as_trained_on(self, split: Split, rows: np.ndarray, purpose: str) -> tuple[Tensor, Tensor]:
        """Return other samples (N, *shape), as the client trains on its own by draws for a purpose, and labels."""
        inputs, labels = self.runtime.shown(self.visit.arm, split, rows)
        order = self.runtime.order(self.visit.sent, self.client)
        return self.runtime.augmented(self.visit.arm, inputs, labels, order, purpose)

    def undefended(self) -> Update:
        """Return the client's answer without defences."""
        return update_method(self.training, ())(self.asked())

    def trained(self, client: int) -> Named:
        """Return a client's weights and buffers after this round's local training, before its defences."""
        sent, task = self.visit.sent, self._task(client, self.runtime.parts[client])
        update = training_method(self.arms_training, self.arm.defences)(task)
        scale = self.arm.spec.update_scale
        weights = {name: w - scale * update.tensors[name] for name, w in sent.weights.items()}
        buffers = {name: b.clone() for name, b in (sent.buffers | update.buffers).items()}
        return {**weights, **buffers, **task.state.get(PRIVATE, {})}

    def front(self) -> Front:
        """Return the arm's model up to the attack's `cut`."""
        return Front(self.arm.model, self.attack.parameters["cut"])

    def _task(self, client: int, indices: np.ndarray) -> Task:
        state = copy.deepcopy(self.visit.states.get(client, {}))
        return self.runtime.task(self.visit.arm, self.visit.sent, client, indices, state)

    def _honest(self) -> Task:
        """Return the client's task under an honest server."""
        task = self._task(self.client, self.indices)
        public = (grant.sends(self.arm) for grant in self.attack.grants.values())
        noise = task.generator if self.attack.view.of_round else self.noise(self.attack.observes)
        return task.replace(generator=noise, private=task.private.difference(*public))

    def _tampered(self, task: Task) -> Task:
        """Return the task with the model of a malicious server, the same for all victims of a round.

        The client's private part stays as it is: no server has it, or can send another.
        """
        server, runtime = self.attack.build(), self.runtime
        if not isinstance(server, MaliciousServer):
            return task
        generator = seeds.torch_generator(runtime.scenario.seed, "tamper", self.attack.title, task.round)
        grants, shape = self.attack.grants.values(), runtime.data.sample.shape
        extra = {name: known for grant in grants for name, known in grant.known_before(runtime).items()}
        sent = without(task.weights, task.private), without(task.buffers, task.private)
        model, weights, buffers = server.tamper(task.model, *sent, shape, extra, generator)
        kept = {name: own for name in private_names(model) if (own := _within(name, task.private))}
        weights = weights | {name: task.weights[own] for name, own in kept.items() if own in task.weights}
        buffers = buffers | {name: task.buffers[own] for name, own in kept.items() if own in task.buffers}
        return task.replace(model=model, weights=weights, buffers=buffers, private=frozenset(kept))


def _within(name: str, names: Collection[str]) -> str:
    """Return which of these names one is that a server may have put another module around; the empty string: none."""
    return max((own for own in names if f".{name}".endswith(f".{own}")), key=len, default="")
