"""Grant of the defences' code: the attacker runs it and undoes what it does alike to every update.

An attacker with the code runs it at his side, for the victim's number and round, on gradients of his own choice and
with randomness of his own. What comes out alike each time is no secret: an offset (noise from a seed that can be
guessed, or drawn once), the order into which values are put and the factor by which each is multiplied, or any other
affine map of all of them, rounded or not. Of an offset that is random in a few directions alone the attacker estimates
how far it goes: a gradient has many values near zero, so the smallest absolute deviations count. So where several
values share one random number, whatever the factors. Of masks that cancel in some sums of a layer's rows, or of its
columns, these sums are left. Where signs alone are random, all magnitudes are what is left: those of a product are the
product of the magnitudes.

What the defences make of everybody's samples before training is undone in what an attack has found (`AsTrained`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.defences.base import Batch, Defence, Task
    from rayfed.update import Named, Update

_DRAWS = 4
"""Answers to a gradient of zeros, in whose differences random directions show."""
_MOST_DRAWS, _HELD = 256, 2**22
"""Most answers that are drawn where they differ, and values in them all."""
_MOST_ROWS = 1024
"""Most rows of a tensor of which sums are looked for."""
_REWEIGHTED = 60
_HALVINGS = 100
"""Halvings of the interval in which a value lies."""
_SLIGHT = 1e-2
"""Size of noise beside that of the values below which it is left on them."""
_PROPORTIONAL = 1e-5
"""Relative difference up to which the answers of two values are multiples of each other."""
_SAME = 1e-3
"""Relative error up to which two answers are the same, as they are in 16 bits."""


class Moved(NamedTuple):
    """Map of the values of an update: source index and factor of each."""

    order: Tensor
    """(D,) int64, the place from which each value comes."""
    factor: Tensor
    """(D,), by which it is multiplied; 0 for values that are not sent."""

    def back(self, values: Tensor) -> Tensor:
        """Return values (D,) before the map; unchanged if places that the map leaves empty have values."""
        import torch

        order, factor = self.order.to(values.device), self.factor.to(values)
        sent = factor != 0
        if values[~sent].norm() > _SAME * values.norm():
            return values
        return torch.zeros_like(values).scatter(0, order[sent], values[sent] / factor[sent])


class SharedNoise(NamedTuple):
    """Values to which multiples of the same random number are added."""

    number: Tensor
    """(D,) int64, which of the random numbers."""
    factor: Tensor
    """(D,), the usual size of what is added, with its sign; 0 where a number is shared with no other value."""

    def back(self, values: Tensor) -> Tensor:
        """Return values (D,) less the multiples that leave the smallest absolute sum with each number.

        Where they are next to nothing beside the values, they stay: less would be left without them than with them.
        """
        import torch

        number, factor, precise = self.number.cpu(), self.factor.cpu(), values.double().cpu()
        known = precise.isfinite() & (factor != 0)
        size = precise[known].norm()
        if factor[known].norm() <= _SLIGHT * size:
            return values
        precise, factor = precise.nan_to_num(0, 0, 0), factor * known
        zeros, tiny = precise.new_zeros(int(number.max()) + 1), torch.finfo(torch.float64).tiny
        weights, left = known.double(), precise
        for _ in range(_REWEIGHTED):
            sizes = zeros.scatter_add(0, number, weights * factor * factor)
            found = zeros.scatter_add(0, number, weights * factor * precise) / sizes.clamp(min=tiny)
            left = precise - found[number] * factor
            weights = known / left.abs().clamp(min=max(1e-9 * float(size), tiny))
        return torch.where(known.to(values.device), left.to(values), values)


@dataclass(frozen=True)
class Undo:
    """Removal of known changes that defences make to an update."""

    offset: Tensor | None = None
    """(D,), what is added to every update."""
    directions: Tensor | None = None
    """(D, R) orthonormal, in which something random is added."""
    shared: SharedNoise | None = None
    """Which values share a random number that is added."""
    quiet: Mapping[str, Tensor] = field(default_factory=dict)
    """By tensor (n, ...), the sums of rows (n, q), orthonormal, to which nothing random is added."""
    moved: Moved | None = None
    unsigned: bool = False
    """Whether signs are random, so that magnitudes alone are left."""

    @property
    def known(self) -> bool:
        """Whether any change is known."""
        parts = self.offset, self.directions, self.shared, self.moved
        return self.unsigned or bool(self.quiet) or any(part is not None for part in parts)

    def __call__(self, update: Update) -> Named:
        """Return the tensors of an update before the known changes."""
        from rayfed.gradients import flatten, unflatten

        values = flatten(update.tensors)
        if self.offset is not None:
            values = values - self.offset.to(values)
        if self.directions is not None:
            directions = self.directions.to(values.device).double()
            values = values - (directions @ _least_absolute(directions, values.double())).to(values)
        if self.shared is not None:
            values = self.shared.back(values)
        if self.moved is not None:
            values = self.moved.back(values)
        tensors = unflatten(values.abs() if self.unsigned else values, update.tensors)
        return {name: _kept(tensor, self.quiet.get(name)) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class AsTrained:
    """The defences' map of samples before training, learnt on the attacker's own samples."""

    defences: Sequence[Defence]
    task: Task
    """The victim's, with samples, randomness and state of the attacker's own."""

    def made(self, samples: Tensor, seed: int = 0) -> Tensor:
        """Return the samples that a client with these samples (N, *shape) trains on, after its defences of the data."""
        import torch

        from rayfed.client.local import data_method

        draw, order = torch.Generator().manual_seed(seed), self.task.order + seed
        task = self.task.replace(data=self.task.data._replace(inputs=samples), generator=draw, order=order)
        return data_method(self.defences)(task).inputs

    def back(self, samples: Tensor) -> Tensor:
        """Return the samples that are mapped to these (N, *shape); the same if that cannot be inverted."""
        import torch

        with torch.enable_grad():
            found = _before(lambda values: self.made(values.view_as(samples)).flatten(), samples.flatten(), torch.rand)
        return samples if found is None else found.detach().view_as(samples).clamp(0, 1)


@component
class KnownCode(Grant):
    """The defences' known changes of updates, undone: additive parts, permutations and invertible maps.

    It follows from their code, run with other randomness than the victim's; nothing of the victim's data is in it.
    """

    describe: ClassVar[str] = "the defence's code"
    fills: ClassVar[tuple[str, ...]] = ("undone", "as_trained")

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the update without the defences' known changes, and the map of samples before training.

        Where the attacker sees no value, how they follow from an opened update. None where there is nothing to take
        off; where the defences fail on what an attacker has, or put into an update what no gradient holds, why, in
        words.
        """
        if not observed.arm.defences or observed.arm.private:
            return {"undone": None, "as_trained": None}
        undone, made = _undone(observed, update), None
        try:
            made = _as_trained(observed)
        except Exception as error:  # see `_undone`
            undone = _why(error) if undone is None else undone
        return {"undone": undone, "as_trained": made}


