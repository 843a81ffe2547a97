"""TAG: fit the vectors of a text's tokens to the gradient, and return the tokens with the nearest vectors.

Source: Deng et al. 2021, "TAG: Gradient Attack on Transformer-based Language Models", equation 5 and algorithm 1. Ours:
the vectors start at those of random tokens and stay within the bounds of the table. If the update has the table's
gradient, only tokens whose rows have a gradient are returned (`embedding_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.groups import in_groups
from rayfed.attacks.inference.labels import fits_labels
from rayfed.attacks.matching.adam import Descent, adam
from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.text.tokens import table_of, texts, tokens_in
from rayfed.models.copying import copy_model
from rayfed.registry import component
from rayfed.samples import Modality, Pixels
from rayfed.update import Named, Observation

_NO_TABLE = "the attack fits the vectors of an embedding layer, but the model has no embedding layer"


class Vectors(nn.Module):
    """Substitute for an embedding table: ignores the tokens and returns the vectors set last."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.held: Tensor | None = None

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the vectors set last, (N, L, width), for any token numbers."""
        assert self.held is not None
        return self.held


@component
class Tag:
    """Recover tokens by fitting their vectors to the gradient: Adam on squared L2 plus `alpha` times L1 distance.

    Labels are granted or inferred.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("tokens",)
    place_labels: ClassVar[str] = "given"

    iterations: Annotated[int, Field(ge=1)] = 500
    """Number of Adam steps. The step size falls linearly to zero."""
    lr: Annotated[float, Field(gt=0)] = 0.05
    """Initial step size, relative to the table's range."""
    alpha: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the L1 distance between gradients."""
    restarts: Annotated[int, Field(ge=1)] = 1
    """Number of random starts. The one with the smallest objective is used."""

    @fits_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        table = table_of(model)
        if table is None:
            return [not_applicable(observation, _NO_TABLE, inherent=True) for observation in observations]
        return in_groups(
            lambda group, drawn: self._group(group, model, f"{table[0]}.weight", drawn), observations, generators
        )

    def _group(
        self, group: Sequence[Observation], model: nn.Module, name: str, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        vectors = _state(group[0])[name]
        low, high = vectors.aminmax(dim=0)
        problem = self._problem(group, on_vectors(model, name.removesuffix(".weight"), low, high), name)
        options = [_options(observation, name, len(vectors)) for observation in group]
        starts = [
            ((vectors[o[torch.randint(len(o), (self.restarts, *self._shape(seen)), generator=g)]] - low) / (high - low))
            for o, seen, g in zip(options, group, generators, strict=True)
        ]
        owners = torch.arange(len(group), device=vectors.device).repeat_interleave(self.restarts)
        descent = adam(
            problem.objective(owners),
            problem.begun(torch.cat(starts).flatten(1), owners),
            [self.lr * (1 - i / self.iterations) for i in range(self.iterations)],
            boxed=problem.pixels,
        )
        labels = problem.hard_labels(descent.best, owners).cpu()
        return [self._read(seen, descent, i, options[i], vectors, labels) for i, seen in enumerate(group)]

    def _problem(self, group: Sequence[Observation], model: nn.Module, name: str) -> Matching:
        """Return the problem of matching all gradients except the table's, over vectors instead of tokens."""
        seen = [
            replace(
                observation,
                weights=_without(observation.weights, name),
                update=_without(observation.update, name),
                buffers=_without(observation.buffers, name),
                sample=Pixels(1, observation.sample.shape[0], _state(observation)[name].shape[1]),
            )
            for observation in group
        ]
        return Matching.of(seen, model, None, partial(_distance, self.alpha))

    def _read(
        self, seen: Observation, descent: Descent, place: int, options: Tensor, vectors: Tensor, labels: Tensor
    ) -> Reconstruction:
        """Return the best restart of one observation as tokens. `labels` (P, N) are those of all restarts."""
        low, high = vectors.aminmax(dim=0)
        rows = slice(place * self.restarts, (place + 1) * self.restarts)
        best = int(descent.best_values[rows].argmin())
        points = descent.best[rows][best][: seen.batch_size * low.numel() * seen.sample.shape[0]].reshape(-1, len(low))
        apart = torch.cdist(low + (high - low) * points, vectors[options])
        finite = bool(descent.last_values[rows][best].isfinite())
        return Reconstruction(
            images=texts(options[apart.argmin(1)], seen),
            labels=labels[rows][best],
            loss=float(descent.best_values[rows][best]),
            trace=[(i, values[rows][best].item()) for i, values in descent.trace],
            iterations=descent.iterations,
            status="ok" if finite else "diverged",
            message="" if finite else "the objective became NaN or infinite; the text is the best before that step",
        )

    @staticmethod
    def _shape(observation: Observation) -> tuple[int, int]:
        return observation.batch_size, observation.sample.shape[0]


def on_vectors(model: nn.Module, table: str, low: Tensor, high: Tensor) -> nn.Module:
    """Return a model copy with token vectors (N, 1, L, width) as inputs, scaled to 0 at `low` and 1 at `high`."""
    model = copy_model(model)
    replaced = model.get_submodule(table)
    assert isinstance(replaced, nn.Embedding)
    model.set_submodule(table, Vectors(replaced))
    model.register_forward_pre_hook(partial(_hand_over, table, low, high), prepend=True)
    return model


def _hand_over(
    table: str, low: Tensor, high: Tensor, model: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Set the vectors of the substitute table, and pass the model a text of the same length."""
    [points] = inputs
    held = model.get_submodule(table)
    assert isinstance(held, Vectors)
    held.held = low + (high - low) * points.squeeze(1)
    return (torch.zeros(len(points), points.shape[2], dtype=torch.int64, device=points.device),)


def _distance(alpha: float, gradients: Named, targets: Named) -> Tensor:
    """Return TAG's equation 5 over all layers, (Q,)."""
    apart = [(g - targets[name]).abs().reshape(len(g), -1).sum(1) for name, g in gradients.items()]
    return squared_l2(gradients, targets) + alpha * torch.stack(apart).sum(0)


def _options(observation: Observation, name: str, vocabulary: int) -> Tensor:
    """Return the tokens whose rows have a gradient, or all tokens if that is unknown."""
    if name not in observation.update:
        return torch.arange(vocabulary, device=next(iter(observation.weights.values())).device)
    return tokens_in(observation.gradient[name], observation.batch_size * observation.sample.shape[0])


def _state(observation: Observation) -> Named:
    return {**observation.weights, **observation.buffers}


def _without(tensors: Named, name: str) -> Named:
    return {key: t for key, t in tensors.items() if key != name}
