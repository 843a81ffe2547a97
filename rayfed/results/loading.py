"""Runs and sweeps as Python objects, for notebooks and commands on results: `rayfed.load("runs/...")`.

Only Parquet, YAML, JSON and PNG files are read; nothing is unpickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rayfed.errors import RunError, nearest
from rayfed.evidence import outcomes, pareto, settings
from rayfed.evidence.arms import arm_names
from rayfed.evidence.baseline_check import mark_idle
from rayfed.evidence.knowledge_pairs import mark_outdone
from rayfed.evidence.methods import closed_forms
from rayfed.evidence.paired import (
    PairedDifference,
    PairGroup,
    compare_pairs,
    group_by_seed,
    group_by_victim,
    paired_table,
)
from rayfed.evidence.rows import Row, is_measured
from rayfed.evidence.settings import Setting
from rayfed.evidence.success import CURVE_METRICS, AttackGroup, group_by_attack, success_curve, success_table
from rayfed.evidence.verdicts import VERDICTS, RunEvidence, Verdict, read_evidence
from rayfed.evidence.victims import Victim, estimate_over_victims, victims_by_attack
from rayfed.report.text.outcomes import with_reason_texts
from rayfed.report.text.settings import UNFINISHED
from rayfed.results.notebook import make_html
from rayfed.results.pictures import Picture
from rayfed.results.sweep_folder import SweepFolder, is_sweep
from rayfed.store import exits
from rayfed.store.finding import Finding
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import TABLES, image_key
from rayfed.store.typed import table_from

if TYPE_CHECKING:
    from pandas import DataFrame

OUTCOMES = "outcomes"
"""Name of the table of outcomes, which runs and sweeps have."""
SUCCESS = "success_rates"
"""Name of the table of `Results.success_rates` for all measured metrics."""
PAIRED = "paired"
"""Name of the table of `Results.paired` against the first arm."""


@dataclass(frozen=True, repr=False)
class Results(ABC):
    """Base class of `Run` and `Sweep`: tables and statistics of a folder."""

    folder: RunFolder

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.folder.name

    @property
    def url(self) -> str:
        """Return the address of the folder: a path or a URL."""
        return self.folder.url

    @property
    def scenario(self) -> dict[str, Any]:
        """Return the scenario of the run with every default written out. Raises `RunError` for a damaged file."""
        return self.folder.scenario()

    @property
    def fields(self) -> list[str]:
        """Return the paths of the swept fields; empty for a run."""
        return list((self.scenario.get("sweep") or {}).get("fields", []))

    @property
    @abstractmethod
    def tables(self) -> list[str]:
        """Return the names of the tables that `table` accepts."""

    @abstractmethod
    def table(self, name: str) -> pa.Table:
        """Return a table as an Arrow table. Raises `RunError` if the table does not exist or cannot be read."""

    def frame(self, name: str) -> DataFrame:
        """Return a table as a pandas data frame."""
        return self.table(name).to_pandas()

    def outcomes(self) -> pa.Table:
        """Return the outcomes: one row for every arm and attack; for a sweep, also for every trial."""
        return self.table(OUTCOMES)

    def settings(self, source: str = "") -> list[Setting]:
        """Return the outcomes grouped by arm, attack and swept values, with intervals over repeats."""
        found = settings.group_settings(self.outcomes().to_pylist(), self.fields, source, self.scenario)
        return mark_idle(mark_outdone(found, self.scenario), self.scenario)

    @abstractmethod
    def with_intervals(self) -> list[Setting]:
        """Return the settings with intervals: over repeats, or over the attacked clients of a single run."""

    @abstractmethod
    def groups(self, source: str = "") -> list[PairGroup]:
        """Return the values to pair between arms: by victim for a run, by seed for a sweep."""

    def paired(self, against: str | None = None) -> list[PairedDifference]:
        """Return paired differences of all arms from the reference arm `against`, by default the first arm."""
        return compare_pairs(self.groups(), against)

    def front(
        self, leakage: str, utility: str, cost: str | None = None, attack: str | None = None
    ) -> pareto.ParetoFront:
        """Return the Pareto front of the settings; see `rayfed.evidence.pareto.compute_front`."""
        return pareto.compute_front(self.settings(), leakage, utility, cost, attack)

    def success_rates(self, *metrics: str, thresholds: Sequence[float] | None = None) -> pa.Table:
        """Return the share of attacked images that reach a threshold, by setting, attack, metric and threshold.

        Metrics are `psnr`, `ssim`, `mse`, `lpips_alex` and `lpips_vgg`. Default: all that were measured. `thresholds`
        default to all measured values. For the columns see `rayfed.evidence.success.success_table`. Raises `UserError`
        for another metric.
        """
        found = (success_curve(g, m, thresholds) for g in self._groups() for m in metrics or CURVE_METRICS)
        return success_table(one for one in found if one)

    @abstractmethod
    def _groups(self) -> list[AttackGroup]:
        """Return the rows of `attacks` grouped by arm, setting and attack."""

    def _repr_html_(self) -> str:
        return make_html(repr(self), self.settings())

    def _check(self, name: str) -> None:
        if name not in self.tables:
            raise RunError(f"'{self.url}' has no table '{name}': {nearest(name, self.tables)}")

    @property
    @abstractmethod
    def unfinished(self) -> str:
        """Return a clause on unfinished or failed parts of the run or sweep; empty if there are none."""

    @property
    def status(self) -> dict[str, Any]:
        """Return the progress: `state`, `error`, `rounds_done` of `rounds` or `trials_done`; empty before the start."""
        return exits.read_status(self.folder)


class Run(Results):
    """Results of one run. Tables are also attributes: `run.rounds` is `run.table("rounds")`."""

    def __repr__(self) -> str:
        status, arms = self.status, ", ".join(self.scenario.get("arms") or {})
        far = f"{status.get('rounds_done', '?')} of {status.get('rounds', '?')} rounds"
        return f"Run {self.url}: {status.get('state', 'unknown')}, {far}" + (f"; arms: {arms}" if arms else "")

    def _repr_html_(self) -> str:
        return make_html(repr(self), self.settings(), self.worst())

    def __getattr__(self, name: str) -> pa.Table:
        if name not in TABLES:
            raise AttributeError(f"a run has no attribute or table '{name}': {nearest(name, self.tables)}")
        return self.table(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *TABLES]

    @property
    def tables(self) -> list[str]:
        """Return the table names: `outcomes`, `success_rates`, `paired`, and the run's own tables."""
        return [OUTCOMES, SUCCESS, PAIRED, *TABLES]

    def table(self, name: str) -> pa.Table:
        """Return a table as an Arrow table, with 0 rows if the run did not write the table.

        Raises `RunError` if the name is unknown or the table cannot be read.
        """
        self._check(name)
        if name == SUCCESS:
            return self.success_rates()
        if name == PAIRED:
            return paired_table(self.paired())
        if name == VERDICTS:
            return table_from(self.evidence().rows, Finding)
        if name == OUTCOMES:
            return outcomes.outcomes_table(with_reason_texts(outcomes.compute_outcomes(self.folder)))
        return self.folder.read_table(name)

    @property
    def unfinished(self) -> str:
        """Return a sentence on a run that did not finish; empty for a finished run."""
        return "" if exits.is_complete(self.status) or not self.status else UNFINISHED

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each arm, as in the report and the terminal."""
        return self.evidence().verdicts

    def evidence(self) -> RunEvidence:
        """Return the results of the attacks with the verdicts."""
        return read_evidence(self.folder)

    def with_intervals(self) -> list[Setting]:
        """Return the settings with intervals over the attacked clients."""
        return estimate_over_victims(self.settings(), self._victims())

    def groups(self, source: str = "") -> list[PairGroup]:
        """Return the values to pair between arms, by victim (attacked client)."""
        return group_by_victim(self._victims(), self.settings(), source)

    def _victims(self) -> dict[tuple[str, str], dict[int, Victim]]:
        attacks, inferences = self.attacks.to_pylist(), self.inferences.to_pylist()
        arms, closed = arm_names(self.scenario, attacks, inferences), closed_forms(self.scenario)
        return victims_by_attack(attacks, inferences, arms, closed)

    def _groups(self) -> list[AttackGroup]:
        return group_by_attack(self.attacks.to_pylist())

    def images(self, arm: str | None = None, attack: str | None = None) -> Iterator[Picture]:
        """Return true images and their reconstructions, sorted by round; optionally of one arm or attack only."""
        for row in self._pictures():
            if arm in (None, row["arm"]) and attack in (None, row["attack"]):
                yield Picture.from_row(row)

    def worst(self, count: int = 6) -> list[tuple[Picture, Mapping[str, Any]]]:
        """Return the `count` stored reconstructions with the highest PSNR, each with the row of `attacks`."""
        scored = {_key(row): row for row in self.attacks.to_pylist() if is_measured(row["psnr"])}
        kept = [row for row in self._pictures() if _key(row) in scored]
        kept = sorted(kept, key=lambda row: -scored[_key(row)]["psnr"])[:count]
        return [(Picture.from_row(row), scored[_key(row)]) for row in kept]

    def _pictures(self) -> Iterator[dict[str, Any]]:
        for batch in self.table("images").to_batches(max_chunksize=64):
            yield from batch.to_pylist()


class Sweep(Results):
    """Results of a sweep: runs of one scenario with varied fields."""

    def __repr__(self) -> str:
        ended = ", ".join(f"{count} {state}" for state, count in self._ended().items()) or "none has ended"
        return f"Sweep {self.url} over {', '.join(self.fields) or 'seeds'}; trials: {ended}"

    def _ended(self) -> dict[str, int]:
        """Return the number of trials that have ended, by state."""
        found = self.outcomes().select(["trial", "repeat", "status"]).to_pylist()
        states = {(row["trial"], row["repeat"]): row["status"] for row in found}
        return {state: list(states.values()).count(state) for state in sorted(set(states.values()))}

    @property
    def unfinished(self) -> str:
        """Return a clause on trials that did not finish, or that the means exclude; empty if there are none."""
        status, ended = self.status, self._ended()
        total = sum(ended.values())
        if status.get("state", "finished") != "finished":
            of = f"{total} of {status['trials']}" if status.get("trials") else f"{total}"
            return f"{of} trials ended: unfinished"
        lost = [f"{count} {state}" for state, count in ended.items() if state != "finished"]
        return f"{' and '.join(lost)} of {total} trials: means exclude them" if lost else ""

    @property
    def tables(self) -> list[str]:
        """Return the table names: `outcomes`, `success_rates` and `paired`. The trials' runs have the other tables."""
        return [OUTCOMES, SUCCESS, PAIRED]

    def table(self, name: str) -> pa.Table:
        """Return outcomes, success rates or paired differences as an Arrow table. Raises `RunError` for other names."""
        self._check(name)
        if name == PAIRED:
            return paired_table(self.paired())
        return self.success_rates() if name == SUCCESS else SweepFolder(self.folder).outcomes()

    def with_intervals(self) -> list[Setting]:
        """Return the settings with intervals over repeats."""
        return self.settings()

    def groups(self, source: str = "") -> list[PairGroup]:
        """Return the values to pair between arms, by seed."""
        return group_by_seed(self.settings(source))

    def _groups(self) -> list[AttackGroup]:
        """Return the rows of `attacks` grouped by setting and attack, over all repeats."""
        sweep, met = SweepFolder(self.folder), [one for one in self.settings() if one.attack]
        runs = dict.fromkeys(row["run"] for one in met for row in one.rows)
        attacks = {run: sweep.trial(run).read_table("attacks").to_pylist() for run in runs}

        def rows(one: Setting) -> list[Row]:
            found = (row for trial in one.rows for row in attacks[trial["run"]])
            return [row for row in found if (row["arm"], row["attack"]) == (one.arm, one.attack)]

        return [AttackGroup(one.title, one.arm, str(one.attack), rows(one)) for one in met]

    @property
    def trials(self) -> list[Run]:
        """Return the runs of the trials, in the order of the outcomes; read each run's files on first use."""
        runs = dict.fromkeys(run for run in self.outcomes()["run"].to_pylist() if run is not None)
        return [self.trial_of(run) for run in runs]

    def trial_of(self, run: str) -> Run:
        """Return the run named in the column `run` of the outcomes. Raises `RunError` for an invalid name."""
        return Run(SweepFolder(self.folder).trial(run))


def open_results(path: str) -> Run | Sweep:
    """Open the run or sweep at a local path or fsspec URL. Raises `RunError` if there is no run or sweep."""
    folder = RunFolder.open(path)
    return Sweep(folder) if is_sweep(folder) else Run(folder)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(image_key(row).values())
