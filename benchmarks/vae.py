"""The VAE defence against its paper: accuracy on forged data, what attackers get, how forged images look.

    python -m benchmarks.vae accuracy --data FOLDER [--case mnist] [--arms none forged vae] [--clients 1] [--drawn 1]
                                      [--samples 6000] [--rounds 10] [--validate] [--seeds 11] [--vae latent=16 ...]
    python -m benchmarks.vae leak --data FOLDER [--case mnist] [--model lenet] [--images 20] [--steps 400]
    python -m benchmarks.vae likeness --data FOLDER [--case mnist] [--samples 600]

FOLDER holds `mnist` and `fashion-mnist` (IDX files) and `cifar10/jpeg-train.parquet`, `cifar10/jpeg-test.parquet`.
`accuracy`: the paper's network after local epochs on raw or forged images, which are new in every round, at one client
(its table II) or several of whom some are drawn (its figure 5). `leak`: attacks on the gradient of one image at an
untrained network, and PoRS, the share that comes out at 15 dB or more. `likeness`: how near forged images are to those
that they stand for. The arm `forged` is `vae` without Laplace noise. One thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean, stdev
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rayfed.attacks.base import Attack
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.core import seeds
from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.vae import Vae
from rayfed.gradients import buffers_of, weights_of
from rayfed.metrics.images import psnr, ssim
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.scenario import Training
from rayfed.simulation.client.local import update_method
from rayfed.update import Named, Observation

MODELS: dict[str, dict[str, Any]] = {"small_cnn": {}, "lenet": {"activation": "sigmoid", "init": "uniform"}}
NO_NOISE = 1e9
"""An epsilon whose Laplace noise is nothing."""
SUCCESS = 15.0
"""dB from which a reconstruction counts."""
CLIENT = 200
"""Images of an attacked client."""


def images_of(folder: str, case: str) -> tuple[Batch, Batch]:
    """All training and all test images of a data set."""
    if case == "cifar10":
        files = {split: f"{folder}/cifar10/jpeg-{split}.parquet" for split in ("train", "test")}
        loaded = build("datasets", "parquet", files).load()
    else:
        loaded = build(
            "datasets", "mnist", {"root": f"{folder}/{'mnist' if case == 'mnist' else 'fashion-mnist'}"}
        ).load()
    train, test = (
        Batch(torch.from_numpy(images).float() / 255, torch.from_numpy(labels))
        for images, labels in ((loaded.train_images, loaded.train_labels), (loaded.test_images, loaded.test_labels))
    )
    return train, test


def arms(changes: dict[str, Any]) -> dict[str, list[Defence]]:
    """By their names on the command line."""
    return {"none": [], "forged": [Vae(**{**changes, "epsilon": NO_NOISE})], "vae": [Vae(**changes)]}


def task(model: nn.Module, weights: Named, data: Batch, key: Sequence[int], state: dict[str, Any]) -> Task:
    """A client's work on all of its data; `key` is (seed, round, client)."""
    generator, order = (seeds.torch_generator(*key, what) for what in ("defences", "order"))
    placed = data._replace(places=torch.arange(len(data.labels)))
    round, client = key[1:]
    return Task(
        client,
        round,
        model,
        weights,
        buffers_of(model),
        placed,
        generator,
        order.initial_seed(),
        state=state,
        classes=10,
    )


