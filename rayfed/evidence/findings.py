"""Findings: the state of each arm at each batch size, by an ordered list of rules (`RULES`).

The first rule that applies decides the state. The reasons why results do not decide are in a second list (`DOUBTS`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from rayfed.core.reasons import CHANNELS, OF_DECLARATION, UNDECIDED, Reason
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.labels import best_label_inference, collect_label_inferences
from rayfed.evidence.rows import (
    Row,
    Sample,
    code_given,
    get_attack_label,
    get_sample_key,
    group_rows,
    is_measured,
    knowledge_in,
    labels_given,
)
from rayfed.metrics.known import leading
from rayfed.store.finding import (
    Attacker,
    Closest,
    Doubt,
    Elsewhere,
    Finding,
    Gap,
    NoResult,
    NotRun,
    Overtaken,
    Part,
    Pending,
    State,
)
from rayfed.store.schemas import INAPPLICABLE, UNPLAYED

GRADIENT_FIT_TOL = 5e-6
"""Maximum `fit` (gradient distance) at which reconstructed samples explain the observed gradient.

`fit` is their distance from the gradient, relative to that of a grey sample. The limit is the rounding error of an
exact result in single precision. Without noise, larger distances can distinguish samples,
for example by a slight pattern on a blurred image.
"""
TOKENS_IN_ANY_ORDER = "rouge1"
"""Metric of a text's tokens in any order."""


@dataclass(frozen=True)
class Cell:
    """Rows of one arm and batch size, and the results that the rules need."""

    rows: Sequence[Row]
    criterion: Criterion
    closed: Collection[str]
    """Titles of closed forms, which finish if they find that no sample fits."""
    bare: bool
    """Whether the arm has no defence."""
    working: Collection[tuple[str, Sample]] = ()
    """Attacks and the samples that leak to them without a defence."""
    untried: Collection[tuple[str, Sample]] = ()
    """Attacks and samples that were not run without a defence for lack of time: they might leak there as well."""
    changed: bool = False
    """Whether a defence may have changed the update although the arm counts as undefended."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of all attacks of the run, by title."""

    @cached_property
    def finite(self) -> list[tuple[float, Row]]:
        """Rows with a value of the leading metric, with the value."""
        valued = ((self.criterion.nearness(row), row) for row in self.rows)
        return [(value, row) for value, row in valued if value is not None]

    @cached_property
    def leaks(self) -> list[tuple[float, Row]]:
        """Rows with leaks, with the value of the leading metric."""
        return [(value, row) for value, row in self.finite if self.criterion.leaks(row)]

    @cached_property
    def part(self) -> Part | None:
        """Parts of samples that are recovered by more than chance."""
        return self.criterion.part([row for _, row in self.finite])

    @cached_property
    def silent(self) -> list[Row]:
        """Rows of attacks that did not finish."""
        return [row for row in self.rows if not has_finished(row, self.criterion, self.closed)]

    @cached_property
    def complete(self) -> set[str]:
        """Titles of the attacks that finished on all their samples."""
        return {row["attack"] for row in self.rows} - {row["attack"] for row in self.silent}

    @cached_property
    def answered(self) -> set[tuple[str, Sample]]:
        """Attacks and the samples on which they finished in each repeat."""
        return set(map(_attack_on_sample, self.rows)) - set(map(_attack_on_sample, self.silent))

    @cached_property
    def not_run(self) -> list[Row]:
        """Rows of attacks that were not run for lack of time."""
        return [row for row in self.rows if row["status"] == UNPLAYED]

    @cached_property
    def best(self) -> tuple[float, Row] | None:
        """Best reconstruction: among leaks, else of the attack that recovers parts, else of all."""
        part = self.part
        of_part = [pair for pair in self.finite if part and pair[1]["attack"] == part.attack]
        return max(self.leaks or of_part or self.finite, key=lambda pair: pair[0], default=None)

    @cached_property
    def doubt(self) -> Doubt | None:
        """First reason of `DOUBTS` why the results do not decide; None if they do."""
        found = (rule(self) for rule in DOUBTS)
        return next((doubt for doubt in found if doubt), None)


def has_finished(row: Row, criterion: Criterion, closed: Collection[str]) -> bool:
    """Return whether an attack finished; a closed form that finds no fitting sample has finished."""
    fits_nothing = row["status"] == "diverged" and row["attack"] in closed
    ended = row["status"] == "ok" or fits_nothing
    return ended and criterion.nearness(row) is not None and all(is_measured(row[name]) for name in criterion.needs)


