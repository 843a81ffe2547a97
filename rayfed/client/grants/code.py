"""Grant of the defences' code: the attacker runs the code, and reverses its known changes of an update.

The attacker runs the code for the victim's number and round, on chosen gradients and with its own random numbers. It
reverses the following changes:

- a constant offset, or one of few possible offsets;
- permutations, factors and other affine maps, or invertible element-wise maps;
- noise with a known structure: in a few directions, with shared random numbers, or as in `rayfed.client.grants.noise`;
- random signs, of which only absolute values remain.

Deterministic changes of samples before training are reversed in the attack's result (`AsTrained`). For other
deterministic changes, a search runs through the code (`rayfed.client.grants.through`). For user-defined defences, the
attacker also tests whether the attacks use everything that the code reveals (`rayfed.client.grants.understood`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from rayfed.client.grants import understood
from rayfed.client.grants.base import Grant
from rayfed.client.grants.noise import (
    BY_TENSOR,
    SAME,
    SharedNoise,
    Steps,
    Structure,
    alike,
    drawn_again,
    least_absolute,
)
from rayfed.client.grants.through import Through, answered
from rayfed.registry import component

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rayfed.client.arm import Arm
    from rayfed.client.runtime import ClientRuntime
    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.defences.base import Batch, Defence, Task
    from rayfed.update import Named, Update

_DRAWS = 4
"""Number of updates for a zero gradient, to find random directions."""
_MOST_DRAWS, _HELD = 256, 2**22
"""Maximum number of such updates if they differ, and of values in them."""
_UNUSED = 2**30
_NOT_RUN = "the attack could not run the defences' code on its own gradients"
"""A seed that is not used for other updates."""
_ROUNDED = 32
"""Number of rounded updates for a zero gradient."""
_REMEMBERED = 2**28
"""Maximum size of results kept for other attacks, in bytes."""
_REPEATED = 32
"""Number of runs to find random changes of samples."""
_LATER = 1, 2, 10, 100, 1000
"""Offsets of rounds and clients for which the defences are also run."""
_KEPT = 1e-3
"""Minimum relative gain of a map; directions with a lower gain are lost."""
_HALVINGS = 100
"""Number of bisection steps."""


_found: WeakKeyDictionary[ClientRuntime, dict[tuple[Any, ...], _Learnt]] = WeakKeyDictionary()
"""Results of `_learnt` for the clients of a runtime."""
_built: WeakKeyDictionary[ClientRuntime, dict[str, Arm]] = WeakKeyDictionary()
"""Arms by name, used only with samples of attackers."""
_rehearsals: WeakKeyDictionary[ClientRuntime, dict[str, understood.Rehearsal]] = WeakKeyDictionary()
"""Rehearsals by arm that are equal for all clients and updates."""


class _Learnt(NamedTuple):
    """Knowledge about one update, from the defences' code."""

    undone: Named | Undo | str | None
    rehearsal: understood.Rehearsal | None = None
    """Result of running the defences on the attacker's gradients; None if unknown."""
    beyond: str = ""
    """Description of an effect that the attacks do not use; empty if there is none."""
    through: Through | None = None
    """Deterministic defences through which a search runs; None if this is not needed or not possible."""

    def left(self, update: Named) -> Named | None:
        """Return masks of the values of an update that equal the gradient up to a common factor; None if unknown."""
        if self.rehearsal is None:
            return None
        if self.rehearsal.fixed and isinstance(self.undone, Mapping):  # lost values are 0
            return {name: t != 0 for name, t in self.undone.items()}
        return self.rehearsal.left(update)

    @property
    def noise(self) -> understood.Noise | None:
        """Return the noise on an update without reversed changes; None if unknown."""
        return None if self.rehearsal is None or self.undone is not None else self.rehearsal.noise

    def heard(self, update: Named) -> Named | None:
        """Return masks of the values in tensors that are not mostly noise; None if no matrix is sent unchanged."""
        if self.rehearsal is None:
            return None
        left = self.rehearsal.left(update).values()
        return self.rehearsal.above_noise(update) if any(t.ndim > 1 and bool(t.all()) for t in left) else None


class _Opened(NamedTuple):
    """Masks of an update that the attacker decrypts later."""

    learnt: _Learnt
    what: str

    def __call__(self, update: Update) -> Named | None:
        """Return the masks `what` of a decrypted update."""
        found: Named | None = getattr(self.learnt, self.what)(update.tensors)
        return found


