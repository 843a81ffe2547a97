"""Checks of scenarios, with messages on what is wrong and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from inspect import signature
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from rayfed import registry
from rayfed.documents import Place
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
    named,
)
from rayfed.scenario.sections import ArmSpec, Augment, Scenario, Schedule, Training
from rayfed.scenario.system import System
from rayfed.store.schemas import VERSUS

_MISSING = "required, but not given"
_REQUIRED: Mapping[Place, Any] = {
    ("name",): "unknown",
    ("federation", "rounds"): 1,
    ("federation", "clients"): 1,
}
"""Fields without a default, with what stands for them while they are unknown."""


@dataclass(frozen=True)
class Problem:
    """One problem of a scenario, with its path."""

    path: Place
    message: str
    wanted: str = ""
    """Description of a component's field, where it is missing."""

    @property
    def told(self) -> str:
        """The message, and what is wanted."""
        return f"{self.message}{': ' * bool(self.wanted)}{self.wanted}"


def repeated(found: Sequence[tuple[Place, int]]) -> Iterator[Problem]:
    """Yield repeated keys, of which YAML silently keeps the last."""
    first: dict[Place, int] = {}
    repeated: set[Place] = set()
    for path, line in found:
        if path not in first:
            first[path] = line
        elif not any(path[:depth] in repeated for depth in range(len(path))):  # what is in it need not be told too
            repeated.add(path)
            yield Problem(path=path, message=f"given before, in line {first[path]}: keep one")


def schema_problems(raw: Mapping[str, Any]) -> list[Problem]:
    """Return violations of the schema: wrong types, values out of range, unknown and missing fields."""
    try:
        Scenario.model_validate(raw)
    except ValidationError as error:
        return _problems(error, raw, Scenario)
    return []


def _problems(error: ValidationError, value: Any, root: type[BaseModel]) -> list[Problem]:
    """Return pydantic's errors on a value in rayfed's words, without repetition.

    Of a field of several types pydantic has an error for each of them, with the type's name in the place. Those that
    came furthest into the value count, in one message.
    """
    told: dict[Place, dict[str, None]] = {}
    of_several: dict[Place, int] = {}
    """Places of fields of several types, with how far into the value their errors came."""
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
    """Return the part of a location inside the value, and the type of a union that it refers to, if any.

    What is `missing` is in the place, though not in the value.
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
    """Return several messages on one value as one."""
    first, *others = messages
    found = first.partition("; ")[0]
    return ", or ".join([first, *(other.removeprefix(f"{found}; ") for other in others)])


def _problem(error: Any, root: type[BaseModel]) -> Problem:
    """Return one of pydantic's errors in rayfed's words, with the nearest valid key for an unknown one."""
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
    """Yield the sections of a document that have a key."""
    for name, field in root.model_fields.items():
        if any(
            key in getattr(option, "model_fields", ()) for option in get_args(field.annotation) or (field.annotation,)
        ):
            yield f"'{name}'"


def _fields_at(model: type[BaseModel], path: Place) -> list[str]:
    keys = iter(path)
    for key in keys:
        annotation = model.model_fields[str(key)].annotation
        if get_origin(annotation) is dict:
            next(keys)  # a name that the user has given
        options = [getattr(option, "__origin__", option) for option in get_args(annotation) or (annotation,)]
        # `Normalise | None` is a section too
        [model] = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return list(model.model_fields)


def specs(raw: Mapping[str, Any]) -> Iterator[tuple[Place, type[ComponentSpec], Any]]:
    """Yield every location in the raw document that names a component."""
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
    """Yield a section's components that determine how updates are added."""
    named: dict[str, type[ComponentSpec]] = {
        "aggregation": AggregationSpec,
        "protection": ProtectionSpec,
        "malicious": MaliciousSpec,
    }
    if isinstance(section, dict):
        yield from (((*path, key), spec, section[key]) for key, spec in named.items() if section.get(key) is not None)


def component_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield unknown components, and invalid parameters of components."""
    for path, spec, value in specs(raw):
        value = named(value)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            continue  # the schema's own check says so
        try:
            target = registry.find(spec.kind, value["name"])
        except UserError as error:
            yield Problem(path=(*path, "name"), message=str(error))
            continue
        own = {k: v for k, v in value.items() if k not in spec.model_fields}
        yield from _parameter_problems(path, spec, target, own)


def _parameter_problems(path: Place, spec: type[ComponentSpec], target: Any, own: dict[str, Any]) -> Iterator[Problem]:
    if spec in (ModelSpec, LossSpec) and not is_dataclass(target):
        return  # the user's own: whether it takes them is seen when it is called
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
    """Return the description of a component's field; empty without one."""
    if not target.__module__.startswith("rayfed."):
        return ""  # fields of the user's own may have types without a schema
    said = next((one.doc for one in registry.parameters(target) if one.name == place[-1]), "").removesuffix(".")
    return f"{said[:1].lower()}{said[1:]}"


