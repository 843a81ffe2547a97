"""Construction of arms: the adapted model, the defences and the aggregation rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import nn

from rayfed.aggregation.base import AnyAggregation
from rayfed.aggregation.boosting_over_channel import BoostingOverChannel
from rayfed.aggregation.fedboosting import FedBoosting
from rayfed.aggregation.over_channel import SumOverChannel
from rayfed.core import losses, seeds
from rayfed.core.number_types import check_model
from rayfed.defences.base import Defence
from rayfed.defences.some_clients import OnSomeClients
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, weights_of
from rayfed.models.build import build_model
from rayfed.models.lora import add_lora
from rayfed.models.private import common_names, key_names, only, private_names, without
from rayfed.models.prompt import add_prompt
from rayfed.models.trained import Adapt, choose, frozen_names, hold_still
from rayfed.samples import SampleSpec
from rayfed.scenario import DefenceSpec, ProtectionSpec, ResolvedArm, Train
from rayfed.update import Named


@dataclass(frozen=True)
class Arm:
    """A built arm: specification, model and defences, identical in all processes."""

    spec: ResolvedArm
    model: nn.Module
    """Model in training mode, with initial weights that depend on the seed."""
    defences: tuple[Defence, ...]

    @cached_property
    def private(self) -> frozenset[str]:
        """Return the names of the private parameters and buffers, which never leave a client."""
        return private_names(self.model)

    @cached_property
    def trained_privately(self) -> frozenset[str]:
        """Return the names of the private parameters that clients train."""
        return frozenset(name for name, p in self.model.named_parameters() if p.requires_grad) & self.private

    @cached_property
    def keys(self) -> frozenset[str]:
        """Return the names of the private tensors that are sampled once and never trained (keys, passports)."""
        return key_names(self.model)

    @property
    def weights(self) -> Named:
        """Return copies of the model parameters that the server and clients exchange, by name."""
        return without(weights_of(self.model), self.private)

    @property
    def buffers(self) -> Named:
        """Return copies of the model buffers that the server sends to clients, by name."""
        return without(buffers_of(self.model), self.private | frozen_names(self.model))

    @cached_property
    def frozen(self) -> Named:
        """Return the model's parameters and buffers that are public and never trained, by name."""
        return without(only(buffers_of(self.model), frozen_names(self.model)), self.private)

    @property
    def private_part(self) -> Named:
        """Return copies of the private parameters and buffers, which never leave a client, by name."""
        return only({**weights_of(self.model), **buffers_of(self.model)}, self.private)

    @property
    def common_start(self) -> Named:
        """Return copies of the private parameters whose initial value is the same for all clients, by name."""
        return only(weights_of(self.model), common_names(self.model))


def aggregation_of(arm: ResolvedArm) -> AnyAggregation:
    """Return an arm's aggregation rule, wrapped by the defences; raises `UserError` if they are incompatible."""
    rule: AnyAggregation = arm.aggregation.build()
    for defence in arm.defences:
        rule = defence.build().wrap_aggregation(rule, arm.clients_per_round)
    return rule


@dataclass(frozen=True)
class Protecting:
    """A protection of updates (such as masks or encryption), with the sizes that the server and clients agree on."""

    protection: ProtectionSpec
    clients: int
    """Maximum number of clients per round."""
    samples: int
    """Maximum total number of samples of these clients."""

    def wrap(self, rule: AnyAggregation) -> SumOverChannel | BoostingOverChannel:
        """Wrap an aggregation rule for protected updates; raises `UserError` if the two are incompatible."""
        protection = self.protection.build()
        if isinstance(rule, FedBoosting):
            return BoostingOverChannel.of(rule, protection, self.clients)
        return SumOverChannel.of(rule, protection, self.clients, self.samples)


def protected_aggregation(arm: ResolvedArm, protecting: Protecting | None) -> AnyAggregation:
    """Return an arm's aggregation rule, adapted to protected (masked or encrypted) updates if `protecting` is set."""
    rule = aggregation_of(arm)
    return protecting.wrap(rule) if protecting else rule


def build_arm(
    spec: ResolvedArm,
    sample: SampleSpec,
    classes: int,
    seed: int | bytes,
    build: Callable[..., nn.Module] = build_model,
) -> Arm:
    """Build an arm (model and defences), and check that model, data and defences are compatible.

    `build` creates the model, with the arguments of `build_model`. Raises `UserError` if the model is
    incompatible with the data or the defences, or has no trainable parameter.
    """
    model, pipeline = spec.model, spec.defences
    defences = tuple(_build_defence(defence) for defence in pipeline)
    normalise = (model.normalise.mean, model.normalise.std) if model.normalise else None
    net = build(model.name, model.parameters, sample, classes, seed, normalise, model.state)
    if model.train:
        with seeds.global_stream(seed, "adapters"):
            _choose(net, model.train, sample.shape)
    with seeds.global_stream(seed, "adapted model"):
        for defence in defences:
            net = defence.adapt_model(net)
    check_model(net, f"'{model.name}'")
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    if not trained:
        raise UserError(f"model '{model.name}' has no trainable parameter; set requires_grad=True for at least one")
    if trained <= private_names(net):
        raise UserError(f"all trainable parameters of model '{model.name}' are private; make fewer layers private")
    losses.attach_loss(net, spec.loss.build())
    net.train()
    if model.batch_norm == "eval":
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
    hold_still(net)
    for index, defence in enumerate(defences):
        defence.check(net)
        reason = defence.refuses(defences[index + 1 :])
        if reason:
            raise UserError(
                f"{pipeline[index].name} cannot be combined with the later {_listed(pipeline[index + 1 :])}: {reason}"
            )
        slow = [d for d in defences[:index] if not d.vectorises and d.overrides("wrap_gradient")]
        if defence.samplewise and slow:
            raise UserError(
                f"{pipeline[index].name} needs the gradient of each sample, which {type(slow[0]).__name__} "
                f"cannot compute; put {pipeline[index].name} first, or remove one of the two defences"
            )
    return Arm(spec, net, defences)


def _build_defence(spec: DefenceSpec) -> Defence:
    """Build a defence, limited to some clients if `on_clients` is set. Raises `UserError` if that is impossible."""
    defence: Defence = spec.build()
    return defence if spec.on_clients is None else OnSomeClients(defence, spec.on_clients, spec.name)


def _choose(model: nn.Module, train: Train, shape: tuple[int, ...]) -> None:
    """Freeze the untrained parts of a model and add adapters, in place; `shape` is the shape of a sample."""
    lora, prompt, layers = train.lora, train.prompt, train.layers
    if layers is None:
        layers = ["head"] if lora or prompt else ["*"]
    adapting: list[Adapt] = []
    if lora:
        alpha = lora.alpha or 2.0 * lora.rank
        adapting.append(partial(add_lora, rank=lora.rank, alpha=alpha, targets=lora.targets, dropout=lora.dropout))
    if prompt:
        adapting.append(partial(add_prompt, tokens=prompt.tokens, shape=shape))
    choose(model, layers, adapting)


def _listed(pipeline: Sequence[DefenceSpec]) -> str:
    return ", ".join(spec.name for spec in pipeline)
