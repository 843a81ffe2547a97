"""One client's round: local training with defences (McMahan 2017, algorithm 1, ClientUpdate)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import grad_and_value

from rayfed import gradients
from rayfed.core import seeds
from rayfed.defences.base import Batch, DataMethod, Defence, GradientMethod, Task, UpdateMethod
from rayfed.models.build import is_stochastic
from rayfed.models.private import only, without
from rayfed.models.private_conv import sent_out_names
from rayfed.models.trained import frozen_names
from rayfed.privacy.sampling import SecureGenerator
from rayfed.scenario import Training
from rayfed.simulation.client.optimiser import LocalOptimiser
from rayfed.update import LocalTraining, Named, Update

PRIVATE = "private"
"""Key of a client's private tensors in its state."""
SENT_OUT = "sent out"
"""Key, in a client's state, of the layers that it sent and whose distance between clients is measured."""


def update_method(training: Training, defences: Sequence[Defence]) -> UpdateMethod:
    """Return the function that runs a client's local round, with defences applied in the given order."""
    return wrap_updates(training_method(training, defences), defences)


def training_method(training: Training, defences: Sequence[Defence]) -> UpdateMethod:
    """Return the function that runs a client's local round, without the `wrap_update` of the defences."""
    data, gradient = data_method(defences), gradient_method(defences)
    return lambda task: _train(task, training, data, gradient)


def wrap_updates(inner: UpdateMethod, defences: Sequence[Defence]) -> UpdateMethod:
    """Wrap a function that computes a client's update with the `wrap_update` of each defence, in order."""
    return reduce(lambda next, defence: defence.wrap_update(next), defences, inner)


def data_method(defences: Sequence[Defence]) -> DataMethod:
    """Return the function that returns the client's data, wrapped by the `wrap_data` of each defence."""
    own: DataMethod = _own_data
    return reduce(lambda next, defence: defence.wrap_data(next), defences, own)


def gradient_method(defences: Sequence[Defence], inner: GradientMethod | None = None) -> GradientMethod:
    """Return a gradient function (by default without defences), wrapped by the `wrap_gradient` of each defence."""
    if inner is None:
        inner = _sample_gradient if any(defence.samplewise for defence in defences) else _plain_gradient
    return reduce(lambda next, defence: defence.wrap_gradient(next), defences, inner)


def _own_data(task: Task) -> Batch:
    return task.data


def _plain_gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
    return gradients.gradient(task.model, weights, task.buffers, batch.inputs, batch.labels, batch.mask)


def _sample_gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
    """Compute the undefended gradient for a defence that needs the gradient of each sample, by vmap or in a loop."""
    inside = is_functorch_wrapped_tensor(batch.inputs)
    return (functional_gradient if inside else _plain_gradient)(task, weights, batch)


def functional_gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
    """Compute the undefended gradient with `torch.func`, which works inside vmap, unlike `torch.autograd`."""
    images, labels, mask, _ = batch
    return grad_and_value(lambda w: gradients.batch_loss(task.model, w, task.buffers, images, labels, mask))(weights)


def _train(task: Task, training: Training, data: DataMethod, gradient: GradientMethod) -> Update:
    """Train from the weights in `task` by local steps (fedavg) or one gradient (fedsgd), without changing them."""
    with _own_stream(task), mixed_precision(task.model, training):
        return _descent(task, training, data, gradient)


@contextmanager
def mixed_precision(model: nn.Module, training: Training) -> Iterator[None]:
    """Autocast a model's forward passes to bfloat16 if `training.precision` is bf16; outputs are float32."""
    if training.precision == "float32":
        yield
        return
    entered: list[torch.autocast] = []

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        entered.append(torch.autocast(inputs[0].device.type, torch.bfloat16, cache_enabled=False))
        entered[-1].__enter__()

    def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | None) -> Tensor | None:
        entered.pop().__exit__(None, None, None)
        return None if output is None else output.float()

    hooks = model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _own_stream(task: Task) -> Iterator[None]:
    """Seed the global random stream, which dropout uses, from the task's generator."""
    if not is_stochastic(task.model):
        yield
        return
    with seeds.global_stream(seeds.sample_key(task.generator), cuda=True):
        yield


