"""Defences in a user's own training loop, applied to each step's gradient and to the client's update.

The privacy account is computed from the user's description of the loop. The number of updates and steps, the batch
sizes and unchanged statistics are checked. That every step uses `backward` cannot be checked.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.core import seeds
from rayfed.core.number_types import check_model
from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.order import broken_by
from rayfed.errors import UserError
from rayfed.models.wrappers import bare_name, unwrapped
from rayfed.privacy.accountant import Guarantee, compute_guarantee
from rayfed.privacy.printing import format_upper
from rayfed.privacy.sampling import make_generator
from rayfed.privacy.spending import ClientWork, PrivacySetting, Spending
from rayfed.scenario.components import DefenceSpec, expand_component
from rayfed.scenario.problems import component_problems
from rayfed.simulation.client.local import gradient_method, wrap_updates
from rayfed.update import Named, Update, list_nonfinite

_OURS = {
    "adapt_model": "changes the model",
    "wrap_data": "changes the data",
    "wrap_aggregation": "needs the server",
}
"""Hooks of a defence that a training loop cannot support -> reason."""


@dataclass(frozen=True)
class Loop:
    """Description of a client's training loop, from which the privacy account is computed.

    `samples`, `batch_size` and `steps` are required by defences of gradients.
    """

    rounds: int
    """Maximum number of rounds in which the client sends an update."""
    samples: int | None = None
    """Number of the client's samples."""
    batch_size: int | None = None
    """Number of samples per step; the expected number with Poisson sampling."""
    steps: int | None = None
    """Maximum number of steps per round."""
    poisson: bool = False
    """Whether each sample is in a step with probability batch_size / samples, independently. Otherwise batches are
    taken from a new permutation in each epoch."""

    def __post_init__(self) -> None:
        for name in ("rounds", "samples", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{name}: found {value}; give a whole number of at least 1")
        if self.samples is not None and self.batch_size is not None and self.batch_size > self.samples:
            raise UserError(f"batch_size: found {self.batch_size}; give at most the number of samples, {self.samples}")


@dataclass(frozen=True)
class Accounted:
    """Privacy guarantee of one defence over a training loop, or the reason why it has none."""

    defence: str
    rounds: int
    spent: Spending | None
    found: Guarantee | None
    """Guarantee; None without one."""
    why: str = ""

    def __str__(self) -> str:
        if self.found is None or self.spent is None:
            return f"{self.defence}: no epsilon: {self.why}"
        return (
            f"{self.defence}: epsilon {format_upper(self.found.epsilon)} at delta {format_upper(self.found.delta)} "
            f"after {self.rounds} round{'s' * (self.rounds != 1)}, protects {self.spent.adjacency}, against "
            f"{self.spent.against}: {self.spent.mechanism}"
        )


class Defended:
    """Defences of one client in a user's training loop; `print` shows the privacy account.

    Call `backward(model, inputs, labels)` instead of `loss.backward()`, and `answer(sent, returned)` on the trained
    state before it is sent.
    """

    def __init__(
        self,
        defences: Sequence[str | Mapping[str, Any]],
        model: nn.Module,
        loop: Loop,
        seed: int | None = None,
    ) -> None:
        """Check the defences for the training loop, calibrate the defences' noise, and compute the privacy account.

        Noise is sampled from the operating system's randomness. With a `seed` it is reproducible, which is suitable for
        measurements but does not protect. Raises `UserError` for a defence that a training loop cannot support.
        """
        self._model = model
        with unwrapped(model) as bare:
            self._prepare(defences, bare, loop, seed)

    def _prepare(
        self, defences: Sequence[str | Mapping[str, Any]], model: nn.Module, loop: Loop, seed: int | None
    ) -> None:
        check_model(model, type(model).__name__)
        self.loop, self._seed, pipeline = loop, seed, _built(defences)
        for place, (name, defence) in enumerate(pipeline):
            _check(name, defence, model, [later for _, later in pipeline[place + 1 :]])
        self.keeps_state = any(defence.keeps_state for _, defence in pipeline)
        self.on_gradients = any(defence.overrides("wrap_gradient") for _, defence in pipeline)
        if self.on_gradients and None in (loop.samples, loop.batch_size, loop.steps):
            raise UserError(
                "a defence works on gradients; use rayfed.defend in the training loop, and give the `samples`, "
                "`batch_size` and `steps` of a round"
            )
        setting = self._setting(model)
        self._named = [(name, defence.calibrated(setting, None)) for name, defence in pipeline]
        self._defences = [defence for _, defence in self._named]
        self.account = [self._accounted(place, setting) for place in range(len(self._named))]
        self._gradient = gradient_method(self._defences)
        self._parameters = {name for name, p in model.named_parameters() if p.requires_grad}
        first = {id(p): name for name, p in model.named_parameters()}
        aliases = model.named_parameters(remove_duplicate=False)
        self._tied = {name: first[id(p)] for name, p in aliases if p.requires_grad}
        self._names = frozenset(model.state_dict())
        self._state = dict[str, object]()
        self._answers = self._steps = 0
        self._tried = False
        self._given = Counter[int]()

    @property
    def guaranteed(self) -> bool:
        """Return whether at least one defence has an epsilon (a differential-privacy guarantee)."""
        return any(one.found is not None for one in self.account)

    def __str__(self) -> str:
        lines = [str(one) for one in self.account] or ["no defence: no privacy guarantee"]
        if self.guaranteed:
            lines.append(
                "The epsilon holds for the described training loop and covers only the model's state, not metrics or "
                "sample counts that the client also sends."
            )
        if self.guaranteed and self._seed is not None:
            lines.append("Noise is derived from the seed. Use this to measure, not to protect data.")
        return "\n".join(lines)

    def backward(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        """Set the gradients of a model's parameters to the defended gradient of a batch; return the mean loss.

        The loss is the one attached to the model (`rayfed.core.losses.attach_loss`), by default cross entropy. Raises
        `UserError` for more steps or larger batches than the account covers.
        """
        self._steps += 1
        if self.guaranteed and self.on_gradients:
            self._check_step(len(labels))
        with unwrapped(model) as bare:
            if not self._tried and len(labels):
                self._check_gradients(bare, inputs, labels)
            task = self._task(gradients.weights_of(bare), gradients.buffers_of(bare), bare, Batch(inputs, labels))
            mask = None if len(labels) else torch.zeros(0, device=inputs.device)
            found, loss = self._gradient(task, task.weights, Batch(inputs, labels, mask))
            self._check_finite("the gradient", found)
            for name, parameter in bare.named_parameters():
                if name in found:
                    parameter.grad = found[name].detach()
        return loss.detach()

    def answer(
        self, sent: Mapping[str, Tensor], returned: Mapping[str, Tensor], round: int | None = None, client: int = 0
    ) -> Named:
        """Return the defended state dict, to send instead of the state dict after training.

        `sent` is the state dict that the client received, `returned` the trained one. `round` counts from 0, by default
        one more than in the last call. With a seed, each `client` number has its own noise. Raises `UserError`
        for more updates than the account covers, and for statistics that changed, as they would be sent without noise.
        """
        own_names = {bare_name(name, self._names): name for name in returned}
        sent, returned = self._bare(sent), self._bare(returned)
        number = self._answers if round is None else round
        if self.on_gradients and not self._steps:
            raise UserError("a defence works on gradients; call `Defended.backward` instead of loss.backward()")
        if lacking := sorted(name for name in self._parameters if name not in sent or name not in returned):
            raise UserError(f"'{lacking[0]}' is missing in a state dict; give complete state dicts of the model")
        if self.guaranteed:
            self._check_answer(number, client, sent, returned)
        self._check_finite("sent", {name: sent[name] for name in self._parameters})
        if self.guaranteed and (bad := list_nonfinite({name: returned[name] for name in self._parameters})):
            warnings.warn(f"returned: '{bad[0]}' has NaN or infinite values; only noise is returned", stacklevel=2)
        before = {name: sent[name].detach() for name in self._parameters}
        tensors = {name: t - returned[name].detach() for name, t in before.items()}
        update = Update(0, number, tensors, {}, self.loop.samples or 1, nan)
        buffers = {name: t for name, t in sent.items() if name not in self._parameters}
        empty = Batch(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        with unwrapped(self._model) as bare:
            task = self._task(before, buffers, bare, empty, number, client)
            defended = wrap_updates(lambda _: update, self._defences)(task)
        self._check_finite("the defended update", defended.tensors)
        self._answers, self._steps = number + 1, 0
        self._given[client] += 1
        changed = {name: before[name] - tensor for name, tensor in defended.tensors.items()}
        answer = {name: changed.get(self._tied.get(name, name), tensor) for name, tensor in returned.items()}
        return {own_names[name]: tensor for name, tensor in answer.items()}

    def _bare(self, state: Mapping[str, Tensor]) -> Named:
        """Return a state dict with the parameter names of the model without its wrappers."""
        return {bare_name(name, self._names): tensor for name, tensor in state.items()}

    def given(self, client: int = 0) -> int:
        """Return the number of updates that a client has sent so far."""
        return self._given[client]

    def counted(self, client: int, given: int) -> None:
        """Record that a client has sent at least `given` updates, including updates from other processes."""
        self._given[client] = max(self._given[client], given)

    def _task(
        self, weights: Named, buffers: Named, model: nn.Module, data: Batch, round: int | None = None, client: int = 0
    ) -> Task:
        number = self._answers if round is None else round
        return Task(
            client=client,
            round=number,
            model=model,
            weights=weights,
            buffers=buffers,
            data=data,
            generator=self._generator(client, number, len(data.labels)),
            order=0,
            step=max(self._steps - 1, 0),
            batch_size=self.loop.batch_size or max(len(data.labels), 1),
            state=self._state,
        )

    def _generator(self, *key: int) -> torch.Generator:
        """Return a generator with fresh randomness for one step or update, also in forked processes."""
        if self._seed is None:
            return make_generator(os.urandom(32), secure=True)
        return seeds.torch_generator(self._seed, "defend", *key, self._steps)

    def _setting(self, model: nn.Module) -> PrivacySetting:
        loop, trained = self.loop, [p for p in model.parameters() if p.requires_grad]
        work = ClientWork(loop.samples or 1, loop.batch_size or 1, loop.steps or 1, loop.rounds)
        return PrivacySetting(
            clients=(work,),
            clients_per_round=1,
            rounds=loop.rounds,
            client_sampling="fixed",
            sample_sampling="poisson" if loop.poisson else "shuffle",
            layers=len(trained),
            values=sum(p.numel() for p in trained),
        )

    def _accounted(self, place: int, setting: PrivacySetting) -> Accounted:
        name, defence = self._named[place]
        spent = defence.spends(setting)
        if spent is None:
            return Accounted(name, self.loop.rounds, None, None, "the defence is empirical, without a proof")
        if why := broken_by(self._named, place, spent):
            return Accounted(name, self.loop.rounds, spent, None, why)
        found = compute_guarantee(spent.releases, spent.delta)
        if found.epsilon == inf:
            return Accounted(name, self.loop.rounds, spent, None, "the defence adds no noise")
        return Accounted(name, self.loop.rounds, spent, found)

    def _check_step(self, count: int) -> None:
        loop = self.loop
        assert loop.steps is not None
        assert loop.batch_size is not None
        if self._steps > loop.steps:
            raise UserError(
                f"found step {self._steps} of a round, but the account covers {loop.steps} steps; raise `steps`"
            )
        if not loop.poisson and count > loop.batch_size:
            raise UserError(
                f"found a batch of {count} samples, but the account covers {loop.batch_size}; raise `batch_size`"
            )

    def _check_gradients(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        """Raise `UserError` if a defence does not support the gradient of this model, tried on two samples."""
        data = Batch(inputs[:2], labels[:2])
        with seeds.global_stream("check", "gradients", cuda=inputs.is_cuda):
            for defence in self._defences:
                task = self._task(gradients.weights_of(model), gradients.buffers_of(model), model, data)
                defence.check_gradient(task.replace(generator=torch.Generator()))
        self._tried = True

    def _check_finite(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Raise `UserError` for NaN and infinite values if a defence has an epsilon.

        A client's own values are not checked before the clip, which replaces NaN by 0. An error that depends on the
        samples would not be covered by the epsilon.
        """
        if self.guaranteed and (bad := list_nonfinite(tensors)):
            raise UserError(
                f"{what}: '{bad[0]}' has NaN or infinite values, which the epsilon does not cover; training has "
                f"diverged, so restart training with a lower learning rate"
            )

    def _check_answer(
        self, number: int, client: int, sent: Mapping[str, Tensor], returned: Mapping[str, Tensor]
    ) -> None:
        last = max(number, self._given[client])  # the server chooses the round's number, so updates are also counted
        if last >= self.loop.rounds:
            raise UserError(
                f"found update {last + 1}, but the account covers {self.loop.rounds} updates; raise `rounds`"
            )
        for name, tensor in returned.items():
            if name in self._tied or name.endswith("num_batches_tracked"):  # the number of steps is public
                continue
            if name not in sent or not torch.equal(tensor, sent[name]):
                raise UserError(
                    f"'{name}' has changed and would be sent without noise, which the epsilon does not cover; keep "
                    f"statistics (as in batch norm) unchanged by model.eval(), or use group norm"
                )


def _built(defences: Sequence[str | Mapping[str, Any]]) -> list[tuple[str, Defence]]:
    """Return pairs of a defence's name and the built defence; raises `UserError` for an invalid one."""
    if isinstance(defences, str):
        raise UserError(f"defences: found '{defences}'; give a list, such as ['{defences}']")
    written = [expand_component(one) for one in defences]
    for problem in component_problems({"defences": written}):
        place, *field = problem.path[1:]
        where = ": ".join(filter(None, (str(written[place].get("name")), ".".join(map(str, field)))))
        raise UserError(f"defence {where}: {problem.text}")
    return [(one["name"], DefenceSpec.model_validate(one).build()) for one in written]


def _check(name: str, defence: Defence, model: nn.Module, later: Sequence[Defence]) -> None:
    """Raise `UserError` for a defence that the loop or the model does not support."""
    for hook, does in _OURS.items():
        if defence.overrides(hook):
            raise UserError(
                f"{name} {does}, which your own training loop does not support; use this defence in a scenario"
            )
    if defence.least_public:
        raise UserError(f"{name} needs public samples, which no client owns; use this defence in a scenario")
    defence.check(model)
    if refused := defence.refuses(later):
        raise UserError(f"{name}: {refused}")
