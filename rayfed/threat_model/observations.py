"""Observations of clients for attackers, the true samples of each observation, and the scoring of inferences.

This code runs on the clients' side of the simulation; attackers receive only the `Observation`. An observation consists
of the part of the client's update that the attack's view shows (`rayfed.threat_model.views`), and of its grants
(`rayfed.threat_model.grants`). Names and shapes are checked, but the values of user-defined views and grants are
trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed import gradients
from rayfed.attacks.base import Inference, Reconstruction
from rayfed.attacks.fit import fit_of, judged
from rayfed.attacks.mixed import unmixed
from rayfed.core import losses, seeds
from rayfed.data.partitions.base import count_labels
from rayfed.defences.base import Task
from rayfed.defences.some_clients import defences_at
from rayfed.errors import UserError
from rayfed.metrics.inference import class_share, correct, nearest
from rayfed.metrics.roc import auc
from rayfed.models.build import is_stochastic
from rayfed.models.private import only, without
from rayfed.scenario import AttackSpec
from rayfed.simulation.client import plan
from rayfed.simulation.client.local import batches, local_training, trained_samples
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.visit import Candidate, ClientVisit, ObservedClient, Truth
from rayfed.threat_model.grants.candidates import KINDS
from rayfed.threat_model.grants.code import check_on_true_samples, for_true_samples
from rayfed.threat_model.views import VisibleUpdate
from rayfed.update import Named, Observation, Update


@dataclass(frozen=True)
class ObservationBuilder:
    """Builder of the observations that attackers get of clients, and scorer of the attackers' inferences."""

    runtime: ClientRuntime

    def observe(self, visit: ClientVisit, attack: AttackSpec, repeat: int = 0) -> tuple[Observation, Truth]:
        """Return an attack's observation of one client in one round, and the client's true samples.

        Repeats differ only in the attacker's random numbers. With `observes: update`, the observation contains the
        update that the client sent, up to rounding if its cohort was trained together. Under a malicious server, it is
        the update on the tampered model, which the run does not use. Raises `UserError` for a client without samples in
        the round.
        """
        observed = self._begin(ObservedClient(self.runtime, visit, attack, repeat))
        seen, truth = _observed(observed)
        earlier = tuple(_observed(observed.before(sent))[0] for sent in observed.visit.earlier)
        return replace(seen, earlier=earlier), truth

    def fit(self, inputs: Tensor, labels: Tensor, observed: ObservedClient, truth: Truth) -> float | None:
        """Return the fit of samples (N, *shape) to an observation: how well the samples explain the update.

        `truth` has the fit of the true samples. None if the fit is undefined.
        """
        observed = self._begin(observed)
        seen, _ = _build_observation(observed)
        fit, fits, nats = fit_of(inputs, labels, for_true_samples(observed, unmixed(seen)), observed.asked().model)
        return judged(Reconstruction(inputs, labels, fit=fit, fits=fits, nats=nats), truth.fit, truth.fits, truth.nats)

    def _begin(self, observed: ObservedClient) -> ObservedClient:
        """Begin the client's round in the cache, and return the client with the message on the runtime's device."""
        visit = replace(observed.visit, sent=self.runtime.here(observed.visit.sent))
        self.runtime.update_cache.begin_round(observed.round)
        return replace(observed, visit=visit)

    def judge(self, truth: Truth, guess: Inference) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
        """Return an inference's table row, and pairs of a true and a reconstructed image.

        The row does not contain the columns of the attack's call. Each reconstructed image is paired with the nearest
        true image of its class in the victim's data. Raises `UserError` for a result that is not finite.
        """
        asked = {"auc": len(truth.candidates), "accuracy": len(guess.scores), "class_share": len(guess.images)}
        row = {"metric": guess.metric, "value": None, "chance": guess.chance, "candidates": asked[guess.metric]}
        row |= {"control": None, "scores": None}
        if guess.status != "ok":
            return row, []
        if not all(part.isfinite().all() for part in (guess.scores, guess.control, guess.images) if part is not None):
            raise UserError("the attack's result has values that are not finite; fix the attack")
        if guess.metric == "auc":
            return row | _told_apart(truth.candidates, guess), []
        of_class = truth.labels == guess.label
        if guess.metric == "accuracy":
            share = float(truth.holding[guess.label]) if truth.holding is not None else guess.chance
            row["chance"] = max(share, 1 - share)
            return row | {"value": correct(guess.scores, bool(of_class.any()))}, []
        images, (known, labels) = guess.images.to(self.runtime.device), self.runtime.test_data()
        if not (labels == guess.label).any():
            why = f"no test image has class {guess.label}, so its images cannot be scored"
            return row | {"status": "not applicable", "message": why}, []
        row["value"] = class_share(images, guess.label, known, labels)
        if not of_class.any():
            return row, []
        return row, list(zip(nearest(images, truth.inputs[of_class]), images, strict=True))


