"""Observation model of an update: the effect of the victim's defences on a gradient, as the attacker knows it.

The model is composed of the declarations of the defences: `transform_data`, `transform` and `log_likelihood`
(`rayfed.defences.base.Defence`). Defences of gradients come first, then those of updates, each in the order of the
scenario. At most one of them may add noise; a later one may only remove values.

If a defence declares nothing, its code is run instead. The search may then find the sample, but its
end says nothing about the true sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from rayfed.core.reasons import Reason
from rayfed.defences.base import Batch, Defence, Task
from rayfed.gradients import clipped, flatten, unflatten
from rayfed.simulation.client.local import data_method, gradient_method, wrap_updates
from rayfed.update import Named, Observation, Update

_DROWNED = 2.0
"""Largest energy of a tensor that is mostly noise, relative to that of the noise."""
_SAME = 1e-6
"""Largest relative difference of equal gradients."""
_STEP, _CURVED = 0.1, 0.25
"""Step of the test of the derivative, in standard deviations of the gradient, and largest relative error."""


@dataclass(frozen=True)
class LeftAlone:
    """Function that masks the values of an update that no defence has changed."""

    defences: tuple[Defence, ...]
    error: Named | None = None
    """Standard error of each value of a mean update; None for a single update."""

    def __call__(self, update: Update) -> Named:
        """Return a bool mask for each tensor of an update, by name, which is True for unchanged values."""
        masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in update.tensors.items()}
        for defence in self.defences:
            exposed = defence.exposed(update) if self.error is None else defence.exposed_in_mean(update, self.error)
            for name, mask in (exposed or {}).items():
                masks[name] = masks[name] & mask
        return masks


@dataclass(frozen=True)
class ObservationModel:
    """How an update arises from samples, as far as the victim's defences say."""

    defences: tuple[Defence, ...]
    """Defences built for the attacker, without data of the victim."""
    clients_per_round: int = 1
    approximate: bool = False
    """Whether the true samples need not have the largest likelihood, so that a search cannot be compared with them."""
    reason: Reason | None = None
    """Reason why the model says nothing about the true sample; None if the declarations are complete and correct."""
    detail: str = ""
    """Details of the reason, such as the name of a defence."""
    inverted: bool = False
    """Whether the attacker has already inverted the map of gradients, so that the update is a gradient."""

    @cached_property
    def stages(self) -> tuple[Defence, ...]:
        """Return the defences of tensors in the order in which they act."""
        acting = [defence for defence in self.defences if defence.overrides("wrap_gradient", "wrap_update")]
        return tuple(sorted(acting, key=lambda defence: not defence.overrides("wrap_gradient")))

    @property
    def noise(self) -> Defence | None:
        """Return the last defence that adds noise; None if none does."""
        return next((stage for stage in reversed(self.stages) if stage.adds_noise), None)

    @property
    def changes_gradients(self) -> bool:
        """Return whether a defence changes the gradient of each step."""
        return any(stage.overrides("wrap_gradient") for stage in self.stages)

    @property
    def of_gradients(self) -> bool:
        """Return whether a defence changes the gradient of each step."""
        return any(stage.overrides("wrap_gradient") for stage in self.stages)

    @property
    def samplewise(self) -> bool:
        """Return whether a defence changes the gradient of each sample."""
        return any(stage.samplewise for stage in self.stages)

    @property
    def changes_data(self) -> bool:
        """Return whether a defence changes the samples of training, other than by random numbers that are not known."""
        changing = [one for one in self.defences if one.overrides("transform_data", "wrap_data")]
        return bool(changing) and not any(one.has_latents for one in changing)

    @property
    def has_latents(self) -> bool:
        """Return whether the declarations ignore something unknown, or a later defence changes values with noise."""
        noisy = [place for place, stage in enumerate(self.stages) if stage.adds_noise]
        changed = bool(noisy) and (len(noisy) > 1 or noisy[0] + 1 < self._removing)
        return changed or any(defence.has_latents for defence in self.defences)

    @property
    def is_exact(self) -> bool:
        """Return whether the true samples have the largest likelihood."""
        return not self.approximate and not self.has_latents and self.reason is None

    def task(self, observation: Observation, model: nn.Module, inputs: Tensor, labels: Tensor) -> Task:
        """Return the victim's task with samples (N, *shape) and random numbers of the attacker, and without state."""
        # Grants stay on their device when an observation is moved to a GPU.
        public = [part.to(inputs.device) for part in observation.extra.get("public") or ()]
        return Task(
            client=observation.victim,
            round=observation.round,
            model=model,
            weights={name: tensor.clone() for name, tensor in observation.weights.items()},
            buffers={name: tensor.clone() for name, tensor in observation.buffers.items()},
            data=Batch(inputs, labels, places=torch.arange(len(labels), device=labels.device)),
            generator=torch.Generator().manual_seed(0),
            order=0,
            public=Batch(*public) if public else None,
            classes=observation.classes,
            batch_size=observation.batch_size,
            clients_per_round=self.clients_per_round,
        )

    def blank_task(self, observation: Observation, model: nn.Module) -> Task:
        """Return the victim's task with blank samples."""
        samples = observation.batch_size
        device = next(iter(observation.weights.values())).device
        shape = observation.places or ((observation.classes,) if observation.has_numbers else ())
        labels = torch.zeros(samples, *shape, dtype=torch.float32 if observation.has_numbers else torch.int64)
        inputs = observation.sample.blank(samples)
        return self.task(observation, model, inputs.to(device), labels.to(device))

    def fresh(self, task: Task) -> Task:
        """Return a task with the first random numbers again, and without state."""
        return task.replace(generator=torch.Generator().manual_seed(0), state={})

    def train_on(self, task: Task) -> Batch:
        """Return the samples on which a client with the task trains."""
        batch = task.data
        for defence in self.defences:
            if defence.overrides("transform_data"):
                batch = defence.transform_data(task, batch)
            elif defence.overrides("wrap_data"):
                batch = data_method([defence])(task.replace(data=batch))
        return batch

    def expect(self, task: Task, gradient: Named, observation: Observation, all_stages: bool = False) -> Named:
        """Return the update for a gradient, without noise.

        The gradient is that of each sample, along a first dimension, if a defence is `samplewise`. Unless `all_stages`,
        the last defences that only remove values are left out (`sent_values`).
        """
        tensors, of_update = gradient, False
        for place, stage in enumerate(self.stages if all_stages else self.stages[: self._removing]):
            if not stage.overrides("wrap_gradient") and not of_update:
                tensors, of_update = _as_update(tensors, observation), True
            if any(later.samplewise for later in self.stages[place + 1 :]):
                tensors = self._transform_each(stage, task, tensors)
            else:
                tensors = self._transform(stage, task, tensors)
        return tensors if of_update else _as_update(tensors, observation)

    def sent_values(self, update: Named, observation: Observation) -> Named:
        """Return masks of the values that the last defences, which only remove values, have sent.

        Values that are not 0 count as sent, whatever `exposed` returns.
        """
        exposed = self.exposed_values(update, observation)
        return {name: exposed[name] | (tensor != 0) for name, tensor in update.items()}

    def exposed_values(self, update: Named, observation: Observation) -> Named:
        """Return the masks that the last defences, which only remove values, declare by `exposed`."""
        whole = Update(observation.victim, observation.round, update, {}, observation.batch_size, loss=0.0)
        return LeftAlone(self.stages[self._removing :])(whole)

    def log_densities(self, task: Task, update: Named, expected: Named, observation: Observation) -> Named:
        """Return the log density of each value of an update for the result of `expect`, up to a constant.

        The model must have noise. Clipping of a gradient after its noise (`LocalTraining.clip_norm`) is ignored.
        """
        assert self.noise is not None
        if self.noise.overrides("wrap_gradient"):
            update, expected = _as_gradient(update, observation), _as_gradient(expected, observation)
        return self.noise.log_likelihood(task, update, expected)

    def log_likelihood(self, task: Task, update: Named, expected: Named, observation: Observation) -> float | None:
        """Return the log density of an update for the result of `expect`; None without noise."""
        if self.noise is None:
            return None
        values = self.log_densities(task, update, expected, observation)
        masks = self.sent_values(update, observation)
        return float(self.sum_sent(values, masks))

    def sum_sent(self, values: Named, masks: Named) -> Tensor:
        """Return the sum of log densities of the values that were sent, and of all densities of several values."""
        parts = []
        for name, value in values.items():
            mask = masks.get(name)
            if mask is not None and mask.shape == value.shape:
                value = torch.where(mask.to(value.device), value, 0.0)
            parts.append(value.double().sum())
        return torch.stack(parts).sum()

    @property
    def reveals_randomness(self) -> bool:
        """Return whether an update may reveal random numbers of the model."""
        return any(defence.overrides("reveal_randomness") for defence in self.defences)

    def reveal(self, observation: Observation, model: nn.Module) -> tuple[Observation, nn.Module]:
        """Return an observation of an unchanged gradient, and the model with the random numbers that it reveals."""
        revealing = [defence for defence in self.defences if defence.overrides("reveal_randomness")]
        single = observation.batch_size == 1 and observation.local.steps == 1 and not observation.earlier
        if not revealing or self.stages or not single or not observation.update:
            return observation, model
        for defence in revealing:
            model = defence.reveal_randomness(model, observation.weights, observation.gradient)
        extra = {name: known for name, known in observation.extra.items() if name != "defence"}
        return replace(observation, extra=extra), model

    def noise_energy(self, observation: Observation, model: nn.Module) -> dict[str, float]:
        """Return the sum of squares of the noise on each tensor, from one run of the defence on the update."""
        if self.noise is None:
            return dict.fromkeys(observation.update, 0.0)
        task = self.blank_task(observation, model)
        own = observation.update
        if self.noise.samplewise:  # expects the gradient of each sample
            own = expected = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        else:  # not of a zero gradient, as the noise may be in proportion to values
            expected = self.noise.transform(self.fresh(task), own)
        sent = run_defences([self.noise], task, own, torch.zeros(())).tensors
        return {name: float((sent[name] - expected[name]).double().square().sum()) for name in own}

    def send_noisy(self, task: Task, expected: Named, seed: int) -> Named:
        """Return an update with noise of the attacker on the given tensors."""
        assert self.noise is not None
        task = task.replace(generator=torch.Generator().manual_seed(seed), state={})
        return run_defences([self.noise], task, expected, torch.zeros(())).tensors

    def noise_free(self, observation: Observation, model: nn.Module) -> Named:
        """Return masks of the values that defences have sent without noise."""
        masks = self.sent_values(observation.update, observation)
        energy = self.noise_energy(observation, model)
        return {name: mask if not energy[name] else torch.zeros_like(mask) for name, mask in masks.items()}

    def above_noise(self, observation: Observation, model: nn.Module) -> Named | None:
        """Return masks of the tensors that are not mostly noise; None if every matrix has noise."""
        if self.noise is None or observation.scale != 1:
            return None
        energy = self.noise_energy(observation, model)
        if all(energy[name] for name, tensor in observation.update.items() if tensor.ndim > 1):
            return None
        masks = {}
        for name, tensor in observation.update.items():
            audible = float(tensor.double().square().sum()) > _DROWNED * energy[name]
            masks[name] = torch.full_like(tensor, audible, dtype=torch.bool)
        return masks

    def changes_values(self, observation: Observation, model: nn.Module, scale_free: bool = False) -> bool:
        """Return whether a search has to pass through the defences: they change values, and have a derivative.

        Values that are only removed can be seen in the update, which the matching attacks use without this model. With
        `scale_free`, a common factor of all values is no change.
        """
        if self.inverted or (self.samplewise and observation.batch_size > 1):
            return False
        task = self.blank_task(observation, model)
        like, draw = flatten(task.weights), torch.Generator().manual_seed(0)
        one, step = (torch.randn(len(like), generator=draw).to(like).double() for _ in range(2))

        def sent(values: Tensor) -> Tensor:
            return flatten(self.through(task, unflatten(values, task.weights), observation)).double()

        declared = all(stage.is_declared for stage in self.stages)
        try:
            with torch.enable_grad():
                made = sent(one.requires_grad_())
                factor = made @ one / (one @ one) if scale_free else 1.0
                if (made - factor * one).norm() <= _SAME * made.norm():
                    return False
                return _has_slope(sent, made, one, None if declared else step * _STEP)
        except Exception:  # code of users may raise anything for double precision
            return False

    def through(self, task: Task, gradient: Named, observation: Observation) -> Named:
        """Return the update for a gradient, divided by its scale and differentiable with respect to the gradient."""
        if self.samplewise:  # of a single sample
            gradient = {name: tensor[None] for name, tensor in gradient.items()}
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns if code makes a number of a tensor with a graph
            sent = self.expect(self.fresh(task), gradient, observation)
        return {name: tensor / observation.scale for name, tensor in sent.items()}

    @property
    def only_removes(self) -> bool:
        """Return whether all defences only remove values."""
        return bool(self.stages) and self._removing == 0

    @property
    def _removing(self) -> int:
        """Return the place of the first of the last defences that only remove values, which shows in the update."""
        place = len(self.stages)
        while place and self.stages[place - 1].overrides("exposed") and not self.stages[place - 1].adds_noise:
            place -= 1
        return place

    def _transform_each(self, stage: Defence, task: Task, tensors: Named) -> Named:
        """Return the effect of a defence on the gradients (N, ...) of single samples, before a `samplewise` defence."""
        sent = []
        for row in torch.arange(len(task.data.labels), device=task.data.labels.device).split(1):
            own = task.replace(data=task.data.rows(row))
            sent.append(self._transform(stage, own, {name: tensor[row].squeeze(0) for name, tensor in tensors.items()}))
        return {name: torch.stack([one[name] for one in sent]) for name in tensors}

    def _transform(self, stage: Defence, task: Task, tensors: Named) -> Named:
        """Return the effect of a defence on tensors, by its declaration or else by its code."""
        if stage.is_declared:
            return stage.transform(task, tensors)
        return run_defences([stage], task, tensors, torch.zeros(())).tensors


