"""Memory: what work takes of it, and fewer things together where that of a GPU does not suffice, with a note."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfed.errors import ResourceError
from rayfed.simulated_gpus import simulated_gpus

Result = TypeVar("Result")

_NOTES: list[str] = []
"""Messages of this process that nobody has taken."""

_WHOLE: ContextVar[bool] = ContextVar("whole", default=False)


class Fitting:
    """Batch size that halves when memory runs out, kept for later calls."""

    def __init__(self) -> None:
        self.most: float = inf
        self.each: int | None = None
        """Bytes that one takes alone (`most_held`); None: not measured."""

    def in_parts(
        self, work: Callable[[slice], Result], count: int, what: str, together: int | None = None
    ) -> Iterator[Result]:
        """Yield what `work` makes of consecutive parts of `count` things, `together` (by default all) at a time.

        A part for which memory does not suffice is done again in halves; `work` has no effects before it returns.
        What it makes of a thing is the same up to rounding: kernels differ by how many go together.
        Raises `torch.OutOfMemoryError` where one thing alone is too large.
        """
        done = 0
        while done < count:
            size = int(min(self.most, together or count))
            fits, made = self._tried(work, slice(done, min(done + size, count)), what)
            if fits:
                done += size
                yield made  # type: ignore[misc]

    def _tried(self, work: Callable[[slice], Result], part: slice, what: str) -> tuple[bool, Result | None]:
        """Return whether memory suffices for a part, and its result; halve the batch size if it does not."""
        size: int = part.stop - part.start
        try:
            return True, work(part)
        except torch.OutOfMemoryError:
            if size == 1 or _WHOLE.get():
                raise
        # Here and not above: the error's traceback holds the tensors that are to be freed.
        self.most = size // 2
        give_back_cache()
        _NOTES.append(
            f"GPU memory does not suffice for {size} {what}: no more than {self.most} go together, which can change "
            "the last bits of what they find"
        )
        return False, None


@contextmanager
def undivided() -> Iterator[None]:
    """Raise in the block where memory does not suffice: nothing is done in halves, and no batch size changes."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def most_held(work: Callable[[], object]) -> int:
    """Return the most bytes that tensors which `work` makes take at a time.

    They follow from the operations, whatever the machine is and whatever else it does, so results may depend on them.
    What kernels need inside of them is left out.
    """
    collecting = gc.isenabled()
    gc.disable()  # when it would free circles depends on what the process did before
    held = _Held()  # type: ignore[no-untyped-call]
    try:
        with held:
            work()
    finally:
        if collecting:
            gc.enable()
    return held.most


class _Held(TorchDispatchMode):
    """Counts the bytes of what operations make for as long as anything holds it, graphs among them.

    `saved_tensors_hooks` would be simpler, but `torch.func.grad` refuses them.
    """

    supports_higher_order_operators = True  # as a model's torch.cond, of which the result counts
    _now = most = 0

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        for storage in _storages(made) - _storages((args, kwargs)):
            size = storage.nbytes()
            self._add(size)
            finalize(storage, self._add, -size)
        return made

    def _add(self, size: int) -> None:
        self._now += size
        self.most = max(self.most, self._now)


def _storages(tensors: object) -> set[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
    return {leaf.untyped_storage() for leaf in leaves if leaf.layout is torch.strided}  # others have none


def take_notes() -> list[str]:
    """Return this process's messages about memory since the last call."""
    taken = list(_NOTES)
    _NOTES.clear()
    return taken


class Peak(NamedTuple):
    """Most GPU memory of a process so far, in bytes."""

    tensors: int
    """Of tensors, with the cache that PyTorch keeps for them."""
    others: int
    """That other processes have, as far as it is more than this one's `CONTEXT`."""
    total: int
    """That the GPU has."""

    @property
    def took(self) -> int:
        """Bytes of the whole process."""
        return CONTEXT + self.tensors

    @property
    def together(self) -> int:
        """Number of such processes for which the GPU has room beside the others; 0 where it has for none."""
        return (self.total - self.others) // self.took


SIMULATED_PEAK = Peak(tensors=3 * 2**29, others=0, total=2**34)
"""Peak of an actor on a simulated GPU: 2 of 16 GiB."""


def peak() -> Peak:
    """Return the most memory that this process has had of its GPU."""
    if simulated_gpus():
        return SIMULATED_PEAK
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved() - CONTEXT
    return Peak(torch.cuda.max_memory_reserved(), max(others, 0), total)


CONTEXT = 2**29
"""Bytes that are left to a process's CUDA context: what it really has cannot be told from what other processes have."""


def keep_within(share: float) -> None:
    """Hold this process to a share of its GPU's memory, of which its CUDA context is a part.

    PyTorch bounds its tensors alone: as many processes as there are shares would need more than the GPU has. The bound
    is the same whichever processes were there before, and half of the share at least.
    """
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(max(share / 2, share - CONTEXT / total))


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor's values in the memory of the CPU, without autograd history.

    Off a GPU they go into pinned memory, which PyTorch keeps for the next: 0.8 ms for 44 MB on an H200, where memory
    that is new and not pinned took 28.
    """
    here = tensor.detach().to("cpu", non_blocking=True)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # before that they are not there
    return here


def give_back_cache() -> None:
    """Return the memory that PyTorch keeps for later tensors to the GPU, where other processes may need it."""
    torch.cuda.empty_cache()


def more_memory(kind: Literal["clients", "attackers"]) -> str:
    """Return what to do where GPU memory does not suffice for the work of such actors."""
    lower = "training.batch_size" if kind == "clients" else "the attack's batch_size or restarts"
    return f"give each a larger share (resources.{kind}.num_gpus), or lower {lower}"


@contextmanager
def explaining(kind: Literal["clients", "attackers"]) -> Iterator[None]:
    """Turn an `OutOfMemoryError` in the work of such actors into a `ResourceError` that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"GPU memory does not suffice for the work of {kind}, however little of it goes together: {error}; "
            f"{more_memory(kind)}; complete rounds are kept and `rayfed resume` goes on from there"
        ) from error
