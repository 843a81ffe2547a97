"""Files of pretrained networks: weights and origin, with the file's hash in a second file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import file_digest
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayfed.core.files import local_path
from rayfed.errors import UserError
from rayfed.models.dcgan import Generator
from rayfed.models.evaluator import Evaluator
from rayfed.models.recogniser import Recogniser
from rayfed.update import list_nonfinite


@dataclass(frozen=True)
class Kind:
    """Kind of pretrained network that a file can contain, such as a generator."""

    name: str
    article: str
    command: str
    """Command that creates such a file, without `--out FILE`."""


GENERATOR = Kind("generator", "a", "rayfed train-generator SCENARIO")
EVALUATOR = Kind("evaluation network", "an", "rayfed train-evaluator")
RECOGNISER = Kind("recogniser", "a", "rayfed train-recogniser SCENARIO")
SHIPPED_EVALUATOR = Path(str(files("rayfed.models") / "evaluator.pt"))
"""Path of the evaluation network included in rayfed; `docs/defences.md` describes the network's training."""


class NetworkUnavailable(UserError):
    """Error for a network's file that is missing, altered, or of another kind."""


@dataclass(frozen=True)
class Origin:
    """Origin of a pretrained network: data and training. Networks of equal origin are equal."""

    data: Mapping[str, Any]
    """The scenario's data section, or another name of the data."""
    images: str
    """SHA-256 of the images' bytes."""
    seed: int
    epochs: int


def save_generator(path: Path, generator: Generator, origin: Origin) -> None:
    """Write a generator to the file `path`, and the file's hash to `path.sha256` in the format of `sha256sum`.

    The file can be read by `torch.load(weights_only=True)`. Raises `UserError` if it cannot be written.
    """
    shape = {name: getattr(generator, name) for name in ("image_shape", "classes", "latent", "width")}
    _save(path, GENERATOR, generator, torch.float32, origin, shape)


def save_evaluator(path: Path, evaluator: Evaluator, origin: Origin) -> None:
    """Write an evaluation network to a file (see `save_generator`), in half precision: 3 MB."""
    _save(path, EVALUATOR, evaluator, torch.float16, origin, {})


def save_recogniser(path: Path, recogniser: Recogniser, people: Sequence[str], origin: Origin) -> None:
    """Write a face recogniser to a file (see `save_generator`), with the people's names in the order of the labels."""
    _save(path, RECOGNISER, recogniser, torch.float32, origin, {"people": list(people)})


def load_generator(path: str | Path, image_shape: tuple[int, ...], classes: int) -> Generator:
    """Load a generator from a file, frozen, in evaluation mode, on the CPU.

    Raises `UserError` if the file is missing, altered or not a generator, or if its images or classes differ.
    """
    path = local_path(path)
    content = _read(path, GENERATOR)
    with _foreign(path, GENERATOR):
        generator = Generator(**content["shape"])
        generator.load_state_dict(content["weights"])
    made = tuple(generator.image_shape), generator.classes
    if made != (image_shape, classes):
        raise UserError(
            f"the generator {path} is for images of {_words(*made)}, but the data have "
            f"{_words(image_shape, classes)}: to train a generator on these data, {_how(path, GENERATOR)}"
        )
    return generator.eval().requires_grad_(False)


@lru_cache
def load_evaluator(path: Path | None, device: torch.device) -> Evaluator:
    """Load the frozen evaluation network from a file, or the network included in rayfed; cached.

    Raises `NetworkUnavailable` if the file is missing, altered or not an evaluation network.
    """
    found = SHIPPED_EVALUATOR if path is None else local_path(path)
    evaluator = Evaluator()
    content = _read(found, EVALUATOR)
    with _foreign(found, EVALUATOR):
        evaluator.load_state_dict(content["weights"])  # converted to single precision
    return evaluator.to(device).eval().requires_grad_(False)


