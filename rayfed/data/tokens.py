"""Tokenisation of texts by the user's tokeniser, or by byte-pair encoding learnt from the texts.

Source: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units" (byte-level byte-pair
encoding).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfed.core.files import local_path
from rayfed.core.objective import NO_TARGET
from rayfed.errors import DataError, require_extra
from rayfed.samples import MOST_TOKENS, Tokens

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

BYTES = 256
"""Minimum size of a learnt vocabulary."""
_FILE = "tokenizer.json"
_SLOW = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
"""Files of a folder from which transformers builds a tokeniser."""
_SETTINGS = "tokenizer_config.json"
_MASKS = ("[MASK]", "<mask>")
"""Names of the mask token to try if the settings name none."""
_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")
"""Names of the padding token to try if the settings name none; the last two are end-of-text tokens."""


@dataclass(frozen=True)
class TokenReader:
    """Tokeniser with the ids of the padding and mask tokens (None if the tokeniser lacks the token)."""

    tokenizer: Tokenizer
    pad: int | None
    mask: int | None = None

    def sample(self, length: int, padded: bool = True) -> Tokens:
        """Return the description of texts with `length` tokens.

        If `padded` is false, no text has fewer tokens.
        """
        return Tokens(self.pieces(), length, self.pad if padded else None, self.mask, self._special())

    def _special(self) -> tuple[int, ...]:
        added = self.tokenizer.get_added_tokens_decoder()
        return tuple(sorted(number for number, token in added.items() if token.special))

    def whole(self, text: str) -> np.ndarray:
        """Return the tokens (T,) int64 of a text, without special tokens."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def filled(self, texts: Sequence[str], length: int) -> tuple[np.ndarray, int]:
        """Tokenise texts with special tokens, truncated or padded to `length` tokens.

        Returns the tokens (N, length) int64 and the number of truncated texts.
        """
        assert self.pad is not None
        found = self._encoded(texts, length)
        return _rows([one.ids for one in found], length, self.pad), _truncated(found)

    def labelled(
        self, texts: Sequence[Sequence[str]], labels: Sequence[Sequence[int]], length: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Tokenise texts that are given as lists of words, with one label per token.

        Returns the tokens, the labels and the number of truncated texts. Tokens and labels are (N, length) int64. The
        label of a word is at its first token; other positions have `NO_TARGET`.
        """
        assert self.pad is not None
        found = self._encoded(texts, length, is_pretokenized=True)
        targets = []
        for one, own in zip(found, labels, strict=True):
            before = [None, *one.word_ids]
            pairs = zip(one.word_ids, before, strict=False)
            targets.append([NO_TARGET if word is None or word == last else own[word] for word, last in pairs])
        rows = _rows([one.ids for one in found], length, self.pad)
        return rows, _rows(targets, length, NO_TARGET), _truncated(found)

    def _encoded(self, texts: Sequence[Any], length: int, is_pretokenized: bool = False) -> list[Encoding]:
        self.tokenizer.enable_truncation(length)
        try:
            return list(self.tokenizer.encode_batch(list(texts), is_pretokenized=is_pretokenized))
        finally:
            self.tokenizer.no_truncation()

    def pieces(self) -> tuple[str, ...]:
        """Return the text of each token when the token follows another token.

        Most decoders drop a leading space.
        """
        before = self.tokenizer.decode([0], skip_special_tokens=False)
        pieces = []
        for number in range(max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1):
            behind = self.tokenizer.decode([0, number], skip_special_tokens=False)
            alone = self.tokenizer.decode([number], skip_special_tokens=False)
            pieces.append(behind.removeprefix(before) if behind.startswith(before) else alone)
        return tuple(pieces)


def _truncated(found: Sequence[Encoding]) -> int:
    # the number of tokens does not show truncation, as a text may have exactly the maximum length
    return sum(bool(one.overflowing) for one in found)


def _rows(found: Sequence[Sequence[int]], length: int, fill: int) -> np.ndarray:
    """Return lists of numbers as (N, length) int64, padded with `fill`."""
    rows = np.full((len(found), length), fill, np.int64)
    for row, ids in zip(rows, found, strict=True):
        row[: len(ids)] = ids
    return rows


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder, such as a model's, contains a tokeniser."""
    return any((folder / name).is_file() for name in (_FILE, *_SLOW))


def load_tokenizer(path: str | Path) -> TokenReader:
    """Load a tokeniser from a `tokenizer.json` or a folder; raise `DataError` if the tokeniser cannot be read."""
    _require_text()
    from tokenizers import Tokenizer

    found = local_path(path)
    if found.is_dir() and not (found / _FILE).is_file():
        tokenizer = _made(found)
    else:
        file = found / _FILE if found.is_dir() else found
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain `Exception`
            raise DataError(
                f"data.tokenizer: {file} cannot be read: {error}; expected a tokenizer.json of `tokenizers`, or a "
                f"folder with one"
            ) from error
    if tokenizer.get_vocab_size() > MOST_TOKENS:
        raise DataError(
            f"data.tokenizer: {found} has {tokenizer.get_vocab_size()} tokens; use a tokeniser with at most "
            f"{MOST_TOKENS}"
        )
    folder = found if found.is_dir() else None
    pad, mask = _pad(tokenizer, folder), _known(tokenizer, [_told(folder, _SETTINGS, "mask_token"), *_MASKS])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenReader(tokenizer, pad, mask)


def learn_tokens(texts: Sequence[str], size: int, pad: bool = False) -> TokenReader:
    """Learn a byte-pair encoding from texts, with at most `size` tokens including the 256 bytes; deterministic.

    With `pad` the first token is one that fills up texts.
    """
    _require_text()
    import tokenizers

    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[_PADS[0]] if pad else [],
    )
    found.train_from_iterator(texts, trainer)
    return TokenReader(found, 0 if pad else None)


