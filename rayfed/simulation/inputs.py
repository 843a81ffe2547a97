"""Inputs of a run: data partitioned among clients, and arms whose models are checked against the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.aggregation.over_channel import OverChannel, SumOverChannel
from rayfed.attacks.base import Checked
from rayfed.core import losses, seeds
from rayfed.core.losses import DEFAULT, BinaryCrossEntropy, Loss, MaskedLM, OwnLoss
from rayfed.core.objective import needed_places
from rayfed.crypto.factoring import require_factoring
from rayfed.data.base import Dataset
from rayfed.data.partitions.base import Parts, hold_out
from rayfed.defences.base import NEEDS_PUBLIC, Batch, Defence, Task
from rayfed.errors import UserError
from rayfed.evidence.criteria import Criterion
from rayfed.gradients import buffers_of, weights_of
from rayfed.metrics.guessing import Others
from rayfed.metrics.score import Scorer
from rayfed.models.build import CopiedModels, output_shape
from rayfed.models.notes import notes_of
from rayfed.poisoning.base import Poisoning
from rayfed.samples import Tokens
from rayfed.scenario import ResolvedArm, Scenario, resolve
from rayfed.simulation.account import Account
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import Arm, aggregation_of, build_arm, protected_aggregation
from rayfed.simulation.client.cohort import works_together
from rayfed.simulation.client.devices import check_devices
from rayfed.simulation.client.failures import check_asynchronous, check_droppable
from rayfed.simulation.client.local import trained_samples
from rayfed.simulation.client.malicious import Malicious
from rayfed.simulation.gpus import gpus_here, with_devices
from rayfed.simulation.machine import check_arithmetic

_TASK = {"causal_lm": "causal_lm", "masked_lm": "masked_lm"}
"""Loss -> task of a model `hf`. Default: token classification."""
_TRIED = 16
"""Number of samples on which a user's loss is checked."""
_HEAVY = 0.5
"""Share of a round's weight above which one client outweighs all others together."""
_OTHERS = 1 << 25
"""Approximate maximum of numbers (samples x values) that reconstructions are compared with."""
UNREPEATABLE = (
    "privacy.secure: noise, keys and the sampling of clients use the operating system's random numbers. This run "
    "cannot be repeated from its scenario. It can be resumed until its end, when checkpoint/clients/run.key is deleted"
)
PREDICTABLE = (
    "noise is derived from the seed. Use this run to measure, not to protect data; for real training set "
    "`privacy.secure: true`"
)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run: the scenario, the data partitioned among clients, and the arms' privacy accounts."""

    scenario: Scenario
    """The scenario, with noise calibrated for the defences' target epsilons."""
    data: Dataset
    parts: Parts
    """Training indices of each client."""
    validation: Parts
    """Indices of each client's held-out samples; empty without `federation.validation`."""
    accounts: list[Account]
    """Privacy account of every arm."""

    @cached_property
    def limits(self) -> dict[str, int]:
        """Return the number of rounds of every arm: the scenario's, or fewer if the privacy budget is spent earlier.

        Raises `UserError` if the first round exceeds the budget.
        """
        budget, rounds = self.scenario.privacy.budget, self.scenario.federation.rounds
        return {account.name: account.rounds_within(budget) if budget else rounds for account in self.accounts}

    @cached_property
    def privacy(self) -> list[dict[str, Any]]:
        """Return the rows of the table `privacy`, with the guarantees of every arm over all rounds of the arm."""
        return [row for account in self.accounts for row in account.rows(self.limits[account.name])]

    def proved(self, training: bool) -> list[dict[str, Any]]:
        """Return the rows of the table `proved`: bounds on all attacks that privacy accounts cover."""
        return [
            row
            for account in self.accounts
            for attack in self.scenario.attacks
            for row in account.proved(attack, self.limits[account.name] if training else 0)
        ]

    @property
    def remarks(self) -> list[str]:
        """Return remarks on the loaded samples and on the models."""
        found: dict[str, list[str]] = {}
        for account in self.accounts:
            for said in notes_of(account.arm.model):
                found.setdefault(said, []).append(account.name)
        of = {said: "" if len(arms) == len(self.accounts) else f" of {', '.join(arms)}" for said, arms in found.items()}
        return [*self.data.remarks, *(f"model{of[said]}: {said}" for said in found)]

    @property
    def randomness(self) -> str | None:
        """Return a remark on the source of the noise (operating system or seed); None if no arm has an epsilon."""
        if self.scenario.privacy.secure:
            return UNREPEATABLE
        return PREDICTABLE if any(row.get("epsilon") is not None for row in self.privacy) else None

    @cached_property
    def encryption(self) -> list[str]:
        """Return remarks on the arms that encrypt or mask: precision, exposed updates and insecure keys."""
        found = []
        for name, arm in resolve(self.scenario).items():
            if protecting := plan.protecting(self.scenario, arm, self.parts.sizes):
                wrapped = protecting.wrap(aggregation_of(arm))
                found.append(f"arm {name} {wrapped.channel.describe()}")
                found += self._unhidden(arm, wrapped)
                if caveat := wrapped.caveat():
                    found.append(f"arm {name} {caveat}")
                if warning := protecting.protection.build().warning():
                    found.append(f"arm {name} is INSECURE: {warning}")
        return found

    def _unhidden(self, arm: ResolvedArm, rule: OverChannel[Any, Any, Any]) -> Iterator[str]:
        """Yield remarks on arms in which the decrypted sum is close to one client's update."""
        if isinstance(rule, SumOverChannel):
            weights = [rule.rule.heaviest(1, trained_samples(size, arm.training)) for size in self.parts.sizes.tolist()]
            share, client, round = plan.heaviest(self.scenario, weights)
            if share > _HEAVY:
                yield (
                    f"arm {arm.name} gives client {client} {share:.0%} of the weight of round {round}, so the "
                    f"decrypted sum is nearly that client's update; set weights: uniform"
                )
        if self.scenario.federation.dropping:
            yield (
                f"arm {arm.name} continues without clients that fail: its clients must trust the server's list of "
                f"failed clients, because a server that lies can compute single updates as differences of sums"
            )


