"""The audit: from a model and images to a scenario, and from its rows to what defences do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayfed import scenario
from rayfed.analysis import audit
from rayfed.engine.inputs import prepare
from tests.conftest import REPOSITORY
from tests.test_cli import run


def row(arm: str, batch: int, psnr: float | None, attack: str = "a", victim: int = 0, **more: Any) -> dict[str, Any]:
    sample = more.pop("sample", 0)
    return {"arm": arm, "batch_size": batch, "victim": victim, "sample": sample, "attack": attack, "psnr": psnr,
            "distortion": more.pop("distortion", 0.0), **more}  # fmt: skip


def test_the_audit_is_a_scenario_that_fits_its_images() -> None:
    data = str(REPOSITORY / "scenarios" / "user_data" / "train.parquet")
    s = scenario.parse(audit.scenario_text("lenet", audit.data_section(data, 16), [1, 8], 4, 100, 7))
    assert (s.data.name, s.seed, s.federation.clients) == ("parquet", 7, 4)
    assert [a.title for a in s.attacks] == [
        "analytic batch 1", "inverting_gradients batch 1", "idlg batch 1", "analytic batch 8",
        "inverting_gradients batch 8",
    ]  # fmt: skip
    assert [a.victims for a in s.attacks] == [4, 4, 4, 1, 1]
    assert prepare(s).data.sample.shape[1:] == (16, 16)
    assert next(iter(s.played)) == audit.UNDEFENDED


@pytest.mark.parametrize(("data", "name"), [("digits", "digits"), ("{tmp}", "image_folder"), ("x.parquet", "parquet")])
def test_data_is_a_file_a_folder_or_a_name(data: str, name: str, tmp_path: Path) -> None:
    assert audit.data_section(data.format(tmp=tmp_path), None)["name"] == name


def test_a_worst_case_is_the_closest_of_all_attacks_on_an_image() -> None:
    rows = [
        row("none", 1, 20.0, "a"), row("none", 1, 30.0, "b"), row("none", 1, None, "c"), row("none", 1, 10.0, victim=1),
        row("none", 4, 5.0, sample=2), row("prune", 1, 90.0),
    ]  # fmt: skip
    cases = audit.worst_cases(rows)
    assert [(c.batch, c.victim, c.sample, c.row["psnr"]) for c in cases] == [
        (1, 0, 0, 30.0), (1, 1, 0, 10.0), (4, 0, 2, 5.0),
    ]  # fmt: skip


def test_an_effect_takes_the_worst_image_of_every_batch_size() -> None:
    rows = [
        row("prune", 1, 12.0, distortion=0.5), row("prune", 4, 16.0, distortion=0.7), row("prune", 1, None),
        row("none", 1, 50.0), row("none", 4, 9.0),
    ]  # fmt: skip
    none, prune = audit.defence_effects(rows)
    assert (none.arm, none.distortion, none.psnr) == ("none", 0.0, {1: 50.0, 4: 9.0})
    assert prune.distortion == pytest.approx(0.6)
    assert prune.holds(17.0)
    assert not prune.holds(15.0)


def test_mistakes_are_named() -> None:
    assert run("audit", "--model", "lenet", "--data", "digits", "--batch", "1,x")[0] == 2
    code, output = run("audit", "--model", "lenett", "--data", "digits")
    assert code == 2
    assert "did you mean 'lenet'" in output
    code, output = run("audit", "--model", "lenet", "--data", "/no/such/folder")
    assert code == 2
    assert "/no/such/folder" in output


@pytest.mark.slow
def test_an_audit_says_what_leaks_and_what_stops_it(tmp_path: Path) -> None:
    arguments = ["--data", "digits", "--size", "8", "--batch", "1,2", "--images", "2", "--iterations", "60"]
    code, output = run("audit", "--model", "mlp", *arguments, "--out", str(tmp_path), "--executor", "local")
    assert code == 0, output
    assert "analytic leaks" in output
    assert "gaussian 0.1" in output
    [report] = tmp_path.glob("audit-*/report.html")
    assert report.stat().st_size > 10_000