def _require_text() -> None:
    # ROUGE is a default metric of texts: its package is checked before the training
    require_extra("text", "a data set of texts", "tokenizers", "rouge_score")


def _made(folder: Path) -> Tokenizer:
    """Return the tokeniser that transformers builds from a folder without a `tokenizer.json`."""
    if not has_tokenizer(folder):
        raise DataError(f"data.tokenizer: {folder} has no tokenizer: expected {_FILE}, or one of {', '.join(_SLOW)}")
    require_extra("hub", f"the tokenizer of {folder}", "transformers")
    from transformers import AutoTokenizer

    try:
        found: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # transformers passes on any exception of its tokenisers
        said = " ".join(str(error).split())[:300]
        raise DataError(f"data.tokenizer: transformers cannot build the tokenizer of {folder}: {said}") from error
    return found


def _pad(tokenizer: Tokenizer, folder: Path | None) -> int | None:
    """Return the id of the padding token, from the model's or tokeniser's settings; None if there is none."""
    number = _told(folder, "config.json", "pad_token_id")
    if isinstance(number, int):
        return number
    if tokenizer.padding:
        return int(tokenizer.padding["pad_id"])
    return _known(tokenizer, [*(_told(folder, _SETTINGS, key) for key in ("pad_token", "eos_token")), *_PADS])


def _known(tokenizer: Tokenizer, names: Sequence[object]) -> int | None:
    """Return the id of the first of these tokens that a tokeniser has; each is a name or an entry of its settings."""
    named = [one["content"] if isinstance(one, dict) else one for one in names if one is not None]
    numbers = (tokenizer.token_to_id(str(name)) for name in named)
    return next((number for number in numbers if number is not None), None)


def _told(folder: Path | None, name: str, key: str) -> object:
    """Return the value of a key in a folder's JSON file; None if it is missing or invalid."""
    try:
        return None if folder is None else json.loads((folder / name).read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError):
        return None
