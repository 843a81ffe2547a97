"""Check the arguments of a recording, and that all updates of a round have the same local training settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.core import losses
from rayfed.core.arrays import is_count, to_tensor
from rayfed.errors import UserError
from rayfed.update import LocalTraining

LOCAL = [field.name for field in fields(LocalTraining)]
"""Columns of a recording's index that describe a client's local training."""


def check_round(rows: Sequence[Mapping[str, Any]], where: str) -> tuple[LocalTraining, int | None]:
    """Return the local training settings of a round's updates, and the number of epochs if their step counts differ.

    `rows` are rows of the index. A batch size above a client's number of samples counts as that number.
    Raises `UserError`, which starts with `where`, for updates that cannot be replayed together.
    """
    if len({row["sent"] for row in rows}) > 1:
        raise UserError(
            f"{where}: the clients were sent different states; record them as rounds with different numbers"
        )
    if len({row["truth"] is None for row in rows}) > 1:
        raise UserError(f"{where}: only some updates have their samples recorded: use the same `truth` for all clients")
    trainings = [LocalTraining(**{name: row[name] for name in LOCAL}) for row in rows]
    samples = [row["samples"] for row in rows]
    used = [min(one.batch_size or count, count) for one, count in zip(trainings, samples, strict=True)]
    written = {one.batch_size for one in trainings}
    batch = written.pop() if len(written) == 1 else max(used)
    alike = [min(batch or count, count) for count in samples] == used
    settings = {replace(one, steps=1, batch_size=batch) for one in trainings}
    if not alike or len(settings) > 1 or len({row["kind"] for row in rows}) > 1:
        raise UserError(
            f"{where}: the updates have different local training: record clients with another kind, batch size, lr, "
            f"momentum, decay or clipping to separate folders"
        )
    steps = sorted({one.steps for one in trainings})
    if len(steps) == 1:
        return replace(trainings[0], batch_size=batch), None
    epochs = {one.steps / ceil(count / size) for one, count, size in zip(trainings, samples, used, strict=True)}
    if len(epochs) > 1 or not min(epochs).is_integer():
        raise UserError(
            f"{where}: the updates took {steps} local steps, which are different numbers of epochs: record clients "
            f"with other steps to separate folders"
        )
    return replace(trainings[0], batch_size=batch), int(epochs.pop())


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of images in [0, 1], per channel: (image - mean) / std.

    >>> import rayfed
    >>> rayfed.Normalisation([0.5], [0.25])
    Normalisation(mean=(0.5,), std=(0.25,))
    """

    mean: Sequence[float]
    """Mean of each channel."""
    std: Sequence[float]
    """Standard deviation of each channel."""

    def __post_init__(self) -> None:
        """Convert the numbers to tuples of floats. Raises `UserError` for invalid ones."""
        for name in ("mean", "std"):
            numbers = to_tensor("record: mean and std", getattr(self, name)).flatten().tolist()
            object.__setattr__(self, name, tuple(map(float, numbers)))
        if not all(map(isfinite, (*self.mean, *self.std))) or min(self.std, default=1.0) <= 0:
            raise UserError(f"record: mean is {self.mean} and std {self.std}; expected finite numbers, and std above 0")


def check_normalisation(given: Any) -> Normalisation | None:
    """Return the normalisation of a `Normalisation`, or of a transform with a mean and std; None for None."""
    if given is None or isinstance(given, Normalisation):
        return given
    if not (hasattr(given, "mean") and hasattr(given, "std")):
        raise UserError(
            f"record: normalise is a {type(given).__name__}; give rayfed.Normalisation(mean, std), or a "
            "transform of torchvision with mean and std"
        )
    return Normalisation(given.mean, given.std)


def check_image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of an image. Raises `UserError` unless `shape` is three positive integers."""
    sizes = tuple(shape)
    if len(sizes) != 3 or not all(is_count(size) for size in sizes):
        raise UserError(f"record: shape is {sizes}; expected channels, height and width, such as (3, 32, 32)")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def build_loss(section: Any) -> losses.Loss:
    """Build a loss from a scenario's section `loss`; None means cross entropy. Raises `UserError` for unknown names."""
    if section is None:
        return losses.DEFAULT
    if not isinstance(section, Mapping) or "name" not in section:
        raise UserError(f"record: loss is {section!r}; give a name, or a mapping with a `name`")
    parameters = {name: value for name, value in section.items() if name != "name"}
    try:
        return losses.make_loss(section["name"], parameters)
    except ValueError as error:  # pydantic's ValidationError
        raise UserError(f"record: loss {dict(section)}: {' '.join(str(error).split())}") from error


def count_outputs(model: nn.Module, inputs: Tensor, classes: int | None) -> int:
    """Return the model's number of outputs, from a forward pass in evaluation mode.

    Raises `UserError` if the model does not take the inputs, and if it does not have `classes` outputs.
    """
    modes = {module: module.training for module in model.modules()}
    place = next(p for p in model.parameters() if p.requires_grad)  # frozen parameters may be integers
    try:
        with torch.no_grad():
            logits = model.eval()(inputs.to(place.device, place.dtype))
    except Exception as error:  # the user's model may raise anything
        said = " ".join(str(error).split())
        raise UserError(
            f"record: the model fails on images of shape {tuple(inputs.shape[1:])}: {type(error).__name__}: {said}; "
            f"give inputs (N, C, H, W) of the size that the model expects"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    found = int(logits.shape[1]) if isinstance(logits, Tensor) and logits.ndim == 2 else None
    if found is None and classes is None:
        raise UserError("record: the model does not return logits (N, classes): give record(..., classes=...)")
    if classes is not None and (not is_count(classes) or found not in (None, classes)):
        raise UserError(f"record: classes is {classes}; expected {found or 'a whole number from 1'}, as in the model")
    return found or int(classes or 0)
