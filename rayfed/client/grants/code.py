"""The victim's update with all taken off again that its defences put on everybody's: their code is known.

An attacker with the code runs it at his side, for the victim's number and round, on gradients of his own choice and
with randomness of his own. What comes out alike each time is no secret: an offset (noise from a seed that can be
guessed, or drawn once), or the order into which values are put. Of an offset that is random in a few directions alone
the attacker estimates how far it goes: a gradient has many values near zero, so the smallest absolute deviations count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component
from rayfed.update import UNREHEARSED

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.defences.base import Batch, Task
    from rayfed.update import Named, Update

_DRAWS = 4
"""Answers to a gradient of zeros, in whose differences random directions show."""
_MOST_DRAWS, _HELD = 64, 2**22
"""Most answers that are drawn while each of them shows a new direction, and values in them all."""
_REWEIGHTED = 60
_UNREHEARSED = f"{UNREHEARSED} ({{}}: {{}}): nothing known by their code was taken off"


@dataclass(frozen=True)
class Undo:
    """Takes off an update what its defences are known to put on; without the parts that they do not have."""

    offset: Tensor | None = None
    """(D,), what is added to every update."""
    directions: Tensor | None = None
    """(D, R) orthonormal, in which something random is added."""
    order: Tensor | None = None
    """(D,) int64, the place from which each value comes."""

    @property
    def known(self) -> bool:
        """Whether there is anything to take off."""
        return any(part is not None for part in (self.offset, self.directions, self.order))

    def __call__(self, update: Update) -> Named:
        """Return the tensors of an update as they were before."""
        import torch

        from rayfed.gradients import flatten, unflatten

        values = flatten(update.tensors)
        if self.offset is not None:
            values = values - self.offset.to(values)
        if self.directions is not None:
            values = values - self.directions.to(values) @ _least_absolute(self.directions.to(values), values)
        if self.order is not None:
            values = torch.empty_like(values).scatter(0, self.order.to(values.device), values)
        return unflatten(values, update.tensors)


@component
class KnownCode(Grant):
    """What the defences add to everybody's update, or how they put its values in order, undone.

    It follows from their code, run with other randomness than the victim's; nothing of the victim's data is in it.
    """

    describe: ClassVar[str] = "the defence's code"
    fills: ClassVar[tuple[str, ...]] = ("undone",)

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the tensors undone; where the attacker sees no value, how they follow from an opened update.

        None where there is nothing to take off; where the defences fail on what an attacker has, why, in words.
        """
        if not observed.arm.defences or observed.arm.private:
            return {"undone": None}
        try:
            undo = _rehearsed(observed)
        except Exception as error:  # a defence may ask for what this attacker does not have; its rows say so
            return {"undone": _UNREHEARSED.format(type(error).__name__, str(error).partition("\n")[0])}
        if not undo.known:
            return {"undone": None}
        return {"undone": undo(update) if update.tensors else undo}


def _rehearsed(observed: ObservedClient) -> Undo:
    """Return what is found out by running the defences on gradients of one's own."""
    import torch

    answers = torch.stack([_answer(observed, None, seed) for seed in range(_DRAWS)])
    if not answers.isfinite().all():
        raise ArithmeticError("they make of zeros what is not finite")
    if (answers - answers[0]).abs().max() > 1e-6 * answers.abs().max():
        return Undo(directions=_random_directions(observed, answers))
    offset = answers[0] if _holds(observed, answers[0]) else torch.zeros_like(answers[0])
    order = _order(*(_tried(observed, offset, seed) for seed in (1, 2)))
    return Undo(offset=offset if offset.any() else None, order=order)