def _undone(observed: ObservedClient, update: Update) -> Named | Undo | str | None:
    from rayfed.update import UNREHEARSED

    try:
        undo = _rehearsed(observed)
        if undo.known:
            return undo(update) if update.tensors else undo
        if _reads_samples(observed):
            return f"{UNREHEARSED} alone: what they send depends on the samples themselves, which no attack looks for"
        return _inverted(observed, update) if update.tensors else None
    except Exception as error:  # a defence may ask for what this attacker does not have; its rows say so
        return _why(error)


def _why(error: Exception) -> str:
    """Return why nothing was undone, in words."""
    from rayfed.update import UNREHEARSED

    why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"{UNREHEARSED} ({why}): nothing known by their code was taken off"


def _as_trained(observed: ObservedClient) -> AsTrained | None:
    """Return the defences' map of samples; None if they change none, are random, or the samples are tokens."""
    import torch

    data = observed.runtime.data.sample
    if not any(defence.overrides("wrap_data") for defence in observed.arm.defences) or data.modality == "tokens":
        return None
    task = _own_task(observed, 0)
    found, count = AsTrained(observed.arm.defences, task), len(task.data.labels)
    drawn = data.noise(count, torch.Generator().manual_seed(0)).to(task.data.inputs)
    one, other = (found.made(drawn, seed) for seed in (0, 1))
    fixed = one.shape == drawn.shape and torch.equal(one, other) and not torch.equal(one, drawn)
    return found if fixed else None


def _reads_samples(observed: ObservedClient) -> bool:
    """Return whether the defences' answer to one gradient depends on the samples."""
    import torch

    one, other = (_answer(observed, None, 0, noise) for noise in (None, 1))
    return bool((one - other).norm() > _SAME * torch.maximum(one.norm(), other.norm()))


