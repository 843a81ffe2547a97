"""Terminal view of a run: a live bar, and one line a round; only the lines when nobody is watching."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rayfed.analysis import audit, summary
from rayfed.analysis.formats import duration
from rayfed.analysis.outcomes import outcomes
from rayfed.analysis.proved import comparisons, nearest_to_bounds, uncovered
from rayfed.analysis.robustness import Matrix, Outcome, matrix
from rayfed.analysis.settings import settings
from rayfed.analysis.summary import labels_given, measured, passing, people, success
from rayfed.analysis.twins import failures, with_twins
from rayfed.analysis.unanswered import BROKEN, MEANING, closed_forms, counted
from rayfed.analysis.verdicts import (
    Verdict,
    attackers,
    criterion_of,
    guess,
    headline,
    next_step,
    rates,
    run_findings,
    verdicts,
)
from rayfed.errors import noting_errors
from rayfed.hidden import UNUSED
from rayfed.metrics.base import Metric
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.known import METRICS, NOUNS, leading
from rayfed.metrics.top import TOP, chance
from rayfed.privacy.printing import at_most, caution
from rayfed.report import words
from rayfed.report.samples import warning
from rayfed.report.time_left import TimeLeft
from rayfed.store.exits import advice, over, status
from rayfed.store.folder import REPORT, SCENARIO
from rayfed.store.schemas import UNPLAYED, VERSUS

if TYPE_CHECKING:
    from rayfed.attacks.telling import Standing
    from rayfed.samples import Modality
    from rayfed.scenario import AttackSpec
    from rayfed.store.folder import RunFolder


class RunView:
    """Terminal view of one run; implements `rayfed.engine.progress.Progress`."""

    def __init__(self, console: Console, quiet: bool = False, brief: bool = False, bar: bool = True) -> None:
        """Make a view; `quiet` says nothing but notes, `brief` leaves out the lines of rounds.

        `bar` shows progress on terminals.
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
        self._told = self._heard = 0.0
        self._doing = ""
        self._left = TimeLeft({}, 0.0)
        self._specs: Sequence[AttackSpec] = ()
        self._waiting: Sequence[str] = ()
        self._over = 0
        self.seconds: Mapping[str, float] = {}
        """About how many seconds one call of each attack takes, by title, where that is known."""
        self.ends: Callable[[float], float] = lambda began: inf
        """Returns when all attacks are stopped, given when they began (both by `monotonic`)."""
        self.noted: Collection[str] = ()
        """Notes that were printed before the run, and are not printed again."""
        self._last: dict[str, dict[str, Any]] = {}
        self._played: list[dict[str, Any]] = []
        self._privacy: dict[str, str] = {}
        self._withdrawn: list[str] = []
        self._success: dict[str, float] = {}

    def starting(self, scenario: Any, folder: Any, where: str) -> None:
        """Say what runs where, and begin the bar."""
        self._folder, self._scenario = folder, scenario.model_dump(mode="json")
        self._rounds, self._success = scenario.federation.rounds, scenario.metrics.success
        self._specs = scenario.attacks
        counts = [(scenario.federation.clients, "client"), (len(scenario.played), "arm"), (self._rounds, "round")]
        self.say((scenario.name, "bold"), f": {', '.join(_plural(*c) for c in counts)}; {where}")
        self.say(f"results in {folder.url}")
        self._begin_bar("starting actors")

    def ready(self, first_round: int) -> None:
        """Start the clocks: rates and the time left are of rounds, not of imports.

        The last table is of the whole run, so rounds that were played before are read from its folder.
        """
        if first_round and self._folder:
            self._played = self._folder.read_table("rounds").to_pylist()
            self._last = {row["arm"]: row for row in self._played}
            self._attacks = self._folder.read_table("attacks").to_pylist()
            self._inferences = self._folder.read_table("inferences").to_pylist()
        self._first = first_round
        self._began = self._round_began = self._told = monotonic()

    def accounted(self, rows: Sequence[dict[str, Any]]) -> None:
        """Say what is guaranteed, and what is not; nothing of arms without a defence."""
        for row in rows:
            said: str | None
            if row.get("epsilon") is not None:
                said = f"{at_most(row['epsilon'])} {row['unit']}"
            elif row.get("defence"):  # it has a mechanism
                said = "withdrawn"
                self._withdrawn += guarantee_lines([row])
            else:
                said = row.get("note") and "none"
            if said:
                self._privacy[row["arm"]] = ", ".join(filter(None, [self._privacy.get(row["arm"]), said]))
        for line in guarantee_lines(rows):
            self.say(line)

    def clients_done(self, round: int, done: int, total: int) -> None:
        """Move the bar by clients."""
        self._speed = f"{done / max(monotonic() - self._round_began, 1e-9):.1f} clients/s"
        first = next(iter(self._last.items()), None)
        of = f"{first[0]}, " if first and len(self._last) > 1 else ""
        last = first and f" ({of}round {round}: {_loss(first[1], '.3f')}{_tested(first[1], ' acc {:.1%}')})"
        self._show(f"round {round + 1}/{self._rounds}{last or ''}", done, total, self._speed)
        self._now_and_then(f"round {round + 1}/{self._rounds}: {done} of {_plural(total, 'client')}, {self._speed}")

    def observations_done(self, round: int, done: int, total: int) -> None:
        """Move the bar by what the attacks are to see."""
        self._show(f"round {round + 1}/{self._rounds}: observations", done, total, "")
        self._now_and_then(f"observation {done} of {total} is made")

    def attacks_done(self, round: int, done: Sequence[tuple[str, float]], waiting: Sequence[str]) -> None:
        """Move the bar by attacks, and say about how long the others take."""
        if not done:
            self._left = TimeLeft(self.seconds, monotonic(), {spec.title: spec.evaluations for spec in self._specs})
        self._left.ended(done)
        self._waiting, self._over = waiting, len(done)
        if not done:
            return
        title, left = done[-1][0], self._time_for_attacks()
        self._show(f"round {round + 1}/{self._rounds}: {title}", len(done), len(done) + len(waiting), left)
        if waiting:
            self._now_and_then(f"attack {len(done)} of {len(done) + len(waiting)} is over, {title}; {left}")

    def search_goes_on(self, round: int, title: str, arm: str, standing: Standing) -> None:
        """Show the progress of one attack's search, and about how long all attacks will still take."""
        self._left.heard(title, arm, standing, monotonic())
        left, every = self._time_for_attacks(), self._over + len(self._waiting)
        where = f"{title} on {arm}: {_stands(standing)}"
        self._show(f"round {round + 1}/{self._rounds}: {where}", self._over, every, left)
        self._now_and_then(f"{where}; attack {self._over + 1} of {every}; {left}")

    def trying(self, title: str, number: int, total: int, standing: Standing | None) -> None:
        """Show which attack is tried before a run, and how far its search is."""
        if self._task is None:
            self._told = monotonic()
            self._begin_bar("trying attacks")
        where = f"trying {title}" + ("" if standing is None else f": {_stands(standing)}")
        self._show(where, number, total, "")
        self._now_and_then(f"{where}; trial {number + 1} of {total}")

    def tried(self) -> None:
        """End the bar of the trials."""
        self.close()
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = None

    def _time_for_attacks(self) -> str:
        """Return in words how long the attacks still take, no longer than they may."""
        left = self._left.left(self._waiting, monotonic())
        most = max(self.ends(self._began) - monotonic(), 0.0)
        if left.seconds >= most:
            return f"about {_minutes(most)} left"
        if left.how == "at least" and not left.seconds:
            return "time left not known yet"
        return f"{left.how} {_minutes(left.seconds)} left"

    def _begin_bar(self, description: str) -> None:
        self._bar.start()
        self._doing, self._heard, self._told = description, monotonic(), monotonic()
        self._task = self._bar.add_task(description, total=None, rate="", left="")

    def pulse(self) -> None:
        """Say what goes on where nothing was heard of it for some time and there is no bar; any thread may ask."""
        if self._doing:
            silent = monotonic() - self._heard
            since = f"; it goes on, nothing new for {_minutes(silent)}" if silent > _EVERY else ""
            self._now_and_then(f"{self._doing}{since}")

    def _now_and_then(self, line: str) -> None:
        """Print a line where there is no bar, and the last one is some time ago."""
        if self._bar.disable and monotonic() - self._told > _EVERY:
            self._told = monotonic()
            self.say(line)

    def round_done(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        """Print one line for each arm (with opponents only where it was evaluated), one for each attack on it.

        Speed and time left are of all arms together.
        """
        self._attacks += attacks
        self._inferences += inferences
        self._played += rows
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
        width = max([11, *(len(row["arm"]) for row in rows)])
        for row in rows:
            if VERSUS in row["arm"] and row.get("test_accuracy") is None:
                continue  # every arm against every opponent are many
            loss = _loss(row, ".4f")
            accuracy = (_tested(row, "accuracy {:6.2%}") or _missed(row) or " " * 16) + _read(row) + _strangers(row)
            left = self._time_left(row["round"])
            arm = f"{row['arm']:<{width}} " if len(rows) > 1 else ""
            self.say(f"round {row['round'] + 1:>3}/{self._rounds}  {arm}{loss}  {accuracy}  {self._speed}  {left}")
        for (arm, attack), found in _grouped(attacks).items():
            self.say(f"  {attack} on {arm}: {_summary(found, audit.modality_of(attacks))}")
        for (arm, attack), found in _grouped(inferences).items():
            self.say(f"  {attack} on {arm}: {_inferred(found)}")

    def _note_unprinted(self, why: str) -> None:
        self.note(f"a part of the summary could not be printed: {why}")

    @property
    def folder(self) -> RunFolder | None:
        """The run's folder; None before it has begun."""
        return self._folder

    def interrupted(self, kind: str) -> None:
        """Print what leaked until an interruption of a run of this kind, the path of the report, and what to do."""
        self.close()
        if self._folder:
            self._attacks, self._inferences = (
                self._folder.read_table(name).to_pylist() for name in ("attacks", "inferences")
            )
            with noting_errors(self._note_unprinted):
                self._say_verdicts(over(status(self._folder)))
            page, todo = f"{self._folder.url}/report.html", advice("interrupted", kind, self._folder.url)
            if kind != "attack":  # `rayfed resume` is told beside the end of the command
                self.note(f"{page} shows what there is")
            elif self._attacks or self._inferences:
                self.note(f"{page} shows what there is; for the rest {todo}")
            else:
                self.note(f"no attack had answered, so {page} has no result; {todo}")

    def note(self, message: str) -> None:
        """Print a note on an unusual event."""
        if message in self.noted:
            return
        self._console.print(Text.assemble(("note:", "yellow"), f" {message}"), soft_wrap=True)  # a path stays whole

    def close(self) -> None:
        """End the bar, however the run ended."""
        self._doing = ""
        self._bar.stop()

    def stopped(self, state: str, kind: str) -> None:
        """Say what to do about a run of this kind that has ended in this state, unless it had not begun."""
        self.close()
        if self._folder:
            ended = {
                "failed": "the run has failed",
                "killed": "the run was killed",
                "interrupted": "the run was interrupted",
            }
            self.note(f"{ended.get(state, f'the run is {state}')}; {advice(state, kind, self._folder.url)}")

    def finished(self, report: str) -> None:
        """Print the table that the run was for, and where to read more."""
        self.close()
        with noting_errors(self._note_unprinted):
            self._say_results()
        self._say_report(report)
        with noting_errors(self._note_unprinted):
            self._warn_of_samples()

    def _say_report(self, report: str) -> None:
        """Print the path of the report, unless it could not be made, which was noted."""
        folder = self._folder
        if folder is None or folder.exists(REPORT) or not folder.exists(SCENARIO):
            self.say(f"report: {report}")

    def _say_results(self) -> None:
        found = matrix(self._last.values())
        if not found.outcomes:
            self._say_effects()
        self._say_simulated()
        if self._attacks and not self._quiet:
            self._console.print(self._table())
            for line in self._withdrawn:
                self.say(line)
        if found.outcomes and not self._quiet:
            self._console.print(_who_stands_whom(found))
        told = self._say_verdicts()
        if self._folder and self._attacks:
            for sentence in failures(with_twins(settings(outcomes(self._folder)), self._scenario)):
                self.say(sentence)
        if step := next_step(self._scenario, self._attacks, told):
            self.say(step)

    def audited(self, weights: str, report: str) -> None:
        """Print the worst case of every sample, each defence's effect, a sentence on each, and where to read more."""
        self.close()
        with noting_errors(self._note_unprinted):
            self._say_audit(weights)
        self._say_report(report)
        with noting_errors(self._note_unprinted):
            self._warn_of_samples()

    def _say_audit(self, weights: str) -> None:
        left: Mapping[str, Any] = {}
        if self._folder:  # whose scenario has the arms that there was no time for, too
            self._scenario, left = self._folder.scenario(), status(self._folder)
        if not self._quiet:
            self.say((f"{weights}:", "bold"))
            criterion = criterion_of(self._scenario, self._attacks)
            if cases := audit.worst_cases(self._attacks, criterion):
                found = run_findings(self._scenario, self._attacks)
                self._console.print(_worst_cases(cases, criterion))
                self._console.print(_defence_effects(found, audit.distortions(self._attacks), criterion))
        told = self._say_verdicts()
        step = next_step(self._scenario, self._attacks, told, left.get("enough"), left.get("fewer"))
        for line in filter(None, [*headline(self._scenario, told), step, self._time_unused()]):
            self.say(line)

    def _time_unused(self) -> str:
        """Return why an audit ended before its time; empty if it did not, or by seconds."""
        unused = self.ends(self._began) - monotonic()
        if not _EVERY < unused < inf:
            return ""
        why = "a part is kept for searches that take longer than their trials, which these did not"
        if any(row["status"] == UNPLAYED for row in self._attacks):
            why = "what is played was chosen by the trials, which expected it to take longer"
        return f"{_minutes(unused)} of the time was not used: {why}"

    def _say_effects(self) -> None:
        """Print what each defence changes, as the page does."""
        if len(self._last) > 1:
            compared = summary.arms(list(self._last), self._scenario, self._played, [])
            self.say((f"{words.effect_heading(compared)}:", "bold"))
            found = verdicts(self._scenario, self._attacks, self._inferences) if self._attacks else []
            for line in words.effects(compared, {verdict.arm: verdict for verdict in found}):
                self.say(f"  {line}")

    def _say_simulated(self) -> None:
        """Print what rounds take on the clients' devices, where effects of defences do not say it."""
        for arm in summary.arms(list(self._last), self._scenario, self._played, []) if len(self._last) == 1 else ():
            if arm.simulated:
                whole, each = (duration(s) for s in (arm.simulated.seconds, arm.simulated.rounds.mean))
                self.say(f"on the clients' devices: {whole} of simulated time, {each} a round")

    def _say_verdicts(self, finished: bool = True) -> Sequence[Verdict]:
        """Print and return the verdict on each arm, as at the top of the report, if anything was attacked."""
        told: Sequence[Verdict] = ()
        if self._attacks or self._inferences:
            told = verdicts(self._scenario, self._attacks, self._inferences, finished)
        unmeasured: dict[str, list[str]] = {}
        for verdict in told:
            if verdict.state == "not measured":
                unmeasured.setdefault(verdict.sentence.removeprefix(f"{verdict.arm}: "), []).append(verdict.arm)
            else:
                self.say((verdict.sentence, _STYLES.get(verdict.state, "")))
        for said, arms in unmeasured.items():
            self.say((f"{', '.join(arms)}: {said}", _STYLES["not measured"]))
        for said in filter(None, (attackers(told), rates(told))):
            self.say(said)
        if any(measured(row.get("above_guessing")) for row in self._attacks):
            self.say(guess(self._scenario, self._attacks))
        if self._attacks or self._inferences:
            self._say_proved()
        return told

    def _say_proved(self) -> None:
        """Print what attacks got beside what is proved, of each attack that an account covers."""
        if self._folder:
            proved = self._folder.read_table("proved").to_pylist()
            for one in nearest_to_bounds(comparisons(proved, self._attacks, self._inferences)):
                self.say(f"beside its bound, {one}")
            privacy = self._folder.read_table("privacy").to_pylist()
            for arm, attack in uncovered(privacy, proved, self._attacks, self._inferences):
                self.say(
                    f"nothing is proved of what {attack} gets on {arm}: its epsilon does not cover all that is seen, "
                    f"or bounds nothing"
                )

    def _warn_of_samples(self) -> None:
        """Warn where the run has samples that are not known to be public."""
        if self._folder and (said := warning(self._folder)):
            self.note(said)

    def _table(self) -> Table:
        accuracy = {arm: _tested(row, "{:.2%}") for arm, row in self._last.items()}
        pors = {metric: threshold for metric, threshold in self._success.items() if _values(self._attacks, metric)}
        form = audit.modality_of(self._attacks)
        leader, others = leading(form), _others(self._attacks, form)
        columns = ["arm", "attack", f"{NOUNS[form]}s", leader.short_name, "best"]
        columns += [f"PoRS {METRICS[metric].short_name}" for metric in pors] if len(pors) > 1 else ["PoRS"] * len(pors)
        columns += [metric.short_name for metric in others]
        columns += ["accuracy"] * bool(accuracy) + ["epsilon"] * bool(self._privacy)
        terms = [_TERMS[form]]
        if pors:
            limits = ", ".join(passing(*each) for each in pors.items())
            terms.append(f"PoRS, the share at the threshold, guesses among them: {limits}")
        if known := people(self._attacks):
            top = [metric for metric in others if metric.name in TOP]
            terms += [f"{metric.short_name} by chance: {chance(metric.name, known):.1%}" for metric in top]
        closed, groups = closed_forms(self._scenario), _grouped(self._attacks)
        broken = {met for met, found in groups.items() if counted(found, closed)[0]}
        if broken:
            terms.append(MEANING)
        title = f"leakage ({'; '.join(terms)})" + " and accuracy" * bool(accuracy)
        table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        for column in columns:
            table.add_column(
                column, justify="left" if column in ("arm", "attack") else "right", no_wrap=column != "epsilon"
            )
        for (arm, attack), found in groups.items():
            row: list[str | Text] = [
                Text(arm),
                Text(f"{attack}{BROKEN * ((arm, attack) in broken)}"),
                str(len(found)),
                _shown(leader, found, fmean),
                _shown(leader, found, max if leader.higher_is_closer else min),
                *(_share([success(found, *each)]) for each in pors.items()),
                *(
                    "given" if metric.of_labels and labels_given(found[0]) else _shown(metric, found, fmean)
                    for metric in others
                ),
                *[accuracy.get(arm) or "-"] * bool(accuracy),
                *[self._privacy.get(arm, "-")] * bool(self._privacy),
            ]
            table.add_row(*row)
        return table

    def _show(self, description: str, done: int, total: int, rate: str) -> None:
        self._doing, self._heard = f"{description.strip()}, {done} of {total}", monotonic()
        if self._task is not None:
            said = escape(description)
            self._bar.update(self._task, description=said, completed=done, total=total, rate=rate)

    def _time_left(self, round: int) -> str:
        played, rest = round + 1 - self._first, self._rounds - round - 1
        if played == 1:  # which takes the imports of all actors along and tells little of the others
            self._began = monotonic()
        per_round = (monotonic() - self._began) / max(played - 1, 1)
        left = "done" if not rest else "" if played == 1 else f"{_minutes(per_round * rest)} left"
        if self._task is not None:
            self._bar.update(self._task, left=left)
        return left

    def say(self, *parts: str | tuple[str, str]) -> None:
        """Print text as it is, with a style where one is given: brackets in names and paths are no markup."""
        if not self._quiet:
            self._console.print(Text.assemble(*parts), soft_wrap=True)


def guarantee_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each row of `privacy` that says something."""
    lines = []
    for row in rows:
        if (epsilon := row.get("epsilon")) is not None:
            said = f"epsilon {at_most(epsilon)} at delta {at_most(row['delta'])}, protects {row['adjacency']}"
            after = f"after {_plural(row['rounds'], 'round')}"
            lines.append(f"privacy of {row['arm']} {after}: {said}, against {row['against']}{caution(epsilon)}")
            lines += [f"proved of {row['arm']}: {line}" for line in words.bounds(row)]
        if (note := row.get("note")) is not None:
            lines.append(f"privacy of {row['arm']}: {note}")
    return lines


def _who_stands_whom(found: Matrix) -> Table:
    title = "accuracy against malicious clients, and how often a backdoor of theirs works"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("arm", no_wrap=True)
    for opponent in found.opponents:
        table.add_column(opponent, justify="right")
    for arm in found.arms:
        table.add_row(Text(arm), *(_outcome(found.outcomes.get((arm, opponent))) for opponent in found.opponents))
    return table


def _outcome(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    return f"{outcome.accuracy:.0%}" + ("" if outcome.backdoor is None else f", {outcome.backdoor:.0%}")


def _worst_cases(cases: Sequence[audit.WorstCase], criterion: audit.Criterion) -> Table:
    lead, noun = leading(criterion.modality), criterion.noun
    limit = criterion.written(criterion.threshold)
    title = f"undefended: the closest leak of every {noun}, or reconstruction; a leak from {limit}, beyond guessing"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("batch", "client", noun, lead.short_name, "above guessing", "attack", ""):
        table.add_column(column, justify="left" if column in ("attack", "") else "right", no_wrap=True)
    for case in cases:
        leak = ["[red]leaks[/red]"] * criterion.leaks(case.row) + ["in the verdict"] * case.named
        numbers = (str(case.batch), str(case.victim), str(case.sample), criterion.written(case.row[lead.name]))
        above = case.row["above_guessing"]
        gain = "-" if above is None else f"{above:+.1f} dB" if criterion.modality == "pixels" else f"{above:+.0%}"
        table.add_row(*numbers, gain, audit.short_title(case.row), ", ".join(leak))
    return table


def _defence_effects(
    found: Sequence[audit.Finding], distortions: Mapping[str, float], criterion: audit.Criterion
) -> Table:
    title = "defences: distortion of the gradient (relative), closest reconstruction blind / informed / with labels too"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("defence", no_wrap=True)
    table.add_column("distortion", justify="right", no_wrap=True)
    batches = list(dict.fromkeys(finding.batch for finding in found))
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    cells = {(finding.arm, finding.batch): finding for finding in found}
    for arm, distortion in distortions.items():
        row = [_closest(cells[arm, batch], criterion) if (arm, batch) in cells else Text("-") for batch in batches]
        table.add_row(Text(arm), f"{distortion:.3f}", *row)
    margin = 1.0 if criterion.modality == "pixels" else 0.05  # dB, or a share of a text or record
    if any(_less_by_more(finding, margin) for finding in found):
        table.caption = "Who knows more found less in places, as a search may; a verdict goes by the closest of all."
        table.caption_justify = "left"
    return table


def _less_by_more(finding: audit.Finding, margin: float) -> bool:
    """Return whether attackers who know more came less close, by more than `margin`."""
    values = [finding.closest[twin] for twin in audit.TWINS if twin in finding.closest]
    return any(more < less - margin for less, more in pairwise(values))


def _closest(finding: audit.Finding, criterion: audit.Criterion) -> Text:
    values = [finding.closest.get(twin) for twin in audit.TWINS]
    told = " / ".join("-" if value is None else criterion.written(value).removesuffix(" dB") for value in values)
    return Text(told, style="red" if finding.state == "leaks" else "")


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def _stands(standing: Standing) -> str:
    """Return in words how far a search is."""
    search = f"search {standing.search}, " if standing.search > 1 else ""
    steps = f"{search}iteration {standing.iteration:,} of {standing.iterations:,}"
    rest = "" if standing.left == inf else f", {_minutes(standing.left)} left of it"
    return f"{steps}, distance {standing.distance:.3g}{rest}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _grouped(attacks: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in attacks:
        groups[row["arm"], row["attack"]].append(row)
    return groups


def _loss(row: dict[str, Any], form: str) -> str:
    """Return the training loss in words; a round with Poisson sampling of clients may have none."""
    return "no client" if row["train_loss"] is None else f"loss {row['train_loss']:{form}}"


def _tested(row: dict[str, Any], form: str) -> str:
    """Return the test accuracy in words, or nothing for a round that was not evaluated."""
    return "" if row.get("test_accuracy") is None else form.format(row["test_accuracy"])


def _missed(row: dict[str, Any]) -> str:
    """Return the test error in words, beside that of a guess, or nothing where targets are no quantities."""
    if row.get("test_error") is None:
        return ""
    return f"error {row['test_error']:.4f} (the median's {row['guessing_error']:.4f})"


def _read(row: dict[str, Any]) -> str:
    """Return perplexity or intersection over union in words, beside that of a guess, where the loss is of places."""
    if row.get("test_iou") is not None:
        return f"  IoU {row['test_iou']:.1%} (of one class everywhere {row['guessing_iou']:.1%})"
    if row.get("test_perplexity") is None:
        return ""
    return f"  perplexity {row['test_perplexity']:.1f} (of frequencies {row['guessing_perplexity']:.1f})"


def _strangers(row: dict[str, Any]) -> str:
    """Return a non-member's accuracy in words, where clients have a private part."""
    anew, averaged = row.get("stranger_accuracy"), row.get("stranger_mean_accuracy")
    return "" if anew is None else f" (non-member {anew:.2%}, with mean private layers {averaged:.2%})"


def _values(rows: Sequence[dict[str, Any]], column: str) -> list[float]:
    """Return a column's numbers; those of exact images are cut off, rows without one are left out."""
    ceiling = METRICS[column].ceiling if column in METRICS else inf
    found = (min(row[column], ceiling) for row in rows if row.get(column) is not None)
    return [value for value in found if isfinite(value)]


def _decibel(psnr: float) -> str:
    return f">{PSNR_CEILING:.0f} dB" if psnr >= PSNR_CEILING else f"{psnr:.1f} dB"


def _share(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.0%}" if known else "-"


def _inferred(rows: Sequence[dict[str, Any]]) -> str:
    values, chance = _values(rows, "value"), _values(rows, "chance")
    metric = rows[0]["metric"].replace("auc", "AUC").replace("_", " ")
    found = _values(rows, "control")
    control = (
        (f"control without the update {fmean(found):.2f}, " if found else "no control, ") if metric == "AUC" else ""
    )
    name = "mean of the clients' AUCs" if metric == "AUC" and len(values) > 1 else metric
    quality = f"{name} {fmean(values):.2f} ({control}chance {fmean(chance):.2f})" if values else "nothing inferred"
    return f"{_plural(len(rows), 'client')}, {quality}" + _failures(rows)


def _failures(rows: Sequence[dict[str, Any]]) -> str:
    """Return why attacks did not answer, and what they had to do without; not what the verdict says of the code."""
    told = {_without_code(r.get("message")) if r["status"] == "ok" else f"{r['status']}: {r['message']}" for r in rows}
    return "".join(f"; {one}" for one in sorted(filter(None, told)))


def _without_code(message: str | None) -> str:
    return "; ".join(part for part in (message or "").split("; ") if not part.startswith(UNUSED))


def _summary(rows: Sequence[dict[str, Any]], form: Modality) -> str:
    leader = leading(form)
    found = _values(rows, leader.name)
    called = leader.title if leader.unit else leader.name.replace("_", " ")
    unit = f" {leader.unit}" if leader.unit else ""
    mean, best = (f"{_shown(leader, rows, pick)}{unit}" for pick in (fmean, max))
    quality = f"{called} mean {mean}, best {best}; " if found else ""
    labels = "labels given" if labels_given(rows[0]) else f"labels {_share(_values(rows, 'label_accuracy'))}"
    return f"{_plural(len(rows), NOUNS[form])}, {quality}{labels}" + _failures(rows)


def _others(attacks: Sequence[dict[str, Any]], form: Modality) -> list[Metric]:
    """Return the metrics of the last table behind the leading one.

    They are those measured, or measured unless a scenario says otherwise.
    """
    shown = [
        metric
        for metric in METRICS.values()
        if "run" in metric.tables
        and metric != leading(form)
        and (form in metric.default_of or _values(attacks, metric.name))
    ]
    hits = [metric for metric in shown if metric.format == "hit"]
    return [metric for metric in shown if metric not in hits[1:]]  # the report has all


def _shown(metric: Metric, rows: Sequence[dict[str, Any]], pick: Callable[[Sequence[float]], float]) -> str:
    values = _values(rows, metric.name)
    if not values:
        return "-"
    if metric.unit == "dB":
        return _decibel(pick(values)).removesuffix(" dB")
    return f"{pick(values):.0%}" if metric.format in ("share", "hit") else f"{pick(values):.3f}"


_EVERY = 15.0
"""Seconds between lines on a long round of attacks where there is no bar."""
_STYLES = {"leaks": "red", "inconclusive": "yellow", "not measured": "yellow"}
_TERMS: dict[Modality, str] = {
    "pixels": "mean and best PSNR in dB",
    "tokens": "mean and best share of tokens in their places",
    "records": "mean and best share of features found",
}
