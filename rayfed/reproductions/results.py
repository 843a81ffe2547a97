"""Results of a reproduction: the verdicts on each size of its record, and whether the record is stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfed.reproductions.findings import make_findings
from rayfed.reproductions.judging import Judgement, Verdict, Whole, judge, overall
from rayfed.reproductions.kinds import Attacker, Size
from rayfed.reproductions.reading import Reproduction, load
from rayfed.reproductions.records import Record, SizeRecord, Staleness, find_changes, read_record


@dataclass(frozen=True)
class SizeResult:
    """Verdicts on one size."""

    size: Size
    record: SizeRecord
    judgements: Sequence[Judgement]
    staleness: Staleness

    @property
    def paper(self) -> Whole:
        """Return the verdict on the groups with the paper's attacker, or with none."""
        return overall(self.judgements) or Whole(Verdict.NOT_MEASURED)

    @property
    def adaptive(self) -> Whole | None:
        """Return the verdict on the groups with the adaptive attacker; None without one."""
        return overall(self.judgements, Attacker.ADAPTIVE)


@dataclass(frozen=True)
class Result:
    """A reproduction with the results of all recorded sizes."""

    name: str
    own: Reproduction
    sizes: Mapping[Size, SizeResult]

    @property
    def best(self) -> SizeResult | None:
        """Return the size closest to the paper, preferring current records to stale ones; None without a record."""
        order = [Size.REDUCED, Size.GPU, Size.PAPER]
        return max(self.sizes.values(), key=lambda one: (not one.staleness, order.index(one.size)), default=None)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the best size."""
        return self.best.paper.verdict if self.best else Verdict.NOT_MEASURED

    @property
    def causes(self) -> list[str]:
        """Return why the claim is not reproduced at the best size, as the file states it."""
        if self.best is None:
            return [absent.why for absent in self.own.absent] if self.own.scenario is None else []
        causes = [one.group.cause for one in self.best.judgements if one.verdict is not Verdict.REPRODUCED]
        return list(dict.fromkeys(filter(None, causes))) or list(filter(None, [self.own.cause]))


def result_of(name: str, own: Reproduction, record: Record) -> Result:
    """Return the results of a record by the present figures and rules."""
    sizes = {}
    for size in Size:
        if size in record.sizes:
            kept = record.sizes[size]
            judgements = [judge(group, make_findings(group, kept)) for group in own.compared(size)]
            sizes[size] = SizeResult(size, kept, judgements, find_changes(own, size, kept))
    return Result(name, own, sizes)


def read_results(files: Sequence[Path], folder: Path) -> list[Result]:
    """Return the results of reproductions, given by their files, from the records in a folder.

    Raises `RunError` for a damaged record.
    """
    return [result_of(path.stem, load(path), read_record(folder, path.stem)) for path in files]
