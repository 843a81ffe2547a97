"""Gate on a run: checks of the attacks' results against the user's bounds, by arm and batch size.

A check passes if attacks exceed the bound without a defence, and do not exceed it on the same samples with the defence.
If no attack exceeds the bound without a defence, the check is inconclusive, because the attacks may be too weak. An arm
without a defence never passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rayfed import reasons
from rayfed.analysis.formats import duration
from rayfed.analysis.membership import RATES, Roc, roc, stated
from rayfed.analysis.summary import arm_names, arm_spec, knowledge_of, recorded, undefended
from rayfed.analysis.unanswered import closed_forms, unanswered
from rayfed.analysis.verdicts import NOTHING_REBUILT, UNFINISHED, criterion_of, run_findings
from rayfed.evidence.bounds import (
    MEMBERSHIP,
    Bound,
    BoundCriterion,
    BoundedShare,
    LabelBoundCriterion,
    boundable_metrics,
    lacks_metric,
)
from rayfed.evidence.findings import Finding
from rayfed.evidence.findings import State as FindingState
from rayfed.evidence.rows import Knowledge, Row, code_given, label_of, labels_given, measured
from rayfed.metrics.base import Metric
from rayfed.metrics.known import NOUNS, leading, modality_by
from rayfed.metrics.roc import Estimate, share
from rayfed.metrics.top import TOP_1
from rayfed.reasons import Reason
from rayfed.report.text.findings import labels_beyond_text, part_text
from rayfed.report.text.gate import bound_text, bound_value_text
from rayfed.report.text.reasons import REASONS, attack_text, doubt_text, no_results_text, not_run_text, overtaken_text
from rayfed.store.schemas import ANSWERED, WANT_OF_TIME

if TYPE_CHECKING:
    from rayfed.samples import Modality

MISTAKEN = 0.5
"""Relative distance between a recorded update and its control at which the recorded one counts as defended. Smaller
distances can come from the order of the samples."""
State = Literal["failed", "passed", "inconclusive", "not measured"]
NOT_EXCEEDED = "no attack exceeds the bound without a defence, so the attacks may be too weak"
"""Reason of an inconclusive check: no attack is known to work."""
NOT_BEYOND_LUCK = (
    "no attack significantly exceeds the bound without a defence: attack more samples of more clients (--images)"
)
"""Reason of an inconclusive check on labels: no attack is known to work."""
NOT_ADAPTIVE = (
    "no membership attack that exceeds the bound without a defence was also run against this defence with its code: "
    "add `knowledge: [candidates, defence, code]`"
)
"""Reason of an inconclusive check on membership: no working attack is adaptive."""
BY_LUCK = "not significant for so few samples and so many attacks: attack more samples of more clients (--images)"
"""Reason of an inconclusive check on labels whose value exceeds the bound."""
GUESSED = "the value exceeds the bound, but not the baseline, the best guess without the update"
"""Start of the reason of a passed check whose value exceeds the bound."""


_IN_DOUBT = (
    reasons.UNDECIDED
    | reasons.NOT_ADAPTIVE
    | {Reason.DEFENCES_UNKNOWN, Reason.ADAPTIVE_NOT_CONVERGED, Reason.ADAPTIVE_NOT_COMPARED}
)
"""Reasons of findings for which reconstructions are no evidence that people are not identified."""


@dataclass(frozen=True)
class Check:
    """Result of one bound on one arm at one batch size."""

    arm: str
    batch: int | None
    """Batch size of the attacked updates; None for estimated shares, and if nothing was attacked."""
    bound: Bound
    state: State
    value: float | None = None
    """The best value of any attack; for shares, the estimate. None if nothing was measured."""
    by: str = ""
    """The attack with this value."""
    reached: int = 0
    """Number of samples whose reconstruction exceeds the bound."""
    samples: int = 0
    reason: str = ""
    """Reason of an inconclusive or unmeasured check; for a passed check, its limits and the budget."""
    interval: str = ""
    """The 95 % interval of an estimated share as text; empty for other bounds."""

    @property
    def written(self) -> str:
        """Format the measured value with the measure's unit; empty if nothing was measured."""
        return "" if self.value is None else bound_value_text(self.bound, self.value)

    @property
    def details(self) -> str:
        """Return the samples above the bound, the interval and the reason as text; empty if there are none."""
        failed = self.state == "failed" and self.samples
        over = f"{self.reached} of {self.samples} samples exceed the bound" if failed else ""
        return "; ".join(filter(None, (over, self.interval, self.reason)))

    @property
    def sentence(self) -> str:
        """Return a one-line description of the check."""
        where = f"{self.arm}, batch {self.batch}" if self.batch else self.arm
        value = f"{self.written} ({self.by})" if self.written and self.by else self.written
        found = "; ".join(filter(None, (value, self.details)))
        return f"{where}, {bound_text(self.bound)}: {self.state.upper()}" + (f": {found}" if found else "")


