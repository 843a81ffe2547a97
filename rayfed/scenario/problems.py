"""Checks of scenarios, and their error messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from inspect import signature
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from rayfed import registry
from rayfed.core.documents import Place
from rayfed.errors import UserError, nearest
from rayfed.scenario.components import (
    AggregationSpec,
    AttackSpec,
    ComponentSpec,
    DataSpec,
    DefenceSpec,
    LossSpec,
    MaliciousSpec,
    ModelSpec,
    PartitionSpec,
    ProtectionSpec,
    Section,
    expand_component,
)
from rayfed.scenario.sections import ArmSpec, Augment, Scenario, Schedule, Training
from rayfed.scenario.system import System
from rayfed.store.arms import name_pairs

_MISSING = "required, but not given"
_REQUIRED: Mapping[Place, Any] = {
    ("name",): "unknown",
    ("federation", "rounds"): 1,
    ("federation", "clients"): 1,
}
"""Required fields -> placeholder values for them while other fields are checked."""


@dataclass(frozen=True)
class Problem:
    """One problem of a scenario, with the path of its field."""

    path: Place
    message: str
    wanted: str = ""
    """Description of a missing field of a component."""

    @property
    def text(self) -> str:
        """Return the problem's message, followed by the description of a missing field."""
        return f"{self.message}{': ' * bool(self.wanted)}{self.wanted}"


def find_repeated_keys(found: Sequence[tuple[Place, int]]) -> Iterator[Problem]:
    """Yield a problem for each duplicate key of a YAML document, because YAML silently keeps only the last."""
    first: dict[Place, int] = {}
    repeated: set[Place] = set()
    for path, line in found:
        if path not in first:
            first[path] = line
        elif not any(path[:depth] in repeated for depth in range(len(path))):  # its section is not reported yet
            repeated.add(path)
            yield Problem(path=path, message=f"duplicate of line {first[path]}; remove one of the two")


def schema_problems(raw: Mapping[str, Any]) -> list[Problem]:
    """Return a scenario's violations of the schema: wrong types, values out of range, unknown or missing fields."""
    try:
        Scenario.model_validate(raw)
    except ValidationError as error:
        return _problems(error, raw, Scenario)
    return []


def _problems(error: ValidationError, value: Any, root: type[BaseModel]) -> list[Problem]:
    """Convert pydantic's errors on a value to problems, without duplicates.

    For a field of a union type, pydantic reports an error for each type, with the type's name in the location. Only the
    errors deepest in the value are kept, joined to one message.
    """
    told: dict[Place, dict[str, None]] = {}
    of_several: dict[Place, int] = {}
    """Path of a field of a union type -> depth of its deepest error."""
    found = []
    for one in error.errors():
        place, field = _in_value(one["loc"], value, missing=one["type"] == "missing")
        found.append((place, field, _problem(one, root).message))
        if field is not None:
            of_several[field] = max(of_several.get(field, 0), len(place))
    for place, field, message in found:
        if field is None or len(place) == of_several[field]:
            told.setdefault(place, {})[message] = None
    return [Problem(path=place, message=_joined(list(messages))) for place, messages in told.items()]


def _in_value(loc: Place, value: Any, missing: bool) -> tuple[Place, Place | None]:
    """Return the path of an error in the value, and the path of the union-typed field that it is in, if any.

    If a field is `missing`, the path includes its key, which the value does not contain.
    """
    place: Place = ()
    field = None
    for depth, key in enumerate(loc):
        inside = key in value if isinstance(value, Mapping) else isinstance(value, list) and isinstance(key, int)
        if inside:
            value, place = value[key], (*place, key)
        elif missing and depth == len(loc) - 1:
            place = (*place, key)
        else:  # the name of a type
            field = place if field is None else field
    return place, field


def _joined(messages: Sequence[str]) -> str:
    """Join several messages on one value."""
    first, *others = messages
    found = first.partition("; ")[0]
    return ", or ".join([first, *(other.removeprefix(f"{found}; ") for other in others)])


