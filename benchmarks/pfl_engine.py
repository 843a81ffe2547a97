"""The same work in pfl-research's simulation, in an environment that has `pfl[pytorch]`; `engine.py` starts it.

Plays one round for each line on standard input and answers with `seconds S updates N`, as `flower_engine.py` does. Its
own FederatedAveraging, no evaluation; with two processes, they add up by `torch.distributed` over Gloo, as pfl does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from time import perf_counter
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F

from benchmarks.work import BATCH, LR, Work, data, rows_of

PROCESSES = "PFL_PROCESSES"


class _Model(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self._network = work.build()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._network(inputs)
        return outputs

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, eval: bool = False) -> torch.Tensor:
        return F.cross_entropy(self(inputs), targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor, eval: bool = False) -> dict[str, Any]:
        return {"nothing": Weighted(0, 1)}  # asked for in round 0 alone, which warms up


def _dataset(work: Work) -> FederatedDataset:
    images, labels = data(work.clients, work.shape)

    def of(client: int) -> Dataset:
        rows = rows_of(client)
        order = torch.randperm(rows.stop - rows.start)
        inputs = torch.from_numpy(images[rows]).float().div_(255)
        return Dataset((inputs[order], torch.from_numpy(labels[rows])[order]), user_id=str(client))

    return FederatedDataset(of, get_user_sampler("random", list(range(work.clients))))


class _OnDemand(TrainingProcessCallback):
    """Begins a round in all processes when a line comes in to the first."""

    def __init__(self) -> None:
        self._first = os.environ.get("RANK", "0") == "0"

    def _wait(self) -> None:
        if self._first:
            sys.stdin.readline()
        if PROCESSES in os.environ:
            torch.distributed.barrier()
        self._began = perf_counter()

    def on_train_begin(self, *, model: Any) -> Metrics:
        self._wait()
        return Metrics()

    def after_central_iteration(self, metrics: Metrics, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
        if self._first:
            [trained] = [value for name, value in metrics if str(name).endswith("number of devices")]
            print("seconds", perf_counter() - self._began, "updates", int(trained), flush=True)
        self._wait()
        return False, Metrics()


def main() -> None:
    """`pfl_engine.py MODEL CLIENTS PER_ROUND ROUNDS PROCESSES`."""
    clients, per_round, rounds, processes = map(int, sys.argv[2:])
    work = Work(clients, per_round, sys.argv[1])
    if processes > 1 and PROCESSES not in os.environ:
        _play_in_several(processes)
    torch.set_num_threads(1)
    network = _Model(work)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    assert get_default_framework_module().distributed.world_size == processes
    federation = _dataset(work)
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, per_round, 0),
        SimulatedBackend(federation, federation),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        callbacks=[_OnDemand()],
        send_metrics_to_platform=False,  # it prints them
    )


def _play_in_several(processes: int) -> None:
    """Begin again as the first of several processes, as `torchrun` would start them: pfl connects as it is imported."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {PROCESSES: str(processes), "WORLD_SIZE": str(processes), "TORCHELASTIC_RUN_ID": "benchmark"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "benchmarks.pfl_engine", *sys.argv[1:]]
    for rank in map(str, range(1, processes)):
        subprocess.Popen(command, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, stdin=subprocess.DEVNULL)
    os.execve(sys.executable, command, shared | {"RANK": "0", "LOCAL_RANK": "0"})


if __name__ == "__main__":
    main()
