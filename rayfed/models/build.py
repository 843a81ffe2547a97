"""Construction of models by name, and checks of the models against the samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rayfed import registry
from rayfed.core import seeds
from rayfed.core.number_types import type_name
from rayfed.errors import UserError
from rayfed.models.copying import copy_model, shared_parts
from rayfed.models.notes import note
from rayfed.models.precision import check_complex_buffers, check_default_type, use_float32
from rayfed.models.state import check_finite, load_state
from rayfed.models.wrappers import is_wrapped, unwrap
from rayfed.samples import Pixels, SampleSpec

Shape = tuple[int, ...]


class Normalise:
    """Forward pre-hook that computes (image - mean) / std per channel, inside the model.

    Images outside the model stay in [0, 1], and the model's parameter and buffer names do not change.
    """

    def __init__(self, mean: list[float], std: list[float]) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __call__(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Normalise a batch (N, C, H, W), in its device and precision."""
        (images,) = inputs
        # Not buffers, which clients would send; non-blocking, so that no forward pass waits here.
        mean, std = (t.to(images.device, images.dtype, non_blocking=True) for t in (self.mean, self.std))
        return ((images - mean) / std,)


_ONE_OUTPUT = ", or set `loss: binary_cross_entropy`, which needs one output for two classes"
_NUMBER = (
    ", the outputs of its last layer. One output is enough for two classes or for a number: if the classes are "
    "numbers, such as grades, set `data.targets` to their column and `loss: mean_squared_error`"
)


def _as_column(module: nn.Module, inputs: tuple[Tensor], outputs: Tensor) -> Tensor:
    """Reshape outputs (N,) of a one-output model to (N, 1), as a forward hook."""
    return outputs[:, None]


