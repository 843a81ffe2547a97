"""Texts in a table with a text and a class in each row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayfed.data.base import Dataset, Split, at_most, hold_out_fifth
from rayfed.data.files import LABEL_COLUMNS, by_value, read_table
from rayfed.data.tokens import BYTES, Reader, learnt, load_tokenizer
from rayfed.errors import DataError
from rayfed.files import local_path
from rayfed.registry import component
from rayfed.samples import MOST_TOKENS, Modality, Tokens

TEXT_COLUMNS = (
    "text",
    "texts",
    "sentence",
    "content",
    "document",
    "review",
    "comment",
    "message",
    "utterance",
    "tweet",
)
"""Names, in small letters, by which the column of the texts is found."""


@component
class TextTable:
    """Texts of a table's rows, truncated or padded to this many tokens, each with a class.

    Without `test` a stratified fifth of the rows is held out. What fills texts up counts as no token of theirs.
    """

    holds: ClassVar[Modality] = "tokens"

    path: Path
    """A `.csv` or `.tsv` file with names in its first line, or a `.parquet` file; `~` and environment variables are
    expanded."""
    test: Path | None = None
    """Such a file of the test split."""
    text_column: str | None = None
    """Column of the texts; null: `text`, `sentence`, `content`, `review` or alike."""
    label_column: str | None = None
    """Column of the classes, whole numbers or names; null: `label`, `class`, `target`, `category` or alike."""
    length: Annotated[int, Field(ge=2, le=4096)] = 32
    """Number of tokens of a sample, special ones among them."""
    tokenizer: Path | None = None
    """A `tokenizer.json` of the `tokenizers` library, or a folder with a tokenizer. Null takes that of a model `hf`,
    where its folder has one; else byte pairs are learnt from the training texts, always the same ones."""
    vocabulary: Annotated[int, Field(ge=BYTES + 1, le=MOST_TOKENS)] = 1024
    """Tokens to learn, where they are learnt; the model's vocabulary has to be as large."""
    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many training samples: always the same ones, each class in its share. None uses all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many test samples, chosen as those for training. None uses all."""

    def load(self) -> Dataset:
        """Load the data set into memory. Raises `DataError` for missing or broken files, naming file and row."""
        parts = [
            _read(local_path(path), self.text_column, self.label_column) for path in (self.path, self.test) if path
        ]
        classes = by_value({label for _, labels in parts for label in labels})
        if len(classes) < 2:
            raise DataError(f"{self.path} has one class alone, '{classes[0]}': expected two or more")
        number = {name: place for place, name in enumerate(classes)}
        splits = [Split(np.arange(len(texts)), np.array([number[x] for x in labels])) for texts, labels in parts]
        train, test = splits if self.test else hold_out_fifth(splits[0], str(self.path))
        train = at_most(self.train_samples, train, "train_samples")
        test = at_most(self.test_samples, test, "test_samples")
        taken = [_rows(texts, split) for (texts, _), split in ((parts[0], train), (parts[-1], test))]
        reader = self._reader(taken[0])
        rows = [reader.filled(texts, self.length) for texts in taken]
        sample = Tokens(reader.pieces(), self.length, reader.pad)
        return Dataset(rows[0], train.labels, rows[1], test.labels, classes, sample=sample)

    def _reader(self, texts: Sequence[str]) -> Reader:
        if self.tokenizer is None:
            return learnt(texts, self.vocabulary, pad=True)
        reader = load_tokenizer(self.tokenizer)
        if reader.pad is None:
            raise DataError(
                f"data.tokenizer: {self.tokenizer} has no token that fills up texts: expected one called [PAD], or a "
                f"pad_token beside it"
            )
        return reader


def _rows(texts: Sequence[str], split: Split) -> list[str]:
    """Return the texts of a split, whose images are row numbers."""
    assert isinstance(split.images, np.ndarray)
    return [texts[row] for row in split.images.tolist()]


def text_column(names: Sequence[str]) -> str | None:
    """Return the column of texts by its name; None if none or several match."""
    found = [name for name in names if name.lower() in TEXT_COLUMNS]
    return found[0] if len(found) == 1 else None


def _read(path: Path, text: str | None, label: str | None) -> tuple[list[str], list[str]]:
    """Return a table's texts and labels, in order."""
    table = read_table(path)
    labelled = [name for name in table.column_names if name.lower() in LABEL_COLUMNS]
    text = text or text_column(table.column_names)
    label = label or (labelled[0] if len(labelled) == 1 else None)
    columns = []
    for field, name in (("text_column", text), ("label_column", label)):
        if name is None or name not in table.column_names:
            what = f"has no column '{name}'" if name else f"has no plain column for `{field}`"
            raise DataError(f"{path} {what}: name it by data.{field}, of {', '.join(table.column_names)}")
        columns.append(table[name])
    texts, labels = columns
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        raise DataError(f"{path}: column '{text}' is {texts.type}, expected texts")
    if pa.types.is_floating(labels.type) or pa.types.is_nested(labels.type):
        raise DataError(f"{path}: column '{label}' is {labels.type}, expected classes: whole numbers or names")
    written, classes = (column.to_pylist() for column in (texts, labels))
    for row, (one, of) in enumerate(zip(written, classes, strict=True)):
        if not (one or "").strip() or of is None:
            raise DataError(
                f"{path}, row {row} (from 0): {'no label' if (one or '').strip() else 'no text'}; leave it out"
            )
    return [" ".join(one.split()) for one in written], [str(of) for of in classes]