def _attack_on_sample(row: Row) -> tuple[str, Sample]:
    return row["attack"], get_sample_key(row)


# Rules of a doubt. Each returns a reason if it applies.


def _attack_left_open(cell: Cell) -> Doubt | None:
    """An attack reports that another attack may leak more."""
    for row in cell.rows:
        if row.get("reason") in UNDECIDED:
            return Doubt(Reason(row["reason"]), row.get("message") or "")
    return None


def _reconstruction_is_near(cell: Cell) -> Doubt | None:
    """A reconstruction reaches the threshold, but does not identify its sample."""
    near = [row for _, row in cell.finite if cell.criterion.near(row)]
    if cell.leaks or not near:
        return None
    identified = any(row["identified"] == 1 for row in near)
    return Doubt(Reason.PUBLIC_SAMPLE_AS_CLOSE if identified else Reason.CLOSER_TO_ANOTHER_SAMPLE)


def _tokens_in_another_order(cell: Cell) -> Doubt | None:
    """All tokens of a text were recovered, in another order."""
    shares = (row.get(TOKENS_IN_ANY_ORDER) for _, row in cell.finite)
    if cell.leaks or not any(share is not None and share >= cell.criterion.threshold for share in shares):
        return None
    return Doubt(Reason.TOKENS_IN_ANOTHER_ORDER)


def _update_not_explained(cell: Cell) -> Doubt | None:
    """No reconstruction explains the update.

    The original has this gradient, so an attack whose reconstruction does not have it has not converged. Tables of
    earlier versions, and updates of several local steps, have no `fit`. With a defence only adaptive attackers count:
    they know which values the defence leaves unchanged and what noise it adds.
    """
    if cell.leaks or cell.part or (cell.bare and cell.changed):
        return None
    rows = [row for _, row in cell.finite]
    able = [row for row in rows if cell.bare or code_given(row)]
    if not able:
        return None
    if explains(able, rows):
        unique = [row for row in able if (row.get("between") or 0.0) <= GRADIENT_FIT_TOL]
        return None if explains(unique, rows) else Doubt(Reason.FEW_SAMPLES_FIT)
    gap = _gap(able)
    if cell.bare:
        return Doubt(Reason.NOT_CONVERGED if gap else Reason.NOT_COMPARED, gap=gap)
    return Doubt(Reason.ADAPTIVE_NOT_CONVERGED if gap else Reason.ADAPTIVE_NOT_COMPARED, gap=gap)


def _gap(rows: Sequence[Row]) -> Gap | None:
    """Return how far the best of some reconstructions is from the true samples; None if none was compared."""
    compared = [row for row in rows if row.get("fit") is not None]
    likelihoods = [row for row in compared if row.get("log_likelihood") is not None]
    if likelihoods:
        best = max(likelihoods, key=lambda row: row["log_likelihood"] - row["true_log_likelihood"])
        return Gap(best["log_likelihood"], best["true_log_likelihood"], of_likelihood=True)
    if not compared:
        return None
    return Gap(min(row["fit"] for row in compared), GRADIENT_FIT_TOL, of_likelihood=False)


DOUBTS: Sequence[Callable[[Cell], Doubt | None]] = (
    _attack_left_open,
    _reconstruction_is_near,
    _tokens_in_another_order,
    _update_not_explained,
)
"""Rules that give the reason why results do not decide, in order: the first that applies counts."""


# Rules of a state. Each returns whether it applies.


def _hidden_by_channel(cell: Cell) -> bool:
    """No attack could read the update, because the channel hides it."""
    return all(row["status"] == INAPPLICABLE and row.get("reason") in CHANNELS for row in cell.rows)


def _leaks(cell: Cell) -> bool:
    """A sample leaks, whole or in part."""
    return bool(cell.leaks or cell.part)


def _declaration_says_nothing(cell: Cell) -> bool:
    """A defence declares nothing, or something else than it does."""
    return bool(cell.doubt and cell.finite and cell.doubt.reason in OF_DECLARATION)


def _in_doubt(cell: Cell) -> bool:
    """All attacks were run, and their results do not decide."""
    return bool(cell.doubt and cell.finite and not cell.not_run)


def _no_attack_complete(cell: Cell) -> bool:
    """No attack returned a result for all samples."""
    return not cell.finite or not cell.complete


