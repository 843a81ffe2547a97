"""The same work in Flower's simulation on Ray, in an environment that has `flwr[simulation]`; `engine.py` starts it.

Plays one round for each line on standard input and answers with `seconds S updates N`. Flower's own FedAvg, two
client actors of one CPU each, no evaluation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.work import SAMPLES, Work, data, rows_of, train


def _client(work: Work) -> ClientApp:
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        images, labels = data(work.clients, work.shape)
        rows = rows_of(int(context.node_config["partition-id"]))
        model = work.build()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, images[rows], labels[rows])
        metrics = MetricRecord({"num-examples": SAMPLES})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


class _OnDemand(FedAvg):
    """FedAvg whose rounds begin when a line comes in."""

    def configure_train(self, *args: Any) -> Iterable[Message]:
        sys.stdin.readline()
        self._began = perf_counter()
        return super().configure_train(*args)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        trained = sum(not reply.has_error() for reply in replies)
        result = super().aggregate_train(server_round, replies)
        print("seconds", perf_counter() - self._began, "updates", trained, flush=True)
        return result


def main() -> None:
    """`flower_engine.py MODEL CLIENTS PER_ROUND ROUNDS`."""
    clients, per_round, rounds = map(int, sys.argv[2:])
    work = Work(clients, per_round, sys.argv[1])
    server = ServerApp()

    @server.main()
    def _serve(grid: Grid, context: Context) -> None:
        strategy = _OnDemand(
            fraction_train=per_round / clients,
            fraction_evaluate=0.0,
            min_train_nodes=per_round,
            min_available_nodes=clients,
        )
        strategy.start(grid, ArrayRecord(work.build().state_dict()), num_rounds=rounds)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, _client(work), clients, backend_config=resources)


if __name__ == "__main__":
    main()
