"""Local work of one client in one round, seeded so that the simulation of an attack can rerun it exactly."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.attacks.base import MaliciousServer
from rayfed.core import seeds
from rayfed.core.reasons import Reason
from rayfed.defences.base import Task
from rayfed.models.front import Front
from rayfed.models.private import only, private_names, without
from rayfed.scenario import AttackSpec, Training
from rayfed.simulation.client.arm import Arm
from rayfed.simulation.client.failures import Failed, attempt, formed
from rayfed.simulation.client.local import PRIVATE, training_method, update_method
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent, Split, State
from rayfed.simulation.client.update_cache import ClientUpdate, UpdateKey, make_key
from rayfed.update import Named, Update


@dataclass(frozen=True)
class ClientVisit:
    """One client of an arm in one round, with the server's message to this client."""

    arm: str
    sent: Sent
    client: int
    states: Mapping[int, State] = field(default_factory=dict)
    """States of this client, and of others whose work is repeated, at the start of the round."""
    earlier: tuple[Sent, ...] = ()
    """Messages of the earlier rounds that the attack also uses."""


@dataclass(frozen=True)
class ObservationRequest:
    """Request to a client worker: observe an attack's victims in one arm, or score results for these observations.

    The server's message is a separate argument, because executors replace only whole arguments by their values.
    """

    arm: str
    victims: Sequence[int]
    attack: AttackSpec
    states: Mapping[int, State] = field(default_factory=dict)
    """States of the clients whose work is repeated, at the start of the round."""
    repeat: int = 0
    earlier: tuple[Sent, ...] = ()
    """Messages of the earlier rounds that the attack also uses."""

    def visit(self, sent: Sent, victim: int) -> ClientVisit:
        """Return the visit of one victim, to which the server sent the message `sent`."""
        return ClientVisit(self.arm, sent, victim, self.states, self.earlier)


class Candidate(NamedTuple):
    """A candidate of a membership attack: a sample that the victim may have trained on."""

    kind: str
    """`member` if the victim trained on the sample, else `non-member`."""
    sample: int
    """Number of the sample in its split, which is the training split for members."""


