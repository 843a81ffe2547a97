"""Specifications of components: a name, the component's parameters, and the fields common to its kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rayfed import registry
from rayfed.errors import UserError

if TYPE_CHECKING:
    from rayfed.data.base import Dataset
    from rayfed.losses import Loss


def _found(kind: str, name: str) -> str:
    """Return the short name of a parameterless component, by that or its dotted path; raises `ValueError` for others.

    Tables hold the short name, by which a verdict sees what an attacker was given.
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
"""Name of what a threat model grants an attacker beyond what it observes: `rayfed list grants`."""
ViewName = Annotated[str, AfterValidator(partial(_found, "views")), Field(json_schema_extra=_names("views"))]
"""Name of what a threat model lets an attacker observe: `rayfed list views`."""


class Section(BaseModel):
    """Base of scenario sections: typed, frozen, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=registry.describe, allow_inf_nan=False)


class ComponentSpec(Section):
    """A component by name with its parameters."""

    model_config = ConfigDict(extra="allow")
    kind: ClassVar[str]

    name: str
    """A short name of `rayfed list`, a dotted path `my_module:Name`, or `FILE.py:Name`."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the component's parameters that the scenario sets."""
        return dict(self.model_extra or {})

    def build(self) -> Any:
        """Return the component."""
        return registry.build(self.kind, self.name, self.parameters)


class DataSpec(ComponentSpec):
    """The data set: `rayfed list datasets`."""

    kind: ClassVar[str] = "datasets"

    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training samples that no client owns, a part of each class: what attackers with `knowledge:
    [public]` know, and what generators are trained on."""

    def load(self) -> Dataset:
        """Load the data and set their public share aside."""
        data: Dataset = self.build().load()
        return data.with_public(self.public) if self.public else data


class PartitionSpec(ComponentSpec):
    """The partition, which deals samples to clients: `rayfed list partitions`."""

    kind: ClassVar[str] = "partitions"


class AggregationSpec(ComponentSpec):
    """The aggregation rule, which makes updates one step: `rayfed list aggregations`."""

    kind: ClassVar[str] = "aggregations"


class MaliciousSpec(ComponentSpec):
    """Malicious clients: their number and behaviour, `rayfed list poisonings`."""

    kind: ClassVar[str] = "poisonings"

    clients: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]]
    """How many, drawn from the seed for the whole run and alike in all arms; or a list of client numbers."""


class ProtectionSpec(ComponentSpec):
    """The protection under which clients send their updates: `rayfed list protections`."""

    kind: ClassVar[str] = "protections"


class DefenceSpec(ComponentSpec):
    """One defence of a defence pipeline: `rayfed list defences`."""

    kind: ClassVar[str] = "defences"


class Normalise(Section):
    """Input normalisation inside the model; images themselves stay in [0, 1]."""

    mean: list[float]
    """One value per channel."""
    std: list[Annotated[float, Field(gt=0)]]
    """One value per channel."""


class Lora(Section):
    """Low-rank adapters (Hu et al. 2021), trained beside frozen layers; by peft, which needs the extra `hub`."""

    rank: Annotated[int, Field(ge=1)] = 8
    """Rank r of the product B A that is added to a layer's weight."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The product is multiplied by alpha / rank; null: twice the rank."""
    targets: list[str] | None = None
    """Layers that get adapters, by patterns of their names or the last part, as `query`; null: those that peft has for
    the model's type."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of the dropout in front of A."""


class Prompt(Section):
    """A soft prompt (Lester et al. 2021): vectors in front of a text's tokens, trained in place of the model."""

    tokens: Annotated[int, Field(ge=1)] = 8
    """Number of its vectors."""


class Train(Section):
    """The parts of the model that are trained and sent; the rest is frozen and public."""

    layers: list[str] | None = None
    """Layers that are trained: patterns of the names of parameters or modules (`encoder.layer.5.*`), and the words
    `head`, `last N blocks` (with all behind them), `bias` and `norms`. Null: all, or with `lora` or
    `prompt` the head."""
    lora: Lora | None = None
    """Adapters that are trained beside these layers; null: none."""
    prompt: Prompt | None = None
    """A soft prompt that is trained beside these layers, of a model of texts of Hugging Face; null: none."""


_SOURCES = {"hf": "path", "timm": "arch", "torchvision": "arch"}
"""Models by the name that they have elsewhere, `SOURCE:NAME`: source, which is our component, and its field."""


def sourced(value: Any) -> Any:
    """Expand short names in a model section: `hf:FOLDER` is `{name: hf, path: FOLDER}`, `timm:NAME` sets `arch`."""
    if not isinstance(value, str | dict):
        return value
    section = {"name": value} if isinstance(value, str) else value
    source, colon, name = str(section.get("name")).partition(":")
    if not colon or not name or source not in _SOURCES:
        return value
    return {**section, "name": source, _SOURCES[source]: name}


