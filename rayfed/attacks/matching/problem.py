"""Gradient matching: the problem of finding images whose gradient is the observed one, for many victims at once.

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

from rayfed import losses
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.attacks.matching.batch_norm import MovedStatistics
from rayfed.attacks.matching.distances import Distance, inner
from rayfed.attacks.matching.local_steps import many_local_updates
from rayfed.attacks.matching.priors import Prior
from rayfed.attacks.matching.relative import RelativeVariation, image_nats
from rayfed.attacks.matching.replay import Replayed
from rayfed.attacks.matching.second_derivatives import DIFFERENCED, TOGETHER, Way, way_of
from rayfed.attacks.matching.sent import Sent, sign_nats, wrong_signs
from rayfed.errors import UserError, nearest
from rayfed.gradients import clipped, unflatten
from rayfed.memory import Fitting, most_held
from rayfed.update import LocalTraining, Named, Observation

Found = TypeVar("Found")
LocalSteps = Literal["divided", "simulated"]
"""Matching of an update of several local steps: divided into one gradient, or by taking the steps."""

_BELIEVED = 0.9
"""Weight of labels that are supposed, beside even ones, where a search for soft labels begins."""
_IMAGES_AT_ONCE_CPU = 16
"""Images of one vectorised call: enough for its gain (LeNet 2.5 -> 0.6 ms an image), few enough for the caches."""
_GRADIENTS_AT_ONCE_CPU = 16_000_000
"""Values in the gradients of one call: of ConvNet 4 to 8 problems take 0.88 of the time of one, 16 take 1.3."""
_BYTES_AT_ONCE_CPU = 2**30
"""Bytes that the points of one call take one by one: together up to twice as many, and actors run side by side."""
_IMAGES_AT_ONCE_GPU = 512
"""Images of one vectorised call where only memory bounds it."""


def matched_layers(names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the parameters that are matched, in the order of `names`; all for None.

    Those that fit a pattern (`fnmatch`; all where none is without `!`), without those that fit what follows a `!`.
    Raises `UserError` for a pattern that no parameter fits, and if nothing is left.
    """
    known = list(names)
    chosen = _fitting(known, [p for p in patterns or () if not p.startswith("!")]) or set(known)
    chosen -= _fitting(known, [p[1:] for p in patterns or () if p.startswith("!")])
    if not chosen:
        raise UserError(f"layers: {', '.join(patterns or ())} leaves no parameter to match: leave fewer out")
    return [name for name in known if name in chosen]