def accuracy(chosen: argparse.Namespace) -> None:
    """A line for every arm and seed."""
    train, test = images_of(chosen.data, chosen.case)
    training = Training(epochs=1, batch_size=32, lr=chosen.lr, momentum=0.9)
    for seed in chosen.seeds:
        order = torch.randperm(len(train.labels), generator=seeds.torch_generator(seed, "split"))
        parts = [train.rows(index) for index in order[: chosen.clients * chosen.samples].split(chosen.samples)]
        judged = train.rows(order[-2000:]) if chosen.validate else test
        for arm in chosen.arms:
            model = build_model("small_cnn", {}, tuple(train.inputs.shape[1:]), 10, seed)  # type: ignore[arg-type]
            weights, states = weights_of(model), [dict[str, Any]() for _ in parts]
            stack = arms(chosen.vae)[arm]
            send, began = update_method(training, stack), process_time()
            for round in range(chosen.rounds):
                draw = seeds.numpy_generator(seed, "clients", round)
                drawn = sorted(draw.choice(chosen.clients, chosen.drawn, replace=False).tolist())
                sent = [send(task(model, weights, parts[c], (seed, round, c), states[c])).tensors for c in drawn]
                weights = {name: w - torch.stack([s[name] for s in sent]).mean(0) for name, w in weights.items()}
            print(
                f"{chosen.case}, {chosen.drawn} of {chosen.clients} clients of {len(parts[0].labels)}, seed {seed}, "
                f"{arm:7} accuracy {right(model, weights, judged):.2%}"
                f"{loss_of(stack, parts[drawn[0]], states[drawn[0]])}; {process_time() - began:.0f} s",
                flush=True,
            )


@torch.no_grad()
def right(model: nn.Module, weights: Named, data: Batch) -> float:
    """Share of the data that is classified right."""
    parts = data.inputs.split(1000)
    guesses = torch.cat([functional_call(model, weights, (part,)).argmax(1) for part in parts])
    return float((guesses == data.labels).float().mean())


@torch.no_grad()
def loss_of(stack: Sequence[Defence], data: Batch, state: dict[str, Any]) -> str:
    """The loss of a client's autoencoder on the client's own images, disturbed as in its training."""
    if not stack:
        return ""
    [defence] = stack
    assert isinstance(defence, Vae)
    network = defence._network(task(nn.Identity(), {}, data, (0, 0, 0), state))
    generator, images = seeds.torch_generator(0, "loss"), data.inputs[:2000]
    seen = images + defence.disturbance * torch.randn(images.shape, generator=generator)
    draws = torch.randn(len(images), defence.latent, generator=generator)
    return f"; the autoencoder's loss {network.loss(seen, images, draws, data.labels[:2000]):.0f}"


def clients_of(chosen: argparse.Namespace, samples: int, count: int) -> list[Batch]:
    """Clients with images that nothing else here uses."""
    train, _ = images_of(chosen.data, chosen.case)
    order = torch.randperm(len(train.labels), generator=seeds.torch_generator(chosen.seeds[0], "clients"))
    return [train.rows(index) for index in order[: count * samples].split(samples)]


