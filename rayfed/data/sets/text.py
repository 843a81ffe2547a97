"""Texts cut into windows of a few tokens, with the author or the folder as the class.

Source of the texts included in rayfed: the Canterbury corpus (Arnold and Bell 1997), from the `brotli` package. It has
about 58 kB each of Carroll, "Alice's Adventures in Wonderland" (1865), Milton, "Paradise Lost" (1667) and Shakespeare,
"As You Like It" (1623), all in the public domain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rayfed.core.files import local_path
from rayfed.data.base import Dataset, StoredSplit, limit_split
from rayfed.data.files import is_left_by_tools, is_sample
from rayfed.data.tokens import BYTES, TokenReader, learn_tokens, load_tokenizer
from rayfed.errors import DataError
from rayfed.registry import component
from rayfed.samples import MOST_TOKENS, Modality

_OWN = Path(__file__).parents[1] / "texts"
_TESTED = 0.2


@component
class Text:
    """Texts cut into consecutive windows of `length` tokens; the last fifth of each file is the test split.

    White space, including line breaks, is replaced by single spaces. Without `tokenizer`, a byte-pair encoding is
    learnt from the training texts (deterministic).
    """

    holds: ClassVar[Modality] = "tokens"

    root: Path | None = None
    """Folder with one folder per class, `CLASS/*.txt` in UTF-8; `~` and environment variables are expanded. Default:
    the three authors included in rayfed."""
    length: Annotated[int, Field(ge=2, le=4096)] = 16
    """Number of tokens per sample."""
    vocabulary: Annotated[int, Field(ge=BYTES, le=MOST_TOKENS)] = 1024
    """Maximum number of tokens to learn, including the 256 bytes. The model's vocabulary must be as large."""
    tokenizer: Path | None = None
    """`tokenizer.json` of the `tokenizers` library, or a folder with a tokeniser, used with its own vocabulary.
    Default: the tokeniser of a model `hf`, if its folder has one, else a learnt encoding."""
    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of training samples to use, a deterministic stratified subset. Default: all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of test samples to use, a deterministic stratified subset. Default: all."""

    @property
    def is_public(self) -> bool:
        """Return whether the texts are public, which is true for the authors included in rayfed."""
        return self.root is None

    def load(self) -> Dataset:
        """Load the data set into memory; raise `DataError` for missing, broken or too short files."""
        texts = _texts(_OWN if self.root is None else local_path(self.root))
        cut = {name: [_halves(text) for text in of_class] for name, of_class in texts.items()}
        reader = self._reader([train for pairs in cut.values() for train, _ in pairs])
        train, test = (
            self._windows(reader, {name: [pair[half] for pair in pairs] for name, pairs in cut.items()}, split)
            for half, split in enumerate(("training", "test"))
        )
        train = limit_split(self.train_samples, train, "train_samples")
        test = limit_split(self.test_samples, test, "test_samples")
        assert isinstance(train.images, np.ndarray)
        assert isinstance(test.images, np.ndarray)
        sample = reader.sample(self.length, padded=False)
        return Dataset(train.images, train.labels, test.images, test.labels, tuple(texts), sample=sample)

    def _reader(self, texts: list[str]) -> TokenReader:
        return learn_tokens(texts, self.vocabulary) if self.tokenizer is None else load_tokenizer(self.tokenizer)

    def _windows(self, reader: TokenReader, texts: dict[str, list[str]], split: str) -> StoredSplit:
        """Return all windows of a split: token ids (N, length) int64 and labels (N,)."""
        windows: list[np.ndarray] = []
        for name, of_class in texts.items():
            encoded = (reader.whole(text) for text in of_class)
            whole = [ids[: len(ids) // self.length * self.length].reshape(-1, self.length) for ids in encoded]
            windows.append(np.concatenate(whole))
            if not len(windows[-1]):
                raise DataError(f"class '{name}' has no {split} text of {self.length} tokens: lower data.length")
        labels = np.repeat(np.arange(len(windows)), [len(rows) for rows in windows])
        return StoredSplit(np.concatenate(windows), labels)


def _texts(root: Path) -> dict[str, list[str]]:
    """Return the texts of each class, with classes and files sorted by name."""
    if not root.is_dir():
        raise DataError(f"data.root: {root} is not a folder; expected a folder with CLASS/*.txt")
    classes = sorted(path for path in root.iterdir() if path.is_dir() and not is_left_by_tools(path))
    if len(classes) < 2:
        raise DataError(
            f"data.root: {root} has {len(classes)} class folders; expected at least two, such as {root}/CLASS/*.txt"
        )
    found = {}
    for folder in classes:
        paths = sorted(path for path in folder.glob("*.txt") if is_sample(path, root))
        if not paths:
            raise DataError(f"{folder} has no text; expected files with the extension .txt")
        found[folder.name] = [_read(path) for path in paths]
    return found


def _read(path: Path) -> str:
    try:
        return " ".join(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; expected a text in UTF-8") from error


def _halves(text: str) -> tuple[str, str]:
    """Return the training and the test part of a text, split at a space."""
    place = text.rfind(" ", 0, round(len(text) * (1 - _TESTED)) + 1)
    return (text, "") if place < 0 else (text[:place], text[place:])