def make_scorer(scenario: Scenario, data: Dataset) -> Scorer:
    """Return the scorer of reconstructions, with the scenario's metrics and the metrics that verdicts need."""
    asked, form = scenario.metrics, data.sample.modality
    of_masks = ["mask_iou"] if data.has_places and form == "pixels" else []
    names = tuple(dict.fromkeys([*asked.names, *Criterion.from_modality(form, None).names, *of_masks]))
    networks = asked.lpips_weights, asked.evaluator, asked.recogniser
    return Scorer(names, *networks, data.classes, data.sample, _others(data))


def _others(data: Dataset) -> Others:
    """Return evenly spaced samples of the test split; fewer if they are large."""
    count, most = len(data.test_labels), _OTHERS // int(np.prod(data.sample.shape))
    few = min(count, max(50, min(500, most)))
    rows = np.unique(np.linspace(0, count - 1, few).round().astype(np.int64))
    median = torch.from_numpy(np.median(data.test_labels, axis=0)) if data.has_numbers else None
    return Others(data.sample.scored(data.sample.tensor(data.test_images[rows])), _public(data, most), median)


def _public(data: Dataset, most: int) -> Tensor | None:
    """Return public samples, evenly spaced if there are many; None without public samples."""
    if data.public_images is None or not len(data.public_images):
        return None
    count = len(data.public_images)
    rows = np.unique(np.linspace(0, count - 1, min(count, max(50, min(5000, most)))).round().astype(np.int64))
    return data.sample.scored(data.sample.tensor(data.public_images[rows]))


def prepare_inputs(
    scenario: Scenario, rounds: int | None = None, data: Dataset | None = None, gpus: Mapping[str, int] | None = None
) -> Inputs:
    """Load the data, partition the samples among clients, and check every arm's model and attacks.

    The checks are done before a cluster starts. `data`, if given, is not loaded again. Noise that is requested by an
    epsilon is calibrated for `rounds` (default: the scenario's rounds). `gpus` is the number of GPUs for each kind of
    actor (default: the GPUs of this process). Raises `UserError` for settings that do not fit together.
    """
    scenario = with_devices(scenario, gpus_here() if gpus is None else gpus)
    check_arithmetic(scenario.resources.deterministic)
    check_devices(scenario)
    data = _with_targets(scenario, scenario.data.load() if data is None else data)
    parts, validation = _dealt(scenario, data)
    plan.check_victims(scenario, parts.sizes)
    build = CopiedModels()
    accounts = [_account(scenario, arm, data, parts.sizes, rounds, build) for arm in resolve(scenario).values()]
    if not any(account.arm.private for account in accounts):
        plan.check_nothing_private_is_given(scenario)
    scenario = scenario.with_defences({account.name: account.arm.spec.defences for account in accounts})
    fewest = plan.fewest_clients(scenario)
    for account in accounts:
        account.check()
        plan.check_repeatable(scenario, account.arm)
        aggregation_of(account.arm.spec).check(fewest)
        Malicious.of(scenario, account.arm.spec).check(data.sample.shape, len(data.classes))
        rule = protected_aggregation(account.arm.spec, plan.protecting(scenario, account.arm.spec, parts.sizes))
        rule.check(fewest)
        check_droppable(scenario, account.arm, rule)
        check_asynchronous(scenario, account.arm)
    return Inputs(scenario, data, parts, validation, accounts)


