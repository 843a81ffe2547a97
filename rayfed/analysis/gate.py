"""Gate on a run: checks the results of attacks against the user's bounds, by arm and batch size.

An arm passes where attacks that passed the bound without a defence, on the same samples, did not pass it here. Where
none did, nothing shows that they could have: that is inconclusive, and so is an arm without a defence on which nothing
was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayfed.analysis.audit import UNREAD, Criterion, Finding, in_part, labels_beyond, short_title
from rayfed.analysis.formats import duration
from rayfed.analysis.membership import RATES, Roc, roc, stated
from rayfed.analysis.named_labels import LUCK, named
from rayfed.analysis.summary import Row, arm_names, arm_spec, knowledge_of, labels_given, measured, recorded, undefended
from rayfed.analysis.unanswered import closed_forms, unanswered
from rayfed.analysis.verdicts import NOTHING_REBUILT, UNFINISHED, UNTOLD, criterion_of, run_findings
from rayfed.errors import UserError, nearest
from rayfed.hidden import UNREHEARSED, UNUSED
from rayfed.metrics.base import Metric
from rayfed.metrics.known import METRICS, NOUNS, leading, metrics_of, modality_by
from rayfed.metrics.measures import JUDGED
from rayfed.metrics.roc import Estimate, share
from rayfed.metrics.top import TOP_1
from rayfed.store.schemas import ANSWERED, WANT_OF_TIME

if TYPE_CHECKING:
    from rayfed.samples import Modality

MISTAKEN = 0.5
"""Relative distance of a recorded update from its control from which on it is no undefended one: less may come of the
order in which the samples were taken."""
State = Literal["failed", "passed", "inconclusive", "not measured"]
MEMBERSHIP = {
    "membership.auc": "AUC of the membership attack",
    "membership.tpr": f"members found at {100 * RATES[-1]:g} % false positives",
}
"""What a membership attack is bounded by, with its title."""
IDENTITY = "identity"
"""The share of samples whose person a recogniser names in their reconstruction."""
SHARES = MEMBERSHIP | {IDENTITY: "people re-identified, top 1"}
"""Bounds on estimated shares, with their titles."""


NOT_PASSED = "no attack passed the bound without a defence either"
"""Why a check is inconclusive where nothing shows that an attack could have passed its bound."""
NOT_BEYOND_LUCK = (
    "no attack passed the bound without a defence either, or none beyond luck: attack more samples, of more clients "
    "(--images)"
)
"""The same of a check on labels."""
NOT_INFORMED = (
    "no membership attack that passed the bound without a defence knows this one and its code (knowledge: [candidates, "
    "defence, code])"
)
"""Why a check on membership is inconclusive where no attacker that works knows the arm's defences."""
BY_LUCK = (
    "as many may be named by luck, of so few samples and by so many attackers: attack more samples, of more clients "
    "(--images)"
)
"""Why a check on labels is inconclusive whose value is past the bound."""
GUESSED = "past the bound, though no nearer than a guess gets without the update"
"""What the line of a passed check begins with whose value is past the bound."""


@dataclass(frozen=True)
class Bound:
    """Bound on one measure of leakage; a gate fails at it or nearer to the truth."""

    name: str
    """Metric of reconstructions, or one of `SHARES`."""
    limit: float

    @property
    def metric(self) -> Metric | None:
        """The bounded metric of reconstructions; None for an estimated share."""
        return METRICS.get(self.name)

    @property
    def of_labels(self) -> bool:
        """Whether the labels found are bounded, and not reconstructions."""
        return self.metric is not None and self.metric.compares == "labels"

    def written(self, value: float) -> str:
        """Return a value with its unit."""
        metric = self.metric
        if self.name == "membership.auc":
            return f"{value:.3f}"
        if metric is None or metric.format == "share":
            return f"{value:.1%}"
        return f"{value:.1f} {metric.unit}" if metric.unit else f"{value:.3g}"

    @property
    def sentence(self) -> str:
        """The requirement in words."""
        metric = self.metric
        title = SHARES[self.name] if metric is None else metric.title
        side = "below" if metric is None or metric.higher_is_closer else "above"
        return f"{title} {side} {self.written(self.limit)}"