def _problem(error: Any, root: type[BaseModel]) -> Problem:
    """Convert one of pydantic's errors to a problem, which suggests the nearest valid key for an unknown key."""
    path: Place = error["loc"]
    if error["type"] == "extra_forbidden":
        known, key = _fields_at(root, path[:-1]), str(path[-1])
        elsewhere = list(_sections_with(root, key))
        message = f"it belongs to {' or '.join(elsewhere)}" if elsewhere else nearest(key, known)
        return Problem(path=path, message=f"unknown key; {message}")
    if error["type"] == "missing":
        return Problem(path=path, message=_MISSING)
    found = "" if isinstance(error["input"], dict | list) else f"found {error['input']!r}; "
    message = error["msg"].removeprefix("Value error, ")
    return Problem(path=path, message=found + message[0].lower() + message[1:])


def _sections_with(root: type[BaseModel], key: str) -> Iterator[str]:
    """Yield the quoted names of the sections that have a field called `key`."""
    for name, field in root.model_fields.items():
        if any(
            key in getattr(option, "model_fields", ()) for option in get_args(field.annotation) or (field.annotation,)
        ):
            yield f"'{name}'"


def _fields_at(model: type[BaseModel], path: Place) -> list[str]:
    keys = iter(path)
    for key in keys:
        if key == model.__name__:
            continue  # a member of a union, such as `Range`
        annotation = model.model_fields[str(key)].annotation
        if get_origin(annotation) is dict:
            next(keys)  # a name that the user chose
        model = _section_of(annotation)
    return list(model.model_fields)


def _section_of(annotation: Any) -> type[BaseModel]:
    """Return the section in an annotation, such as `Normalise | None` or `dict[str, list[Any] | Range]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    options = [option for option in get_args(annotation) if _contains_section(option)]
    return _section_of(options[0])


def _contains_section(annotation: Any) -> bool:
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return is_section or any(map(_contains_section, get_args(annotation)))


def list_specs(raw: Mapping[str, Any]) -> Iterator[tuple[Place, type[ComponentSpec], Any]]:
    """Yield the path, specification class and value of every component in a scenario document."""
    single: dict[str, type[ComponentSpec]] = {
        "data": DataSpec,
        "partition": PartitionSpec,
        "model": ModelSpec,
        "loss": LossSpec,
    }
    yield from (((key,), spec, raw[key]) for key, spec in single.items() if key in raw)
    yield from _rules(("federation",), raw.get("federation"))
    opponents = raw.get("opponents")
    if isinstance(opponents, dict):
        yield from ((("opponents", name), MaliciousSpec, value) for name, value in opponents.items())
    pipelines: list[tuple[Place, Any, type[ComponentSpec]]] = [
        (("defences",), raw.get("defences"), DefenceSpec),
        (("attacks",), raw.get("attacks"), AttackSpec),
    ]
    arms = raw.get("arms")
    if isinstance(arms, dict):
        for arm, value in arms.items():
            yield from _rules(("arms", arm), value)
            path: Place = ("arms", arm, "defences") if isinstance(value, dict) else ("arms", arm)
            pipelines.append((path, value.get("defences") if isinstance(value, dict) else value, DefenceSpec))
    for path, pipeline, spec in pipelines:
        if isinstance(pipeline, list):
            yield from (((*path, i), spec, item) for i, item in enumerate(pipeline))


def _rules(path: Place, section: Any) -> Iterator[tuple[Place, type[ComponentSpec], Any]]:
    """Yield a section's aggregation, protection and malicious clients, as `list_specs` does."""
    named: dict[str, type[ComponentSpec]] = {
        "aggregation": AggregationSpec,
        "protection": ProtectionSpec,
        "malicious": MaliciousSpec,
    }
    if isinstance(section, dict):
        yield from (((*path, key), spec, section[key]) for key, spec in named.items() if section.get(key) is not None)


