"""Floating-point operations and memory of a client's local round, which are counted, not timed.

One and two local steps of an arm's update method, including defences, are run with a counter of operations. The
difference is the cost of a step, and the rest of the first run is the fixed cost of a round. Only products and
convolutions are counted. Activations, noise, sorting and encryption are not.

PyTorch's counter multiplies the gradient of a grouped convolution by its number of groups. Per-sample gradients use
such convolutions, so this module counts them with its own formula.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed import gradients
from rayfed.defences.base import Task
from rayfed.errors import UserError
from rayfed.scenario import Training
from rayfed.simulation.client.arm import Arm
from rayfed.simulation.client.local import local_training, private_training, privately_trained, update_method
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.inputs import Inputs
from rayfed.update import LocalTraining

_MOST = 8
"""Maximum samples of the counted steps; work is proportional to their number."""


@dataclass(frozen=True)
class Work:
    """Work of one arm's clients in a local round: FLOPs of the computation and bytes of memory."""

    fixed: float
    """FLOPs of a local round outside its steps, such as those of a defence on the whole update."""
    per_sample: float
    """FLOPs per sample of a local step."""
    weights: int
    """Bytes that do not depend on the batch size: weights, gradient, optimiser's state, frozen weights and buffers."""
    activations: float
    """Bytes per sample that the forward pass stores for the backward pass."""
    private: float = 0.0
    """FLOPs per sample of a step that trains only private layers."""
    private_epochs: int = 0
    """Epochs of these steps per round, except in the first round."""

    def flops(self, samples: int, training: Training, round: int) -> float:
        """Return the FLOPs of a local round of a client that has `samples` samples."""
        flops = self.fixed + self.per_sample * count_processed(samples, training)
        if self.private_epochs and round:
            flops += self.private * count_processed(samples, private_training(training, self.private_epochs))
        return flops

    def memory(self, samples: int, training: Training) -> float:
        """Return the maximum memory, in bytes, of the local steps of a client that has `samples` samples."""
        return self.weights + self.activations * (local_training(samples, training).batch_size or samples)