def _decisive_attack_missing(cell: Cell) -> bool:
    """An attack that succeeds without a defence, or was not run there, has no result on the same sample."""
    return not {*cell.working, *cell.untried} <= cell.answered


def _attack_broken(cell: Cell) -> bool:
    """An attack failed or diverged; without a defence, also one that returned nothing usable."""
    unusable = (row for row in cell.silent if row["status"] != INAPPLICABLE)
    return any(cell.bare or row["status"] != "ok" for row in unusable)


def _attacks_work(cell: Cell) -> bool:
    """The attacks converged without a defence, or succeed there."""
    return cell.bare or bool(cell.working)


def _otherwise(cell: Cell) -> bool:
    """Nothing leaks without a defence either."""
    return True


RULES: Sequence[tuple[Callable[[Cell], bool], State]] = (
    (_hidden_by_channel, State.NOTHING_TO_ATTACK),
    (_leaks, State.LEAKS),
    (_declaration_says_nothing, State.NOT_MEASURED),
    (_in_doubt, State.INCONCLUSIVE),
    (_no_attack_complete, State.NOT_MEASURED),
    (_decisive_attack_missing, State.NOT_MEASURED),
    (_attack_broken, State.NOT_MEASURED),
    (_attacks_work, State.NOT_RECONSTRUCTED),
    (_otherwise, State.INCONCLUSIVE),
)
"""Rules of the state of an arm at a batch size, in order: the first that applies decides."""


def compute_findings(
    attacks: Sequence[Row],
    criterion: Criterion,
    short_searches: Collection[str] = (),
    undefended: Collection[str] = ("none",),
    finished: bool = True,
    closed: Collection[str] = (),
    changed: bool = False,
) -> list[Finding]:
    """Return the findings on all arms and batch sizes, in the order of the rows of `attacks`.

    `short_searches` are the titles of searches that ran the minimum of evaluations because their speed was not known.
    `undefended` are the arms that show whether an attack works. `closed` are the titles of closed forms. If a run has
    not `finished`, only leaks are reported. With `changed`, a defence may have changed the update of those arms, so the
    original samples need not explain it.
    """
    cells = _cells(attacks, criterion, undefended, closed, changed)
    compared = {batch for arm, batch in cells if arm in undefended}
    found = [
        _finding(arm, batch, cell, batch in compared, finished, short_searches) for (arm, batch), cell in cells.items()
    ]
    leaks = [one for one in found if one.state == State.LEAKS and one.arm not in undefended]
    best = {one.batch: one for one in sorted(leaks, key=lambda one: one.best or 0.0)}
    for index, one in enumerate(found):
        if one.arm in undefended and one.state != State.LEAKS and one.batch in best:
            overtaken = _overtaken(best[one.batch], cells[one.arm, one.batch])
            found[index] = replace(one, overtaken=overtaken)
    return found


def _cells(
    attacks: Sequence[Row], criterion: Criterion, undefended: Collection[str], closed: Collection[str], changed: bool
) -> dict[tuple[str, int], Cell]:
    """Return the rows by arm and batch size, sorted by the order of the arms and then by batch size."""
    by_cell = group_rows(attacks, "arm", "batch_size")
    working = working_attacks(by_cell, criterion, undefended)
    untried: dict[int, set[tuple[str, Sample]]] = {}
    for row in attacks:
        if row["arm"] in undefended and row["status"] == UNPLAYED:
            untried.setdefault(row["batch_size"], set()).add(_attack_on_sample(row))
    arms = list(dict.fromkeys(arm for arm, _ in by_cell))
    labels = {row["attack"]: get_attack_label(row) for row in attacks}
    cells = {}
    for arm, batch in sorted(by_cell, key=lambda cell: (arms.index(cell[0]), cell[1])):
        bare = arm in undefended
        cells[arm, batch] = Cell(
            rows=by_cell[arm, batch],
            criterion=criterion,
            closed=closed,
            bare=bare,
            working=working.get(batch, set()),
            untried=set() if bare else untried.get(batch, set()),
            changed=changed,
            labels=labels,
        )
    return cells