def component_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each unknown component and each invalid parameter of a component."""
    for path, spec, value in list_specs(raw):
        value = expand_component(value)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            continue  # the check of the schema reports it
        try:
            target = registry.find(spec.kind, value["name"])
        except UserError as error:
            yield Problem(path=(*path, "name"), message=str(error))
            continue
        own = {k: v for k, v in value.items() if k not in spec.model_fields}
        yield from _parameter_problems(path, spec, target, own)


def _parameter_problems(path: Place, spec: type[ComponentSpec], target: Any, own: dict[str, Any]) -> Iterator[Problem]:
    if spec in (ModelSpec, LossSpec) and not is_dataclass(target):
        return  # a user's own function: the call shows whether it takes these parameters
    known = list(signature(target).parameters)
    for key in own.keys() - set(known):
        names = [*known, *(f for f in spec.model_fields if f != "name")]
        yield Problem(path=(*path, key), message=f"unknown key; {nearest(str(key), names)}")
    given = {k: v for k, v in own.items() if k in known}
    try:
        TypeAdapter(target).validate_python(given)
    except ValidationError as error:
        for problem in _problems(error, given, Scenario):
            place: Place = (*path, *problem.path)
            missing = problem.message == _MISSING and len(problem.path) == 1
            yield replace(problem, path=place, wanted=_wanted(target, place) if missing else "")


def _wanted(target: Any, place: Place) -> str:
    """Return the description of a component's field; empty if there is none."""
    if not target.__module__.startswith("rayfed."):
        return ""  # a user's fields may have types without a schema
    said = next((one.doc for one in registry.parameters(target) if one.name == place[-1]), "").removesuffix(".")
    return f"{said[:1].lower()}{said[1:]}"


def drop_invalid(document: Mapping[str, Any], places: Iterable[Place]) -> Scenario | None:
    """Return a scenario with only the valid fields of a document; None if too few fields are valid.

    The sections of the fields in `places` are removed, and reading them raises `AttributeError`. Thus checks of other
    fields still run.
    """
    if not isinstance(document.get("federation"), Mapping):
        return None
    unknown = {place[: 2 if place[:1] == ("federation",) else 1] for place in places}
    if {(), ("federation",)} & unknown:  # a top-level key is not a string, or the whole section is invalid
        return None
    kept = {key: dict(value) if key == "federation" else value for key, value in document.items()}
    for place in unknown:
        section = kept if len(place) == 1 else kept["federation"]
        section.pop(place[-1], None)
        if place in _REQUIRED:
            section[place[-1]] = _REQUIRED[place]
    try:
        scenario = Scenario.model_validate(kept)
    except ValidationError:
        return None
    for place in unknown:
        holder = scenario if len(place) == 1 else scenario.federation
        holder.__dict__.pop(place[-1], None)
    return scenario


def _of_training(s: Scenario) -> Iterator[Problem]:
    """Yield problems of the training settings (common ones and those of each arm), and of the attacks' knowledge."""
    if s.arms and s.defences:
        yield Problem(path=("defences",), message="give either `defences` (one pipeline) or `arms` (several), not both")
    of_all = list(_training_problems(("training",), s.training, s.federation.rounds))
    yield from of_all
    told = {(problem.path, problem.message) for problem in of_all}  # arms inherit these; report them once
    of_arms = [
        problem
        for name, arm in s.arms.items()
        for problem in _arm_problems(s, name, arm)
        if (problem.path[2:], problem.message) not in told
    ]
    yield from of_arms
    if not of_arms and not of_all:
        for i, attack in enumerate(s.attacks):
            for field, message in _threat_problems(s, attack):
                yield Problem(path=("attacks", i, field), message=message)


