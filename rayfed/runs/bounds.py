"""Check of a finished run: no measurement may exceed a proved bound."""

from __future__ import annotations

from rayfed.evidence.proved_bounds import compare_bounds
from rayfed.report.text.proved_bounds import exceeded_text
from rayfed.store.folder import RunFolder


class BoundExceeded(Exception):
    """Error for a measurement that exceeds a proved bound, which is a defect of rayfed."""


def check_proved_bounds(folder: RunFolder) -> None:
    """Raise `BoundExceeded` if a measurement of a run exceeds a proved bound."""
    tables = (folder.read_table(name).to_pylist() for name in ("proved", "attacks", "inferences"))
    if exceeded := [one for one in compare_bounds(*tables) if one.exceeds]:
        raise BoundExceeded(exceeded_text(folder.url, exceeded))
