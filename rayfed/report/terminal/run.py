"""Terminal view of a run: a progress bar on terminals, and one line per round."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rayfed.errors import noting_errors
from rayfed.evidence.arms import arm_names
from rayfed.evidence.attack_results import summarise_inferences
from rayfed.evidence.criteria import infer_modality
from rayfed.evidence.knowledge_pairs import failed_attacks, mark_outdone
from rayfed.evidence.outcomes import compute_outcomes
from rayfed.evidence.proved_bounds import attacks_without_bound, closest_comparisons, compare_bounds
from rayfed.evidence.robustness import robustness_matrix
from rayfed.evidence.rows import distortions, group_rows
from rayfed.evidence.settings import group_settings
from rayfed.evidence.training import summarise_arms
from rayfed.evidence.verdicts import RunEvidence, collect_evidence, read_evidence
from rayfed.metrics.known import NOUNS
from rayfed.report.samples import find_warning
from rayfed.report.terminal.results import (
    attackers_table,
    attacks_table,
    cost_table,
    inference_table,
    leakage_table,
    robustness_table,
)
from rayfed.report.terminal.rounds import RoundLines
from rayfed.report.terminal.time_left import TimeLeft
from rayfed.report.text.attacks import attack_results_text
from rayfed.report.text.audit import best_text, pass_text
from rayfed.report.text.formats import format_count
from rayfed.report.text.guarantees import epsilons, guarantee_lines
from rayfed.report.text.knowledge_pairs import failed_attack_text
from rayfed.report.text.leakage import leakage_title, legend, reasons
from rayfed.report.text.membership import AUC_LEGEND
from rayfed.report.text.next_step import next_step_text
from rayfed.report.text.proved_bounds import comparison_text, uncovered_text
from rayfed.report.text.weights import attacked_weights
from rayfed.store.exits import advise_on_state, read_status
from rayfed.store.folder import REPORT, SCENARIO

if TYPE_CHECKING:
    from rayfed.attacks.progress import Standing
    from rayfed.scenario import AttackSpec
    from rayfed.store.folder import RunFolder


class RunView:
    """Terminal view of one run; implements `rayfed.simulation.progress.Progress`."""

    def __init__(self, console: Console, quiet: bool = False, brief: bool = False, bar: bool = True) -> None:
        """Create a view. `quiet` prints errors and notes only, `brief` prints no lines on rounds.

        `bar` shows a progress bar on terminals.
        """
        self._console, self._quiet, self._brief = console, quiet, brief
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=quiet or not bar or not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._folder: RunFolder | None = None
        self._rounds = self._first = 0
        self._began = self._round_began = 0.0
        self._speed = ""
        self._attacks: list[dict[str, Any]] = []
        self._inferences: list[dict[str, Any]] = []
        self._scenario: dict[str, Any] = {}
        self._printed_at = self._reported_at = 0.0
        self._doing = ""
        self._left = TimeLeft(0.0)
        self._specs: Sequence[AttackSpec] = ()
        self._waiting: Sequence[str] = ()
        self._over = 0
        self._best = ""
        self.deadline = inf
        """Time at which the attacks of an audit are stopped, on the clock of `monotonic`."""
        self.noted: Collection[str] = ()
        """Notes that were printed before the run and are not repeated."""
        self._last: dict[str, dict[str, Any]] = {}
        self._round_rows: list[dict[str, Any]] = []
        self._accounted: list[dict[str, Any]] = []
        self._privacy: dict[str, str] = {}
        self._lines = RoundLines(0, 80)

    def starting(self, scenario: Any, folder: Any, where: str) -> None:
        """Print the run's size, where the run executes and the run's folder; start the progress bar."""
        self._folder, self._scenario = folder, scenario.model_dump(mode="json")
        self._rounds = scenario.federation.rounds
        self._lines = RoundLines(self._rounds, self._console.width, bool(self._scenario.get("opponents")))
        self._specs = scenario.attacks
        counts = [(scenario.federation.clients, "client"), (len(scenario.played), "arm"), (self._rounds, "round")]
        size = ", ".join(format_count(*c) for c in counts)
        self.say((scenario.name, "bold"), f": {size} (seed {scenario.seed}), on {_devices(scenario)}")
        self.say(f"Runs on: {where}")
        self.say(f"Results: {folder.url}")
        self._begin_bar("starting actors")

    def ready(self, first_round: int) -> None:
        """Start the clocks, so that rates and the time left do not include imports.

        If the run is resumed, read the earlier rounds from its folder for the final tables.
        """
        if first_round and self._folder:
            self._round_rows = self._folder.read_table("rounds").to_pylist()
            self._last = {row["arm"]: row for row in self._round_rows}
            self._attacks = self._folder.read_table("attacks").to_pylist()
            self._inferences = self._folder.read_table("inferences").to_pylist()
        self._first = first_round
        self._began = self._round_began = self._printed_at = monotonic()

    def accounted(self, rows: Sequence[dict[str, Any]]) -> None:
        """Print the privacy guarantees of the arms that have a defence, or why they have none."""
        self._accounted += rows
        self._privacy = epsilons(self._accounted)
        for line in guarantee_lines(rows):
            self.say(line)

    def clients_done(self, round: int, done: int, total: int) -> None:
        """Show the number of clients that have finished the round."""
        self._speed = f"{done / max(monotonic() - self._round_began, 1e-9):.1f} clients/s"
        self._show(f"round {round + 1}/{self._rounds}{self._last_round(round)}", done, total, self._speed)
        self._now_and_then(
            f"round {round + 1}/{self._rounds}: {done} of {format_count(total, 'client')}, {self._speed}"
        )

    def _last_round(self, number: int) -> str:
        """Return the results of the first arm in the last round, whose number counts from 1; empty before the first."""
        if not self._last:
            return ""
        arm, row = next(iter(self._last.items()))
        where = f"{arm}, " if len(self._last) > 1 else ""
        # a round with Poisson sampling may have no client
        loss = "no client" if row["train_loss"] is None else f"loss {row['train_loss']:.3f}"
        accuracy = "" if row.get("test_accuracy") is None else f" acc {row['test_accuracy']:.1%}"
        return f" ({where}round {number}: {loss}{accuracy})"

    def observations_done(self, round: int, done: int, total: int) -> None:
        """Show the number of attack observations (updates) that have been computed in the round."""
        self._show(f"round {round + 1}/{self._rounds}: observations", done, total, "")
        self._now_and_then(f"observation {done} of {total} done")

    def attacks_done(self, round: int, done: Sequence[tuple[str, float]], waiting: Sequence[str]) -> None:
        """Show the number of finished attacks, and the estimated time of the waiting attacks."""
        if not done:
            self._left = TimeLeft(monotonic(), {spec.title: spec.evaluations for spec in self._specs})
        self._left.ended(done)
        self._waiting, self._over = waiting, len(done)
        if not done:
            return
        title, left = done[-1][0], self._time_for_attacks()
        self._show(f"round {round + 1}/{self._rounds}: {title}", len(done), len(done) + len(waiting), left)
        if waiting:
            self._now_and_then(f"attack {len(done)} of {len(done) + len(waiting)} done, {title}; {left}")

    def search_goes_on(self, round: int, title: str, arm: str, standing: Standing) -> None:
        """Show the progress of one optimisation attack, and the estimated time left for all attacks."""
        self._left.heard(title, arm, standing, monotonic())
        left, every = self._time_for_attacks(), self._over + len(self._waiting)
        where = f"{title} on {arm}: {_stands(standing)}"
        self._show(f"round {round + 1}/{self._rounds}: {where}", self._over, every, left)
        self._now_and_then(f"{where}; attack {self._over + 1} of {every}; {left}")

    def best_so_far(self, best: Mapping[str, str]) -> None:
        """Show the best result so far of each arm."""
        self._best = f"; best so far: {best_text(best)}"

    def pass_done(
        self, evaluations: int, seconds: Mapping[bool, float], following: int | None, best: Mapping[str, str]
    ) -> None:
        """Print the time of a pass and the best result so far of each arm."""
        self.say(pass_text(evaluations, seconds, following, best))
        self._printed_at = monotonic()

    def _time_for_attacks(self) -> str:
        """Return the estimated time left for the attacks; for an audit, the time until it ends and its best results."""
        if self.deadline < inf:
            return f"ends in {_minutes(max(self.deadline - monotonic(), 0.0))} at the latest{self._best}"
        left = self._left.left(self._waiting, monotonic())
        if left.how == "at least" and not left.seconds:
            return f"time left not known yet{self._best}"
        return f"{left.how} {_minutes(left.seconds)} left{self._best}"

    def _begin_bar(self, description: str) -> None:
        self._bar.start()
        self._doing, self._reported_at, self._printed_at = description, monotonic(), monotonic()
        self._task = self._bar.add_task(description, total=None, rate="", left="")

    def pulse(self) -> None:
        """Print the current step if no progress bar and no recent line shows it. May be called from any thread."""
        if self._doing:
            silent = monotonic() - self._reported_at
            since = f"; still running, no progress reported for {_minutes(silent)}" if silent > _EVERY else ""
            self._now_and_then(f"{self._doing}{since}{self._best}")

    def _now_and_then(self, line: str) -> None:
        """Print a line if there is no progress bar and the last line is at least `_EVERY` seconds old."""
        if self._bar.disable and monotonic() - self._printed_at > _EVERY:
            self._printed_at = monotonic()
            self.say(line)

    def round_done(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        """Print the results of a round and one line per attack in the round."""
        self._attacks += attacks
        self._inferences += inferences
        self._round_rows += rows
        if self._brief:
            return
        with noting_errors(self._note_unprinted):
            self._say_round(rows, attacks, inferences)
        self._last |= {row["arm"]: row for row in rows}
        self._round_began = monotonic()

    def _say_round(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        for line in self._lines.lines(rows, self._time_left(rows[0]["round"]) if rows else ""):
            self.say(line)
        noun = NOUNS[infer_modality(attacks)]
        for (attack,), own in group_rows(attacks, "attack").items():
            self.say(attack_results_text(attack, own, noun))
        for (attack,), own in group_rows(inferences, "attack").items():
            self.say(attack_results_text(attack, own, "client"))

    def _note_unprinted(self, why: str) -> None:
        self.note(f"part of the summary could not be printed: {why}")

    @property
    def folder(self) -> RunFolder | None:
        """Return the folder of the run; None before the start."""
        return self._folder

    def interrupted(self, kind: str) -> None:
        """Print the results before an interruption, the path of the report, and the next step for the user."""
        self.close()
        if self._folder:
            self._attacks, self._inferences = (
                self._folder.read_table(name).to_pylist() for name in ("attacks", "inferences")
            )
            with noting_errors(self._note_unprinted):
                self._say_leakage(self._read_evidence())
            page, todo = f"{self._folder.url}/report.html", advise_on_state("interrupted", kind, self._folder.url)
            if kind != "attack":  # the command itself prints `rayfed resume`
                self.note(f"{page} shows the results so far")
            elif self._attacks or self._inferences:
                self.note(f"{page} shows the results so far; to continue: {todo}")
            else:
                self.note(f"{page} has no result, because no attack was finished; {todo}")

    def note(self, message: str) -> None:
        """Print a line that begins with `note:`."""
        if message in self.noted:
            return
        self._console.print(Text.assemble(("note:", "yellow"), f" {message}"), soft_wrap=True)  # a path stays whole

    def close(self) -> None:
        """Remove the progress bar."""
        self._doing = ""
        self._bar.stop()

    def stopped(self, state: str, kind: str) -> None:
        """Print the state in which the run ended and the next step for the user, if the run had started."""
        self.close()
        if self._folder:
            ended = {
                "failed": "the run has failed",
                "killed": "the run was killed",
                "interrupted": "the run was interrupted",
            }
            self.note(f"{ended.get(state, f'the run is {state}')}; {advise_on_state(state, kind, self._folder.url)}")

    def finished(self, report: str) -> None:
        """Print the results of the run and the path of the report."""
        self.close()
        with noting_errors(self._note_unprinted):
            self._say_results()
        self._say_report(report)
        with noting_errors(self._note_unprinted):
            self._warn_of_samples()

    def _say_report(self, report: str) -> None:
        """Print the path of the report, unless writing it failed, which a note has reported."""
        folder = self._folder
        if folder is None or folder.exists(REPORT) or not folder.exists(SCENARIO):
            self.say(f"Report: {report}")

    def _say_results(self) -> None:
        """Print leakage, attacks, inferences, robustness and cost, then the legend and the next step."""
        evidence = self._read_evidence()
        self._say_leakage(evidence)
        found = robustness_matrix(self._last.values(), self._scenario)
        if found.results:
            self._say_table(
                "Accuracy against malicious clients, and success rate of their backdoor", robustness_table(found)
            )
        else:
            self._say_cost()
        self._say_legend(evidence)
        self._say_next(next_step_text(evidence, run=self._url))

    def _read_evidence(self) -> RunEvidence:
        """Return the verdicts from the folder; without a folder, those on the results of the rounds so far."""
        if self._folder and self._folder.exists(SCENARIO):
            return read_evidence(self._folder)
        return collect_evidence(self._scenario, self._attacks, self._inferences)

    @property
    def _url(self) -> str:
        return self._folder.url if self._folder else "RUN"

    def _say_table(self, title: str, table: Table | None) -> None:
        if table is not None and not self._quiet:
            self.say()
            self.say((title, "bold"))
            self._console.print(table)

    def _say_leakage(self, evidence: RunEvidence) -> None:
        """Print the verdicts, then the results of each attack if there are several, then inferences."""
        if self._attacks:
            rows, criterion = evidence.rows, evidence.criterion
            known = read_status(self._folder) if self._folder else {}
            weights = attacked_weights(self._scenario, known, self._attacks)
            title = leakage_title(self._attacks, weights)
            self._say_table(title, leakage_table(rows, criterion))
            for line in reasons(rows, criterion):
                self.say(f"  {line}")
            if not self._brief:
                self._say_table("Attacks", attacks_table(self._attacks, criterion))
        claims = summarise_inferences(self._inferences, arm_names(self._scenario, self._inferences))
        if claims:
            self._say_table("Inference", inference_table(claims))
            for claim in claims:
                for (state, message), count in claim.failures.items():
                    self.say(f"  {claim.attack} on {claim.arm}: {count} {state}: {message}")
        self._say_proved()

    def _say_legend(self, evidence: RunEvidence) -> None:
        self.say()
        if self._attacks:
            rows, criterion = evidence.rows, evidence.criterion
            for line in legend(rows, self._attacks, criterion):
                self.say(line)
            if self._folder and not self._brief:
                for failed in failed_attacks(
                    mark_outdone(group_settings(compute_outcomes(self._folder)), self._scenario)
                ):
                    self.say(failed_attack_text(failed))
        if any(row["metric"] == "auc" for row in self._inferences):
            self.say(AUC_LEGEND)

    def _say_next(self, step: str) -> None:
        if step:
            self.say()
            self.say(step)

    def _say_cost(self) -> None:
        """Print the cost of each arm, compared with the first."""
        arms = summarise_arms(list(self._last), self._scenario, self._round_rows, [])
        first = f", compared with {arms[0].name}" if len(arms) > 1 else ""
        self._say_table(f"Cost{first}", cost_table(arms, self._privacy))

    def audited(self, weights: str, report: str) -> None:
        """Print the results of an audit on the given weights and the path of the report."""
        self.close()
        with noting_errors(self._note_unprinted):
            self._say_audit(weights)
        self._say_report(report)
        with noting_errors(self._note_unprinted):
            self._warn_of_samples()

    def _say_audit(self, weights: str) -> None:
        if self._folder:  # its scenario has the iterations of the last pass
            self._scenario = self._folder.scenario()
        self.say()
        self.say((f"Attacked: {weights}", "bold"))
        evidence = self._read_evidence()
        self._say_leakage(evidence)
        if self._attacks:
            found, changed = evidence.findings, distortions(self._attacks)
            title = "Attackers: non-adaptive, adaptive, and adaptive with the labels given"
            self._say_table(title, attackers_table(found, changed, evidence.criterion))
        self._say_legend(evidence)
        self._say_next(next_step_text(evidence))

    def _say_proved(self) -> None:
        """Print the results of attacks that have a proved bound, with the bound, and the attacks without one."""
        if self._folder:
            proved = self._folder.read_table("proved").to_pylist()
            for one in closest_comparisons(compare_bounds(proved, self._attacks, self._inferences)):
                self.say(f"compared with its bound: {comparison_text(one)}")
            privacy = self._folder.read_table("privacy").to_pylist()
            uncovered = attacks_without_bound(privacy, proved, self._attacks, self._inferences)
            if uncovered:
                self.say(uncovered_text(uncovered))

    def _warn_of_samples(self) -> None:
        """Print a warning if the run has samples that may not be public."""
        if self._folder and (text := find_warning(self._folder)):
            self.note(text)

    def _show(self, description: str, done: int, total: int, rate: str) -> None:
        self._doing, self._reported_at = f"{description.strip()}, {done} of {total}", monotonic()
        if self._task is not None:
            self._bar.update(self._task, description=escape(description), completed=done, total=total, rate=rate)

    def _time_left(self, round: int) -> str:
        finished, rest = round + 1 - self._first, self._rounds - round - 1
        if finished == 1:  # the first round includes the imports of all actors
            self._began = monotonic()
        per_round = (monotonic() - self._began) / max(finished - 1, 1)
        left = "" if finished == 1 else f"{_minutes(per_round * rest)} left"
        if not rest:
            left = "done"
        if self._task is not None:
            self._bar.update(self._task, left=left)
        return left

    def say(self, *parts: str | tuple[str, str]) -> None:
        """Print text with optional styles; brackets in names and paths are not parsed as markup."""
        if not self._quiet:
            self._console.print(Text.assemble(*parts), soft_wrap=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def _stands(standing: Standing) -> str:
    """Return the progress of a search as text."""
    search = f"search {standing.search}, " if standing.search > 1 else ""
    steps = f"{search}iteration {standing.iteration:,} of {standing.iterations:,}"
    rest = "" if standing.left == inf else f", {_minutes(standing.left)} left for the search"
    return f"{steps}, distance {standing.distance:.3g}{rest}"


_EVERY = 15.0
"""Minimum seconds between lines on attacks without a progress bar."""


def _devices(scenario: Any) -> str:
    """Return which device clients and attackers compute on, such as "CPU"."""
    kinds = ("clients", "attackers") if scenario.attacks else ("clients",)
    devices = {kind: "GPU" if getattr(scenario.resources, kind).num_gpus else "CPU" for kind in kinds}
    if len(set(devices.values())) == 1:
        return devices["clients"]
    return ", ".join(f"{device} ({kind})" for kind, device in devices.items())