def _of_federation(s: Scenario) -> Iterator[Problem]:
    if s.clients_per_round > s.federation.clients:
        message = (
            f"found {s.clients_per_round}, but the federation has {s.federation.clients} clients; lower this number"
        )
        yield Problem(path=("federation", "clients_per_round"), message=message)
    if s.federation.server.optimiser == "adam" and s.federation.server.momentum:
        yield Problem(
            path=("federation", "server", "momentum"), message="only for optimiser: sgd, not adam; remove `momentum`"
        )
    if s.resources.server.actors not in (None, 1):
        yield Problem(path=("resources", "server", "actors"), message="there is always one server; remove `actors`")
    if s.resources.server.labels:
        yield Problem(
            path=("resources", "server", "labels"), message="the server runs on the driver's node; remove `labels`"
        )
    if s.resources.server.num_gpus:
        message = (
            "the server runs on the CPU, and clients could not use a GPU reserved for the server; remove `num_gpus`"
        )
        yield Problem(path=("resources", "server", "num_gpus"), message=message)
    for kind, actors in (("clients", s.resources.clients), ("attackers", s.resources.attackers)):
        if actors.num_gpus != "auto" and actors.num_gpus > 1:
            message = (
                f"found {actors.num_gpus:g}, but one actor computes on one GPU; give at most 1. Several GPUs are used "
                "by several actors"
            )
            yield Problem(path=("resources", kind, "num_gpus"), message=message)
    for rule in (arm.aggregation or s.federation.aggregation for arm in s.played.values()):
        if not s.federation.validation and registry.find(rule.kind, rule.name).validates:
            message = (
                f"{rule.name} scores models on samples that clients do not train on; set `validation`, such as 0.1"
            )
            yield Problem(path=("federation", "validation"), message=message)
            break
    if s.federation.encrypted_images:
        yield from _encrypted_inference_problems(s)


def _encrypted_inference_problems(s: Scenario) -> Iterator[Problem]:
    """Yield problems of classifying test images under encryption."""
    place = ("federation", "encrypted_images")
    if all(arm.model.get("name", s.model.name) != "cryptonet" for arm in s.played.values()):
        message = "only the model `cryptonet` can classify encrypted images; set `model: cryptonet`, or remove it"
        yield Problem(path=place, message=message)
    elif s.model.normalise:
        yield Problem(path=place, message="encrypted images are not normalised; remove `normalise` from the model")


def _of_system(s: Scenario) -> Iterator[Problem]:
    if s.federation.system:
        for path, message in _system_problems(s, s.federation.system):
            yield Problem(path=("federation", "system", *path), message=message)


def _name_problems(s: Scenario) -> Iterator[Problem]:
    """Yield a problem for each pair of an arm and an opponent whose name in tables is not unique."""
    known = dict.fromkeys(s.written_arms if s.opponents else ())
    for name, (_, opponent) in name_pairs(s.written_arms, s.opponents):
        if name in known:
            message = f"two arms would be called '{name}' in tables; rename the opponent or an arm"
            yield Problem(path=("opponents", opponent), message=message)
        known[name] = None


def _malicious_problems(s: Scenario) -> Iterator[Problem]:
    given: dict[Place, MaliciousSpec | None] = {("federation", "malicious"): s.federation.malicious}
    given |= {("arms", name, "malicious"): arm.malicious for name, arm in s.arms.items()}
    if s.opponents and any(given.values()):
        message = "every arm is run against each opponent; remove `malicious` from federation and arms"
        yield Problem(path=("opponents",), message=message)
    given |= {("opponents", name): malicious for name, malicious in s.opponents.items()}
    for place, malicious in given.items():
        if malicious is None:
            continue
        empty = "is empty; remove `malicious` if no client is malicious"
        yield from _clients_problems((*place, "clients"), malicious.clients, s.federation.clients, empty)


def _defending_clients_problems(s: Scenario) -> Iterator[Problem]:
    pipelines: dict[Place, Sequence[DefenceSpec]] = {("defences",): s.defences}
    pipelines |= {("arms", name, "defences"): arm.defences for name, arm in s.arms.items()}
    for place, pipeline in pipelines.items():
        for index, defence in enumerate(pipeline):
            if defence.on_clients is not None:
                empty = "is empty; remove the defence if no client uses it"
                yield from _clients_problems(
                    (*place, index, "on_clients"), defence.on_clients, s.federation.clients, empty
                )