@dataclass(frozen=True)
class Truth:
    """The true samples of an observation, used only for scoring."""

    inputs: Tensor
    """Inputs (N, *shape), of the data set's modality."""
    labels: Tensor
    """Labels (N,) int64."""
    distortion: float = 0.0
    """Norm of the difference between the observed and the undefended update, over the norm of the latter."""
    indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Indices (N,) of the inputs in the training split."""
    candidates: tuple[Candidate, ...] = ()
    """Candidates of a membership attack, in the order of the observation."""
    decoys: Tensor | None = None
    """Unused samples (N, *shape) of the victim with the same labels; None if there are too few."""
    fit: float | None = None
    """Fit of the inputs to the observation; None for attackers that do not know the defences' code."""
    fits: Tensor | None = None
    """Fit of each tensor, also without defences."""
    nats: float | None = None
    """Decrease of the update's log likelihood at these inputs, compared with zero noise, in nats."""
    reason: Reason | None = None
    """Reason why results say nothing: a user's defence does not follow its declaration on these samples."""
    detail: str = ""
    """Details of the reason, with the names of the defences."""
    holding: Tensor | None = None
    """Shares (K,) of the victims' batches that contain each class; None if the attack's metric does not need them."""

    def replace(self, **changes: Any) -> Truth:
        """Return a copy of the truth with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class ObservedClient:
    """A client under one attack, with all data of the simulation; views and grants select the attacker's part.

    The client's work is repeated from the same seeds, unless the runtime has cached its update. The client's state is
    not changed.
    """

    runtime: ClientRuntime
    visit: ClientVisit
    """The client's visit, with the server's message on the runtime's device."""
    attack: AttackSpec
    repeat: int = 0
    later: int | None = None
    """The attacked round, if this is an earlier round; else None."""

    @property
    def client(self) -> int:
        """Return the number of the observed client."""
        return self.visit.client

    @property
    def round(self) -> int:
        """Return the number of the observed round."""
        return self.visit.sent.round

    @property
    def attacked(self) -> int:
        """Return the number of the attacked round, which may be later than the observed round."""
        return self.round if self.later is None else self.later

    def before(self, sent: Sent) -> ObservedClient:
        """Return this client in an earlier round, in which the server sent the message `sent`."""
        visit = replace(self.visit, sent=self.runtime.here(sent), earlier=())
        return replace(self, visit=visit, later=self.attacked)

    @cached_property
    def arm(self) -> Arm:
        """Return the client's arm, with model and defences."""
        return self.runtime.arm(self.visit.arm)

    @property
    def arms_training(self) -> Training:
        """Return the training settings of the arm's clients in the observed round."""
        return self.arm.spec.training.in_round(self.round)

    @cached_property
    def training(self) -> Training:
        """Return the training settings of the observed update."""
        training: Training = self.attack.view.training(self.arms_training)
        return training

    @cached_property
    def indices(self) -> np.ndarray:
        """Return the indices of the training samples from which the observed update is computed."""
        indices: np.ndarray = self.attack.view.indices(self)
        return indices

    def noise(self, *answer: int | str) -> torch.Generator:
        """Return the random generator of the client's defences, with a separate stream for each repeated update."""
        key = ("client", self.round, self.client, "defences", self.visit.arm)
        return self.runtime.scenario.generator(*key, *answer)

    def asked(self, model: nn.Module | None = None) -> Task:
        """Return the client's training task under the attack, with the model that a malicious server sends.

        `model` replaces the arm's model.
        """
        honest = self._honest()
        return self._tampered(honest if model is None else honest.replace(model=model))

    def supposed(self) -> Task:
        """Return the client's task as the attacker assumes it, with guessed private layers.

        The guess is a random initial value, or given by grants. It is the same for all victims of a round.
        """
        task, grants = self._honest(), self.attack.grants.values()
        draw = ("attacker", self.attack.title, self.round)
        guess = self.runtime.drawn_privately(self.visit.arm, *draw, *seeds.repeat_suffix(self.repeat))
        for grant in grants:
            guess |= grant.supposes(self)
        guess = only(guess, task.private.difference(*(grant.knows(self.arm) for grant in grants)))
        weights, buffers = task.weights | only(guess, task.weights), task.buffers | only(guess, task.buffers)
        return self._tampered(task.replace(weights=weights, buffers=buffers))

    def answer(self) -> Update:
        """Return the client's update, or with `averages` the mean of several updates with independent noise.

        Raises `ClientError` if the client fails.
        """
        return self._answers[0]

    def error(self) -> Named | None:
        """Return the standard error of each value of the client's mean update; None for a single update."""
        return self._answers[1]

    @cached_property
    def _answers(self) -> ClientUpdate:
        return self.runtime.update_cache.get(self._update_key, self.runtime.device, self._compute_update)

    @cached_property
    def _update_key(self) -> UpdateKey:
        """Return the key of the client's update, which is equal for attacks that observe the same update."""
        visit, attack, state = self.visit, self.attack, self.visit.states.get(self.client, {})
        key = make_key(visit.arm, visit.sent, self.client, state, self.training, self.indices)
        return replace(
            key,
            noise="" if attack.view.of_round and attack.averages == 1 else attack.observes,
            averages=attack.averages,
            sent_private=self._sent_private,
            server=attack.model_dump_json() if isinstance(attack.build(), MaliciousServer) else "",
        )

    @property
    def _sent_private(self) -> frozenset[str]:
        """Return the private parameters that the client sends under the attack's grants."""
        return frozenset[str]().union(*(grant.sends(self.arm) for grant in self.attack.grants.values()))

    def _compute_update(self) -> ClientUpdate:
        mean, count = self._answered(self.asked()), self.attack.averages
        if count == 1:
            return ClientUpdate(mean)
        squares = {name: torch.zeros_like(t) for name, t in mean.tensors.items()}  # sums of squared deviations
        for again in range(1, count):
            answer = self._answered(self.asked().replace(generator=self.noise(self.attack.observes, again)))
            away = {name: t - mean.tensors[name] for name, t in answer.tensors.items()}
            tensors = {name: t + away[name] / (again + 1) for name, t in mean.tensors.items()}
            squares = {name: s + away[name] * (answer.tensors[name] - tensors[name]) for name, s in squares.items()}
            mean = replace(mean, tensors=tensors)
        error = {name: (s.clamp(min=0) / (count - 1) / count).sqrt() for name, s in squares.items()}
        return ClientUpdate(mean, error)

    def _answered(self, task: Task) -> Update:
        work = partial(update_method(self.training, self.arm.defences), task)
        made = formed(attempt(self.client, work), task)  # an update that is not finite is passed to the attacker
        if isinstance(made, Failed):
            raise made.error_under(self.attack.title, self.visit.arm, self.round)
        return made

    def as_trained_on(self, split: Split, rows: np.ndarray, purpose: str) -> tuple[Tensor, Tensor]:
        """Return samples (N, *shape) of a split, augmented as the client's own samples, and the samples' labels."""
        inputs, labels = self.runtime.shown(self.visit.arm, split, rows)
        order = self.runtime.order(self.visit.sent, self.client)
        return self.runtime.augmented(self.visit.arm, inputs, labels, order, purpose)

    def undefended(self) -> Update:
        """Return the update that the client would send without defences."""

        def compute() -> ClientUpdate:
            return ClientUpdate(update_method(self.training, ())(self.asked()))

        key = replace(self._update_key, averages=1, defended=False)
        return self.runtime.update_cache.get(key, self.runtime.device, compute).update

    def trained(self, client: int) -> Named:
        """Return a client's weights and buffers after local training, before its defences change the update."""
        sent, task = self.visit.sent, self._task(client, self.runtime.parts[client])
        update = training_method(self.arms_training, self.arm.defences)(task)
        scale = self.arm.spec.update_scale
        weights = {name: w - scale * update.tensors[name] for name, w in sent.weights.items()}
        buffers = {name: b.clone() for name, b in (sent.buffers | update.buffers).items()}
        return {**weights, **buffers, **task.state.get(PRIVATE, {})}

    def front(self) -> Front:
        """Return the first layers of the arm's model, up to the attack's `cut`."""
        return Front(self.arm.model, self.attack.parameters["cut"])

    def _task(self, client: int, indices: np.ndarray) -> Task:
        state = copy.deepcopy(self.visit.states.get(client, {}))
        return self.runtime.task(self.visit.arm, self.visit.sent, client, indices, state)

    def _honest(self) -> Task:
        """Return the client's task under an honest server."""
        task = self._task(self.client, self.indices)
        noise = task.generator if self.attack.view.of_round else self.noise(self.attack.observes)
        return task.replace(generator=noise, private=task.private - self._sent_private)

    def _tampered(self, task: Task) -> Task:
        """Return the task with the model of a malicious server, the same for all victims of a round.

        Private layers are unchanged, because a server cannot read or replace them.
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
    """Return the longest of `names` that is the end of `name`, as after wrapping a module; empty if there is none."""
    return max((own for own in names if f".{name}".endswith(f".{own}")), key=len, default="")
