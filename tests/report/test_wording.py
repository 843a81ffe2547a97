"""Wording of each surface against its snapshot, and the coverage of the snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayfed.core.reasons import Reason
from rayfed.evidence.verdicts import read_evidence
from rayfed.store.finding import State
from tests.wording import SURFACES, path_of, render
from tests.wording.runs import make_cases


@pytest.mark.parametrize("surface", SURFACES)
def test_the_wording_is_that_of_the_snapshot(surface: str) -> None:
    assert render(surface).splitlines() == path_of(surface).read_text(encoding="utf-8").splitlines(), (
        "to accept: python -m tests.wording"
    )


def test_the_runs_have_every_state_and_reason(tmp_path: Path) -> None:
    evidence = [read_evidence(case.folder) for case in make_cases(str(tmp_path))]
    findings = [finding for each in evidence for finding in each.rows]
    channels = {row.get("reason") for each in evidence for row in each.attacks}
    assert {finding.state for finding in findings} == set(State)
    assert {finding.reason for finding in findings} | channels >= set(Reason) - {Reason.NOTHING_LEAKS_UNDEFENDED}
