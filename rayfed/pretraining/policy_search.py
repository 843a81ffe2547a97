"""Search for a policy of image transformations for the defence `ats`.

Random policies are scored on public data, without training a model for each. The privacy score measures how well a
gradient guides an attacker. It is the mean cosine between the gradients of the transformed image and of points on a
path from noise to it, at a half-trained model. A low score is private. The accuracy score measures whether an untrained
model distinguishes the transformed images. It uses the eigenvalues of the correlations between the model's derivatives
at the images. A high score is accurate.

Sources: Gao et al. 2021, "Privacy-preserving Collaborative Learning with Automatic Transformation Search", section 4;
Mellor et al. 2021, "Neural Architecture Search without Training", first version, for the accuracy score. Ours: the
accuracy score is a mean over eigenvalues instead of a sum, so it does not depend on the number of images. The required
score is relative to that of untransformed images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rayfed.attacks.forward_probe import without_tracking
from rayfed.core import seeds
from rayfed.core.documents import dump_yaml
from rayfed.data.base import load_in_memory
from rayfed.defences.ats import Ats
from rayfed.defences.base import Batch, Task
from rayfed.defences.transformations import NAMES
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, many_gradients, sample_rows, weights_of
from rayfed.scenario import Scenario, Training, resolve
from rayfed.simulation.client.arm import build_arm
from rayfed.simulation.client.local import update_method
from rayfed.update import Named

_LONGEST = 3
"""Maximum number of transformations in a policy."""
_PATH = 10
"""Number of points on the path from noise to an image, excluding the image."""
_CORRELATED = 60
"""Number of images whose derivatives are correlated at once."""
_BATCHES = 5
"""Number of such batches of images."""
_JITTER = 1e-5
"""Number added to eigenvalues, which may be 0."""

Progress = Callable[[int, int], None]
"""(policies scored, total policies)"""


@dataclass(frozen=True)
class ScoredPolicy:
    """Policy of image transformations with its privacy and accuracy scores."""

    policy: str
    privacy: float
    """Mean cosine along the path from noise, in [-1, 1]. Lower is better."""
    accuracy: float
    """Accuracy score. Higher is better. The maximum -1 means that an untrained model fully distinguishes the images."""


@dataclass(frozen=True)
class Examiner:
    """Scorer of transformation policies on fixed images, noise and models, so that scores are comparable."""

    model: nn.Module
    """Model as an attacker runs it."""
    buffers: Named
    untrained: Named
    trained: Named
    """Weights before and after half training."""
    images: Tensor
    """(M, C, H, W), at least `_BATCHES` times `_CORRELATED` images."""
    labels: Tensor
    """(M,)"""
    attacked: int
    """Number of images for the privacy score."""
    seed: int

    def score(self, policy: str | None) -> ScoredPolicy:
        """Return the scores of a transformation policy, or of the untransformed images if `policy` is None."""
        images = self.images
        if policy is not None:
            images = Ats(policy=policy).transformed(images, seeds.torch_generator(self.seed, "transform"))
        return ScoredPolicy(policy or "", self.privacy(images[: self.attacked]), self.accuracy(images))

    def privacy(self, images: Tensor) -> float:
        """Return the privacy score: mean cosine between gradients at images and on paths from noise to the images."""
        generator = seeds.torch_generator(self.seed, "noise")
        steps = torch.arange(_PATH + 1) / _PATH
        found = []
        for image, label in zip(images, self.labels, strict=False):
            noise = torch.rand(image.shape, generator=generator)
            way = torch.stack([noise.lerp(image, float(step)) for step in steps])[:, None]
            gradients = many_gradients(self.model, self.trained, self.buffers, way, label.expand(len(way), 1))
            rows = sample_rows(gradients)
            cosines = torch.cosine_similarity(rows, rows[-1:])
            found.append(torch.trapezoid(cosines, steps))
        return float(torch.stack(found).mean())

    def accuracy(self, images: Tensor) -> float:
        """Return the accuracy score: minus the mean of log v + 1 / v over the Jacobian's correlation eigenvalues v."""
        scores = []
        for batch in images[: _BATCHES * _CORRELATED].split(_CORRELATED):
            batch = batch.detach().requires_grad_()
            logits = functional_call(self.model, {**self.untrained, **self.buffers}, (batch,))
            (slopes,) = torch.autograd.grad(logits.sum(), batch)
            values = torch.linalg.eigvalsh(torch.corrcoef(slopes.flatten(1).double())) + _JITTER
            scores.append(-(values.log() + 1 / values).mean())
        return float(torch.stack(scores).nanmean())


