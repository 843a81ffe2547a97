"""The YAML that a user writes: its schema, its errors, and what follows from it.

`load` reads, checks and returns a `Scenario`; every problem of a file is reported at once, with its path, its line, the
value found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from rayfed import catalogue
from rayfed.errors import ScenarioError, UserError, nearest

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
        return catalogue.build(self.kind, self.name, self.parameters)


class DataSpec(ComponentSpec):
    """The data set: `rayfed list datasets`."""

    kind: ClassVar[str] = "datasets"

    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training samples that no client owns, a part of each class: what attackers with `knowledge:
    [public]` know, and what generators are trained on."""


class PartitionSpec(ComponentSpec):
    """How samples are dealt to clients: `rayfed list partitions`."""

    kind: ClassVar[str] = "partitions"


class AggregationSpec(ComponentSpec):
    """How updates become one step: `rayfed list aggregations`."""

    kind: ClassVar[str] = "aggregations"


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
    observes: Literal["update", "gradient"] = "update"
    """`update`: what the victim really sent in that round. `gradient`: what it would send for one step on `batch_size`
    of its samples, through the same defences (the setting of most papers)."""
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
    victims_per_call: Annotated[int, Field(ge=1)] = 4
    """Victims that one actor attacks in one batched call."""

    @property
    def title(self) -> str:
        """The attack's name in the tables."""
        return self.label or self.name


class Training(Section):
    """What a client does in one round."""

    algorithm: Literal["fedavg", "fedsgd"] = "fedavg"
    """`fedavg`: local SGD, the weight difference is sent. `fedsgd`: the gradient of one batch is sent."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the client's data (fedavg); 1 when neither this nor `steps` is given."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Local steps instead of epochs (fedavg)."""
    batch_size: Annotated[int, Field(ge=1)] | None = 32
    """Samples of one step; null takes all of the client's samples."""
    sampling: Literal["shuffle", "poisson"] = "shuffle"
    """Batches of a fresh permutation each epoch; or each sample for itself with probability batch_size / samples in
    every step, which is what the privacy account of `dp_sgd` gains from."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate of the local steps; the server's under fedsgd unless that has its own."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of the local steps, starting from zero every round."""
    vectorise: Literal["auto", "loop", "vmap"] = "auto"
    """A cohort as a loop over its clients, or as one `torch.func.vmap` call; `auto` takes vmap on CUDA where it can."""


class Server(Section):
    """The server's optimiser (Reddi 2021, 'Adaptive federated optimization')."""

    optimiser: Literal["sgd", "adam"] = "sgd"
    """`sgd` with or without momentum, or `adam` (FedAdam)."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Step size; null: 1 under fedavg, the training's lr under fedsgd."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd; first-moment decay of adam is 0.9."""


def _named(value: Any) -> Any:
    """`aggregation: fedavg` is short for `aggregation: {name: fedavg}`."""
    return {"name": value} if isinstance(value, str) else value


Short = BeforeValidator(_named)


class Federation(Section):
    """Who takes part, how often, and how the server aggregates."""

    rounds: Annotated[int, Field(ge=1)]
    """Rounds of training."""
    clients: Annotated[int, Field(ge=1)]
    """Clients in the federation."""
    clients_per_round: Annotated[int, Field(ge=1)] | None = None
    """Clients drawn each round; null: all."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """So many clients uniformly without replacement; or each for itself with probability clients_per_round / clients,
    so that their number varies: the privacy account of `dp_fedavg` gains from it."""
    cohort_size: Annotated[int, Field(ge=1)] | None = None
    """Clients in one unit of work; null: an eighth of a round's clients. It fixes the order in which updates are
    summed, so it belongs to the scenario and not to the cluster."""
    aggregation: Annotated[AggregationSpec, Short] = AggregationSpec(name="fedavg")
    """The rule; `fedavg` when not given."""
    server: Server = Server()
    """The server's optimiser."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations on the test set; the last round is always evaluated."""
    evaluate_clients: bool = False
    """Ask in the same rounds what share of the clients' own samples the new weights classify right: the accuracy on the
    protected data where a defence protects all of them."""