@dataclass(frozen=True)
class Played:
    """Results of a run, as a gate reads them from the run's folder."""

    scenario: Mapping[str, Any]
    attacks: Sequence[Row]
    inferences: Sequence[Row]
    finished: bool = True

    @cached_property
    def modality(self) -> Modality:
        """Return the modality of the samples, derived from the scenario's metrics."""
        return modality_by(self.scenario["metrics"]["names"])

    @property
    def measured(self) -> list[str]:
        """Return the names of the measures of the run that a gate can bound."""
        names = [name for name in boundable_metrics(self.modality) if name in self.scenario["metrics"]["names"]]
        names += [BoundedShare.IDENTITY] if any(row.get(TOP_1.name) is not None for row in self.attacks) else []
        return names + (list(MEMBERSHIP) if any(row["metric"] == "auc" for row in self.inferences) else [])

    @property
    def gated(self) -> list[str]:
        """Return the arms that a gate checks by default: all arms with a defence, or all arms if none has a defence."""
        arms = arm_names(self.scenario, self.attacks, self.inferences)
        return [arm for arm in arms if not undefended(self.scenario, arm)] or arms

    def checks(self, bounds: Sequence[Bound], arms: Sequence[str]) -> list[Check]:
        """Return the checks of every bound on every arm, in the order of the arms."""
        found = [check for bound in bounds for check in self._checks(bound, arms)]
        return sorted(found, key=lambda check: arms.index(check.arm))

    def _checks(self, bound: Bound, arms: Sequence[str]) -> Iterator[Check]:
        if bound.metric is None:
            yield from (self._of_share(bound, arm) for arm in arms)
            return
        rows = self.attacks
        if bound.on_labels:
            seekers = {(row["arm"], row["batch_size"]) for row in rows if not labels_given(row)}
            rows = [row for row in rows if not labels_given(row) or (row["arm"], row["batch_size"]) not in seekers]
            criterion: BoundCriterion = LabelBoundCriterion.from_rows(rows, self.modality, bound)
        else:
            criterion = BoundCriterion(self.modality, bound.limit, bound.metric)
        found = run_findings(self.scenario, rows, self.finished, criterion)
        for arm in arms:
            own, doubt = [finding for finding in found if finding.arm == arm], self.doubt(arm)
            checks = []
            for finding in own:
                check = _check(finding, bound, undefended(self.scenario, arm))
                overtaken = overtaken_text(finding.overtaken) if finding.overtaken else ""
                told = _guessed(finding, bound), check.reason, overtaken
                check = self._with_what_else(replace(check, reason="; ".join(filter(None, told))))
                checks.append(_with_gaps(check, bound.metric, rows))
            yield from (
                replace(check, reason=f"{check.reason}; {doubt}") if doubt and check.state == "inconclusive" else check
                for check in checks
            )
            if not own:
                yield Check(arm, None, bound, "not measured", reason=NOTHING_REBUILT if self.finished else UNFINISHED)

    def _with_what_else(self, check: Check) -> Check:
        """Return a passed check with other leakage that its bound does not cover, and the budget of the attacks.

        A bound on whole images does not cover parts of images, so a check with recovered parts is inconclusive.
        """
        if check.state != "passed":
            return check
        one = next(one for one in self._own if (one.arm, one.batch) == (check.arm, check.batch))
        part, labels = part_text(one, criterion_of(self.scenario, self.attacks)), labels_beyond_text([one])
        if check.bound.on_labels:
            part, labels = "", "" if one.labels and one.labels.by_chance else labels
        told = [f"recovered in part: {part}" if part else "", f"labels recovered: {labels}" if labels else ""]
        reason = "; ".join(filter(None, (check.reason, *told, self._budget(check))))
        state: State = "inconclusive" if part and self.modality == "pixels" else "passed"
        return replace(check, state=state, reason=reason)

    def _budget(self, check: Check) -> str:
        """Return the iterations of each search with a result, and the time of all attacks; empty if unknown."""
        searches: dict[str, list[int]] = {}
        seconds: dict[tuple[Any, ...], float] = {}
        closed, only_closed = closed_forms(self.scenario), True
        for row in self.attacks:
            given = check.bound.on_labels and labels_given(row)
            if (row["arm"], row["batch_size"]) != (check.arm, check.batch) or row["status"] not in ANSWERED or given:
                continue
            only_closed &= row["attack"] in closed
            if row.get("iterations"):
                searches.setdefault(label_of(row), []).append(row["iterations"])
            if measured(row.get("seconds")):  # of the whole batch, repeated in the row of each sample
                seconds[row["attack"], row["round"], row["victim"], row["repeat"]] = row["seconds"]
        counts = {name: f"{min(of):,}" + f" to {max(of):,}" * (min(of) < max(of)) for name, of in searches.items()}
        if not seconds:
            return ""
        spent = [f"{name} {count} iterations" for name, count in counts.items()]
        if only_closed:
            spent = ["closed forms only"]
        return f"budget: {', '.join([*spent, duration(sum(seconds.values()))])} in all"

    @cached_property
    def _own(self) -> list[Finding]:
        """Findings by the run's own criterion."""
        return run_findings(self.scenario, self.attacks, self.finished)

    def doubt(self, arm: str) -> str:
        """Return a warning if the settings of a replay may be wrong; empty otherwise and for other runs."""
        if not recorded(self.scenario, arm):
            return ""
        far = max((row["distortion"] or 0.0 for row in self.attacks if row["arm"] == arm), default=0.0)
        if far < MISTAKEN:
            return ""
        return (
            f"the recorded updates differ by {far:.2g} of their norm from the undefended updates of these clients: "
            f"the clients have a defence, or the model, loss, local steps or normalisation differ"
        )

    def _of_share(self, bound: Bound, arm: str) -> Check:
        """Return the check of an estimated share: for people, of all attacks together; else, of the best attack."""
        found = self._found(bound, arm)
        known = [(by, one) for by, one in found if one]
        by, best = max(known, key=lambda pair: pair[1].value, default=("", None))
        check = Check(arm, None, bound, "passed", best.value if best else None, by, interval=_written(bound, best))
        if best and best.value >= bound.limit:
            return replace(check, state="failed")
        if not self.finished:
            return replace(check, state="not measured", reason="the run did not finish")
        if gaps := self._gaps(bound, arm):
            return replace(check, state="not measured", reason="; ".join(gaps))
        if not best or len(known) < len(found):
            few = "no attack applies" if bound.name == BoundedShare.IDENTITY else self._few(bound, arm)
            return replace(check, state="not measured", reason=few)
        if (high := max(one.high for _, one in known)) >= bound.limit:
            return replace(
                check, state="inconclusive", reason=f"the 95 % interval reaches {bound_value_text(bound, high)}"
            )
        shown = [each for bare in self._bare(arm) for each in self._found(bound, bare, self._working(bound, arm))]
        exceeding = {title for title, one in shown if one and one.value >= bound.limit}
        if not exceeding:
            return replace(check, state="inconclusive", reason=NOT_EXCEEDED)
        if (
            why := self._not_identified(arm)
            if bound.name == BoundedShare.IDENTITY
            else self._not_adaptive(bound, arm, exceeding)
        ):
            return replace(check, state="inconclusive", reason=why)
        return replace(check, reason=self._spent(bound, arm))

    def _spent(self, bound: Bound, arm: str) -> str:
        """Return the budget of the attacks on a share: their numbers of results, and the total time if recorded."""
        asked = self._asked(bound, arm)
        counts = ", ".join(f"{title} {len({*map(_place, rows)})}" for title, rows in asked.items())
        of = "samples" if bound.name == BoundedShare.IDENTITY else "updates"
        taken: dict[tuple[Any, ...], float] = {}
        for row in (row for rows in asked.values() for row in rows if measured(row.get("seconds"))):
            taken[row["attack"], row["round"], row["victim"], row["repeat"]] = row["seconds"]
        spent = f", {duration(sum(taken.values()))} in all" if taken else ""
        return f"budget: {of} attacked by {counts}{spent}"

    def _not_adaptive(self, bound: Bound, arm: str, exceeding: Collection[str]) -> str:
        """Return why no attack that exceeds the bound without a defence is adaptive here; empty if one is.

        With `code` an attacker undoes the deterministic part of the defences, and with `defence` it defends its shadow
        clients. Without either it may miss members that the update reveals.
        """
        if not arm_spec(self.scenario, arm).get("defences"):
            return ""
        if recorded(self.scenario, arm):
            return REASONS[Reason.DEFENCES_UNKNOWN]
        asked, why = self._asked(bound, arm), NOT_ADAPTIVE
        for title in sorted(exceeding):
            if knowledge_of(self.scenario, title) >= {Knowledge.DEFENCE, Knowledge.CODE}:
                unused = [row for row in asked[title] if row.get("reason") in reasons.UNDECIDED]
                if not unused:
                    return ""
                why = unused[0].get("message") or REASONS[Reason(unused[0]["reason"])]
        return why

    def _not_identified(self, arm: str) -> str:
        """Return why it is no evidence that no person was identified on an arm; empty if an adaptive attack shows it.

        An attack that identifies people without a defence has to know the code of the defences, and its reconstructions
        must leave no doubt.
        """
        if not arm_spec(self.scenario, arm).get("defences"):
            return ""
        doubts = [one.doubt for one in self._own if one.doubt and one.arm == arm and one.reason in _IN_DOUBT]
        if doubts:
            return doubt_text(doubts[0])
        bound = Bound(BoundedShare.IDENTITY, 1.0)
        asked = self._asked(bound, arm)
        adaptive = (title for title in self._working(bound, arm) if all(map(code_given, asked.get(title, [{}]))))
        return "" if any(adaptive) else REASONS[Reason.NO_ADAPTIVE_ATTACK_WORKS]

    def _found(self, bound: Bound, arm: str, among: Collection[str] | None = None) -> list[tuple[str, Estimate | None]]:
        """Return the bounded shares with their attacks, only of the attacks in `among` if given."""
        shares = {title: one for title, one in self._shares(bound, arm).items() if among is None or title in among}
        return self._together(bound, arm, shares) if bound.name == BoundedShare.IDENTITY else list(shares.items())

    def _shares(self, bound: Bound, arm: str) -> dict[str, Estimate | None]:
        """Return the share of each attack with a result on an arm; None if there are too few candidates."""
        return self._identified(bound, arm) if bound.name == BoundedShare.IDENTITY else self._members(bound, arm)

    def _members(self, bound: Bound, arm: str) -> dict[str, Estimate | None]:
        curves = {title: roc(rows) for title, rows in self._asked(bound, arm).items()}
        return {title: _estimate(bound, curve) for title, curve in curves.items() if curve}

    def _few(self, bound: Bound, arm: str) -> str:
        curves = map(roc, self._asked(bound, arm).values())
        return next((stated(curve, RATES[-1]) for curve in curves if curve), "no membership attack has a result")

    def _identified(self, bound: Bound, arm: str) -> dict[str, Estimate | None]:
        """Return the share of samples whose person each attack reveals in any repeat; no result means not revealed."""
        return {
            title: share(len({_place(row) for row in rows if row.get(TOP_1.name)}), len({_place(row) for row in rows}))
            for title, rows in self._asked(bound, arm).items()
            if any(row.get(TOP_1.name) is not None for row in rows)
        }

    def _together(self, bound: Bound, arm: str, titles: Collection[str]) -> list[tuple[str, Estimate | None]]:
        """Return, for the samples of each attack, which attacks reveal people and the share that any of them reveals.

        Shares are over the samples of one attack, so attacks on other samples do not change them.
        """
        asked = {title: rows for title, rows in self._asked(bound, arm).items() if title in titles}
        named = {title: {_sample(row) for row in rows if row.get(TOP_1.name)} for title, rows in asked.items()}
        found: list[tuple[str, Estimate | None]] = []
        for title, rows in asked.items():
            met = {_sample(row) for row in rows}
            hits = met.intersection(set().union(*named.values()))
            single = (one for one in (title, *named) if hits <= named[one])
            together = " or ".join(one for one, own in named.items() if hits & own)
            found.append((next(single, together), share(len(hits), len(met))))
        return found

    def _asked(self, bound: Bound, arm: str) -> dict[str, list[Row]]:
        """Return the rows of an arm that a bounded share is computed from, by attack."""
        every = (
            self.attacks
            if bound.name == BoundedShare.IDENTITY
            else [r for r in self.inferences if r["metric"] == "auc"]
        )
        asked: dict[str, list[Row]] = {}
        for row in every:
            if row["arm"] == arm:
                asked.setdefault(row["attack"], []).append(row)
        return asked

    def _has_result(self, bound: Bound, row: Row) -> bool:
        if bound.name == BoundedShare.IDENTITY:
            return row.get(TOP_1.name) is not None and not unanswered(row, self._closed)
        return row["status"] == "ok" and bool(row["scores"])

    @cached_property
    def _closed(self) -> frozenset[str]:
        return closed_forms(self.scenario)

    def _gaps(self, bound: Bound, arm: str) -> list[str]:
        """Return the attacks without a result on an arm, with the reasons.

        A reconstruction attack that does not apply to the arm counts only if it works without a defence.
        """
        asked, working = self._asked(bound, arm), self._working(bound, arm)
        gaps = []
        for title in asked | dict.fromkeys(working):
            rows = asked.get(title, [])
            if (
                bound.name == BoundedShare.IDENTITY
                and title not in working
                and all(r["status"] == "not applicable" for r in rows)
            ):
                continue
            gaps += [f"{title} {_ending(row)}" for row in rows if not self._has_result(bound, row)]
            shown = {
                _place(row)
                for one in self._bare(arm)
                for row in self._asked(bound, one).get(title, [])
                if (row.get(TOP_1.name) if bound.name == BoundedShare.IDENTITY else self._has_result(bound, row))
            }
            if lost := len(shown - {_place(row) for row in rows}):
                what = "samples that it identified" if bound.name == BoundedShare.IDENTITY else "clients with a result"
                gaps.append(f"{title} was not run here on {lost} of the {len(shown)} {what} without a defence")
        return list(dict.fromkeys(gaps))

    def _bare(self, arm: str) -> list[str]:
        """Return the arms without defences on the same model."""
        model = arm_spec(self.scenario, arm).get("model")
        arms = arm_names(self.scenario, self.attacks, self.inferences)
        bare = [one for one in arms if undefended(self.scenario, one)]
        return [one for one in bare if arm_spec(self.scenario, one).get("model") == model]

    def _working(self, bound: Bound, arm: str) -> set[str]:
        """Return the attacks that beat chance on the arms without defences on the same model."""
        return {
            title
            for bare in self._bare(arm)
            for title, one in self._shares(bound, bare).items()
            if one and one.low > self._chance(bound, self._asked(bound, bare)[title])
        }

    def _chance(self, bound: Bound, rows: Sequence[Row]) -> float:
        """Return the success rate of guessing, for identity with one guess per repeat."""
        if bound.name != BoundedShare.IDENTITY:
            return 0.5 if bound.name == BoundedShare.AUC else RATES[-1]
        people = max((row["people"] or 0 for row in self.attacks), default=0)
        repeats = max(Counter(map(_place, rows)).values())
        return min(1.0, repeats / people) if people else 1.0