@dataclass(frozen=True)
class Reached(Criterion):
    """Criterion for a reconstruction to violate a bound: that near, nearer than any guess, and its own sample's.

    `threshold` is the bound, and values are compared by how near they are: those of distances change their sign.
    """

    metric: Metric

    def nearness(self, row: Row) -> float | None:
        """Return a row's nearness to the truth; None if the metric was not measured."""
        value: float | None = row.get(self.metric.name)
        if value is None or value != value:
            return None
        return min(value, self.metric.ceiling) if self.metric.higher_is_closer else -value

    def lacking(self, row: Row) -> str:
        """Return why a row of an attack that finished is no answer."""
        return f"without a value of {self.metric.title}" if uncomputed(row, self.metric) else super().lacking(row)

    def near(self, row: Row) -> bool:
        """Return whether a row's reconstruction reaches the bound and beats every guess."""
        return self._at_bound(row) and (row["above_guessing"] or 0.0) > 0

    def part(self, rows: Sequence[Row]) -> None:
        """Return None: a bound is on samples one by one."""

    def _at_bound(self, row: Row) -> bool:
        return self.nearness(row) is not None and self.metric.passes(row[self.metric.name], self.threshold)


@dataclass(frozen=True)
class Found(Reached):
    """Criterion for inferred labels to violate a bound: the share that an attack found, beyond luck.

    The share is that of all labels of a batch size, or of those of single updates of several samples.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    named: Mapping[tuple[str, int, str], tuple[bool, float]]
    """Of each attack on each arm and batch size, whether it violates the bound beyond luck, and its share.

    It is that of its nearest update where single updates alone violate the bound, or may."""

    @classmethod
    def among(cls, attacks: Sequence[Row], modality: Modality, bound: Bound) -> Found:
        """Return the criterion for the rows of a run."""
        assert bound.metric is not None
        cells: dict[tuple[str, int], list[Row]] = {}
        for row in attacks:
            cells.setdefault((row["arm"], row["batch_size"]), []).append(row)
        found: dict[tuple[str, int, str], tuple[bool, float]] = {}
        for cell, rows in cells.items():
            for one in named(rows):
                whole, updates = one.share >= bound.limit, one.attempts * one.luck_of(bound.limit) <= LUCK
                violates = updates or (whole and not one.lucky)
                single = not whole and (updates or one.may_reach(bound.limit))
                value = max(one.updates.values()) if single else one.share
                key = (*cell, one.attack)
                found[key] = max(found.get(key, (False, value)), (violates, value))
        return cls(modality, bound.limit, bound.metric, found)

    def nearness(self, row: Row) -> float | None:
        """Return the share of labels that the row's attack found; None of a row without labels, or given them."""
        if labels_given(row) or not measured(row.get("label_accuracy")):
            return None
        return self.named[row["arm"], row["batch_size"], row["attack"]][1]

    def lacking(self, row: Row) -> str:
        """Return why a row of an attack that finished is no answer."""
        return "was given the labels" if labels_given(row) else "has no share of labels that is a number"

    def near(self, row: Row) -> bool:
        """Return whether a row's update reaches the bound, by an attack that violates it beyond luck."""
        found = self.named.get((row["arm"], row["batch_size"], row["attack"]), (False, 0.0))
        return self.nearness(row) is not None and found[0] and self.metric.passes(row["label_accuracy"], self.threshold)

    leaks = near


