"""Run Flower's PyTorch quickstart on local CIFAR-10, with recordings of the updates in the lines marked "added".

`python flower_app.py FOLDER SAMPLES` simulates it with this number of images per client. Clients record to
`FOLDER/client`, with their samples, and the server to `FOLDER/server`. A third argument is a defence in YAML.
"""

from __future__ import annotations

import sys

import torch
import yaml
from flower_task import BATCH, NORMALISED, Net, load_data, train_model
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from rayfed import Normalisation
from rayfed.integrations.flower import RecordingMod, defend, recording_strategy  # added
from rayfed.update import LocalTraining

FOLDER, SAMPLES = sys.argv[1], int(sys.argv[2])
LR, CLIENTS, ROUNDS = 0.01, 2, 2
LOCAL = LocalTraining(batch_size=BATCH, lr=LR, momentum=0.9)

MODS = [RecordingMod(f"{FOLDER}/client", Net, truth=True, normalise=Normalisation(**NORMALISED))]
if len(sys.argv) > 3:
    MODS.append(defend([yaml.safe_load(sys.argv[3])], Net(), rounds=ROUNDS))

app = ClientApp(mods=MODS)  # added: mods


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainloader = load_data(context.node_config["partition-id"], SAMPLES)
    train_loss = train_model(model, trainloader, 1, msg.content["config"]["lr"])
    metrics = {"train_loss": train_loss, "num-examples": len(trainloader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    torch.manual_seed(0)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    strategy = recording_strategy(  # added
        strategy,
        f"{FOLDER}/server",
        Net(),
        LOCAL,
        epochs=1,
        shape=(3, 32, 32),
        normalise=Normalisation(**NORMALISED),
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": LR}),
        num_rounds=ROUNDS,
    )


if __name__ == "__main__":
    run_simulation(
        server_app, app, num_supernodes=CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )
