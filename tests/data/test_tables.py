"""Tables of users: other layouts, encodings and number formats are read to the bits of the same table in plain CSV."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import sqlite3
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from rayfed.data.base import Dataset
from rayfed.data.section import UserData
from rayfed.data.tables import read_table
from rayfed.errors import DataError, UserError
from rayfed.registry import build
from tests.helpers.command import run


def frame(rows: int = 40) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "dose": rng.integers(1, 90, rows),
            "level": rng.uniform(-4, 60, rows).round(2),
            "ward": rng.choice(["north", "south, left", 'the "old" one'], rows),
            "seen": rng.choice(["2024-03-01", "2023-11-30"], rows),
            "outcome": rng.choice(["better", "worse"], rows),
        }
    )


def write(path: Path, text: str | bytes, encoding: str = "utf-8") -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return path


def plain(folder: Path, table: pd.DataFrame) -> pa.Table:
    return read_table(write(folder / "plain.csv", table.to_csv(index=False))).table


def loaded(path: Path, label: str = "outcome") -> Dataset:
    section = UserData(str(path), label=label).section()
    data: Dataset = build("datasets", section.pop("name"), section).load()
    return data


LAYOUTS = {
    "semicolon.csv": {"sep": ";"},
    "comma_marks.csv": {"sep": ";", "decimal": ","},
    "tab.tsv": {"sep": "\t"},
    "german.tsv": {"sep": "\t", "decimal": ","},
    "tab.csv": {"sep": "\t"},
    "bar.txt": {"sep": "|"},
    "bar.data": {"sep": "|", "decimal": ","},
    "dos.CSV": {"lineterminator": "\r\n"},
    "mac.csv": {"lineterminator": "\r", "sep": ";"},
    "quoted.csv": {"quoting": 1, "decimal": ","},
    "named_for_tabs.tsv": {"sep": ","},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_read_to_the_same_table(name: str, tmp_path: Path) -> None:
    table = frame()
    read = read_table(write(tmp_path / name, table.to_csv(index=False, **LAYOUTS[name])))  # type: ignore[call-overload]
    assert read.table.equals(plain(tmp_path, table))
    assert bool(read.notes) == (name not in ("tab.tsv", "dos.CSV"))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252"])
def test_encodings_are_read_to_the_same_table(encoding: str, tmp_path: Path) -> None:
    table = frame().replace("north", "Zürich").rename(columns={"dose": "größe"})
    read = read_table(write(tmp_path / "t.csv", table.to_csv(index=False), encoding))
    assert read.table.equals(plain(tmp_path, table))
    assert bool(read.notes) == (encoding != "utf-8-sig")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv"])
def test_compressed_tables_are_recognised_by_their_content(pack, name: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    table = frame()
    packed = pack(table.to_csv(index=False).encode())
    assert read_table(write(tmp_path / name, packed)).table.equals(plain(tmp_path, table))
    with pytest.raises(DataError, match=name):
        read_table(write(tmp_path / name, packed[:-20]))


@pytest.mark.parametrize(
    ("before", "sep"), [("# from a scanner\n", ","), ("\n\n# two, words\n#\n", ","), ("sep=;\n", ";"), ("\n \n", "\t")]
)
def test_lines_before_the_table_are_skipped(before: str, sep: str, tmp_path: Path) -> None:
    table = frame()
    read = read_table(write(tmp_path / "t.csv", before + table.to_csv(index=False, sep=sep)))
    assert read.table.equals(plain(tmp_path, table))


def test_a_header_may_begin_with_a_comment_mark_or_have_spaces(tmp_path: Path) -> None:
    table = frame()
    marked = read_table(write(tmp_path / "m.csv", "#" + table.to_csv(index=False)))
    assert marked.table.column_names[0] == "#dose"
    spaced = write(tmp_path / "s.csv", table.rename(columns=lambda name: f" {name}  ").to_csv(index=False), "utf-8-sig")
    assert read_table(spaced).table.equals(plain(tmp_path, table))
    for label in ("outcome", " outcome"):
        assert loaded(spaced, label).classes == ("better", "worse")


@pytest.mark.parametrize("decimal", [".", ","])
def test_a_table_without_a_header_has_numbered_columns(decimal: str, tmp_path: Path) -> None:
    table = frame()
    sep = "," if decimal == "." else ";"
    path = write(tmp_path / "t.data", table.to_csv(index=False, header=False, sep=sep, decimal=decimal))
    read = read_table(path)
    names = [f"column_{place}" for place in range(1, 6)]
    assert (read.has_header, read.table.column_names) == (False, names)
    assert read.table.rename_columns(list(table.columns)).equals(plain(tmp_path, table))
    assert loaded(path, "column_5").classes == ("better", "worse")
    with pytest.raises(UserError, match="column_1"):
        loaded(path)


@pytest.mark.parametrize(
    "content",
    [
        "0,1,2\n" + "3.5,x,1\n2.5,y,0\n" * 5,  # names of a DataFrame without names
        "kind,400,402,404\n" + "a,401,0.3,403\nb,0.5,402,403\n" * 5,  # wavelengths
        "2019,2020,region\n" + "2018,2021,east\n2022,1999,west\n" * 5,
        "a,b\nx,y\na,b\nz,w\n",  # two tables one after the other
        "name,7\nann,1.5\nbob,9.5\n",
        "only\n5\n6\n",
    ],
)
def test_a_first_row_of_other_kinds_is_a_header(content: str, tmp_path: Path) -> None:
    assert read_table(write(tmp_path / "t.csv", content)).has_header


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (["1.234,5", "-0,25", "12,0"], [1234.5, -0.25, 12.0]),
        (["1 234,5", "2\u202f000,25", "7"], [1234.5, 2000.25, 7.0]),
        (["1'234.5", "999.25", "1’000’000"], [1234.5, 999.25, 1e6]),
        (["12,5", "", "NA"], [12.5, None, None]),
        ([",5", "+1,5e3", "2"], [0.5, 1500.0, 2.0]),
        (["1.234.567", "1.000", "12"], [1234567, 1000, 12]),
    ],
)
def test_numbers_with_other_marks(written: list[str], values: list[float | None], tmp_path: Path) -> None:
    content = "amount;kind\n" + "".join(f"{text};k{row}\n" for row, text in enumerate(written))
    assert read_table(write(tmp_path / "t.csv", content)).table["amount"].to_pylist() == values


def test_a_number_of_two_meanings_takes_the_mark_of_the_other_columns(tmp_path: Path) -> None:
    rows = [f"{i},234;{i},5;{i}.5;k\n" for i in range(1, 9)]
    head = "amount;comma;point;kind\n"
    for left_out, first in ((2, 1.234), (1, 1234)):
        split = [row.split(";") for row in [head, *rows]]
        kept = [";".join(parts[:left_out] + parts[left_out + 1 :]) for parts in split]
        read = read_table(write(tmp_path / "t.csv", "".join(kept)))
        assert read.table["amount"][0].as_py() == first
    for text in (head + "".join(rows), "amount;kind\n" + "1,234;k\n2,500;l\n", "amount;kind\n" + "1.234;k\n2.500;l\n"):
        with pytest.raises(DataError, match=r"'amount'.*row 0"):
            read_table(write(tmp_path / "t.csv", text))
    with pytest.raises(DataError, match=r"'amount'.*row 1.*row 0"):
        read_table(write(tmp_path / "t.csv", "amount;kind\n1.5;k\n2,5;l\n3,5;m\n"))


def test_quoted_thousands_are_numbers_and_texts_with_commas_stay_texts(tmp_path: Path) -> None:
    rows = "".join(f'"{1000 * i:,}",0.{i},"{i},{i + 1}","yes, {i}","{i},5 mg"\n' for i in range(1, 20))
    read = read_table(write(tmp_path / "t.csv", "income,share,pair,said,dose\n" + rows))
    kinds = [str(kind) for kind in read.table.schema.types]
    assert kinds == ["int64", "double", "string", "string", "string"]
    assert read.table["income"].to_pylist() == [1000 * i for i in range(1, 20)]
    assert any("'pair'" in note for note in read.notes)


def test_codes_and_dates_stay_texts_in_other_layouts(tmp_path: Path) -> None:
    rows = "".join(f"{i % 4:02}067;{1 + i % 9}.3.2024;192.168.0.{i};{i},5\n" for i in range(20))
    read = read_table(write(tmp_path / "t.csv", "postcode;seen;host;level\n" + rows))
    assert [str(kind) for kind in read.table.schema.types] == ["string", "string", "string", "double"]


def test_what_is_missing_among_numbers_is_as_in_a_plain_table(tmp_path: Path) -> None:
    rows = [f"{i}.5,{'?' if i == 7 else i},{i % 2}" for i in range(30)]
    rows[3] = rows[3].replace("3.5", "-")
    texts = ["level,dose,ill", *rows]
    expected = read_table(write(tmp_path / "p.csv", "\n".join(texts)))
    german = "\n".join(texts).replace(",", ";").replace(".", ",")
    read = read_table(write(tmp_path / "g.csv", german))
    assert read.table.equals(expected.table)
    said = [note for note in loaded(tmp_path / "g.csv", "ill").remarks if "row" in note]
    assert ["'level'" in said[0], "row 3" in said[0], "'dose'" in said[1], "row 7" in said[1]] == [True] * 4


def test_a_class_that_looks_missing_is_noted(tmp_path: Path) -> None:
    marks = ["+", "-", "?"]
    path = write(tmp_path / "t.csv", "a,b\n" + "".join(f"{i}.5,{marks[i % 3]}\n" for i in range(12)))
    data = loaded(path, "b")
    assert data.classes == ("+", "-", "?")
    assert [note.split("'")[3] for note in data.remarks if note.startswith("column 'b'")] == ["?"]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("a,b;c,label\n" + "1,x;2,p\n3,y;4,q\n" * 4, ["','", "';'"]),
        ("a|b;c\n" + "1|x;2\n" * 4, ["';'", "'|'"]),
        ("a;b;c\n1;2;3\n1;2\n4;5;6\n", ["';'", "line 3"]),
        ("a\tb\n1\t2\n1\t2\t3\n4\t5\n", ["tab", "line 3"]),
        ("1 2 3\n4 5 6\n7 8 9\n", ["spaces"]),
    ],
)
def test_an_ambiguous_or_irregular_layout_names_the_separator(content: str, names: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        read_table(write(tmp_path / "t.csv", content))
    assert [name for name in names if name not in str(raised.value)] == []


def image(kind: str) -> bytes:
    stream = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(stream, kind)
    return stream.getvalue()


def archive(*names: str) -> bytes:
    stream = BytesIO()
    with ZipFile(stream, "w") as packed:
        for name in names:
            packed.writestr(name, "a,b\n1,2\n")
    return stream.getvalue()


def database(folder: Path) -> bytes:
    connection = sqlite3.connect(folder / "x.db")
    connection.execute("create table t (a)")
    connection.commit()
    connection.close()
    return (folder / "x.db").read_bytes()


def npy() -> bytes:
    stream = BytesIO()
    np.save(stream, np.arange(50.0))
    return stream.getvalue()


FILES = {
    "PNG": lambda folder: image("PNG"),
    "JPEG": lambda folder: image("JPEG"),
    "BMP": lambda folder: image("BMP"),
    "xlsx": lambda folder: archive("[Content_Types].xml", "xl/workbook.xml"),
    "ods": lambda folder: archive("mimetype", "content.xml"),
    "npz": lambda folder: archive("a.npy"),
    "ZIP": lambda folder: archive("a.csv"),
    "xls": lambda folder: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500),
    "pickle": lambda folder: pickle.dumps(frame()),
    "npy": lambda folder: npy(),
    "SQLite": database,
    "PDF": lambda folder: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
    "binary": lambda folder: np.random.default_rng(0).bytes(3000),
    "JSON": lambda folder: b'[{"a": 1, "b": 2}]',
    "HTML": lambda folder: b"\n<!DOCTYPE html><p>404, not found</p>",
    "LFS": lambda folder: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "ARFF": lambda folder: b"% iris\n@RELATION iris\n@ATTRIBUTE a NUMERIC\n",
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("packed", [False, True])
def test_another_kind_of_file_is_named_and_not_printed(kind: str, packed: bool, tmp_path: Path) -> None:
    content = FILES[kind](tmp_path)
    path = write(tmp_path / "table.csv", gzip.compress(content) if packed else content)
    for label in ("a", None):
        with pytest.raises(UserError) as raised:
            UserData(str(path), label=label).section()
        assert kind in str(raised.value)
        assert str(raised.value).isprintable()


def test_a_text_that_begins_as_a_binary_file_is_a_table(tmp_path: Path) -> None:
    for name in ("BMI", "ORCID", "MATLAB", "PAR1"):
        table = frame().rename(columns={"dose": name})
        assert read_table(write(tmp_path / "t.csv", table.to_csv(index=False))).table.column_names[0] == name


def test_parquet_is_recognised_by_its_content(tmp_path: Path) -> None:
    frame().to_parquet(tmp_path / "t.csv")
    read = read_table(tmp_path / "t.csv")
    assert (read.table.num_rows, len(read.notes)) == (40, 1)
    assert loaded(tmp_path / "t.csv").classes == ("better", "worse")
    for name, content in (("cut.parquet", (tmp_path / "t.csv").read_bytes()[:400]), ("text.parquet", b"a,b\n1,2\n")):
        with pytest.raises(DataError, match=name):
            read_table(write(tmp_path / name, content))


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"# nothing\n", "возраст,вес\n1,2\n".encode("cp1251"), b"a,b\n\x81\xff,2\n"]
)
def test_what_is_no_table_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t\.csv"):
        read_table(write(tmp_path / "t.csv", content))


def test_damaged_utf8_is_not_taken_for_another_encoding(tmp_path: Path) -> None:
    content = "name,b\n" + "Zürich,1\nMünchen,2\n" * 4
    with pytest.raises(DataError, match="line 10"):
        read_table(write(tmp_path / "t.csv", content.encode() + b"K\xf6ln,3\n"))


def test_long_fields_and_line_breaks_in_quotes_are_read(tmp_path: Path) -> None:
    texts = ["a long one, " * 20_000, 'two\nlines and a "quote"', "short"] * 4
    table = pd.DataFrame({"text": texts, "label": [0, 1, 1] * 4})
    for sep in (",", ";"):
        read = read_table(write(tmp_path / "t.csv", table.to_csv(index=False, sep=sep)))
        assert read.table["text"].to_pylist() == texts


def test_texts_and_tables_of_one_column_are_read_in_other_layouts(tmp_path: Path) -> None:
    rows = "".join(f"a text; number {i}, short\t{'good' if i % 2 else 'bad'}\n" for i in range(12))
    path = write(tmp_path / "t.txt", f"text\tlabel\n{rows}", "utf-16")
    section = UserData(str(path), label="label").section()
    assert section["name"] == "text_table"
    data = build("datasets", section.pop("name"), section).load()
    assert (data.classes, len(data.remarks)) == (("bad", "good"), 1)
    single = write(tmp_path / "s.csv", "text\n" + "".join(f'"one; two, {i}"\n' for i in range(12)))
    assert read_table(single).table.num_columns == 1
    assert UserData(str(single)).section()["name"] == "text_table"


@pytest.mark.engine
def test_an_audit_reads_a_table_and_notes_its_layout(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", frame().to_csv(index=False, sep="|", decimal=","), "cp1252")
    options = ["--iterations", "1", "--batch", "1", "--images", "1", "--defence", "{name: gaussian, sigma: 0.1}"]
    options += ["--executor", "local", "--out", str(tmp_path / "o")]
    code, output = run("audit", "--model", "mlp", "--data", str(path), "--label", "outcome", *options)
    assert (code, "'|'" in output, "4 columns" in output) == (0, True, True), output
    code, output = run("audit", "--model", "mlp", "--data", str(write(path, image("PNG"))), "--label", "x", *options)
    assert (code, "PNG" in output) == (2, True), output
