"""Soft prompts: trainable vectors before the tokens of a frozen model.

Source: Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", section 2. The prompt is
initialised with the vectors of random tokens of the vocabulary (section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayfed.errors import UserError

NAME = "soft_prompt"
"""Name of the soft prompt among a model's parameters."""


def add_prompt(model: nn.Module, tokens: int, shape: tuple[int, ...]) -> frozenset[str]:
    """Add a soft prompt of `tokens` trainable vectors to a text model, in place.

    Returns the name of the prompt's parameter. The outputs are those of prompt tuning in `peft`. A head that reads the
    first position, as in BERT, reads the prompt's first vector. A decoder's head reads the last position, even if that
    is padding. `shape` is the shape of a sample. Raises `UserError` for a model that is not a Hugging Face text model,
    or has too few positions.
    """
    from rayfed.models.hugging_face import Attended, places_for_tokens  # imports torchvision, which takes two seconds

    table = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(table, nn.Embedding):
        raise UserError(
            "model.train.prompt: a prompt needs a text model of Hugging Face (hf:FOLDER), but this is another kind of "
            "model: remove the prompt or change the model"
        )
    most = places_for_tokens(model)
    if most is not None and shape[0] + tokens > most:
        raise UserError(
            f"model.train.prompt: {tokens} vectors and texts of {shape[0]} tokens exceed the model's {most} "
            f"positions: shorten the prompt, or the texts with data.length"
        )
    drawn = torch.randint(table.num_embeddings, (tokens,))
    model.register_parameter(NAME, nn.Parameter(table.weight.detach()[drawn].clone()))
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Attended):
            hook.before = tokens
    model.register_forward_pre_hook(_prefix, with_kwargs=True)
    return frozenset([NAME])


def _prefix(model: Any, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Replace token numbers by vectors, with the prompt's vectors first, as a forward pre-hook."""
    vectors = model.get_input_embeddings()(inputs[0])
    prompt = getattr(model, NAME).expand(len(vectors), -1, -1)
    return (), {**named, "inputs_embeds": torch.cat([prompt, vectors], 1)}
