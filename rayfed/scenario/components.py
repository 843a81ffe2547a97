"""Specifications of components: name, parameters, and the fields common to all components of a kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rayfed import registry
from rayfed.errors import UserError

if TYPE_CHECKING:
    from rayfed.core.losses import Loss
    from rayfed.data.base import Dataset


def _found(kind: str, name: str) -> str:
    """Return the short name of a component, given its short name or dotted path.

    Tables and verdicts use the short name. Raises `ValueError` for an unknown component.
    """
    try:
        registry.find(kind, name)
    except UserError as error:
        raise ValueError(str(error)) from error
    return next((short for short, path in registry.table(kind).items() if path == name), name)


def _names(kind: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds a kind's component names to a JSON schema, for editors."""
    dotted = {"pattern": ":", "description": "a dotted path my_module:Name"}
    return lambda schema: schema.update(anyOf=[{"enum": list(registry.table(kind))}, dotted])


GrantName = Annotated[str, AfterValidator(partial(_found, "grants")), Field(json_schema_extra=_names("grants"))]
"""Name of a grant, which gives an attacker extra knowledge: `rayfed list grants`."""
ViewName = Annotated[str, AfterValidator(partial(_found, "views")), Field(json_schema_extra=_names("views"))]
"""Name of a view, the data that an attacker observes: `rayfed list views`."""


class Section(BaseModel):
    """Base class of scenario sections: typed, frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=registry.describe, allow_inf_nan=False)


class ComponentSpec(Section):
    """Specification of a component: name and parameters."""

    model_config = ConfigDict(extra="allow")
    kind: ClassVar[str]

    name: str
    """Short name (`rayfed list`), dotted path `my_module:Name`, or `FILE.py:Name`."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the component's parameters that the scenario sets."""
        return dict(self.model_extra or {})

    def build(self) -> Any:
        """Build the component from its name and parameters."""
        return registry.build(self.kind, self.name, self.parameters)


class DataSpec(ComponentSpec):
    """Data set: `rayfed list datasets`."""

    kind: ClassVar[str] = "datasets"

    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training samples that is public, stratified by class. No client owns these samples. Attackers with
    `knowledge: [public]` know them, and generators are trained on them. Default: 0."""

    def load(self) -> Dataset:
        """Load the data set, and separate its public training samples."""
        data: Dataset = self.build().load()
        return data.with_public(self.public) if self.public else data


class PartitionSpec(ComponentSpec):
    """Partition of the samples among clients: `rayfed list partitions`."""

    kind: ClassVar[str] = "partitions"


class AggregationSpec(ComponentSpec):
    """Aggregation rule, which combines updates into one step: `rayfed list aggregations`."""

    kind: ClassVar[str] = "aggregations"


class MaliciousSpec(ComponentSpec):
    """Malicious clients, their number and behaviour: `rayfed list poisonings`."""

    kind: ClassVar[str] = "poisonings"

    clients: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]]
    """Number of malicious clients, sampled once per run and equal in all arms, or a list of client numbers."""


class ProtectionSpec(ComponentSpec):
    """Protection of the updates that clients send: `rayfed list protections`."""

    kind: ClassVar[str] = "protections"


class DefenceSpec(ComponentSpec):
    """A defence: `rayfed list defences`."""

    kind: ClassVar[str] = "defences"

    on_clients: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] | None = None
    """Clients that use the defence: their number (the first ones), or a list of client numbers. Other clients of the
    arm do not defend themselves, and there is no guarantee. Default: null, all clients."""

    @model_serializer(mode="wrap")
    def _dump_without_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `on_clients` if all clients use the defence, for short commands and documents."""
        document: dict[str, Any] = handler(self)
        if self.on_clients is None:
            del document["on_clients"]
        return document


class Normalise(Section):
    """Input normalisation inside the model. The images of the data set stay in [0, 1]."""

    mean: list[float]
    """Mean, one value per channel."""
    std: list[Annotated[float, Field(gt=0)]]
    """Standard deviation, one value per channel."""


class Lora(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021), trained while the adapted layers are frozen. Requires the extra `hub`
    (peft)."""

    rank: Annotated[int, Field(ge=1)] = 8
    """Rank r of the product B A that is added to a layer's weight. Default: 8."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Numerator of the scale alpha / rank of the product. Default: twice the rank."""
    targets: list[str] | None = None
    """Layers to adapt: patterns of module names, or last parts of module names such as `query`. Default: peft's choice
    for the model type."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of the input of A. Default: 0."""


class Prompt(Section):
    """Soft prompt (Lester et al. 2021): trainable vectors before the text's tokens, while the model is frozen."""

    tokens: Annotated[int, Field(ge=1)] = 8
    """Number of trainable vectors. Default: 8."""


class Train(Section):
    """Parts of the model that clients train and send. All other parts are frozen and public."""

    layers: list[str] | None = None
    """Layers to train: patterns of parameter or module names (`encoder.layer.5.*`), or the words `head`, `last N
    blocks` (and all later layers), `bias` and `norms`. Default: all; with `lora` or `prompt` only the head."""
    lora: Lora | None = None
    """Low-rank adapters, trained in addition to these layers. Default: null, none."""
    prompt: Prompt | None = None
    """Soft prompt of a Hugging Face text model, trained in addition to these layers. Default: null, none."""


_SOURCES = {"hf": "path", "timm": "arch", "torchvision": "arch"}
"""Sources of models written as `SOURCE:NAME` -> field that takes NAME."""