def without(document: Mapping[str, Any], places: Iterable[Place]) -> Scenario | None:
    """Return a scenario from a document's valid fields; None if they do not suffice.

    The fields of `places` and their sections are unknown: reading one is an `AttributeError`. So a mistake
    in one field does not hide those of others.
    """
    if not isinstance(document.get("federation"), Mapping):
        return None
    unknown = {place[: 2 if place[:1] == ("federation",) else 1] for place in places}
    if () in unknown:  # a key of the document itself is no string
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
    """Yield problems of training, for all arms and each arm, and of attacks on it."""
    if s.arms and s.defences:
        yield Problem(path=("defences",), message="give either `defences` (one pipeline) or `arms` (several), not both")
    of_all = list(_training_problems(("training",), s.training, s.federation.rounds))
    yield from of_all
    told = {(problem.path, problem.message) for problem in of_all}  # not once more for each arm that has it from there
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
        message = f"found {s.clients_per_round}, but the federation has {s.federation.clients} clients"
        yield Problem(path=("federation", "clients_per_round"), message=message)
    if s.federation.server.optimiser == "adam" and s.federation.server.momentum:
        yield Problem(path=("federation", "server", "momentum"), message="belongs to optimiser: sgd, not to adam")
    if s.resources.server.actors not in (None, 1):
        yield Problem(path=("resources", "server", "actors"), message="there is one server; leave it out")
    if s.resources.server.labels:
        yield Problem(path=("resources", "server", "labels"), message="the server is where the driver is; leave it out")
    if s.resources.server.num_gpus:
        message = "the server adds, on the CPU, and a GPU that it had would be kept from clients; leave it out"
        yield Problem(path=("resources", "server", "num_gpus"), message=message)
    for kind, actors in (("clients", s.resources.clients), ("attackers", s.resources.attackers)):
        if actors.num_gpus != "auto" and actors.num_gpus > 1 and actors.num_gpus % 1:
            message = (
                f"found {actors.num_gpus:g}, but Ray takes whole numbers above 1; give a whole number, or 1 or less"
            )
            yield Problem(path=("resources", kind, "num_gpus"), message=message)
    for rule in (arm.aggregation or s.federation.aggregation for arm in s.played.values()):
        if not s.federation.validation and registry.find(rule.kind, rule.name).validates:
            message = f"{rule.name} has clients score models on samples that they do not train on: set a share, as 0.1"
            yield Problem(path=("federation", "validation"), message=message)
            break


def _of_system(s: Scenario) -> Iterator[Problem]:
    if s.federation.system:
        for path, message in _system_problems(s, s.federation.system):
            yield Problem(path=("federation", "system", *path), message=message)


def _name_problems(s: Scenario) -> Iterator[Problem]:
    """Yield names of arms and opponents that could be read as the name of an arm with an opponent."""
    for section, names in (("arms", s.arms), ("opponents", s.opponents)):
        for name in names:
            if VERSUS in name:
                message = f"contains '{VERSUS}', which separates an arm from its opponent: choose another name"
                yield Problem(path=(section, name), message=message)


def _malicious_problems(s: Scenario) -> Iterator[Problem]:
    given: dict[Place, MaliciousSpec | None] = {("federation", "malicious"): s.federation.malicious}
    given |= {("arms", name, "malicious"): arm.malicious for name, arm in s.arms.items()}
    if s.opponents and any(given.values()):
        message = "every arm meets each of these: take `malicious` out of federation and arms"
        yield Problem(path=("opponents",), message=message)
    given |= {("opponents", name): malicious for name, malicious in s.opponents.items()}
    for place, malicious in given.items():
        path, everybody = (*place, "clients"), s.federation.clients
        if malicious is None:
            continue
        if isinstance(malicious.clients, int):
            if malicious.clients > everybody:
                message = f"found {malicious.clients}, but the federation has {everybody} clients"
                yield Problem(path=path, message=message)
        elif not malicious.clients:
            yield Problem(path=path, message="is empty: leave `malicious` out where nobody is")
        elif max(malicious.clients) >= everybody:
            message = f"there is no client {max(malicious.clients)}: they count from 0 to {everybody - 1}"
            yield Problem(path=path, message=message)