def _with_targets(scenario: Scenario, data: Dataset) -> Dataset:
    """Return the data with labels in the form that the loss needs; raises `UserError` if it cannot use them."""
    loss, name = scenario.loss.build(), scenario.loss.name
    if loss.takes == "tokens":
        return _with_tokens(scenario, loss, data)
    if isinstance(data.sample, Tokens) and len(data.classes) == 1 and not data.has_numbers:
        raise UserError(
            f"data '{scenario.data.name}' has texts without classes: set data.label_column (`--label`) to the column "
            f"of the classes, or train a language model: set `model.task: causal_lm` or `masked_lm` for a model `hf`, "
            f"or `loss: causal_lm` for your own model"
        )
    if data.has_places and loss.takes not in ("places", "either"):
        raise UserError(
            f"loss '{name}' needs one label per sample, but data '{scenario.data.name}' has one label per position: "
            f"set `loss: place_cross_entropy`, or `model.task: token_classification` for a model `hf`"
        )
    if loss.takes == "places" and not data.has_places:
        raise UserError(
            f"loss '{name}' needs a class per position of a sample, but data '{scenario.data.name}' has one label per "
            f"sample: remove `loss`, or use data with a list of classes per text, or a mask per image "
            f"(`data.name: image_masks`)"
        )
    if loss.takes == "numbers" and not data.has_numbers:
        data = data.as_numbers()
    if loss.takes == "classes" and data.has_numbers:
        raise UserError(
            f"loss '{name}' needs classes, but data '{scenario.data.name}' has {len(data.classes)} number(s) per "
            f"sample: set `loss: mean_squared_error`, `loss: binary_cross_entropy` if all are 0 or 1, or your own loss"
        )
    if data.has_words and loss != DEFAULT:
        raise UserError(f"loss '{name}': words are trained with CTC, which the default loss selects: remove `loss`")
    labels = np.concatenate([data.train_labels, data.test_labels])
    if isinstance(loss, BinaryCrossEntropy) and not np.isin(labels, (0, 1)).all():
        raise UserError(
            f"loss '{name}' needs labels that are 0 or 1, but data '{scenario.data.name}' has other numbers: "
            "use cross_entropy, or labels 0 and 1"
        )
    return data


def _with_tokens(scenario: Scenario, loss: Loss, data: Dataset) -> Dataset:
    """Return texts with their tokens as targets; raises `UserError` for other samples, or without a mask token."""
    if not isinstance(data.sample, Tokens):
        raise UserError(
            f"loss '{scenario.loss.name}' needs texts, but data '{scenario.data.name}' has {data.sample.noun}: remove "
            f"`loss`, or use data `text` or `text_table`"
        )
    if isinstance(loss, MaskedLM) and data.sample.mask is None:
        raise UserError(
            f"loss '{scenario.loss.name}' masks tokens, but the tokenizer of data '{scenario.data.name}' has no mask "
            f"token such as [MASK]: set data.tokenizer to a folder or a tokenizer.json that has one"
        )
    return data.as_tokens()


def _dealt(scenario: Scenario, data: Dataset) -> tuple[Parts, Parts]:
    """Return the training indices of every client, and its held-out indices."""
    generator, partition = seeds.numpy_generator(scenario.seed, "partition"), scenario.partition.build()
    if getattr(partition, "by_label", False) and len(data.groups[1]) == 1:
        has = "numbers" if data.has_numbers else "no classes of samples, or only one class"
        raise UserError(
            f"partition '{scenario.partition.name}' splits by class, but the labels of data '{scenario.data.name}' are "
            f"{has}: use iid or quantity"
        )
    parts = Parts.from_indices(partition.split(data.groups[0], scenario.federation.clients, generator))
    _check_dealt(scenario, parts.sizes)
    if not (share := scenario.federation.validation):
        return parts, Parts.from_indices([])
    held = [hold_out(part, data.groups[0], share) for part in parts]
    return Parts.from_indices(trained for trained, _ in held), Parts.from_indices(kept for _, kept in held)


