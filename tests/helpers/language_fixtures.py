"""Helpers for tests of language models: small models of transformers, in folders with a tokenizer."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
import torch
from torch import Tensor, nn

from rayfed.core import losses
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.models.trained import choose
from rayfed.samples import Tokens
from rayfed.update import Observation
from tests.conftest import imported

transformers = imported("transformers", "hub")

PAD, MASK, SPECIAL = 0, 4, (0, 1, 2, 3, 4)
MARKS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
WORDS = tuple(f"w{n}" for n in range(95))
SAMPLE = Tokens((*MARKS, *WORDS), 8, PAD, MASK, SPECIAL)
"""Texts of eight tokens, from a vocabulary of a hundred."""


def config(kind: str, width: int = 64) -> Any:
    sizes = {"vocab_size": len(SAMPLE.vocabulary), "pad_token_id": PAD}
    if kind == "gpt2":
        own = {"n_embd": width, "n_layer": 2, "n_head": 2, "n_positions": 20, "bos_token_id": 1, "eos_token_id": 2}
        return transformers.GPT2Config(**sizes, **own)
    own = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": width, "max_position_embeddings": 20}
    return transformers.BertConfig(**sizes, **own, hidden_size=width)


@lru_cache
def folder(kind: str) -> Path:
    """Make a folder with a causal (`gpt2`) or masked (`bert`) language model and a tokenizer of whole words."""
    found = Path(mkdtemp(prefix=f"{kind}-"))
    torch.manual_seed(0)
    maker = transformers.AutoModelForCausalLM if kind == "gpt2" else transformers.AutoModelForMaskedLM
    maker.from_config(config(kind)).save_pretrained(found)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(SAMPLE.vocabulary)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(MARKS))
    words.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "mask_token": "[MASK]"}))
    return found


def model(kind: str, loss: losses.Loss, classes: int = len(SAMPLE.vocabulary), **parameters: Any) -> nn.Module:
    """Return the folder's model with its loss."""
    built = build_model("hf", {"path": folder(kind), "dropout": 0.0, **parameters}, SAMPLE, classes, seed=0)
    losses.attach_loss(built, loss)
    return built


def language_model(kind: str, seed: int = 0) -> nn.Module:
    """Return a causal GPT-2 or masked BERT language model whose weights are all random."""
    causal = kind == "gpt2"
    loss: losses.Loss = losses.CausalLM() if causal else losses.MaskedLM()
    built = model(kind, loss, task="causal_lm" if causal else "masked_lm")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return built


def texts(count: int, seed: int = 0, short: bool = False) -> tuple[Tensor, Tensor]:
    """Return texts (N, 8) and their tokens as targets. With `short`, some texts are padded."""
    drawn = torch.randint(len(MARKS), len(SAMPLE.vocabulary), (count, 8), generator=torch.Generator().manual_seed(seed))
    if short:
        for row, text in enumerate(drawn):
            text[8 - row % 4 :] = PAD
    return drawn, drawn.masked_fill(drawn == PAD, losses.NO_TARGET)


def observed(built: nn.Module, inputs: Tensor, targets: Tensor, layers: list[str] | None = None) -> Observation:
    """Return a server's observation of one gradient."""
    if layers:
        choose(built, layers)
    weights, buffers = weights_of(built), buffers_of(built)
    update, _ = gradient(built, weights, buffers, inputs, targets)
    return Observation(
        victim=0,
        round=0,
        weights=weights,
        buffers=buffers,
        update=update,
        scale=1.0,
        batch_size=len(inputs),
        sample=SAMPLE,
        classes=len(SAMPLE.vocabulary),
        has_places=True,
    )


def table(path: Path, rows: int = 60, **columns: Any) -> Path:
    """Write a table of texts of three to eight words, without classes."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 9, (rows,), generator=generator).tolist()
    drawn = [" ".join(WORDS[n] for n in torch.randint(95, (size,), generator=generator)) for size in lengths]
    pq.write_table(pa.table({"text": drawn, **columns}), path)
    return path
