"""Measure the memory that computations need, and split them into smaller batches if GPU memory is too small."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfed.core.simulated_gpus import simulated_gpus
from rayfed.errors import ResourceError

Result = TypeVar("Result")

_NOTES: list[str] = []
"""Messages of this process that `take_notes` has not returned yet."""

_WHOLE: ContextVar[bool] = ContextVar("whole", default=False)


class Fitting:
    """Batch size that is halved if GPU memory runs out, and then kept for later calls."""

    def __init__(self) -> None:
        self.most: float = inf
        self.each: int | None = None
        """Bytes that one item needs (`measure_most_held`). None: not measured."""

    def in_parts(
        self, work: Callable[[slice], Result], count: int, what: str, together: int | None = None
    ) -> Iterator[Result]:
        """Yield the results of `work` on consecutive slices of `count` items, with at most `together` items per slice.

        If memory does not suffice for a slice, it is halved and repeated, so `work` must have no effect before it
        returns. An item's result is the same up to rounding, as kernels depend on the batch size.
        Raises `torch.OutOfMemoryError` if a single item is too large.
        """
        done = 0
        while done < count:
            size = int(min(self.most, together or count))
            fits, made = self._tried(work, slice(done, min(done + size, count)), what)
            if fits:
                done += size
                yield made  # type: ignore[misc]

    def _tried(self, work: Callable[[slice], Result], part: slice, what: str) -> tuple[bool, Result | None]:
        """Return whether memory suffices for a slice, and its result. Halve the batch size if it does not."""
        size: int = part.stop - part.start
        try:
            return True, work(part)
        except torch.OutOfMemoryError:
            if size == 1 or _WHOLE.get():
                raise
        # Outside of `except`, because the error's traceback keeps tensors alive that have to be freed.
        self.most = size // 2
        give_back_cache()
        _NOTES.append(
            f"GPU memory does not suffice for {size} {what}: computing at most {self.most} together. This can "
            "change the last bits of results"
        )
        return False, None


@contextmanager
def forbid_halving() -> Iterator[None]:
    """Disable the halving of batches in the block: raise `torch.OutOfMemoryError` instead."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def measure_most_held(work: Callable[[], object]) -> int:
    """Return the peak size in bytes of the tensors that the function `work` creates and holds at the same time.

    The number depends on the operations only, not on the machine, so results may depend on it. Temporary memory inside
    kernels is not counted.
    """
    collecting = gc.isenabled()
    gc.disable()  # the time of a collection depends on earlier work of the process
    held = _Held()  # type: ignore[no-untyped-call]
    try:
        with held:
            work()
    finally:
        if collecting:
            gc.enable()
    return held.most


class _Held(TorchDispatchMode):
    """Count the bytes of tensors that operations make, as long as a variable or a graph holds them.

    `saved_tensors_hooks` would be simpler, but `torch.func.grad` does not support them.
    """

    supports_higher_order_operators = True  # such as torch.cond in a model; its result is counted
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
    return {leaf.untyped_storage() for leaf in leaves if leaf.layout is torch.strided}  # other layouts have no storage


def take_notes() -> list[str]:
    """Return this process's messages about insufficient memory since the last call of `take_notes`."""
    taken = list(_NOTES)
    _NOTES.clear()
    return taken


class Peak(NamedTuple):
    """Peak GPU memory of a process, and memory of the GPU, in bytes."""

    tensors: int
    """Maximum so far of tensors and PyTorch's cache."""
    others: int
    """Memory of other processes."""
    total: int
    """Memory of the GPU."""

    @property
    def took(self) -> int:
        """Return the GPU memory of the whole process in bytes: tensors, cache and CUDA context.

        It is at most what other processes leave free, because the process did fit, and its context is an assumption.
        """
        return min(CONTEXT + self.tensors, self.total - self.others)

    @property
    def together(self) -> int:
        """Return the number of processes of this size that fit into the GPU memory which other processes leave free."""
        return (self.total - self.others) // self.took


def find_largest_peak(peaks: Iterable[Peak | None]) -> Peak | None:
    """Return the peak of the process that took most; None (unknown) if any is unknown, or if there are none."""
    found = list(peaks)
    known = [peak for peak in found if peak is not None]
    return max(known, key=lambda peak: peak.took) if known and len(known) == len(found) else None


SIMULATED_PEAK = Peak(tensors=3 * 2**29, others=0, total=2**34)
"""Peak of an actor on a simulated GPU: 2 of 16 GiB."""


def peak() -> Peak:
    """Return the peak GPU memory of this process so far."""
    if simulated_gpus():
        return SIMULATED_PEAK
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved() - CONTEXT
    return Peak(torch.cuda.max_memory_reserved(), max(others, 0), total)


CONTEXT = 2**29
"""Bytes assumed for a process's CUDA context, whose real size cannot be measured next to other processes."""


def keep_within(share: float) -> None:
    """Limit this process to a share (0 to 1) of the GPU's memory, including the process's CUDA context.

    PyTorch limits only tensors, so they get the share minus the context, but at least half of the share. The limit does
    not depend on other processes.
    """
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(max(share / 2, share - CONTEXT / total))


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, without autograd history.

    Values from a GPU go to pinned memory, which PyTorch reuses. Copies to new memory that is not pinned are many times
    slower.
    """
    here = tensor.detach().to("cpu", non_blocking=True)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # wait for the copy
    return here


def give_back_cache() -> None:
    """Free PyTorch's cache of GPU memory for other processes."""
    torch.cuda.empty_cache()


def more_memory(kind: Literal["clients", "attackers"]) -> str:
    """Return advice, in words, on how to avoid that clients or attackers run out of GPU memory."""
    lower = "training.batch_size" if kind == "clients" else "the attack's batch_size or restarts"
    return f"increase the share of a GPU per actor (resources.{kind}.num_gpus), or lower {lower}"


@contextmanager
def explain_memory_errors(kind: Literal["clients", "attackers"]) -> Iterator[None]:
    """Raise `ResourceError` with advice if clients or attackers run out of GPU memory in the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"not enough GPU memory for {kind}, even one at a time: {error}; {more_memory(kind)}. "
            f"Finished rounds are kept: continue with `rayfed resume`"
        ) from error