def _rehearsed(observed: ObservedClient) -> Undo:
    """Return the changes that running the defences on the attacker's own gradients reveals."""
    import torch

    answers = torch.stack([_answer(observed, None, seed) for seed in range(_DRAWS)])
    if not answers.isfinite().all():
        undo = _moves(observed, torch.zeros_like(answers[0]))
        if undo.known:
            return undo
        raise ArithmeticError("they make of zeros what is not finite")
    if (answers - answers[0]).abs().max() > 1e-6 * answers.abs().max():
        answers = _drawn(observed, answers)
        directions = _few_directions(answers)
        if directions is not None:
            return Undo(directions=directions)
        shared = _shared(observed, answers)
        return Undo(shared=shared, quiet=_quiet(observed, answers, shared))
    offset = answers[0] if _holds(observed, answers[0]) else torch.zeros_like(answers[0])
    return replace(_moves(observed, offset), offset=offset if offset.any() else None)


def _inverted(observed: ObservedClient, update: Update) -> Named | None:
    """Return the tensors before the defences, if these are an invertible map other than the identity."""
    import torch

    from rayfed.gradients import flatten, unflatten

    seeds = count()

    def sent(gradient: Tensor) -> Tensor:
        with torch.enable_grad():  # a defence may take gradients itself
            return _answer(observed, gradient, next(seeds))

    found = _before(sent, flatten(update.tensors), torch.randn)
    return None if found is None else unflatten(found, update.tensors)