def _training_problems(path: Place, training: Training, rounds: int) -> Iterator[Problem]:
    if training.epochs and training.steps:
        yield Problem(path=(*path, "steps"), message="give either `epochs` or `steps`, not both")
    if training.augment == Augment():
        yield Problem(
            path=(*path, "augment"), message="changes nothing: give `crop`, `scale` or `flip`, or leave it out"
        )
    schedule, of_steps = training.schedule, ("epochs", "steps", "momentum", "weight_decay", "clip_norm")
    found = [name for name in of_steps if getattr(training, name)] + ["schedule"] * (schedule != Schedule())
    if training.algorithm == "fedsgd" and found:
        message = f"fedsgd sends the gradient of one batch: it takes no {', '.join(found)} of local steps (use fedavg)"
        yield Problem(path=(*path, "algorithm"), message=message)
    if training.optimiser != "sgd" and (training.algorithm == "fedsgd" or training.momentum):
        message = f"{training.optimiser} takes local steps (algorithm: fedavg) and has no momentum of its own: leave "
        yield Problem(path=(*path, "optimiser"), message=f"{message}that out")
    if (schedule.kind == "constant") != (schedule.rounds is None):
        message = f"{schedule.kind} takes {'no' if schedule.kind == 'constant' else 'a number of'} rounds"
        yield Problem(path=(*path, "schedule", "rounds"), message=message)
    elif schedule.kind == "cosine" and rounds > schedule.warmup + (schedule.rounds or 0):
        message = f"found {schedule.rounds}, after which nothing is learnt, and there are {rounds}: raise it"
        yield Problem(path=(*path, "schedule", "rounds"), message=message)


def _system_problems(s: Scenario, system: System) -> Iterator[tuple[Place, str]]:
    """Yield problems of devices and virtual time, with their place in the section."""
    rules = [arm.aggregation or s.federation.aggregation for arm in s.played.values()]
    asking = (rule.name for rule in rules if hasattr(registry.find(rule.kind, rule.name), "answer"))
    if name := next(asking, None):
        yield (), f"{name} has clients score models, which is not simulated: leave `system` out, or take another rule"
    if system.file and system.devices != System().devices:  # a scenario that is written out has the default beside it
        yield ("file",), "the devices are those of the file: leave one of `file` and `devices` out"
    for name, one in system.devices.items():
        if isinstance(one.available, list) and len(one.available) != 24:
            yield ("devices", name, "available"), f"has {len(one.available)} numbers: give one, or 24, for each hour"
    for name, one in system.devices.items():
        if system.deadline is None and (one.failure or one.memory is not None):
            yield ("deadline",), f"devices of class '{name}' may drop out, and a round would wait for them: give one"
        if system.every is None and min(one.by_hour) < 1:
            message = f"who is there of class '{name}' depends on the hour: say after how many seconds a round begins"
            yield ("every",), message
    if system.every is not None and (system.deadline is None or system.deadline > system.every):
        yield ("every",), "a round may take longer than that: give a deadline that is no longer"
    if system.selects and s.federation.sampling == "poisson":
        yield ("over_selection",), "Poisson sampling draws no fixed number, of which there could be more: leave one out"
    if system.selects and s.drawn_per_round > s.federation.clients:
        message = f"draws {s.drawn_per_round} clients, but the federation has {s.federation.clients}: take fewer"
        yield ("over_selection",), message


