"""Define the language model of `finetune_language.yaml`: a small GPT-2 of transformers with random weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def gpt2(image_shape: tuple[int], classes: int, width: int = 64, blocks: int = 2) -> nn.Module:
    """Return a GPT-2 with this number of blocks, for texts (N, L) of `classes` tokens, with logits (N, L, classes).

    It has no dropout and uses "eager" attention, which supports per-sample and second-order gradients.
    """
    from transformers import GPT2Config, GPT2LMHeadModel  # in the extra `hub`

    config = GPT2Config(
        vocab_size=classes, n_positions=image_shape[0], n_embd=width, n_layer=blocks, n_head=2, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.register_forward_hook(_logits)
    return model


def _logits(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits
