"""Build and check an observation from an update that was recorded outside rayfed.

Missing tensors and wrong shapes raise an error. An unusual sign or scale may be intended and only gives a remark. An
attack on a wrong update fails, which shows nothing about the right update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rayfed.core.arrays import Arrays, is_counter, name_arrays
from rayfed.core.number_types import check_model, type_name
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, weights_of
from rayfed.models.wrappers import PREFIXES, bare_name, is_wrapped, unwrapped
from rayfed.samples import SampleSpec
from rayfed.update import LocalTraining, Named, Observation, list_nonfinite

_ROUNDING = 1e-2
"""Relative tolerance for the sum of a bias gradient, which should be zero; differences of weights are rounded."""
_ALIKE = 1.3
"""Maximum ratio of a class's probabilities on blank, bright and random inputs that counts as independent of inputs."""
_FAR = 2.0
"""Ratio of the actual to the expected size of an update from which on a remark is made."""


@dataclass(frozen=True)
class Given:
    """A recorded update, converted to an observation for attacks, with remarks on apparent errors."""

    observation: Observation
    remarks: tuple[str, ...]
    """One sentence for each correction and each apparent error. Empty remarks do not prove that the update is right."""


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
    """Build the observation of a client from the state dict that was sent and the update that was recorded.

    Give either the state dict that the client `returned` after its `local` steps, or the `gradient` of the mean loss
    over its `batch_size` samples. Each may hold NumPy arrays, by name or in the order of `model.state_dict()`. Prefixes
    of wrappers are removed from the names.

    Raises `UserError` with the names of tensors that are missing, not finite or of another shape than the model's. The
    counters of batch norms (`num_batches_tracked`) are not compared.

    >>> import torch
    >>> from rayfed.attacks.external_update import observe
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
        raise UserError("give either `returned`, the client's state dict after training, or `gradient`")
    if returned is not None and local is None:
        raise UserError("`returned` needs the client's `local` training: give local=LocalTraining(steps=..., lr=...)")
    if local is not None:
        local.check()
    check_model(model, type(model).__name__)
    remarks: list[str] = []
    note = _ignore if is_wrapped(model) else remarks.append  # a wrapped model's own names have the prefixes, too
    with unwrapped(model) as model:
        trained, fixed = weights_of(model), buffers_of(model)
        known, stored = trained | fixed, model.state_dict().keys()
        needed = [name for name in known if name in stored and not is_counter(name)]  # some buffers are never sent
        state = fixed | _named("sent", name_arrays("sent", sent, model), needed, known, note)
        weights = {name: state[name] for name in trained}
        buffers = {name: state[name] for name in fixed}
        if gradient is not None:
            update, back = _named("gradient", name_arrays("gradient", gradient, model), trained, known, note), {}
            local = LocalTraining()
        else:
            assert returned is not None
            assert local is not None
            after = _named("returned", name_arrays("returned", returned, model), trained, known, note)
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
    """Return tensors by the model's names and in its types; raise `UserError` if one is missing or does not fit."""
    found: Named = {}
    for prefix, wrapper in _taken_off(given, known).items():
        note(f"{what}: removed the prefix '{prefix}' of {wrapper} from the names")
    for name, tensor in given.items():
        found[bare_name(name, known)] = tensor.detach()
    if absent := [name for name in needed if name not in found]:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise UserError(
            f"{what}: {', '.join(absent[:3])}{more} of the model's tensors are missing: give all, named as in "
            f"model.state_dict(); the first name found is {next(iter(found), 'none')}"
        )
    taken = {name: found[name] for name in known if name in found}
    for name, tensor in taken.items():
        if tensor.shape != known[name].shape:
            shapes = f"{tuple(tensor.shape)}, but the model's is {tuple(known[name].shape)}"
            raise UserError(f"{what}: {name} has shape {shapes}: check the model and the number of classes")
        if tensor.is_complex() and not known[name].is_complex():
            raise UserError(
                f"{what}: {name} has complex values ({type_name(tensor.dtype)}), but the model's values are real: give "
                "the tensors of this model"
            )
    typed = {name: tensor.to(known[name].dtype) for name, tensor in taken.items()}
    if bad := list_nonfinite(typed, known):
        raise UserError(f"{what}: {bad[0]} has values that are not finite: give finite values")
    return typed


def _taken_off(given: Mapping[str, Tensor], known: Named) -> dict[str, str]:
    names = [name for name in given if bare_name(name, known) != name]
    return {prefix: wrapper for prefix, wrapper in PREFIXES.items() if any(prefix in name for name in names)}


def _oddities(model: nn.Module, seen: Observation, difference: bool) -> Iterator[str]:
    """Yield remarks on an update that cannot be the gradient of a mean cross entropy.

    The gradient of the last bias is the mean predicted probability of each class minus the share of its label. It sums
    to zero, entries of classes that are not in the batch are positive, and positive entries sum to at most 1. No remark
    is made if the update has no such bias or does not resemble one (noise, pruning, another loss).
    """
    if not any(tensor.count_nonzero() for tensor in seen.update.values()):
        yield "the update is zero everywhere: the returned state equals the sent state, or the gradient is zero"
        return
    entries = _last_bias(seen)
    if entries is None:
        return
    labels, others = int((entries < 0).sum()), int((entries > 0).sum())
    if labels > seen.batch_size >= others:
        order = "sent and returned may be swapped" if difference else "the gradient may be multiplied by minus one"
        yield (
            f"the update seems to have the wrong sign ({order}): {labels} entries of the last bias are negative, but "
            f"{seen.batch_size} samples have at most {seen.batch_size} labels; with the opposite sign, {others} are "
            "negative"
        )
        entries = -entries
    elif labels > seen.batch_size:
        return
    ratio = _ratio(model, seen, entries) if seen.local.steps == 1 else None
    largest = float(entries.clamp(min=0).sum())
    if ratio is not None and not 1 / _FAR < ratio < _FAR:
        found = f"{ratio:.3g} times as large as the gradient of a mean loss at these weights, judged by the last bias"
    elif largest > 1 + _ROUNDING:
        found = f"larger than that of any mean loss: the last bias' positive entries sum to {largest:.3g}, above 1"
    else:
        return
    yield (
        f"the gradient computed from the update is {found}: check lr ({seen.local.lr:g}), steps "
        f"({seen.local.steps}), whether the loss is a sum over {seen.batch_size} samples, and any factor on the update"
    )


def _last_bias(seen: Observation) -> Tensor | None:
    """Return the estimated gradient of the last bias over the classes, or None if it does not resemble one."""
    for name, tensor in reversed(seen.gradient.items()):
        if tensor.shape == (seen.classes,) and name.endswith("bias") and seen.classes > 2:
            alike = tensor.double().sum().abs() <= _ROUNDING * tensor.double().abs().sum() and bool(tensor.all())
            return tensor if alike else None
    return None


def _ratio(model: nn.Module, seen: Observation, entries: Tensor) -> float | None:
    """Return the ratio of the entries of absent classes to the model's probabilities on random and constant inputs.

    Return None if the probabilities depend on the inputs, as in a trained model, or if the classes disagree.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.cat([seen.sample.trial(), seen.sample.noise(6, generator)])
    state = {name: tensor.clone() for name, tensor in (seen.weights | seen.buffers).items()}
    with torch.no_grad():
        try:
            logits = functional_call(model, state, (inputs,))
        except (RuntimeError, ValueError):  # the model does not accept such inputs
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