def working_attacks(
    cells: Mapping[tuple[Any, ...], Sequence[Row]], criterion: Criterion, undefended: Collection[str]
) -> dict[int, set[tuple[str, Sample]]]:
    """Return the attacks and samples that leak without a defence, whole or in part, by batch size."""
    found: dict[int, set[tuple[str, Sample]]] = {}
    for (arm, batch), rows in cells.items():
        if arm in undefended:
            part = criterion.part(rows)
            leaks = [row for row in rows if criterion.leaks(row)] + list(part.rows if part else ())
            found.setdefault(batch, set()).update(map(_attack_on_sample, leaks))
    return found


def _finding(
    arm: str, batch: int, cell: Cell, compared: bool, finished: bool, short_searches: Collection[str]
) -> Finding:
    """Return the finding of one arm and batch size; `compared` says whether an undefended arm was attacked."""
    state = next(state for applies, state in RULES if applies(cell))
    samples = len(set(map(get_sample_key, cell.rows)))
    if state == State.NOTHING_TO_ATTACK:
        messages = dict.fromkeys(row["message"] or "" for row in cell.rows)
        hidden = tuple(NoResult("", "", message, None) for message in messages)
        found = Finding(arm, batch, state, samples=samples, no_results=hidden)
    else:
        found = _with_values(Finding(arm, batch, state, samples=samples), cell, short_searches)
    if found.state == State.INCONCLUSIVE and not compared:
        found = replace(found, doubt=found.doubt or Doubt(Reason.NO_UNDEFENDED_ARM))
    if found.state != State.LEAKS and not finished:
        found = replace(found, state=State.NOT_MEASURED, unfinished=True)
    return found


def _with_values(finding: Finding, cell: Cell, short_searches: Collection[str]) -> Finding:
    """Return a finding with the values of its cell."""
    leaks, rows = [row for _, row in cell.leaks], [row for _, row in cell.finite]
    value, best = cell.best or (None, None)
    near_public = {get_sample_key(row) for row in rows if cell.criterion.near(row) and cell.criterion.like_public(row)}
    part_row = next((row for row in rows if cell.part and row["attack"] == cell.part.attack), None)
    short = {get_attack_label(row) for row in cell.rows if row["attack"] in cell.complete & set(short_searches)}
    gains = [row["above_baseline"] for row in leaks if row["above_baseline"] is not None]
    labels = best_label_inference(collect_label_inferences(cell.rows))
    return replace(
        finding,
        metric=leading(cell.criterion.modality).name,
        closest=_closest(cell),
        leaked=len(set(map(get_sample_key, leaks))),
        best=value,
        mean=_mean_similarity(cell),
        by=get_attacker(best) if best else None,
        no_results=_no_results(cell),
        not_run=_not_run(cell),
        short_searches=tuple(sorted(short)),
        failed=tuple(dict.fromkeys(get_attack_label(row) for row in cell.silent if row["status"] == "failed")),
        pending_attacks=_pending(cell),
        doubt=cell.doubt,
        gain=best["above_baseline"] if best else None,
        most=max(gains, default=None),
        alike=len(near_public - set(map(get_sample_key, leaks))),
        labels=labels.summary if labels else None,
        targets=_targets_found(cell.rows),
        guessed=_targets_guessed(cell.rows),
        shown=None if cell.bare else len(_samples_shown(cell)),
        part=cell.part,
        part_by=get_attacker(part_row) if part_row else None,
    )


def _samples_shown(cell: Cell) -> set[Sample]:
    """Return the samples on which attacks are known to work: adaptive attacks, if any were run on the arm."""
    adaptive = {row["attack"] for row in cell.rows if code_given(row)}
    return {sample for attack, sample in cell.working if attack in adaptive or not adaptive}


def get_attacker(row: Row) -> Attacker:
    """Return the attack in a row with the attacker's knowledge."""
    return Attacker(get_attack_label(row), knowledge_in(row))


def _closest(cell: Cell) -> tuple[Closest, ...]:
    best: dict[tuple[str, ...], float] = {}
    for value, row in cell.finite:
        knowledge = knowledge_in(row)
        best[knowledge] = max(value, best.get(knowledge, value))
    return tuple(Closest(knowledge, value) for knowledge, value in best.items())


def _mean_similarity(cell: Cell) -> float | None:
    """Return the mean of the leading metric over the samples, of the best reconstruction of each."""
    best: dict[Sample, float] = {}
    for value, row in cell.finite:
        best[get_sample_key(row)] = max(value, best.get(get_sample_key(row), value))
    return fmean(best.values()) if best else None


