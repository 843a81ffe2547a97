"""Flower: a mod and a strategy that record updates for `rayfed replay`, and a mod that applies defences.

Uses the message API of flwr 1.41.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rayfed.core.arrays import Arrays
from rayfed.errors import UserError
from rayfed.integrations.watch import Watch
from rayfed.recording import Recorder
from rayfed.update import LocalTraining

if TYPE_CHECKING:  # used only for annotations
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy

    from rayfed.simulation.client.defending import Defended

    ClientSide = Callable[[Message, Context], Message]
Kept = TypeVar("Kept", bound="Strategy")
_ANSWERS = "rayfed.answers"
_MOST = 1 << 31
"""Upper limit of client numbers, because node ids of Flower are larger."""


@dataclass(frozen=True)
class RecordingMod:
    """Mod for `ClientApp(mods=[...])` that records the model state sent to a client and the client's reply.

    Put it first in the list, so that it records the reply after all other mods. It observes the number of samples and
    the local steps. Raises `UserError` for a round that cannot be recorded.
    """

    folder: str | PathLike[str]
    """Folder of the recording, shared by the clients of a simulation."""
    model: Callable[[], nn.Module]
    """Class of the trained model, or a function that returns the model."""
    truth: bool = False
    """Whether to record samples and labels, so that reconstructions can be scored."""
    normalise: Any = None
    """Normalisation of images in [0, 1], as for `rayfed.record`. Default: none."""
    local: LocalTraining | None = None
    """Local steps. Default: the observed steps."""

    def __call__(self, message: Message, context: Context, call_next: ClientSide) -> Message:
        """Run the client, and record the client's reply to a training message."""
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        sent, model = _in_order(_arrays(message)), self.model()
        with Watch(type(model)) as watch:
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        seen = watch.seen(self.local)
        if self.truth and seen.labels is None:
            raise UserError(
                "RecordingMod: truth=True needs labels, but no cross_entropy with labels was observed: train with "
                "cross_entropy, or set truth=False"
            )
        labels = torch.zeros(len(seen.inputs), dtype=torch.int64) if seen.labels is None else seen.labels
        recorder = Recorder(model, self.folder, seen.local, truth=self.truth, normalise=self.normalise)
        answer, batch = _in_order(_arrays(reply)), (seen.inputs, labels)
        recorder.round(sent, answer, batch, round=_round(message), client=_client(context))
        return reply


@dataclass(frozen=True)
class DefendingMod:
    """Mod for `ClientApp(mods=[...])` that applies defences to a client's replies (see `defend`)."""

    guard: Defended

    def __call__(self, message: Message, context: Context, call_next: ClientSide) -> Message:
        """Run the client, and apply the defences to the model state in the client's reply to a training message."""
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        from flwr.app import ArrayRecord, ConfigRecord

        sent = _arrays(message)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        client, kept = _client(context), context.state.config_records.get(_ANSWERS)
        # The count is kept in the state of the Flower client, because the server may send a round twice.
        self.guard.counted(client, int(kept["given"]) if kept else 0)
        answer = self.guard.answer(sent, _arrays(reply), _round(message) - 1, client)
        context.state[_ANSWERS] = ConfigRecord({"given": self.guard.given(client)})
        [name] = reply.content.array_records
        reply.content[name] = ArrayRecord(OrderedDict(answer))
        return reply


def defend(
    defences: Sequence[str | Mapping[str, Any]], model: nn.Module, *, rounds: int, seed: int | None = None
) -> DefendingMod:
    """Return a mod that applies defences to clients' replies, and print the privacy guarantee after `rounds` rounds.

    `defences` are written as in a scenario and must work on updates. `model` is the model of the clients. Put the mod
    last in the list, so that other mods see the defended update. With an epsilon, rounds after `rounds` raise an error.
    Raises `UserError` for defences on gradients (use `rayfed.defend` in the training loop) and for stateful defences.
    """
    from rayfed.simulation.client.defending import Defended, Loop

    guard = Defended(defences, model, Loop(rounds), seed)
    if guard.keeps_state:
        raise UserError(
            "defend: Flower clients keep no state between rounds, but a defence needs a state; use stateless defences"
        )
    print(guard, flush=True)
    return DefendingMod(guard)


def recording_strategy(
    strategy: Kept,
    folder: str | PathLike[str],
    model: nn.Module,
    local: LocalTraining,
    *,
    shape: Sequence[int],
    epochs: int | None = None,
    normalise: Any = None,
) -> Kept:
    """Return the strategy, extended to record the model states that clients receive and return.

    The server has no samples, so give the `shape` (C, H, W) of the images and the `local` steps. The number of samples
    is `num-examples` of each reply. If `epochs` is given, the number of steps is computed from it.
    """
    recorder = Recorder(model, folder, local, shape=shape, normalise=normalise)
    configure, aggregate = strategy.configure_train, strategy.aggregate_train
    sent: dict[int, Arrays] = {}
    clients: dict[int, int] = {}

    def configured(server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        sent.clear()
        sent[server_round] = _in_order(dict(arrays.to_torch_state_dict()))
        messages: Iterable[Message] = configure(server_round, arrays, config, grid)
        return messages

    def aggregated(server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                continue
            count = _examples(reply)
            steps = local if epochs is None else replace(local, steps=_steps(local, count, epochs))
            client = clients.setdefault(reply.metadata.src_node_id, len(clients))
            answer = _in_order(_arrays(reply))
            recorder.round(sent[server_round], answer, count, round=server_round, client=client, local=steps)
        return aggregate(server_round, replies)

    strategy.configure_train, strategy.aggregate_train = configured, aggregated
    return strategy


def _steps(local: LocalTraining, samples: int, epochs: int) -> int:
    return epochs * -(-samples // min(local.batch_size or samples, samples))


def _arrays(message: Message) -> dict[str, Tensor]:
    """Return the state dict of a message; raises `UserError` for none or several."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise UserError(
            f"found a message with {len(records)} array records; expected one record, with the state of the model"
        )
    return dict(records[0].to_torch_state_dict())


def _in_order(state: Mapping[str, Tensor]) -> Arrays:
    """Return a state as a list if its names are 0, 1, ..., as for a `NumPyClient`."""
    return list(state.values()) if list(state) == [str(place) for place in range(len(state))] else state


def _client(context: Context) -> int:
    return int(context.node_config.get("partition-id", context.node_id % _MOST))


def _round(message: Message) -> int:
    """Return the round of the server. Raises `UserError` if the message does not have it."""
    rounds = [record["server-round"] for record in message.content.config_records.values() if "server-round" in record]
    if not rounds:
        raise UserError("RecordingMod: a message has no `server-round`; send the number of the round from the strategy")
    return int(rounds[0])


def _examples(reply: Message) -> int:
    counts = [record["num-examples"] for record in reply.content.metric_records.values() if "num-examples" in record]
    if not counts:
        raise UserError(
            "recording_strategy: a client's reply has no metric `num-examples`; return the metric from the clients"
        )
    return int(counts[0])