def _before(sent: Callable[[Tensor], Tensor], target: Tensor, drawn: Callable[..., Tensor]) -> Tensor | None:
    """Return the values (D,) that a map sends to the target, for element-wise and for affine maps.

    None of any other map, and of one that changes nothing. Values of its domain are `drawn` to see which it is.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    one, other = drawn(2, len(target), generator=draw).to(target)
    half = torch.rand(len(target), generator=draw).to(target) < 0.5
    together, apart = sent(torch.where(half, one, other)), torch.where(half, sent(one), sent(other))
    if _alike(together, apart):
        found = _bisected(sent, target) if len(together.unique()) > len(together) / 2 else None
    else:
        found = _unmixed(sent, target)
    return None if found is None or _alike(found, target) else found


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _SAME * other.norm())


def _bisected(sent: Callable[[Tensor], Tensor], target: Tensor) -> Tensor | None:
    """Return the values (D,) that a monotone element-wise map sends to the target; None if there are none."""
    import torch

    size = 1e3 * target.abs().max().clamp(min=1).expand_as(target)
    rising, still = sent(size) > sent(-size), sent(size) == sent(-size)
    low, high = -size, size
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = (sent(middle) < target) == rising
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    found = ((low + high) / 2).masked_fill(still, 0)
    return found if _alike(sent(found), target) else None


def _unmixed(sent: Callable[[Tensor], Tensor], target: Tensor) -> Tensor | None:
    """Return the values (D,) that an affine map sends to the target, 0 where they are lost; None for other maps."""
    import torch

    from rayfed.attacks.closed_form.equations import is_affine, solve

    if not is_affine(sent, torch.rand(len(target), generator=torch.Generator().manual_seed(1)).to(target)):
        return None
    # what nothing tells of stays 0.5
    found, residual = solve(lambda raised: sent(raised - 0.5), target, target.shape, affine=True)
    return found - 0.5 if residual <= _SAME else None


def _drawn(observed: ObservedClient, answers: Tensor) -> Tensor:
    """Return further answers (M, D) to zeros under own randomness, as many as fit into memory.

    A defence that works on each gradient may search for long: of those the few that there are have to do.
    """
    import torch

    if any(defence.overrides("wrap_gradient") for defence in observed.arm.defences):
        return answers
    more = range(len(answers), max(len(answers), min(_MOST_DRAWS, _HELD // answers.shape[1])))
    return torch.cat([answers, *(_answer(observed, None, seed)[None] for seed in more)])


def _quiet(observed: ObservedClient, answers: Tensor, shared: SharedNoise | None) -> Named:
    """Return the row combinations (n, q), orthonormal, to which no answer (M, D) to zeros adds, by tensor.

    Tensors with `shared` noise, which is taken off, are left out.
    Half of the answers propose them. The other half confirms them, for a few answers have such sums by chance, and so
    does the answer to a gradient: what is sent in its place has none of its sums.
    """
    import torch

    from rayfed.gradients import unflatten

    like, found = _own_task(observed, 0).weights, {}
    given = torch.randn(answers.shape[1], generator=torch.Generator().manual_seed(0)).to(answers)
    drawn = [unflatten(answer, like) for answer in answers.double()]
    sent, wanted = (unflatten(values.double(), like) for values in (_answer(observed, given, 0), given))
    taken = {} if shared is None else unflatten(shared.factor, like)
    for name, tensor in like.items():
        if not tensor.ndim or len(tensor) > _MOST_ROWS or (name in taken and taken[name].any()):
            continue
        rows = [one[name].reshape(len(one[name]), -1) for one in (*drawn, sent, wanted)]
        half, other = torch.cat(rows[:-2:2], 1), torch.cat(rows[1:-2:2], 1)
        sizes, sums = torch.linalg.eigh(half @ half.T)
        sums = sums[:, sizes <= 1e-10 * sizes[-1]]
        still = bool(half.any()) and sums.numel() and (sums.T @ other).norm() <= 1e-5 * other.norm()
        if still and _alike(sums.T @ rows[-2], sums.T @ rows[-1]):
            found[name] = sums
    return found


def _shared(observed: ObservedClient, answers: Tensor) -> SharedNoise | None:
    """Return which values share a random number in all answers (M, D) to zeros; None if none do.

    Another answer, to a gradient, confirms that nothing else is done to it.
    """
    import torch

    precise = answers.double()
    sizes = precise.norm(dim=0)
    ways = (precise / sizes.clamp(min=torch.finfo(torch.float64).tiny)).T
    ways = ways * ways.gather(1, ways.abs().argmax(1, keepdim=True)).sign()  # with sign, opposite noise is the same
    seen = ways @ torch.randn(ways.shape[1], generator=torch.Generator().manual_seed(0)).to(ways)
    order = seen.argsort()
    apart = (ways[order][1:] - ways[order][:-1]).norm(dim=1) > _PROPORTIONAL
    number = torch.zeros_like(order)
    number[order[1:]] = apart.cumsum(0)
    several = (number.bincount()[number] > 1) & (sizes > _PROPORTIONAL * sizes.max())
    if not several.any():
        return None
    usual = sizes / len(answers) ** 0.5
    found = SharedNoise(number, usual * (precise * ways.T).sum(0).sign() * several)
    given = torch.randn(len(order), generator=torch.Generator().manual_seed(0)).to(answers) * usual.max().to(answers)
    sent, wanted = (found.back(values)[several] for values in (_answer(observed, given, len(answers)), given))
    return found if _alike(sent, wanted) else None


def _kept(tensor: Tensor, sums: Tensor | None) -> Tensor:
    """Return the part of a tensor (n, ...) in these row combinations (n, q); all of it without any."""
    if sums is None:
        return tensor
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
    basis = sums.to(rows.device)
    return (basis @ (basis.T @ rows.double())).to(tensor).view_as(tensor)


def _holds(observed: ObservedClient, offset: Tensor) -> bool:
    """Return whether subtracting the offset common to a gradient and its opposite leaves less than before."""
    import torch

    given = torch.randn(len(offset), generator=torch.Generator().manual_seed(0)).to(offset)
    common = (_answer(observed, given, 0) + _answer(observed, -given, 0)) / 2
    return bool((common - offset).norm() < common.norm())


def _answer(observed: ObservedClient, gradient: Tensor | None, seed: int, noise: int | None = None) -> Tensor:
    """Return the defences' answer (D,) to a gradient, by default zeros, for the victim's number, unrounded.

    The samples are blank, or noise of a seed.
    """
    import torch

    from rayfed.attacks.closed_form.probe import NotRounded
    from rayfed.client.local import gradient_method, wrap_updates
    from rayfed.gradients import flatten, unflatten
    from rayfed.update import Update

    task, defences = _own_task(observed, seed), observed.arm.defences
    if noise is not None:
        drawn = observed.runtime.data.sample.noise(len(task.data.labels), torch.Generator().manual_seed(noise))
        task = task.replace(data=task.data._replace(inputs=drawn.to(task.data.inputs)))
    chosen = torch.zeros_like(flatten(task.weights)) if gradient is None else gradient

    def sent(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
        return unflatten(chosen.clone(), weights), torch.zeros(())

    def update(task: Task) -> Update:
        tensors, _ = gradient_method(defences if observed.training.algorithm == "fedsgd" else (), sent)(
            task, task.weights, task.data
        )
        return Update(observed.client, observed.round, tensors, {}, len(task.data.labels), loss=0.0)

    with NotRounded():
        return flatten(wrap_updates(update, defences)(task).tensors)


def _own_task(observed: ObservedClient, seed: int) -> Task:
    """Return the victim's task with blank samples and own randomness, without the victim's state.

    There are public samples where the attacker is granted them, and others of the client where only a batch is asked.
    """
    import torch

    from rayfed import seeds
    from rayfed.defences.base import Batch

    asked, samples, generator = observed.asked(), len(observed.indices), torch.Generator().manual_seed(seed)
    device = asked.data.labels.device
    blank = Batch(
        observed.runtime.data.sample.blank(2 * samples).to(device),
        asked.data.labels.new_zeros(2 * samples, *asked.data.labels.shape[1:]),
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


def _moves(observed: ObservedClient, offset: Tensor) -> Undo:
    """Return the map of single values that the defences apply, given their answer to zeros (D,).

    They are given gradients that differ in signs alone, so that clips and thresholds act alike on all: the value i of
    gradient k has its sign turned where bit k of i is set, and the signs of an answer tell from where each value comes.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    given = (torch.rand(len(offset), generator=draw) + 0.5).to(offset)
    given = given * (torch.rand(len(offset), generator=draw) < 0.5).to(offset).mul(2).sub(1)

    def answer(gradient: Tensor, seed: int) -> Tensor:
        return _answer(observed, gradient, seed) - offset

    first, numbers = answer(given, 0), torch.arange(len(given), device=given.device)
    order = torch.zeros_like(numbers)
    for bit in range(len(given).bit_length()):
        turned = answer(torch.where((numbers >> bit) % 2 == 1, -given, given), bit + 1)
        if not torch.allclose(turned.abs(), first.abs(), rtol=_SAME, atol=1e-6 * float(offset.abs().max())):
            return Undo()
        order |= (turned * first < 0).long() << bit
    sent = first != 0
    if len(order[sent].unique()) < sent.sum() or bool((order >= len(order)).any()):
        ratio = first.abs() / given.abs()
        return Undo(unsigned=bool((ratio - ratio[0]).abs().max() < _SAME * ratio[0]))
    return Undo(moved=_checked(Moved(order, first / given[order]), answer))