@dataclass(frozen=True)
class Check:
    """Result of one bound on one arm at one batch size."""

    arm: str
    batch: int | None
    """Samples behind the attacked updates; None of estimated shares, and where nothing was attacked."""
    bound: Bound
    state: State
    value: float | None = None
    """The value nearest to the truth; of shares the estimate. None where nothing was measured."""
    by: str = ""
    """The attack that got it."""
    reached: int = 0
    """Samples of which a reconstruction passes the bound."""
    samples: int = 0
    reason: str = ""
    """Why the state is neither passed nor failed; of a passed check, what it does not say, and the budget."""
    interval: str = ""
    """The 95 % interval of an estimated share, in words; empty of others."""

    @property
    def sentence(self) -> str:
        """One-line description of the check."""
        where = f"{self.arm}, batch {self.batch}" if self.batch else self.arm
        by = "; ".join(filter(None, (self.by, self.interval)))
        value = "" if self.value is None else self.bound.written(self.value) + (f" ({by})" if by else "")
        over = f", {self.reached} of {self.samples} samples" if self.state == "failed" and self.samples else ""
        guessed = self.state == "passed" and self.reason.startswith(GUESSED)
        reason = self.reason.removeprefix(GUESSED).removeprefix("; ") if guessed else self.reason
        told = "; ".join(filter(None, (f"{value}{over}", reason)))
        first = f"{GUESSED}: " * guessed
        return f"{first}{where}, {self.bound.sentence}: {self.state.upper()}" + (f": {told}" if told else "")


def uncomputed(row: Row, metric: Metric) -> bool:
    """Return whether a metric has no value although the attack of the row found something to compute it of."""
    if row["status"] != "ok" or measured(row.get(metric.name)):
        return False
    if metric.of_labels:
        return row.get("label") is not None and not labels_given(row)
    alike = (name for name, other in METRICS.items() if other.compares == metric.compares)
    return any(measured(row.get(name)) for name in alike)


def parsed(texts: Iterable[str], modality: Modality, measured: Collection[str]) -> list[Bound]:
    """Return the bounds in texts such as `ssim=0.5`, or `15` for the leading metric.

    Names are those of metrics or their short ones in tables. Raises `UserError` for others, listing those measured, and
    for values that the metric never has.
    """
    short = {METRICS[name].short.lower(): name for name in measured if name in METRICS and METRICS[name].short}
    return list(dict.fromkeys(_parsed(t, modality, measured, short) for t in texts))


def _parsed(text: str, modality: Modality, measured: Collection[str], short: Mapping[str, str]) -> Bound:
    given, _, number = text.rpartition("=")
    name = short.get(given.strip().lower(), given.strip()) or leading(modality).name
    if name not in measured:
        raise UserError(f"--fail-above {text}: '{name}' is not measured here; {nearest(name, {*measured, *short})}")
    try:
        limit = float(number)
    except ValueError:
        limit = float("nan")
    if not isfinite(limit):
        raise UserError(f"--fail-above {text}: '{number}' is no number; give NAME=NUMBER, or a number for {name}")
    if (name in SHARES or METRICS[name].format == "share") and not 0 < limit <= 1:
        raise UserError(f"--fail-above {text}: {name} is a share, so give a bound above 0 and at most 1")
    return Bound(name, limit)


def boundable(modality: Modality) -> list[str]:
    """Return the metrics of reconstructions that were measured and can be bounded."""
    judged = [metric.name for metric in JUDGED if metric.format != "hit" and metric.success]
    return [name for name in metrics_of(modality) if name in judged or name == "label_accuracy"]