def _observed(observed: ObservedClient) -> tuple[Observation, Truth]:
    """Return the observation of a client in one round, and the true samples with their fit to it."""
    observation, truth = _build_observation(observed)
    truth = check_on_true_samples(observed, observation, truth)
    return observation, _explained(observed, observation, truth)


def _build_observation(observed: ObservedClient) -> tuple[Observation, Truth]:
    """Return the observation of a client in one round, and the true samples without their fit."""
    asked = observed.asked()
    supposed = observed.supposed() if asked.private else asked
    visible = _shown(observed, observed.answer())
    truth = _truth(observed, asked, visible)
    given = _given(observed, truth, visible.seen)
    for grant in observed.attack.grants.values():
        truth = grant.hides(observed, truth)
    return _observation(observed, supposed, visible, given, len(truth.labels)), truth


def _explained(observed: ObservedClient, observation: Observation, truth: Truth) -> Truth:
    """Return the truth with its fit to the observation of an attacker that knows the defences' code.

    Without defences, only `fits` is set: the fit of each tensor to the update.
    """
    defended = bool(defences_at(observed.arm.defences, observed.client))
    if (defended and "observation_model" not in observation.extra) or observation.sealed is not None:
        return truth
    if observation.local.steps > 1:  # no fit is defined for several steps
        return truth.replace(fit=1.0) if defended else truth
    asked = observed.asked()
    trained = torch.cat(list(batches(len(observed.indices), observed.training, asked.order)))
    places = trained.unique(return_inverse=True)[1].to(truth.labels.device)
    inputs, labels = truth.inputs[places], truth.labels[places]  # in the order of the batch, which a model may use
    seen, model = for_true_samples(observed, unmixed(observation)), asked.model
    if "observation_model" in seen.extra:
        seen, model = seen.extra["observation_model"].reveal(seen, model)
    fit, fits, nats = fit_of(inputs, labels, seen, model)
    if is_stochastic(model):  # the true samples, too, do not reproduce the random layers
        return truth.replace(fit=1.0 if defended else None, fits=None if fits is None else torch.zeros_like(fits))
    if not defended:
        return truth.replace(fits=fits)
    return truth.replace(fit=1.0 if fit is None else fit, fits=fits, nats=nats)


def _told_apart(candidates: Sequence[Candidate], guess: Inference) -> dict[str, Any]:
    """Return the columns of a membership inference: AUC, control and the scores of candidates."""
    without = [None] * len(candidates) if guess.control is None else guess.control.tolist()
    rows = [
        candidate._asdict() | {"score": score, "control": control}
        for candidate, score, control in zip(candidates, guess.scores.tolist(), without, strict=True)
    ]

    def area(of: str) -> float:
        members, others = ([row[of] for row in rows if row["kind"] == kind] for kind in KINDS)
        return auc(members, others).value

    return {"value": area("score"), "control": None if guess.control is None else area("control"), "scores": rows}


def _holding(observed: ObservedClient) -> Tensor | None:
    """Return the expected share of the victims' batches that contain each class, if the attack's metric needs it.

    Batches are sampled without replacement, so the probability that a class is missing is hypergeometric.
    """
    data = observed.runtime.data
    if getattr(observed.attack.build(), "metric", None) != "accuracy" or data.has_numbers or data.has_places:
        return None
    from scipy.stats import hypergeom  # a slow import

    runtime, training = observed.runtime, observed.training
    victims = plan.victims(runtime.scenario, observed.attack, observed.round, runtime.parts.sizes)
    parts = [runtime.parts[victim] for victim in victims]
    held = count_labels(runtime.data.train_labels, parts, len(runtime.data.classes))
    sizes = held.sum(1, keepdims=True)
    most = sizes if observed.attack.view.of_round else np.full_like(sizes, observed.attack.batch_size)
    used = np.vectorize(lambda size: trained_samples(int(size), training))(most)
    return torch.from_numpy(1 - hypergeom.pmf(0, sizes, held, used)).mean(0)


