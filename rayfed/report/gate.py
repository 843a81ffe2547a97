"""Result of a gate as text, as JSON (`gate.schema.json`) and as JUnit XML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

from rayfed.errors import UserError, require_extra
from rayfed.evidence.baseline import Change, compare_with_baseline
from rayfed.evidence.bounds import Bound
from rayfed.evidence.checks import Check, GateState
from rayfed.evidence.gate import check_bounds
from rayfed.evidence.updates import hash_samples, measure_updates
from rayfed.evidence.verdicts import RunEvidence, read_evidence
from rayfed.metrics.known import METRICS, leading
from rayfed.report.text.baseline import change_details_text, change_reasons_text, change_text
from rayfed.report.text.formats import NONE
from rayfed.report.text.gate import bound_text, by_text, check_text, check_value_text, details_text, reasons_text
from rayfed.report.text.next_step import next_step_text
from rayfed.store.folder import RunFolder
from rayfed.version import __version__

VERSION = 2
"""Version of the document; increased if readers of the previous version would misread it."""


class GateVerdict(StrEnum):
    """Result of a gate over all checks and changes."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_MEASURED = "not measured"
    """Not measured or inconclusive."""
    NO_BOUND = "no bound"


@dataclass(frozen=True)
class GatedRun:
    """Run whose attacks a gate (pass or fail against bounds) checks."""

    folder: RunFolder
    weights: str
    """Description of the attacked weights."""
    arms: Sequence[str] | None = None
    """Checked arms; None for `RunEvidence.gated_arms`."""

    @cached_property
    def evidence(self) -> RunEvidence:
        """Return the results in the run's folder: scenario, rows of attacks and inferences."""
        return read_evidence(self.folder)

    @cached_property
    def next_step(self) -> str:
        """Return the user's next step towards a verdict; empty if every arm has a verdict."""
        return next_step_text(self.evidence)

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the arms that the gate checks."""
        return self.evidence.gated_arms if self.arms is None else list(self.arms)

    @cached_property
    def samples(self) -> str:
        """Return a digest (SHA-256) of the attacked samples."""
        return hash_samples(*(self.folder.read_table(name).to_pylist() for name in ("images", "texts")))


@dataclass(frozen=True)
class Ruling:
    """Result of a gate over one or several runs."""

    runs: Sequence[GatedRun]
    bounds: Sequence[Bound]
    allow_unmeasured: bool = False
    baseline: Mapping[str, Any] | None = None
    """Document of an earlier gate."""

    @cached_property
    def checks(self) -> list[list[Check]]:
        """Return the checks of every bound on every arm, one list per run."""
        return [check_bounds(run.evidence, self.bounds, run.names) for run in self.runs]

    @cached_property
    def changes(self) -> list[Change]:
        """Return the changes of all runs since the baseline; empty if no baseline was given."""
        return [] if self.baseline is None else compare_with_baseline(self._measured, self.baseline)

    @property
    def verdict(self) -> GateVerdict:
        """Return the least favourable state of all checks and changes."""
        if not self.bounds and self.baseline is None:
            return GateVerdict.NO_BOUND
        states = {check.state for run in self.checks for check in run} | {change.state for change in self.changes}
        if GateState.FAILED in states:
            return GateVerdict.FAILED
        return GateVerdict.PASSED if states == {GateState.PASSED} else GateVerdict.NOT_MEASURED

    @property
    def passed(self) -> bool:
        """Return whether the gate passes, so that the exit code is 0."""
        if self.verdict == GateVerdict.NOT_MEASURED:
            return self.allow_unmeasured
        return self.verdict != GateVerdict.FAILED

    @cached_property
    def lines(self) -> list[str]:
        """Return the result as lines of text: one line per check and change, then the verdict."""
        lines = []
        for run, checks in zip(self.runs, self.checks, strict=True):
            if checks:
                lines += [f"Gate on {run.weights}", *_check_lines(checks)]
        if self.changes:
            lines += ["Changes since the baseline", *_change_lines(self.changes)]
        allowed = " (allowed by --allow-unmeasured)" if self.passed and self.verdict == GateVerdict.NOT_MEASURED else ""
        return [*lines, f"gate: {self.verdict.upper()}{allowed}"]

    @cached_property
    def _measured(self) -> dict[str, Any]:
        asked = [bound.name for bound in self.bounds if bound.metric]
        leaders = [leading(run.evidence.modality).name for run in self.runs]
        metrics = list(dict.fromkeys([*asked, *leaders]))
        runs = [
            {
                "folder": run.folder.url,
                "weights": run.weights,
                "seed": run.evidence.scenario["seed"],
                "finished": run.evidence.finished,
                "arms": run.names,
                "samples": run.samples,
                "checks": [_check_row(check) for check in checks],
                "updates": measure_updates(run.evidence, metrics, run.names),
            }
            for run, checks in zip(self.runs, self.checks, strict=True)
        ]
        return {"metrics": metrics, "runs": runs}

    def document(self) -> dict[str, Any]:
        """Return the result as a JSON document in the format of `gate.schema.json`."""
        return {
            "format": "rayfed-gate",
            "version": VERSION,
            "rayfed": __version__,
            "verdict": self.verdict,
            "exit_code": 0 if self.passed else 3,
            "allow_unmeasured": self.allow_unmeasured,
            "bounds": [{"metric": bound.name, "limit": bound.limit} for bound in self.bounds],
            **self._measured,
            "baseline": None if self.baseline is None else [_change_row(change) for change in self.changes],
        }

    def junit(self) -> str:
        """Return the result as JUnit XML, with one test case per check and change."""
        suite = xml.Element("testsuite", name="rayfed gate")
        for group, name, state, sentence in self._cases():
            case = xml.SubElement(suite, "testcase", classname=group, name=name)
            if state == GateState.FAILED:
                xml.SubElement(case, "failure", message=sentence)
            elif state != GateState.PASSED:
                xml.SubElement(case, "skipped" if self.allow_unmeasured else "error", message=sentence)
        if not len(suite) and self.verdict == GateVerdict.NOT_MEASURED:
            case = xml.SubElement(suite, "testcase", classname="rayfed", name="attacks")
            xml.SubElement(case, "skipped" if self.allow_unmeasured else "error", message="no attack applies")
        for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
        suite.set("tests", str(len(suite)))
        return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(suite, encoding="unicode") + "\n"

    def _cases(self) -> Iterator[tuple[str, str, GateState, str]]:
        for run, checks in zip(self.runs, self.checks, strict=True):
            for check in checks:
                batch = f", batch {check.batch}" if check.batch else ""
                yield f"{run.weights}.{check.arm}", f"{bound_text(check.bound)}{batch}", check.state, check_text(check)
        for change in self.changes:
            group = f"{self.runs[change.run].weights}.{change.arm}"
            yield group, f"{change.metric} not closer than in the baseline", change.state, change_text(change)


@dataclass(frozen=True)
class _Column:
    title: str
    to_the_right: bool = False

    def align(self, cell: str, width: int) -> str:
        return cell.rjust(width) if self.to_the_right else cell.ljust(width)


_CHECK_COLUMNS = (
    _Column("arm"),
    _Column("batch", to_the_right=True),
    _Column("bound"),
    _Column("value", to_the_right=True),
    _Column("verdict"),
    _Column("by"),
)
_CHANGE_COLUMNS = (
    _Column("arm"),
    _Column("metric"),
    _Column("change", to_the_right=True),
    _Column("updates", to_the_right=True),
    _Column("p", to_the_right=True),
    _Column("verdict"),
)


def _check_lines(checks: Sequence[Check]) -> list[str]:
    """Return one line per check in columns, each with its details on an indented line."""
    rows = [
        (
            check.arm,
            str(check.batch or NONE),
            bound_text(check.bound),
            check_value_text(check) or NONE,
            check.state.upper(),
            by_text(check) or NONE,
        )
        for check in checks
    ]
    return _align(_CHECK_COLUMNS, rows, [details_text(check) for check in checks])


def _change_lines(found: Sequence[Change]) -> list[str]:
    """Return one line per change in columns, each with its details on an indented line."""
    rows = [
        (
            change.arm,
            METRICS[change.metric].title,
            NONE if change.difference is None else f"{change.difference:+.3g}",
            str(change.updates or NONE),
            NONE if change.p is None else f"{change.p:.2g}",
            change.state.upper(),
        )
        for change in found
    ]
    return _align(_CHANGE_COLUMNS, rows, [change_details_text(change) for change in found])


def _align(columns: Sequence[_Column], rows: Sequence[Sequence[str]], details: Sequence[str]) -> list[str]:
    """Return rows under headings as lines of text, each followed by its details if there are any."""
    titles = [column.title for column in columns]
    widths = [max(map(len, cells)) for cells in zip(titles, *rows, strict=True)]
    lines = []
    for row, detail in zip([titles, *rows], ["", *details], strict=True):
        cells = [column.align(cell, width) for column, cell, width in zip(columns, row, widths, strict=True)]
        lines.append(f" {'  '.join(cells)}".rstrip())
        lines += [f"   {detail}"] if detail else []
    return lines


def _check_row(check: Check) -> dict[str, Any]:
    return {
        "metric": check.bound.name,
        "limit": check.bound.limit,
        "arm": check.arm,
        "batch": check.batch,
        "state": check.state,
        "value": check.value,
        "by": by_text(check),
        "reached": check.exceeding,
        "samples": check.samples,
        "reason": reasons_text(check),
    }


def _change_row(change: Change) -> dict[str, Any]:
    return {
        "run": change.run,
        "arm": change.arm,
        "metric": change.metric,
        "state": change.state,
        "test": change.test,
        "updates": change.updates,
        "difference": change.difference,
        "p": change.p,
        "reason": change_reasons_text(change),
        "newly": [list(key) for key in change.newly],
    }


def make_gate_schema() -> dict[str, Any]:
    """Return the JSON Schema of a gate's result."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("gate.schema.json").read_text(encoding="utf-8"))
    return found


def read_document(path: Path) -> dict[str, Any]:
    """Return the JSON result of an earlier gate from a file. Raises `UserError` for any other file."""
    require_extra("gate", "--baseline", "jsonschema")
    import jsonschema

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.validate(document, make_gate_schema())
    except OSError as error:
        raise UserError(
            f"--baseline {path}: cannot be read ({error.strerror}); give the file of an earlier --json"
        ) from error
    except (ValueError, jsonschema.ValidationError) as error:
        reason = getattr(error, "message", str(error))
        raise UserError(f"--baseline {path}: not a --json file of this version of rayfed: {reason}") from error
    assert isinstance(document, dict)
    return document
