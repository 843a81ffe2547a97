"""Grant of the defences' code: the observation model of the update, from the declarations of the defences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from rayfed.client.grants.base import Grant
from rayfed.reasons import Reason
from rayfed.registry import component

if TYPE_CHECKING:
    from torch import nn

    from rayfed.client.grants.declaration_check import Mismatch
    from rayfed.client.observation_model import ObservationModel
    from rayfed.client.runtime import ClientRuntime
    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.defences.base import Defence
    from rayfed.update import Observation, Update

_built: WeakKeyDictionary[ClientRuntime, dict[tuple[str, bool], tuple[nn.Module, tuple[Defence, ...]]]] = (
    WeakKeyDictionary()
)
"""Models and defences by arm, and by whether they are used with true samples or only with samples of attackers."""
_checked: WeakKeyDictionary[ClientRuntime, dict[str, tuple[Reason | None, str]]] = WeakKeyDictionary()
"""Results of `_check` by arm."""
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
        from rayfed.client.observation_model import ObservationModel

        _, defences = _attackers_arm(observed)
        reason, detail = _check(observed)
        found = ObservationModel(
            defences,
            clients_per_round=observed.runtime.scenario.clients_per_round,
            approximate=_is_approximate(observed, defences),
            reason=reason,
            detail=detail,
        )
        return {"observation_model": found}


def for_true_samples(observed: ObservedClient, observation: Observation) -> Observation:
    """Return an observation with other defences in its model, as those of the attacker must not see true samples."""
    declared = observation.extra.get("observation_model")
    if declared is None:
        return observation
    _, defences = _attackers_arm(observed, with_truth=True)
    return replace(observation, extra={**observation.extra, "observation_model": replace(declared, defences=defences)})


def check_on_true_samples(observed: ObservedClient, observation: Observation, truth: Truth) -> Observation:
    """Return an observation whose model has a reason if a user's defence does not follow its declaration.

    Only this reason depends on the true samples.
    """
    declared = observation.extra.get("observation_model")
    if declared is None or not declared.is_exact or not observation.update or observation.local.steps > 1:
        return observation
    model, defences = _attackers_arm(observed, with_truth=True)
    own = [defence for defence in defences if is_of_user(defence)]
    if not own:
        return observation
    from rayfed.client.grants.declaration_check import find_mismatch_on_client

    known = _checked_on_clients.setdefault(observed.runtime, {})
    key = observed.visit.arm, observed.attack.observes, observed.round, observed.client, tuple(observed.indices)
    if key not in known:
        arguments = replace(declared, defences=defences), observation, model, truth.inputs, truth.labels
        try:
            known[key] = find_mismatch_on_client(*arguments)
        except Exception:  # the test with random samples has passed, so this one cannot be compared
            known[key] = None
            declared = replace(declared, approximate=True)
    if known[key] is not None:
        names = ", ".join(type(defence).__name__ for defence in own)
        declared = replace(declared, reason=Reason.DECLARATION_WRONG, detail=f"{names}: {known[key]}")
    return replace(observation, extra={**observation.extra, "observation_model": declared})


def _attackers_arm(observed: ObservedClient, with_truth: bool = False) -> tuple[nn.Module, tuple[Defence, ...]]:
    """Return a model and defences built for the attacker, as the client's defences may hold its samples."""
    from rayfed.client.arm import build_arm

    runtime, name = observed.runtime, observed.visit.arm
    known = _built.setdefault(runtime, {})
    key = name, with_truth
    if key not in known:
        data = runtime.data
        arm = build_arm(observed.arm.spec, data.sample, len(data.classes), runtime.scenario.seed)
        known[key] = arm.model.to(runtime.device), arm.defences
    return known[key]


def _is_approximate(observed: ObservedClient, defences: tuple[Defence, ...]) -> bool:
    """Return whether the declarations do not determine the likelihood of the true samples."""
    one_step = observed.training.algorithm == "fedsgd"
    of_steps = not one_step and any(defence.overrides("wrap_gradient") for defence in defences)
    averaged = observed.attack.averages > 1 and any(defence.adds_noise for defence in defences)
    return bool(observed.arm.private) or of_steps or averaged


def _check(observed: ObservedClient) -> tuple[Reason | None, str]:
    """Return why the declarations are of no use, and about which defence; tested once for each arm."""
    known = _checked.setdefault(observed.runtime, {})
    if observed.visit.arm not in known:
        known[observed.visit.arm] = _find_reason(observed)
    return known[observed.visit.arm]


def _find_reason(observed: ObservedClient) -> tuple[Reason | None, str]:
    from rayfed.client.grants.declaration_check import find_mismatch

    model, defences = _attackers_arm(observed)
    undeclared = [defence for defence in defences if not defence.is_declared]
    if undeclared:
        return Reason.UNDECLARED, ", ".join(type(defence).__name__ for defence in undeclared)
    own = [defence for defence in defences if is_of_user(defence)]
    if not own:
        return None, ""
    names = ", ".join(type(defence).__name__ for defence in own)
    declared = _declared(observed, defences)
    try:
        mismatch = find_mismatch(declared, _example(observed), model)
    except Exception as error:  # a user's defence may raise anything, for example without data that it needs
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Reason.DECLARATION_NOT_TESTED, f"{names}: {text}"
    return (None, "") if mismatch is None else (Reason.DECLARATION_WRONG, f"{names}: {mismatch}")


def is_of_user(defence: Defence) -> bool:
    """Return whether a defence is user-defined."""
    return not type(defence).__module__.startswith("rayfed.")


def _declared(observed: ObservedClient, defences: tuple[Defence, ...]) -> ObservationModel:
    from rayfed.client.observation_model import ObservationModel

    return ObservationModel(defences, clients_per_round=observed.runtime.scenario.clients_per_round)


def _example(observed: ObservedClient) -> Observation:
    """Return an observation without an update, in which the declarations are tested: one gradient at the weights."""
    from rayfed.update import Observation

    data, asked = observed.runtime.data, observed.asked()
    public = observed.runtime.public if "public" in observed.attack.grants else None
    return Observation(
        victim=observed.client,
        round=observed.round,
        weights=asked.weights,
        buffers=asked.buffers,
        update={},
        scale=1.0,
        batch_size=len(observed.indices),
        sample=data.sample.published(),
        classes=len(data.classes),
        has_numbers=data.has_numbers,
        has_places=data.has_places,
        extra={} if public is None else {"public": public},
    )