def _place(row: Row) -> tuple[Any, ...]:
    """Return a key of the row's client, or sample, that is equal on all arms."""
    return row["round"], row["victim"], row.get("sample")


def _sample(row: Row) -> tuple[Any, ...]:
    """Return a key of the row's sample that is equal for all attacks on an arm."""
    return row["batch_size"], *_place(row)


def _ending(row: Row) -> str:
    """Return why a row of an attack on a share has no result."""
    if row["status"] == "ok":
        return "has no reconstruction for the recogniser"
    return ": ".join(filter(None, (row["status"], row["message"])))


def _written(bound: Bound, found: Estimate | None) -> str:
    """Return the interval of an estimate as text; empty without an estimate."""
    return (
        f"95 % interval {bound_value_text(bound, found.low)} to {bound_value_text(bound, found.high)}" if found else ""
    )


def _estimate(bound: Bound, curve: Roc) -> Estimate | None:
    return curve.auc if bound.name == BoundedShare.AUC else curve.true_positives[RATES[-1]]


def _with_gaps(check: Check, metric: Metric, rows: Sequence[Row]) -> Check:
    """Return a check as not measured if its metric could not be computed for some results, unless it failed."""
    answers = [row for row in rows if (row["arm"], row["batch_size"]) == (check.arm, check.batch)]
    gaps = sum(lacks_metric(row, metric) for row in answers)
    if not gaps or check.state == "failed":
        return check
    why = f"{metric.title} could not be computed for {gaps} of {len(answers)} reconstructions"
    return replace(check, state="not measured", reason="; ".join(filter(None, (why, check.reason))))