def _check_dealt(scenario: Scenario, sizes: np.ndarray) -> None:
    """Raise `UserError` unless every client has samples; `sizes` (clients,) has the number of samples per client."""
    name, clients = scenario.partition.name, scenario.federation.clients
    if len(sizes) != clients:
        raise UserError(
            f"partition '{name}' splits samples among {len(sizes)} clients, but federation.clients is {clients}"
        )
    if len(empty := np.flatnonzero(sizes == 0)):
        raise UserError(
            f"partition '{name}' gives no sample to client {empty[0]} ({len(empty)} of {clients} clients have none): "
            f"use fewer clients, more samples, or a partition that gives each client at least one"
        )


def _account(
    scenario: Scenario,
    spec: ResolvedArm,
    data: Dataset,
    samples: np.ndarray,
    rounds: int | None,
    build: CopiedModels,
) -> Account:
    """Check an arm against data and attacks, and return its account with calibrated noise.

    `samples[i]` is the number of samples of client i.
    """
    arm = build_arm(spec, data.sample, len(data.classes), scenario.seed, build)
    _check_loss(arm, data)
    if data.has_places:
        _check_places(scenario, arm, data)
    else:
        _check_words(scenario, arm, data)
    if spec.training.augment and data.sample.modality != "pixels":
        raise UserError(
            f"arm '{spec.name}': training.augment crops and flips images, but data '{scenario.data.name}' has no "
            f"images: remove training.augment"
        )
    if data.has_numbers or data.has_places:
        _check_labels(arm, data)
    for written, defence in zip(spec.defences, arm.defences, strict=True):
        _check_samples(f"arm '{spec.name}': {written.name}", defence, samples, data)
    _check_gradients(arm, data)
    for attack in scenario.attacks:
        if attack.factor:
            require_factoring()
        method = attack.build()
        if isinstance(method, Checked):
            method.check(arm.model, data.sample, len(data.classes))
    return Account(scenario, arm, samples, data.sample).calibrated(rounds or scenario.federation.rounds)


def _check_gradients(arm: Arm, data: Dataset) -> None:
    """Raise `UserError` if gradients that an arm's defences or `training.vectorise` need cannot be computed.

    The gradients are computed for two samples.
    """
    with seeds.global_stream("check", "gradients"):
        for defence in arm.defences:
            if defence.overrides("check_gradient"):
                defence.check_gradient(_small_task(arm, data))
        if arm.spec.training.trains_together:
            works_together(_small_task(arm, data), arm.spec.training, arm.defences)


def _small_task(arm: Arm, data: Dataset) -> Task:
    """Return a task with an arm's initial weights, two training samples and, if available, two public ones."""
    rows, model, generator = np.arange(2), arm.model, torch.Generator()
    inputs, labels = data.sample.tensor(data.train_images[rows]), torch.from_numpy(data.train_labels[rows])
    inputs, labels = losses.get_loss(model).presented(inputs, labels, data.sample, generator)
    public = None
    if data.public_images is not None and data.public_labels is not None:
        public = Batch(data.sample.tensor(data.public_images[rows]), torch.from_numpy(data.public_labels[rows]))
    return Task(
        client=0,
        round=0,
        model=model,
        weights=weights_of(model),
        buffers=buffers_of(model),
        data=Batch(inputs, labels),
        generator=generator,
        order=0,
        public=public,
        classes=len(data.classes),
        private=arm.private,
    )


def _check_loss(arm: Arm, data: Dataset) -> None:
    """Raise `UserError` if a user's loss is not the mean of the samples' losses, for outputs of the model's shape."""
    loss = losses.get_loss(arm.model)
    if isinstance(loss, OwnLoss):
        generator = torch.Generator().manual_seed(0)
        tried = data.train_labels[torch.randint(len(data.train_labels), (_TRIED,), generator=generator).numpy()]
        shape = output_shape(arm.model, data.sample)
        loss.check(torch.randn(_TRIED, *shape, generator=generator), torch.from_numpy(tried))


