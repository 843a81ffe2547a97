"""Gradient matching: find images whose gradient equals the observed one, for many victims at once.

Source: Zhu et al. 2019, "Deep Leakage from Gradients", section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import filter as matching_names
from math import prod
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from rayfed.attacks.adaptive.estimate import as_sent
from rayfed.attacks.adaptive.passage import Passage, find_passages
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.attacks.matching.batch_norm import MovedStatistics
from rayfed.attacks.matching.distances import Distance, inner, one_minus_cosine
from rayfed.attacks.matching.local_steps import many_local_updates
from rayfed.attacks.matching.priors import Prior
from rayfed.attacks.matching.relative import RelativeVariation, image_nats
from rayfed.attacks.matching.replay import Replayed
from rayfed.attacks.matching.second_derivatives import DIFFERENCED, TOGETHER, Way, way_of
from rayfed.attacks.matching.sent import Sent, sign_nats, wrong_signs
from rayfed.core import losses
from rayfed.core.memory import Fitting, measure_most_held
from rayfed.errors import UserError, nearest
from rayfed.gradients import clipped, unflatten
from rayfed.update import LocalTraining, Named, Observation

Found = TypeVar("Found")
LocalSteps = Literal["divided", "simulated"]
"""How to match an update of several local steps: divided into one gradient, or with simulated steps."""

_BELIEVED = 0.9
"""Weight of assumed labels against uniform ones at the start of a search for soft labels."""
_IMAGES_AT_ONCE_CPU = 16
"""Images in one vectorised call on a CPU: enough for a speed-up (LeNet 2.5 -> 0.6 ms per image), but within caches."""
_GRADIENTS_AT_ONCE_CPU = 16_000_000
"""Values in the gradients of one call. Time per problem on ConvNet, relative to one per call: 4 to 8 0.88, 16 1.3."""
_BYTES_AT_ONCE_CPU = 2**30
"""Memory per call in bytes, estimated from one point. A call may take twice as much, and several actors run at once."""
_IMAGES_AT_ONCE_GPU = 512
"""Images in one vectorised call on a GPU, which only memory limits."""


def matched_layers(names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the names of the parameters to match, in the order of `names`. `patterns` of None selects all.

    Selected are names that match a pattern (`fnmatch`; all names if every pattern has `!`), except those that match a
    pattern after `!`. Raises `UserError` for a pattern that matches no parameter, and if no parameter is left.
    """
    known = list(names)
    chosen = _fitting(known, [p for p in patterns or () if not p.startswith("!")]) or set(known)
    chosen -= _fitting(known, [p[1:] for p in patterns or () if p.startswith("!")])
    if not chosen:
        raise UserError(f"layers: {', '.join(patterns or ())} leaves no parameter to match; exclude fewer layers")
    return [name for name in known if name in chosen]


