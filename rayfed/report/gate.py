"""A gate's verdict as other programs read it: JSON by the schema beside this file, and JUnit's XML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as xml

from rayfed.analysis.baseline import Change, attacked, changes, updates
from rayfed.analysis.gate import Bound, Check, Played, State
from rayfed.analysis.verdicts import next_step, verdicts
from rayfed.errors import UserError
from rayfed.metrics.known import leading
from rayfed.store import exits
from rayfed.store.folder import RunFolder
from rayfed.version import __version__

VERSION = 2
"""Version of the document; it rises where a reader of the last would misread the next."""
Verdict = Literal["passed", "failed", "not measured", "no bound"]


@dataclass(frozen=True)
class Gated:
    """A run that a gate checks."""

    folder: RunFolder
    weights: str
    """The weights that were attacked, in words."""
    arms: Sequence[str] | None = None
    """Arms that are looked at; None: `Played.gated`."""

    @cached_property
    def played(self) -> Played:
        """What the run's folder has."""
        attacks, inferences = (self.folder.read_table(name).to_pylist() for name in ("attacks", "inferences"))
        over = exits.over(self._status)
        return Played(self.folder.scenario(), attacks, inferences, over)

    @cached_property
    def next_step(self) -> str:
        """What to do to learn more; empty if every arm has an answer."""
        had = self.played
        told = verdicts(had.scenario, had.attacks, had.inferences, finished=had.finished)
        return next_step(had.scenario, had.attacks, told, self._status.get("enough"), self.fewer)

    @property
    def fewer(self) -> str | None:
        """That fewer samples were attacked than were asked for, in words; None where all were."""
        return self._status.get("fewer")

    @cached_property
    def _status(self) -> Mapping[str, Any]:
        return exits.status(self.folder)

    @cached_property
    def names(self) -> list[str]:
        """Names of the arms that are looked at."""
        return self.played.gated if self.arms is None else list(self.arms)

    @cached_property
    def samples(self) -> str:
        """Digest of the samples that were attacked."""
        return attacked(*(self.folder.read_table(name).to_pylist() for name in ("images", "texts")))


@dataclass(frozen=True)
class Ruling:
    """Ruling of a gate on some runs."""

    runs: Sequence[Gated]
    bounds: Sequence[Bound]
    allow_unmeasured: bool = False
    baseline: Mapping[str, Any] | None = None
    """An earlier ruling's document."""

    @cached_property
    def checks(self) -> list[list[Check]]:
        """The checks of every run."""
        return [run.played.checks(self.bounds, run.names) for run in self.runs]

    @cached_property
    def changes(self) -> list[Change]:
        """What became of every run since the baseline; empty without one."""
        return [] if self.baseline is None else changes(self._measured, self.baseline)

    @property
    def verdict(self) -> Verdict:
        """One word for all checks and changes, the worst of them."""
        if not self.bounds and self.baseline is None:
            return "no bound"
        states = {check.state for run in self.checks for check in run} | {change.state for change in self.changes}
        if "failed" in states:
            return "failed"
        return "passed" if states == {"passed"} else "not measured"

    @property
    def passed(self) -> bool:
        """Whether a build may go on."""
        return self.verdict in ("passed", "no bound") or (self.verdict == "not measured" and self.allow_unmeasured)

    @cached_property
    def lines(self) -> list[str]:
        """The ruling in words."""
        said = []
        for run, checks in zip(self.runs, self.checks, strict=True):
            said += [f"gate on {', '.join(run.names)} ({run.weights}):"] if checks else []
            said += [f"  {check.sentence}" for check in checks]
            said += [f"  {run.fewer}, for want of time"] if checks and run.fewer else []
        said += [f"  {change.sentence}" for change in self.changes]
        allowed = ", which --allow-unmeasured lets pass" if self.passed and self.verdict == "not measured" else ""
        return [*said, f"gate: {self.verdict.upper()}{allowed}"]

    @cached_property
    def _measured(self) -> dict[str, Any]:
        asked = [bound.name for bound in self.bounds if bound.metric]
        leaders = [leading(run.played.modality).name for run in self.runs]
        metrics = list(dict.fromkeys([*asked, *leaders]))
        runs = [
            {
                "folder": run.folder.url,
                "weights": run.weights,
                "seed": run.played.scenario["seed"],
                "finished": run.played.finished,
                "arms": run.names,
                "samples": run.samples,
                "checks": [_row(check) for check in checks],
                "updates": updates(run.played, metrics, run.names),
            }
            for run, checks in zip(self.runs, self.checks, strict=True)
        ]
        return {"metrics": metrics, "runs": runs}

    def document(self) -> dict[str, Any]:
        """Return the ruling as `gate.schema.json` describes it."""
        return {
            "format": "rayfed-gate",
            "version": VERSION,
            "rayfed": __version__,
            "verdict": self.verdict,
            "exit_code": 0 if self.passed else 3,
            "allow_unmeasured": self.allow_unmeasured,
            "bounds": [{"metric": bound.name, "limit": bound.limit} for bound in self.bounds],
            **self._measured,
            "baseline": None if self.baseline is None else [_written(change) for change in self.changes],
        }

    def junit(self) -> str:
        """Return the ruling as JUnit's XML, a test case for each check and change."""
        suite = xml.Element("testsuite", name="rayfed gate")
        for group, name, state, sentence in self._cases():
            case = xml.SubElement(suite, "testcase", classname=group, name=name)
            if state == "failed":
                xml.SubElement(case, "failure", message=sentence)
            elif state != "passed":
                xml.SubElement(case, "skipped" if self.allow_unmeasured else "error", message=sentence)
        if not len(suite) and self.verdict == "not measured":
            case = xml.SubElement(suite, "testcase", classname="rayfed", name="attacks")
            xml.SubElement(case, "skipped" if self.allow_unmeasured else "error", message="no attack applies")
        for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
        suite.set("tests", str(len(suite)))
        return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(suite, encoding="unicode") + "\n"

    def _cases(self) -> Iterator[tuple[str, str, State, str]]:
        for run, checks in zip(self.runs, self.checks, strict=True):
            for check in checks:
                batch = f", batch {check.batch}" if check.batch else ""
                yield f"{run.weights}.{check.arm}", f"{check.bound.sentence}{batch}", check.state, check.sentence
        for change in self.changes:
            group = f"{self.runs[change.run].weights}.{change.arm}"
            yield group, f"{change.metric} no nearer than in the baseline", change.state, change.sentence


def _row(check: Check) -> dict[str, Any]:
    row = asdict(check)
    row.pop("bound")
    row.pop("interval")
    return {"metric": check.bound.name, "limit": check.bound.limit, **row}


def _written(change: Change) -> dict[str, Any]:
    return asdict(change) | {"newly": [list(key) for key in change.newly]}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a ruling's document."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("gate.schema.json").read_text(encoding="utf-8"))
    return found


def read_document(path: Path) -> dict[str, Any]:
    """Return an earlier ruling's document; raises `UserError` for a file that is none."""
    import jsonschema

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.validate(document, schema())
    except OSError as error:
        raise UserError(f"--baseline {path}: cannot be read: {error.strerror}") from error
    except (ValueError, jsonschema.ValidationError) as error:
        said = getattr(error, "message", str(error))
        raise UserError(f"--baseline {path}: is no file that --json of this version wrote: {said}") from error
    assert isinstance(document, dict)
    return document