def _no_results(cell: Cell) -> tuple[NoResult, ...]:
    """Return the attacks without a result; those that do not apply only if no attack has a result."""
    found: dict[NoResult, None] = {}
    for row in cell.silent:
        inapplicable = row["status"] == INAPPLICABLE and bool(cell.finite or cell.not_run)
        if row["status"] == UNPLAYED or inapplicable:
            continue
        missing = cell.criterion.missing(row) if row["status"] == "ok" else None
        message = "" if missing else row["message"] or ""
        found[NoResult(get_attack_label(row), row["status"], message, missing)] = None
    return tuple(found)


def _not_run(cell: Cell) -> tuple[NotRun, ...]:
    """Return the attacks that were not run for lack of time, with the attackers if others ran them."""
    missing: dict[str, dict[tuple[str, ...], None]] = {}
    for row in cell.not_run:
        missing.setdefault(get_attack_label(row), {})[knowledge_in(row)] = None
    found = []
    for label, attackers in missing.items():
        ran = {knowledge_in(row) for row in cell.rows if get_attack_label(row) == label} - set(attackers)
        found.append(NotRun(label, tuple(attackers) if ran else (), tuple(sorted(ran))))
    return tuple(found)


def _pending(cell: Cell) -> tuple[Pending, ...]:
    """Return the attacks whose missing result would decide."""
    found = []
    for group, works in ((cell.working, True), (cell.untried, False)):
        missing = {cell.labels.get(attack, attack) for attack, _ in set(group) - cell.answered}
        found += [Pending(label, works) for label in sorted(missing)]
    return tuple(found)


def _targets_found(rows: Sequence[Row]) -> float | None:
    """Return the smallest mean absolute error of targets recovered by an attack; None if no attack recovers targets."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.get("target_error") is not None and not labels_given(row):
            errors.setdefault(row["attack"], []).append(row["target_error"])
    return min(map(fmean, errors.values()), default=None)


def _targets_guessed(rows: Sequence[Row]) -> float | None:
    errors = {get_sample_key(row): row.get("target_baseline") for row in rows}
    known = [error for error in errors.values() if error is not None]
    return fmean(known) if known else None


def _overtaken(leak: Finding, cell: Cell) -> Overtaken:
    """Return the attack that succeeded against a defence, with its result on an undefended arm."""
    assert leak.by is not None
    same = [row for row in cell.rows if get_attacker(row) == leak.by]
    if not same:
        here = Elsewhere.NOT_IN_RUN
    elif any(row["status"] == UNPLAYED for row in same):
        here = Elsewhere.NO_TIME
    elif not all(has_finished(row, cell.criterion, cell.closed) for row in same):
        here = Elsewhere.NO_RESULT
    else:
        here = Elsewhere.NO_LEAK
    return Overtaken(leak.by, leak.arm, leak.batch, here)


def explains(able: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Return whether each sample of `rows` has a row in `able` whose reconstruction explains the update (`fit`)."""
    explained = {get_sample_key(row) for row in able if row.get("fit") is not None and row["fit"] <= GRADIENT_FIT_TOL}
    return explained >= set(map(get_sample_key, rows))


def cells_without_adaptive_attack(
    rows: Sequence[Row], criterion: Criterion, undefended: Collection[str], closed: Collection[str] = ()
) -> dict[tuple[str, int], Reason]:
    """Return the arms and batch sizes without a valid adaptive attack, with the reason (one of `NOT_ADAPTIVE`).

    Adaptive attacks need a result for every attacked sample. One of them has to succeed on a sample without a defence
    and to have a result for this sample here.
    """
    cells = group_rows(rows, "arm", "batch_size")
    working = working_attacks(cells, criterion, undefended)
    found = {}
    for (arm, batch), cell in cells.items():
        able = [row for row in cell if code_given(row) and has_finished(row, criterion, closed)]
        if not set(map(get_sample_key, able)) >= set(map(get_sample_key, cell)):
            found[arm, batch] = Reason.NO_ADAPTIVE_ATTACK
        elif not set(map(_attack_on_sample, able)) & working.get(batch, set()):
            found[arm, batch] = Reason.NO_ADAPTIVE_ATTACK_WORKS
    return found


def worst_state(found: Sequence[Finding]) -> State:
    """Return the worst state among some findings; "not measured" without findings."""
    return next((state for state in State if any(one.state == state for one in found)), State.NOT_MEASURED)
