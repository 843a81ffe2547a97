"""Flower: a mod and a strategy that record updates for `rayfed replay`, and a mod that defends clients' answers.

Written for Flower's message API, as of flwr 1.41.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rayfed.arrays import Arrays
from rayfed.errors import UserError
from rayfed.integrations.watch import Watch
from rayfed.recording import Recorder
from rayfed.update import LocalTraining

if TYPE_CHECKING:  # nothing of it is needed beyond what its users hand over
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy

    from rayfed.client.defending import Defended

    ClientSide = Callable[[Message, Context], Message]
Kept = TypeVar("Kept", bound="Strategy")
_ANSWERS = "rayfed.answers"
_MOST = 1 << 31
"""Numbers of clients where Flower has drawn larger ones for its nodes."""


@dataclass(frozen=True)
class RecordingMod:
    """Mod for `ClientApp(mods=[...])` that records the state that a client is sent and its reply.

    Put first, it records what leaves the client, behind all other mods. How many samples a client trained on, and in
    which steps, is watched. Where a round cannot be recorded, it fails with the reason.
    """

    folder: str | PathLike[str]
    """Folder of the recording; the clients of a simulation share it."""
    model: Callable[[], nn.Module]
    """The class that clients train, or a function that makes one."""
    truth: bool = False
    """Whether the samples and labels themselves are written, so that reconstructions can be scored."""
    mean: Sequence[float] | None = None
    """Means by which images in [0, 1] are normalised before the model, per channel; None: nothing."""
    std: Sequence[float] | None = None
    """Deviations likewise."""
    local: LocalTraining | None = None
    """The local steps; None: as watched."""

    def __call__(self, message: Message, context: Context, call_next: ClientSide) -> Message:
        """Let the client train, and record its reply to a training message."""
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        sent, model = _in_order(_arrays(message)), self.model()
        with Watch(type(model)) as watch:
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        seen = watch.seen(self.local)
        if self.truth and seen.labels is None:
            raise UserError("RecordingMod: no labels of a cross entropy were seen, which the truth needs")
        labels = torch.zeros(len(seen.inputs), dtype=torch.int64) if seen.labels is None else seen.labels
        recorder = Recorder(model, self.folder, seen.local, truth=self.truth, mean=self.mean, std=self.std)
        answer, batch = _in_order(_arrays(reply)), (seen.inputs, labels)
        recorder.round(sent, answer, batch, round=_round(message), client=_client(context))
        return reply


@dataclass(frozen=True)
class DefendingMod:
    """Mod for `ClientApp(mods=[...])` that defends a client's replies; made by `defend`."""

    guard: Defended

    def __call__(self, message: Message, context: Context, call_next: ClientSide) -> Message:
        """Let the client train, and defend the state in its reply to a training message."""
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        from flwr.app import ArrayRecord, ConfigRecord

        sent = _arrays(message)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        client, kept = _client(context), context.state.config_records.get(_ANSWERS)
        # Counted where a client of Flower keeps what outlives its process: the server may name one round twice.
        self.guard.counted(client, int(kept["given"]) if kept else 0)
        answer = self.guard.answer(sent, _arrays(reply), _round(message) - 1, client)
        context.state[_ANSWERS] = ConfigRecord({"given": self.guard.given(client)})
        [name] = reply.content.array_records
        reply.content[name] = ArrayRecord(OrderedDict(answer))
        return reply


def defend(
    defences: Sequence[str | Mapping[str, Any]], model: nn.Module, *, rounds: int, seed: int | None = None
) -> DefendingMod:
    """Return a mod that defends clients' replies, and print its account for this many rounds of the server.

    Defences are those that work on an update, as in a scenario; `model` is one as the clients train it. Put the mod
    last in the list, so that others see what is defended. Where an epsilon is claimed, a later round fails. Raises
    `UserError` for defences that work on gradients, which `rayfed.defend` has for the loop inside, and for those that
    keep a state, which clients of Flower lose.
    """
    from rayfed.client.defending import Defended, Loop

    guard = Defended(defences, model, Loop(rounds), seed)
    if guard.keeps_state:
        raise UserError("defend: a defence keeps a state from round to round, which clients of Flower lose")
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
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Kept:
    """Return the strategy with recording of the states that clients are sent and return.

    A server sees no samples: it knows the images' `shape` (C, H, W), the `local` steps that it asks for, and by each
    reply's `num-examples` how many samples are behind it. With `epochs` the steps are as many passes over these.
    """
    recorder = Recorder(model, folder, local, shape=shape, mean=mean, std=std)
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
        raise UserError(f"a message to be recorded has {len(records)} array records, where one is the model's state")
    return dict(records[0].to_torch_state_dict())


def _in_order(state: Mapping[str, Tensor]) -> Arrays:
    """Return a state as a list if its names are numbers in order, as those of a `NumPyClient` are."""
    return list(state.values()) if list(state) == [str(place) for place in range(len(state))] else state


def _client(context: Context) -> int:
    return int(context.node_config.get("partition-id", context.node_id % _MOST))


def _round(message: Message) -> int:
    """Return the server's round; raises `UserError` if the strategy does not write it, as Flower's own do."""
    rounds = [record["server-round"] for record in message.content.config_records.values() if "server-round" in record]
    if not rounds:
        raise UserError("RecordingMod: the message does not say its round: have the strategy send `server-round`")
    return int(rounds[0])


def _examples(reply: Message) -> int:
    counts = [record["num-examples"] for record in reply.content.metric_records.values() if "num-examples" in record]
    if not counts:
        raise UserError("recording_strategy: a reply has no `num-examples` among its metrics")
    return int(counts[0])
