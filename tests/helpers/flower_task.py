"""Define the model, data and training of `flower_app.py`, as `task.py` of Flower's PyTorch quickstart does."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import Compose, Normalize, ToTensor

NORMALISED = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
BATCH = 32


class Net(nn.Module):
    """Model (simple CNN adapted from 'PyTorch: A 60 Minute Blitz')."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def load_data(partition_id: int, samples: int) -> DataLoader:
    """Load a client's share of CIFAR-10."""
    file = sorted(Path(os.environ["RAYFED_DATA"], "cifar10").rglob("*lossless-train*.parquet"))[0]
    table = pq.read_table(file).slice(partition_id * samples, samples).to_pylist()
    transform = Compose([ToTensor(), Normalize(**NORMALISED)])
    column = "img" if "img" in table[0] else "image"
    images = torch.stack([transform(Image.open(BytesIO(row[column]["bytes"]))) for row in table])
    labels = torch.from_numpy(np.array([row["label"] for row in table]))
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)


def train_model(net: nn.Module, trainloader: DataLoader, epochs: int, lr: float) -> float:
    """Train the model on the training set."""
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / len(trainloader)
