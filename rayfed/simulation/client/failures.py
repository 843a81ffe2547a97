"""Failures of clients, and rounds that continue without the failed clients (`federation.failures`).

An error in the scenario (`UserError`) is not a failure of a client, because it affects all clients.
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
from rayfed.defences.base import Task
from rayfed.errors import ClientError, ScenarioError, UserError
from rayfed.gradients import flatten
from rayfed.models.private import without
from rayfed.scenario import ResolvedArm, Scenario
from rayfed.simulation.client.arm import Arm, aggregation_of
from rayfed.simulation.client.local import returned_buffers
from rayfed.simulation.client.one_value import advice as advice_on
from rayfed.simulation.client.one_value import norm_of
from rayfed.update import Named, Update


@dataclass(frozen=True)
class Failed:
    """The failure of a client, returned instead of its update."""

    client: int
    reason: str
    """Description of the failure, to follow the client's name in a sentence."""
    advice: str
    trace: str = ""
    """Traceback of the client's error, if it raised one."""

    def error(self, arm: str, round: int) -> ClientError:
        """Return the error that ends the run if the scenario does not drop failed clients."""
        return self._error(
            f"in round {round + 1} of arm '{arm}': {self.advice}, or drop failed clients "
            f"(federation.failures.then: drop); `rayfed resume` continues after the last complete round"
        )

    def error_under(self, attack: str, arm: str, round: int) -> ClientError:
        """Return the error for a client that failed while an attack observed the client."""
        return self._error(f"during the attack '{attack}' in round {round + 1} of arm '{arm}': {self.advice}")

    def _error(self, where: str) -> ClientError:
        error = ClientError(f"client {self.client} {self.reason} {where}")
        if self.trace:
            error.add_note(self.trace)
        return error


Made = Update | Failed
"""Result of a client's work: its update, or its failure."""
Attempt = tuple[Task, Made]


def attempt(client: int, work: Callable[[], Update]) -> Made:
    """Run a client's training function `work`, and return the update, or a `Failed` if the function raises."""
    try:
        made = work()
    except (UserError, MemoryError, torch.OutOfMemoryError, BdbQuit):
        raise  # caused by the scenario, the machine or a debugger, not by the client
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        norm = norm_of(error)
        advice = advice_on(norm) if norm else "fix this code (`--debug` shows the traceback)"
        return Failed(client, f"raised {type(error).__name__}: {error} ({where})", advice, traceback.format_exc())
    if not isinstance(made, Update):
        return Failed(client, f"sent a {type(made).__name__} instead of an update", "fix the defence that returns it")
    return made


def made_or_raise(made: Made, arm: str, round: int) -> Update:
    """Return a client's update, or raise `ClientError` if the client failed."""
    if isinstance(made, Failed):
        raise made.error(arm, round)
    return made


def formed(made: Made, task: Task) -> Made:
    """Return a client's update, or a `Failed` if the update does not match the model's parameters."""
    if isinstance(made, Failed):
        return made
    expected = {"tensors": without(task.weights, task.private), "buffers": returned_buffers(task)}
    for part, tensors in expected.items():
        if flaw := _misfit(getattr(made, part), tensors):
            advice = f"fix the defence or model that changes the {part} of an update"
            return Failed(task.client, f"sent an update of the wrong form ({part}: {flaw})", advice)
    return made


def checked(made: Made, task: Task) -> Made:
    """Return a client's update, or a `Failed` if the update has wrong shapes, or NaN or infinite values."""
    made = formed(made, task)
    if isinstance(made, Failed):
        return made
    sent = made.tensors | made.buffers
    if sent and flatten(sent).mul_(0).any():  # 0 * inf is NaN; cheaper than isfinite, as this runs for every client
        advice = "training has diverged; lower training.lr, or check the arm's defences"
        return Failed(task.client, "sent an update that is not finite", advice)
    return made


def _misfit(sent: Named, expected: Named) -> str | None:
    for name in expected.keys() - sent.keys():
        return f"'{name}' is missing"
    for name in sent.keys() - expected.keys():
        return f"'{name}' is not in the model"
    for name, tensor in expected.items():
        own = sent[name]
        if not isinstance(own, torch.Tensor) or own.layout != tensor.layout:
            return f"'{name}' is not a dense tensor"
        if own.shape != tensor.shape:
            return f"'{name}' has shape {list(own.shape)}, expected {list(tensor.shape)}"
        if (own.dtype, own.device) != (tensor.dtype, tensor.device):
            return f"'{name}' is {own.dtype} on {own.device}, expected {tensor.dtype} on {tensor.device}"
    return None


def until_none_fails(
    attempted: Iterable[Attempt], again: Callable[[Sequence[int]], Iterable[Attempt]]
) -> list[Attempt]:
    """Return the updates or failures of jointly trained clients; training is repeated without the failed clients.

    Thus the updates are bitwise equal to those of a cohort without the failed clients.
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
    "failures.then: drop": "set `then: stop`",
    "system": "remove `deadline` and `over_selection`",
}
"""Field that drops clients -> advice on how to keep all clients."""


def check_droppable(scenario: Scenario, arm: Arm, rule: AnyAggregation) -> None:
    """Raise `ScenarioError` if the scenario drops clients, but an arm needs all sampled clients.

    `rule` is the arm's aggregation rule, with its protection.
    """
    if (dropping := scenario.federation.dropping) is None:
        return
    channel = rule.channel if isinstance(rule, OverChannel) else None
    for obstacle in filter(None, (channel and channel.needs_all, *_needing_all(scenario, arm))):
        raise ScenarioError(
            f"federation.{dropping} is not possible in arm '{arm.spec.name}': {obstacle}; {_KEEPING[dropping]}, or "
            f"remove this part of the arm"
        )


def _needing_all(scenario: Scenario, arm: Arm) -> Iterator[str]:
    """Yield descriptions of the parts of an arm that need all clients of a round."""
    yield from filter(None, (defence.needs_all for defence in arm.defences))
    malicious = arm.spec.malicious
    if malicious and malicious.build().colludes:
        yield f"the malicious clients ({malicious.name}) use each other's updates"
    for attack in scenario.attacks:
        if any(part.involves_others for part in (attack.view, *attack.grants.values())):
            yield f"the attack '{attack.title}' repeats the training of other clients of the round"


def check_left(arm: ResolvedArm, round: int, left: int, drawn: int) -> None:
    """Raise `ClientError` if an arm's aggregation rule is undefined for the number of clients that did not fail."""
    if not left:
        return  # a round without clients is allowed
    try:
        aggregation_of(arm).check(left)
        if left == 1 and arm.protection:
            raise UserError("the decrypted sum would be the update of one client")
    except UserError as error:
        raise ClientError(
            f"too few clients are left in round {round + 1} of arm '{arm.name}' ({left} of {drawn}): "
            f"{error}; `rayfed resume` continues after the last complete round"
        ) from error


def check_asynchronous(scenario: Scenario, arm: Arm) -> None:
    """Raise `ScenarioError` if an arm has an asynchronous aggregation rule, and parts that do not support this."""
    if not aggregation_of(arm.spec).asynchronous:
        return
    state = "clients keep a state over rounds, and only the latest state is stored"
    keeps = arm.private or any(defence.keeps_state for defence in arm.defences)
    for obstacle in (*([state] if keeps else []), *_needing_all(scenario, arm)):
        raise ScenarioError(
            f"{arm.spec.aggregation.name} is not possible in arm '{arm.spec.name}': {obstacle}; use a synchronous "
            f"rule, or remove this part of the arm"
        )
