"""Replay of recorded updates: one recorded round as a scenario, or as attacks without scores.

If the true samples were recorded, every recorded update is one client with its samples. Clients of the arm `recorded`
send the recorded updates. Clients of the arm `none` send updates of the same training without a defence, which show
whether the attacks work on these samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, failed
from rayfed.attacks.external_update import Given, observe
from rayfed.attacks.progress import Standing, listening
from rayfed.attacks.sealed import attempt
from rayfed.audits.plan import UNDEFENDED, make_title
from rayfed.audits.queue import count_iterations
from rayfed.core import losses, seeds
from rayfed.core.recording_checks import build_loss, check_round
from rayfed.core.targets import to_targets
from rayfed.data.base import Dataset
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.errors import UserError
from rayfed.evidence.methods import METHODS, Method
from rayfed.models.build import build_model
from rayfed.recording import Header, RecordedUpdate, Recording
from rayfed.registry import component
from rayfed.scenario import AttackSpec
from rayfed.scenario.components import LossSpec, ModelSpec
from rayfed.simulation.client.server_message import Sent
from rayfed.store.schemas import WANT_OF_TIME
from rayfed.update import Observation, Update

RECORDED = "recorded"
"""Name of the arm with the recorded updates."""
ATTACKER_KNOWLEDGE: Mapping[str, Sequence[str]] = {"blind": (), "given labels": ("labels",)}
"""Attacker -> its knowledge."""
_BYTES = 1e-3
"""Maximum distance of a value from a whole level for images that are stored in 8 bits."""


@lru_cache(maxsize=1)
def _of_round(folder: Path, round: int) -> list[RecordedUpdate]:
    return Recording(folder).of_round(round)


@component
class RecordedData:
    """Data set of a recorded round's samples, with samples of other rounds for baselines."""

    folder: Path
    """Folder of the recording."""
    round: int
    """Number of the round."""

    def load(self) -> Dataset:
        """Load the recorded round's samples by client; the test split has other rounds' samples, or one grey image."""
        recording = Recording(self.folder)
        found = [_truth(recording, update) for update in _of_round(self.folder, self.round)]
        images, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        others = [_truth(recording, u) for u in recording.updates if u.round != self.round and u.has_truth]
        remarks: tuple[str, ...] = ()
        if apart := [pair for pair in others if not _shared(pair[0], images)]:
            tried, tested = (torch.cat(parts) for parts in zip(*apart, strict=True))
        else:
            tried, tested = torch.full_like(images[:1], 0.5), torch.zeros_like(labels[:1])
            remarks = (
                "the recording has no other samples, so the baseline is the best constant image, and reconstructions "
                "are compared only with images of their batch",
            )
        classes = tuple(map(str, range(recording.header.classes)))
        stored = [_stored(part) for part in (images, tried)]
        if stored[0].dtype != stored[1].dtype:
            stored = [_levels(part, 65535) for part in (images, tried)]
        return Dataset(stored[0], labels.numpy(), stored[1], tested.numpy(), classes, remarks=remarks)


def _truth(recording: Recording, update: RecordedUpdate) -> tuple[Tensor, Tensor]:
    """Return images and labels of an update; raises `UserError` for labels that do not fit the recorded loss."""
    header, (images, labels) = recording.header, update.truth
    try:
        return images, to_targets(labels, build_loss(header.loss), len(images), header.classes)
    except UserError as error:
        raise UserError(f"{recording.folder}, {update.name}: {error}") from error


def _shared(some: Tensor, others: Tensor) -> bool:
    """Return whether the batches have an image in common."""
    return bool(torch.cdist(some.flatten(1), others.flatten(1)).min() < 1e-6)


def _stored(images: Tensor) -> np.ndarray:
    """Return images in [0, 1] as 8-bit values if these are exact, else as 16-bit values."""
    levels = images * 255
    exact = bool((levels - levels.round()).abs().max() < _BYTES)
    return _levels(images, 255 if exact else 65535)