class Moved(NamedTuple):
    """Transformation of an update by a permutation of its values, with factors."""

    order: Tensor
    """Source index of each value, (D,) int64."""
    factor: Tensor
    """Factor of each value, (D,); 0 for values that are not sent."""

    def back(self, values: Tensor) -> Tensor:
        """Undo the permutation and factors of values (D,); unchanged if values that are not sent are not 0."""
        import torch

        order, factor = self.order.to(values.device), self.factor.to(values)
        sent = factor != 0
        if values[~sent].norm() > SAME * values.norm():
            return values
        return torch.zeros_like(values).scatter(0, order[sent], values[sent] / factor[sent])


@dataclass(frozen=True)
class Undo:
    """Removal of the known changes that defences make to an update."""

    offset: Tensor | None = None
    """Constant that is added to every update, (D,)."""
    directions: Tensor | None = None
    """Orthonormal directions of random noise, (D, R)."""
    shared: SharedNoise | None = None
    """Noise with shared random numbers."""
    by_tensor: Mapping[str, Structure] = field(default_factory=dict)
    """Structure of the noise on single tensors."""
    moved: Moved | None = None
    unsigned: bool = False
    """Whether signs are random, so that only absolute values remain."""

    @property
    def known(self) -> bool:
        """Return whether any change of the defences is known."""
        parts = self.offset, self.directions, self.shared, self.moved
        return self.unsigned or bool(self.by_tensor) or any(part is not None for part in parts)

    def __call__(self, update: Update) -> Named:
        """Return the tensors of an update without the defences' known changes."""
        from rayfed.gradients import flatten, unflatten

        values = flatten(update.tensors)
        if self.offset is not None:
            values = values - self.offset.to(values)
        if self.directions is not None:
            directions = self.directions.to(values.device).double()
            values = values - (directions @ least_absolute(directions, values.double())).to(values)
        if self.shared is not None:
            values = self.shared.back(values)
        if self.moved is not None:
            values = self.moved.back(values)
        tensors = unflatten(values.abs() if self.unsigned else values, update.tensors)
        return {n: self.by_tensor[n].back(tensor) if n in self.by_tensor else tensor for n, tensor in tensors.items()}


@dataclass(frozen=True)
class AsTrained:
    """The defences' transformation of samples before training, as the attacker runs it."""

    defences: Sequence[Defence]
    task: Task
    """The victim's task, with samples, random numbers and state of the attacker."""

    @classmethod
    def of(cls, code: _Code, data: Batch) -> AsTrained:
        """Return the defences' transformation of samples with the labels and positions of `data`."""
        defences, task = code.unused()
        return cls(defences, task.replace(data=data))

    def made(self, samples: Tensor, seed: int = 0) -> Tensor:
        """Apply the defences' transformation to samples (N, *shape), and return the samples."""
        return self.batch(samples, seed).inputs

    def batch(self, samples: Tensor, seed: int) -> Batch:
        """Apply the defences' transformation to samples (N, *shape), and return samples and labels."""
        import torch

        from rayfed.client.local import data_method

        draw, order = torch.Generator().manual_seed(seed), self.task.order + seed
        task = self.task.replace(data=self.task.data._replace(inputs=samples), generator=draw, order=order)
        return data_method(self.defences)(task)

    def back(self, samples: Tensor) -> Tensor:
        """Invert the transformation of samples (N, *shape); unchanged if the transformation cannot be inverted."""
        import torch

        with torch.enable_grad():
            found = _before(lambda values: self.made(values.view_as(samples)).flatten(), samples.flatten(), torch.rand)
        return samples if found is None else found.detach().view_as(samples).clamp(0, 1)


