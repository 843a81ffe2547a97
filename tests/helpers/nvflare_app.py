"""Run FedAvg of NVFlare's PyTorch examples with clients that record: `python nvflare_app.py FOLDER WORKSPACE`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from nvflare.app_opt.pt.job_config.fed_avg import FedAvgJob
from nvflare.job_config.defs import FilterType
from nvflare.job_config.script_runner import ScriptRunner
from nvflare_client import LR, MEAN, SAMPLES, STD, STEPS, Net

from rayfed.integrations.nvflare import RecordingFilter  # added

FOLDER, WORKSPACE = sys.argv[1:3]
CLIENTS = 2


def recording() -> RecordingFilter:
    """Return a new recording filter."""
    local, normalise = {"steps": STEPS, "lr": LR}, {"mean": MEAN, "std": STD}
    return RecordingFilter(FOLDER, "nvflare_client:Net", SAMPLES, [1, 8, 8], local, normalise)


if __name__ == "__main__":
    torch.manual_seed(0)
    job = FedAvgJob(initial_model=Net(), n_clients=CLIENTS, num_rounds=2, name="recorded")
    job.to_clients(ScriptRunner(script=str(Path(__file__).with_name("nvflare_client.py"))))
    for kind in (FilterType.TASK_DATA, FilterType.TASK_RESULT):  # added
        job.to_clients(recording(), filter_type=kind, tasks=["train"])
    job.simulator_run(WORKSPACE, n_clients=CLIENTS, threads=1)
