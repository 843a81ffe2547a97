"""Grant of the defences' code: the observation model of the update, from the declarations of the defences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from rayfed.core.reasons import Reason
from rayfed.defences import TABLE
from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    from rayfed.defences.base import Defence
    from rayfed.simulation.client.arm import Arm
    from rayfed.simulation.client.runtime import ClientRuntime
    from rayfed.simulation.client.visit import ObservedClient, Truth
    from rayfed.threat_model.grants.declaration_check import Mismatch
    from rayfed.threat_model.observation_model import ObservationModel
    from rayfed.update import Observation, Update

_built: WeakKeyDictionary[ClientRuntime, dict[tuple[str, bool], Arm]] = WeakKeyDictionary()
"""Built arms by name, and by whether they are used with true samples or only with samples of attackers."""
_checked: WeakKeyDictionary[ClientRuntime, dict[tuple[Any, ...], tuple[Reason | None, str]]] = WeakKeyDictionary()
"""Results of `_find_reason` by arm, and by whether the attacker knows public samples."""
_checked_on_clients: WeakKeyDictionary[ClientRuntime, dict[tuple[Any, ...], Mismatch | None]] = WeakKeyDictionary()
"""Results of the tests on true samples, by arm, view, round, client and samples."""


@component
class KnownCode(Grant):
    """The defences' code: the attacker searches through the effect that the defences declare.

    A declaration of a user is first tested against the defence's code, with samples and random numbers of the attacker.
    """

    describe: ClassVar[str] = "the defence's code"
    fills: ClassVar[tuple[str, ...]] = ("observation_model",)

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the observation model of the update, which does not depend on its values."""
        reason, detail = _check(observed)
        declared = _build_model(observed)
        approximate = _is_approximate(observed, declared.defences)
        return {"observation_model": replace(declared, approximate=approximate, reason=reason, detail=detail)}


def for_true_samples(observed: ObservedClient, observation: Observation) -> Observation:
    """Return an observation with other defences in its model, as those of the attacker must not see true samples."""
    declared = observation.extra.get("observation_model")
    if declared is None:
        return observation
    defences = _build_defences(observed, with_truth=True)
    return replace(observation, extra={**observation.extra, "observation_model": replace(declared, defences=defences)})


def check_on_true_samples(observed: ObservedClient, observation: Observation, truth: Truth) -> Truth:
    """Return the truth, with a reason if a user's defence does not follow its declaration on the true samples.

    The attacker does not receive this reason. It only counts in verdicts.
    """
    declared = observation.extra.get("observation_model")
    if declared is None or not declared.is_exact or not observation.update or observation.local.steps > 1:
        return truth
    arm = _build_attackers_arm(observed, with_truth=True)
    defences = _build_defences(observed, with_truth=True)
    names = ", ".join(type(defence).__name__ for defence in defences if is_of_user(defence))
    if not names:
        return truth
    from rayfed.threat_model.grants.declaration_check import find_mismatch_on_client

    known = _checked_on_clients.setdefault(observed.runtime, {})
    key = observed.visit.arm, observed.attack.observes, observed.round, observed.client, tuple(observed.indices)
    try:
        if key not in known:
            declared = replace(declared, defences=defences)
            known[key] = find_mismatch_on_client(declared, observation, arm.model, truth.inputs, truth.labels)
    except Exception as error:  # a user's defence may raise anything
        return truth.replace(reason=Reason.DECLARATION_NOT_TESTED, detail=f"{names}: {_first_line(error)}")
    if known[key] is None:
        return truth
    return truth.replace(reason=Reason.DECLARATION_WRONG, detail=f"{names}: {known[key]}")