def _fitting(known: list[str], patterns: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        names = matching_names(known, pattern)
        if not names:
            raise UserError(f"layers: no parameter of the model matches '{pattern}': {nearest(pattern, known)}")
        found.update(names)
    return found


def _as_one(rounds: Sequence[Named]) -> Named:
    """Return the tensors of several rounds in one dictionary with unique names, the attacked round first."""
    return {f"{name}@{i}" if i else name: t for i, tensors in enumerate(rounds) for name, t in tensors.items()}


def most_likely(labels: Tensor) -> Tensor:
    """Return labels (..., N) int64 unchanged, or the most likely classes of probabilities or logits (..., N, K)."""
    return labels.argmax(-1) if labels.is_floating_point() else labels


def _cast(tensors: Named, dtype: torch.dtype) -> Named:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


@dataclass(frozen=True)
class _Comparison:
    """Settings by which a matching problem compares gradients (see `Matching.of`)."""

    layers: Sequence[str] | None
    distance: Distance
    prior: Prior | None
    local_steps: LocalSteps
    dtype: torch.dtype
    model_dtype: torch.dtype | None


@dataclass(frozen=True)
class Matching:
    """Gradient-matching problems of V victims with the same batch size N.

    A point is a row of D numbers, which start with the pixels of one victim's images. If labels are unknown, their N*K
    logits follow (N*K*H*W for masks). Unknown model tensors are last, as differences from `sought` in standard
    deviations of each tensor.
    """

    model: nn.Module
    weights: Named
    """All parameters that the client trains."""
    buffers: Named
    targets: Named
    """Observed gradients of the matched parameters, each with a leading dimension V."""
    labels: Tensor | None
    """(V, N) int64, or (V, N, K) probabilities or numbers, or (V, N, H, W) int64 classes of pixels. None: optimise them
    with the images."""
    images_shape: tuple[int, ...]
    """(N, C, H, W)"""
    places: tuple[int, ...]
    """Positions with separate labels: () for one label per sample, (H, W) for one per pixel (`Observation.places`)."""
    classes: int
    distance: Distance
    prior: Prior | None
    """Prior, added to the distance."""
    local: LocalTraining
    """Local steps of the client, from which the observed gradients result."""
    simulated: bool
    """Whether to simulate the local steps. Otherwise one gradient at the weights is matched, clipped once."""
    supposed: Tensor | None
    """(V, N, K) probabilities of soft labels at the start of a search (`begun`). None: no assumed labels."""
    has_numbers: bool
    """Whether labels are numbers rather than classes, according to the model's loss."""
    model_dtype: torch.dtype
    """Precision of the model's passes. Sums over local steps keep the precision of the weights."""
    sent: Sent | None = None
    """Evidence on which parts of the targets were sent. None: all, unchanged."""
    through: tuple[Passage, ...] | None = None
    """Passage of a gradient through each victim's defences, before the comparison. None: no passage is simulated."""
    relative: RelativeVariation | None = None
    """Variation prior that multiplies the distance, used if its weight is chosen automatically."""
    sought: Named = field(default_factory=dict)
    """Tensors that replace `buffers` and are fitted with the images, at the attacker's initial values."""
    statistics: MovedStatistics | None = None
    """Distance from the batch-norm statistics that the clients returned. None if none changed."""
    way: Way = TOGETHER
    """Method to compute the model's gradients with their autograd graphs."""
    earlier: tuple[Matching, ...] = ()
    """Problems of the same images at the weights of earlier rounds. All gradients are compared as one vector."""
    fitting: Fitting = field(default_factory=Fitting)
    """Number of points per call when memory is short."""

    @classmethod
    def of(
        cls,
        observations: Sequence[Observation],
        model: nn.Module,
        layers: Sequence[str] | None,
        distance: Distance,
        prior: Prior | None = None,
        local_steps: LocalSteps = "divided",
        dtype: torch.dtype = torch.float32,
        model_dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the matching problem of a group of observations (`in_groups`), including their earlier rounds.

        `dtype` is the precision of the problem, and `model_dtype` that of the model's gradients if it differs. Models
        that do not run in float64 use float32. Raises `UserError` for a pattern in `layers` that matches no parameter,
        and `NotApplicable` for a model whose gradient cannot be differentiated.
        """
        comparison = _Comparison(layers, distance, prior, local_steps, dtype, model_dtype)
        return cls._of_round(observations, model, comparison, alone=not observations[0].earlier)

    @classmethod
    def _of_round(
        cls, observations: Sequence[Observation], model: nn.Module, comparison: _Comparison, alone: bool
    ) -> Self:
        """Return the problem of a round, with those of its earlier rounds; `alone` is False for one of several."""
        observations = [as_sent(observation) for observation in observations]
        first, dtype = observations[0], comparison.dtype
        names = matched_layers(first.update, comparison.layers)
        device = first.update[names[0]].device
        inner, shape = comparison.model_dtype or dtype, (first.batch_size, *first.sample.shape)
        network = without_tracking(model).to(device, inner)
        if inner == torch.float64 and not _runs_in(network, inner, shape, device):
            inner = torch.float32
            network = network.to(inner)
        weights, buffers = _cast(first.weights, dtype), _cast(buffers_for(network, first), inner)
        known = [o.labels for o in observations if o.labels is not None]
        given = torch.stack(known).to(device) if known else None
        soft = given is None or (given.is_floating_point() and not first.has_numbers)
        labels = None if given is None or soft else _cast({"": given}, dtype)[""]
        if labels is None:
            tried = torch.zeros(1, first.classes, *first.places, dtype=dtype, device=device)
            tried[:, 0] = 1
        else:
            tried = labels[0]
        precise = dtype if inner == dtype else torch.float32
        way = way_of(model, network, _cast(weights, precise), shape, _cast({"": tried}, precise)[""])
        through = find_passages(observations, names, model, scale_free=comparison.distance is one_minus_cosine)
        sent = Sent.of(observations, names, dtype, model, alone) if through is None else None
        gradients = [observation.gradient if sent is None else observation.step for observation in observations]
        targets = _cast({name: torch.stack([g[name] for g in gradients]) for name in names}, dtype)
        rounds = zip(*(observation.earlier for observation in observations), strict=True)
        return cls(
            model=network,
            weights=weights,
            buffers=buffers,
            targets=targets if sent is None else sent.matched(targets),
            labels=labels,
            images_shape=shape,
            places=first.places,
            classes=first.classes,
            distance=comparison.distance,
            prior=comparison.prior,
            local=first.local,
            simulated=comparison.local_steps == "simulated",
            supposed=given if labels is None else None,
            has_numbers=first.has_numbers,
            model_dtype=inner,
            sent=sent,
            through=through,
            statistics=MovedStatistics.of(observations, model, network, _cast(weights, inner) | buffers, way.each),
            way=way,
            earlier=tuple(
                Matching._of_round(round, model, replace(comparison, prior=None), alone=False) for round in rounds
            ),
        )

    @property
    def rounds(self) -> tuple[Matching, ...]:
        """Return the problems of all rounds: the attacked round first, then the earlier rounds."""
        return self, *self.earlier

    @property
    def device(self) -> torch.device:
        """Return the device of the observed gradients."""
        return next(iter(self.targets.values())).device

    @property
    def pixels(self) -> int:
        """Return the number of entries of a point that are pixels."""
        return prod(self.images_shape)

    @property
    def dimension(self) -> int:
        """Return the number of entries of a point: pixels, label logits and unknown model tensors."""
        return self.shown + sum(tensor.numel() for tensor in self.sought.values())

    @property
    def shown(self) -> int:
        """Return the number of entries of a point that are pixels or label logits."""
        return self.pixels + (prod(self._logits_shape) if self.labels is None else 0)

    @property
    def _logits_shape(self) -> tuple[int, ...]:
        """Shape of the label logits, (N, K) or (N, K, H, W)."""
        return self.images_shape[0], self.classes, *self.places

    @property
    def at_once(self) -> int:
        """Return the number of points that one vectorised call handles fastest."""
        size = _IMAGES_AT_ONCE_GPU // self.images_shape[0]
        if self.device.type == "cpu":
            matched = sum(target[0].numel() for one in self.rounds for target in one.targets.values())
            size = min(_IMAGES_AT_ONCE_CPU // self.images_shape[0], _GRADIENTS_AT_ONCE_CPU // matched)
            if size > 1 and self.way is not DIFFERENCED:  # it keeps no graphs
                size = min(size, _BYTES_AT_ONCE_CPU // self._bytes)
        return max(1, size)

    @property
    def _bytes(self) -> int:
        """Bytes for the objective of one point and its derivative, measured once and equal on every machine."""
        if self.fitting.each is None:
            dtype, generator = next(iter(self.targets.values())).dtype, torch.Generator().manual_seed(0)
            point = torch.rand(1, self.dimension, generator=generator, dtype=dtype)
            self.fitting.each = measure_most_held(lambda: self.value_and_gradient(point, torch.tensor([0])))
        return self.fitting.each

    def images(self, points: Tensor) -> Tensor:
        """Return the images (Q, N, C, H, W) that points (Q, D) encode."""
        images: Tensor = points[:, : self.pixels].unflatten(1, self.images_shape)
        return images

    def begun(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return the points (Q, D) at which searches for victims (Q,) start, with logits of any assumed labels."""
        if self.supposed is None:
            return points
        shares = torch.lerp(torch.full_like(self.supposed, 1 / self.classes), self.supposed, _BELIEVED)[victims]
        return torch.cat([points[:, : self.pixels], shares.log().flatten(1).to(points), points[:, self.shown :]], 1)

    def hard_labels(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return the known labels, or the labels with the largest logits: (Q, N) or (Q, N, H, W) int64.

        Labels that are numbers (Q, N, K) are returned as float32.
        """
        if self.has_numbers:
            return (self._soft_labels(points) if self.labels is None else self.labels[victims]).detach().float()
        return self._logits(points).argmax(2) if self.labels is None else most_likely(self.labels[victims])

    def target_norms(self) -> Tensor:
        """Return the squared norm of each victim's observed gradient in the matched layers, (V,)."""
        return torch.stack([inner(one.targets, one.targets) for one in self.rounds]).sum(0)

    def losses(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return the objective at points (Q, D) of victims (Q,), with its autograd graph: (Q,)."""
        images, gradients, targets = self._matched(points, victims)
        loss = self._apart(gradients, targets, victims)
        if self.sent is not None and self.sent.signs is not None:
            wrong = self._unit(targets) * wrong_signs(gradients, targets)
            loss = torch.where(self.sent.signs[victims], wrong, loss)
        for statistics in (one.statistics for one in self.rounds if one.statistics is not None):
            apart = statistics(images.to(self.model_dtype), victims).to(images.dtype)
            loss = loss + self._unit(targets) * apart / len(self.rounds)
        if self.relative is not None:
            loss = self.relative(loss, images, victims)
        return loss if self.prior is None else loss + self.prior(images)

    def _apart(self, gradients: Named, targets: Named, victims: Tensor) -> Tensor:
        """Return the distance between gradients and targets, (Q,), or the nats of noise with a structure."""
        if self.through is None or not self.through[0].structured:
            return self.distance(gradients, targets)
        nats = []
        for row, victim in enumerate(victims.tolist()):
            nats.append(self.through[victim].nats({name: g[row] for name, g in gradients.items()}))
        return torch.stack(nats).to(next(iter(gradients.values()))) * self._unit(targets)

    def _matched(self, points: Tensor, victims: Tensor) -> tuple[Tensor, Named, Named]:
        """Return images of points (Q, D) of victims (Q,), with gradients and targets of all rounds merged."""
        images = self.images(points)
        labels = self.labels[victims] if self.labels is not None else self._soft_labels(points)
        found = self._found(points)
        sides = [one._sides(images, labels, victims, found) for one in self.rounds]
        gradients, targets = map(_as_one, zip(*sides, strict=True))
        return images, gradients, targets

    def _sides(self, images: Tensor, labels: Tensor, victims: Tensor, found: Named) -> tuple[Named, Named]:
        """Return gradients of the images, with the effects of defences, and targets."""
        targets = {name: _rows(target, victims) for name, target in self.targets.items()}
        gradients = self._gradients(images, labels, found)
        if self.through is not None:
            parts = [{name: g[row] for name, g in gradients.items()} for row in range(len(victims))]
            made = [self.through[victim].send(part) for victim, part in zip(victims.tolist(), parts, strict=True)]
            return {name: torch.stack([one[name] for one in made]) for name in gradients}, targets
        if self.sent is None:
            return gradients, targets
        if decay := self.local.weight_decay:  # altered updates still contain weight decay
            gradients = {name: g + decay * self.weights[name] for name, g in gradients.items()}
        return self.sent.like(gradients, targets, victims), targets

    def _unit(self, targets: Named) -> Tensor:
        """Return half the distance between opposite gradients, (Q,), which converts shares to units of the distance."""
        return self.distance({name: -target for name, target in targets.items()}, targets) / 2

    def values(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return `losses` (Q,), detached, with a third of the work of `value_and_gradient`."""
        return torch.cat(self._in_chunks(lambda *chunk: self.losses(*chunk).detach(), points, victims))

    def judged(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return values (Q,) that compare the end points of different searches, without the true images."""
        judge = None if self.relative is None else self.relative.judge
        values = replace(self, relative=judge).values(points, victims)
        if self.sent is None or self.sent.signs is None:
            return values
        nats = torch.cat(self._in_chunks(self._nats, points, victims))
        return torch.where(self.sent.signs[victims], nats.to(values), values)

    @property
    def ways(self) -> list[Self]:
        """Return copies of the problem, one for each way to match a sign-only update that the search tries."""
        return [self] if self.sent is None else [replace(self, sent=sent) for sent in self.sent.ways]

    def _nats(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return the nats that describe the wrong signs at points plus the images there (`relative`), (Q,)."""
        images, gradients, targets = self._matched(points, victims)
        seen = images if self.relative is None else images[:, : self.relative.count]
        return sign_nats(gradients, targets) + image_nats(seen)

    def value_and_gradient(self, points: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
        """Return `losses` (Q,) and their gradients with respect to the points (Q, D), detached."""

        def both(chunk: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
            chunk.requires_grad_()
            losses = self.losses(chunk, owners)
            self.way.differentiate(losses.sum(), chunk)
            assert chunk.grad is not None
            return losses.detach(), chunk.grad

        values, slopes = zip(*self._in_chunks(both, points, victims), strict=True)
        return torch.cat(values), torch.cat(slopes)

    def objective(self, victims: Tensor) -> Replayed:
        """Return `value_and_gradient` as a function of points (Q, D) of fixed victims (Q,), for repeated calls."""
        parts = self.distance, self.prior, self.relative, self.sent, self.through
        names = [getattr(part, "__qualname__", type(part).__qualname__) for part in parts]
        kind = repr(self.model), self.images_shape, self.local, self.model_dtype, *names
        return Replayed(lambda points: self.value_and_gradient(points, victims), kind)

    def _in_chunks(self, act: Callable[[Tensor, Tensor], Found], points: Tensor, victims: Tensor) -> list[Found]:
        """Return the results of `act` on chunks of detached points and their victims.

        A chunk holds as many points as one vectorised call handles best, or as memory allows.
        """
        points, together = points.detach(), self.at_once if len(points) > 1 else 1
        parts = self.fitting.in_parts(
            lambda part: act(points[part], victims[part]), len(points), "points of a search", together
        )
        return list(parts)

    def _logits(self, points: Tensor) -> Tensor:
        logits: Tensor = points[:, self.pixels : self.shown].unflatten(1, self._logits_shape)
        return logits

    def _soft_labels(self, points: Tensor) -> Tensor:
        logits = self._logits(points)
        return losses.get_loss(self.model).predicted(logits) if self.has_numbers else logits.softmax(2)

    def _found(self, points: Tensor) -> Named:
        """Return the unknown model tensors that points (Q, D) encode, each with a leading dimension Q."""
        if not self.sought:
            return {}
        away = vmap(lambda numbers: unflatten(numbers, self.sought))(points[:, self.shown :])
        return {name: supposed + _deviation(supposed) * away[name] for name, supposed in self.sought.items()}

    def _gradients(self, images: Tensor, labels: Tensor, found: Named) -> Named:
        inner = _cast({"images": images, "labels": labels}, self.model_dtype)
        return _cast(self._own_gradients(**inner, found=_cast(found, self.model_dtype)), images.dtype)

    def _own_gradients(self, images: Tensor, labels: Tensor, found: Named) -> Named:
        """Return gradients of images in the model's precision, without weight decay for simulated steps."""
        local = self.local
        if self.simulated:
            updates = many_local_updates(self.model, self.weights, self.buffers, images, labels, local, found, self.way)
            steps = {name: updates[name] / local.scale for name in self.targets}
            return (
                {n: s - local.weight_decay * self.weights[n] for n, s in steps.items()} if local.weight_decay else steps
            )
        weights = _cast(self.weights, self.model_dtype)
        matched = weights if local.clip_norm is not None else {name: weights[name] for name in self.targets}
        fixed = self.buffers | {name: w for name, w in weights.items() if name not in matched}
        gradients = self.way.gradients(self.model, matched, fixed, images, labels, found)
        if local.clip_norm is not None:
            gradients = clipped(gradients, local.clip_norm, leading=1)
        return {name: gradients[name] for name in self.targets}


def _runs_in(model: nn.Module, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> bool:
    """Return whether a model accepts inputs of a dtype. Layers that create float32 tensors fail in float64."""
    try:
        with torch.no_grad():
            model(torch.zeros(shape, dtype=dtype, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a user's model may raise any exception
        return False
    return True


def _rows(tensor: Tensor, victims: Tensor) -> Tensor:
    """Return the rows (Q, ...) of victims (Q,), as a view if there is only one victim."""
    return tensor.expand(len(victims), *tensor.shape[1:]) if len(tensor) == 1 else tensor[victims]


def _deviation(supposed: Tensor) -> Tensor:
    """Return the standard deviation of a tensor's numbers, or 1 if they are all equal."""
    deviation = supposed.std(correction=0)
    return torch.where(deviation > 0, deviation, torch.ones_like(deviation))
