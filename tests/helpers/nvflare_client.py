"""Define the model and training of `nvflare_app.py`, with NVFlare's client API, on scikit-learn's digits."""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

SAMPLES, LR, STEPS = 4, 0.1, 2
MEAN, STD = [0.3], [0.4]


class Net(nn.Module):
    """A small network."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.layers(x)


def samples(site: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's digits in [0, 1] and their labels."""
    digits = load_digits()
    rows = slice(site * SAMPLES, (site + 1) * SAMPLES)
    return torch.tensor(digits.images[rows] / 16).float()[:, None], torch.tensor(digits.target[rows])


def main() -> None:
    """Train on each received model, in steps of all samples."""
    import nvflare.client as flare

    flare.init()
    images, labels = samples(int(flare.get_site_name().rpartition("-")[2]))
    inputs = (images - MEAN[0]) / STD[0]
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model = Net()
        model.load_state_dict({n: torch.as_tensor(t) for n, t in received.params.items()})
        optimiser = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(STEPS):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
        flare.send(flare.FLModel(params=model.cpu().state_dict(), metrics={"accuracy": 0.0}))


if __name__ == "__main__":
    sys.exit(main())
