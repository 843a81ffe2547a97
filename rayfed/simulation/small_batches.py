"""Check, before the first round, for batches of one sample that a model rejects, for example because of batch norm.

The check trains the model on one sample, because not all models with batch norm reject it, and some others do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from rayfed import gradients, registry
from rayfed.defences.base import Task
from rayfed.errors import UserError
from rayfed.models.build import uses_batch_statistics
from rayfed.scenario import AttackSpec, Training
from rayfed.simulation.client import one_value, plan
from rayfed.simulation.client.arm import Arm, aggregation_of
from rayfed.simulation.client.cohort import obstacle
from rayfed.simulation.client.local import smallest_batch, update_method
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.inputs import Inputs

_SHOWN = 5


def check_batches(inputs: Inputs) -> list[str]:
    """Return remarks on clients that will fail on a batch of one sample and that the run can continue without.

    Raises `UserError` for clients whose failure would end the run.
    """
    ends, remarks = list[str](), list[str]()
    for account in inputs.accounts:
        arm = _Small(inputs, account.arm, inputs.limits[account.name])
        (ends if arm.certain else remarks).extend(filter(None, [arm.failing_clients]))
        (ends if inputs.scenario.federation.failures.then == "stop" else remarks).extend(arm.failing_attacks)
    if ends:
        raise UserError("\n".join(ends))
    return remarks


@dataclass(frozen=True)
class _Small:
    """Check of one arm for batches of one sample that the arm's model rejects."""

    inputs: Inputs
    arm: Arm
    rounds: int

    @property
    def certain(self) -> bool:
        """Return whether all clients of a round are known in advance and none can be excluded later."""
        scenario = self.inputs.scenario
        federation = scenario.federation
        hidden = scenario.privacy.secure and scenario.drawn_per_round < federation.clients
        return not (hidden or federation.dropping or self._asynchronous)

    @cached_property
    def failing_clients(self) -> str:
        """Return a message on the clients that fail, with the reason and a fix; empty if no client fails."""
        clients, training = self._clients, self.arm.spec.training
        if not clients or (error := self._error(clients[0], training)) is None:
            return ""
        sizes = self.inputs.parts.sizes.tolist()
        named = ", ".join(
            f"{client} ({sizes[client]} sample{'s' * (sizes[client] != 1)})" for client in clients[:_SHOWN]
        )
        more = f" and {len(clients) - _SHOWN} more" if len(clients) > _SHOWN else ""
        many = "s" * (len(clients) > 1)
        return (
            f"arm '{self.arm.spec.name}': client{many} {named}{more} would train on a batch of one sample, because "
            f"training.batch_size is {_written(training)}. {self._why(error)}. {self._fix(clients, error)}"
        )

    @property
    def failing_attacks(self) -> Iterator[str]:
        """Yield messages on attacks whose victims fail on a batch of one sample, with the reason and a fix."""
        for place, attack in enumerate(self.inputs.scenario.attacks):
            if attack.view.of_round or attack.view.samples(attack) != 1 or not attack.rounds:
                continue
            victim = self._victim(attack)
            if (error := self._error(victim, attack.view.training(self.arm.spec.training))) is not None:
                yield (
                    f"arm '{self.arm.spec.name}': attack '{attack.title}' observes a batch of one sample. "
                    f"{self._why(error)}. Set attacks.{place}.batch_size to 2 or more{self._evaluating(error)}"
                )

    @property
    def _asynchronous(self) -> bool:
        return aggregation_of(self.arm.spec).asynchronous

    @cached_property
    def _clients(self) -> list[int]:
        """Clients that train on a batch of one sample in some round; none if batches are sampled at random."""
        training, sizes = self.arm.spec.training, self.inputs.parts.sizes
        if training.sampling != "shuffle":
            return []
        small = [client for client, size in enumerate(sizes.tolist()) if smallest_batch(size, training) == 1]
        if not small or not self.certain:
            return small
        drawn = set[int]()
        for round in range(self.rounds):
            drawn.update(plan.drawn_clients(self.inputs.scenario, round))
        return [client for client in small if client in drawn]

    def _victim(self, attack: AttackSpec) -> int:
        return plan.victims(self.inputs.scenario, attack, attack.rounds[0], self.inputs.parts.sizes)[0]

    @cached_property
    def _takes_one(self) -> bool:
        """Whether the model accepts one sample in training mode, or also rejects two."""
        return self._raises(1) is None or self._raises(2) is not None

    def _raises(self, samples: int) -> Exception | None:
        model, data, rows = self.arm.model, self.inputs.data, np.zeros(samples, np.int64)
        inputs, labels = data.sample.tensor(data.train_images[rows]), torch.from_numpy(data.train_labels[rows])
        state = gradients.weights_of(model), gradients.buffers_of(model)
        with torch.random.fork_rng(devices=[]):
            return _raised(partial(gradients.gradient, model, *state, inputs, labels))

    def _error(self, client: int, training: Training) -> Exception | None:
        """Return the error of a client's work on one sample; None if there is none, or two samples fail as well."""
        if self._takes_one or self._trained_together(training):
            return None
        if any(defence.overrides("wrap_data") for defence in self.arm.defences):  # it may change the number of samples
            return _raised(partial(self._train, client, training, None))
        one_step = {"epochs": None, "steps": 1 if training.algorithm == "fedavg" else None}
        once = training.model_copy(update=one_step)
        error = _raised(partial(self._train, client, once, [0]))
        return error if _raised(partial(self._train, client, once, [0, 0])) is None else None

    def _train(self, client: int, training: Training, rows: Sequence[int] | None) -> None:
        """Run a client's work of the first round, on all or the given rows of its data."""
        task = self._task(client)
        data = task.data if rows is None else task.data.rows(torch.tensor(rows))
        update_method(training, self.arm.defences)(task.replace(data=data))

    def _trained_together(self, training: Training) -> bool:
        """Return whether clients are trained in one call, in which small batches are padded to the size of others."""
        on_gpu = training.vectorise == "auto" and self.inputs.scenario.resources.clients.num_gpus != 0
        return (training.trains_together or on_gpu) and obstacle(self._task(0), training, self.arm.defences) is None

    def _task(self, client: int) -> Task:
        inputs, arm = self.inputs, self.arm
        runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
        sent = Sent(0, arm.weights, arm.buffers)
        return runtime.task(arm.spec.name, sent, client, inputs.parts[client], {})

    def _why(self, error: Exception) -> str:
        """Return why a model rejects a batch of one sample."""
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        norm = one_value.norm_of(error)
        if norm is None:
            return f"The model trains on two samples but not on a single one ({said})"
        layer = one_value.layer_of(error)
        where = f" (layer '{layer}')" if layer else ""
        return f"In training mode, {norm}{where} needs more than one value per channel ({said})"

    def _fix(self, clients: Sequence[int], error: Exception) -> str:
        """Return which fields to change so that no client trains on one sample."""
        sizes, training = self.inputs.parts.sizes, self.arm.spec.training
        whole, ways = _better(np.unique(sizes).tolist(), training), list[str]()
        if whole is not None:
            ways.append(f"set training.batch_size to {whole}, with which no batch has one sample")
        if whole is None:
            ways.append("use fewer clients (federation.clients), or a partition that gives each client two samples")
        if "train_samples" in {field.name for field in registry.parameters(type(self.inputs.scenario.data.build()))}:
            ways.append("change data.train_samples")
        fix = "; or ".join(ways)
        return f"{fix[:1].upper()}{fix[1:]}{self._evaluating(error)}"

    def _evaluating(self, error: Exception) -> str:
        """Return advice to use running statistics, if the model has layers that keep them; else an empty text."""
        helps = one_value.norm_of(error) == "batch norm" and uses_batch_statistics(self.arm.model)
        return "; or set model.batch_norm to eval" if helps else ""


def _raised(work: Callable[[], object]) -> Exception | None:
    """Return the exception that `work` raises, except a `UserError`, which has other causes than the batch size."""
    try:
        work()
    except UserError:
        return None
    except Exception as error:  # the user's model may raise anything
        return error
    return None


def _better(sizes: Sequence[int], training: Training) -> int | None:
    """Return the nearest batch size with which no client has a batch of one sample; None if there is none."""
    if min(sizes) == 1:
        return None
    now = training.batch_size or max(sizes)
    for other in sorted(range(2, max(*sizes, now, 2) + 1), key=lambda size: abs(size - now)):
        changed = training.model_copy(update={"batch_size": other})
        if all(smallest_batch(size, changed) > 1 for size in sizes):
            return other
    return None


def _written(training: Training) -> str:
    return "null" if training.batch_size is None else str(training.batch_size)