def _guessed(found: Finding, bound: Bound) -> str:
    """Return the share of labels that the best guess recovers; empty for bounds on other metrics."""
    if not bound.on_labels or not found.labels:
        return ""
    return f"best guess: {100 * found.labels.guesses.best:.0f} % of {found.samples} labels"


def _check(found: Finding, bound: Bound, bare: bool) -> Check:
    """Return the check of a finding under the bound's criterion."""
    assert bound.metric is not None
    value = found.best if found.best is None or bound.metric.higher_is_closer else -found.best
    exceeds = value is not None and bound.metric.passes(value, bound.limit)
    state, reason = _judged(found, bound, bare, exceeds)
    by = attack_text(found.by)
    return Check(found.arm, found.batch, bound, state, value, by, found.leaked, found.samples, reason)


def _judged(found: Finding, bound: Bound, bare: bool, exceeds: bool) -> tuple[State, str]:
    """Return state and reason of a check; `exceeds` says whether the best value exceeds the bound."""
    if found.state == FindingState.LEAKS:
        return "failed", ""
    if found.state in (FindingState.NOT_MEASURED, FindingState.NOTHING_TO_ATTACK):
        gaps = _gaps_of(found, bound)
        return "not measured", gaps or "an attack that exceeds the bound without a defence has no result here"
    if exceeds and bound.on_labels:
        guessed = found.labels is not None and found.labels.guesses.best >= bound.limit
        return "inconclusive", "a guess recovers as many labels" if guessed else BY_LUCK
    if found.state == FindingState.INCONCLUSIVE:
        return "inconclusive", doubt_text(found.doubt) if found.doubt else _too_weak(bound, exceeds)
    if exceeds and bound.name not in {leading(form).name for form in NOUNS}:  # the baseline is known of these only
        return (
            "inconclusive",
            "the value exceeds the bound, but not the baseline by the leading metric: check the images",
        )
    if bare:
        return "inconclusive", "no other arm shows that these attacks can exceed the bound"
    if found.failed:  # with or without the defence, so their values are unknown
        return "not measured", _gaps_of(found, bound)
    return "passed", _limits(found, bound, exceeds)


def _gaps_of(found: Finding, bound: Bound) -> str:
    """Return why attacks of a finding have no result; empty if all have one."""
    short = [f"{WANT_OF_TIME}: {', '.join(map(not_run_text, found.not_run))}"] if found.not_run else []
    return "; ".join([*short, *no_results_text(found, bound.name)])


def _too_weak(bound: Bound, exceeds: bool) -> str:
    """Return why a check is inconclusive if no attack is known to work."""
    if exceeds:
        return f"{GUESSED}; no attack exceeds both without a defence"
    return NOT_BEYOND_LUCK if bound.on_labels else NOT_EXCEEDED


def _limits(found: Finding, bound: Bound, exceeds: bool) -> str:
    """Return the limits of a passed check; empty if it covers all samples and attacks."""
    limits = [GUESSED] if exceeds else []
    if gaps := _gaps_of(found, bound):
        limits.append(f"no result: {gaps}")
    if found.shown not in (None, found.samples):
        limits.append(
            f"shown on {found.shown} of {found.samples} samples: the other samples do not leak without a defence, so "
            f"they are no evidence for {found.arm}"
        )
    return "; ".join(limits)