def build_model(
    name: str,
    parameters: Mapping[str, Any],
    sample: SampleSpec | Shape,
    classes: int,
    seed: int | bytes,
    normalise: tuple[list[float], list[float]] | None = None,
    state: str | Path | None = None,
) -> nn.Module:
    """Build a model by name, on the CPU.

    The model maps inputs (N, *shape) to logits (N, classes) or (N, T, classes). `sample` describes the inputs; (C, H,
    W) means images of that shape. `name` is a model of the registry, or a dotted path to a component, an `nn.Module`
    subclass or a function that returns a module. The latter two are called with `parameters`, and with `image_shape`
    (the shape of an input) and `classes` (or `num_classes`) if their signature has them. The weights depend only on
    `seed`, and no global generator changes; with `state`, they are loaded from that file (`load_state`). `normalise` is
    (mean, std) per channel, applied inside the model.

    Raises `UserError` if the name, the parameters or the shapes are invalid, after a trial forward pass.

    >>> import torch
    >>> from rayfed.models.build import build_model
    >>> model = build_model("mlp", {"hidden": [8]}, (1, 8, 8), classes=10, seed=0)
    >>> model(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    target = registry.find("models", name)
    sample = Pixels(*sample) if isinstance(sample, tuple) else sample
    with seeds.global_stream(seed, "model"):
        if hasattr(target, "build") and is_dataclass(target):
            model = _from_component(name, parameters, sample.shape, classes)
        else:
            model = _from_callable(name, target, parameters, sample.shape, classes)
        use_float32(name, model, sample)
        if state is not None:
            if any(map(is_lazy, model.state_dict().values())):
                _trial(name, model.eval(), sample)  # lazy layers infer their shapes from an input
                model.train()
            load_state(model, state)
        if normalise is not None:
            _check_statistics(normalise, sample.shape[0])
            # The first hook, because the statistics refer to the original channels.
            model.register_forward_pre_hook(Normalise(*normalise), prepend=True)
        _check_forward(name, model, sample, classes)
        check_finite(f"model '{name}'", dict(model.named_parameters()))
        _check_copies(name, model, sample)
        if _draws_random_numbers(name, model, sample, training=False):
            raise UserError(
                f"model '{name}' uses random numbers in evaluation mode, so measurements are not repeatable: use "
                f"random numbers only in training mode, such as `F.dropout(x, training=self.training)`"
            )
        if _draws_random_numbers(name, model, sample, training=True):
            model.stochastic = True
        check_complex_buffers(name, model, sample)
        check_default_type(name)
    built: nn.Module = model
    return built


class CopiedModels:
    """Cache for `build_model`: builds and checks each model of rayfed once, then copies it.

    The arms of a scenario mostly differ in their defences and have the same model. Other models are always built anew,
    because copies may share parts, such as a function that refers to the module in which it was created.
    """

    def __init__(self) -> None:
        self._built: list[tuple[tuple[Any, ...], nn.Module]] = []

    def __call__(self, name: str, parameters: Mapping[str, Any], *others: Any) -> nn.Module:
        """Return an independent model; takes the arguments of `build_model`."""
        if not registry.find("models", name).__module__.startswith("rayfed."):
            return build_model(name, parameters, *others)
        given = name, dict(parameters), *others
        known = next((model for args, model in self._built if args == given), None)
        if known is None:
            known = build_model(name, parameters, *others)
            self._built.append((given, known))
        return copy_model(known)


def _from_component(name: str, parameters: Mapping[str, Any], image_shape: tuple[int, ...], classes: int) -> Any:
    try:
        component = registry.build("models", name, parameters)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"model '{name}' has invalid parameters: {problems}") from error
    try:
        return component.build(image_shape, classes)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # from torch, for layers of extreme sizes
        what = str(error).partition("\n")[0]
        raise UserError(
            f"model '{name}' cannot be built with {dict(parameters)}: {what}; choose a smaller model"
        ) from error


def _from_callable(
    name: str, target: Callable[..., Any], parameters: Mapping[str, Any], image_shape: tuple[int, ...], classes: int
) -> nn.Module:
    if not callable(target):
        raise UserError(
            f"model '{name}' is a {type(target).__name__}: give an nn.Module class, or a function that returns an "
            "nn.Module"
        )
    try:
        signature = inspect.signature(target)
    except ValueError as error:
        raise UserError(
            f"model '{name}': {error}; give an nn.Module class, or a function that returns an nn.Module"
        ) from error
    known = {"image_shape": image_shape, "classes": classes, "num_classes": classes}
    arguments = {key: value for key, value in known.items() if key in signature.parameters} | dict(parameters)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"model '{name}' cannot be called with {sorted(arguments)}: {error}; its signature is {signature}. rayfed "
            f"sets image_shape ({image_shape}) and classes; set all other arguments in `model` (--set "
            f"model.NAME=VALUE)"
        ) from error
    try:
        model = target(**arguments)
    except Exception as error:
        raise UserError(
            f"model '{name}' failed when called with {arguments}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model '{name}' returned a {type(model).__name__}: return an nn.Module")
    return _without_wrappers(name, model)


def _without_wrappers(name: str, model: nn.Module) -> nn.Module:
    if not is_wrapped(model):
        return model
    try:
        model = unwrap(model)
    except UserError as error:
        raise UserError(f"model '{name}': {error}") from error
    note(model, "rayfed uses the module wrapped by nn.DataParallel or torch.compile: on one device, not compiled")
    return model


def _check_statistics(normalise: tuple[list[float], list[float]], channels: int) -> None:
    mean, std = normalise
    if not len(mean) == len(std) == channels or min(std) <= 0:
        raise UserError(
            f"normalise needs {channels} means and {channels} positive standard deviations for these images, "
            f"not mean {mean} and std {std}"
        )


def _trial(name: str, model: nn.Module, sample: SampleSpec) -> Any:
    """Return the model's output for two inputs, in its modules' current modes."""
    try:
        with torch.no_grad():
            return model(sample.trial())
    except Exception as error:
        raise UserError(
            f"model '{name}' fails on {sample.noun} of {sample.extent}: {type(error).__name__}: {error}; "
            f"{sample.remedy}"
        ) from error


def _check_forward(name: str, model: nn.Module, sample: SampleSpec, classes: int) -> None:
    """Check the model's output in evaluation mode, and restore its modes."""
    modes = {module: module.training for module in model.modules()}
    if sample.modality == "records" and _takes_rows(model.eval(), sample):
        model.register_forward_pre_hook(_as_rows)
    logits = _trial(name, model.eval(), sample)
    for module, training in modes.items():
        module.training = training
    if not isinstance(logits, Tensor):
        raise UserError(f"model '{name}' returns a {type(logits).__name__}: return one tensor of logits")
    if not logits.is_floating_point():
        raise UserError(
            f"model '{name}' returns {type_name(logits.dtype)} outputs: return real logits, such as float32"
        )
    if logits.shape == (2,) and classes == 1:
        model.register_forward_hook(_as_column)
        return
    single = logits.shape in {(2,), (2, 1)}
    instead = "" if not single else _ONE_OUTPUT if classes == 2 else _NUMBER
    maps = sample.modality == "pixels" and logits.shape[1:] == (classes, *sample.shape[1:])
    if sample.modality == "pixels" and logits.ndim == 4 and not maps:
        raise UserError(
            f"model '{name}' returns {tuple(logits.shape)} for 2 {sample.noun} of {sample.extent}, but scores of "
            f"pixels are (2, {classes}, {sample.shape[1]}, {sample.shape[2]}): set its number of classes to {classes}, "
            f"and resize its outputs to the images' size"
        )
    tokens = sample.modality == "tokens" and logits.ndim == 3 and logits.shape[2] >= classes
    if logits.shape not in {(2, classes), (2, *logits.shape[1:2], classes)} and not maps and not tokens:
        raise UserError(
            f"model '{name}' returns {tuple(logits.shape)} for 2 {sample.noun} of {sample.extent}, but logits "
            f"(2, {classes}) are needed: set its number of classes to {classes}{instead}"
        )