def _stacked(value: Any) -> Any:
    """`arm: [...]` is short for `arm: {defences: [...]}`."""
    return {"defences": value} if isinstance(value, list) else value


class ArmSpec(Section):
    """One arm: its stack of defences, and what it does otherwise than the others. A list is the stack."""

    defences: list[Annotated[DefenceSpec, Short]] = []
    """Applied in the order written."""
    training: dict[str, Any] = {}
    """Fields of `training` that this arm sets otherwise: the batch size and the local steps protect, too."""
    model: dict[str, Any] = {}
    """Fields of `model` that this arm sets otherwise."""


class Privacy(Section):
    """How (epsilon, delta) are accounted, for the defences that have one."""

    accountant: Literal["pld", "rdp"] | None = None
    """Privacy loss distributions, or Renyi differential privacy; null: the former where it can follow the sampling."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Epsilon that no arm may exceed: an arm stops before the round that would. Arms without a mechanism play on."""


ImageMetric = Literal["mse", "psnr", "ssim", "lpips_alex", "lpips_vgg", "noise_ratio"]
MetricName = ImageMetric | Literal["bp_ki", "bp_ki_posterior", "label_accuracy"]


class Metrics(Section):
    """How reconstructions are scored."""

    names: list[MetricName] = ["mse", "psnr", "ssim", "label_accuracy"]
    """The columns of the attacks' table that are filled."""
    success: dict[ImageMetric, float] = {"psnr": 15.0}
    """From which value on a reconstruction counts: its share of the attacked images, the probability of reconstruction
    success (PoRS), stands in the report for each of these metrics that is measured."""
    lpips_weights: str | None = None
    """File or folder with the backbone's weights for LPIPS; null looks into torch's hub cache. Never downloads."""
    evaluator: str | None = None
    """File that `rayfed train-evaluator` wrote, for `noise_ratio`; null takes the network that comes with rayfed."""


class Actors(Section):
    """One kind of actor."""

    actors: Annotated[int, Field(ge=1)] | None = None
    """How many; null: as many as the cluster's CPUs and GPUs allow."""
    num_cpus: Annotated[float, Field(ge=0)] | None = None
    """CPUs of one actor, may be a fraction; its threads are this, rounded up. Null: clients and attackers take turns on
    a core, so one each where there is no attack and half of one each otherwise; 0 for the server."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of one actor, may be a fraction below 1."""


class Resources(Section):
    """What each kind of actor asks of the cluster."""

    clients: Actors = Actors()
    """ClientActors host the virtual clients and score reconstructions."""
    server: Actors = Actors(actors=1)
    """The ServerActor; always one. It adds and does not train, on the CPU: it has no use for a GPU."""
    attackers: Actors = Actors()
    """AttackerActors."""


class Output(Section):
    """Where results go."""

    folder: str = "runs"
    """A local folder or any fsspec URL; each run makes `<name>-<time>` in it."""