def _clients_problems(path: Place, clients: int | list[int], everybody: int, empty: str) -> Iterator[Problem]:
    """Yield a problem for a number of clients that is too large, an empty list, or an unknown client number."""
    if isinstance(clients, int):
        if clients > everybody:
            message = f"found {clients}, but the federation has {everybody} clients; lower this number"
            yield Problem(path=path, message=message)
    elif not clients:
        yield Problem(path=path, message=empty)
    elif max(clients) >= everybody:
        message = f"found {max(clients)}; clients are numbered from 0 to {everybody - 1}"
        yield Problem(path=path, message=message)


def _training_problems(path: Place, training: Training, rounds: int) -> Iterator[Problem]:
    if training.epochs and training.steps:
        yield Problem(path=(*path, "steps"), message="give either `epochs` or `steps`, not both")
    if training.augment == Augment():
        yield Problem(
            path=(*path, "augment"),
            message="has no effect; set `crop`, `scale` or `flip`, or remove `augment`",
        )
    schedule, of_steps = training.schedule, ("epochs", "steps", "momentum", "weight_decay", "clip_norm")
    found = [name for name in of_steps if getattr(training, name)] + ["schedule"] * (schedule != Schedule())
    if training.algorithm == "fedsgd" and found:
        message = f"fedsgd has no local steps; remove {', '.join(found)}, or use fedavg"
        yield Problem(path=(*path, "algorithm"), message=message)
    if training.optimiser != "sgd" and (training.algorithm == "fedsgd" or training.momentum):
        message = f"{training.optimiser} needs algorithm: fedavg and no `momentum`; change these fields, or use sgd"
        yield Problem(path=(*path, "optimiser"), message=message)
    if training.nesterov and (training.optimiser != "sgd" or not training.momentum):
        yield Problem(path=(*path, "nesterov"), message="needs optimiser: sgd and a `momentum` above 0; set both")
    for field, message in _schedule_problems(schedule, rounds):
        yield Problem(path=(*path, "schedule", field), message=message)


def _schedule_problems(schedule: Schedule, rounds: int) -> Iterator[tuple[str, str]]:
    """Yield problems of a learning-rate schedule: the field and the message."""
    kind, counted = schedule.kind, schedule.kind in ("cosine", "step")
    if counted and schedule.rounds is None:
        yield "rounds", f"required by kind: {kind}; give a number of rounds"
    elif schedule.rounds is not None and not counted:
        yield "rounds", f"not used by kind: {kind}; remove `rounds`"
    elif kind == "cosine" and rounds > schedule.warmup + (schedule.rounds or 0):
        yield (
            "rounds",
            f"found {schedule.rounds}; the learning rate would be 0 before the end of {rounds} rounds; raise `rounds`",
        )
    if kind == "milestones" and not schedule.milestones:
        yield "milestones", "required by kind: milestones; give rounds, such as [60, 120]"
    elif schedule.milestones and kind != "milestones":
        yield "milestones", f"not used by kind: {kind}; remove `milestones`, or set kind: milestones"
    elif len(set(schedule.milestones)) < len(schedule.milestones):
        yield "milestones", "a round is given twice; remove one of the two"


def _system_problems(s: Scenario, system: System) -> Iterator[tuple[Place, str]]:
    """Yield problems of devices and virtual time: the path in the section and the message."""
    rules = [arm.aggregation or s.federation.aggregation for arm in s.played.values()]
    asking = (rule.name for rule in rules if hasattr(registry.find(rule.kind, rule.name), "answer"))
    if name := next(asking, None):
        yield (), f"{name} has clients score models, which is not simulated; remove `system`, or use another rule"
    if system.file and system.devices != System().devices:  # a dumped scenario contains the default devices
        yield ("file",), "cannot be combined with `devices`; remove one of the two"
    for name, one in system.devices.items():
        if isinstance(one.available, list) and len(one.available) != 24:
            yield (
                ("devices", name, "available"),
                f"found {len(one.available)} numbers; give one number, or 24 (one per hour)",
            )
    for name, one in system.devices.items():
        if system.deadline is None and (one.failure or one.memory is not None):
            yield ("deadline",), f"required, because devices of class '{name}' may drop out; give a number of seconds"
        if system.every is None and min(one.by_hour) < 1:
            message = (
                f"required, because the availability of class '{name}' depends on the hour; give a number of seconds"
            )
            yield ("every",), message
    if system.every is not None and (system.deadline is None or system.deadline > system.every):
        yield ("every",), "a round may take longer than `every`; set `deadline` to at most `every`"
    if system.selects and s.federation.sampling == "poisson":
        yield ("over_selection",), "cannot be combined with sampling: poisson; remove one of the two"
    if system.selects and s.drawn_per_round > s.federation.clients:
        message = (
            f"samples {s.drawn_per_round} clients, but the federation has {s.federation.clients}; lower this factor"
        )
        yield ("over_selection",), message