def _truth(observed: ObservedClient, asked: Task, visible: VisibleUpdate) -> Truth:
    """Return the samples that the update was computed from, and its distortion by the defences."""
    order = list(batches(len(observed.indices), observed.training, asked.order))
    used = torch.cat(order).unique().to(observed.runtime.device)
    if not len(used):
        raise UserError(
            f"client {observed.client} has an empty batch in round {observed.round} (training.sampling: poisson), so "
            f"'{observed.attack.title}' cannot attack this client; attack another round, or set `observes: gradient`"
        )
    distortion, seen = 0.0, visible.update.tensors
    if seen and (observed.arm.defences or visible.mixtures):
        plain = observed.undefended().tensors
        difference = {name: tensor - plain[name] for name, tensor in seen.items()}
        distortion = float(gradients.norm(difference) / gradients.norm(plain))
    numbers = observed.indices[used.cpu().numpy()]
    inputs, labels, decoys = asked.data.inputs[used], asked.data.labels[used], _decoys(observed, numbers)
    inputs = losses.get_loss(asked.model).original(inputs, labels)
    return Truth(inputs, labels, distortion, numbers, decoys=decoys, holding=_holding(observed))


def _decoys(observed: ObservedClient, numbers: np.ndarray) -> Tensor | None:
    """Return decoys for scoring: the victim's unused samples with the same labels; None if there are too few."""
    runtime = observed.runtime
    if runtime.data.train_labels.ndim > 1:  # labels that are words or masks are rarely equal
        return None
    left = np.setdiff1d(runtime.parts[observed.client], numbers)
    draw = seeds.numpy_generator(runtime.scenario.seed, "decoys", observed.attacked, observed.client)
    unused, chosen = draw.permutation(left).tolist(), []
    for label in runtime.data.train_labels[numbers]:
        found = next((row for row in unused if runtime.data.train_labels[row] == label), None)
        if found is None:
            return None
        unused.remove(found)
        chosen.append(found)
    return observed.as_trained_on("train", np.asarray(chosen), "decoys")[0]


def _shown(observed: ObservedClient, answer: Update) -> VisibleUpdate:
    """Return the part of the update that the attack's view shows; raises `UserError` if tensors have another form."""
    visible: VisibleUpdate = observed.attack.view.shows(observed, answer)
    mixed = (visible.mixtures.updates, visible.mixtures.buffers) if visible.mixtures else ({}, {})
    parts = zip((visible.update.tensors, visible.update.buffers), mixed, (answer.tensors, answer.buffers), strict=True)
    for alone, together, whole in parts:
        if any(shown and _shapes(shown) != _shapes(whole) for shown in (alone, *together.values())):
            raise UserError(
                f"the view '{observed.attack.observes}' returns tensors whose names or shapes differ from the "
                f"client's update; return tensors with the same names and shapes"
            )
    return visible


def _shapes(tensors: Named) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _given(observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
    """Return the values of all grants of the attack by name; raises `UserError` for a name that is not declared."""
    given: dict[str, Any] = {}
    for name, grant in observed.attack.grants.items():
        if grant.overrides("sends", "knows", "supposes") and not grant.of_private:
            raise UserError(
                f"the grant '{name}' uses private layers, but does not declare this; set `of_private` to True"
            )
        part = grant.known_before(observed.runtime) | grant.grant(observed, truth, update)
        if undeclared := sorted(part.keys() - set(grant.fills)):
            raise UserError(
                f"the grant '{name}' returns {', '.join(undeclared)}, which are not declared in `fills`; add "
                f"these names to `fills`"
            )
        given |= part
    return given


def _observation(
    observed: ObservedClient, supposed: Task, visible: VisibleUpdate, given: dict[str, Any], samples: int
) -> Observation:
    """Build an observation. Observations are built only here."""
    data, update, local = observed.runtime.data, visible.seen, local_training(len(observed.indices), observed.training)
    return Observation(
        victim=observed.client,
        round=observed.round,
        weights=without(supposed.weights, supposed.private),
        buffers=supposed.buffers | only(supposed.weights, supposed.private),
        update=update.tensors,
        scale=local.scale,
        batch_size=samples,
        sample=data.sample.published(),
        classes=len(data.classes),
        labels=given.get("labels"),
        has_numbers=data.has_numbers,
        has_places=data.has_places,
        local=local,
        extra={name: value for name, value in given.items() if name != "labels"},
        returned_buffers=update.buffers,
        sealed=visible.sealed,
        shown=visible.mixtures if observed.attack.unmix else None,
    )