@dataclass(frozen=True)
class Played:
    """Data that a gate reads of a run with attacks."""

    scenario: Mapping[str, Any]
    attacks: Sequence[Row]
    inferences: Sequence[Row]
    finished: bool = True

    @cached_property
    def modality(self) -> Modality:
        """Modality of the samples, by the scenario's metrics: of attacks without an answer the rows measure nothing."""
        return modality_by(self.scenario["metrics"]["names"])

    @property
    def measured(self) -> list[str]:
        """Names of the measures that can be bounded."""
        names = [name for name in boundable(self.modality) if name in self.scenario["metrics"]["names"]]
        names += [IDENTITY] if any(row.get(TOP_1.name) is not None for row in self.attacks) else []
        return names + (list(MEMBERSHIP) if any(row["metric"] == "auc" for row in self.inferences) else [])

    @property
    def gated(self) -> list[str]:
        """Arms that a gate checks by default: all with a defence, or all if there are none."""
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
        if bound.of_labels:
            seekers = {(row["arm"], row["batch_size"]) for row in rows if not labels_given(row)}
            rows = [row for row in rows if not labels_given(row) or (row["arm"], row["batch_size"]) not in seekers]
            criterion: Reached = Found.among(rows, self.modality, bound)
        else:
            criterion = Reached(self.modality, bound.limit, bound.metric)
        found = run_findings(self.scenario, rows, self.finished, criterion)
        for arm in arms:
            own, doubt = [finding for finding in found if finding.arm == arm], self.doubt(arm)
            checks = []
            for finding in own:
                check = _check(finding, bound, undefended(self.scenario, arm))
                told = _guessed(finding, bound), check.reason, finding.behind
                check = self._with_what_else(replace(check, reason="; ".join(filter(None, told))))
                checks.append(_with_gaps(check, bound.metric, rows))
            yield from (
                replace(check, reason=f"{check.reason}; {doubt}") if doubt and check.state == "inconclusive" else check
                for check in checks
            )
            if not own:
                yield Check(arm, None, bound, "not measured", reason=NOTHING_REBUILT if self.finished else UNFINISHED)

    def _with_what_else(self, check: Check) -> Check:
        """Return a check with what else attacks read where it passed, which its bound is not on, and their budget.

        Images that were read in part pass no bound on whole ones: of their parts there is none.
        """
        if check.state != "passed":
            return check
        one = next(one for one in self._own if (one.arm, one.batch) == (check.arm, check.batch))
        part, labels = in_part(one, criterion_of(self.scenario, self.attacks)), labels_beyond([one])
        if check.bound.of_labels:
            part, labels = "", "" if one.labels and one.labels.lucky and not one.labels.whole else labels
        told = [f"in part, {part}" if part else "", f"labels were read off: {labels}" if labels else ""]
        reason = "; ".join(filter(None, (check.reason, *told, self._budget(check))))
        state: State = "inconclusive" if part and self.modality == "pixels" else "passed"
        return replace(check, state=state, reason=reason)

    def _budget(self, check: Check) -> str:
        """Return the iterations of each search that answered a check, and the time of all; empty if unknown."""
        searches: dict[str, list[int]] = {}
        seconds: dict[tuple[Any, ...], float] = {}
        closed, alone = closed_forms(self.scenario), True
        for row in self.attacks:
            given = check.bound.of_labels and labels_given(row)
            if (row["arm"], row["batch_size"]) != (check.arm, check.batch) or row["status"] not in ANSWERED or given:
                continue
            alone &= row["attack"] in closed
            if row.get("iterations"):
                searches.setdefault(short_title(row), []).append(row["iterations"])
            if measured(row.get("seconds")):  # of the whole batch, in the row of each of its samples
                seconds[row["attack"], row["round"], row["victim"], row["repeat"]] = row["seconds"]
        counts = {name: f"{min(of):,}" + f" to {max(of):,} each" * (min(of) < max(of)) for name, of in searches.items()}
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        within = f"iterations of {told}; " if told else "closed forms alone, " if alone else ""
        return f"budget: {within}{duration(sum(seconds.values()))} of all attacks together" if seconds else ""

    @cached_property
    def _own(self) -> list[Finding]:
        """Findings by the run's own criterion."""
        return run_findings(self.scenario, self.attacks, self.finished)

    def doubt(self, arm: str) -> str:
        """Return what figures of a replay may come from instead of a defence; empty for other runs."""
        if not recorded(self.scenario, arm):
            return ""
        far = max((row["distortion"] or 0.0 for row in self.attacks if row["arm"] == arm), default=0.0)
        if far < MISTAKEN:
            return ""
        return (
            f"what was recorded is {far:.2g} of its norm away from what these clients would have sent without a "
            f"defence: they have one, or the model, its loss, the steps or the normalisation are others"
        )

    def _of_share(self, bound: Bound, arm: str) -> Check:
        """Return the check of an estimated share: of people what all attacks name together, else the best attack's."""
        found = self._found(bound, arm)
        known = [(by, one) for by, one in found if one]
        by, best = max(known, key=lambda pair: pair[1].value, default=("", None))
        check = Check(arm, None, bound, "passed", best.value if best else None, by, interval=_written(bound, best))
        if best and best.value >= bound.limit:
            return replace(check, state="failed")
        if not self.finished:
            return replace(check, state="not measured", reason="the run did not come to its end")
        if gaps := self._gaps(bound, arm):
            return replace(check, state="not measured", reason="; ".join(gaps))
        unread = [one.lacking for one in self._own if one.arm == arm and one.lacking in (*UNREAD, UNTOLD)]
        if bound.name == IDENTITY and unread:  # it is read off reconstructions
            return replace(check, state="inconclusive", reason=unread[0])
        if not best or len(known) < len(found):
            few = "no attack applies" if bound.name == IDENTITY else self._few(bound, arm)
            return replace(check, state="not measured", reason=few)
        if (high := max(one.high for _, one in known)) >= bound.limit:
            return replace(check, state="inconclusive", reason=f"a 95 % interval reaches {bound.written(high)}")
        shown = [each for bare in self._bare(arm) for each in self._found(bound, bare, self._working(bound, arm))]
        passing = {title for title, one in shown if one and one.value >= bound.limit}
        if not passing:
            return replace(check, state="inconclusive", reason=NOT_PASSED)
        if bound.name in MEMBERSHIP and (why := self._unread(bound, arm, passing)):
            return replace(check, state="inconclusive", reason=why)
        return replace(check, reason=self._spent(bound, arm))

    def _spent(self, bound: Bound, arm: str) -> str:
        """Return the budget of a share's attacks on an arm: the answers, and the time of all where it was kept."""
        asked = self._asked(bound, arm)
        counts = ", ".join(f"{title} {len({*map(_place, rows)})}" for title, rows in asked.items())
        of = "samples" if bound.name == IDENTITY else "updates"
        taken: dict[tuple[Any, ...], float] = {}
        for row in (row for rows in asked.values() for row in rows if measured(row.get("seconds"))):
            taken[row["attack"], row["round"], row["victim"], row["repeat"]] = row["seconds"]
        spent = f"; {duration(sum(taken.values()))} of all attacks together" if taken else ""
        return f"budget: {of} of {counts}{spent}"

    def _unread(self, bound: Bound, arm: str, passing: Collection[str]) -> str:
        """Return why no membership attack among those `passing` a bound without a defence knows this arm's.

        By the code an attacker takes off what the defences put on every update, and by `defence` its shadow clients are
        defended: without either it may miss members whom the update gives away. Empty where one knows both.
        """
        if not arm_spec(self.scenario, arm).get("defences"):
            return ""
        if recorded(self.scenario, arm):
            return UNTOLD
        asked, reasons = self._asked(bound, arm), [NOT_INFORMED]
        for title in sorted(passing):
            if knowledge_of(self.scenario, title) >= {"defence", "code"}:
                said = (row["message"] or "" for row in asked[title])
                reasons.append(next((one for one in said if UNREHEARSED in one or UNUSED in one), ""))
        return "" if "" in reasons else reasons[-1]

    def _found(self, bound: Bound, arm: str, among: Collection[str] | None = None) -> list[tuple[str, Estimate | None]]:
        """Return the shares that a bound is on, and who got them: those `among` all attacks, if some are named."""
        shares = {title: one for title, one in self._shares(bound, arm).items() if among is None or title in among}
        return self._together(bound, arm, shares) if bound.name == IDENTITY else list(shares.items())

    def _shares(self, bound: Bound, arm: str) -> dict[str, Estimate | None]:
        """Return the share that each attack on an arm got, of those that answered; None of too few candidates."""
        return self._identified(bound, arm) if bound.name == IDENTITY else self._members(bound, arm)

    def _members(self, bound: Bound, arm: str) -> dict[str, Estimate | None]:
        curves = {title: roc(rows) for title, rows in self._asked(bound, arm).items()}
        return {title: _estimate(bound, curve) for title, curve in curves.items() if curve}

    def _few(self, bound: Bound, arm: str) -> str:
        curves = map(roc, self._asked(bound, arm).values())
        return next((stated(curve, RATES[-1]) for curve in curves if curve), "no membership attack answered")

    def _identified(self, bound: Bound, arm: str) -> dict[str, Estimate | None]:
        """Return the share of samples whose person each attack reveals, in any repeat; no answer names nobody."""
        return {
            title: share(len({_place(row) for row in rows if row.get(TOP_1.name)}), len({_place(row) for row in rows}))
            for title, rows in self._asked(bound, arm).items()
            if any(row.get(TOP_1.name) is not None for row in rows)
        }

    def _together(self, bound: Bound, arm: str, titles: Collection[str]) -> list[tuple[str, Estimate | None]]:
        """Return which of some attacks reveal people, and the share on the samples of each that any of them reveals.

        So attacks that met fewer or other samples dilute no share.
        """
        asked = {title: rows for title, rows in self._asked(bound, arm).items() if title in titles}
        named = {title: {_sample(row) for row in rows if row.get(TOP_1.name)} for title, rows in asked.items()}
        found: list[tuple[str, Estimate | None]] = []
        for title, rows in asked.items():
            met = {_sample(row) for row in rows}
            hits = met.intersection(set().union(*named.values()))
            alone = (one for one in (title, *named) if hits <= named[one])
            together = " or ".join(one for one, own in named.items() if hits & own)
            found.append((next(alone, together), share(len(hits), len(met))))
        return found

    def _asked(self, bound: Bound, arm: str) -> dict[str, list[Row]]:
        """Return the rows of the attacks on a share on an arm, by attack."""
        every = self.attacks if bound.name == IDENTITY else [r for r in self.inferences if r["metric"] == "auc"]
        asked: dict[str, list[Row]] = {}
        for row in every:
            if row["arm"] == arm:
                asked.setdefault(row["attack"], []).append(row)
        return asked

    def _answers(self, bound: Bound, row: Row) -> bool:
        if bound.name == IDENTITY:
            return row.get(TOP_1.name) is not None and not unanswered(row, self._closed)
        return row["status"] == "ok" and bool(row["scores"])

    @cached_property
    def _closed(self) -> frozenset[str]:
        return closed_forms(self.scenario)

    def _gaps(self, bound: Bound, arm: str) -> list[str]:
        """Return where attacks have no answer on an arm, with the reasons.

        An attack that rebuilds samples and does not apply to an arm is missed only if it works without a defence.
        """
        asked, working = self._asked(bound, arm), self._working(bound, arm)
        gaps = []
        for title in asked | dict.fromkeys(working):
            rows = asked.get(title, [])
            if bound.name == IDENTITY and title not in working and all(r["status"] == "not applicable" for r in rows):
                continue
            gaps += [f"{title} {_ending(row)}" for row in rows if not self._answers(bound, row)]
            shown = {
                _place(row)
                for one in self._bare(arm)
                for row in self._asked(bound, one).get(title, [])
                if (row.get(TOP_1.name) if bound.name == IDENTITY else self._answers(bound, row))
            }
            if lost := len(shown - {_place(row) for row in rows}):
                met = "samples whose person it named" if bound.name == IDENTITY else "victims that it answered on"
                gaps.append(f"{title} was not played here on {lost} of {len(shown)} {met} without a defence")
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
        """Return the most that guessing gets, of identity with a guess in each repeat."""
        if bound.name != IDENTITY:
            return 0.5 if bound.name == "membership.auc" else RATES[-1]
        people = max((row["people"] or 0 for row in self.attacks), default=0)
        repeats = max(Counter(map(_place, rows)).values())
        return min(1.0, repeats / people) if people else 1.0