class Scenario(Section):
    """One experiment, whole: the only thing that a user has to write."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the run folder; letters, digits, '-', '_', '.'."""
    seed: Annotated[int, Field(ge=0)] = 0
    """All randomness follows from it."""
    data: Annotated[DataSpec, Short] = DataSpec(name="digits")
    """The data set."""
    partition: Annotated[PartitionSpec, Short] = PartitionSpec(name="iid")
    """How its training samples are dealt to clients."""
    model: Annotated[ModelSpec, Short] = ModelSpec(name="lenet")
    """The model that is trained."""
    training: Training = Training()
    """The local round."""
    federation: Federation
    """Rounds, clients, aggregation."""
    defences: list[Annotated[DefenceSpec, Short]] = []
    """One stack of defences, applied in the order written."""
    arms: dict[str, Annotated[ArmSpec, BeforeValidator(_stacked)]] = {}
    """Several named stacks to compare, instead of `defences`: same data, seeds and victims."""
    privacy: Privacy = Privacy()
    """The privacy account."""
    attacks: list[Annotated[AttackSpec, Short]] = []
    """Who attacks what."""
    metrics: Metrics = Metrics()
    """How reconstructions are scored."""
    resources: Resources = Resources()
    """What actors ask of the cluster."""
    output: Output = Output()
    """Where the run folder is made."""

    @property
    def stacks(self) -> dict[str, list[DefenceSpec]]:
        """Arm name -> its defences; one arm named after its stack when the scenario has no arms."""
        if self.arms:
            return {name: arm.defences for name, arm in self.arms.items()}
        return {"+".join(d.name for d in self.defences) or "none": self.defences}

    def training_of(self, arm: str) -> Training:
        """What an arm's clients do in one round."""
        own = self.arms[arm].training if self.arms else {}
        return Training.model_validate({**self.training.model_dump(), **own}) if own else self.training

    def model_of(self, arm: str) -> ModelSpec:
        """The model that an arm trains."""
        own = self.arms[arm].model if self.arms else {}
        return ModelSpec.model_validate(self._model_with(own)) if own else self.model

    def _model_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The model's fields with an arm's; another architecture does not take over the parameters of this one."""
        same = own.get("name", self.model.name) == self.model.name
        shared = self.model.model_dump(include=None if same else set(ModelSpec.model_fields))
        return {**shared, **own}

    def with_stacks(self, stacks: Mapping[str, list[DefenceSpec]]) -> Scenario:
        """The same with other defences in the same arms."""
        if not self.arms:
            return self.model_copy(update={"defences": next(iter(stacks.values()))})
        arms = {name: arm.model_copy(update={"defences": stacks[name]}) for name, arm in self.arms.items()}
        return self.model_copy(update={"arms": arms})

    @property
    def clients_per_round(self) -> int:
        """Clients drawn each round."""
        return self.federation.clients_per_round or self.federation.clients

    @property
    def cohort_size(self) -> int:
        """Clients in one unit of work: from the scenario alone, never from the cluster."""
        return self.federation.cohort_size or ceil(self.clients_per_round / 8)

    def server_lr(self, arm: str) -> float:
        """The server's step size in an arm with its default resolved."""
        training = self.training_of(arm)
        default = 1.0 if training.algorithm == "fedavg" else training.lr
        return self.federation.server.lr or default

    def attacked_in(self, round: int) -> Scenario:
        """The same with every attack in this round, its last, and no other."""
        return self.model_copy(
            update={
                "federation": self.federation.model_copy(update={"rounds": round + 1}),
                "attacks": [attack.model_copy(update={"rounds": [round]}) for attack in self.attacks],
            }
        )

    def dump(self) -> str:
        """The scenario as YAML with every default written out; loading it gives the same scenario."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


Path_ = tuple[str | int, ...]


class Problem(BaseModel):
    """One thing that is wrong with a scenario."""

    path: Path_
    message: str


def load(source: str | Path, changes: Sequence[str] = ()) -> Scenario:
    """Read a scenario file and check it whole.

    `changes` are `path.to.field=value` with the value in YAML, as `--set` gives them. Raises `ScenarioError` with every
    problem of the file.
    """
    try:
        text = Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScenarioError(f"{source}: no such scenario file; `rayfed new NAME` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{source}: cannot be read as a text file: {error}") from error
    return parse(text, str(source), changes)


def parse(text: str, origin: str = "scenario", changes: Sequence[str] = ()) -> Scenario:
    """Check the text of a scenario; see `load`."""
    try:
        raw, found = _read(text)
    except ValueError as error:
        raise ScenarioError(f"{origin}: not valid YAML: {error}") from error
    lines = dict(found)
    if not isinstance(raw, dict):
        raise ScenarioError(f"{origin}: not a scenario: expected `key: value` lines, found {type(raw).__name__}")
    for change in changes:
        _apply(raw, change)
    problems = [*_repeated(found), *_schema_problems(raw), *_component_problems(raw)]
    if not problems:
        scenario = Scenario.model_validate(raw)
        problems = list(_joint_problems(scenario))
    if problems:
        raise ScenarioError(_report(origin, problems, lines))
    return scenario


def json_schema() -> dict[str, Any]:
    """JSON schema of a scenario, with every known component's own fields, for completion in editors."""
    schema = Scenario.model_json_schema()
    for spec in (DataSpec, PartitionSpec, ModelSpec, AggregationSpec, DefenceSpec, AttackSpec):
        shared = schema["$defs"].pop(spec.__name__)
        schema["$defs"][spec.__name__] = {
            "description": shared["description"],
            "anyOf": [{"type": "string"}, *_component_schemas(spec, shared)],
        }
    arm = schema["$defs"]["ArmSpec"]
    schema["$defs"]["ArmSpec"] = {"description": arm["description"], "anyOf": [arm["properties"]["defences"], arm]}
    return schema


