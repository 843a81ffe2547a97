"""Failures of clients: their definition, and rounds that continue without the client (`federation.failures`).

A mistake of the scenario (`UserError`) is nobody's failure: every client would make it.
"""

from __future__ import annotations

import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rayfed.aggregation.base import AnyAggregation
from rayfed.aggregation.over_channel import OverChannel
from rayfed.client.arm import Arm, aggregation_of
from rayfed.client.local import returned_buffers
from rayfed.client.one_value import advice as advice_on
from rayfed.client.one_value import norm_of
from rayfed.defences.base import Task
from rayfed.errors import ClientError, ScenarioError, UserError
from rayfed.gradients import flatten
from rayfed.models.private import without
from rayfed.scenario import ResolvedArm, Scenario
from rayfed.update import Named, Update


@dataclass(frozen=True)
class Failed:
    """The failure of a client, returned in place of its update."""

    client: int
    reason: str
    """What the client did, for a sentence that begins with the client."""
    advice: str
    trace: str = ""
    """Traceback of what it raised."""

    def error(self, arm: str, round: int) -> ClientError:
        """Return the error that ends a run whose scenario does not drop failed clients."""
        return self._error(
            f"in round {round + 1} of arm '{arm}': {self.advice}, or do without such clients "
            f"(federation.failures.then: drop); complete rounds are kept and `rayfed resume` goes on from there"
        )

    def error_under(self, attack: str, arm: str, round: int) -> ClientError:
        """Return the error for a client that failed under an attack's observation, not in training."""
        return self._error(f"under the attack '{attack}' in round {round + 1} of arm '{arm}': {self.advice}")

    def _error(self, where: str) -> ClientError:
        error = ClientError(f"client {self.client} {self.reason} {where}")
        if self.trace:
            error.add_note(self.trace)
        return error


Made = Update | Failed
"""Result of a client's work: its update, or its failure."""
Attempt = tuple[Task, Made]


def attempt(client: int, work: Callable[[], Update]) -> Made:
    """Run a client's work and return its update, or a failure if it raises."""
    try:
        made = work()
    except (UserError, MemoryError, torch.OutOfMemoryError, BdbQuit):
        raise  # the scenario's or the machine's failure, or a debugger that was left, not the client's
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        norm = norm_of(error)
        advice = advice_on(norm) if norm else "fix what its work runs (`--debug` shows where)"
        return Failed(client, f"raised {type(error).__name__}: {error} ({where})", advice, traceback.format_exc())
    if not isinstance(made, Update):
        return Failed(client, f"sent no update but a {type(made).__name__}", "fix the defence that returns it")
    return made


def made_or_raise(made: Made, arm: str, round: int) -> Update:
    """Return a client's update; raises `ClientError` if the client failed."""
    if isinstance(made, Failed):
        raise made.error(arm, round)
    return made


def formed(made: Made, task: Task) -> Made:
    """Return the result of a client's work, or a failure if its update does not have the model's form."""
    if isinstance(made, Failed):
        return made
    expected = {"tensors": without(task.weights, task.private), "buffers": returned_buffers(task)}
    for part, tensors in expected.items():
        if flaw := _misfit(getattr(made, part), tensors):
            advice = f"fix the defence or the model that changes an update's {part}"
            return Failed(task.client, f"sent an update of the wrong form ({part}: {flaw})", advice)
    return made


def checked(made: Made, task: Task) -> Made:
    """Return the result of a client's work, or a failure if no server could add its update."""
    made = formed(made, task)
    if isinstance(made, Failed):
        return made
    sent = made.tensors | made.buffers
    if sent and flatten(sent).mul_(0).any():  # NaN is left of what is not finite; every client pays for each operation
        advice = "training has diverged: lower training.lr, or look at the arm's defences"
        return Failed(task.client, "sent an update that is not finite", advice)
    return made