def _place(row: Row) -> tuple[Any, ...]:
    """Return what identifies the victim, or the sample, of a row on every arm."""
    return row["round"], row["victim"], row.get("sample")


def _sample(row: Row) -> tuple[Any, ...]:
    """Return what identifies a row's sample among all attacks on an arm."""
    return row["batch_size"], *_place(row)


def _ending(row: Row) -> str:
    """Return why a row of an attack on a share is no answer."""
    if row["status"] == "ok":
        return "has no answer that a recogniser could be asked about"
    return ": ".join(filter(None, (row["status"], row["message"])))


def _written(bound: Bound, found: Estimate | None) -> str:
    """Return the interval of an estimate in words; empty without one."""
    return f"95 % interval {bound.written(found.low)} to {bound.written(found.high)}" if found else ""


def _estimate(bound: Bound, curve: Roc) -> Estimate | None:
    return curve.auc if bound.name == "membership.auc" else curve.true_positives[RATES[-1]]


def _with_gaps(check: Check, metric: Metric, rows: Sequence[Row]) -> Check:
    """Return a check as not measured if its metric could not be computed of some answers, unless it failed."""
    answers = [row for row in rows if (row["arm"], row["batch_size"]) == (check.arm, check.batch)]
    gaps = sum(uncomputed(row, metric) for row in answers)
    if not gaps or check.state == "failed":
        return check
    why = f"{metric.title} could not be computed for {gaps} of {len(answers)} reconstructions"
    return replace(check, state="not measured", reason="; ".join(filter(None, (why, check.reason))))