def _checked(moved: Moved, answer: Callable[[Tensor, int], Tensor]) -> Moved | None:
    """Return the map of values if two further gradients confirm it; None for the identity or otherwise.

    They may come back larger or smaller, all alike; factors then count relatively to each other.
    """
    import torch

    order, factor = moved
    other = torch.randn(len(order), generator=torch.Generator().manual_seed(1)).to(factor)
    sizes = []
    for size, seed in ((1.0, 1), (0.01, 2)):
        expected, back = size * factor * other[order], answer(size * other, seed)
        sizes.append(back.norm() / expected.norm())
        if (back / back.norm() - expected / expected.norm()).norm() > _SAME:
            return None
    usual = factor[factor != 0].abs().median()
    if (torch.stack(sizes) - 1).abs().max() > _SAME or (usual - 1).abs() < _SAME:
        factor, usual = factor / usual, torch.ones_like(usual)
    factor = torch.where((factor - usual).abs() < 2 * _SAME * usual, usual, factor)
    sent, places = factor != 0, torch.arange(len(order), device=order.device)
    plain = torch.equal(order[sent], places[sent]) and bool((factor[sent] == 1).all())
    return None if plain else Moved(order, factor)


def _few_directions(answers: Tensor) -> Tensor | None:
    """Return an orthonormal basis (D, R) of answers (M, D) to zeros, if it is smaller than their number.

    Values that are random each by itself are left as they are: no other value tells what was added to them.
    """
    import torch

    precise = answers.double()
    sizes = torch.linalg.eigvalsh(precise @ precise.T)  # squares of singular values, at a fraction of their cost
    rank = int((sizes > 1e-12 * sizes[-1]).sum())
    if rank == len(answers):
        return None
    directions = torch.linalg.svd(precise, full_matrices=False).Vh
    shared = directions[:rank].square().sum(0) < 0.5
    if shared.all():
        found: Tensor = directions[:rank].T
        return found
    return _few_directions(answers * shared) if (answers * shared).any() else None


def _least_absolute(directions: Tensor, values: Tensor) -> Tensor:
    """Return coefficients (R,) that minimise sum |values - directions @ c|, by iterative reweighting."""
    import torch

    coefficients = directions.T @ values
    for _ in range(_REWEIGHTED):
        weights = 1 / (values - directions @ coefficients).abs().clamp(min=1e-9 * float(values.abs().max()))
        normal = (directions * weights[:, None]).T
        coefficients = torch.linalg.solve(normal @ directions, normal @ values)
    return coefficients
