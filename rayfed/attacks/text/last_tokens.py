"""Tokens that a causal language model reads last: its gradient shows them as targets alone.

Nothing that a loss is of depends on what enters at a text's last place, so no gradient of a weight in front of the
outputs has it. As the target of the place before it is in the gradient of the outputs: taken off what the known targets
give, p - y of that place is left, times its vector, which is known, as all tokens before it are. Where the outputs'
weights are the table of tokens, the rows of the text's own tokens hold more than that, and the token whose whole
gradient fits best is taken.

Source: Wainakh et al. 2022, "User-Level Label Leakage from Gradients in Federated Learning", for p - y of a known
vector; the rest is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed import losses
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.attacks.text.products import Entrance, entrances
from rayfed.attacks.text.tokens import table_of
from rayfed.gradients import gradient
from rayfed.losses import CausalLM
from rayfed.objective import NO_TARGET
from rayfed.update import Named, Observation

_TRIED = 4
"""Tokens that are tried beside the text's own."""


def is_causal(model: nn.Module) -> bool:
    """Return whether a model's loss is that of causal language modelling."""
    return isinstance(losses.of(model), CausalLM)


def with_last_tokens(observation: Observation, model: nn.Module, found: Tensor, known: int) -> Tensor:
    """Return texts (N, L), of which the first places are `known`, with the token behind these; padding follows.

    They stay as they are where there is no such place, and where no weights of the outputs are in the update.
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
    """Return the weights that give the outputs; None if the update has none of them."""
    every = reversed(entrances(observation, model))
    return next((one for one in every if one.factors[0].size[1] >= observation.classes), None)


class _Search:
    """Search for the tokens at one place of all texts of a batch."""

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
        """Return the texts with the tokens whose gradient is nearest to the observed one."""
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
        """Gradient of the targets before the place, with the weights that they have in the whole."""
        known = self._gradient(self._texts, self._place)
        return {name: known[name] * (self._place - 1) / self._place for name in self._seen}

    def _apart(self, row: int, token: Tensor) -> Tensor:
        """Return the squared distance from the observed gradient with this token in a text."""
        texts = self._texts.clone()
        texts[row, self._place] = token
        own = self._gradient(texts, self._place + 1)
        return torch.stack([(own[name] - seen).square().sum() for name, seen in self._seen.items()]).sum()

    def _gradient(self, texts: Tensor, places: int) -> Named:
        targets = texts.clone()
        targets[:, places:] = NO_TARGET
        return gradient(self._model, self._observation.weights, self._buffers, texts, targets)[0]