def _check_places(scenario: Scenario, arm: Arm, data: Dataset) -> None:
    """Raise `UserError` unless the model has scores of all classes for each place that has a label."""
    train = arm.spec.model.train
    if train is not None and train.prompt is not None:
        raise UserError(
            f"arm '{arm.spec.name}': model.train.prompt supports only models that classify whole texts, but loss "
            f"'{scenario.loss.name}' needs scores per position: use lora or layers"
        )
    found, places = output_shape(arm.model, data.sample), data.train_labels.shape[1:]
    of_model = found[:-1] if len(found) == 2 else found[1:]
    if isinstance(losses.get_loss(arm.model), OwnLoss) or of_model == places:
        return
    raise UserError(
        f"loss '{scenario.loss.name}' needs scores per position, but model '{arm.spec.model.name}' returns "
        f"{found} for samples with {places} positions. Return (positions, classes) for texts, as a model `hf` with "
        f"`model.task: {_TASK.get(scenario.loss.name, 'token_classification')}` does, or (classes, height, width) for "
        f"images"
    )


def _check_labels(arm: Arm, data: Dataset) -> None:
    """Raise `UserError` for components that need one class per sample, if labels have another form."""
    has = "numbers" if data.has_numbers else "per position"
    for spec, defence in zip(arm.spec.defences, arm.defences, strict=True):
        if getattr(defence, "needs_classes", False) or (data.has_places and defence.overrides("wrap_data")):
            raise UserError(
                f"defence '{spec.name}' needs one class per sample, but labels are {has}: use another defence"
            )
    malicious = arm.spec.malicious
    if malicious and type(malicious.build()).poison_data is not Poisoning.poison_data:
        raise UserError(
            f"malicious: '{malicious.name}' needs one class per sample, but labels are {has}: use an attack that "
            f"changes the update"
        )
    if data.has_places:
        return
    labels = torch.from_numpy(data.test_labels[:1])
    if (
        aggregation_of(arm.spec).validates
        and losses.get_loss(arm.model).right(torch.zeros_like(labels), labels) is None
    ):
        raise UserError(
            f"arm '{arm.spec.name}': aggregation {arm.spec.aggregation.name} scores models by accuracy, which is not "
            f"defined for numbers: use another rule"
        )


def _check_samples(title: str, defence: Defence, samples: np.ndarray, data: Dataset) -> None:
    """Raise `UserError` if a client's `samples` (clients,) or the public data are too few for the defence."""
    public = 0 if data.public_labels is None else len(data.public_labels)
    if defence.least_public and not public:
        raise UserError(f"{title} {NEEDS_PUBLIC}")
    if public < defence.least_public:
        raise UserError(
            f"{title} needs {defence.least_public} public samples, but the data has {public}: raise `data.public`"
        )
    fewest = int(samples.argmin())
    if samples[fewest] < defence.least_samples:
        raise UserError(
            f"{title} needs {defence.least_samples} samples per client, but client {fewest} has {samples[fewest]}: use "
            f"fewer clients, a partition that gives each client more samples, or other parameters of the defence"
        )


def _check_words(scenario: Scenario, arm: Arm, data: Dataset) -> None:
    """Raise `UserError` if only one of model and labels is for words, or if a component needs classes.

    CTC supports neither second derivatives, which attacks need, nor per-sample gradients with vmap.
    """
    model = arm.spec.model.name
    shape = output_shape(arm.model, data.sample)
    if len(shape) == 3:
        raise UserError(
            f"model '{model}' scores each pixel, but data '{scenario.data.name}' has one label per image: use a "
            f"model that classifies images, or images with masks (`data.name: image_masks`)"
        )
    places = shape[0] if len(shape) == 2 else None
    if data.has_words != (places is not None):
        kinds = ("words", "classes") if data.has_words else ("classes", "words")
        raise UserError(
            f"data '{scenario.data.name}' has {kinds[0]} as labels, but model '{model}' predicts {kinds[1]}: change "
            f"the data or the model"
        )
    if places is None:
        return
    long = int((needed_places(torch.from_numpy(data.train_labels)) > places).sum())
    if long > len(data.train_labels) / 100:
        raise UserError(
            f"{long} of {len(data.train_labels)} training words need more than the {places} positions that '{model}' "
            f"has for images {data.sample.shape[2]} pixels wide, so they cannot be learnt: raise data.width, or lower "
            f"data.longest"
        )
    if scenario.attacks:
        raise UserError(f"attacks: '{scenario.attacks[0].title}' supports classes, not words: remove attacks")
    malicious = arm.spec.malicious
    if malicious and type(malicious.build()).poison_data is not Poisoning.poison_data:
        raise UserError(
            f"malicious: '{malicious.name}' supports classes, not words: use an attack that changes the update"
        )
    for spec, defence in zip(arm.spec.defences, arm.defences, strict=True):
        if defence.overrides("wrap_data") or defence.overrides("wrap_gradient"):
            raise UserError(
                f"defence '{spec.name}' supports classes, not words: use a defence that changes the whole update"
            )
