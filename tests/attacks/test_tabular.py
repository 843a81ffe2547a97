"""Records: how a table becomes bytes and comes back, what counts as found, and what gradients give away of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import nn

from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.priors import total_variation
from rayfed.data.base import Dataset
from rayfed.errors import DataError, UserError
from rayfed.metrics.score import Scorer
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.samples import Column, Records
from rayfed.scenario import parse
from tests.helpers.attack_fixtures import generators, observed


def patients() -> Dataset:
    data: Dataset = build("datasets", "diabetes", {}).load()
    return data


def rows(data: Dataset, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(data.train_images[np.arange(count)]).float() / 255
    return images, torch.from_numpy(data.train_labels[:count])


def test_a_record_reads_as_the_row_that_it_is_made_from() -> None:
    data = patients()
    assert isinstance(data.sample, Records)
    assert data.sample.shape == (1, 1, 11)  # nine measures, two bytes for the sex
    known = load_diabetes(scaled=False)
    table, names = pd.DataFrame(known.data), [c.name for c in data.sample.columns]
    assert names == [{"bp": "blood_pressure"}.get(name, name) for name in known.feature_names]
    images = torch.from_numpy(data.train_images[np.arange(len(data.train_labels))]).float() / 255
    parts = dict(zip(names, data.sample.split(images), strict=True))
    for place, column in enumerate(data.sample.columns):
        step = (column.high - column.low) / 255
        found = column.values(parts[column.name]).double()
        if column.categories:
            found = torch.tensor([float(column.categories[i]) for i in found.long()]).double()
        nearest = torch.from_numpy(np.abs(found.numpy()[:, None] - table[place].to_numpy()[None]).min(1))
        assert nearest.max() <= 0.5001 * step + 1e-5
    assert (data.train_labels.mean(), len(data.test_labels)) == (pytest.approx(0.5, abs=0.01), 88)


def test_what_counts_as_found() -> None:
    columns = (Column("weight", (), 0.0, 100.0, 10.0), Column("colour", ("blue", "red", "teal")))
    true = torch.tensor([[0.5, 0.0, 1.0, 0.0], [0.5, 1.0, 0.0, 0.0]])[:, None, None]
    guess = torch.tensor([[0.53, 0.2, 0.4, 0.3], [0.54, 0.1, 0.0, 0.9]])[:, None, None]
    # 3.19 is the bound of the weight: 53 is found for 50, 54 is not; the largest byte names the colour
    assert Records(columns).found(true, guess).tolist() == [[True, True], [False, False]]
    scorer = Scorer(("feature_accuracy",), sample=Records(columns))
    scored = scorer.score(true, torch.tensor([0, 1]), guess, torch.tensor([0, 1]))
    assert [row["feature_accuracy"] for row in scored] == [1.0, 0.0]
    assert Records(columns).read(true)[0] == ["weight 50", "colour red"]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_users_own_table(tmp_path: Path, ending: str) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"age": rng.integers(20, 80, 40), "town": rng.choice(["Rom", "Oslo"], 40), "ill": [True, False] * 20}
    )
    path = tmp_path / f"own.{ending}"
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path)
    data = build("datasets", "table", {"path": str(path), "label": "ill"}).load()
    assert data.classes == ("False", "True")
    assert [c.name for c in data.sample.columns] == ["age", "town"]
    assert data.sample.columns[1].categories == ("Oslo", "Rom")
    assert (len(data.train_labels), len(data.test_labels), data.sample.shape) == (32, 8, (1, 1, 3))


def test_classes_are_named_by_their_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n" + "1,1234567\n2,1234568\n" * 5)
    assert build("datasets", "table", {"path": str(tmp_path / "t.csv"), "label": "b"}).load().classes == (
        "1234567",
        "1234568",
    )


@pytest.mark.parametrize(
    ("content", "label", "message"),
    [
        (
            "a,b\n" + "".join(f"{i},{i % 2}\n" for i in range(5000)) + "?,0\n",
            "b",
            "the column has numbers and '.'",
        ),
        ("a,b\n1,x\n2,y\n", "c", "has no column 'c'"),
        ("a,b\n1,x\n2,x\n", "b", "at least two classes"),
        ("a,b\n1,x\n2,y\n", "b", "the table has 2 rows"),
        ("a,b\n1,x\ninf,y\n", "b", "'a' is inf"),
        ("a,b\n1,x\n2,\n", "b", "'b' is empty"),
        ("a,a,b\n1,2,x\n2,3,y\n", "b", "two columns are named 'a'"),
        ("a,b\n1,äöüëï\n2,y\n", "b", "Windows-1252"),
        ("a,b\n" + "".join(f"n{i},{i % 2}\n" for i in range(5000)), "b", "as 'a' with 5000 values"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, content: str, label: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=message):
        build("datasets", "table", {"path": str(tmp_path / "t.csv"), "label": label}).load()


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_whole_numbers_that_begin_with_0_are_codes(tmp_path: Path, ending: str) -> None:
    rows = [("postcode", "age", "share", "sick")]
    rows += [(f"{i % 4:02}067", str(i), f"0.{i}", str(i % 2)) for i in range(20)] + [("", "0", "0", "1")]
    path = tmp_path / f"rows{ending}"
    path.write_text("".join(("," if ending == ".csv" else "\t").join(row) + "\n" for row in rows))
    data = build("datasets", "table", {"path": str(path), "label": "sick"}).load()
    postcode, age, share = data.sample.columns
    assert (
        "column 'postcode' has whole numbers that start with 0, so it is read as 5 unordered categories"
        in data.remarks[1]
    )
    assert postcode.categories == ("(missing)", "00067", "01067", "02067", "03067")
    assert not age.categories
    assert not share.categories


def test_what_is_missing_is_filled_and_noted(tmp_path: Path) -> None:
    rows = [f"{i},{'' if i % 4 == 3 else 'Rom'},{i % 2}" for i in range(40)]
    rows[0] = rows[0].replace("0,", ",", 1)
    (tmp_path / "t.csv").write_text("\n".join(["age,town,ill", *rows]))
    data = build("datasets", "table", {"path": str(tmp_path / "t.csv"), "label": "ill"}).load()
    age, town = data.sample.columns
    assert town.categories == ("(missing)", "Rom")
    trained = torch.from_numpy(data.train_images[np.arange(len(data.train_labels))]).float() / 255
    known = age.values(data.sample.split(trained)[0])
    filled = float(np.median([v for v in range(1, 40) if v in known.round().int().tolist()]))
    of_age, of_town = data.remarks
    assert "'age': 1 of 40" in of_age
    assert f"{filled:.4g}" in of_age
    assert "'town': 10 of 40" in of_town


def test_a_column_that_numbers_or_names_rows_is_noted(tmp_path: Path) -> None:
    rows = [f"{100 + i},{(i * 7) % 40},{(i * 11) % 40},p{i},{i / 7},{i % 2}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["number,patient_id,dose,name,level,ill", *rows]))
    data = build("datasets", "table", {"path": str(tmp_path / "t.csv"), "label": "ill"}).load()
    noted = [remark.split("'")[1] for remark in data.remarks if "a different value in every row" in remark]
    assert noted == ["number", "patient_id", "name"], "whole numbers in no order, and others, are no names of rows"
    assert any("remove it with --set 'data.without=[patient_id]'" in remark for remark in data.remarks)


def test_columns_are_left_out_by_name(tmp_path: Path) -> None:
    rows = (f"{i},{i % 3},{i % 2}" for i in range(40))
    (tmp_path / "t.csv").write_text("\n".join(["patient_id,dose,ill", *rows]))
    given = {"path": str(tmp_path / "t.csv"), "label": "ill"}
    left = build("datasets", "table", {**given, "without": ["patient_id"]}).load()
    assert [column.name for column in left.sample.columns] == ["dose"]
    assert not any("patient_id" in remark for remark in left.remarks)
    for without, said in {"patient": "did you mean 'patient_id'", "ill": "'ill' is predicted by the model"}.items():
        with pytest.raises(DataError, match=rf"data\.without: .*{said}"):
            build("datasets", "table", {**given, "without": [without]}).load()


def test_dates_are_noted_as_the_categories_that_they_are(tmp_path: Path) -> None:
    rows = [
        f"2024-01-{1 + i % 28:02},2024-02-01 10:{i:02}:00,{1 + i % 7}.5.2024,{i % 3}-{i},{i % 2}" for i in range(40)
    ]
    rows[3] = f",{rows[3].partition(',')[2]}"  # one that is missing is no other kind of column
    (tmp_path / "t.csv").write_text("\n".join(["admitted,seen,written,ward,ill", *rows]))
    data = build("datasets", "table", {"path": str(tmp_path / "t.csv"), "label": "ill"}).load()
    noted = {said.split("'")[1]: said for said in data.remarks if "has dates" in said}
    assert list(noted) == ["admitted", "seen", "written"]
    assert "which are read as 7 unordered categories: write them as numbers" in noted["written"]


@pytest.mark.parametrize(
    ("texts", "examples"),
    [
        (["?"], "'?'"),
        (["<5", "unknown", "<5"], "'<5' and 'unknown'"),
        (["?"] * 30, "'?'"),
        ([f"w{i}" for i in range(20)], ""),
        ([], ""),
    ],
)
def test_numbers_with_texts_among_them_are_noted(tmp_path: Path, texts: list[str], examples: str) -> None:
    values = [*texts, *map(str, range(39 - len(texts))), ""]
    (tmp_path / "t.csv").write_text("\n".join(["dose,ill", *(f"{v},{i % 2}" for i, v in enumerate(values))]))
    data = build("datasets", "table", {"path": str(tmp_path / "t.csv"), "label": "ill"}).load()
    noted = [said for said in data.remarks if "are texts" in said]
    assert len(noted) == bool(examples)
    for said in noted:
        [column] = data.sample.columns
        assert f"{len(texts)} of 40 values are texts, such as {examples}, so it is read as" in said
        assert f"{len(column.categories)} unordered categories" in said
        assert "--set 'data.without=[dose]'" in said


def test_a_record_has_no_total_variation() -> None:
    assert total_variation(torch.rand(2, 3, 1, 1, 9)).tolist() == [[0.0] * 3] * 2
    assert total_variation(torch.rand(2, 1, 4, 4)).min() > 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("attack", "least"),
    [(Analytic(), 1.0), (Dlg(iterations=100), 0.99), (InvertingGradients(iterations=400), 0.9)],
    ids=lambda value: type(value).__name__,
)
def test_a_row_is_read_off_a_gradient(attack, least: float) -> None:  # type: ignore[no-untyped-def]
    data = patients()
    assert isinstance(data.sample, Records)
    model = build_model("mlp", {"hidden": [64], "activation": "sigmoid"}, data.sample, 2, seed=0)
    images, labels = rows(data, 2)
    seen = [observed(model, images[i : i + 1], labels[i : i + 1], classes=2) for i in range(2)]
    found = attack.reconstruct(seen, model, generators(2))
    right = data.sample.found(images, torch.cat([one.images for one in found])).double().mean()
    assert right >= least
    chance = data.sample.found(images, torch.rand(2, 1, 1, 11, generator=generators(1)[0])).double().mean()
    assert chance < 0.6


def plain(features: int, classes: int) -> nn.Module:
    """A network as people write it for tables: it takes rows (N, F), which its norm insists on."""
    layers = nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes)
    return nn.Sequential(*layers)


def flattening(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *plain(features, classes))


def test_a_model_that_takes_rows_is_given_rows() -> None:
    data = patients()
    images, labels = rows(data, 2)
    one, other = (
        build_model(f"tests.attacks.test_tabular:{name}", {"features": 11}, data.sample, 2, seed=0).eval()
        for name in ("plain", "flattening")
    )
    torch.testing.assert_close(one(images), other(images))
    [found] = Analytic().reconstruct([observed(one, images[:1], labels[:1], classes=2)], one, generators(1))
    torch.testing.assert_close(found.images, images[:1], atol=1e-4, rtol=0)
    with pytest.raises(UserError, match=r"image_shape \(\(1, 1, 11\)\) and classes"):
        build_model("tests.attacks.test_tabular:plain", {}, data.sample, 2, seed=0)


def test_metrics_follow_the_table_and_pictures_defences_are_refused() -> None:
    scenario = "{name: t, data: diabetes, model: mlp, federation: {rounds: 1, clients: 2}, %s}"
    assert parse(scenario % "seed: 0").metrics.names == ["feature_accuracy", "mse", "psnr", "label_accuracy"]
    with pytest.raises(UserError, match="refiner supports pixels, but the samples of data 'diabetes' are records"):
        parse(scenario % "defences: [refiner]")
    with pytest.raises(UserError, match="gradinversion supports pixels"):
        parse(scenario % "attacks: [gradinversion]")
    parse(scenario % "defences: [mixup], attacks: [dlg]")
