"""A soft prompt in front of the tokens of a model: vectors that are trained in place of the model.

Source: Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", section 2; it begins as vectors
of tokens drawn from the vocabulary (section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayfed.errors import UserError

NAME = "soft_prompt"
"""Name of the prompt among a model's parameters."""


def add_prompt(model: nn.Module, tokens: int, shape: tuple[int, ...]) -> frozenset[str]:
    """Put a prompt of so many vectors in front of the tokens of a model, in place, and return its parameter's name.

    The model then answers as one of `peft` with prompt tuning does: a head that reads the first place, as BERT's, reads
    the prompt's, and a decoder's head the last place, of padding or not. `shape` is that of a sample. Raises
    `UserError` for a model that is none of Hugging Face's for texts, or has too few positions.
    """
    from rayfed.models.hugging_face import Attended, places_for_tokens  # torchvision: two seconds

    table = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(table, nn.Embedding):
        raise UserError(
            "model.train.prompt: a prompt stands in front of tokens, and this is no model of texts of Hugging Face "
            "(hf:FOLDER): leave it out"
        )
    most = places_for_tokens(model)
    if most is not None and shape[0] + tokens > most:
        raise UserError(
            f"model.train.prompt: {tokens} vectors and texts of {shape[0]} tokens are more than the model's {most} "
            f"positions: shorten either (data.length)"
        )
    drawn = torch.randint(table.num_embeddings, (tokens,))
    model.register_parameter(NAME, nn.Parameter(table.weight.detach()[drawn].clone()))
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Attended):
            hook.before = tokens
    model.register_forward_pre_hook(_prefix, with_kwargs=True)
    return frozenset([NAME])


def _prefix(model: Any, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Forward pre-hook that hands over vectors, the prompt's first, in place of token numbers."""
    vectors = model.get_input_embeddings()(inputs[0])
    prompt = getattr(model, NAME).expand(len(vectors), -1, -1)
    return (), {**named, "inputs_embeds": torch.cat([prompt, vectors], 1)}
