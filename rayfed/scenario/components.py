"""What a scenario says of one component: its name, its own parameters beside it, and what every of its kind has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rayfed import registry

if TYPE_CHECKING:
    from rayfed.data.base import Dataset

Knowledge = Literal["labels", "public", "defence", "candidates", "activations", "colluder", "key", "lock"]
"""What a threat model may grant an attacker beyond the weights, the update and the batch size."""


class Section(BaseModel):
    """A part of the scenario: typed, frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ComponentSpec(Section):
    """A component by its name, with its own parameters beside it."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    kind: ClassVar[str]

    name: str
    """A short name of `rayfed list`, or a dotted path `my_module:Name`."""

    @property
    def parameters(self) -> dict[str, Any]:
        """What the scenario sets of the component's own fields."""
        return dict(self.model_extra or {})

    def build(self) -> Any:
        """The component itself."""
        return registry.build(self.kind, self.name, self.parameters)


class DataSpec(ComponentSpec):
    """The data set: `rayfed list datasets`."""

    kind: ClassVar[str] = "datasets"

    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training samples that no client owns, a part of each class: what attackers with `knowledge:
    [public]` know, and what generators are trained on."""

    def load(self) -> Dataset:
        """The data, their public share set aside."""
        data: Dataset = self.build().load()
        return data.with_public(self.public) if self.public else data


class PartitionSpec(ComponentSpec):
    """How samples are dealt to clients: `rayfed list partitions`."""

    kind: ClassVar[str] = "partitions"


class AggregationSpec(ComponentSpec):
    """How updates become one step: `rayfed list aggregations`."""

    kind: ClassVar[str] = "aggregations"


class MaliciousSpec(ComponentSpec):
    """Clients that do not do as they are told: who, and what they do instead, `rayfed list poisonings`."""

    kind: ClassVar[str] = "poisonings"

    clients: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]]
    """How many, drawn from the seed for the whole run and alike in all arms; or a list of client numbers."""


class ProtectionSpec(ComponentSpec):
    """How clients hide what they send: `rayfed list protections`."""

    kind: ClassVar[str] = "protections"


class DefenceSpec(ComponentSpec):
    """One defence of a stack: `rayfed list defences`."""

    kind: ClassVar[str] = "defences"


class Normalise(Section):
    """Input normalisation inside the model; images themselves stay in [0, 1]."""

    mean: list[float]
    """One value per channel."""
    std: list[Annotated[float, Field(gt=0)]]
    """One value per channel."""


class ModelSpec(ComponentSpec):
    """The model: `rayfed list models`, or the user's own `nn.Module` as `my_module:Net`."""

    kind: ClassVar[str] = "models"

    normalise: Normalise | None = None
    """Subtract a mean and divide by a deviation inside the model."""
    batch_norm: Literal["train", "eval"] = "train"
    """Which statistics batch norm uses while clients train: the batch's own, or the running ones."""


class AttackSpec(ComponentSpec):
    """One attack: when it strikes, whom, what it knows, and its own parameters: `rayfed list attacks`."""

    kind: ClassVar[str] = "attacks"

    label: str | None = None
    """Name in the tables; the attack's own name when not given. Two attacks need two labels."""
    rounds: list[Annotated[int, Field(ge=0)]] = [0]
    """The rounds whose updates are attacked, counted from 0."""
    victims: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] = 1
    """How many clients (the first ones drawn in that round), or a list of client numbers."""
    observes: Literal["update", "gradient", "shown"] = "update"
    """`update`: what the victim really sent in that round. `gradient`: what it would send for one step on `batch_size`
    of its samples, through the same defences (the setting of most papers). `shown`: the attacker is a client of the
    round, and sees what `fedboosting` shows clients of the victim's model: its update, or a mixture (`fusion`)."""
    batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples behind the gradient, with `observes: gradient`."""
    knowledge: list[Knowledge] = []
    """What the attacker is given beside weights, update and batch size: `labels` of the batch, `public` data, the
    victim's `defence` (what it has spoilt is left out of the matching), `candidates` for membership. Of a split model,
    whose modules up to the attack's `cut` are private: `activations` (what the victim's private part sends) and
    `colluder` (the private part of the next drawn client). Where a defence keeps a part of the model private, an
    attacker puts a random one in its place, or the `colluder`'s; the victim's `key` (what it drew and never trains:
    keys, passports) and `lock` (what it trains: these are sent then, as all layers are) can be given to him."""
    averages: Annotated[int, Field(ge=1)] = 1
    """How often the victim answers at the same weights with the same samples; the attack sees the mean, in which fresh
    noise fades. More than 1 with `knowledge: [defence]` only."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """How often every victim is attacked, each time with fresh randomness of the attacker's; what the victim sent stays
    the same."""
    factor: bool = False
    """Where the update was sealed under Paillier: factor the public key first, then attack what was in it. Keys of 200
    bits and more are left alone."""
    unmix: bool = False
    """Where clients are shown mixtures: solve for the victim's update from all mixtures of the round first, which every
    client is shown (`observes: shown`)."""
    victims_per_call: Annotated[int, Field(ge=1)] = 4
    """Victims that one actor attacks in one batched call."""

    @property
    def title(self) -> str:
        """The attack's name in the tables."""
        return self.label or self.name


def named(value: Any) -> Any:
    """`aggregation: fedavg` is short for `aggregation: {name: fedavg}`."""
    return {"name": value} if isinstance(value, str) else value


Short = BeforeValidator(named)
