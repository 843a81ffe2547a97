"""The benchmark of a card, whole at tiny size on a CPU, and where it writes what it has found."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu
from tests.conftest import REPOSITORY


@pytest.mark.engine
def test_all_of_it_runs_at_tiny_size(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--tiny", "--device", "cpu"])
    said = capsys.readouterr().out
    plan = gpu.tiny(gpu.Plan(torch.device("cpu"), 0.0))
    shapes, attacked, large = map(len, (plan.shapes, plan.attacked, plan.large))
    expected = [4 * shapes, 4 * shapes, 3, len(plan.sizes), len(plan.processes), 2 * attacked, 4 * large]
    tables = [block.splitlines() for block in said.strip().split("\n\n")]
    assert [table[0] for table in tables] == list(gpu.TABLES)
    assert [len(table) - 2 for table in tables] == expected, "a row each below the title and the head"
    for table in tables:
        head = [cell.strip() for cell in table[1].split("|")]
        for row in table[2:]:
            cells = dict(zip(head, (cell.strip() for cell in row.split("|")), strict=True))
            measured = [
                value for name, value in cells.items() if name.startswith(("clients/s", "iterations/s")) or name == "s"
            ]
            assert [float(value) > 0 for value in measured] == [True], row
            assert all(value == "not measured" for name, value in cells.items() if "iB" in name), "a CPU counts none"


def test_a_page_gets_the_tables_in_place_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TABLES", {"Cohorts": lambda plan: iter([["cohort", "clients/s"], ["LeNet-5", "7"]])})
    made = gpu.section(gpu.Plan(torch.device("cpu"), 0.0), "python -m benchmarks.gpu")
    assert "| cohort | clients/s |\n| --- | --- |\n| LeNet-5 | 7 |\n" in made
    page = (REPOSITORY / "docs" / "gpu.md").read_text()
    before, _, after = page.partition(f"{gpu.HEADING}\n")
    others = after[after.index("\n## ") :]
    assert gpu.replaced(page, made) == before + made + others
    assert gpu.replaced(f"a\n\n{gpu.HEADING}\n\nold\n\n## More\n\nb\n", made) == f"a\n\n{made}\n## More\n\nb\n"


def test_figures_of_a_cpu_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--device", "cpu", "--write", "docs/gpu.md"])
    assert "figures of a GPU" in capsys.readouterr().err


def test_memory_that_does_not_suffice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    figure = gpu.measured(gpu.Plan(torch.device("cpu"), 0.0), greedy)
    assert (gpu.told(figure, lambda f: f.seconds), gpu.memory(figure)) == ("out of memory", "out of memory")