def _misfit(sent: Named, expected: Named) -> str | None:
    for name in expected.keys() - sent.keys():
        return f"'{name}' is missing"
    for name in sent.keys() - expected.keys():
        return f"'{name}' is not the model's"
    for name, tensor in expected.items():
        own = sent[name]
        if not isinstance(own, torch.Tensor) or own.layout != tensor.layout:
            return f"'{name}' is no dense tensor"
        if own.shape != tensor.shape:
            return f"'{name}' is {list(own.shape)} and not {list(tensor.shape)}"
        if (own.dtype, own.device) != (tensor.dtype, tensor.device):
            return f"'{name}' is {own.dtype} on {own.device} and not {tensor.dtype} on {tensor.device}"
    return None


def until_none_fails(
    attempted: Iterable[Attempt], again: Callable[[Sequence[int]], Iterable[Attempt]]
) -> list[Attempt]:
    """Return the results of clients trained in one call, repeating it (`again`) without those that fail.

    So the others' bits are those of a cohort that never had them.
    """
    latest = {task.client: (task, made) for task, made in attempted}
    failing = [client for client, (_, made) in latest.items() if isinstance(made, Failed)]
    while failing:
        left = [client for client, (_, made) in latest.items() if not isinstance(made, Failed)]
        new = {task.client: (task, made) for task, made in again(left)} if left else {}
        latest |= new
        failing = [client for client, (_, made) in new.items() if isinstance(made, Failed)]
    return list(latest.values())


_KEEPING = {
    "failures.then: drop": "take `then: stop`",
    "system": "take no `deadline` and no `over_selection`",
}
"""How to go without what leaves out clients, by the field that does."""


def check_droppable(scenario: Scenario, arm: Arm, rule: AnyAggregation) -> None:
    """Raise `ScenarioError` if the scenario drops failed clients but an arm needs every client that is drawn.

    `rule` is the arm's, with its protection.
    """
    if (dropping := scenario.federation.dropping) is None:
        return
    channel = rule.channel if isinstance(rule, OverChannel) else None
    for obstacle in filter(None, (channel and channel.needs_all, *_needing_all(scenario, arm))):
        raise ScenarioError(
            f"federation.{dropping} is not for arm '{arm.spec.name}': {obstacle}; {_KEEPING[dropping]}, or leave that "
            f"out"
        )


def _needing_all(scenario: Scenario, arm: Arm) -> Iterator[str]:
    """Yield the parts of an arm that need all clients of a round, in words."""
    yield from filter(None, (defence.needs_all for defence in arm.defences))
    malicious = arm.spec.malicious
    if malicious and malicious.build().colludes:
        yield f"the malicious clients of {malicious.name} work with one another's updates"
    for attack in scenario.attacks:
        if any(part.involves_others for part in (attack.view, *attack.grants.values())):
            yield f"the attack '{attack.title}' makes the work of the victim's fellow clients again"


def check_left(arm: ResolvedArm, round: int, left: int, drawn: int) -> None:
    """Raise `ClientError` if an arm's rule is undefined for the clients that did not fail."""
    if not left:
        return  # as in a round that has drawn nobody
    try:
        aggregation_of(arm).check(left)
        if left == 1 and arm.protection:
            raise UserError("the sum that is opened would be one client's update")
    except UserError as error:
        raise ClientError(
            f"only {left} of {drawn} clients are left in round {round + 1} of arm '{arm.name}', the others have "
            f"failed, and these are too few: {error}; complete rounds are kept and `rayfed resume` goes on from there"
        ) from error


def check_asynchronous(scenario: Scenario, arm: Arm) -> None:
    """Raise `ScenarioError` for parts of an arm that do not work with updates in flight, under an asynchronous rule."""
    if not aggregation_of(arm.spec).asynchronous:
        return
    state = "clients keep a state over rounds, and a run has the latest alone"
    keeps = arm.private or any(defence.keeps_state for defence in arm.defences)
    for obstacle in (*([state] if keeps else []), *_needing_all(scenario, arm)):
        raise ScenarioError(f"{arm.spec.aggregation.name} is not for arm '{arm.spec.name}': {obstacle}; leave one out")