def _asynchronous_problems(s: Scenario) -> Iterator[Problem]:
    """Yield settings that are incompatible with rules that step on updates as they arrive."""
    federation, system, rules = s.federation, s.federation.system, {}
    for name, arm in s.played.items():
        spec = arm.aggregation or federation.aggregation
        target = registry.find(spec.kind, spec.name)
        if getattr(target, "asynchronous", False):
            rules[name] = spec.name
            mixes = getattr(target, "mixes", False)
            server = federation.server
            if mixes and (server.optimiser != "sgd" or server.lr not in (None, 1) or server.momentum):
                message = f"{spec.name} mixes models by its own weights, and sgd with lr 1 alone leaves the mixture as "
                yield Problem(("federation", "server"), f"{message}it is: leave it out")
            if mixes and arm.training.get("algorithm", s.training.algorithm) != "fedavg":
                message = f"{spec.name} mixes what fedavg sends, models of local steps: take fedavg"
                yield Problem(("training", "algorithm"), message)
            place: Place = ("arms", name, "protection") if arm.protection else ("federation", "protection")
            if arm.protection or federation.protection:
                yield Problem(
                    place, f"{spec.name} adds updates one by one: take a rule whose rounds wait, or leave it out"
                )
    if not rules:
        if system and system.concurrency is not None:
            message = "is for an asynchronous rule (fedbuff, fedasync), and no arm has one: leave it out"
            yield Problem(("federation", "system", "concurrency"), message)
        return
    rule = next(iter(rules.values()))
    if system is None:
        message = f"{rule} adds updates as they arrive in virtual time: say what devices clients have, or take fedavg"
        yield Problem(("federation", "system"), message)
        return
    for field in ("deadline", "every"):
        if getattr(system, field) is not None:
            yield Problem(("federation", "system", field), f"{rule} waits for nobody: leave it out")
    if system.selects:
        yield Problem(("federation", "system", "over_selection"), f"{rule} waits for nobody: leave it out")
    if federation.sampling == "poisson":
        yield Problem(("federation", "sampling"), f"{rule} replaces each device that is done by one: take fixed")
    if federation.failures.then == "drop":
        message = f"{rule} would wait for the update of a client that fails: take `stop`"
        yield Problem(("federation", "failures", "then"), message)
    started = (system.concurrency or s.clients_per_round) + s.clients_per_round - 1
    if started > federation.clients:
        message = f"the first step takes {started} clients, and the federation has {federation.clients}: take fewer"
        yield Problem(("federation", "system", "concurrency"), message)


def _arm_problems(s: Scenario, name: str, arm: ArmSpec) -> Iterator[Problem]:
    """Yield problems of an arm's own training and model, at the arm's path."""
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
            message = f"two attacks are called '{attack.title}' in the tables: give this one a `label`"
            yield Problem(path=("attacks", i), message=message)
        titles.add(attack.title)
        yield from (
            Problem(path=("attacks", i, field), message=message) for field, message in _place_problems(s, attack)
        )


def _threat_problems(s: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
    """Yield problems of an attack's observation and knowledge, with their fields."""
    grants = attack.grants.values()
    if attack.averages > 1 and not any(grant.averages for grant in grants):
        yield "averages", "averaging over noise is for an attacker who knows of it: add `knowledge: [defence]`"
    if attack.earlier:
        yield from (("earlier", message) for message in _earlier_problems(s, attack))
    yield from (("knowledge", message) for grant in grants for message in grant.check(s, attack))
    filled = Counter(field for grant in grants for field in grant.fills)
    for field in (field for field, times in filled.items() if times > 1):
        yield "knowledge", f"two of these grants fill '{field}', and the attacker would get one of them: leave one out"
    yield from attack.view.check(s, attack)


def _earlier_problems(s: Scenario, attack: AttackSpec) -> Iterator[str]:
    """Yield settings that are incompatible with observing earlier rounds."""
    if not getattr(registry.find(attack.kind, attack.name), "several_rounds", False):
        yield f"{attack.name} looks at one round alone: take idlg, dlg, inverting_gradients or gradinversion"
    if attack.factor:
        yield "is for updates that are seen, and `factor` breaks the key of the attacked round's alone: leave one out"
    if attack.view.of_round and (dropping := s.federation.dropping):
        yield f"a client that fails in an earlier round or is late is not in it (federation.{dropping}): leave one out"
    for r in attack.rounds:
        if r < attack.earlier:
            yield f"found {attack.earlier}, but only {r} rounds are played before round {r}"


def _place_problems(s: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
    """Yield problems of an attack's rounds and victims, with their fields."""
    for field, listed in (("rounds", attack.rounds), ("victims", attack.victims)):
        if listed == []:
            yield field, "is empty, so the attack never strikes"
        elif isinstance(listed, list) and len(set(listed)) < len(listed):
            yield field, f"names one of {listed} twice"
    for r in attack.rounds:
        if r >= s.federation.rounds:
            message = f"round {r} is never played: rounds count from 0 to {s.federation.rounds - 1}"
            yield "rounds", message
    if isinstance(attack.victims, int) and attack.victims > s.clients_per_round:
        message = f"found {attack.victims}, but only {s.clients_per_round} clients are drawn in a round"
        yield "victims", message
    if isinstance(attack.victims, list):
        for v in attack.victims:
            if v >= s.federation.clients:
                message = f"there is no client {v}: they count from 0 to {s.federation.clients - 1}"
                yield "victims", message


JOINT: tuple[Callable[[Scenario], Iterator[Problem]], ...] = (
    _of_training,
    _of_federation,
    _name_problems,
    _malicious_problems,
    _asynchronous_problems,
    _of_system,
    _attack_problems,
)
"""Checks of several fields together."""
