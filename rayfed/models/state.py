"""Loading of weights from the user's files: safetensors, or `torch.save` files read as data only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from rayfed.errors import UserError, needing
from rayfed.files import local_path
from rayfed.models.notes import note
from rayfed.models.trained import head_names
from rayfed.update import Named

_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the weights in a checkpoint."""
_COUNTER = "num_batches_tracked"
"""Buffer of a batch norm that older files lack, and that only a norm without a momentum reads."""
_SHOWN = 4


def load_state(model: nn.Module, path: str | Path) -> None:
    """Load a file's tensors into a model, in place.

    They go by their names; where none of a file's names is the model's, by their order, if last names and shapes agree
    one by one. A head of another size stays as it was initialised, with a note on the model, and so does what else is
    not taken over. Raises `UserError` for a file that cannot be read, and where other tensors are missing or misshapen.
    """
    file = local_path(path)
    given, own, head = _read(file), model.state_dict(), head_names(model)
    if not given.keys() & own.keys():
        given = _by_order(file, given, own, head)
        note(model, f"{file.name} has other names than the model: its {len(given)} tensors were taken in their order")
    misshapen = {name for name in own.keys() & given.keys() if own[name].shape != given[name].shape}
    missing = {name for name in own.keys() - given.keys() if not name.endswith(_COUNTER)}
    problems = [
        f"{len(names)} {what}: {_some(names, own, given)}"
        for what, names in (("missing", missing - head), ("of another shape", misshapen - head))
        if names
    ]
    if problems:
        raise UserError(f"{file} does not fit the model, of whose {len(own)} tensors are {'; '.join(problems)}")
    if anew := (missing | misshapen) & head:
        note(model, f"the head is initialised anew, {file.name} has another one: {_some(anew, own, given)}")
    if spare := given.keys() - own.keys():
        note(model, f"of {file.name} {len(spare)} tensors have no place in the model: {_some(spare, own, given)}")
    model.load_state_dict({n: t for n, t in given.items() if n in own and n not in misshapen}, strict=False)


def _read(file: Path) -> Named:
    """Return the tensors of a file by name, in its order."""
    if not file.is_file():
        raise UserError(
            f"there is no file {file} for model.state: rayfed downloads nothing, so give the path of a .safetensors "
            f"file, or of one that torch.save wrote, on this machine"
        )
    try:
        found = _safetensors(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # whatever a foreign file leads these libraries to raise
        said = str(error).partition("\n")[0]
        raise UserError(
            f"{file} cannot be read as weights: {said}; expected .safetensors, or a state dict of torch.save that "
            f"holds tensors alone (weights_only=True)"
        ) from error
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise UserError(f"{file} holds no weights: expected tensors by name, as model.state_dict() gives them")
    behind = "module." if all(str(name).startswith("module.") for name in found) else ""  # nn.DataParallel's
    return {str(name).removeprefix(behind): tensor for name, tensor in found.items()}


def _safetensors(file: Path) -> Named:
    with needing("safetensors", "hub", f"{file}"):
        from safetensors.torch import load_file
    found: Named = load_file(file)
    return found


def _by_order(file: Path, given: Named, own: Named, head: Collection[str]) -> Named:
    """Return a file's tensors under the model's names, by order; raises `UserError` if shapes differ."""
    names, values = ([name for name in tensors if not name.endswith(_COUNTER)] for tensors in (own, given))
    pairs = zip(names, values, strict=False)
    alike = len(names) == len(values) and all(
        a.rpartition(".")[2] == b.rpartition(".")[2] and (own[a].shape == given[b].shape or a in head) for a, b in pairs
    )
    if not alike:
        raise UserError(
            f"{file} does not fit the model: none of its {len(values)} names ({_some(values, given, given)}) is one of "
            f"the model's {len(names)} ({_some(names, own, own)}), nor are they as many of the same shapes in the same "
            f"order; is it of another architecture?"
        )
    return {name: given[value] for name, value in zip(names, values, strict=True)}


def _some(names: Collection[str], own: Named, given: Named) -> str:
    """Format a few names with their shapes in the model and in the file."""

    def shaped(name: str) -> str:
        shapes = [tuple(tensors[name].shape) for tensors in (own, given) if name in tensors]
        return f"{name} {' and not '.join(map(str, dict.fromkeys(shapes)))}"

    ordered = [name for tensors in (own, given) for name in tensors if name in names]
    shown = list(dict.fromkeys(ordered))
    return ", ".join(map(shaped, shown[:_SHOWN])) + (", ..." if len(shown) > _SHOWN else "")
