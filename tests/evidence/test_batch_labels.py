"""Labels found by batch size, against figures made by hand."""

from __future__ import annotations

from rayfed.evidence.settings import group_settings
from rayfed.report.text.batch_sizes import label_grid
from tests.helpers.result_fixtures import BATCH, outcome

NEAR = (0.12345678, 0.12345679)

SHARES = (
    ("dlg", 1, (1.0, 1.0)), ("dlg", 16, (0.5, 0.75)), ("grnn", 16, (0.9, 0.9)), ("grnn", 64, (0.8, 0.8)),
    ("idlg", 1, (1.0, 1.0)),
)  # fmt: skip


def test_labels_by_batch_size() -> None:
    found = label_grid(
        group_settings(
            [
                outcome(attack=attack, label_accuracy=share, batch_size=size, seed=seed, **{BATCH: size})
                for attack, size, shares in SHARES
                for seed, share in enumerate(shares)
            ],
            [BATCH],
        )
    )
    assert found is not None
    assert found.headings == ["setting", "attack", "batch 1", "batch 16", "batch 64"]
    assert found.rows == [["none", "dlg", "1", "0.6 (0.5, 0.8)", "–"], ["none", "grnn", "–", "0.9", "0.8"]]
    assert label_grid(group_settings([outcome(label_accuracy=1.0, batch_size=4)])) is None
    assert label_grid(group_settings([outcome(batch_size=size, **{BATCH: size}) for size in (1, 2)], [BATCH])) is None


def test_settings_with_values_that_print_alike_have_rows_of_their_own() -> None:
    rows = [outcome(label_accuracy=1.0, batch_size=size, **{BATCH: size, "lr": lr}) for size in (1, 2) for lr in NEAR]
    found = label_grid(group_settings(rows, [BATCH, "lr"]))
    assert found is not None
    assert len(found.rows) == 2
