"""What searches find behind a small vision transformer, with as many evaluations each, and what parts of `gradvit` do.

    python -m benchmarks.patches [--data digits] [--size 8] [--patch 4] [--batch 1] [--victims 8] [--evaluations 400]
                                 [--frozen] [--attacks NAME ...]

The model is one block with a mean over places, untrained; `--frozen` trains neither the embedding of the patches nor
the positions, without which `april` does not apply. Labels are given. Printed are the patches that were found, and for
each attack the mean PSNR and that of every image, batches in the order that fits best. A change of places counts as an
evaluation, though it takes a third of the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed import registry
from rayfed.attacks.base import Attack
from rayfed.attacks.closed_form.april import April
from rayfed.attacks.closed_form.probe import probe
from rayfed.attacks.matching.gradinversion import GradInversion
from rayfed.attacks.matching.gradvit import GradVit, patches_of
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.metrics.images import psnr
from rayfed.update import Observation

ATTACKS: dict[str, Callable[[int], Attack]] = {
    "gradvit": lambda n: GradVit(iterations=3 * n // 4),
    "gradvit, borders: 0": lambda n: GradVit(iterations=3 * n // 4, borders=0),
    "gradvit, moves: false": lambda n: GradVit(iterations=n, moves=False),
    "gradvit, neither": lambda n: GradVit(iterations=n, moves=False, borders=0),
    "inverting_gradients": lambda n: InvertingGradients(iterations=2 * n // 3),  # two trials of a quarter before
    "gradinversion": lambda n: GradInversion(iterations=n, seeds=1),
    "idlg": lambda n: Idlg(iterations=n // 20, restarts=1),
    "april": lambda n: April(),
}


class TinyVit(nn.Module):
    """A vision transformer of one block with a mean over places; `by_hand` cuts patches without a convolution."""

    def __init__(self, shape: Sequence[int], patch: tuple[int, int] = (4, 4), by_hand: bool = False) -> None:
        super().__init__()
        (channels, height, across), width = shape, 32
        self.patch, self.by_hand = patch, by_hand
        self.register_buffer("shift", torch.full((channels, 1, 1), 0.5))
        self.embed: nn.Module = nn.Conv2d(channels, width, patch, patch)
        if by_hand:
            self.embed = nn.Linear(channels * patch[0] * patch[1], width)
        self.positions = nn.Parameter(0.02 * torch.randn((height // patch[0]) * (across // patch[1]), width))
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        images = (images - self.shift) / 0.5
        if self.by_hand:
            cut = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
            vectors = self.embed(cut)
        else:
            vectors = self.embed(images).flatten(2).transpose(1, 2)
        vectors = vectors + self.positions
        query, key, value = self.mixed(standard(vectors)).unflatten(2, (4, 3, -1)).permute(3, 0, 2, 1, 4)
        seen = (query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5).softmax(-1) @ value
        vectors = vectors + self.out(seen.transpose(1, 2).flatten(2))
        vectors = vectors + self.down(F.gelu(self.up(standard(vectors))))
        return self.head(standard(vectors).mean(1))


def standard(vectors: Tensor) -> Tensor:
    """A layer norm that `torch.func.vmap` differentiates twice."""
    centred = vectors - vectors.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def main() -> None:
    """Attack the same observations with every attack, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    for name, default in (("size", 8), ("patch", 4), ("batch", 1), ("victims", 8), ("evaluations", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    given = parser.parse_args()
    count = given.batch * given.victims
    data = registry.build("datasets", given.data, {"size": given.size, "test_samples": count}).load()
    images = (torch.from_numpy(data.test_images[:count]).float() / 255).split(given.batch)
    labels = torch.from_numpy(data.test_labels[:count]).split(given.batch)
    torch.manual_seed(0)
    model = TinyVit(images[0].shape[1:], (given.patch, given.patch))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (given.frozen and name.startswith(("embed", "positions"))))
    weights, buffers = weights_of(model), buffers_of(model)
    seen = []
    for batch, classes in zip(images, labels, strict=True):
        update, _ = gradient(model, weights, buffers, batch, classes)
        sample = data.sample.published()
        seen.append(
            Observation(0, 0, weights, buffers, update, 1.0, given.batch, sample, len(data.classes), labels=classes)
        )
    size = patches_of(probe(model, seen[0]), given.batch)
    print(
        f"{given.data} {given.size}x{given.size}, batch {given.batch}, patches {size.height}x{size.width}", flush=True
    )
    for name in given.attacks:
        found = ATTACKS[name](given.evaluations).reconstruct(seen, model, _generators(given.victims))
        if reasons := {f"{one.status}: {one.message}" for one in found if one.status != "ok"}:
            print(f"{name:24} {'; '.join(reasons)}", flush=True)
            continue
        values = [value for one, true in zip(found, images, strict=True) for value in _matched(one.images, true)]
        print(f"{name:24} {fmean(values):5.1f} dB: {', '.join(f'{v:.1f}' for v in values)}", flush=True)


def _generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def _matched(found: Tensor, true: Tensor) -> list[float]:
    """Return the PSNR of images (N, C, H, W) in the order of least distance."""
    rows, columns = linear_sum_assignment(torch.cdist(found.flatten(1), true.flatten(1)).square().numpy())
    return [float(psnr(found[row, None], true[column, None])[0]) for row, column in zip(rows, columns, strict=True)]


if __name__ == "__main__":
    main()
