"""Recover the last token of texts of causal language models, which affects the gradient only as a target.

The loss does not depend on the input at a text's last position, so no gradient of weights before the outputs contains
it. The gradient of the outputs contains it as the target of the position before. Subtracting the contribution of the
known targets leaves p - y of that position times its vector. This vector is known, because all earlier tokens are. If
the outputs' weights are the embedding table (tied), rows of the text's tokens have further terms. The attack then uses
the token whose whole gradient fits best.

Source: Wainakh et al. 2022, "User-Level Label Leakage from Gradients in Federated Learning", for p - y of a known
vector. The rest is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.attacks.text.products import Entrance, entrances
from rayfed.attacks.text.tokens import table_of
from rayfed.core import losses
from rayfed.core.losses import CausalLM
from rayfed.core.objective import NO_TARGET
from rayfed.gradients import gradient
from rayfed.update import Named, Observation

_TRIED = 4
"""Number of tokens to try in addition to those of the text."""


def is_causal(model: nn.Module) -> bool:
    """Return whether a model is trained for causal language modelling, according to its loss."""
    return isinstance(losses.get_loss(model), CausalLM)


def with_last_tokens(observation: Observation, model: nn.Module, found: Tensor, known: int) -> Tensor:
    """Return texts (N, L) with the token after the first `known` positions recovered, followed by padding.

    Texts are unchanged if there is no such position, or if the update has no output weights.
    """
    length = observation.sample.shape[0]
    outputs = _outputs(observation, model) if 0 < known < length else None
    if outputs is None:
        return found
    texts = found.clone()
    pad = getattr(observation.sample, "pad", None)
    if known + 1 < length and pad is not None:
        texts[:, known + 1 :] = pad
    texts[:, known] = texts[:, known - 1]
    search = _Search(observation, model, outputs, texts, known)
    return search.found()


def _outputs(observation: Observation, model: nn.Module) -> Entrance | None:
    """Return the product with the output weights, or None if the update has none of them."""
    every = reversed(entrances(observation, model))
    return next((one for one in every if one.factors[0].size[1] >= observation.classes), None)


class _Search:
    """Search for the tokens at one position in all texts of a batch."""

    def __init__(
        self, observation: Observation, model: nn.Module, outputs: Entrance, texts: Tensor, place: int
    ) -> None:
        self._observation, self._outputs, self._place = observation, outputs, place
        self._model = without_tracking(model)
        device = next(iter(observation.weights.values())).device
        self._model.to(device)
        self._buffers, self._texts = buffers_for(self._model, observation), texts.to(device)
        table = table_of(model)
        self._tied = table is not None and f"{table[0]}.weight" in outputs.names

    def found(self) -> Tensor:
        """Return the texts with the tokens whose gradient is closest to the observed gradient."""
        before = self._texts[:, : self._place]
        vectors = self._outputs.inputs(self._texts)[:, self._place - 1].double()
        left = {name: seen - own for (name, seen), own in zip(self._seen.items(), self._known.values(), strict=True)}
        shares = torch.linalg.pinv(vectors.T) @ self._outputs.gradient(left).double()
        self._texts[:, self._place] = shares[:, : self._observation.classes].argmin(1)
        if not self._tied:
            return self._texts
        for row, share in enumerate(shares[:, : self._observation.classes]):
            likely = share.topk(min(_TRIED, len(share)), largest=False).indices
            options = torch.cat([likely, before[row]]).unique()
            apart = torch.stack([self._apart(row, token) for token in options])
            self._texts[row, self._place] = options[apart.argmin()]
        return self._texts

    @property
    def _seen(self) -> Named:
        return self._observation.gradient

    @property
    def _known(self) -> Named:
        """Gradient of the targets before the position, weighted as in the whole text."""
        known = self._gradient(self._texts, self._place)
        return {name: known[name] * (self._place - 1) / self._place for name in self._seen}

    def _apart(self, row: int, token: Tensor) -> Tensor:
        """Return the squared distance from the observed gradient if a text has this token."""
        texts = self._texts.clone()
        texts[row, self._place] = token
        own = self._gradient(texts, self._place + 1)
        return torch.stack([(own[name] - seen).square().sum() for name, seen in self._seen.items()]).sum()

    def _gradient(self, texts: Tensor, places: int) -> Named:
        targets = texts.clone()
        targets[:, places:] = NO_TARGET
        return gradient(self._model, self._observation.weights, self._buffers, texts, targets)[0]