def _fitting(known: list[str], patterns: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        names = matching_names(known, pattern)
        if not names:
            raise UserError(f"layers: no parameter of the model fits '{pattern}': {nearest(pattern, known)}")
        found.update(names)
    return found


def _as_one(rounds: Sequence[Named]) -> Named:
    """Return the tensors of several rounds, the attacked one first, under names of their own."""
    return {f"{name}@{i}" if i else name: t for i, tensors in enumerate(rounds) for name, t in tensors.items()}


def most_likely(labels: Tensor) -> Tensor:
    """Return labels (..., N) int64 as they are, of probabilities or logits (..., N, K) the largest."""
    return labels.argmax(-1) if labels.is_floating_point() else labels


def _cast(tensors: Named, dtype: torch.dtype) -> Named:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


@dataclass(frozen=True)
class Matching:
    """The matching problems of V victims with the same batch size N.

    A point (a row of D numbers) is the pixels of one victim's images, behind them N*K outputs that predict the labels
    (N*K*H*W of masks) where these are not known, and then what is sought of the model itself: how far from `sought` it
    is, in deviations of each tensor.
    """

    model: nn.Module
    weights: Named
    """All parameters that the client trains."""
    buffers: Named
    targets: Named
    """The observed gradients of the parameters that are matched, each with a leading dimension V."""
    labels: Tensor | None
    """(V, N) int64, or (V, N, K) probabilities or numbers, or (V, N, H, W) int64 classes of pixels, or None to optimise
    them with the images."""
    images_shape: tuple[int, ...]
    """(N, C, H, W)"""
    places: tuple[int, ...]
    """What has one label of its own: () for samples, (H, W) for each pixel (`Observation.places`)."""
    classes: int
    distance: Distance
    prior: Prior | None
    """Prior that is added to the distance."""
    local: LocalTraining
    """The local steps behind the targets."""
    simulated: bool
    """Whether the steps are simulated; otherwise a gradient at the weights is matched, clipped as one."""
    supposed: Tensor | None
    """(V, N, K) probabilities of soft labels where a search begins (`begun`); None: it begins anywhere."""
    has_numbers: bool
    """Whether labels are numbers rather than classes: what the model's loss says that outputs predict."""
    model_dtype: torch.dtype
    """The precision of the model's passes; the sums that local steps make keep that of the weights."""
    sent: Sent | None = None
    """What was sent of the targets; None: all, as it was."""
    through: tuple[Callable[[Named], Named], ...] | None = None
    """What the victims' defences make of a gradient, which is what is compared; None: they leave it as it is."""
    relative: RelativeVariation | None = None
    """Variation of the images by which the distance is multiplied, where its weight is to be chosen."""
    sought: Named = field(default_factory=dict)
    """Tensors in the place of `buffers` that are fitted with the images, as the attacker supposes them."""
    statistics: MovedStatistics | None = None
    """Distance from the batch-norm statistics that the clients returned; None where none moved."""
    way: Way = TOGETHER
    """How the model's gradients are computed so that they can be differentiated again."""
    earlier: tuple[Matching, ...] = ()
    """Problems of the same images at earlier rounds' weights: all gradients are compared as one vector."""
    fitting: Fitting = field(default_factory=Fitting)
    """How many points go together where memory is short."""

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
        alone: bool = True,
    ) -> Self:
        """Return the problem of observations that `in_groups` puts together, and of what was seen in earlier rounds.

        `alone` is False for one of several rounds. It is solved in the precision `dtype`; that of the model's gradients
        is `model_dtype` if it is another one, and float32 if the model does not run in float64.
        Raises `UserError` for a pattern in `layers` that no parameter fits, and `NotApplicable` for a model whose
        gradient no way can follow.
        """
        first = observations[0]
        alone = alone and not first.earlier
        names = matched_layers(first.update, layers)
        device = first.update[names[0]].device
        inner, shape = model_dtype or dtype, (first.batch_size, *first.sample.shape)
        network = without_tracking(model).to(device, inner)
        if inner == torch.float64 and not _runs_in(network, inner, shape, device):
            inner = torch.float32
            network = network.to(inner)
        weights, buffers = _cast(first.weights, dtype), _cast(buffers_for(network, first), inner)
        known = [o.labels for o in observations if o.labels is not None]
        given = torch.stack(known).to(device) if known else None
        soft = given is None or (given.is_floating_point() and not first.has_numbers)
        labels = None if given is None or soft else _cast({"": given}, dtype)[""]
        tried = (
            torch.zeros(1, first.classes, *first.places, dtype=dtype, device=device) if labels is None else labels[0]
        )
        if labels is None:
            tried[:, 0] = 1
        precise = dtype if inner == dtype else torch.float32
        way = way_of(model, network, _cast(weights, precise), shape, _cast({"": tried}, precise)[""])
        through = _through(observations, names)
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
            distance=distance,
            prior=prior,
            local=first.local,
            simulated=local_steps == "simulated",
            supposed=given if labels is None else None,
            has_numbers=first.has_numbers,
            model_dtype=inner,
            sent=sent,
            through=through,
            statistics=MovedStatistics.of(observations, model, network, _cast(weights, inner) | buffers, way.each),
            way=way,
            earlier=tuple(
                Matching.of(round, model, layers, distance, None, local_steps, dtype, model_dtype, alone)
                for round in rounds
            ),
        )

    @property
    def rounds(self) -> tuple[Matching, ...]:
        """The problems of all rounds, this one first."""
        return self, *self.earlier

    @property
    def device(self) -> torch.device:
        """Device of the problem: that of the observed weights."""
        return next(iter(self.targets.values())).device

    @property
    def pixels(self) -> int:
        """Number of a point's numbers that are pixels."""
        return prod(self.images_shape)

    @property
    def dimension(self) -> int:
        """Length of a point."""
        return self.shown + sum(tensor.numel() for tensor in self.sought.values())

    @property
    def shown(self) -> int:
        """Number of a point's numbers that are pixels or label logits."""
        return self.pixels + (prod(self._logits_shape) if self.labels is None else 0)

    @property
    def _logits_shape(self) -> tuple[int, ...]:
        """Shape of the outputs that predict labels, (N, K) or (N, K, H, W)."""
        return self.images_shape[0], self.classes, *self.places

    @property
    def at_once(self) -> int:
        """Number of points that one vectorised call takes best."""
        size = _IMAGES_AT_ONCE_GPU // self.images_shape[0]
        if self.device.type == "cpu":
            matched = sum(target[0].numel() for one in self.rounds for target in one.targets.values())
            size = min(_IMAGES_AT_ONCE_CPU // self.images_shape[0], _GRADIENTS_AT_ONCE_CPU // matched)
            if size > 1 and self.way is not DIFFERENCED:  # which keeps no graphs
                size = min(size, _BYTES_AT_ONCE_CPU // self._bytes)
        return max(1, size)

    @property
    def _bytes(self) -> int:
        """Bytes that the objective of one point takes with its slope: the same on every machine, measured once."""
        if self.fitting.each is None:
            dtype, generator = next(iter(self.targets.values())).dtype, torch.Generator().manual_seed(0)
            point = torch.rand(1, self.dimension, generator=generator, dtype=dtype)
            self.fitting.each = most_held(lambda: self.value_and_gradient(point, torch.tensor([0])))
        return self.fitting.each

    def images(self, points: Tensor) -> Tensor:
        """Return the images (Q, N, C, H, W) of points (Q, D)."""
        images: Tensor = points[:, : self.pixels].unflatten(1, self.images_shape)
        return images

    def begun(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return starts (Q, D) of victims (Q,) with the logits of the labels that are supposed, where there are."""
        if self.supposed is None:
            return points
        shares = torch.lerp(torch.full_like(self.supposed, 1 / self.classes), self.supposed, _BELIEVED)[victims]
        return torch.cat([points[:, : self.pixels], shares.log().flatten(1).to(points), points[:, self.shown :]], 1)

    def hard_labels(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return the known labels, or the most likely ones of the logits: (Q, N) or (Q, N, H, W) int64.

        Numbers (Q, N, K) are as they were found.
        """
        if self.has_numbers:
            return (self._soft_labels(points) if self.labels is None else self.labels[victims]).detach().float()
        return self._logits(points).argmax(2) if self.labels is None else most_likely(self.labels[victims])

    def target_norms(self) -> Tensor:
        """Return the squared norm of each victim's observed gradient in the matched layers, (V,)."""
        return torch.stack([inner(one.targets, one.targets) for one in self.rounds]).sum(0)

    def losses(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return the objective at points (Q, D) of victims (Q,), with its graph: (Q,)."""
        images, gradients, targets = self._matched(points, victims)
        loss = self.distance(gradients, targets)
        if self.sent is not None and self.sent.signs is not None:
            wrong = self._unit(targets) * wrong_signs(gradients, targets)
            loss = torch.where(self.sent.signs[victims], wrong, loss)
        for statistics in (one.statistics for one in self.rounds if one.statistics is not None):
            apart = statistics(images.to(self.model_dtype), victims).to(images.dtype)
            loss = loss + self._unit(targets) * apart / len(self.rounds)
        if self.relative is not None:
            loss = self.relative(loss, images, victims)
        return loss if self.prior is None else loss + self.prior(images)

    def _matched(self, points: Tensor, victims: Tensor) -> tuple[Tensor, Named, Named]:
        """Return images of points (Q, D) of victims (Q,), and gradients and targets of all rounds as one."""
        images = self.images(points)
        labels = self.labels[victims] if self.labels is not None else self._soft_labels(points)
        found = self._found(points)
        sides = [one._sides(images, labels, victims, found) for one in self.rounds]
        gradients, targets = map(_as_one, zip(*sides, strict=True))
        return images, gradients, targets

    def _sides(self, images: Tensor, labels: Tensor, victims: Tensor, found: Named) -> tuple[Named, Named]:
        """Return what is compared: the gradients of images, as they would have been sent, and the targets."""
        targets = {name: _rows(target, victims) for name, target in self.targets.items()}
        gradients = self._gradients(images, labels, found)
        if self.through is not None:
            parts = [{name: g[row] for name, g in gradients.items()} for row in range(len(victims))]
            made = [self.through[victim](part) for victim, part in zip(victims.tolist(), parts, strict=True)]
            return {name: torch.stack([one[name] for one in made]) for name in gradients}, targets
        if self.sent is None:
            return gradients, targets
        if decay := self.local.weight_decay:  # what a defence changed has it still
            gradients = {name: g + decay * self.weights[name] for name, g in gradients.items()}
        return self.sent.like(gradients, targets, victims), targets

    def _unit(self, targets: Named) -> Tensor:
        """Return half the distance of the opposite gradients, (Q,): a share of it has the distance's units."""
        return self.distance({name: -target for name, target in targets.items()}, targets) / 2

    def values(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return `losses` (Q,), detached; a third of the work where no slope is needed."""
        return torch.cat(self._in_chunks(lambda *chunk: self.losses(*chunk).detach(), points, victims))

    def judged(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return by what ends of different searches are compared, (Q,): no truth is needed."""
        judge = None if self.relative is None else self.relative.judge
        values = replace(self, relative=judge).values(points, victims)
        if self.sent is None or self.sent.signs is None:
            return values
        nats = torch.cat(self._in_chunks(self._nats, points, victims))
        return torch.where(self.sent.signs[victims], nats.to(values), values)

    @property
    def ways(self) -> list[Self]:
        """The problem with each measure of signs that is tried."""
        return [self] if self.sent is None else [replace(self, sent=sent) for sent in self.sent.ways]

    def _nats(self, points: Tensor, victims: Tensor) -> Tensor:
        """Return the nats that describe the wrong signs at points, and the images there (`relative`), (Q,)."""
        images, gradients, targets = self._matched(points, victims)
        seen = images if self.relative is None else images[:, : self.relative.count]
        return sign_nats(gradients, targets) + image_nats(seen)

    def value_and_gradient(self, points: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
        """Return `losses` (Q,) and their gradients (Q, D), detached."""

        def both(chunk: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
            chunk.requires_grad_()
            losses = self.losses(chunk, owners)
            self.way.differentiate(losses.sum(), chunk)
            assert chunk.grad is not None
            return losses.detach(), chunk.grad

        values, slopes = zip(*self._in_chunks(both, points, victims), strict=True)
        return torch.cat(values), torch.cat(slopes)

    def objective(self, victims: Tensor) -> Replayed:
        """Return `value_and_gradient` at points (Q, D) of these victims (Q,), for the many calls of a search."""
        parts = self.distance, self.prior, self.relative, self.sent, self.through
        names = [getattr(part, "__qualname__", type(part).__qualname__) for part in parts]
        kind = repr(self.model), self.images_shape, self.local, self.model_dtype, *names
        return Replayed(lambda points: self.value_and_gradient(points, victims), kind)

    def _in_chunks(self, act: Callable[[Tensor, Tensor], Found], points: Tensor, victims: Tensor) -> list[Found]:
        """Return what `act` makes of points, detached, and their victims.

        As many go together as one vectorised call takes best, or memory allows.
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
        return losses.of(self.model).predicted(logits) if self.has_numbers else logits.softmax(2)

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
        """Return the gradients of images in the model's precision, those of simulated steps without weight decay."""
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
    """Return whether a model takes inputs of a type: in double precision a layer that makes float32 tensors fails."""
    try:
        with torch.no_grad():
            model(torch.zeros(shape, dtype=dtype, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a user's own model raises
        return False
    return True


def _through(observations: Sequence[Observation], names: Sequence[str]) -> tuple[Callable[[Named], Named], ...] | None:
    """Return what the victims' defences make of a gradient, where that is known of all; it takes all tensors."""
    known = tuple(one for observation in observations if (one := observation.extra.get("through")) is not None)
    whole = all(set(one.task.weights) <= set(names) for one in known)
    return known if whole and len(known) == len(observations) and not observations[0].earlier else None


def _rows(tensor: Tensor, victims: Tensor) -> Tensor:
    """Return the rows (Q, ...) of victims (Q,); those of a single victim are no copies."""
    return tensor.expand(len(victims), *tensor.shape[1:]) if len(tensor) == 1 else tensor[victims]


def _deviation(supposed: Tensor) -> Tensor:
    """Return the standard deviation of a tensor's numbers; 1 where they are all the same."""
    deviation = supposed.std(correction=0)
    return torch.where(deviation > 0, deviation, torch.ones_like(deviation))