def leak(chosen: argparse.Namespace) -> None:
    """A line for every arm and attack, at five clients: what is found of single images."""
    clients = clients_of(chosen, CLIENT, 5)
    shape: tuple[int, int, int] = tuple(clients[0].inputs.shape[1:])  # type: ignore[assignment]
    model = build_model(chosen.model, MODELS[chosen.model], shape, 10, seed=chosen.seeds[0]).eval()
    attacks: dict[str, Attack] = {
        "inverting_gradients": InvertingGradients(iterations=chosen.steps),
        "idlg": Idlg(iterations=chosen.steps // 4, restarts=1),
    }
    each = chosen.images // len(clients)
    for arm in chosen.arms:
        stack = arms(chosen.vae)[arm]
        send, seen, true, forged = update_method(Training(algorithm="fedsgd", batch_size=None), stack), [], [], []
        for client, data in enumerate(clients):
            state: dict[str, Any] = {}
            for i in range(each):
                key = (chosen.seeds[0], i, client)
                whole = task(model, weights_of(model), data, key, state)
                rest = torch.tensor([j for j in range(CLIENT) if j != i])
                work = whole.replace(data=whole.data.rows(torch.tensor([i])), others=whole.data.rows(rest))
                sent = send(work).tensors
                again = work.replace(generator=seeds.torch_generator(*key, "defences"))
                true.append(work.data.inputs)
                forged.append(stack[0].wrap_data(lambda t: t.data)(again).inputs if stack else work.data.inputs)
                seen.append(
                    Observation(
                        client, 0, work.weights, work.buffers, sent, 1.0, 1, Pixels(*shape), 10, labels=work.data.labels
                    )
                )
        for title in chosen.attacks:
            starts = [seeds.torch_generator(chosen.seeds[0], "start", i) for i in range(len(seen))]
            found = torch.cat([one.images for one in attacks[title].reconstruct(seen, model, starts)])
            print(
                f"{chosen.case}, {chosen.model}, {title:20} {arm:7} to the true image {quality(found, true)}",
                flush=True,
            )
            if stack:
                print(f"{'':32} to the image trained on {quality(found, forged)}", flush=True)


def quality(found: Tensor, wanted: Sequence[Tensor]) -> str:
    """PSNR, SSIM and PoRS; a reconstruction that is not finite has failed."""
    images, usable = torch.cat(list(wanted)).clamp(0, 1), found.flatten(1).isfinite().all(1)
    decibels = psnr(images[usable], found[usable]).tolist()
    return (
        f"PSNR {fmean(decibels):.1f} ± {stdev(decibels):.1f} dB (best {max(decibels):.1f}), "
        f"SSIM {ssim(images[usable], found[usable]).mean():.2f}, "
        f"PoRS {sum(d >= SUCCESS for d in decibels) / len(found):.0%} of {len(found)}"
    )


def likeness(chosen: argparse.Namespace) -> None:
    """How near a client's forged images are to its own, with and without noise, and their mean over many rounds."""
    [data] = clients_of(chosen, chosen.samples, 1)
    for arm in ("forged", "vae"):
        [defence] = arms(chosen.vae)[arm]
        state: dict[str, Any] = {}
        made = [
            defence.wrap_data(lambda t: t.data)(
                task(nn.Identity(), {}, data, (chosen.seeds[0], round, 0), state)
            ).inputs
            for round in range(20)
        ]
        for title, forged in ((arm, made[0]), (f"{arm}, mean of 20 rounds", torch.stack(made).mean(0))):
            shown = forged.clamp(0, 1)
            nearest = torch.cdist(forged.flatten(1), data.inputs.flatten(1)).argmin(1)
            own = (nearest == torch.arange(len(nearest))).float().mean()
            values = psnr(data.inputs, shown)
            print(
                f"{chosen.case}, {len(data.labels)} images, {title:24} PSNR {values.mean():.1f} ± {values.std():.1f} "
                f"dB, SSIM {ssim(data.inputs, shown).mean():.2f}, from {SUCCESS:g} dB on "
                f"{(values >= SUCCESS).float().mean():.0%}; nearest to its own image {own:.0%}",
                flush=True,
            )


def _parameter(text: str) -> tuple[str, float | int]:
    name, _, value = text.partition("=")
    return name, float(value) if "." in value or "e" in value else int(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("accuracy", "leak", "likeness"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--case", choices=("mnist", "fashion", "cifar10"), default="mnist")
    parser.add_argument("--arms", nargs="*", default=["none", "forged", "vae"])
    parser.add_argument("--attacks", nargs="*", default=["inverting_gradients", "idlg"])
    parser.add_argument("--model", choices=MODELS, default="lenet")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--drawn", type=int, default=1)
    parser.add_argument("--samples", type=int, default=6000, help="of a client")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--validate", action="store_true", help="judge on training images that no client has")
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="*", default=[11])
    parser.add_argument("--vae", nargs="*", default=[], type=_parameter, help="its parameters, as latent=16")
    chosen = parser.parse_args(arguments)
    chosen.vae = dict(chosen.vae)
    torch.set_num_threads(1)
    {"accuracy": accuracy, "leak": leak, "likeness": likeness}[chosen.what](chosen)


if __name__ == "__main__":
    main()
