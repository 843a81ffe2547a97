"""A model under study: which operations read its parameters, and what its gradient is at samples of the attacker's.

Closed forms find what they need by mathematics: a relation between gradients that holds at a random sample holds, in
exact arithmetic, at all of them. So no module's name or type is asked for.
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

from rayfed import gradients, losses
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Named, Observation

_ROUNDING = frozenset(f"{name}{place}" for name in ("round", "floor", "ceil", "trunc", "fix") for place in ("", "_"))
_MOST_HYPOTHESES = 64
"""Labels of several outputs that are tried one by one: of six outputs."""


class Use(NamedTuple):
    """One operation of a forward pass that reads parameters."""

    names: frozenset[str]
    """The parameters that it reads, also those of which something else was made first."""
    inputs: tuple[Tensor, ...]
    """The tensors that it reads beside them, with their graph."""
    output: Tensor


class Probe:
    """A copy of a model at the weights that a client was sent, in double precision where the model allows it.

    It holds nothing of an update, and serves all closed forms.
    """

    def __init__(self, model: nn.Module, observation: Observation, dtype: torch.dtype) -> None:
        self.device = next(iter(observation.weights.values())).device
        self.dtype = dtype
        self._model = without_tracking(model).to(self.device, dtype)
        self.weights = self._converted(observation.weights)
        for name, parameter in self._model.named_parameters():
            parameter.data = self.weights.get(name, parameter.data)  # the copy's own would be held beside them
        self._buffers = self._converted(buffers_for(self._model, observation))
        self.shape, self._sample = observation.sample.shape, observation.sample
        self._places = observation.places
        self.loss, self._outputs = losses.of(self._model), observation.classes if observation.has_numbers else None
        self._known: dict[Hashable, Any] = {}
        self.read_labels: Callable[[], Any] = dict
        """Reads the labels of the observations at hand (`rayfed.attacks.closed_form.answer.labelled`)."""

    def once(self, what: Hashable, find: Callable[[], Any]) -> Any:
        """Return what is found of the model alone, which is found once for all observations."""
        if what not in self._known:
            self._known[what] = find()
        return self._known[what]

    @contextmanager
    def reading(self, labels: Callable[[], Any]) -> Iterator[None]:
        """Have the labels of the block's observations read in this way, once and where they are asked for."""
        self.read_labels = cache(labels)
        try:
            yield
        finally:
            self.read_labels = dict

    def _converted(self, tensors: Named) -> Named:
        return {n: t.to(self.dtype) if t.is_floating_point() else t for n, t in tensors.items()}

    def samples(self, count: int, seed: int = 0) -> Tensor:
        """Draw random samples (count, *shape), in [0, 1] or of tokens; a seed always gives the same."""
        generator = torch.Generator().manual_seed(seed)
        if self._sample.modality == "tokens":
            return self._sample.noise(count, generator).to(self.device)
        return torch.rand(count, *self.shape, generator=generator, dtype=torch.float64).to(self.device, self.dtype)

    def blank(self, count: int) -> Tensor:
        """Return labels of so many samples that the loss takes: class 0 (count,) int64, or zeros (count, K).

        Where each place has a class, (count, L) or (count, H, W) int64.
        """
        if self._outputs is None:
            return torch.zeros(count, *self._places, dtype=torch.int64)
        return torch.zeros(count, self._outputs, dtype=self.dtype)

    def hypotheses(self, classes: int) -> Tensor | None:
        """Return all labels that a sample may have: (R,) int64, or (R, K) of 0 and 1; None where they are countless."""
        if self._places:
            return None
        if self._outputs is None:
            return torch.arange(classes)
        if not isinstance(self.loss, losses.BinaryCrossEntropy) or 2**self._outputs > _MOST_HYPOTHESES:
            return None
        return torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * self._outputs).reshape(-1, self._outputs)

    def gradient(self, inputs: Tensor, labels: Tensor) -> Named:
        """Return the gradient of the mean loss of a batch (N, *shape), by parameter; without a graph."""
        inputs = inputs.to(self.device, self.dtype if inputs.is_floating_point() else None)
        with NotRounded():
            return gradients.gradient(self._model, self.weights, self._buffers, inputs, labels.to(self.device))[0]

    @cached_property
    def own_gradient(self) -> Named:
        """The gradient at one random sample, by which relations are found; raises what the model does on one sample."""
        return self.gradient(self.samples(1), self.blank(1))

    def gradients(self, inputs: Tensor, labels: Tensor, names: Sequence[str]) -> Named:
        """Return some parameters' gradients of the loss of each sample by itself, (N, *), without a graph."""
        own, inputs = {name: self.weights[name] for name in names}, inputs.to(self.device, self.dtype)
        fixed = self._buffers | {name: tensor for name, tensor in self.weights.items() if name not in own}
        with NotRounded():
            return gradients.per_sample_gradients(self._model, own, fixed, inputs, labels.to(self.device))

    def run(self, inputs: Tensor, outputs: Mapping[int, Tensor] | None = None) -> tuple[list[Use], Named, Tensor]:
        """Return the operations that read parameters, in order, the parameters as leaves of the graph, and the logits.

        `inputs` is (N, *shape); the graph leads back to it where it requires a gradient. Operations whose numbers are
        in `outputs` give these instead of their own.
        """
        leaves = self.leaves()
        recorder = _Recorder(inputs, leaves, outputs or {})
        with torch.enable_grad(), NotRounded(), recorder:
            logits = functional_call(self._model, {**leaves, **self._buffers}, (inputs,))
        return recorder.uses, leaves, logits

    def leaves(self) -> Named:
        """Return the parameters as leaves of a graph."""
        return {name: w.clone().requires_grad_() for name, w in self.weights.items()}

    def reached(self, inputs: Tensor, leaves: Named, last: int) -> Use:
        """Return the operation with this number of those that read parameters; nothing behind it is computed."""
        recorder = _Recorder(inputs, leaves, {}, last)
        with torch.enable_grad(), NotRounded(), recorder, suppress(_Reached):
            functional_call(self._model, {**leaves, **self._buffers}, (inputs,))
        return recorder.uses[last]

    def slopes(self, use: int, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the slopes of each sample's loss in the outputs (N, O) of an operation, (N, R, O).

        `labels` is (R, N): R classes for each sample, or (R, N, K) numbers. Samples have to be independent of each
        other.
        """
        outputs = outputs.detach().to(self.dtype).requires_grad_()
        _, _, logits = self.run(torch.full((len(outputs), *self.shape), 0.5).to(outputs), {use: outputs})
        found = []
        for row in labels.to(self.device):
            loss = self.loss(logits, row, "sum")
            found.append(torch.autograd.grad(loss, outputs, retain_graph=True, materialize_grads=True)[0].detach())
        return torch.stack(found, 1)


def probe(model: nn.Module, observation: Observation) -> Probe:
    """Return a model's probe that has run once, in double precision if the model takes it.

    An error in single precision is raised: clients train in it, so it does not mean that the attack does not apply.
    """
    try:
        return _tried_probe(model, observation, torch.float64)
    except Exception:  # whatever a user's model raises in another precision than its own
        return _tried_probe(model, observation, torch.float32)


def _tried_probe(model: nn.Module, observation: Observation, dtype: torch.dtype) -> Probe:
    probed = Probe(model, observation, dtype)
    samples = probed.samples(observation.batch_size)
    probed.run(samples)
    probed.gradient(samples, probed.blank(len(samples)))
    return probed


class NotRounded(TorchFunctionMode):
    """Leaves out rounding, whose slope is zero: a search by slopes takes it for a small error."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or return what it would have rounded."""
        given = kwargs or {}
        if getattr(func, "__name__", "") in _ROUNDING:
            return args[0] if args else given["input"]
        return func(*args, **given)


class _Reached(Exception):
    """Ends a forward pass at an operation."""


class _Recorder(TorchFunctionMode):
    """Notes the operations that read parameters, and ends the pass after the one numbered `last`.

    A row that an embedding looks up by a number made of the samples is none of the parameters: it tells of them. Layers
    that a model chooses by an index are.
    """

    def __init__(self, inputs: Tensor, leaves: Named, outputs: Mapping[int, Tensor], last: int | None = None) -> None:
        super().__init__()
        self._numbers = {id(inputs): ref(inputs)}  # made of the samples, without a graph: all of a frozen front
        self._outputs, self._last = outputs, last
        self.uses: list[Use] = []
        self._storages = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves.items()}
        self._made: dict[int, tuple[Tensor, frozenset[str]]] = {}  # of parameters alone; kept, so that ids stay theirs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation; what it gives to the model is a copy, which in-place operations may change."""
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
        """Return the parameters of which a tensor is a view, or from which alone it was made."""
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
