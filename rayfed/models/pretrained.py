"""A trained generator in a file: its weights, what it was trained on, and beside it the file's hash."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch

from rayfed.errors import UserError
from rayfed.models.dcgan import Generator


@dataclass(frozen=True)
class Origin:
    """What a generator was trained on and how; two with the same origin are the same."""

    data: Mapping[str, Any]
    """The scenario's data section."""
    images: str
    """SHA-256 of the images' bytes."""
    seed: int
    epochs: int


def save_generator(path: Path, generator: Generator, origin: Origin) -> None:
    """Write `path`, readable by `torch.load(weights_only=True)`, and `path.sha256` as `sha256sum` writes it.

    Raises `UserError` where nothing can be written.
    """
    shape = {name: getattr(generator, name) for name in ("image_shape", "classes", "latent", "width")}
    weights = {name: tensor.cpu() for name, tensor in generator.state_dict().items()}
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"shape": shape, "origin": asdict(origin), "weights": weights}, unfinished)
        _hash_file(path).write_text(f"{_digest(unfinished)}  {path.name}\n", encoding="utf-8")
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write the generator {path}: {error}") from error


def load_generator(path: str | Path, image_shape: tuple[int, int, int], classes: int) -> Generator:
    """The generator of a file, frozen, in evaluation mode, on the CPU.

    Raises `UserError` for a file that is missing, altered or no generator, and for one of other images or classes.
    """
    path = Path(os.path.expandvars(path)).expanduser()
    content = _read(path)
    shape = content["shape"]
    if tuple(shape["image_shape"]) != image_shape or shape["classes"] != classes:
        raise UserError(
            f"the generator {path} makes images of {_words(shape['image_shape'], shape['classes'])}, the data have "
            f"{_words(image_shape, classes)}: train one on these data, {_how(path)}"
        )
    generator = Generator(**shape)
    generator.load_state_dict(content["weights"])
    return generator.eval().requires_grad_(False)


def is_trained(path: Path, origin: Origin) -> bool:
    """Whether a generator of this origin is in the file.

    Raises `UserError` where something else is: it is not for us to overwrite.
    """
    if not path.exists():
        return False
    found = _read(path)["origin"]
    if found != asdict(origin):
        changed = ", ".join(sorted(key for key, value in asdict(origin).items() if found.get(key) != value))
        raise UserError(f"{path} holds a generator of another {changed}: choose another --out, or remove it")
    return True


def _read(path: Path) -> dict[str, Any]:
    """The content of a file whose hash is right."""
    if not path.is_file():
        raise UserError(f"there is no generator {path}: {_how(path)}")
    try:
        expected = _hash_file(path).read_text(encoding="utf-8").split()[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise UserError(
            f"the generator's hash {_hash_file(path)} cannot be read: put it there, or {_how(path)}"
        ) from error
    if _digest(path) != expected:
        raise UserError(f"the generator {path} is truncated or altered, its SHA-256 is not {expected}: {_how(path)}")
    try:
        content = torch.load(path, weights_only=True)
        return {key: content[key] for key in ("shape", "origin", "weights")}
    except Exception as error:  # whatever a foreign file makes torch's unpickler raise
        raise UserError(f"{path} is not a generator of rayfed: {_how(path)}") from error


def _how(path: Path) -> str:
    return f"remove what is left of it and run `rayfed train-generator SCENARIO --out {path}`"


def _hash_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _words(image_shape: tuple[int, int, int], classes: int) -> str:
    return f"{'x'.join(map(str, image_shape))} in {classes} classes"
