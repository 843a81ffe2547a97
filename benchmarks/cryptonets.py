"""Inference under encryption beside inference in plain: agreement, accuracy and seconds.

    python -m benchmarks.cryptonets --data FOLDER [--digits 100] [--epochs 3]

FOLDER holds MNIST's IDX files. A `cryptonet` is trained in plain on 20,000 digits; test digits are then classified by a
server that holds the weights and sees ciphertexts alone. One process, one thread, no Ray. The Bayesian-privacy paper's
table 1 has 96.7 % and 3,009 s for CryptoNets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from rayfed.crypto.inference import CryptonetClient, CryptonetServer
from rayfed.models.build import build_model
from rayfed.registry import build


def trained(images: Tensor, labels: Tensor, epochs: int) -> nn.Sequential:
    """In plain, by Adam."""
    model = build_model("cryptonet", {}, (1, 28, 28), 10, seed=0)
    assert isinstance(model, nn.Sequential)
    optimiser, generator = torch.optim.Adam(model.parameters(), 1e-3), torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimiser.step()
    return model.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--digits", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=3)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = build(
        "datasets", "mnist", {"root": chosen.data, "train_samples": 20_000, "test_samples": chosen.digits}
    ).load()
    images, tests = (torch.from_numpy(x).float() / 255 for x in (data.train_images, data.test_images))
    labels, truth = torch.from_numpy(data.train_labels), torch.from_numpy(data.test_labels)
    model = trained(images, labels, chosen.epochs)
    client = CryptonetClient.with_new_keys()
    public = client.public()
    server, conv = CryptonetServer.from_public_keys(public, model), model.get_submodule("conv1")
    assert isinstance(conv, nn.Conv2d)
    with torch.no_grad():
        began = perf_counter()
        plain = torch.cat([model(image[None]) for image in tests])
        in_plain = (perf_counter() - began) / len(tests)
    seconds: list[tuple[float, float, float]] = []
    logits, sizes = [], []
    for image in tests:
        times = [perf_counter()]
        sealed, windows = client.encrypt(image, conv)
        times.append(perf_counter())
        answer = server.classify(sealed, windows)
        times.append(perf_counter())
        logits.append(torch.tensor(client.decrypt(answer)))
        times.append(perf_counter())
        seconds.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
        sizes.append(len(sealed) + len(answer))
    found = torch.stack(logits)
    accuracies = ", ".join(f"{float((x.argmax(1) == truth).float().mean()):.1%}" for x in (plain, found))
    print(f"{len(tests)} digits: accuracy in plain and encrypted {accuracies}")
    print(f"the same class for {float((plain.argmax(1) == found.argmax(1)).float().mean()):.1%}", end="; ")
    print(f"largest difference of a logit {float((plain - found).abs().max()):.1e}")
    parts = ", ".join(
        f"{what} {median(s[i] for s in seconds):.3f}" for i, what in enumerate(("encrypt", "classify", "decrypt"))
    )
    whole = median(sum(s) for s in seconds)
    print(f"seconds an image, median: {parts}; {whole / in_plain:.0f} times plain ({1000 * in_plain:.2f} ms)")
    print(f"{median(sizes) / 1e6:.2f} MB an image both ways, public keys once {len(public) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