@dataclass(frozen=True)
class _Code:
    """The code of a client's defences, as an attacker runs it."""

    observed: ObservedClient

    @cached_property
    def _asked(self) -> Task:
        return self.observed.asked()

    def task(self, seed: int) -> Task:
        """Return the victim's task with blank samples, seeded random numbers, and no client state.

        It contains public samples if the attacker knows them.
        """
        import torch

        from rayfed import seeds
        from rayfed.defences.base import Batch

        asked, samples = self._asked, len(self.observed.indices)
        device, generator = asked.data.labels.device, torch.Generator().manual_seed(seed)
        blank = Batch(
            self.observed.runtime.data.sample.blank(2 * samples).to(device),
            asked.data.labels.new_zeros(2 * samples, *asked.data.labels.shape[1:]),
            places=torch.arange(2 * samples, device=device),
        )
        own, others = (blank.rows(places) for places in torch.arange(2 * samples, device=device).split(samples))
        return asked.replace(
            weights={name: tensor.clone() for name, tensor in asked.weights.items()},
            buffers={name: tensor.clone() for name, tensor in asked.buffers.items()},
            data=own,
            others=None if self.observed.attack.view.of_round else others,
            generator=generator,
            order=int.from_bytes(seeds.drawn(generator)),
            batch_size=samples,
            public=asked.public if "public" in self.observed.attack.grants else None,
            state={},
        )

    def unused(self) -> tuple[Sequence[Defence], Task]:
        """Return new defences and a new task for an attacker, as the client's defences may contain its samples."""
        from rayfed.client.arm import build_arm

        observed, runtime = self.observed, self.observed.runtime
        name, data, known = observed.visit.arm, runtime.data, _built.setdefault(runtime, {})
        if name not in known:
            known[name] = build_arm(observed.arm.spec, data.sample, len(data.classes), runtime.scenario.seed)
        model = observed.asked(known[name].model.to(runtime.device)).model
        return known[name].defences, self.task(0).replace(model=model)

    def answer(
        self,
        gradient: Tensor | None,
        seed: int,
        noise: int | None = None,
        rounded: bool = False,
        other: bool = False,
    ) -> Tensor:
        """Return the defended update (D,) for a gradient, by default zeros, without rounding unless `rounded`.

        The samples are blank, or noise of the seed `noise`. With `other`, labels and places are also random.
        """
        from contextlib import nullcontext

        from rayfed.attacks.closed_form.probe import NotRounded
        from rayfed.gradients import flatten

        task = self.task(seed)
        if noise is not None:
            drawn = self.observed.runtime.data.sample.noise(len(task.data.labels), _generator(noise))
            data = task.data._replace(inputs=drawn.to(task.data.inputs))
            task = task.replace(data=_other(data, task.classes, noise) if other else data)
        with nullcontext() if rounded else NotRounded():
            return flatten(self.update(task, gradient).tensors)

    def update(self, task: Task, gradient: Tensor | None = None, asked: list[bool] | None = None) -> Update:
        """Return the defended update for a task of the attacker and a gradient (D,), by default zeros.

        For each gradient that the defences compute, a bool is appended to `asked`: whether it is the task's gradient.
        """
        import torch

        from rayfed.gradients import flatten, unflatten

        chosen = torch.zeros_like(flatten(task.weights)) if gradient is None else gradient

        def sent(inner: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            if asked is not None:
                asked.append(_is_of(task, weights, batch))
            return unflatten(chosen.clone(), weights), torch.zeros(())

        return answered(self.observed.arm.defences, task, sent, self.observed.training.algorithm == "fedsgd")

    def gradients(self) -> list[Tensor]:
        """Return gradients (D,) of the model for samples of several kinds, with random labels."""
        import torch

        from rayfed import gradients

        found, task = [], self.task(0)
        for seed, samples in enumerate(_kinds(self)):
            data = _other(task.data._replace(inputs=samples), task.classes, seed)
            tensors, _ = gradients.gradient(task.model, task.weights, task.buffers, data.inputs, data.labels)
            found.append(gradients.flatten(tensors))
        return [one for one in found if bool(one.isfinite().all()) and bool(torch.count_nonzero(one))]


@component
class KnownCode(Grant):
    """The defences' code, with which the attacker reverses known changes: offsets, permutations and invertible maps.

    The code is run with other random numbers than the victim's, and without the victim's data.
    """

    describe: ClassVar[str] = "the defence's code"
    fills: ClassVar[tuple[str, ...]] = ("undone", "as_trained", "left", "heard", "noise", "beyond", "through")

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the update without the defences' known changes, their transformation of samples, and masks.

        For a protected update, these are functions of the decrypted update. `undone` is None if there is nothing to
        reverse, and an error message if the defences cannot be run by the attacker.
        """
        import torch

        given: dict[str, Any] = {"undone": None, "as_trained": None, "left": None, "heard": None, "noise": None}
        given |= {"beyond": "", "through": None}
        if not observed.arm.defences:
            return given | {"left": {name: torch.ones_like(t, dtype=torch.bool) for name, t in update.tensors.items()}}
        if observed.arm.private:
            return given | {"beyond": understood.PRIVATE if any(map(_is_own, observed.arm.defences)) else ""}
        code, made = _Code(observed), None
        learnt = _remembered(code, update)
        try:
            made = _as_trained(code)
            lost = _samples_beyond(code, made)
            made, learnt = None if lost else made, learnt._replace(beyond=learnt.beyond or lost)
        except Exception as error:  # see `_undone`
            learnt = learnt._replace(undone=_why(error) if learnt.undone is None else learnt.undone)
        seen = update.tensors
        return {
            "undone": learnt.undone,
            "as_trained": made,
            "left": learnt.left(seen) if seen else _Opened(learnt, "left"),
            "heard": learnt.heard(seen) if seen else _Opened(learnt, "heard"),
            "noise": learnt.noise if observed.attack.averages == 1 else None,
            "beyond": learnt.beyond,
            "through": learnt.through if made is None else None,
        }


def _remembered(code: _Code, update: Update) -> _Learnt:
    """Return the knowledge about an update from the code, cached for attacks that observe the same."""
    from rayfed.attacks.base import MaliciousServer
    from rayfed.update import digest_of

    if not update.tensors:
        return _learnt(code, update)
    observed, attack = code.observed, code.observed.attack
    kept = _found.setdefault(observed.runtime, {})
    told = "public" in attack.grants, attack.view.of_round, len(observed.indices), observed.training.algorithm
    server = attack.title if isinstance(attack.build(), MaliciousServer) else ""
    key = observed.visit.arm, observed.client, observed.visit.sent.content, digest_of(update.tensors), server, *told
    if key not in kept:
        while kept and sum(map(_size, kept.values())) > _REMEMBERED:
            del kept[next(iter(kept))]
        kept[key] = _learnt(code, update)
    found = kept[key]
    if not isinstance(found.undone, Mapping):
        return found
    return found._replace(undone={n: t.detach().clone() for n, t in found.undone.items()})


def _size(learnt: _Learnt) -> int:
    """Return the size of the tensors in `learnt`, in bytes."""
    undone = learnt.undone.values() if isinstance(learnt.undone, Mapping) else ()
    known = 0 if learnt.rehearsal is None else 2 * learnt.rehearsal.quiet.nbytes
    followed = () if learnt.through is None else learnt.through.task.weights.values()
    return known + sum(t.nbytes for t in chain(undone, followed))


def _learnt(code: _Code, update: Update) -> _Learnt:
    """Return the knowledge about an update from the code."""
    import torch

    observed = code.observed
    defences, one_step = observed.arm.defences, observed.training.algorithm == "fedsgd"
    own = list(filter(_is_own, defences))
    if not own and len(defences) == 1 and defences[0].nothing_to_undo:
        known = _rehearsals.setdefault(observed.runtime, {})
        if observed.visit.arm not in known:
            known[observed.visit.arm] = _rehearsal(code, trusted=True, even=True)
        return _Learnt(None, known[observed.visit.arm])
    undone = _undone(code, update)
    hidden = _not_rehearsed(own, one_step)
    of_steps = not one_step and any(defence.overrides("wrap_gradient") for defence in defences)
    of_each = len(observed.indices) > 1 and any(defence.samplewise for defence in defences)
    if isinstance(undone, str) or of_steps or of_each or not (own or all(map(_is_quick, defences))):
        return _Learnt(undone, beyond=hidden)
    try:
        rehearsal = _rehearsal(code, trusted=not own, others=code.gradients() if own else ())
        undoes = rehearsal.fixed and isinstance(undone, Mapping)
        beyond = hidden or ("" if undoes else rehearsal.beyond)
        given = torch.randn(len(rehearsal.quiet), generator=torch.Generator().manual_seed(0)).to(rehearsal.quiet.device)
        if own and not beyond:
            beyond = _of_one_answer(code, given, rehearsal)
        if own and not beyond and (_reads_samples(code, other=True) or _reads_samples(code, given, other=True)):
            beyond = understood.SAMPLES
        if own and not beyond and not undoes and _differs_elsewhere(code, given):
            beyond = understood.ELSEWHERE
    except Exception as error:
        return _Learnt(undone, beyond=_why(error) if own else "")
    adapts = any(defence.overrides("adapt_model") for defence in defences)
    lost = one_step and undone is None and rehearsal.fixed and rehearsal.beyond == understood.LOST
    through = _through(code) if lost and not adapts else None
    return _Learnt(undone, None if adapts else rehearsal, beyond if own else "", through)


def _through(code: _Code) -> Through | None:
    """Return the defences for a search through their code; None if it has no derivative or cannot be copied."""
    through = Through(*code.unused())
    try:
        if not through.has_slope:
            return None
        copy.deepcopy(through.defences)  # an object that cannot be copied, such as a lock, cannot be pickled either
    except Exception:  # a defence may raise anything for double precision, or when copied
        return None
    return through


def _rehearsal(code: _Code, trusted: bool, even: bool = False, others: Sequence[Tensor] = ()) -> understood.Rehearsal:
    """Run the defences on gradients of the attacker."""
    return understood.Rehearsal.of(partial(code.answer, rounded=True), code.task(0).weights, trusted, even, others)


def _of_one_answer(code: _Code, gradient: Tensor, rehearsal: understood.Rehearsal) -> str:
    """Return a description of an effect on an update that the attacks do not use; empty if there is none.

    Noise must be sampled from the client's generator, samples must not be read, and only tensors may be changed.
    """
    import torch

    from rayfed.client.grants.drawn import Drawn

    bits, buffers, taken = set(), code.task(0).buffers, list[bool]()
    code.update(code.task(0), gradient, asked=taken)
    if taken != [True]:
        return understood.OTHERS
    for given in (None, gradient):
        seen, task = Drawn(), code.task(0)
        batches = [task.data] if task.others is None else [task.data, task.others]
        tensors = [t for batch in batches for t in (batch.inputs, batch.labels, batch.places) if t is not None]
        seen.watch(task.generator, tensors)
        with seen:
            update = code.update(task, given)
        if task.state:
            return understood.STATE
        bits.add(update.bits)
        given_back = update.buffers.keys() == buffers.keys()
        given_back = given_back and all(torch.equal(t, buffers[name]) for name, t in update.buffers.items())
        if not given_back or update.loss or update.samples != len(task.data.labels) or len(bits) > 1:
            return understood.BESIDE
        if seen.read:
            return understood.SAMPLES
        if given is None and not rehearsal.fixed and rehearsal.noisy:
            if seen.reseeded or seen.numbers < rehearsal.noisy:
                return understood.FEW
            if not understood.is_drawn(update.tensors, seen.normal):
                return understood.UNDRAWN
    return ""


def _is_of(task: Task, weights: Named, batch: Batch) -> bool:
    """Return whether weights and batch are those of the task, with equal weights of samples."""
    import torch

    same = weights.keys() == task.weights.keys() and all(torch.equal(t, task.weights[n]) for n, t in weights.items())
    alike = all(torch.equal(one, own) for one, own in zip(batch[:2], task.data[:2], strict=True))
    return same and alike and (batch.mask is None or bool((batch.mask == 1).all()))


def _not_rehearsed(own: Sequence[Defence], one_step: bool) -> str:
    """Return a description of an effect of user-defined defences that a rehearsal cannot show; empty if none."""
    if any(defence.overrides("adapt_model") for defence in own):
        return understood.MODEL
    if any(defence.keeps_state for defence in own):
        return understood.STATE
    return understood.STEPS if not one_step and any(defence.overrides("wrap_gradient") for defence in own) else ""


def _is_own(defence: Defence) -> bool:
    """Return whether a defence is user-defined."""
    return not type(defence).__module__.startswith("rayfed.")


def _is_quick(defence: Defence) -> bool:
    """Return whether a defence only changes updates, and runs fast."""
    of_gradient = defence.overrides("wrap_gradient") and not defence.samplewise
    return not defence.overrides("adapt_model", "wrap_data") and not of_gradient


def _samples_beyond(code: _Code, made: AsTrained | None) -> str:
    """Return a description of a change of samples that is not reversed; empty if there is none."""
    import torch

    changes = [defence for defence in code.observed.arm.defences if defence.overrides("wrap_data")]
    if not any(map(_is_own, changes)):
        return ""
    task = code.task(0)
    for samples in _kinds(code):
        data = task.data._replace(inputs=samples)
        others = [data, *(_other(data, task.classes, seed) for seed in range(1, _DRAWS))]
        batches = [(one, AsTrained.of(code, one).batch(samples, seed)) for one in others for seed in range(_DRAWS)]
        if any(not torch.equal(batch.labels, one.labels) for one, batch in batches):
            return understood.LABELS
        inputs = [batch.inputs for _, batch in batches]
        if any(not torch.equal(one, inputs[0]) for one in inputs):
            return understood.RANDOM_SAMPLES
        if torch.equal(inputs[0], samples):
            continue
        if made is None or not torch.allclose(made.back(inputs[0]), samples, atol=0.01):
            return understood.LOST_SAMPLES
    return ""


def _kinds(code: _Code) -> list[Tensor]:
    """Return samples (N, *shape) of several kinds, as the effect of a defence may depend on them."""
    import torch

    task = code.task(0)
    drawn = code.observed.runtime.data.sample.noise(len(task.data.labels), _generator(0)).to(task.data.inputs)
    if not drawn.is_floating_point():
        return [drawn]
    more = drawn / 5, 1 - drawn / 5, (drawn > 0.9).to(drawn), drawn.round(), torch.full_like(drawn, 0.3)
    return [drawn, *more]


def _generator(seed: int) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(seed)


def _other(batch: Batch, classes: int, seed: int) -> Batch:
    """Return a batch with random places, and with random labels if these are classes."""
    import torch

    draw, labels = torch.Generator().manual_seed(seed), batch.labels
    if labels.ndim == 1 and not labels.is_floating_point():
        labels = torch.randint(classes, labels.shape, generator=draw).to(labels)
    places = torch.randint(1, 10_000, (len(labels),), generator=draw).to(labels.device)
    return batch._replace(labels=labels, places=places)


def _undone(code: _Code, update: Update) -> Named | Undo | str | None:
    from rayfed.gradients import flatten

    try:
        undo = _rehearsed(code, flatten(update.tensors) if update.tensors else None)
        if undo.known:
            return undo(update) if update.tensors else undo
        if _reads_samples(code):
            return f"{_NOT_RUN}: {understood.SAMPLES}, which the attacks do not use"
        return _inverted(code, update) if update.tensors else None
    except Exception as error:  # a defence may need data that the attacker does not have; reported in the tables
        return _why(error)


def _why(error: Exception) -> str:
    """Return a message with the reason why nothing was reversed."""
    why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"{_NOT_RUN} ({why}), so their known changes were not reversed"


def _as_trained(code: _Code) -> AsTrained | None:
    """Return the defences' map of samples; None if it is random or the identity, or samples are tokens."""
    import torch

    data = code.observed.runtime.data.sample
    if not any(defence.overrides("wrap_data") for defence in code.observed.arm.defences) or data.modality == "tokens":
        return None
    defences, task = code.unused()
    found, count = AsTrained(defences, task), len(task.data.labels)
    drawn = data.noise(count, torch.Generator().manual_seed(0)).to(task.data.inputs)
    one, *others = (found.made(drawn, seed) for seed in range(_REPEATED))
    fixed = one.shape == drawn.shape and all(torch.equal(one, other) for other in others)
    fixed = fixed and not torch.equal(one, drawn)
    return found if fixed else None


def _reads_samples(code: _Code, gradient: Tensor | None = None, other: bool = False) -> bool:
    """Return whether the update for a gradient (D,), by default zeros, depends on the samples.

    With `other`, also whether it depends on labels and places.
    """
    import torch

    blank, drawn = (code.answer(gradient, 0, noise, other=other) for noise in (None, 1))
    return bool((blank - drawn).norm() > SAME * torch.maximum(blank.norm(), drawn.norm()))


def _differs_elsewhere(code: _Code, gradient: Tensor) -> bool:
    """Return whether the update for a gradient (D,) differs for other rounds, clients, weights or sample counts.

    Such a defence may send the gradient unchanged in other cases. The random numbers are the same.
    """
    import torch

    from rayfed.gradients import flatten

    task = code.task(0)
    twice = task.data.rows(torch.arange(len(task.data.labels), device=task.data.labels.device).repeat(2))
    elsewhere: list[dict[str, Any]] = [{"round": task.round + more} for more in (0, *_LATER)]
    elsewhere += [{"client": task.client + more} for more in _LATER]
    elsewhere += [{"weights": {name: tensor + 1 for name, tensor in task.weights.items()}}, {"step": 1}]
    elsewhere += [{"data": twice}, {"batch_size": task.batch_size + 1}]
    here, *others = elsewhere

    def answer(changes: Mapping[str, Any]) -> Tensor:
        return flatten(code.update(code.task(0).replace(**changes), gradient).tensors)

    there = answer(here)
    try:
        return any(not torch.equal(there, answer(other)) for other in others)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # for example a defence with a table of rounds
        return True


def _rehearsed(code: _Code, values: Tensor | None) -> Undo:
    """Return the changes found by running the defences on the attacker's gradients.

    `values` (D,) are those of the update; they identify its noise if there are few different noises.
    """
    import torch

    answers = torch.stack([code.answer(None, seed) for seed in range(_DRAWS)])
    if not answers.isfinite().all():
        undo = _moves(code, torch.zeros_like(answers[0]))
        if undo.known:
            return undo
        raise ArithmeticError("the update for a zero gradient is not finite")
    if (answers - answers[0]).abs().max() > 1e-6 * answers.abs().max():
        searching = any(defence.overrides("wrap_gradient") for defence in code.observed.arm.defences)
        if not searching:  # otherwise each update may take long
            answers = _drawn(code, answers)
        directions = _few_directions(answers)
        if directions is not None:
            return Undo(directions=directions)
        if values is not None and not searching:
            drawn = drawn_again(partial(code.answer, None, rounded=True), values)
            if drawn is not None:
                return Undo(offset=drawn)
        shared = SharedNoise.find(answers, lambda gradient: code.answer(gradient, len(answers)))
        return Undo(shared=shared, by_tensor=_by_tensor(code, answers, shared))
    offset = answers[0] if _holds(code, answers[0]) else torch.zeros_like(answers[0])
    return replace(_moves(code, offset), offset=offset if offset.any() else None)


def _inverted(code: _Code, update: Update) -> Named | None:
    """Return the tensors before the defences if these are an invertible map; None for the identity and other maps."""
    import torch

    from rayfed.gradients import flatten, unflatten

    seeds = count()

    def sent(gradient: Tensor) -> Tensor:
        with torch.enable_grad():  # a defence may take gradients itself
            return code.answer(gradient, next(seeds))

    found = _before(sent, flatten(update.tensors), torch.randn)
    if found is None:
        return None
    # The inverse must also hold for permuted values of each tensor, except values that are never sent.
    draw, parts = _generator(0), found.split([tensor.numel() for tensor in update.tensors.values()])
    other = torch.cat([part[torch.randperm(len(part), generator=draw)] for part in parts])
    made = sent(other)
    back = _before(sent, made, torch.randn)
    if back is None:
        return None
    away = (back - other).where(back != 0, 0.0)  # only rounding errors, or directions with a very small gain
    seen = (sent(other + away) - made).norm()
    lost = away.norm() > SAME * other.norm() and seen * other.norm() <= _KEPT * away.norm() * made.norm()
    return None if lost else unflatten(found, update.tensors)


def _before(sent: Callable[[Tensor], Tensor], target: Tensor, drawn: Callable[..., Tensor]) -> Tensor | None:
    """Return the values (D,) that an element-wise or affine map sends to the target.

    None for other maps and the identity. `drawn` samples values of the map's domain.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    one, other = drawn(2, len(target), generator=draw).to(target)
    half = torch.rand(len(target), generator=draw).to(target) < 0.5
    together, apart = sent(torch.where(half, one, other)), torch.where(half, sent(one), sent(other))
    if alike(together, apart):
        found = _bisected(sent, target) if len(together.unique()) > len(together) / 2 else None
    else:
        found = _unmixed(sent, target)
    return None if found is None or alike(found, target) else found


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
    return found if alike(sent(found), target) else None


def _unmixed(sent: Callable[[Tensor], Tensor], target: Tensor) -> Tensor | None:
    """Return the values (D,) that an affine map sends to the target, with 0 for lost ones; None for other maps."""
    import torch

    from rayfed.attacks.closed_form.equations import is_affine, solve

    if not is_affine(sent, torch.rand(len(target), generator=torch.Generator().manual_seed(1)).to(target)):
        return None
    # undetermined values remain 0.5
    found, residual = solve(lambda raised: sent(raised - 0.5), target, target.shape, affine=True)
    return found - 0.5 if residual <= SAME else None


def _drawn(code: _Code, answers: Tensor) -> Tensor:
    """Return different updates (M, D) for a zero gradient, as many as fit in memory, without all-zero updates."""
    import torch

    more = range(len(answers), max(len(answers), min(_MOST_DRAWS, _HELD // answers.shape[1])))
    found: Tensor = torch.cat([answers, *(code.answer(None, seed)[None] for seed in more)]).unique(dim=0)
    return found[found.any(1)]


def _by_tensor(code: _Code, answers: Tensor, shared: SharedNoise | None) -> dict[str, Structure]:
    """Return the structure of the noise on each tensor that has one, from updates (M, D) for a zero gradient.

    Tensors with `shared` noise are skipped.
    """
    import torch

    from rayfed.gradients import unflatten

    like = code.task(0).weights
    given = torch.randn(answers.shape[1], generator=torch.Generator().manual_seed(0)).to(answers)
    rounded = torch.stack([code.answer(None, seed, rounded=True) for seed in range(min(_ROUNDED, len(answers)))])

    def sent(name: str, rounded: bool, size: float) -> tuple[Tensor, Tensor]:
        made = code.answer(size * given, _UNUSED, rounded=rounded)
        return unflatten(made, like)[name], unflatten(size * given, like)[name]

    def structure(name: str) -> Structure | None:
        drawn, exact = (torch.stack([unflatten(one, like)[name] for one in many]) for many in (answers, rounded))
        whole = Steps.find(exact, partial(sent, name, True))
        rest = (find(drawn, partial(sent, name, False)) for find in BY_TENSOR)
        return whole or next((found for found in rest if found is not None), None)

    taken = {} if shared is None else unflatten(shared.factor, like)
    apart = [name for name in like if not (name in taken and taken[name].any())]
    return {name: found for name in apart if (found := structure(name)) is not None}


def _holds(code: _Code, offset: Tensor) -> bool:
    """Return whether subtracting the offset reduces the norm of the mean update of a gradient and its negative."""
    import torch

    given = torch.randn(len(offset), generator=torch.Generator().manual_seed(0)).to(offset)
    common = (code.answer(given, 0) + code.answer(-given, 0)) / 2
    return bool((common - offset).norm() < common.norm())


def _moves(code: _Code, offset: Tensor) -> Undo:
    """Return the permutation and factors that the defences apply, given their update for zeros (D,).

    The gradients differ only in signs, so clips and thresholds act equally on all. Gradient k flips the sign of value i
    if bit k of i is 1. Thus the signs of the updates contain the source index of each value.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    given = (torch.rand(len(offset), generator=draw) + 0.5).to(offset)
    given = given * (torch.rand(len(offset), generator=draw) < 0.5).to(offset).mul(2).sub(1)

    def answer(gradient: Tensor, seed: int) -> Tensor:
        return code.answer(gradient, seed) - offset

    first, numbers = answer(given, 0), torch.arange(len(given), device=given.device)
    order = torch.zeros_like(numbers)
    for bit in range(len(given).bit_length()):
        turned = answer(torch.where((numbers >> bit) % 2 == 1, -given, given), bit + 1)
        if not torch.allclose(turned.abs(), first.abs(), rtol=SAME, atol=1e-6 * float(offset.abs().max())):
            return Undo()
        order |= (turned * first < 0).long() << bit
    sent = first != 0
    if len(order[sent].unique()) < sent.sum() or bool((order >= len(order)).any()):
        ratio = first.abs() / given.abs()
        return Undo(unsigned=bool((ratio - ratio[0]).abs().max() < SAME * ratio[0]))
    return Undo(moved=_checked(Moved(order, first / given[order]), answer))


def _checked(moved: Moved, answer: Callable[[Tensor, int], Tensor]) -> Moved | None:
    """Return the map if two more gradients confirm it; None otherwise, and for the identity.

    A common factor of all values may vary.
    """
    import torch

    order, factor = moved
    other = torch.randn(len(order), generator=torch.Generator().manual_seed(1)).to(factor)
    sizes = []
    for size, seed in ((1.0, 1), (0.01, 2)):
        expected, back = size * factor * other[order], answer(size * other, seed)
        sizes.append(back.norm() / expected.norm())
        if (back / back.norm() - expected / expected.norm()).norm() > SAME:
            return None
    usual = factor[factor != 0].abs().median()
    if (torch.stack(sizes) - 1).abs().max() > SAME or (usual - 1).abs() < SAME:
        factor, usual = factor / usual, torch.ones_like(usual)
    factor = torch.where((factor - usual).abs() < 2 * SAME * usual, usual, factor)
    sent, places = factor != 0, torch.arange(len(order), device=order.device)
    plain = torch.equal(order[sent], places[sent]) and bool((factor[sent] == 1).all())
    return None if plain else Moved(order, factor)


def _few_directions(answers: Tensor) -> Tensor | None:
    """Return an orthonormal basis (D, R) of updates (M, D) for a zero gradient, if R < M; else None.

    Values with independent noise are excluded.
    """
    import torch

    precise = answers.double()
    sizes = torch.linalg.eigvalsh(precise @ precise.T)  # squared singular values, cheaper than an SVD
    rank = int((sizes > 1e-12 * sizes[-1]).sum())
    if rank == len(answers):
        return None
    directions = torch.linalg.svd(precise, full_matrices=False).Vh
    shared = directions[:rank].square().sum(0) < 0.5
    if shared.all():
        found: Tensor = directions[:rank].T
        return found
    return _few_directions(answers * shared) if (answers * shared).any() else None
