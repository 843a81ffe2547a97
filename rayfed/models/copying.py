"""Copying of models, including users' models that `copy.deepcopy` refuses or copies only partly.

A module may keep a computed tensor after its forward pass, such as stored features or the weight of
`torch.nn.utils.weight_norm`. It may also have a lock or an open file. `copy.deepcopy` raises on all of these. It also
shares functions, so a copied hook that is a lambda would still write to the original module.
"""

from __future__ import annotations

import copy
import copyreg
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rayfed.errors import UserError

Model = TypeVar("Model", bound=nn.Module)
_LOCKS: Mapping[type, Callable[[], Any]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
}
_ATOMS = (str, bytes, int, float, complex, type, types.FunctionType, types.BuiltinFunctionType, weakref.ref)
"""Types that `copy.deepcopy` shares, without examining their parts."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
_REFERRING = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial, weakref.ref, *_CONTAINERS)
"""Types whose values may refer to a module without being part of it."""


def copy_model(model: Model) -> Model:
    """Return a copy of a model that shares no tensor and no module with the original.

    Computed tensors are copied without their graph. Hooks and other functions that refer to the model's modules,
    including bound methods and closures, refer to those of the copy. Locks are replaced by new ones. Objects that
    cannot be copied and have no tensor (`shared_parts`) are shared. Raises `UserError` if another part cannot be
    copied.

    >>> import torch
    >>> from rayfed.models.copying import copy_model
    >>> model = torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
    >>> copied = copy_model(model)
    >>> copied.weight_g is model.weight_g
    False
    """
    try:
        return _copied(model, {})
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # a user's object may raise any type
        obstacles = _Obstacles(model)
    try:
        return _copied(model, obstacles.memo)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(
            f"{obstacles.refused or _refusing(model)} cannot be copied ({reason}), but attacks need copies of the "
            f"model: keep only tensors, modules and plain values as attributes"
        ) from error


def shared_parts(model: nn.Module) -> list[str]:
    """Return the attributes that a model shares with its copies, such as an open file: names and types."""
    return _Obstacles(model).shared


def _copied(model: Model, memo: dict[int, Any]) -> Model:
    with _ComputedTensors():
        made = copy.deepcopy(model, memo)
        _Rebinding(memo).rebind()
    return made


def _refusing(model: nn.Module) -> str:
    """Return a description of the innermost module that cannot be copied."""
    for path, module in reversed(list(model.named_modules())):
        try:
            _copied(module, _Obstacles(module).memo)
        except Exception:  # as in `copy_model`
            return f"the model's module '{path}' ({type(module).__name__})" if path else f"a {type(module).__name__}"
    return f"a {type(model).__name__}"


class _ComputedTensors(TorchFunctionMode):
    """Mode in which `copy.deepcopy` copies the values of computed tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Copy a tensor that has a graph, or that `vmap` or `grad` wrapped in an earlier call."""
        if func is Tensor.__deepcopy__ and (value := _computed(args[0])) is not None:
            return value
        return func(*args, **(kwargs or {}))


def _computed(tensor: Tensor) -> Tensor | None:
    """Return a copy of a computed tensor's values; None for other tensors."""
    inner = tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    return None if inner is tensor and tensor.is_leaf else inner.detach().clone()


class _Obstacles:
    """The objects in a model's attributes that `copy.deepcopy` refuses, found by following its steps."""

    def __init__(self, model: nn.Module) -> None:
        self.memo: dict[int, Any] = {}
        """Replacements by identity, for `copy.deepcopy`: new locks, and the shared objects themselves."""
        self.shared: list[str] = []
        self.refused = ""
        """The first attribute that cannot be copied and has tensors or modules."""
        self._seen: dict[int, tuple[bool, bool]] = {}
        self._kept: list[Any] = []
        """Temporary objects of `__reduce_ex__`, kept so that no identity is reused."""
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                self._attribute = f"{path}.{name}".lstrip(".")
                fails, holds = self._examine(value)
                if fails and not holds:
                    self._share(value)
                elif fails and not self.refused:
                    self.refused = f"the model's attribute '{self._attribute}' ({type(value).__name__})"

    def _examine(self, value: Any) -> tuple[bool, bool]:
        """Return whether a value cannot be copied, and whether it has tensors or modules.

        Containers and objects with tensors are copied, and share only the parts that cannot be copied. Other objects
        are shared as a whole: a copy of a writer without its thread would wait for ever.
        """
        if value is None or isinstance(value, _ATOMS):
            return False, False
        if isinstance(value, Tensor | nn.Module):
            return False, True
        if type(value) in _LOCKS:
            self.memo.setdefault(id(value), _LOCKS[type(value)]())
            return False, False
        if id(value) not in self._seen:
            self._kept.append(value)
            self._seen[id(value)] = False, False  # until its parts, which may refer to it, are examined
            self._seen[id(value)] = self._examine_parts(value)
        return self._seen[id(value)]

    def _examine_parts(self, value: Any) -> tuple[bool, bool]:
        refused, parts = _parts(value)
        found = [(part, *self._examine(part)) for part in parts]
        failing = [part for part, fails, holds in found if fails and not holds]
        holds = any(holds for _, _, holds in found)
        if refused or not (holds or isinstance(value, _CONTAINERS)):
            return refused or any(fails for _, fails, _ in found), holds
        for part in failing:
            self._share(part)
        return any(fails and holds for _, fails, holds in found), holds

    def _share(self, value: Any) -> None:
        self.memo[id(value)] = value
        self.shared.append(f"{self._attribute} ({type(value).__name__})")


