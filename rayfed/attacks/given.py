"""Updates from outside a run: what a client was sent and returned, looked over, becomes an observation.

What an attack cannot be given (missing tensors, wrong shapes) is refused. What is odd but may be meant (a sign, a
scale) is a remark: an attack on such an update finds little, and that says nothing of a right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rayfed.arrays import Arrays, by_name, is_counter
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, weights_of
from rayfed.models.wrappers import PREFIXES, bare_name, is_wrapped, unwrapped
from rayfed.number_types import check_model, type_name
from rayfed.samples import SampleSpec
from rayfed.update import LocalTraining, Named, Observation, list_nonfinite

_ROUNDING = 1e-2
"""Share by which the entries of a bias' gradient may miss their sum of zero, for differences of weights are rounded."""
_ALIKE = 1.3
"""Ratio of a class's probabilities on blank, bright and random inputs up to which it is taken for that on any."""
_FAR = 2.0
"""Ratio of what is returned to what it should be from which on it is remarked upon."""


@dataclass(frozen=True)
class Given:
    """An update as attacks take it."""

    observation: Observation
    remarks: tuple[str, ...]
    """What was put right, and what seems wrong, a sentence each; empty where nothing does, which proves nothing."""


def observe(
    model: nn.Module,
    sent: Arrays,
    sample: SampleSpec,
    classes: int,
    batch_size: int,
    *,
    returned: Arrays | None = None,
    gradient: Arrays | None = None,
    local: LocalTraining | None = None,
) -> Given:
    """Return the observation of a client that was sent a state dict.

    Give either the state dict that it `returned` after the `local` steps, or the `gradient` of the mean loss over its
    `batch_size` samples. Each may hold NumPy arrays, by name or in the order of `model.state_dict()`. Prefixes of
    wrappers are removed from the names. Raises `UserError` with the names of tensors that are missing, have other
    shapes than the model's or are not finite; the counters of batch norms (`num_batches_tracked`) are not compared.

    >>> import torch
    >>> from rayfed.attacks.given import observe
    >>> from rayfed.samples import Pixels
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> torch.nn.functional.cross_entropy(model(torch.rand(1, 1, 8, 8)), torch.tensor([3])).backward()
    >>> gradient = {name: weight.grad for name, weight in model.named_parameters()}
    >>> given = observe(model, model.state_dict(), Pixels(1, 8, 8), classes=10, batch_size=1, gradient=gradient)
    >>> given.remarks
    ()
    >>> given.observation.update["1.weight"].shape
    torch.Size([10, 64])
    """
    if (returned is None) == (gradient is None):
        raise UserError("give either the state that the client `returned`, or its `gradient`")
    if returned is not None and local is None:
        raise UserError("a state that was returned needs its `local` steps: LocalTraining(steps=..., lr=...)")
    if local is not None:
        local.check()
    check_model(model, type(model).__name__)
    remarks: list[str] = []
    note = _ignore if is_wrapped(model) else remarks.append  # its own names have the prefixes, too
    with unwrapped(model) as model:
        trained, fixed = weights_of(model), buffers_of(model)
        known, stored = trained | fixed, model.state_dict().keys()
        needed = [name for name in known if name in stored and not is_counter(name)]  # some buffers are never sent
        state = fixed | _named("sent", by_name("sent", sent, model), needed, known, note)
        weights = {name: state[name] for name in trained}
        buffers = {name: state[name] for name in fixed}
        if gradient is not None:
            update, back = _named("gradient", by_name("gradient", gradient, model), trained, known, note), {}
            local = LocalTraining()
        else:
            assert returned is not None
            assert local is not None
            after = _named("returned", by_name("returned", returned, model), trained, known, note)
            update = {name: weights[name] - after[name] for name in trained}
            back = {name: after[name] for name in fixed if name in after and after[name].is_floating_point()}
        observation = Observation(
            victim=0,
            round=0,
            weights=weights,
            buffers=buffers,
            update={name: update[name] for name in trained},
            scale=local.scale,
            batch_size=batch_size,
            sample=sample,
            classes=classes,
            local=local,
            returned_buffers=back,
        )
        return Given(observation, (*remarks, *_oddities(model, observation, returned is not None)))


def _ignore(remark: str) -> None:
    pass