def _build_attackers_arm(observed: ObservedClient, with_truth: bool = False) -> Arm:
    """Return the arm built again for the attacker, because the client's defences may hold its samples."""
    from rayfed.simulation.client.arm import build_arm

    runtime, name = observed.runtime, observed.visit.arm
    known = _built.setdefault(runtime, {})
    key = name, with_truth
    if key not in known:
        data = runtime.data
        arm = build_arm(observed.arm.spec, data.sample, len(data.classes), runtime.scenario.seed)
        arm.model.to(runtime.device)
        known[key] = arm
    return known[key]


def _build_defences(observed: ObservedClient, with_truth: bool = False) -> tuple[Defence, ...]:
    """Return the defences of the observed client, built for the attacker."""
    from rayfed.defences.some_clients import defences_at

    return defences_at(_build_attackers_arm(observed, with_truth).defences, observed.client)


def _is_approximate(observed: ObservedClient, defences: tuple[Defence, ...]) -> bool:
    """Return whether the declarations do not determine the likelihood of the true samples."""
    of_steps = observed.training.algorithm != "fedsgd" and any(d.overrides("wrap_gradient") for d in defences)
    averaged = observed.attack.averages > 1 and any(defence.adds_noise for defence in defences)
    return bool(observed.arm.private) or of_steps or averaged


def _check(observed: ObservedClient) -> tuple[Reason | None, str]:
    """Return why the declarations are of no use, and about which defence; tested once for each arm and its defences."""
    known = _checked.setdefault(observed.runtime, {})
    names = tuple(type(defence) for defence in _build_defences(observed))
    key = observed.visit.arm, _knows_public(observed), names
    if key not in known:
        known[key] = _find_reason(observed)
    return known[key]


def _knows_public(observed: ObservedClient) -> bool:
    return "public" in observed.attack.grants


def _find_reason(observed: ObservedClient) -> tuple[Reason | None, str]:
    from rayfed.threat_model.grants.declaration_check import find_mismatch

    declared = _build_model(observed)
    undeclared = [defence for defence in declared.defences if not defence.is_declared]
    if undeclared:
        return Reason.UNDECLARED, ", ".join(type(defence).__name__ for defence in undeclared)
    own = [defence for defence in declared.defences if is_of_user(defence)]
    if not own:
        return None, ""
    names = ", ".join(type(defence).__name__ for defence in own)
    try:
        mismatch = find_mismatch(declared, _build_example(observed), _build_attackers_arm(observed).model)
    except Exception as error:  # a user's defence may raise anything, for example without data that it needs
        return Reason.DECLARATION_NOT_TESTED, f"{names}: {_first_line(error)}"
    return (None, "") if mismatch is None else (Reason.DECLARATION_WRONG, f"{names}: {mismatch}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def is_of_user(defence: Defence) -> bool:
    """Return whether a defence is user-defined."""
    return f"{type(defence).__module__}:{type(defence).__qualname__}" not in TABLE.values()


def _build_model(observed: ObservedClient) -> ObservationModel:
    from rayfed.threat_model.observation_model import ObservationModel

    defences = _build_defences(observed)
    return ObservationModel(defences, clients_per_round=observed.runtime.scenario.clients_per_round)


def _build_example(observed: ObservedClient) -> Observation:
    """Return an observation without an update, in which the declarations are tested: one gradient at initial weights.

    It is the same for all victims and rounds, because each process makes one test, at its first victim.
    """
    from rayfed.gradients import buffers_of, weights_of
    from rayfed.update import Observation

    runtime, model = observed.runtime, _build_attackers_arm(observed).model
    data, scenario = runtime.data, runtime.scenario
    adaptive = [attack for attack in scenario.attacks if "code" in attack.grants and not attack.view.of_round]
    return Observation(
        victim=0,
        round=0,
        weights=weights_of(model),
        buffers=buffers_of(model),
        update={},
        scale=1.0,
        batch_size=min((attack.batch_size for attack in adaptive), default=scenario.training.batch_size or 1),
        sample=data.sample.published(),
        classes=len(data.classes),
        has_numbers=data.has_numbers,
        has_places=data.has_places,
        extra={"public": runtime.public} if _knows_public(observed) else {},
    )