@lru_cache
def load_recogniser(path: Path, people: tuple[str, ...], device: torch.device) -> Recogniser:
    """Load a face recogniser from a file, frozen, in evaluation mode; cached.

    Raises `NetworkUnavailable` if the file is missing, altered or not a recogniser, or if its people differ.
    """
    found = local_path(path)
    content = _read(found, RECOGNISER)
    with _foreign(found, RECOGNISER):
        known = tuple(map(str, content["shape"]["people"]))
        recogniser = Recogniser(len(known))
        recogniser.load_state_dict(content["weights"])
    if known != people:
        raise NetworkUnavailable(
            f"the recogniser {found} is for {_people(known)}, but the data show {_people(people)}: "
            f"to train a recogniser on these data, {_how(found, RECOGNISER)}"
        )
    return recogniser.to(device).eval().requires_grad_(False)


def is_trained(path: Path, origin: Origin, kind: Kind = GENERATOR) -> bool:
    """Return whether a file contains a pretrained network of this kind and origin.

    Raises `UserError` if the file has other contents, which must not be overwritten.
    """
    if not path.exists():
        return False
    found = _read(path, kind)["origin"]
    if found != asdict(origin):
        changed = ", ".join(sorted(key for key, value in asdict(origin).items() if found.get(key) != value))
        raise UserError(
            f"{path} has {kind.article} {kind.name} with different {changed}: choose another --out, or remove the file"
        )
    return True


def _save(
    path: Path, kind: Kind, network: nn.Module, dtype: torch.dtype, origin: Origin, shape: Mapping[str, Any]
) -> None:
    weights = {
        name: tensor.cpu().to(dtype) if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in network.state_dict().items()
    }
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"kind": kind.name, "shape": dict(shape), "origin": asdict(origin), "weights": weights}
        torch.save(content, unfinished)
        _hash_file(path).write_text(f"{_digest(unfinished)}  {path.name}\n", encoding="utf-8")
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot write the {kind.name} {path}: {error}; check whether the disk is full or read-only"
        ) from error


def _read(path: Path, kind: Kind) -> dict[str, Any]:
    """Read a file after checking its hash."""
    if not path.is_file():
        raise NetworkUnavailable(f"{kind.name} {path} not found: run `{kind.command} --out {path}`")
    try:
        expected = _hash_file(path).read_text(encoding="utf-8").split()[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise NetworkUnavailable(
            f"the {kind.name}'s hash {_hash_file(path)} cannot be read: restore the file, or {_how(path, kind)}"
        ) from error
    if _digest(path) != expected:
        raise NetworkUnavailable(
            f"the {kind.name} {path} is truncated or altered (the SHA-256 is not {expected}): {_how(path, kind)}"
        )
    with _foreign(path, kind):
        content = torch.load(path, weights_only=True)
        if content["kind"] != kind.name:
            raise ValueError(f"it holds a {content['kind']}")
        parts = {key: dict(content[key]) for key in ("shape", "origin", "weights")}
    if bad := list_nonfinite(parts["weights"]):
        raise NetworkUnavailable(
            f"the {kind.name} {path} has NaN or infinite values in '{bad[0]}', because the training diverged: "
            f"{_how(path, kind)}"
        )
    return parts


@contextmanager
def _foreign(path: Path, kind: Kind) -> Iterator[None]:
    """Turn torch's errors for an invalid file into a `NetworkUnavailable`."""
    try:
        yield
    except Exception as error:
        raise NetworkUnavailable(f"{path} is not {kind.article} {kind.name} of rayfed: {_how(path, kind)}") from error


def _how(path: Path, kind: Kind) -> str:
    return f"remove that file and run `{kind.command} --out {path}`"


def _hash_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _people(names: Sequence[str]) -> str:
    return f"{len(names)} people ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _words(image_shape: tuple[int, ...], classes: int) -> str:
    return f"{'x'.join(map(str, image_shape))} in {classes} classes"
