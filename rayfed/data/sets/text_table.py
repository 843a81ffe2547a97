"""Texts in a table with one text and class per row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayfed.core.files import local_path
from rayfed.data.base import Dataset, StoredSplit, hold_out_fifth, limit_split
from rayfed.data.files import LABEL_COLUMNS, sort_class_names
from rayfed.data.tables import Read, read_table
from rayfed.data.tokens import BYTES, TokenReader, learn_tokens, load_tokenizer
from rayfed.errors import DataError
from rayfed.registry import component
from rayfed.samples import MOST_TOKENS, Modality

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
"""Names (lower case) that identify the column of texts."""
NO_CLASS = "text"
"""Name of the single class of texts without classes."""


@component
class TextTable:
    """Texts of a table's rows, truncated or padded to `length` tokens, each with a class.

    Without `test` a stratified fifth of the rows is held out. Padding is not part of a text. Language models need no
    column of classes. For token classification, use lists of words and lists of as many classes; the class of a word
    is assigned to its first token.
    """

    holds: ClassVar[Modality] = "tokens"

    path: Path
    """Separated text, such as `.csv`, `.tsv` or `.csv.gz`, or a `.parquet` file; `~` and environment variables are
    expanded. Without a header row, columns are named `column_1` and so on."""
    test: Path | None = None
    """File of the test split, with the same columns."""
    text_column: str | None = None
    """Column of texts, or of lists of words. Default: `text`, `sentence`, `content`, `review` or similar."""
    label_column: str | None = None
    """Column of classes (whole numbers or names), or of lists of classes. Default: `label`, `class`, `target`,
    `category` or similar, if there is one."""
    length: Annotated[int, Field(ge=2, le=4096)] = 32
    """Number of tokens per sample, including special tokens."""
    tokenizer: Path | None = None
    """`tokenizer.json` of the `tokenizers` library, or a folder with a tokeniser. Default: the tokeniser of a model
    `hf`, if its folder has one, else a byte-pair encoding learnt from the training texts (deterministic)."""
    vocabulary: Annotated[int, Field(ge=BYTES + 1, le=MOST_TOKENS)] = 1024
    """Maximum number of tokens to learn; the model's vocabulary must be as large."""
    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of training samples to use, a deterministic stratified subset. Default: all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of test samples to use, a deterministic stratified subset. Default: all."""

    def load(self) -> Dataset:
        """Load the data set into memory; raise `DataError`, naming file and row, for missing or broken files."""
        paths = [local_path(path) for path in (self.path, self.test) if path]
        read = [read_table(path) for path in paths]
        parts = [
            _columns(path, found, self.text_column, self.label_column) for path, found in zip(paths, read, strict=True)
        ]
        in_words = isinstance(parts[0][0][0], list)
        if any(isinstance(texts[0], list) != in_words for texts, _ in parts):
            raise DataError(
                f"{self.path} and {self.test}: one file has texts, the other lists of words; use the same form in both "
                "files"
            )
        every = {label for _, labels in parts for own in labels for label in (own if in_words else [own])}
        classes = sort_class_names(every)
        if len(classes) < 2 and every != {NO_CLASS}:
            raise DataError(f"{self.path} has only one class, '{classes[0]}': expected at least two")
        number = {name: place for place, name in enumerate(classes)}
        splits = [
            StoredSplit(np.arange(len(texts)), np.array([0 if in_words else number[x] for x in labels]))
            for texts, labels in parts
        ]
        train, test = splits if self.test else hold_out_fifth(splits[0], str(self.path))
        train = limit_split(self.train_samples, train, "train_samples")
        test = limit_split(self.test_samples, test, "test_samples")
        halves = ((parts[0], train), (parts[-1], test))
        taken = [_rows(texts, split) for (texts, _), split in halves]
        reader = self._reader([" ".join(words) for words in taken[0]] if in_words else taken[0])
        sample = reader.sample(self.length)
        if in_words:
            own = [[[number[x] for x in row] for row in _rows(labels, split)] for (_, labels), split in halves]
            (rows, labels, cut), (test_rows, test_labels, test_cut) = (
                reader.labelled(texts, mine, self.length) for texts, mine in zip(taken, own, strict=True)
            )
        else:
            (rows, cut), (test_rows, test_cut) = (reader.filled(texts, self.length) for texts in taken)
            labels, test_labels = train.labels, test.labels
        layouts = dict.fromkeys(note for found in read for note in found.notes)
        remarks = (*layouts, *self._remarks(cut + test_cut, len(rows) + len(test_rows)))
        return Dataset(
            rows, labels, test_rows, test_labels, classes, sample=sample, remarks=remarks, has_places=in_words
        )

    def _remarks(self, cut: int, texts: int) -> tuple[str, ...]:
        """Return the note on truncated texts, whose remaining tokens are not trained on and cannot leak."""
        if not cut:
            return ()
        return (
            f"data: {cut:,} of {texts:,} texts are truncated to {self.length} tokens: the rest of each text is not "
            "used for training and not attacked; set data.length to change the limit",
        )

    def _reader(self, texts: Sequence[str]) -> TokenReader:
        if self.tokenizer is None:
            return learn_tokens(texts, self.vocabulary, pad=True)
        reader = load_tokenizer(self.tokenizer)
        if reader.pad is None:
            raise DataError(
                f"data.tokenizer: {self.tokenizer} has no padding token: expected a token named [PAD], or a pad_token "
                f"in its tokenizer_config.json"
            )
        return reader


def _rows(texts: Sequence[Any], split: StoredSplit) -> list[Any]:
    """Return the texts or labels of a split; `split.images` contains its row numbers."""
    assert isinstance(split.images, np.ndarray)
    return [texts[row] for row in split.images.tolist()]


def text_column(names: Sequence[str]) -> str | None:
    """Return the name of the column of texts, by typical names; None if no column or several columns match."""
    found = [name for name in names if name.lower() in TEXT_COLUMNS]
    return found[0] if len(found) == 1 else None


def _columns(path: Path, found: Read, text: str | None, label: str | None) -> tuple[list[Any], list[Any]]:
    """Return a table's texts and labels, in order; for lists of words, lists of words and of classes."""
    table = found.table
    if not table.num_rows:
        raise DataError(f"{path} has no rows; expected one row per text")
    labelled = [name for name in table.column_names if name.lower() in LABEL_COLUMNS]
    text = text.strip() if text else text_column(table.column_names)
    if label is None and len(labelled) == 1:
        label = labelled[0]
    label = label.strip() if label else None
    fields = [("text_column", text)] + ([("label_column", label)] if label or labelled else [])
    for field, name in fields:
        if name is None or name not in table.column_names:
            what = f"has no column '{name}'" if name else f"has no unique column for `{field}`"
            what += " and no header row" * (not found.has_header)
            raise DataError(f"{path} {what}: set data.{field} to one of {', '.join(table.column_names)}")
    assert text is not None
    if label is not None and pa.types.is_list(table[text].type):
        return _words(path, table, text, label)
    if not (pa.types.is_string(table[text].type) or pa.types.is_large_string(table[text].type)):
        raise DataError(f"{path}: column '{text}' is {table[text].type}, expected texts")
    if label is not None and (pa.types.is_floating(table[label].type) or pa.types.is_nested(table[label].type)):
        raise DataError(f"{path}: column '{label}' is {table[label].type}, expected classes: whole numbers or names")
    written = table[text].to_pylist()
    classes = [NO_CLASS] * len(written) if label is None else table[label].to_pylist()
    for row, (one, of) in enumerate(zip(written, classes, strict=True)):
        if not (one or "").strip() or of is None:
            raise DataError(
                f"{path}, row {row} (from 0): {'no label' if (one or '').strip() else 'no text'}; remove the row"
            )
    return [" ".join(one.split()) for one in written], [str(of) for of in classes]


def _words(path: Path, table: pa.Table, text: str, label: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return lists of words and of their classes."""
    for name, kind in ((text, "words"), (label, "classes: whole numbers or names")):
        of = table[name].type
        if not pa.types.is_list(of) or pa.types.is_floating(of.value_type) or pa.types.is_nested(of.value_type):
            raise DataError(f"{path}: column '{name}' is {of}, expected lists of {kind}")
    texts, labels = table[text].to_pylist(), table[label].to_pylist()
    for row, (words, own) in enumerate(zip(texts, labels, strict=True)):
        if not words or not own or len(words) != len(own) or None in words or None in own:
            raise DataError(
                f"{path}, row {row} (from 0): {len(words or [])} words and {len(own or [])} classes, expected one "
                f"class per word, without missing values"
            )
    return [[str(word) for word in words] for words in texts], [[str(of) for of in own] for own in labels]