def search(
    scenario: Scenario,
    *,
    candidates: int,
    images: int,
    epochs: int,
    tolerance: float,
    seed: int,
    progress: Progress = lambda *_: None,
) -> tuple[list[ScoredPolicy], ScoredPolicy]:
    """Return the policies of sufficient accuracy score, most private first, and the untransformed images' scores.

    A policy is accepted if its accuracy score is at most the share `tolerance` below that of the untransformed images.
    Raises `UserError` if there are too few public images, or if no policy is accepted.
    """
    examiner = examiner_of(scenario, images, epochs, seed)
    plain = examiner.score(None)
    scored = []
    for index, policy in enumerate(random_policies(candidates, seed), start=1):
        scored.append(examiner.score(policy))
        progress(index, candidates)
    passing = [found for found in scored if found.accuracy >= plain.accuracy * (1 + tolerance)]
    if not passing:
        raise UserError(
            f"none of {candidates} policies reaches the required accuracy score of "
            f"{plain.accuracy * (1 + tolerance):.3g} (best: {max(found.accuracy for found in scored):.3g}); "
            f"raise --tolerance or --candidates"
        )
    return sorted(passing, key=lambda found: found.privacy), plain


def examiner_of(scenario: Scenario, images: int, epochs: int, seed: int) -> Examiner:
    """Return an examiner with the scenario's model, untrained and trained for `epochs` on public images."""
    data, needed = scenario.data.load(), max(images, _BATCHES * _CORRELATED)
    if data.public_images is None or len(data.public_images) < needed:
        found = 0 if data.public_images is None else len(data.public_images)
        raise UserError(
            f"data.public: the search needs at least {needed} images that no client owns, but there are {found}; "
            f"set a larger share of the training samples aside, for example `public: 0.3`"
        )
    assert data.public_labels is not None
    pixels = data.sample.tensor(load_in_memory(data.public_images))
    labels = torch.from_numpy(data.public_labels)
    bare = replace(next(iter(resolve(scenario).values())), model=scenario.model, defences=[])
    net = build_arm(bare, data.sample, len(data.classes), scenario.seed).model
    task = Task(0, 0, net, weights_of(net), buffers_of(net), Batch(pixels, labels), torch.Generator(), order=seed)
    settings = scenario.training.model_dump() | {"algorithm": "fedavg", "epochs": epochs, "steps": None}
    update = update_method(Training(**settings), ())(task)
    trained = {name: w - update.tensors[name] for name, w in task.weights.items()}
    order = torch.randperm(len(labels), generator=seeds.torch_generator(seed, "images"))[:needed]
    model = without_tracking(net).eval()
    with torch.no_grad():
        logits = functional_call(model, {**trained, **buffers_of(model)}, (pixels,))
    right = float((logits.argmax(1) == labels).float().mean())
    if right < 2 / len(data.classes):
        raise UserError(
            f"after {epochs} epochs on the public images, the model classifies only {right:.0%} of the images "
            f"correctly, too few to score policies; change training.lr, or raise --epochs"
        )
    return Examiner(
        model=model,
        buffers=buffers_of(model),
        untrained=task.weights,
        trained=trained,
        images=pixels[order],
        labels=labels[order],
        attacked=images,
        seed=seed,
    )


def random_policies(count: int, seed: int) -> list[str]:
    """Return distinct random policies of one to three image transformations."""
    draw = seeds.numpy_generator(seed, "policies")
    found: dict[str, None] = {}
    while len(found) < count:
        numbers = draw.integers(len(NAMES), size=draw.integers(1, _LONGEST, endpoint=True))
        found["-".join(map(str, numbers))] = None
    return list(found)


def write(path: Path, found: Sequence[ScoredPolicy], plain: ScoredPolicy) -> str:
    """Write the best policy, or a hybrid of the best policies, as a scenario's `defences`. Returns the policy."""
    policy = "+".join(scored.policy for scored in found)
    lines = [f"# {s.policy}: privacy score {s.privacy:.3f}, accuracy score {s.accuracy:.3f}" for s in found]
    lines.append(f"# untransformed images: privacy score {plain.privacy:.3f}, accuracy score {plain.accuracy:.3f}")
    text = dump_yaml({"defences": [{"name": "ats", "policy": policy}]})
    try:
        path.write_text("\n".join([*lines, text]), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from error
    return policy