def expand_model(value: Any) -> Any:
    """Expand the short name of a model: `hf:FOLDER` to `{name: hf, path: FOLDER}`, `timm:NAME` likewise with `arch`."""
    if not isinstance(value, str | dict):
        return value
    section = {"name": value} if isinstance(value, str) else value
    source, colon, name = str(section.get("name")).partition(":")
    if not colon or not name or source not in _SOURCES:
        return value
    return {**section, "name": source, _SOURCES[source]: name}


def write_out_models(document: dict[str, Any]) -> None:
    """Expand the short names of the models of a scenario and its arms (such as `hf:FOLDER`), in place."""
    if "model" in document:
        document["model"] = expand_model(document["model"])
    arms = document.get("arms")
    for arm in arms.values() if isinstance(arms, dict) else ():
        if isinstance(arm, dict) and "model" in arm:
            arm["model"] = expand_model(arm["model"])


class ModelSpec(ComponentSpec):
    """Model: a name (`rayfed list models`), `hf:FOLDER`, `timm:NAME`, or your own `nn.Module` as `my_module:Net`."""

    kind: ClassVar[str] = "models"

    state: Path | None = None
    """File with pretrained weights: `.safetensors`, `.npz`, or a state dict or checkpoint from `torch.save`. If the
    number of classes differs, the head is initialised at random. `~` and environment variables are expanded;
    `package:NAME/FILE` is a file of an installed package. Nothing is downloaded. Default: null, random weights."""
    train: Train | None = None
    """Parts of the model to train. Default: null, the whole model."""
    normalise: Normalise | None = None
    """Input normalisation inside the model: subtract a mean, divide by a standard deviation. Default: null, none."""
    batch_norm: Literal["train", "eval"] = "train"
    """Batch-norm statistics in local training. `train`: statistics of the batch. `eval`: running statistics."""

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        return expand_model(value)

    @property
    def title(self) -> str:
        """Return the model's name in short form, such as `torchvision:resnet18`."""
        named = self.parameters.get(_SOURCES.get(self.name, ""))
        return self.name if named is None else f"{self.name}:{named}"


class LossSpec(ComponentSpec):
    """Training loss: a name (`rayfed list losses`), or your own function of outputs and targets."""

    kind: ClassVar[str] = "losses"

    def build(self) -> Loss:
        """Build the loss from its name and parameters."""
        from rayfed.core.losses import make_loss  # imports PyTorch, which reading a scenario does not need

        return make_loss(self.name, self.parameters)


class AttackSpec(ComponentSpec):
    """An attack, its rounds, victims, knowledge and parameters: `rayfed list attacks`."""

    kind: ClassVar[str] = "attacks"

    label: str | None = None
    """Name in the tables; must be unique. Default: the name of the attack."""
    family: str | None = None
    """Name in results that attacks with other batch sizes or knowledge may share. Default: the label."""
    rounds: list[Annotated[int, Field(ge=0)]] = [0]
    """Rounds whose updates are attacked, counted from 0. Default: the first."""
    victims: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] = 1
    """Number of clients to attack (the first ones sampled in the round), or a list of client numbers. Default: 1."""
    observes: ViewName = "update"
    """View of the attacker. `update`: the update that the victim sent. `gradient`: the update for one step on
    `batch_size` of the victim's samples, under the same defences (the setting of most papers). `shown`: the attacker is
    a client of the round, and sees the victim's update, or a mixture (`fusion`), as `fedboosting` sends it to clients.
    Or your own view (`rayfed list views`)."""
    batch_size: Annotated[int, Field(ge=1)] = 1
    """Number of samples in the gradient, for `observes: gradient`. Default: 1."""
    knowledge: list[GrantName] = []
    """Knowledge in addition to weights, update and batch size: `rayfed list grants`. For a private part of the model,
    the attacker uses a random one, unless it has a `colluder`, `key` or `lock`. Default: none."""
    averages: Annotated[int, Field(ge=1)] = 1
    """Number of updates from the same weights and samples; the attack sees their mean, which reduces fresh noise. A
    value above 1 requires `knowledge: [defence]`. Default: 1."""
    earlier: Annotated[int, Field(ge=0)] = 0
    """Number of earlier rounds to use: the attack also matches the victim's updates from them, which are assumed to
    come from the same samples. With `observes: update`, every local step must use all of the client's samples. Only for
    gradient-matching attacks with `rayfed launch`. Default: 0."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """Number of attacks per victim, on the same update with different random numbers of the attacker. Default: 1."""
    factor: bool = False
    """For updates encrypted with Paillier: factor the public key, then attack the decrypted update. Keys of 200 bits or
    more are not attacked."""
    unmix: bool = False
    """If clients receive mixtures (`observes: shown`): first solve for the victim's update from all mixtures of the
    round."""
    victims_per_call: Annotated[int, Field(ge=1)] = 4
    """Number of victims attacked in one batched call of an actor."""

    @property
    def title(self) -> str:
        """Return the attack's name in tables: its label, or the name of its component."""
        return self.label or self.name

    @property
    def evaluations(self) -> int:
        """Return the maximum number of successive evaluations of the objective in one call; 0 without a search."""
        method = self.build()
        count = getattr(method, "evaluations", getattr(method, "iterations", 0))
        return count if isinstance(count, int) else 0

    @property
    def view(self) -> Any:
        """Return the view: the data of a client that the attack observes (`rayfed.threat_model.views.View`)."""
        return registry.find("views", self.observes)()

    @property
    def grants(self) -> dict[str, Any]:
        """Return the attack's grants (extra knowledge of the attacker) by name
        (`rayfed.threat_model.grants.base.Grant`)."""
        return {name: registry.find("grants", name)() for name in self.knowledge}


def expand_component(value: Any) -> Any:
    """Expand the short form of a component: `fedavg` to `{name: fedavg}`."""
    return {"name": value} if isinstance(value, str) else value


Short = BeforeValidator(expand_component)