def _descent(task: Task, training: Training, data: DataMethod, gradient: GradientMethod) -> Update:
    local = data(task)
    size = min(training.batch_size or len(local.labels), len(local.labels))
    task = task.replace(buffers={name: b.clone() for name, b in task.buffers.items()}, batch_size=size)
    weights = {name: w.clone() for name, w in task.weights.items()}
    optimiser = LocalOptimiser(training)
    losses, sent = [], Named()
    for step, index in enumerate(batches(len(local.labels), training, task.order)):
        # A Poisson batch may be empty; its gradient is 0.
        mask = None if len(index) else torch.zeros(0, device=local.inputs.device)
        sent, loss = gradient(task.replace(step=step), weights, local.rows(index)._replace(mask=mask))
        losses.append(loss)
        if training.algorithm == "fedavg":
            optimiser.step(weights, sent)
    if training.algorithm == "fedavg":
        sent = {name: w - weights[name] for name, w in task.weights.items()}
    elif task.private:
        optimiser.step(weights, only(sent, task.private))
    if task.private:
        task.state[PRIVATE] = only({**weights, **task.buffers}, task.private)
    if compared := sent_out_names(task.model):
        task.state[SENT_OUT] = only({**weights, **task.buffers}, compared)
    return Update(
        client=task.client,
        round=task.round,
        tensors=without(sent, task.private),
        buffers=returned_buffers(task),
        samples=trained_samples(len(task.data.labels), training),
        loss=float(torch.stack(losses).nanmean()),  # NaN for an empty batch
    )


def returned_buffers(task: Task) -> Named:
    """Return the buffers that a client sends and the server averages: batch-norm statistics, not counters or keys."""
    floats = [name for name, b in task.model.named_buffers() if b.is_floating_point()]
    if not floats:
        return {}
    kept = task.private | frozen_names(task.model)
    return {name: task.buffers[name] for name in floats if name not in kept}


def privately_trained(task: Task, training: Training, epochs: int) -> Named:
    """Train a client's private parameters for `epochs`, with all other parameters frozen; return the parameters.

    These parameters are not sent (Gu 2021, algorithm 1, "Local Private Training").
    """
    own, public = only(task.weights, task.private), without(task.weights, task.private)
    own = {name: w.clone() for name, w in own.items()}
    fixed = {name: b.clone() for name, b in task.buffers.items()} | public
    alone = private_training(training, epochs)
    optimiser = LocalOptimiser(alone)
    with _own_stream(task), mixed_precision(task.model, alone):
        for index in batches(len(task.data.labels), alone, task.order):
            images, labels, *_ = task.data.rows(index)
            slope, _ = gradients.gradient(task.model, own, fixed, images, labels)
            optimiser.step(own, slope)
    return own


def private_training(training: Training, epochs: int) -> Training:
    """Return the training settings of private parameters: local steps for `epochs`."""
    return training.model_copy(update={"algorithm": "fedavg", "epochs": epochs, "steps": None})


def batches(samples: int, training: Training, order: int) -> Iterator[Tensor]:
    """Yield each local step's batch as sample indices, from a new permutation per epoch or by Poisson sampling.

    The batches depend only on the arguments and the seed `order`, so the scoring of an attack can compute them again.
    """
    generator = SecureGenerator(seeds.derive_bytes(order))
    size = min(training.batch_size or samples, samples)
    steps = _steps(samples, size, training)
    if training.sampling == "poisson":
        for _ in range(steps):
            yield torch.from_numpy(np.flatnonzero(generator.uniform(samples) < size / samples))
        return
    while steps > 0:
        for index in torch.randperm(samples, generator=generator).split(size)[:steps]:
            yield index
            steps -= 1


def _steps(samples: int, size: int, training: Training) -> int:
    if training.algorithm == "fedsgd":
        return 1
    return training.steps or (training.epochs or 1) * -(-samples // size)


def trained_samples(samples: int, training: Training) -> int:
    """Return the number of samples that a client trains on in one round."""
    size = min(training.batch_size or samples, samples)
    return min(samples, size * _steps(samples, size, training))


def smallest_batch(samples: int, training: Training) -> int:
    """Return the size of the smallest batch in a client's round, without Poisson sampling."""
    size = min(training.batch_size or samples, samples)
    rest = samples % size
    return rest if rest and _steps(samples, size, training) > samples // size else size


def local_training(samples: int, training: Training) -> LocalTraining:
    """Return the settings of a client's local training on `samples` samples, as attackers know them."""
    size = min(training.batch_size or samples, samples)
    if training.algorithm == "fedsgd":
        return LocalTraining(batch_size=size)
    steps, t = _steps(samples, size, training), training
    return LocalTraining(steps, size, t.lr, t.momentum, t.weight_decay, t.clip_norm)