def _component_schemas(spec: type[ComponentSpec], shared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in catalogue.table(spec.kind):
        target = catalogue.find(spec.kind, name)
        own = TypeAdapter(target).json_schema()
        yield {
            "type": "object",
            "title": name,
            "description": own.get("description", ""),
            "properties": {**own.get("properties", {}), **shared["properties"], "name": {"const": name}},
            "required": ["name", *own.get("required", [])],
            "additionalProperties": False,
        }
    dotted = {"type": "string", "pattern": ":", "description": "a dotted path my_module:Name"}
    yield {"type": "object", "properties": {**shared["properties"], "name": dotted}, "required": ["name"]}


def _read(text: str) -> tuple[Any, list[tuple[Path_, int]]]:
    """A YAML document, and the lines of its paths; raises `ValueError` for what is none, or refers to itself."""
    try:
        return yaml.safe_load(text), list(_lines(yaml.compose(text, Loader=yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("an anchor refers to itself, or the nesting is too deep") from None


def _lines(node: yaml.Node | None, path: Path_ = ()) -> Iterator[tuple[Path_, int]]:
    """The line, from 1, of every path in the document."""
    if node is None:
        return
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from (entry for entry in _lines(value, (*path, key.value)) if entry[0] != (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*path, index))


def _apply(raw: dict[str, Any], change: str) -> None:
    """Set one `path.to.field=value` in the raw document; list items go by their index."""
    path, equals, text = change.partition("=")
    if not equals or not path:
        raise ScenarioError(f"--set {change}: expected path.to.field=value, for example training.lr=0.05")
    try:
        value, _ = _read(text)
    except ValueError as error:
        raise ScenarioError(f"--set {change}: the value is not valid YAML: {error}") from error
    *parents, last = path.split(".")
    place: Any = raw
    try:
        for key in parents:
            place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
            if not isinstance(place, dict | list):
                raise TypeError
        if last.isdigit() != isinstance(place, list):
            raise TypeError
        if isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    except (IndexError, ValueError, TypeError, AttributeError):
        raise ScenarioError(f"--set {change}: the scenario has no place '{path}' to set") from None


def _repeated(found: Sequence[tuple[Path_, int]]) -> Iterator[Problem]:
    """Keys that stand twice in one place: YAML keeps the last one without a word."""
    first: dict[Path_, int] = {}
    repeated: set[Path_] = set()
    for path, line in found:
        if path not in first:
            first[path] = line
        elif not any(path[:depth] in repeated for depth in range(len(path))):  # what is in it need not be told too
            repeated.add(path)
            yield Problem(path=path, message=f"given before, in line {first[path]}: keep one")


def _schema_problems(raw: Mapping[str, Any]) -> list[Problem]:
    try:
        Scenario.model_validate(raw)
    except ValidationError as error:
        return [_problem(e, Scenario) for e in error.errors()]
    return []


def _problem(error: Any, root: type[BaseModel]) -> Problem:
    """One of pydantic's errors in our words; unknown keys get the nearest valid one."""
    path: Path_ = error["loc"]
    if error["type"] == "extra_forbidden":
        return Problem(path=path, message=f"unknown key; {nearest(str(path[-1]), _fields_at(root, path[:-1]))}")
    if error["type"] == "missing":
        return Problem(path=path, message="required, but not given")
    found = "" if isinstance(error["input"], dict | list) else f"found {error['input']!r}; "
    message = error["msg"].removeprefix("Value error, ")
    return Problem(path=path, message=found + message[0].lower() + message[1:])


def _fields_at(model: type[BaseModel], path: Path_) -> list[str]:
    keys = iter(path)
    for key in keys:
        annotation = model.model_fields[str(key)].annotation
        if get_origin(annotation) is dict:
            next(keys)  # a name that the user has given
        options = [getattr(option, "__origin__", option) for option in get_args(annotation) or (annotation,)]
        # `Normalise | None` is a section too
        [model] = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return list(model.model_fields)


def _specs(raw: Mapping[str, Any]) -> Iterator[tuple[Path_, type[ComponentSpec], Any]]:
    """Every place in the raw document that names a component."""
    single: dict[str, type[ComponentSpec]] = {"data": DataSpec, "partition": PartitionSpec, "model": ModelSpec}
    yield from (((key,), spec, raw[key]) for key, spec in single.items() if key in raw)
    federation = raw.get("federation")
    if isinstance(federation, dict) and "aggregation" in federation:
        yield ("federation", "aggregation"), AggregationSpec, federation["aggregation"]
    stacks: list[tuple[Path_, Any, type[ComponentSpec]]] = [
        (("defences",), raw.get("defences"), DefenceSpec),
        (("attacks",), raw.get("attacks"), AttackSpec),
    ]
    arms = raw.get("arms")
    if isinstance(arms, dict):
        for arm, value in arms.items():
            path: Path_ = ("arms", arm, "defences") if isinstance(value, dict) else ("arms", arm)
            stacks.append((path, value.get("defences") if isinstance(value, dict) else value, DefenceSpec))
    for path, stack, spec in stacks:
        if isinstance(stack, list):
            yield from (((*path, i), spec, item) for i, item in enumerate(stack))


def _component_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    for path, spec, value in _specs(raw):
        value = _named(value)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            continue  # the schema's own check says so
        try:
            target = catalogue.find(spec.kind, value["name"])
        except UserError as error:
            yield Problem(path=(*path, "name"), message=str(error))
            continue
        own = {k: v for k, v in value.items() if k not in spec.model_fields}
        yield from _parameter_problems(path, spec, target, own)


def _parameter_problems(path: Path_, spec: type[ComponentSpec], target: Any, own: dict[str, Any]) -> Iterator[Problem]:
    if spec is ModelSpec and not hasattr(target, "build"):
        return  # the user's own module: its constructor is the judge, when the model is built
    known = list(signature(target).parameters)
    for key in own.keys() - set(known):
        names = [*known, *(f for f in spec.model_fields if f != "name")]
        yield Problem(path=(*path, key), message=f"unknown key; {nearest(str(key), names)}")
    try:
        TypeAdapter(target).validate_python({k: v for k, v in own.items() if k in known})
    except ValidationError as error:
        for e in error.errors():
            problem = _problem(e, Scenario)
            yield problem.model_copy(update={"path": (*path, *problem.path)})


def _joint_problems(s: Scenario) -> Iterator[Problem]:
    """What no single field can tell."""
    if s.arms and s.defences:
        yield Problem(path=("defences",), message="give either `defences` (one stack) or `arms` (several), not both")
    yield from _training_problems(("training",), s.training)
    for name, arm in s.arms.items():
        yield from _arm_problems(s, name, arm)
    if s.clients_per_round > s.federation.clients:
        message = f"found {s.clients_per_round}, but the federation has {s.federation.clients} clients"
        yield Problem(path=("federation", "clients_per_round"), message=message)
    if s.federation.server.optimiser == "adam" and s.federation.server.momentum:
        yield Problem(path=("federation", "server", "momentum"), message="belongs to optimiser: sgd, not to adam")
    if s.resources.server.actors not in (None, 1):
        yield Problem(path=("resources", "server", "actors"), message="there is one server; leave it out")
    yield from _attack_problems(s)


def _training_problems(path: Path_, training: Training) -> Iterator[Problem]:
    if training.epochs and training.steps:
        yield Problem(path=(*path, "steps"), message="give either `epochs` or `steps`, not both")
    if training.algorithm == "fedsgd" and (training.epochs or training.steps or training.momentum):
        message = "fedsgd sends the gradient of one batch: it takes no epochs, steps or momentum (use fedavg)"
        yield Problem(path=(*path, "algorithm"), message=message)


def _arm_problems(s: Scenario, name: str, arm: ArmSpec) -> Iterator[Problem]:
    """What is wrong with an arm's own training and model, told where the arm sets it."""
    whole: dict[str, tuple[type[Section], dict[str, Any]]] = {
        "training": (Training, {**s.training.model_dump(), **arm.training}),
        "model": (ModelSpec, s._model_with(arm.model)),
    }
    for section, (model, values) in whole.items():
        try:
            model.model_validate(values)
        except ValidationError as error:
            for e in error.errors():
                problem = _problem(e, model)
                yield problem.model_copy(update={"path": ("arms", name, section, *problem.path)})
            return
    yield from _training_problems(("arms", name, "training"), s.training_of(name))
    if arm.model:
        spec = s.model_of(name)
        try:
            target = catalogue.find(spec.kind, spec.name)
        except UserError as error:
            yield Problem(path=("arms", name, "model", "name"), message=str(error))
        else:
            yield from _parameter_problems(("arms", name, "model"), ModelSpec, target, spec.parameters)


def _attack_problems(s: Scenario) -> Iterator[Problem]:
    titles: set[str] = set()
    for i, attack in enumerate(s.attacks):
        if attack.title in titles:
            message = f"two attacks are called '{attack.title}' in the tables: give this one a `label`"
            yield Problem(path=("attacks", i), message=message)
        titles.add(attack.title)
        if attack.averages > 1 and "defence" not in attack.knowledge:
            message = "averaging over noise is for an attacker who knows of it: add `knowledge: [defence]`"
            yield Problem(path=("attacks", i, "averages"), message=message)
        if "public" in attack.knowledge and not s.data.public:
            message = "knows the public data, but there are none: set a share aside with `data.public`, such as 0.1"
            yield Problem(path=("attacks", i, "knowledge"), message=message)
        if "activations" in attack.knowledge and "cut" not in attack.parameters:
            message = f"activations are those of an attack with a `cut`, and {attack.name} has none set"
            yield Problem(path=("attacks", i, "knowledge"), message=message)
        if attack.observes == "update" and attack.batch_size != 1:
            message = f"found {attack.batch_size}, but an update has the victim's own batches: set `observes: gradient`"
            yield Problem(path=("attacks", i, "batch_size"), message=message)
        for field, listed in (("rounds", attack.rounds), ("victims", attack.victims)):
            if listed == []:
                yield Problem(path=("attacks", i, field), message="is empty, so the attack never strikes")
            elif isinstance(listed, list) and len(set(listed)) < len(listed):
                yield Problem(path=("attacks", i, field), message=f"names one of {listed} twice")
        for r in attack.rounds:
            if r >= s.federation.rounds:
                message = f"round {r} is never played: rounds count from 0 to {s.federation.rounds - 1}"
                yield Problem(path=("attacks", i, "rounds"), message=message)
        if isinstance(attack.victims, int) and attack.victims > s.clients_per_round:
            message = f"found {attack.victims}, but only {s.clients_per_round} clients are drawn in a round"
            yield Problem(path=("attacks", i, "victims"), message=message)
        if isinstance(attack.victims, list):
            for v in attack.victims:
                if v >= s.federation.clients:
                    message = f"there is no client {v}: they count from 0 to {s.federation.clients - 1}"
                    yield Problem(path=("attacks", i, "victims"), message=message)


def _report(origin: str, problems: Sequence[Problem], lines: Mapping[Path_, int]) -> str:
    """All problems, one a line, in the order of the file."""

    def line_of(path: Path_) -> int:
        while path and path not in lines:
            path = path[:-1]
        return lines.get(path, 1)

    ordered = sorted(problems, key=lambda p: line_of(p.path))
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    rows = [f"  line {line_of(p.path)}: {'.'.join(map(str, p.path)) or 'scenario'}: {p.message}" for p in ordered]
    return "\n".join([f"{origin}: {count}", *rows])