def write_out_models(document: dict[str, Any]) -> None:
    """Expand short names of models (`hf:FOLDER`) in place: the scenario's model and those of its arms."""
    if "model" in document:
        document["model"] = sourced(document["model"])
    arms = document.get("arms")
    for arm in arms.values() if isinstance(arms, dict) else ():
        if isinstance(arm, dict) and "model" in arm:
            arm["model"] = sourced(arm["model"])


class ModelSpec(ComponentSpec):
    """The model: `rayfed list models`, `hf:FOLDER`, `timm:NAME`, or the user's own `nn.Module` as `my_module:Net`."""

    kind: ClassVar[str] = "models"

    state: Path | None = None
    """File with the model's weights instead of random ones: `.safetensors`, `.npz`, or a state dict or checkpoint that
    `torch.save` wrote. A head for other classes is initialised anew. `~` and environment variables are expanded, and
    `package:NAME/FILE` is one of an installed package. Nothing is ever downloaded."""
    train: Train | None = None
    """What of the model is trained; null: all of it."""
    normalise: Normalise | None = None
    """Subtract a mean and divide by a deviation inside the model."""
    batch_norm: Literal["train", "eval"] = "train"
    """Which statistics batch norm uses while clients train: the batch's own, or the running ones."""

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        return sourced(value)

    @property
    def title(self) -> str:
        """Name of the model as a user writes it, such as `torchvision:resnet18`."""
        named = self.parameters.get(_SOURCES.get(self.name, ""))
        return self.name if named is None else f"{self.name}:{named}"


class LossSpec(ComponentSpec):
    """The loss that clients minimise: `rayfed list losses`, or the user's own function of outputs and targets."""

    kind: ClassVar[str] = "losses"

    def build(self) -> Loss:
        """Return the loss."""
        from rayfed.losses import build  # takes PyTorch along, and who only reads a scenario does without

        return build(self.name, self.parameters)


class AttackSpec(ComponentSpec):
    """One attack: when it strikes, whom, what it knows, and its own parameters: `rayfed list attacks`."""

    kind: ClassVar[str] = "attacks"

    label: str | None = None
    """Name in the tables; the attack's own name when not given. Two attacks need two labels."""
    rounds: list[Annotated[int, Field(ge=0)]] = [0]
    """The rounds whose updates are attacked, counted from 0."""
    victims: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] = 1
    """How many clients (the first ones drawn in that round), or a list of client numbers."""
    observes: ViewName = "update"
    """`update`: what the victim really sent in that round. `gradient`: what it would send for one step on `batch_size`
    of its samples, through the same defences (the setting of most papers). `shown`: the attacker is a client of the
    round, and sees what `fedboosting` shows clients of the victim's model: its update, or a mixture (`fusion`). Or a
    view of your own (`rayfed list views`)."""
    batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples behind the gradient, with `observes: gradient`."""
    knowledge: list[GrantName] = []
    """What the attacker is given beside weights, update and batch size: `rayfed list grants` names it. Where a defence
    keeps a part of the model private, an attacker puts a random one in its place unless it is given a `colluder`, `key`
    or `lock`."""
    averages: Annotated[int, Field(ge=1)] = 1
    """How often the victim answers at the same weights with the same samples; the attack sees the mean, in which fresh
    noise fades. More than 1 with `knowledge: [defence]` only."""
    earlier: Annotated[int, Field(ge=0)] = 0
    """How many rounds before the attacked one the attacker looks back on: the victim's answers to the same samples,
    each at the weights of its round, are matched together. With `observes: update` every local step has to take all of
    the client's samples; with `gradient` the client is supposed to have used the batch of the attacked round in the
    rounds before, too. For attacks that match gradients, in trainings (`rayfed launch`)."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """How often every victim is attacked, each time with fresh randomness of the attacker's; what the victim sent stays
    the same."""
    factor: bool = False
    """Where the update was encrypted under Paillier: factor the public key first, then attack what was in it. Keys of
    200 bits and more are left alone."""
    unmix: bool = False
    """Where clients are shown mixtures: solve for the victim's update from all mixtures of the round first, which every
    client is shown (`observes: shown`)."""
    victims_per_call: Annotated[int, Field(ge=1)] = 4
    """Victims that one actor attacks in one batched call."""

    @property
    def title(self) -> str:
        """Name of the attack in tables."""
        return self.label or self.name

    @property
    def evaluations(self) -> int:
        """Most evaluations of the objective that one call makes one after another; 0 for an attack without a search."""
        method = self.build()
        count = getattr(method, "evaluations", getattr(method, "iterations", 0))
        return count if isinstance(count, int) else 0

    @property
    def view(self) -> Any:
        """View of the clients' work that the attack observes (`rayfed.client.views.View`)."""
        return registry.find("views", self.observes)()

    @property
    def grants(self) -> dict[str, Any]:
        """Grants of the attack by name (`rayfed.client.grants.base.Grant`)."""
        return {name: registry.find("grants", name)() for name in self.knowledge}


def named(value: Any) -> Any:
    """Expand a bare name: `aggregation: fedavg` is short for `aggregation: {name: fedavg}`."""
    return {"name": value} if isinstance(value, str) else value


Short = BeforeValidator(named)
