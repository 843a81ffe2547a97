"""Record the operations that read a model's parameters, and compute gradients at the attacker's samples.

Closed forms detect layers by relations between gradients, not by the names or types of modules. A relation that holds
at a random sample holds, in exact arithmetic, at all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from rayfed import gradients
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.core import losses
from rayfed.update import Named, Observation

_ROUNDING = frozenset(f"{name}{place}" for name in ("round", "floor", "ceil", "trunc", "fix") for place in ("", "_"))
_MOST_HYPOTHESES = 64
"""Maximum number of binary label vectors to enumerate (six outputs)."""


class Use(NamedTuple):
    """One operation of a forward pass that reads parameters."""

    names: frozenset[str]
    """Parameters that the operation reads, directly or through a tensor computed from them."""
    inputs: tuple[Tensor, ...]
    """Other tensors that the operation reads, with their autograd graph."""
    output: Tensor


class Probe:
    """A copy of a model at the weights that a client was sent, in double precision if the model supports it.

    A probe does not depend on the update, and all closed forms share it.
    """

    def __init__(self, model: nn.Module, observation: Observation, dtype: torch.dtype) -> None:
        self.device = next(iter(observation.weights.values())).device
        self.dtype = dtype
        self._model = without_tracking(model).to(self.device, dtype)
        self.weights = self._converted(observation.weights)
        for name, parameter in self._model.named_parameters():
            parameter.data = self.weights.get(name, parameter.data)  # share memory with `weights`
        self._buffers = self._converted(buffers_for(self._model, observation))
        self.shape, self._sample = observation.sample.shape, observation.sample
        self._places = observation.places
        self.loss, self._outputs = (
            losses.get_loss(self._model),
            observation.classes if observation.has_numbers else None,
        )
        self._known: dict[Hashable, Any] = {}
        self.read_labels: Callable[[], Any] = dict
        """Infers the labels of the current observations (`rayfed.attacks.closed_form.answer.labelled`)."""

    def once(self, what: Hashable, find: Callable[[], Any]) -> Any:
        """Return `find()`, cached under the key `what`; the value must depend only on the model."""
        if what not in self._known:
            self._known[what] = find()
        return self._known[what]

    @contextmanager
    def reading(self, labels: Callable[[], Any]) -> Iterator[None]:
        """Set the function that infers labels within a `with` block; the function is called at most once."""
        self.read_labels = cache(labels)
        try:
            yield
        finally:
            self.read_labels = dict

    def _converted(self, tensors: Named) -> Named:
        return {n: t.to(self.dtype) if t.is_floating_point() else t for n, t in tensors.items()}

    def samples(self, count: int, seed: int = 0) -> Tensor:
        """Return random samples (count, *shape) in [0, 1], or random tokens; equal seeds give equal samples."""
        generator = torch.Generator().manual_seed(seed)
        if self._sample.modality == "tokens":
            return self._sample.noise(count, generator).to(self.device)
        return torch.rand(count, *self.shape, generator=generator, dtype=torch.float64).to(self.device, self.dtype)

    def blank(self, count: int) -> Tensor:
        """Return valid labels of `count` samples: class 0 (count,) int64, or zeros (count, K).

        With one class per position, the shape is (count, L) or (count, H, W), int64.
        """
        if self._outputs is None:
            return torch.zeros(count, *self._places, dtype=torch.int64)
        return torch.zeros(count, self._outputs, dtype=self.dtype)

    def hypotheses(self, classes: int) -> Tensor | None:
        """Return all possible labels of a sample, (R,) int64 or binary (R, K); None if they cannot be enumerated."""
        if self._places:
            return None
        if self._outputs is None:
            return torch.arange(classes)
        if not isinstance(self.loss, losses.BinaryCrossEntropy) or 2**self._outputs > _MOST_HYPOTHESES:
            return None
        return torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * self._outputs).reshape(-1, self._outputs)

    def gradient(self, inputs: Tensor, labels: Tensor) -> Named:
        """Return the gradient of a batch's mean loss by parameter name, detached, for inputs (N, *shape)."""
        inputs = inputs.to(self.device, self.dtype if inputs.is_floating_point() else None)
        with NotRounded():
            return gradients.gradient(self._model, self.weights, self._buffers, inputs, labels.to(self.device))[0]

    @cached_property
    def own_gradient(self) -> Named:
        """Return the gradient at one random sample; raises any error of the model on a single sample."""
        return self.gradient(self.samples(1), self.blank(1))

    def gradients(self, inputs: Tensor, labels: Tensor, names: Sequence[str]) -> Named:
        """Return the per-sample gradients (N, *) of the parameters `names`, detached."""
        own, inputs = {name: self.weights[name] for name in names}, inputs.to(self.device, self.dtype)
        fixed = self._buffers | {name: tensor for name, tensor in self.weights.items() if name not in own}
        with NotRounded():
            return gradients.per_sample_gradients(self._model, own, fixed, inputs, labels.to(self.device))

    def run(self, inputs: Tensor, outputs: Mapping[int, Tensor] | None = None) -> tuple[list[Use], Named, Tensor]:
        """Run a forward pass, and return the operations that read parameters, the parameters as leaves, and the logits.

        `inputs` is (N, *shape) and part of the graph if it requires a gradient. `outputs` replaces the outputs of
        operations, by their index.
        """
        leaves = self.leaves()
        recorder = _Recorder(inputs, leaves, outputs or {})
        with torch.enable_grad(), NotRounded(), recorder:
            logits = functional_call(self._model, {**leaves, **self._buffers}, (inputs,))
        return recorder.uses, leaves, logits

    def leaves(self) -> Named:
        """Return copies of the parameters that are leaves of the autograd graph, by name."""
        return {name: w.clone().requires_grad_() for name, w in self.weights.items()}

    def reached(self, inputs: Tensor, leaves: Named, last: int) -> Use:
        """Run a forward pass up to the operation that reads parameters with index `last`, and return that operation."""
        recorder = _Recorder(inputs, leaves, {}, last)
        with torch.enable_grad(), NotRounded(), recorder, suppress(_Reached):
            functional_call(self._model, {**leaves, **self._buffers}, (inputs,))
        return recorder.uses[last]

    def slopes(self, use: int, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the gradients (N, R, O) of each sample's loss with respect to an operation's outputs (N, O).

        `labels` is (R, N), with R classes for each sample, or (R, N, K) numbers. The model must not mix samples.
        """
        outputs = outputs.detach().to(self.dtype).requires_grad_()
        _, _, logits = self.run(torch.full((len(outputs), *self.shape), 0.5).to(outputs), {use: outputs})
        found = []
        for row in labels.to(self.device):
            loss = self.loss(logits, row, "sum")
            found.append(torch.autograd.grad(loss, outputs, retain_graph=True, materialize_grads=True)[0].detach())
        return torch.stack(found, 1)


def probe(model: nn.Module, observation: Observation) -> Probe:
    """Return a model's probe after a test run, in double precision if the model supports it.

    An error in single precision is raised, because clients train in single precision.
    """
    try:
        return _tried_probe(model, observation, torch.float64)
    except Exception:  # a user's model can raise anything in another precision than its own
        return _tried_probe(model, observation, torch.float32)


def _tried_probe(model: nn.Module, observation: Observation, dtype: torch.dtype) -> Probe:
    probed = Probe(model, observation, dtype)
    samples = probed.samples(observation.batch_size)
    probed.run(samples)
    probed.gradient(samples, probed.blank(len(samples)))
    return probed


class NotRounded(TorchFunctionMode):
    """Torch function mode that skips rounding operations, whose derivative is zero."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or return the input of a rounding operation."""
        given = kwargs or {}
        if getattr(func, "__name__", "") in _ROUNDING:
            return args[0] if args else given["input"]
        return func(*args, **given)


class _Reached(Exception):
    """Raised to end a forward pass at an operation."""


class _Recorder(TorchFunctionMode):
    """Record the operations that read parameters, and end the pass after the one with index `last`.

    An embedding row that is looked up by an index computed from the samples counts as an operation on the samples. A
    layer that a model selects by an index counts as a parameter.
    """

    def __init__(self, inputs: Tensor, leaves: Named, outputs: Mapping[int, Tensor], last: int | None = None) -> None:
        super().__init__()
        self._numbers = {id(inputs): ref(inputs)}  # computed from the samples without a graph, as by frozen layers
        self._outputs, self._last = outputs, last
        self.uses: list[Use] = []
        self._storages = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves.items()}
        self._made: dict[int, tuple[Tensor, frozenset[str]]] = {}  # computed only from parameters; references keep ids

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and return a copy of its output, so that in-place operations cannot change the record."""
        output, read = func(*args, **(kwargs or {})), list(_tensors([args, kwargs or {}]))
        of_samples = any(id(tensor) in self._numbers and self._numbers[id(tensor)]() is tensor for tensor in read)
        if not isinstance(output, Tensor) or not output.requires_grad:
            if of_samples:
                self._numbers |= {id(tensor): ref(tensor) for tensor in _tensors([output])}
            return output
        looked_up = of_samples and getattr(func, "__name__", "") == "embedding"
        names = frozenset().union(*map(self._names, read))
        others = tuple(t for t in read if not self._names(t) and t.is_floating_point())
        if not names or self._names(output):
            return output
        if not others and not looked_up:
            self._made[id(output)] = (output, names)
            return output
        if len(self.uses) in self._outputs:
            output = self._outputs[len(self.uses)].view_as(output)
        self.uses.append(Use(names, others, output))
        if len(self.uses) - 1 == self._last:
            raise _Reached
        return output.clone()

    def _names(self, tensor: Tensor) -> frozenset[str]:
        """Return the parameters that a tensor is a view of, or was computed from without the samples."""
        if id(tensor) in self._made:
            return self._made[id(tensor)][1]
        name = self._storages.get(tensor.untyped_storage().data_ptr())
        return frozenset() if name is None else frozenset({name})


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