def _parts(value: Any) -> tuple[bool, list[Any]]:
    """Return whether `copy.deepcopy` refuses a value itself, and the objects that it would copy next."""
    if isinstance(value, types.ModuleType):
        return True, []
    attributes = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, threading.Thread):  # a copy would be an object without a thread
        return True, attributes
    if isinstance(value, types.GeneratorType):
        return True, [] if value.gi_frame is None else list(value.gi_frame.f_locals.values())
    if isinstance(value, types.MethodType):
        return False, [value.__self__]
    if isinstance(value, dict):
        return False, [*value.keys(), *value.values(), *attributes]
    if isinstance(value, _CONTAINERS):
        return False, [*value, *attributes]
    try:
        if hasattr(value, "__deepcopy__"):
            copy.deepcopy(value)
            return False, attributes
        reducer = copyreg.dispatch_table.get(type(value))
        reduced = reducer(value) if reducer else value.__reduce_ex__(4)
    except Exception:  # a user's object may raise any type
        return True, attributes
    return False, [] if isinstance(reduced, str) else list(_flattened(reduced[1:]))


def _flattened(reduced: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the arguments, attributes and items in the result of `__reduce_ex__`."""
    for element in reduced:
        if isinstance(element, dict):
            yield from element.values()
        elif isinstance(element, tuple):
            yield from _flattened(element)
        elif isinstance(element, Iterator):
            yield from element
        else:
            yield element


class _Rebinding:
    """Rebind functions and references in a copied model to the copy.

    `copy.deepcopy` shares functions, weak references and methods of built-in types.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        """Copies by the identity of their originals; by the memo's own identity, the originals, which must be kept."""
        self._cells: dict[int, types.CellType] = {}

    def rebind(self) -> None:
        """Replace references to originals in the copies' attributes, dictionaries and lists, in place."""
        done: set[int] = {id(self._memo)}
        while new := [(original, made) for original, made in self._memo.items() if original not in done]:
            for original, made in new:
                done.add(original)
                if id(made) != original:  # shared objects keep what they refer to
                    self._rebind_parts(made)

    def _rebind_parts(self, made: Any) -> None:
        attributes = getattr(made, "__dict__", None)
        for container in (made, attributes):
            if type(container) is list:
                items: list[tuple[Any, Any]] = list(enumerate(container))
            elif isinstance(container, dict):
                items = list(container.items())
            else:
                continue
            for key, value in items:
                if (rebound := self._rebound(value)) is not value:
                    container[key] = rebound

    def _rebound(self, value: Any) -> Any:
        """Return a value that refers to the copy; the value itself if it refers to no original."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if not isinstance(value, _REFERRING) or not self._refers(value, set()):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.BuiltinFunctionType):
            return getattr(self._memo[id(value.__self__)], value.__name__)
        if isinstance(value, weakref.ref):
            return weakref.ref(self._memo[id(value())])
        return copy.deepcopy(value, self._memo)

    def _refers(self, value: Any, seen: set[int]) -> bool:
        """Return whether a value is an original, or refers to one through functions and containers."""
        if id(value) in self._memo:
            return True
        if not isinstance(value, _REFERRING) or id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._refers(part, seen) for part in _references(value))

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """Return a function whose closure and defaults refer to the copy."""
        cells = function.__closure__ or ()
        own = {id(cell): cell for cell in cells if self._refers(_content(cell), set())}
        new = {key: types.CellType() for key in own if key not in self._cells}
        self._cells |= new
        closure = tuple(self._cells[id(cell)] if id(cell) in own else cell for cell in cells)
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        self._memo[id(function)] = made
        made.__defaults__ = self._rebound(function.__defaults__)
        made.__kwdefaults__ = self._rebound(function.__kwdefaults__)
        made.__dict__.update({name: self._rebound(value) for name, value in function.__dict__.items()})
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        for key in new:
            self._cells[key].cell_contents = self._rebound(_content(own[key]))
        return made


def _references(value: Any) -> list[Any]:
    """Return the objects to which a function, method, reference or container refers."""
    if isinstance(value, types.FunctionType):
        contents = [_content(cell) for cell in value.__closure__ or ()]
        return [*contents, value.__defaults__, value.__kwdefaults__, *value.__dict__.values()]
    if isinstance(value, types.BuiltinFunctionType | types.MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    return list(value.values()) if isinstance(value, dict) else list(value)


def _content(cell: types.CellType) -> Any:
    """Return the value in a cell of a closure; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
