"""Runs and sweeps as objects: tables, images, and how they look in a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rayfed
from rayfed.errors import RunError
from rayfed.results.loading import Run, Sweep
from rayfed.results.notebook import MOST
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import TABLES
from tests.conftest import REPOSITORY
from tests.helpers.report_fixtures import ARMS, ATTACKS, HOSTILE, make_run
from tests.helpers.result_fixtures import SIGMA, outcome, small_run, small_sweep, trial_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(str(tmp_path_factory.mktemp("runs")))


@pytest.fixture
def run(folder: RunFolder) -> Run:
    found = rayfed.load(folder.url)
    assert isinstance(found, Run)
    return found


def test_tables_are_arrow_pandas_and_attributes(run: Run, folder: RunFolder) -> None:
    assert run.rounds.equals(folder.read_table("rounds"))
    assert run.table("attacks").equals(run.attacks)
    assert run.frame("rounds")["test_accuracy"].max() == max(run.rounds["test_accuracy"].to_pylist())
    assert set(TABLES) <= set(dir(run))
    assert (run.scenario["name"], run.status["state"]) == ("digits-example", "finished")
    with pytest.raises(AttributeError, match="did you mean 'rounds'"):
        run.round  # noqa: B018
    with pytest.raises(RunError, match="did you mean 'attacks'"):
        run.table("atacks")


def test_images_are_the_pixels_of_the_tables(run: Run, folder: RunFolder) -> None:
    pictures = list(run.images(arm="gaussian", attack="idlg"))
    rows = [r for r in folder.read_table("images").to_pylist() if (r["arm"], r["attack"]) == ("gaussian", "idlg")]
    assert [p.key for p in pictures] == [
        tuple(r[c] for c in ("arm", "round", "attack", "victim", "repeat", "sample")) for r in rows
    ]
    for picture, row in zip(pictures, rows, strict=True):
        assert (picture.true.shape, picture.true.dtype) == ((28, 28, 1), np.uint8)
        np.testing.assert_array_equal(picture.reconstructed[..., 0], Image.open(BytesIO(row["reconstructed"])))
    assert len(list(run.images())) == len(folder.read_table("images"))


def test_the_worst_are_those_with_the_highest_psnr(run: Run) -> None:
    worst = run.worst(3)
    scores = sorted(run.attacks["psnr"].to_pylist(), reverse=True)
    assert [row["psnr"] for _, row in worst] == scores[:3]
    for picture, row in worst:
        mse = np.mean((picture.true / 255 - picture.reconstructed / 255) ** 2)
        assert -10 * np.log10(mse) == pytest.approx(row["psnr"], abs=0.5)  # but for the 8 bits


def test_outcomes_and_settings_of_a_run(run: Run) -> None:
    assert run.outcomes().num_rows == len(ARMS) * len(ATTACKS)
    assert {(s.arm, s.attack) for s in run.settings()} == {(arm, attack) for arm in ARMS for attack in ATTACKS}
    found = run.front("psnr", "test_accuracy")
    assert {s.attack for s in found.settings} == {"idlg"}


def test_a_sweep_has_outcomes_trials_settings_and_a_front(tmp_path: Path) -> None:
    folder = small_sweep(tmp_path)
    trial_run(folder, "trials/0001-0")
    sweep = rayfed.load(Path(folder.url))
    assert isinstance(sweep, Sweep)
    assert sweep.outcomes().equals(folder.outcomes())
    assert [len(sweep.trials), sweep.trials[3].name] == [12, "0001-0"]
    assert sweep.trials[3].scenario["name"] == "swept"
    found = sweep.front("psnr", "test_accuracy")
    assert len(found.best) == 4
    assert len(sweep.settings()) == 8
    assert repr(sweep).endswith(f"over {SIGMA}; trials: 12 finished")


def test_a_sweep_that_has_just_begun_is_empty(tmp_path: Path) -> None:
    sweep = rayfed.load(small_sweep(tmp_path, []).url)
    assert isinstance(sweep, Sweep)
    assert (sweep.trials, sweep.settings(), sweep.front("psnr", "pmm").best) == ([], [], [])
    assert "none has ended" in sweep._repr_html_()


class Page(HTMLParser):
    """Tags, texts and attributes of a piece of HTML."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_a_run_looks_good_in_a_notebook(run: Run) -> None:
    source = run._repr_html_()
    page = Page(source)
    assert page.tags.count("tr") == 1 + len(ARMS) * len(ATTACKS)
    assert page.tags.count("img") == 2 * 6
    assert all(value for name, value in page.attributes if name == "alt")
    sources = [value or "" for name, value in page.attributes if name == "src"]
    assert all(value.startswith("data:image/png;base64,") for value in sources)
    assert len(source) < 200_000


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    arms, attacks = {HOSTILE: [], "a & b": ["prune"]}, {'"><img src=x onerror=y>': 1.0}
    page = Page(rayfed.load(make_run(str(tmp_path), arms, attacks).url)._repr_html_())
    assert "script" not in page.tags
    assert ("src", "x") not in page.attributes


def test_a_long_sweep_is_shown_in_part(tmp_path: Path) -> None:
    rows = [outcome("noise", "dlg", psnr=float(i), trial=str(i), **{SIGMA: i / 7}) for i in range(MOST + 5)]
    source = rayfed.load(small_sweep(tmp_path, rows).url)._repr_html_()
    assert Page(source).tags.count("tr") == 1 + MOST
    assert "5 more" in source


def test_a_run_without_attacks_or_status_can_be_looked_at(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {})
    folder.remove("status.json")
    found = rayfed.load(folder.url)
    assert "unknown, ? of ? rounds" in repr(found)
    assert "<table>" in found._repr_html_()


def test_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        rayfed.load(tmp_path / "nothing")


@pytest.mark.engine
def test_importing_rayfed_stays_light() -> None:
    code = "import sys, rayfed; assert not {'torch', 'pyarrow', 'pandas', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


def test_the_documented_notebook_runs(folder: RunFolder, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "results.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        block = block.replace("runs/undefended-20261121-120000", folder.url)
        exec(block.replace("sweeps/privacy-20261121-120000", small_sweep(tmp_path).url), names)
    assert {"run", "sweep"} <= set(names)