def _levels(images: Tensor, most: int) -> np.ndarray:
    kind = np.uint8 if most == 255 else np.uint16
    return (images.double() * most).round().numpy().astype(kind)


@component
class ByUpdate:
    """Partition with one client for each recorded update of a round."""

    folder: Path
    """Folder of the recording."""
    round: int
    """Number of the round."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """Return the sample indices of each client: the samples of one recorded update per client."""
        ends = np.cumsum([update.samples for update in _of_round(self.folder, self.round)])
        return np.split(np.arange(len(labels)), ends[:-1])


@component
class Recorded(Defence):
    """Pseudo-defence that returns the recorded update, which includes the effect of the recorded defences."""

    folder: Path
    """Folder of the recording."""
    round: int
    """Number of the round."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Return an update method that returns the recorded update instead of training."""

        def update(task: Task) -> Update:
            recorded = _of_round(self.folder, self.round)[task.client]
            seen = check_update(Recording(self.folder), recorded, task.model).observation.to(_device(task))
            floats = {name: b for name, b in task.model.named_buffers() if b.is_floating_point()}
            buffers = {name: seen.returned_buffers.get(name, task.buffers[name]) for name in floats}
            return Update(task.client, task.round, seen.update, buffers, recorded.samples, float("nan"))

        return update


def _device(task: Task) -> torch.device:
    return task.data.inputs.device


def check_update(recording: Recording, update: RecordedUpdate, model: nn.Module) -> Given:
    """Check a recorded update, and return the update as an observation. Raises `UserError` if the model differs."""
    header = recording.header
    try:
        return observe(model, update.sent, header.sample, header.classes, update.samples, **update.answer)
    except UserError as error:
        raise UserError(f"{recording.folder}, {update.name}: {error}") from error


@dataclass(frozen=True)
class Replay:
    """Attacks on one round of a recording of clients' updates."""

    recording: Recording
    round: int
    model: Mapping[str, Any]
    """The scenario's section `model`, without the normalisation."""
    loss: Mapping[str, Any]
    """The scenario's section `loss`."""
    evaluations: int
    """Evaluations of the objective per search."""
    seed: int = 0

    @cached_property
    def updates(self) -> list[RecordedUpdate]:
        """Return the recorded updates of the replayed round."""
        return self.recording.of_round(self.round)

    @cached_property
    def scored(self) -> bool:
        """Return whether the true samples of all updates of the round were recorded, so that attacks can be scored."""
        return all(update.has_truth for update in self.updates)

    @property
    def model_section(self) -> dict[str, Any]:
        """Return the scenario section `model`, with the recording's normalisation."""
        return {**self.model, **normalisation(self.recording.header)}

    def document(self) -> dict[str, Any]:
        """Return the recorded round as a scenario document with the arms `none` and `recorded`."""
        where = {"folder": str(self.recording.folder.resolve()), "round": self.round}
        gradient = self.updates[0].kind == "gradient"
        by_size: dict[int, list[int]] = {}
        for client, update in enumerate(self.updates):
            by_size.setdefault(update.samples, []).append(client)
        attacks = [
            {
                **_spec(method, self.evaluations),
                **({"observes": "gradient", "batch_size": batch} if gradient else {"observes": "update"}),
                "victims": by_size[batch],
                "knowledge": list(ATTACKER_KNOWLEDGE[twin]),
                "label": f"{make_title(method, batch)}, {twin}",
                "family": method.name,
            }
            for method, batch, twin in product(METHODS, by_size, ATTACKER_KNOWLEDGE)
            if method.takes("pixels", batch)
        ]
        return {
            "name": "replay",
            "seed": self.seed,
            "data": {"name": f"{__name__}:RecordedData", **where},
            "model": self.model_section,
            "loss": dict(self.loss),
            "training": self._training(),
            "partition": {"name": f"{__name__}:ByUpdate", **where},
            "federation": {"rounds": self.round + 1, "clients": len(self.updates)},
            "arms": {UNDEFENDED: [], RECORDED: [{"name": f"{__name__}:Recorded", **where}]},
            "attacks": attacks,
        }

    def _training(self) -> dict[str, Any]:
        """Return the section `training`; raises `UserError` if the clients' local training differs."""
        rows = [update.row for update in self.updates]
        local, epochs = check_round(rows, f"{self.recording.folder}, round {self.round}")
        if self.updates[0].kind == "gradient":
            return {"algorithm": "fedsgd", "batch_size": None}
        told: dict[str, Any] = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay}
        told |= {"clip_norm": local.clip_norm, "batch_size": local.batch_size}
        return {**told, "steps": local.steps} if epochs is None else {**told, "epochs": epochs}

    def sent(self) -> tuple[Sent, list[str]]:
        """Return the model state that the round's clients received, and remarks on the recorded updates."""
        model = self._built
        given = [(update, check_update(self.recording, update, model)) for update in self.updates]
        remarks = dict.fromkeys(f"{update.name}: {remark}" for update, one in given for remark in one.remarks)
        first = given[0][1].observation
        return Sent(self.round, first.weights, first.buffers), list(remarks)

    def unscored(self, ends: float = inf) -> Iterator[tuple[RecordedUpdate, str, Reconstruction]]:
        """Attack each recorded update, and yield (update, attack, result) without scores, until the time `ends`."""
        for update in self.updates:
            seen = check_update(self.recording, update, self._built).observation
            key = seeds.derive_bytes(self.seed, "replay", update.round, update.client)
            for name, found in run_attempts(self._built, seen, self.evaluations, key, ends):
                yield update, name, found

    @cached_property
    def _built(self) -> nn.Module:
        return build_recorded_model(self.model_section, self.loss, self.recording.header, self.seed)


