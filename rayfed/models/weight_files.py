"""Reader of files with weights (safetensors, `torch.save`, `numpy.savez`), which never runs the code of such a file."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, Self
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rayfed.errors import UserError

Keys = tuple[str, ...]
_NUMBERED = re.compile(r"(arr_)?\d+")
"""Pattern of the names of tensors in a list, and of unnamed arrays in a file of `numpy.savez`."""
_SHOWN = 8


@dataclass(frozen=True)
class Stored:
    """Tensor in a file of weights."""

    place: Keys
    """Keys that lead to the mapping with the tensor."""
    name: str
    """Key of the tensor in that mapping."""
    tensor: Tensor

    @property
    def path(self) -> str:
        """Return all keys that lead to the tensor, joined by dots like the names of a state dict."""
        return ".".join((*self.place, self.name))


@dataclass(frozen=True)
class WeightFile:
    """Contents of a file of weights: tensors and other entries."""

    file: Path
    tensors: list[Stored]
    entries: Mapping[str, str]
    """The file's keys, each with the number of tensors below the key, or the value's type."""

    @property
    def unnamed(self) -> bool:
        """Return whether the tensors of the file have only an order, and no names."""
        return all(_NUMBERED.fullmatch(stored.path) for stored in self.tensors)

    @property
    def listed(self) -> str:
        """Return the first entries of the file as text, for messages."""
        shown = [f"'{name}' ({kind})" for name, kind in list(self.entries.items())[:_SHOWN]]
        return ", ".join(shown) + (", ..." if len(self.entries) > _SHOWN else "")


class Foreign:
    """Placeholder for an object whose class is not imported: keeps the object's attributes and does nothing."""

    attributes: Mapping[str, Any] = MappingProxyType({})

    def __new__(cls, *arguments: Any) -> Self:
        """Ignore the arguments."""
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            self.attributes = state


def read(file: Path, field: str) -> WeightFile:
    """Read the tensors of a file of weights.

    Raises `UserError` for a file that is missing, unreadable or without tensors. `field` is the option with which the
    user named the file.
    """
    if file.is_dir():
        raise UserError(
            f"{file} is a folder, but {field} needs a file: give the file in this folder that contains the weights"
        )
    if not file.is_file():
        raise UserError(
            f"file {file} for {field} not found: rayfed downloads nothing, so give the path of a local .safetensors "
            f"file, or of a file written by torch.save"
        )
    try:
        contents = _contents(file)
        tensors = list(_tensors(contents, (), (id(contents),)))
    except UserError:
        raise
    except Exception as error:  # these libraries may raise any type
        said = f"{type(error).__name__}: " + str(error).partition("\n")[0]
        raise UserError(
            f"{file} cannot be read as weights: {said}; expected .safetensors, an .npz of numpy.savez, or a state "
            f"dict written by torch.save (`torch.save(model.state_dict(), FILE)`)"
        ) from error
    counts = Counter(stored.place[0] for stored in tensors if stored.place)
    plain = {stored.name for stored in tensors if not stored.place}
    kinds = {name: type(inner).__name__ for name, inner in _entries(contents).items()}
    kinds |= {name: f"tensors: {count}" for name, count in counts.items()} | dict.fromkeys(plain, "tensor")
    found = WeightFile(file, tensors, kinds)
    if not tensors:
        has = found.listed or type(contents).__name__
        raise UserError(f"{file} has no weights: found {has}; expected tensors by name, as in model.state_dict()")
    return found


def _contents(file: Path) -> Any:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    return _torch(file)


def _torch(file: Path) -> Any:
    """Return the contents of a file of `torch.save`, with a `Foreign` for each object of another class."""
    if is_zipfile(file) and any(name.endswith("/constants.pkl") for name in ZipFile(file).namelist()):
        raise UserError(
            f"{file} cannot be read as weights: it is a TorchScript archive, whose code is not run. Save only the "
            f"weights: `torch.save(torch.jit.load('{file.name}').state_dict(), '{file.stem}-weights.pt')`"
        )
    with safe_globals(_of_numpy()), warnings.catch_warnings(action="ignore"):  # about pickle protocols
        try:
            return torch.load(file, "cpu", weights_only=True)
        except UnpicklingError as error:
            names = _classes(file, str(error))
        stand_ins: list[Any] = [(type(name.rpartition(".")[2], (Foreign,), {}), name) for name in names]
        try:
            with safe_globals(stand_ins):
                return torch.load(file, "cpu", weights_only=True)
        except UnpicklingError as error:
            objects = f"it contains objects of {', '.join(names)}, whose code is not run"
            raise UserError(
                f"{file} cannot be read as weights: {objects if names else 'torch.save did not write it'}. Load it "
                f"where its code can be imported, and save the weights to a separate file: "
                f"`torch.save(model.state_dict(), '{file.stem}-weights.pt')`"
            ) from error


def _classes(file: Path, message: str) -> list[str]:
    """Return the names of classes and functions that `torch.load` does not import; only the first one for old files."""
    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))
    except (ValueError, UnpicklingError):  # not an archive, or not a pickle that it can list
        return re.findall(r"GLOBAL ([\w.]+)", message)[:1]


def _of_numpy() -> list[Any]:
    """Return the functions and classes that construct NumPy's arrays and numbers, by their names in all versions."""
    made: tuple[Any, ...] = np.empty(0), np.float64(0)
    rooms = "numpy.core.multiarray", "numpy._core.multiarray"
    functions = [value.__reduce__()[0] for value in made]
    named = [(function, f"{room}.{function.__name__}") for room in rooms for function in functions]
    types = {type(np.dtype(code)) for code in "?bhilqBHILQefdFDSU"}
    return [np.ndarray, np.dtype, *types, *named]


def _tensors(found: Any, place: Keys, around: tuple[int, ...]) -> Iterator[Stored]:
    """Yield the tensors in a container and in nested ones; `around` has the ids of it and its enclosing containers."""
    for name, inner in _entries(found).items():
        tensor = _tensor(inner)
        if tensor is not None:
            yield Stored(place, name, tensor)
        elif id(inner) not in around:  # an object may refer to one that contains it
            yield from _tensors(inner, (*place, name), (*around, id(inner)))


def _entries(found: Any) -> dict[str, Any]:
    """Return the entries of a container by name; empty for anything else."""
    if isinstance(found, Foreign):
        found = _state(found.attributes)
    if isinstance(found, list | tuple):
        return {str(index): inner for index, inner in enumerate(found)}
    return {str(name): inner for name, inner in found.items()} if isinstance(found, Mapping) else {}


def _state(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters, buffers and modules of a module, given its attributes; other attributes unchanged."""
    parts = [attributes.get(part) for part in ("_parameters", "_buffers", "_modules")]
    if not all(isinstance(part, Mapping) for part in parts):
        return attributes
    left_out = attributes.get("_non_persistent_buffers_set") or ()
    return {name: inner for part in parts for name, inner in _entries(part).items() if name not in left_out}


def _tensor(value: Any) -> Tensor | None:
    """Return a tensor, or an array of numbers as a tensor; None for any other value."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "?biufc":
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    return value.detach() if isinstance(value, Tensor) else None