def _asynchronous_problems(s: Scenario) -> Iterator[Problem]:
    """Yield problems of asynchronous rules, which take a step when enough updates have arrived."""
    federation, system, rules = s.federation, s.federation.system, list[str]()
    for name, arm in s.played.items():
        spec = arm.aggregation or federation.aggregation
        target = registry.find(spec.kind, spec.name)
        if getattr(target, "asynchronous", False):
            rules.append(spec.name)
            yield from _asynchronous_arm_problems(s, name, arm, spec.name, getattr(target, "mixes", False))
    if rules:
        yield from _virtual_time_problems(s, rules[0])
    elif system and system.concurrency is not None:
        message = "only for asynchronous rules (fedbuff, fedasync), which no arm uses; remove `concurrency`"
        yield Problem(("federation", "system", "concurrency"), message)


def _asynchronous_arm_problems(s: Scenario, name: str, arm: ArmSpec, rule: str, mixes: bool) -> Iterator[Problem]:
    """Yield problems of an arm with an asynchronous rule; `mixes`: whether the rule averages models, not updates."""
    server = s.federation.server
    if mixes and (server.optimiser != "sgd" or server.lr not in (None, 1) or server.momentum):
        message = f"{rule} mixes models with its own weights, and needs sgd with lr 1; remove `server`"
        yield Problem(("federation", "server"), message)
    if mixes and arm.training.get("algorithm", s.training.algorithm) != "fedavg":
        message = f"{rule} mixes locally trained models; use fedavg"
        yield Problem(("training", "algorithm"), message)
    if arm.protection or s.federation.protection:
        place: Place = ("arms", name, "protection") if arm.protection else ("federation", "protection")
        yield Problem(place, f"{rule} needs single updates; use a synchronous rule, or remove `protection`")


def _virtual_time_problems(s: Scenario, rule: str) -> Iterator[Problem]:
    """Yield problems of fields that an asynchronous rule needs or does not use."""
    federation, system = s.federation, s.federation.system
    if system is None:
        message = f"required by {rule}, which needs virtual time; describe the clients' devices, or use fedavg"
        yield Problem(("federation", "system"), message)
        return
    for field in ("deadline", "every"):
        if getattr(system, field) is not None:
            yield Problem(
                ("federation", "system", field), f"not used by {rule}, which is asynchronous; remove `{field}`"
            )
    if system.selects:
        message = f"not used by {rule}, which is asynchronous; remove `over_selection`"
        yield Problem(("federation", "system", "over_selection"), message)
    if federation.sampling == "poisson":
        yield Problem(("federation", "sampling"), f"{rule} replaces one device at a time; use sampling: fixed")
    if federation.failures.then == "drop":
        message = f"{rule} would wait for the update of a failed client; use `then: stop`"
        yield Problem(("federation", "failures", "then"), message)
    started = (system.concurrency or s.clients_per_round) + s.clients_per_round - 1
    if started > federation.clients:
        message = (
            f"the first step needs {started} clients, but the federation has {federation.clients}; lower `concurrency`"
        )
        yield Problem(("federation", "system", "concurrency"), message)