def _guessed(found: Finding, bound: Bound) -> str:
    """Return what a guess finds of the labels, beside a share that is bounded; empty of other bounds."""
    if not bound.of_labels or not found.labels:
        return ""
    return f"a guess names {found.labels.guesses.best:.0%} of {found.samples} labels"


def _check(found: Finding, bound: Bound, bare: bool) -> Check:
    """Return the check that follows from a finding under the bound's criterion."""
    short = (f"{WANT_OF_TIME}: {', '.join(found.unplayed)}",) if found.unplayed else ()
    reasons, state = "; ".join((*short, *found.reasons)), found.state
    assert bound.metric is not None
    best = found.best if found.best is None or bound.metric.higher_is_closer else -found.best
    numbers = best, found.by, found.leaked, found.samples
    past = best is not None and bound.metric.passes(best, bound.limit)
    if state == "leaks":
        return Check(found.arm, found.batch, bound, "failed", *numbers)
    if state in ("not measured", "nothing to attack"):
        reason = reasons or "an attack that passed the bound without a defence has no answer here"
        return Check(found.arm, found.batch, bound, "not measured", *numbers, reason=reason)
    if past and bound.of_labels:
        known = found.labels is not None and found.labels.guesses.best >= bound.limit
        reason = "guesses name as many" if known else BY_LUCK
        return Check(found.arm, found.batch, bound, "inconclusive", *numbers, reason=reason)
    if state == "inconclusive":
        reason = found.lacking or (NOT_BEYOND_LUCK if bound.of_labels else NOT_PASSED)
        if past and not found.lacking:
            reason = f"{GUESSED}; no attack passed the bound by more than a guess without a defence either"
        return Check(found.arm, found.batch, bound, "inconclusive", *numbers, reason=reason)
    guessed = {leading(form).name for form in NOUNS}  # by which guesses are compared
    if past and bound.name not in guessed:
        reason = "at the bound, though no nearer than a guess by the leading metric: look at it"
        return Check(found.arm, found.batch, bound, "inconclusive", *numbers, reason=reason)
    if bare:
        reason = "nothing was attacked that shows that these attacks could have passed it"
        return Check(found.arm, found.batch, bound, "inconclusive", *numbers, reason=reason)
    if found.failed:  # with or without the defence: nobody knows what they would have got
        return Check(found.arm, found.batch, bound, "not measured", *numbers, reason=reasons)
    said = [f"no answer: {reasons}"] if reasons else []
    if past:
        said.insert(0, GUESSED)
    if found.shown not in (None, found.samples):
        said.append(
            f"shown on {found.shown} of {found.samples} samples: the others do not leak without a defence either, and "
            f"say nothing about {found.arm}"
        )
    return Check(found.arm, found.batch, bound, "passed", *numbers, reason="; ".join(said))