def normalisation(header: Header) -> dict[str, Any]:
    """Return the field `normalise` of the scenario section `model` for a recording; empty without normalisation."""
    if header.mean is None or header.std is None:
        return {}
    return {"normalise": {"mean": list(header.mean), "std": list(header.std)}}


def build_recorded_model(model: Mapping[str, Any], loss: Mapping[str, Any], header: Header, seed: int) -> nn.Module:
    """Build the model of a recording from the scenario sections `model` and `loss` and the recording's header."""
    spec = ModelSpec.model_validate(model)
    normalise = (spec.normalise.mean, spec.normalise.std) if spec.normalise else None
    net = build_model(spec.name, spec.parameters, header.sample, header.classes, seed, normalise)
    losses.attach_loss(net, LossSpec.model_validate(loss).build())
    return net.train()


class _TimeIsUp(BaseException):
    """Signal that the time limit has passed. It is no `Exception`, because a search might catch those."""


def run_attempts(
    model: nn.Module, seen: Observation, evaluations: int, key: bytes, ends: float = inf
) -> Iterator[tuple[str, Reconstruction]]:
    """Run each attack of the audit on one observation, and yield the attack's name and result.

    Searches make `evaluations` evaluations. Attacks that are not finished when the clock (`monotonic`) passes `ends`
    have failed with a message on the time.
    """

    def hear(standing: Standing) -> None:
        if monotonic() > ends:
            raise _TimeIsUp

    for method in METHODS:
        if not method.takes("pixels", seen.batch_size):
            continue
        attack = AttackSpec.model_validate(_spec(method, evaluations)).build()
        try:
            if monotonic() > ends:
                raise _TimeIsUp
            with listening(hear):
                [found] = attempt(attack, [seen], model, [seeds.torch_generator(key, method.name)], False)
        except _TimeIsUp:
            found = failed(attack, WANT_OF_TIME)
        except UserError:
            raise
        except Exception as error:  # of this attack only: the others continue
            found = failed(attack, f"raised {type(error).__name__}: {error}")
        assert isinstance(found, Reconstruction)
        yield method.name, found


def _spec(method: Method, evaluations: int) -> dict[str, Any]:
    searched = {"iterations": count_iterations(method, evaluations)} if method.evaluations else {}
    return {"name": method.name, **method.parameters, **searched}