def _arm_problems(s: Scenario, name: str, arm: ArmSpec) -> Iterator[Problem]:
    """Yield problems of an arm's `training` and `model`."""
    whole: dict[str, tuple[type[Section], dict[str, Any]]] = {
        "training": (Training, {**s.training.model_dump(), **arm.training}),
        "model": (ModelSpec, s.model_with(arm.model)),
    }
    for section, (model, values) in whole.items():
        try:
            model.model_validate(values)
        except ValidationError as error:
            for problem in _problems(error, values, model):
                yield replace(problem, path=("arms", name, section, *problem.path))
            return
    own = Training.model_validate(whole["training"][1])
    yield from _training_problems(("arms", name, "training"), own, s.federation.rounds)
    if arm.model:
        spec = ModelSpec.model_validate(whole["model"][1])
        try:
            target = registry.find(spec.kind, spec.name)
        except UserError as error:
            yield Problem(path=("arms", name, "model", "name"), message=str(error))
        else:
            yield from _parameter_problems(("arms", name, "model"), ModelSpec, target, spec.parameters)


def _attack_problems(s: Scenario) -> Iterator[Problem]:
    titles: set[str] = set()
    for i, attack in enumerate(s.attacks):
        if attack.title in titles:
            message = f"two attacks are named '{attack.title}'; give this attack a unique `label`"
            yield Problem(path=("attacks", i), message=message)
        titles.add(attack.title)
        yield from (
            Problem(path=("attacks", i, field), message=message) for field, message in _place_problems(s, attack)
        )


def _threat_problems(s: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
    """Yield problems of an attack's view and knowledge: the field and the message."""
    grants = attack.grants.values()
    if attack.averages > 1 and not any(grant.averages for grant in grants):
        yield "averages", "only attackers that know the defence can use `averages`; add `knowledge: [defence]`"
    if attack.earlier:
        yield from (("earlier", message) for message in _earlier_problems(s, attack))
    yield from (("knowledge", message) for grant in grants for message in grant.check(s, attack))
    filled = Counter(field for grant in grants for field in grant.fills)
    for field in (field for field, times in filled.items() if times > 1):
        yield "knowledge", f"two of these grants provide '{field}'; remove one of them"
    yield from attack.view.check(s, attack)


def _earlier_problems(s: Scenario, attack: AttackSpec) -> Iterator[str]:
    """Yield problems of an attack that uses updates from earlier rounds."""
    if not getattr(registry.find(attack.kind, attack.name), "several_rounds", False):
        yield f"{attack.name} uses only one round; use idlg, dlg, inverting_gradients or gradinversion"
    if attack.factor:
        yield "cannot be combined with `factor`, which decrypts only the attacked round; remove one of the two"
    if attack.view.of_round and (dropping := s.federation.dropping):
        yield f"needs updates of all rounds, but clients may be dropped (federation.{dropping}); remove one of the two"
    for r in attack.rounds:
        if r < attack.earlier:
            yield f"found {attack.earlier}, but only {r} rounds are run before round {r}; lower `earlier`"


def _place_problems(s: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
    """Yield problems of an attack's rounds and victims: the field and the message."""
    for field, listed in (("rounds", attack.rounds), ("victims", attack.victims)):
        if listed == []:
            yield field, "is empty, so the attack never runs; give at least one number"
        elif isinstance(listed, list) and len(set(listed)) < len(listed):
            yield field, f"found {listed}, with duplicates; remove the duplicates"
    for r in attack.rounds:
        if r >= s.federation.rounds:
            message = f"found round {r}, which is never run; rounds are numbered from 0 to {s.federation.rounds - 1}"
            yield "rounds", message
    if isinstance(attack.victims, int) and attack.victims > s.clients_per_round:
        message = (
            f"found {attack.victims}, but only {s.clients_per_round} clients are sampled per round; lower this number"
        )
        yield "victims", message
    if isinstance(attack.victims, list):
        for v in attack.victims:
            if v >= s.federation.clients:
                message = f"found {v}; clients are numbered from 0 to {s.federation.clients - 1}"
                yield "victims", message


JOINT: tuple[Callable[[Scenario], Iterator[Problem]], ...] = (
    _of_training,
    _of_federation,
    _name_problems,
    _malicious_problems,
    _defending_clients_problems,
    _asynchronous_problems,
    _of_system,
    _attack_problems,
)
"""Checks that involve several fields."""