def run_defences(defences: Sequence[Defence], task: Task, gradient: Named, loss: Tensor) -> Update:
    """Return the update that the code of defences sends, with `gradient` as the gradient of the samples."""

    def computed(inner: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
        return gradient, loss

    def update(task: Task) -> Update:
        tensors, _ = gradient_method(defences, computed)(task, task.weights, task.data)
        return Update(task.client, task.round, tensors, task.buffers, len(task.data.labels), loss=0.0)

    return wrap_updates(update, defences)(task)


def _as_update(gradient: Named, observation: Observation) -> Named:
    """Return the update of one local step with a gradient, or of several steps with their scaled sum."""
    local = observation.local
    if local.steps > 1:
        return {name: observation.scale * tensor for name, tensor in gradient.items()}
    if local.clip_norm is not None:
        gradient = clipped(gradient, local.clip_norm)
    if local.weight_decay:
        gradient = {name: g + local.weight_decay * observation.weights[name].to(g) for name, g in gradient.items()}
    return gradient if observation.scale == 1 else {name: observation.scale * g for name, g in gradient.items()}


def _as_gradient(update: Named, observation: Observation) -> Named:
    """Return the gradient of an update of one local step that was not clipped."""
    decay = observation.local.weight_decay
    return {
        name: tensor / observation.scale - decay * observation.weights[name].to(tensor)
        for name, tensor in update.items()
    }


def _has_slope(sent: Callable[[Tensor], Tensor], made: Tensor, one: Tensor, step: Tensor | None) -> bool:
    """Return whether the derivative of a function at `one`, with the value `made`, predicts its values after a step.

    Without a step, whether the derivative is finite and not zero.
    """
    if step is None:
        (slope,) = torch.autograd.grad(made.sum(), one, materialize_grads=True)
        return bool(slope.isfinite().all() and slope.any())
    moved = (sent(one + step) - made).detach()
    (slope,) = torch.autograd.grad(made @ moved, one, materialize_grads=True)
    size = float(moved.square().sum())
    return size > 0 and abs(float(slope @ step) - size) < _CURVED * size