def _named(what: str, given: Named, needed: Iterable[str], known: Named, note: Callable[[str], None]) -> Named:
    """Return tensors by the model's names, in its types; raises `UserError` if one is missing or does not fit."""
    found: Named = {}
    for prefix, wrapper in _taken_off(given, known).items():
        note(f"{what}: the names begin with '{prefix}', as {wrapper} writes them: that was taken off")
    for name, tensor in given.items():
        found[bare_name(name, known)] = tensor.detach()
    if absent := [name for name in needed if name not in found]:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise UserError(
            f"{what}: {', '.join(absent[:3])}{more} of the model's tensors are missing: give all, under the names of "
            f"model.state_dict(); the first that it has is {next(iter(found), 'none')}"
        )
    taken = {name: found[name] for name in known if name in found}
    for name, tensor in taken.items():
        if tensor.shape != known[name].shape:
            shapes = f"{tuple(tensor.shape)}, the model's {tuple(known[name].shape)}"
            raise UserError(f"{what}: {name} has shape {shapes}: is it this model's, with as many classes?")
        if tensor.is_complex() and not known[name].is_complex():
            raise UserError(
                f"{what}: {name} is {type_name(tensor.dtype)}, and the model's is real: give the state of this model"
            )
    typed = {name: tensor.to(known[name].dtype) for name, tensor in taken.items()}
    if bad := list_nonfinite(typed, known):
        raise UserError(f"{what}: {bad[0]} has values that are not finite: there is nothing to match")
    return typed


def _taken_off(given: Mapping[str, Tensor], known: Named) -> dict[str, str]:
    names = [name for name in given if bare_name(name, known) != name]
    return {prefix: wrapper for prefix, wrapper in PREFIXES.items() if any(prefix in name for name in names)}


def _oddities(model: nn.Module, seen: Observation, difference: bool) -> Iterator[str]:
    """Yield what contradicts that the update is the gradient of a mean cross entropy.

    The gradient of the last bias is the mean of the predicted probabilities less the share of each label: it sums to
    zero, classes that are not in the batch have positive entries, and these are no more than 1 together. Where the
    update has no such bias, or is too far from one (noise, pruning, another loss), nothing is said.
    """
    if not any(tensor.count_nonzero() for tensor in seen.update.values()):
        yield "the update is zero in all places: what was returned is what was sent"
        return
    entries = _last_bias(seen)
    if entries is None:
        return
    labels, others = int((entries < 0).sum()), int((entries > 0).sum())
    if labels > seen.batch_size >= others:
        order = "sent and returned are in each other's place" if difference else "it is what is added to the weights"
        yield (
            f"the update seems to point the wrong way, {order}: {labels} entries of the last bias are negative, as "
            f"those of labels, of which {seen.batch_size} samples have no more than {seen.batch_size}; with the other "
            f"sign there are {others}"
        )
        entries = -entries
    elif labels > seen.batch_size:
        return
    ratio = _ratio(model, seen, entries) if seen.local.steps == 1 else None
    largest = float(entries.clamp(min=0).sum())
    if ratio is not None and not 1 / _FAR < ratio < _FAR:
        found = f"{ratio:.3g} times that of a mean loss at these weights, by the last bias"
    elif largest > 1 + _ROUNDING:
        found = f"larger than that of any mean loss: the last bias' positive entries sum to {largest:.3g}, above 1"
    else:
        return
    yield (
        f"the gradient behind the update is {found}: look at lr ({seen.local.lr:g}) and steps ({seen.local.steps}), at "
        f"a loss that is a sum over {seen.batch_size} samples, and at a factor before the update"
    )


def _last_bias(seen: Observation) -> Tensor | None:
    """Return the estimated gradient of the last bias of a linear layer over the classes, where it is like one."""
    for name, tensor in reversed(seen.gradient.items()):
        if tensor.shape == (seen.classes,) and name.endswith("bias") and seen.classes > 2:
            alike = tensor.double().sum().abs() <= _ROUNDING * tensor.double().abs().sum() and bool(tensor.all())
            return tensor if alike else None
    return None


def _ratio(model: nn.Module, seen: Observation, entries: Tensor) -> float | None:
    """Return how many times larger the entries of absent classes are than probabilities on inputs of our own.

    None where these depend on the inputs, as a trained model's do, or where classes disagree.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.cat([seen.sample.trial(), seen.sample.noise(6, generator)])
    state = {name: tensor.clone() for name, tensor in (seen.weights | seen.buffers).items()}
    with torch.no_grad():
        try:
            logits = functional_call(model, state, (inputs,))
        except (RuntimeError, ValueError):  # a model that does not take such inputs
            return None
    if not isinstance(logits, Tensor) or logits.shape != (len(inputs), seen.classes):
        return None
    probabilities = logits.double().softmax(1)
    low, high = probabilities.min(0).values, probabilities.max(0).values
    absent = (entries > 0) & (high < _ALIKE * low)
    if absent.sum() < 2:
        return None
    ratios = entries[absent].double() / probabilities.mean(0)[absent]
    return float(ratios.median()) if ratios.max() < _ALIKE**2 * ratios.min() else None
