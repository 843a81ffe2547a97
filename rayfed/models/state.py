"""Loading of weights from the user's files into a model.

A training script may have wrapped the model, or saved its weights together with an epoch, an optimiser's state or
averaged weights. So `load_state` looks for a set of tensors whose names are the model's after one prefix, such as
`net.module.`. A prefix consists of keys of the file and prefixes of wrappers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from rayfed.core.files import local_path
from rayfed.errors import UserError
from rayfed.models.notes import note
from rayfed.models.trained import head_names
from rayfed.models.weight_files import Keys, Stored, WeightFile, read
from rayfed.update import Named, list_nonfinite

_WRAPPERS = ("module", "_orig_mod")
"""Names under which nn.DataParallel and torch.compile keep the wrapped model."""
_KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "params", "weights", "state")
"""Keys under which training scripts keep the weights. If several sets of weights fit, the first key is preferred."""
_COUNTER = "num_batches_tracked"
"""Buffer of a batch norm that older files lack, and that only a norm without momentum reads."""
_SHOWN = 4


@dataclass(frozen=True)
class _Model:
    """The tensors of a model, for comparison with a file."""

    tensors: Named
    head: frozenset[str]


@dataclass(frozen=True)
class _Set:
    """Some of a file's tensors, by the model's names."""

    model: _Model
    prefix: str
    """Prefix, without its final dot, of the model's names in the file; for tensors matched by order, the path of "
    "their mapping."""
    tensors: Named
    spare: Named
    """Tensors in the same mappings that are not in the model."""
    by_order: bool = False

    @property
    def misshapen(self) -> set[str]:
        """Return the names of the tensors that have another shape in the model."""
        return {name for name, tensor in self.tensors.items() if self.model.tensors[name].shape != tensor.shape}

    @property
    def missing(self) -> set[str]:
        """Return the names of required tensors of the model that the file lacks, without counters and tied weights."""
        own = self.model.tensors
        given = {(own[name].data_ptr(), own[name].shape) for name in self.tensors if own[name].numel()}
        absent = (name for name in own.keys() - self.tensors.keys() if not name.endswith(_COUNTER))
        return {name for name in absent if (own[name].data_ptr(), own[name].shape) not in given}

    @property
    def taken(self) -> Named:
        """Return the tensors that are loaded into the model."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.misshapen}

    @property
    def fits(self) -> bool:
        """Return whether the set has all of the model's tensors, except those of the head."""
        return not (self.missing | self.misshapen) - self.model.head and any(
            not name.endswith(_COUNTER) for name in self.taken
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Return the rank among sets that fit: the fewest keys first, then the order of `_KEYS`."""
        keys = [key for key in self.prefix.split(".") if key and key not in _WRAPPERS]
        return tuple(_KEYS.index(key) if key in _KEYS else len(_KEYS) for key in keys)


def load_state(model: nn.Module, path: str | Path) -> None:
    """Load the weights in a file into a model, in place.

    Tensors are matched by name, after a prefix if there is one. If no name in the file is one of the model's, they are
    matched by order, provided that all last names and shapes agree. A head of another size stays as initialised. Notes
    on the model report this, tensors that are ignored, and which set of weights is used if several fit. Raises
    `UserError` for a file that cannot be read, that lacks other tensors, or in which several sets have equal rank.
    """
    file = read(local_path(path), "model.state")
    own = _Model(_tensors_of(model), head_names(model))
    sets = [list(_by_name(file, own, without)) for without in ((), _WRAPPERS)]
    fitting = next(filter(None, ([one for one in some if one.fits] for some in (*sets, _by_order(file, own)))), [])
    if not fitting:
        closest = _closest([*sets[0], *sets[1]])
        if (renamed := _renamed(model, file, own, closest)) is None:
            raise UserError(_misfit(file, own, closest))
        fitting = [renamed]
    found, remarks = _chosen(file, fitting)
    for remark in (*remarks, *_differences(file, found)):
        note(model, remark)
    typed = {name: tensor.to(own.tensors[name].dtype) for name, tensor in found.taken.items()}
    check_finite(file.file, typed, own.tensors)
    model.load_state_dict(found.taken, strict=False)


def state_for(model: nn.Module, path: Path, field: str) -> tuple[Named, list[str]]:
    """Return a file's tensors by a model's names, whether they fit or not, and remarks on other sets of weights.

    The result is the set with most of the model's tensors, together with the other tensors of its mapping. If there is
    no such set, it is all tensors by their own names. `field` is the option with which the user named the file. Raises
    `UserError` as `load_state` does if the file cannot be read, or if several sets have equal rank.
    """
    file = read(path, field)
    own = _Model(_tensors_of(model), frozenset())
    sets = [one for without in ((), _WRAPPERS) for one in _by_name(file, own, without)]
    most = max((len(one.taken) for one in sets), default=0)
    if not most:
        return {stored.path: stored.tensor for stored in file.tensors}, []
    found, remarks = _chosen(file, [one for one in sets if len(one.taken) == most])
    if found.prefix:
        remarks.append(f"{path.name}: the prefix '{found.prefix}.' is removed from the tensors' names")
    return {**found.spare, **found.tensors}, remarks


def check_finite(where: object, tensors: Named, own: Named | None = None) -> None:
    """Raise `UserError` for tensors with NaN or infinite values, unless the model has the same values.

    `where` is their origin, such as a file.
    """
    if bad := list_nonfinite(tensors, own):
        others = f", as do {len(bad) - 1} other tensors" if len(bad) > 1 else ""
        raise UserError(
            f"{where}: '{bad[0]}' has NaN or infinite values{others}. If the weights are from a training, it has "
            "diverged: use weights from an earlier epoch"
        )


def _tensors_of(model: nn.Module) -> Named:
    """Return the tensors of a model's state, without other values such as those of `get_extra_state`."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def _by_name(file: WeightFile, own: _Model, without: Collection[str]) -> Iterator[_Set]:
    """Yield a set per prefix after which tensors have names of the model; both are compared `without` wrappers."""
    names = {_inner(name, without): name for name in own.tensors}
    if len(names) < len(own.tensors):
        return  # two of the model's names differ in a wrapper only
    found = dict[str, dict[str, Stored]]()
    for stored in file.tensors:
        parts = stored.path.split(".")
        for cut, part in enumerate(parts):
            name = names.get(_inner(".".join(parts[cut:]), without))
            if name is not None and part not in without:
                found.setdefault(".".join(parts[:cut]), {}).setdefault(name, stored)
    for prefix, given in found.items():
        places, taken = {one.place for one in given.values()}, {one.path for one in given.values()}
        spare = {one.name: one.tensor for one in file.tensors if one.place in places and one.path not in taken}
        yield _Set(own, prefix, {name: one.tensor for name, one in given.items()}, spare)


def _inner(path: str, wrappers: Collection[str]) -> str:
    """Return a name without its wrappers."""
    return ".".join(part for part in path.split(".") if part not in wrappers)


def _by_order(file: WeightFile, own: _Model) -> Iterator[_Set]:
    """Yield a set per mapping whose tensors match the model's in order, by last names and shapes."""
    whole = list(own.tensors)
    short = [name for name in whole if not name.endswith(_COUNTER)]
    inner = {_inner(name, _WRAPPERS) for name in whole}
    groups = dict[Keys, list[Stored]]()
    for stored in file.tensors:
        groups.setdefault(stored.place, []).append(stored)
    for place, given in groups.items():
        if inner & {_inner(one.name, _WRAPPERS) for one in given}:
            continue  # matching by order needs all names to differ
        if file.unnamed:
            names = next((names for names in (whole, short) if len(names) == len(given)), [])
        else:
            given = [one for one in given if not one.name.endswith(_COUNTER)]
            ends = [one.name.rpartition(".")[2] for one in given]
            names = short if ends == [name.rpartition(".")[2] for name in short] else []
        if names:
            tensors = {name: one.tensor for name, one in zip(names, given, strict=True)}
            yield _Set(own, ".".join(place), tensors, {}, by_order=True)


def _renamed(model: nn.Module, file: WeightFile, own: _Model, closest: _Set | None) -> _Set | None:
    """Return a set whose names the model's own modules know from earlier versions; None if they do not.

    Examples are the names of `torch.nn.utils.weight_norm`, and of some models of torchvision. The set is then already
    loaded into the model.
    """
    prefix = f"{closest.prefix}." if closest and closest.prefix else ""
    given = {one.path.removeprefix(prefix): one.tensor for one in file.tensors if one.path.startswith(prefix)}
    fitting = {n: t for n, t in given.items() if n not in own.head or t.shape == own.tensors[n].shape}
    try:
        result = model.load_state_dict(fitting, strict=False)
    except RuntimeError:  # a tensor of another shape
        return None
    absent = {name for name in result.missing_keys if not name.endswith(_COUNTER)}
    unknown = set(result.unexpected_keys)
    if absent - own.head or len(unknown) == len(fitting):
        return None
    loaded = {name: tensor.clone() for name, tensor in own.tensors.items() if name not in result.missing_keys}
    return _Set(own, prefix, loaded, {name: given[name] for name in unknown})


def _closest(sets: Sequence[_Set]) -> _Set | None:
    """Return the set with most of the model's tensors; None if there is none."""
    return min(sets, key=lambda one: (-len(one.taken), one.rank), default=None)


def _chosen(file: WeightFile, fitting: Sequence[_Set]) -> tuple[_Set, list[str]]:
    """Return the set to load, and a remark if other ones fit; raise `UserError` if several have equal rank."""
    whole = [one for one in fitting if not one.missing | one.misshapen] or fitting
    first = min(whole, key=lambda one: one.rank)
    others = [one for one in whole if one is not first and not _same(one, first)]
    if not others:
        return first, []
    names, how = ", ".join(f"'{one.prefix}'" for one in others), "write that set to a separate file"
    if (key := others[0].prefix) in file.entries and file.file.suffix not in (".npz", ".safetensors"):
        how += f", such as `torch.save(torch.load('{file.file.name}')['{key}'], '{key}.pt')`"
    if any(one.rank == first.rank for one in others):
        raise UserError(
            f"{file.file} has {len(others) + 1} sets of weights that fit the model: '{first.prefix}', {names}. To "
            f"choose a set, {how}"
        )
    return first, [
        f"{file.file.name} has {len(others) + 1} sets of weights that fit: '{first.prefix}', which is used, and "
        f"{names}. To use another set, {how}"
    ]


def _same(one: _Set, other: _Set) -> bool:
    return one.taken.keys() == other.taken.keys() and all(one.taken[n].equal(t) for n, t in other.taken.items())


def _differences(file: WeightFile, found: _Set) -> Iterator[str]:
    """Yield remarks on tensors that were matched by order, initialised anew or ignored."""
    name, own = file.file.name, found.model.tensors
    if found.by_order:
        yield f"the names in {name} differ from the model's names: {len(found.tensors)} tensors were matched by order"
    if anew := (found.missing | found.misshapen) & found.model.head:
        yield f"the head is initialised anew, because it has other shapes in {name}: {_some(anew, own, found.tensors)}"
    if spare := found.spare:
        yield f"{len(spare)} tensors in {name} are not in the model and are ignored: {_some(spare, {}, spare)}"


def _misfit(file: WeightFile, own: _Model, found: _Set | None) -> str:
    """Return why a file does not fit a model: the differences of the closest set, and the file's keys."""
    if found is None:
        stored = {one.path: one.tensor for one in file.tensors}
        return (
            f"{file.file} does not fit the model: none of its {len(stored)} names ({_some(stored, {}, stored)}) is "
            "among those "
            f"of the model's {len(own.tensors)} ({_some(own.tensors, own.tensors, {})}), and number or shapes in order "
            f"differ, too. Check the architecture. The file has {file.listed}"
        )
    parts = [
        f"{len(names)} {what}: {_some(names, own.tensors, found.tensors)}"
        for what, names in (("missing", found.missing - own.head), ("with another shape", found.misshapen - own.head))
        if names
    ]
    if not parts:  # all tensors are of the head, with other shapes
        parts = [f"none fits: {_some(own.head, own.tensors, found.tensors)}"]
    if found.spare:
        parts.append(f"{len(found.spare)} unexpected: {_some(found.spare, {}, found.spare)}")
    where = f". '{found.prefix}' is the closest set" if found.prefix else ""
    return (
        f"{file.file} does not fit the model{where}: of the model's {len(own.tensors)} tensors, {'; '.join(parts)}. "
        f"The file has {file.listed}"
    )


def _some(names: Collection[str], own: Named, given: Named) -> str:
    """Format a few names with their shapes in the model and in the file."""

    def shaped(name: str) -> str:
        shapes = [tuple(tensors[name].shape) for tensors in (own, given) if name in tensors]
        return f"{name} {' and not '.join(map(str, dict.fromkeys(shapes)))}"

    ordered = [name for tensors in (own, given) for name in tensors if name in names]
    shown = list(dict.fromkeys(ordered))
    return ", ".join(map(shaped, shown[:_SHOWN])) + (", ..." if len(shown) > _SHOWN else "")