def _random_directions(observed: ObservedClient, answers: Tensor) -> Tensor | None:
    """Return the directions (D, R) that no further answer to zeros leaves; None where there are too many to tell."""
    import torch

    width = answers.shape[1]
    most = max(len(answers), min(_MOST_DRAWS, _HELD // width, width))
    while (found := _few_directions(answers)) is None and len(answers) < most:
        more = range(len(answers), min(2 * len(answers), most))
        answers = torch.cat([answers, *(_answer(observed, None, seed)[None] for seed in more)])
    return found


def _holds(observed: ObservedClient, offset: Tensor) -> bool:
    """Return whether less than before is left without the offset of what a gradient and its opposite have in common."""
    import torch

    given = torch.randn(len(offset), generator=torch.Generator().manual_seed(0)).to(offset)
    common = (_answer(observed, given, 0) + _answer(observed, -given, 0)) / 2
    return bool((common - offset).norm() < common.norm())


def _answer(observed: ObservedClient, gradient: Tensor | None, seed: int) -> Tensor:
    """Return what the defences make of a gradient, by default zeros, (D,): for the victim's number, of no data."""
    import torch

    from rayfed.client.local import gradient_method, wrap_updates
    from rayfed.gradients import flatten, unflatten
    from rayfed.update import Update

    task, defences = _own_task(observed, seed), observed.arm.defences
    chosen = torch.zeros_like(flatten(task.weights)) if gradient is None else gradient

    def sent(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
        return unflatten(chosen.clone(), weights), torch.zeros(())

    def update(task: Task) -> Update:
        tensors, _ = gradient_method(defences if observed.training.algorithm == "fedsgd" else (), sent)(
            task, task.weights, task.data
        )
        return Update(observed.client, observed.round, tensors, {}, len(task.data.labels), loss=0.0)

    return flatten(wrap_updates(update, defences)(task).tensors)


def _own_task(observed: ObservedClient, seed: int) -> Task:
    """Return the victim's task with blank samples and randomness of one's own, without its state.

    There are public samples where the attacker is granted them, and others of the client where only a batch is asked.
    """
    import torch

    from rayfed import seeds
    from rayfed.defences.base import Batch

    asked, samples, generator = observed.asked(), len(observed.indices), torch.Generator().manual_seed(seed)
    device = asked.data.labels.device
    blank = Batch(
        observed.runtime.data.sample.blank(2 * samples).to(device),
        torch.zeros(2 * samples, dtype=torch.int64, device=device),
        places=torch.arange(2 * samples, device=device),
    )
    own, others = (blank.rows(places) for places in torch.arange(2 * samples, device=device).split(samples))
    return asked.replace(
        data=own,
        others=None if observed.attack.view.of_round else others,
        generator=generator,
        order=int.from_bytes(seeds.drawn(generator)),
        public=asked.public if "public" in observed.attack.grants else None,
        state={},
    )


def _tried(observed: ObservedClient, offset: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return a random gradient (D,), and what becomes of it beside the offset."""
    import torch

    given = torch.randn(len(offset), generator=torch.Generator().manual_seed(seed)).to(offset)
    return given, _answer(observed, given, seed) - offset


def _order(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor | None:
    """Return from which place each value comes, (D,), found on one gradient and checked on another; None if in place.

    The values may come back larger or smaller, all alike.
    """
    import torch

    (given, back), (again, then) = first, second
    order = torch.empty_like(back.argsort())
    order[back.argsort()] = given.argsort()
    moved = again[order]
    same = torch.allclose(then / then.norm(), moved / moved.norm(), rtol=1e-3, atol=1e-6 / len(moved) ** 0.5)
    return order if same and not torch.equal(order, order.sort().values) else None


def _few_directions(answers: Tensor) -> Tensor | None:
    """Return the directions (D, R) in which answers (M, D) to zeros lie, where these are fewer than the answers.

    Values that are random each by itself are left as they are: no other value tells what was added to them.
    """
    import torch

    _, sizes, directions = torch.linalg.svd(answers.double(), full_matrices=False)
    rank = int((sizes > 1e-6 * sizes[0]).sum())
    if rank == len(answers):
        return None
    shared = directions[:rank].square().sum(0) < 0.5
    if shared.all():
        found: Tensor = directions[:rank].T
        return found
    return _few_directions(answers * shared) if (answers * shared).any() else None


def _least_absolute(directions: Tensor, values: Tensor) -> Tensor:
    """Return the coefficients (R,) for which `directions` leave the smallest absolute sum of `values`, reweighted."""
    import torch

    coefficients = directions.T @ values
    for _ in range(_REWEIGHTED):
        weights = 1 / (values - directions @ coefficients).abs().clamp(min=1e-9 * float(values.abs().max()))
        normal = (directions * weights[:, None]).T
        coefficients = torch.linalg.solve(normal @ directions, normal @ values)
    return coefficients
