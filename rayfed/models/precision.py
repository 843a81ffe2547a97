"""Number types of a user's model: conversion of floating-point tensors to float32, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from rayfed.core.number_types import check_model, type_name
from rayfed.errors import UserError
from rayfed.gradients import within
from rayfed.models.notes import note
from rayfed.samples import SampleSpec
from rayfed.update import Named

_SHOWN = 2


def use_float32(name: str, model: nn.Module, sample: SampleSpec) -> None:
    """Convert a model's floating-point parameters and buffers to float32, in place, with a note on the model.

    Raises `UserError` for complex parameters, and if the forward pass works only in the original types.
    """
    check_default_type(name)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    others = {path: t.dtype for path, t in tensors if t.dtype.is_floating_point and t.dtype != torch.float32}
    works = bool(others) and _runs(model, sample)
    if others:
        model.float()
    check_model(model, f"'{name}'")
    if not others:
        return
    kinds = " and ".join(sorted({type_name(dtype) for dtype in others.values()}))
    shown = ", ".join(list(others)[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
    if works and not _runs(model, sample):
        raise UserError(
            f"model '{name}' has {kinds} tensors ({shown}), but rayfed computes in float32, and the forward pass fails "
            "in float32: keep all tensors in float32, or convert inputs to the type of the weights, such as "
            f"`x.to(self.layer.weight.dtype)`, and not to {kinds}"
        )
    note(model, f"the model's {kinds} tensors ({shown}) were converted to float32, because rayfed computes in float32")


def _runs(model: nn.Module, sample: SampleSpec) -> bool:
    """Return whether a model accepts two samples (for records, also as two rows) in evaluation mode."""
    inputs = sample.trial()
    tried = [inputs, inputs.flatten(1)] if sample.modality == "records" else [inputs]
    done = False
    with _mode(model, training=False), torch.no_grad():
        for given in tried:
            with suppress(Exception):
                model(given)
                done = True
    return done


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set a model to training or evaluation mode in the block, and restore each module's mode after it."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_default_type(name: str) -> None:
    """Raise `UserError` if PyTorch's default number type is not float32, as new tensors would have that type."""
    if (default := torch.get_default_dtype()) != torch.float32:
        raise UserError(
            f"model '{name}': PyTorch's default number type is {type_name(default)}, but rayfed computes in float32: "
            f"remove `torch.set_default_dtype` from the model's file and from your script"
        )


def check_complex_buffers(name: str, model: nn.Module, sample: SampleSpec) -> None:
    """Raise `UserError` if a forward pass in training mode changes complex buffers, which clients cannot send."""
    own = {path: buffer.clone() for path, buffer in model.named_buffers() if buffer.is_complex()}
    if not own:
        return

    def buffers_after(module: nn.Module) -> Named:
        module(sample.noise(2))
        return dict(module.named_buffers())

    state = {path: buffer.clone() for path, buffer in model.named_buffers()}
    with _mode(model, training=True), torch.no_grad(), torch.random.fork_rng(devices=[]):
        after = within(model, state, buffers_after)
    for path, buffer in own.items():
        if not torch.equal(after[path], buffer):
            raise UserError(
                f"model '{name}': the forward pass changes buffer '{path}', which is {type_name(buffer.dtype)}, but "
                f"clients send only real numbers: keep its real and imaginary parts as real buffers"
            )
