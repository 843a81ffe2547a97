"""What `april` reads off the gradient of one photograph of 224 x 224 behind a vision transformer of torchvision.

    python -m benchmarks.vit [--arch vit_b_16] [--head 0.02]

The weights are torchvision's initial ones, and those of the head, which are 0 there, of deviation `--head`: behind a
head of zeros nothing but the head has a gradient. Printed are PSNR, seconds of a processor and the memory that it took.
"""

from __future__ import annotations

import argparse
from resource import RUSAGE_SELF, getrusage
from time import process_time

import torch
from torch import nn

from rayfed.attacks.closed_form.april import April
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.metrics.images import psnr
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.update import Observation

_CLASSES = 7


def main() -> None:
    """Attack one image and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="vit_b_16")
    parser.add_argument("--head", type=float, default=0.02)
    given = parser.parse_args()
    data = build("datasets", "photos", {"size": 224}).load()
    image, label = torch.from_numpy(data.test_images[:1]).float() / 255, torch.from_numpy(data.test_labels[:1])
    model = build_model("torchvision", {"arch": given.arch}, data.sample, _CLASSES, seed=0)
    nn.init.normal_(model.get_parameter("heads.head.weight"), std=given.head)
    weights, buffers = weights_of(model), buffers_of(model)
    update, _ = gradient(model, weights, buffers, image, label)
    seen = Observation(0, 0, weights, buffers, update, 1.0, 1, data.sample.published(), _CLASSES)
    began = process_time()
    (found,) = April().reconstruct([seen], model, [torch.Generator().manual_seed(0)])
    seconds, memory = process_time() - began, getrusage(RUSAGE_SELF).ru_maxrss / 1e6
    right = "right" if torch.equal(found.labels, label) else "wrong"
    quality = float(psnr(found.images, image)[0])
    print(f"{given.arch}: {found.status} {found.message}")
    print(f"{quality:.1f} dB, label {right}, {seconds:.0f} s, {memory:.1f} GB")


if __name__ == "__main__":
    main()