def _check_copies(name: str, model: nn.Module, sample: SampleSpec) -> None:
    """Raise `UserError` if a model cannot be copied, or if its outputs depend on attributes that its copies share."""
    try:
        copy_model(model)
    except UserError as error:
        raise UserError(f"model '{name}': {error}") from error
    shared = shared_parts(model)
    for training in (False, True) if shared else ():
        outputs = []
        for copied in (copy_model(model), copy_model(model)):
            with seeds.global_stream(0, "copies"):
                outputs.append(_trial(name, copied.train(training), sample))
        if isinstance(outputs[0], Tensor) and not torch.equal(*outputs):
            raise UserError(
                f"model '{name}' returns different outputs for the same inputs in a second run, and has attributes "
                "that cannot be copied: "
                f"{', '.join(shared)}. Attacks need equal copies: compute these values in `forward`, or sample them "
                f"with PyTorch's generator"
            )


def _takes_rows(model: nn.Module, sample: SampleSpec) -> bool:
    """Return whether a model takes records as (N, F), and not as (N, 1, 1, F)."""
    records = sample.trial()
    with torch.no_grad(), suppress(Exception):
        answered = model(records)
        if isinstance(answered, Tensor) and answered.ndim <= 2:
            return False
    with torch.no_grad(), suppress(Exception):
        answered = model(records.flatten(1))
        return isinstance(answered, Tensor) and answered.ndim <= 2
    return False


def _as_rows(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Reshape records (N, 1, 1, F) to (N, F), as a forward pre-hook."""
    return inputs[0].flatten(1), *inputs[1:]


def _draws_random_numbers(name: str, model: nn.Module, sample: SampleSpec, training: bool) -> bool:
    """Return whether a forward pass uses the random generator, by `F.dropout` or otherwise."""
    before = torch.get_rng_state()
    _trial(name, copy_model(model).train(training), sample)
    return not torch.equal(before, torch.get_rng_state())


def uses_batch_statistics(model: nn.Module) -> bool:
    """Return whether batch norm, in a model's current modes, makes samples of a batch depend on each other."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return any(layer.training or not layer.track_running_stats for layer in layers)


def output_shape(model: nn.Module, sample: SampleSpec) -> Shape:
    """Return the shape of a model's output for a single input, without the batch axis."""
    with torch.no_grad():
        return tuple(copy_model(model).eval()(sample.trial()).shape[1:])


def moves_buffers(model: nn.Module, sample: SampleSpec) -> bool:
    """Return whether a model's forward pass, in the current modes, changes floating-point buffers."""
    probed = copy_model(model)
    before = {name: b.clone() for name, b in probed.named_buffers() if b.is_floating_point()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        probed(sample.noise(2))
    return any(not torch.equal(b, before[name]) for name, b in probed.named_buffers() if name in before)


def is_stochastic(model: nn.Module) -> bool:
    """Return whether a model's forward pass, in the current modes, uses random numbers.

    True for dropout, also in attention and between recurrent layers, and for any module with an attribute `stochastic =
    True`. `build_model` sets it on a model whose forward pass uses random numbers, and defences' blocks declare it.
    """
    return any(_draws(module) for module in model.modules())


def draw_nothing(model: nn.Module) -> None:
    """Set a model's modules that use random numbers to evaluation mode, with their children, except norms."""
    for module in [module for module in model.modules() if _draws(module)]:
        for part in module.modules():
            if not isinstance(part, nn.modules.batchnorm._NormBase):
                part.training = False


def _draws(module: nn.Module) -> bool:
    within = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return module.training and (dropout or within or getattr(module, "stochastic", False))