def count_processed(samples: int, training: Training) -> int:
    """Return the number of samples that a client's local round processes, including repetitions.

    Under Poisson sampling it is the expected number.
    """
    local: LocalTraining = local_training(samples, training)
    size, steps = local.batch_size or samples, local.steps
    if training.sampling == "poisson":
        return steps * size
    passes, rest = divmod(steps, -(-samples // size))
    return passes * samples + min(rest * size, samples)


def count_work(inputs: Inputs) -> dict[str, Work]:
    """Count the FLOPs and memory of the clients' local rounds by arm, on the client with the most samples.

    Raises `UserError` for a model without products and convolutions.
    """
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    client = int(inputs.parts.sizes.argmax())
    rows = inputs.parts[client][:_MOST]
    found = {}
    for arm in (account.arm for account in inputs.accounts):
        with _onednn(any(defence.samplewise for defence in arm.defences)):
            found[arm.spec.name] = _counted(runtime, arm, client, rows)
    return found


@contextmanager
def _onednn(enabled: bool) -> Iterator[None]:
    """Enable or disable oneDNN in the block, so that counts do not depend on the build and the processor.

    With oneDNN a recurrent layer is one operation that always computes all gradients. It is enabled only for
    per-sample gradients, because `vmap` supports an LSTM only in this form.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # the flag also sets TF32
        with torch.backends.mkldnn.flags(enabled=enabled and torch.backends.mkldnn.enabled):
            yield


def _counted(runtime: ClientRuntime, arm: Arm, client: int, rows: Any) -> Work:
    name = arm.spec.name
    sent = Sent(0, arm.weights, arm.buffers)

    def task() -> Task:
        return runtime.task(name, sent, client, rows, {})

    samples = len(task().data.labels)
    once, twice = (_flops(arm, task(), steps, samples) for steps in (1, 2))
    step = twice - once if arm.spec.training.algorithm == "fedavg" else once
    if step <= 0:
        raise UserError(
            f"federation.system: a local step of arm '{name}' has no products and no convolutions, so the step would "
            f"take no virtual time: remove `system` for this model"
        )
    weights, activations = _weights(task(), arm.spec.training), _kept(task()) / samples
    if not arm.private:
        return Work(once - step, step / samples, weights, activations)
    epochs = max(defence.private_epochs for defence in arm.defences)
    private = _private_flops(arm, task(), samples) / samples if epochs else 0.0
    return Work(once - step, step / samples, weights, activations, private, epochs)


def _flops(arm: Arm, task: Task, steps: int, samples: int) -> int:
    """Return the FLOPs of a local round with this many steps."""
    training = arm.spec.training
    if training.algorithm == "fedavg":
        training = _whole_batches(training, samples).model_copy(update={"epochs": None, "steps": steps})
    counter = _Counter()
    with counter:
        update_method(training, arm.defences)(task)
    return counter.flops


def _private_flops(arm: Arm, task: Task, samples: int) -> int:
    """Return the FLOPs of one step that trains only the private layers."""
    counter = _Counter()
    with counter:
        privately_trained(task, _whole_batches(arm.spec.training, samples), 1)
    return counter.flops


def _whole_batches(training: Training, samples: int) -> Training:
    """Return the training with all samples in each batch."""
    return training.model_copy(update={"batch_size": samples, "sampling": "shuffle"})


class _Counter(TorchDispatchMode):
    """Dispatch mode that counts FLOPs; unlike PyTorch's own, it supports Jacobians of `torch.func`."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # slow, because it imports Triton

        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int = 0
        self._registry = flop_registry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and add its FLOPs."""
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if formula := _OWN.get(packet):
            self.flops += formula(*args)
        elif packet in self._registry:
            self.flops += self._registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


def _convolved_back(out: Tensor, inputs: Tensor, weight: Tensor, *options: Any) -> int:
    """Return the FLOPs of a convolution's backward pass, which are those of the forward pass per gradient."""
    transposed, mask = options[4], options[7]
    products = prod((inputs if transposed else out).shape) * prod(weight.shape[1:])
    return 2 * products * (int(mask[0]) + int(mask[1]))


def _recurrent(inputs: Tensor, weight: Tensor, recurrent: Tensor, *_: Any) -> int:
    """Return the FLOPs of one direction of an LSTM layer; `inputs` is (steps, N, features)."""
    return 2 * prod(inputs.shape[:2]) * (weight.numel() + recurrent.numel())


def _inner(left: Tensor, right: Tensor) -> int:
    """Return the FLOPs of the product of a matrix or vector with a vector."""
    return 2 * left.numel()


def _trilinear(first: Tensor, second: Tensor, third: Tensor, *expanded: Sequence[int]) -> int:
    """Return the FLOPs of a sum of products of three factors: two multiplications and one addition each."""
    shapes = []
    for operand, places in zip((first, second, third), expanded, strict=False):
        shape = list(operand.shape)
        for place in sorted(places):
            shape.insert(place, 1)
        shapes.append(shape)
    products: int = prod(torch.broadcast_shapes(*shapes))
    return 3 * products


_ATEN = torch.ops.aten
_OWN: dict[Any, Callable[..., int]] = {
    _ATEN.convolution_backward: _convolved_back,
    _ATEN.mv: _inner,
    _ATEN.dot: _inner,
    _ATEN.addmv: lambda added, matrix, vector: _inner(matrix, vector),
    _ATEN.addbmm: lambda added, left, right: 2 * left.numel() * right.shape[-1],
    _ATEN._trilinear: _trilinear,
    _ATEN.mkldnn_rnn_layer: _recurrent,
    _ATEN.mkldnn_rnn_layer_backward: lambda *args: 2 * _recurrent(*args),
}
"""Formulas for operations that PyTorch's counter omits or counts differently."""


def _weights(task: Task, training: Training) -> int:
    """Return the bytes of received and trained weights, gradient, optimiser's state, frozen weights and buffers."""
    trained, still = (sum(t.numel() * t.element_size() for t in one.values()) for one in (task.weights, task.buffers))
    state = 2 if training.optimiser != "sgd" else 1 if training.momentum else 0
    return (3 + state) * trained + still


def _kept(task: Task) -> int:
    """Return the bytes that a forward pass stores for its backward pass, without the weights."""
    weights = {name: w.requires_grad_() for name, w in task.weights.items()}
    own = {t.untyped_storage().data_ptr() for t in (*weights.values(), *task.buffers.values())}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = gradients.batch_loss(task.model, weights, task.buffers, task.data.inputs, task.data.labels)
    del loss
    return sum(held.values())
