"""Texts in tables: columns, lengths, tokenizers, and that what fills texts up counts in no metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch

from rayfed import scenario as scenarios
from rayfed.data.base import Dataset
from rayfed.data.section import UserData
from rayfed.data.sets.text_table import TextTable
from rayfed.errors import DataError, UserError
from rayfed.metrics.guessing import Others
from rayfed.metrics.score import Scorer
from rayfed.samples import Tokens

ROWS = {
    "text": [f"{w} sat on the {p}" for w in ("a cat", "the dog", "one of us") for p in ("mat", "red sofa")] * 2,
    "label": [0, 1] * 6,
}


def table(folder: Path, name: str = "t.parquet", **columns: Any) -> Path:
    content = pa.table(columns or ROWS)
    if name.endswith(".parquet"):
        pq.write_table(content, folder / name)
    else:
        pa.csv.write_csv(content, folder / name)
    return folder / name


def words(folder: Path) -> Path:
    """A tokenizer of whole words with marks around each text, as BERT has it."""
    every = sorted({word for text in ROWS["text"] for word in str(text).split()})
    numbers = {word: place for place, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *every])}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [("[CLS]", 1), ("[SEP]", 2)]
    found.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=marks)
    found.save(str(folder / "tokenizer.json"))
    return folder


def load(path: Path, **parameters: Any) -> Dataset:
    return TextTable(path=path, **parameters).load()


@pytest.mark.parametrize(("length", "cut"), [(7, 12), (8, 8), (9, 2), (10, 0)])
@pytest.mark.parametrize("in_words", [False, True])
def test_texts_that_are_cut_are_counted(tmp_path: Path, length: int, cut: int, in_words: bool) -> None:
    texts = [str(text).split() for text in ROWS["text"]]
    columns = {"text": texts, "label": [[len(word) for word in text] for text in texts]} if in_words else {}
    remarks = load(table(tmp_path, **columns), length=length, tokenizer=words(tmp_path)).remarks
    assert [remark.partition(" texts are truncated")[0] for remark in remarks] == [f"data: {cut} of 12"] * (cut > 0)


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.tsv"])
def test_rows_become_texts_of_one_length(tmp_path: Path, name: str) -> None:
    if name == "t.tsv":
        lines = [f"{text}\t{label}" for text, label in zip(*ROWS.values(), strict=True)]
        (tmp_path / name).write_text("\n".join(["text\tlabel", *lines]))
    path = tmp_path / name if name == "t.tsv" else table(tmp_path, name)
    data = load(path, length=7, tokenizer=words(tmp_path))
    assert (data.train_images.shape, data.test_images.shape, data.classes) == ((10, 7), (2, 7), ("0", "1"))
    assert isinstance(data.sample, Tokens)
    assert data.sample.pad == 0
    texts = ["".join(row) for row in data.sample.read(torch.from_numpy(np.asarray(data.train_images)))]
    assert any("cat sat on the" in text for text in texts)
    marked = np.asarray(data.train_images)
    assert (marked[:, 0] == 1).all()
    assert all(2 in row for row in marked.tolist())  # cut texts keep their end
    wide = load(path, length=12, tokenizer=tmp_path / "tokenizer.json")
    assert (np.asarray(wide.train_images)[:, 10:] == 0).all()


def test_without_a_tokenizer_byte_pairs_are_learnt(tmp_path: Path) -> None:
    data = load(table(tmp_path), length=40, vocabulary=300)
    assert isinstance(data.sample, Tokens)
    assert data.sample.vocabulary[0] in ("[PAD]", "")
    row = np.asarray(data.train_images)[0]
    found = "".join(data.sample.vocabulary[token] for token in row if token != data.sample.pad)
    assert found.strip() in ROWS["text"]
    again = load(table(tmp_path), length=40, vocabulary=300)
    assert np.array_equal(np.asarray(again.train_images), np.asarray(data.train_images))


def test_a_test_split_of_its_own_and_names_of_classes(tmp_path: Path) -> None:
    train = table(tmp_path, "a.parquet", sentence=["one", "two", "three"], category=["yes", "no", "yes"])
    test = table(tmp_path, "b.parquet", sentence=["four"], category=["perhaps"])
    data = load(train, test=test, vocabulary=260)
    assert data.classes == ("no", "perhaps", "yes")
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == ([2, 0, 2], [1])


@pytest.mark.parametrize(
    ("columns", "parameters", "problem"),
    [
        ({"words": ["a"] * 5, "label": [0] * 5}, {}, "has no unique column for `text_column`: .*words, label"),
        ({"text": ["a"] * 5, "label": [0] * 5, "target": [0] * 5}, {}, "has no unique column for `label_column`"),
        ({"text": ["a"] * 5, "label": [0] * 5}, {"text_column": "body"}, "has no column 'body'"),
        ({"text": ["a"] * 5, "label": [0] * 5}, {}, "has only one class, '0'"),
        ({"text": ["a", "b", " ", "c", "d"], "label": [0, 1, 0, 1, 0]}, {}, r"row 2 \(from 0\): no text"),
        ({"text": ["a", "b", "c", "d"], "label": [0, 1, None, 1]}, {}, r"row 2 \(from 0\): no label"),
        ({"text": [1, 2, 3], "label": [0, 1, 0]}, {}, "'text' is int64, expected texts"),
        ({"text": ["a", "b"], "label": [0.5, 1.0]}, {}, "'label' is double, expected classes"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(tmp_path: Path, columns: Any, parameters: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load(table(tmp_path, **columns), **parameters)


def test_the_tokenizer_is_that_of_the_models_folder(tmp_path: Path) -> None:
    path = table(tmp_path)
    text = f"name: t\ndata: {{name: text_table, path: {path}}}\nmodel: 'hf:{tmp_path}'\n"
    text += "federation: {rounds: 1, clients: 1}\n"
    assert "tokenizer" not in scenarios.parse(text).data.parameters
    words(tmp_path)
    s = scenarios.parse(text)
    assert s.data.parameters["tokenizer"] == str(tmp_path)
    assert scenarios.parse(s.dump()) == s
    own = scenarios.parse(text, changes=["data.tokenizer=mine.json"])
    assert own.data.parameters["tokenizer"] == "mine.json"
    assert "tokenizer" not in scenarios.parse(text, changes=["model={name: text_transformer}"]).data.parameters


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"pad_token_id": 3}, "tokenizer_config.json": {"pad_token": "[SEP]"}}, 3),
        ({"config.json": {"pad_token_id": None}, "tokenizer_config.json": {"pad_token": {"content": "[SEP]"}}}, 2),
        ({"tokenizer_config.json": {"pad_token": None, "eos_token": "[UNK]"}}, 3),
        ({}, 0),
    ],
)
def test_texts_are_filled_up_as_the_model_expects(tmp_path: Path, files: dict[str, Any], expected: int) -> None:
    words(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    sample = load(table(tmp_path), tokenizer=tmp_path).sample
    assert isinstance(sample, Tokens)
    assert sample.pad == expected


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no tokenizer: expected tokenizer\.json, or one of vocab\.txt"):
        load(path, tokenizer=tmp_path / "empty")
    with pytest.raises(DataError, match=r"cannot be read: .*expected a tokenizer\.json"):
        load(path, tokenizer=path)


def test_what_fills_texts_up_counts_in_no_metric() -> None:
    sample = Tokens(tuple("0123456789"), 6, pad=0)
    true = torch.tensor([[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 5, 6]])
    half = torch.tensor([[5, 6, 1, 1, 0, 0], [1, 2, 3, 9, 9, 9]])
    names = ("token_accuracy", "rouge1", "above_baseline", "identified")
    others = Others(sample.scored(torch.tensor([[9, 6, 0, 0, 0, 0], [9, 6, 8, 0, 0, 0]])))
    scorer, labels = Scorer(names, sample=sample, others=others), torch.zeros(2, dtype=torch.int64)
    first, second = scorer.score(true, labels, half, labels)
    assert (first["token_accuracy"], second["token_accuracy"]) == (0.5, 0.5)
    assert first["rouge1"] == pytest.approx(0.5)
    assert first["above_baseline"] == pytest.approx(0.5 - 0.25)
    nothing = scorer.score(true, labels, torch.zeros_like(true), labels)
    assert [row["token_accuracy"] for row in nothing] == [0, 0]
    whole = scorer.score(true, labels, true, labels)
    assert all(row["token_accuracy"] == row["rouge1"] == row["identified"] == 1 for row in whole)


def test_an_audit_finds_texts_in_tables(tmp_path: Path) -> None:
    path = table(tmp_path)
    assert UserData(str(path)).section() == {"name": "text_table", "path": str(path), "text_column": "text"}
    named = UserData(str(path), label="label").section()
    assert named == {"name": "text_table", "path": str(path), "text_column": "text", "label_column": "label"}
    other = table(tmp_path, "o.csv", body=["a", "b"], label=[0, 1])
    assert UserData(str(other), text="body").section()["text_column"] == "body"
    with pytest.raises(UserError, match=r"is a table: name .* classes with --label.* texts with --text. Columns: body"):
        UserData(str(other)).section()
