"""Audit of how much one gradient of a model gives away: the scenario, and the verdicts that its rows support.

For users with a model and data but no scenario. Every attack of `METHODS` that works on such samples is played against
every arm: blind, with knowledge of the defence, and with the labels too. No sentence claims more than was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from rayfed import registry
from rayfed.analysis.named_labels import Named, foremost, named
from rayfed.analysis.parts import Part, beyond_chance
from rayfed.analysis.settings import estimate
from rayfed.analysis.summary import Row, code_given, labels_given, measured
from rayfed.documents import dump_yaml
from rayfed.hidden import CHANNELS, UNREHEARSED, UNSOLVED, UNUSED
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.known import NOUNS, leading
from rayfed.store.schemas import UNPLAYED, WANT_OF_TIME

if TYPE_CHECKING:
    from rayfed.samples import Modality

UNDEFENDED = "none"
Defences = dict[str, list[dict[str, Any]]]
DEFENCES: Defences = {
    name: pipeline
    for sigma, ratio, bits in ((1e-2, 0.9, 4), (1e-1, 0.99, 1), (1e-3, 0.5, 8))
    for name, pipeline in (
        (f"gaussian {sigma:g}", [{"name": "gaussian", "sigma": sigma}]),
        (f"prune {ratio:g}", [{"name": "prune", "ratio": ratio}]),
        (f"quantise {bits}-bit", [{"name": "quantise", "bits": bits}]),
    )
}
"""Default defences by arm: one of each kind, then the stronger and the weaker ones if there is time."""


@dataclass(frozen=True)
class Method:
    """An attack that the audit plays."""

    name: str
    evaluations: int = 0
    """Evaluations of the objective in one of its iterations; 0 for a closed form."""
    largest: int | None = None
    """Largest batch on which it is played: on larger ones it takes the most time and finds nothing."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """Weight of a search where time is divided among several."""

    def takes(self, modality: Modality, batch: int) -> bool:
        """Return whether it is played on batches of such samples."""
        from rayfed.samples import taken  # with PyTorch, which takes seconds, and which who reads tables does not need

        works = modality in taken("attacks", registry.find("attacks", self.name))
        return works and (self.largest is None or batch <= self.largest)


METHODS = (
    Method("analytic"),
    Method("spear"),
    Method("peel"),
    Method("april"),
    Method("buffers"),  # reads what no defence of the update changes
    Method("columns"),
    Method("entries"),
    Method("embedding_rows"),
    Method("dager"),
    Method("inverting_gradients", evaluations=1),
    Method("idlg", evaluations=20, largest=4, parameters={"restarts": 1}, share=0.25),  # finds all soon, or nothing
    Method("tag", evaluations=1),
)
"""All attacks of the audit, closed forms first."""

CLOSED_FORMS = frozenset(method.name for method in METHODS if not method.evaluations)
"""Attacks whose answer may be that no sample fits: their status is then 'diverged'."""

TWINS: dict[str, tuple[str, ...]] = {
    "blind": (),
    "informed": ("defence", "code"),
    "informed, with labels": ("defence", "code", "labels"),
}
"""Knowledge that attackers are granted, by name."""
GIVEN = {
    "blind": "nothing",
    "informed": "the defences and their code",
    "informed, with labels": "the defences, their code and the labels",
}
"""What these attackers have beside model and update, in words."""
EXPLAINS = 5e-6
"""Highest `fit` at which samples explain the gradient: their distance from it over that of a grey sample.

It is what single precision leaves of an answer that is exact. Where no noise is, more tells samples apart: it may be a
slight pattern on what a blurred image explains.
"""
UNEXPLAINED = "no attack found a sample that has this gradient, as the true one has"
ISOLATED = (
    "an attack found another sample that has this gradient, and what lies between it and the true one, if anything, "
    "has not: where few samples have it, the true one may be told among them"
)
UNEXPLAINED_PART = "no attacker with the code found a sample that explains what was sent as well as the true one does"
UNCOMPARED = "no answer of an attacker with the code could be compared with what was sent"
NO_CODE = "no attack that answered for every sample had this defence's code (knowledge: [defence, code])"
NONE_WORKS = "no attack that had this defence's code succeeded without a defence, so their answers say nothing of it"
UNREAD = NO_CODE, NONE_WORKS
"""Why no answers of attackers with the code show that a defence holds."""
INCOMPARABLE = "no answer could be compared with the update, so nothing shows that these attacks work on it"
NEAR = "a reconstruction is near"
BAG = "rouge1"
"""Metric of a text's tokens in any order."""
IN_ANOTHER_ORDER = f"{NEAR} in another order: its tokens are those of the text"
ALONE = "nothing was attacked without a defence"
FOUND_NOTHING = "the attacks rebuilt nothing without a defence either"
PARTS = {"tokens": "tokens", "records": "columns", "pixels": "pixels"}
"""Names of the parts of samples, by form."""
COLUMNS = 8
"""Most columns of records that a sentence names."""
SLIGHT = 3.0
"""Decibels above guessing, which are half of its squared error, below which the sentence on a leak says how many."""
FEWEST, USEFUL, MOST = 40, 100, 24_000
"""Evaluations of a search: the minimum with any budget, because fewer often find nothing where a few more do; the
minimum if there is time for them on two arms; and the maximum."""


@dataclass(frozen=True)
class Plan:
    """What an audit attacks: a model on data under some defences."""

    model: Mapping[str, Any]
    """The scenario's section `model`."""
    data: Mapping[str, Any]
    """The scenario's section `data`."""
    batches: Sequence[int]
    samples: int
    """Samples attacked for each batch size, rounded up to batches."""
    seed: int = 0
    loss: Mapping[str, Any] = field(default_factory=dict)
    """The scenario's section `loss`; if empty, that of the model's task, or the default."""
    defences: Defences = field(default_factory=lambda: DEFENCES)
    threshold: float | None = None
    """Least value of the leading metric at which a reconstruction may be a leak; None: the metric's default."""

    @property
    def modality(self) -> Modality:
        """Form of the samples; raises `UserError` for an unknown data set."""
        from rayfed.samples import held

        return held(registry.find("datasets", self.data["name"]))

    @property
    def asked(self) -> bool:
        """Whether a user named defences: then each of them is to have an answer."""
        return not self.defences.keys() <= DEFENCES.keys()

    @property
    def searches(self) -> list[tuple[Method, int]]:
        """The methods and batch sizes for which iterations have to be chosen."""
        every = product(METHODS, self.batches)
        return [(m, batch) for m, batch in every if m.evaluations and m.takes(self.modality, batch)]

    def scenario_text(self, iterations: Mapping[str, int]) -> str:
        """Return the audit as a scenario in YAML: one round, which is not played, and its attacks, closed forms first.

        `iterations` maps the title of a search (`title`) to its iterations.
        """
        criterion = Criterion.of(self.modality, self.threshold)
        attacks = [
            self._attack(method, batch, twin, iterations)
            for method, batch, twin in product(METHODS, self.batches, TWINS)
            if method.takes(self.modality, batch)
        ]
        document = {
            "name": "audit",
            "seed": self.seed,
            "data": dict(self.data),
            "model": dict(self.model),
            **({"loss": dict(self.loss)} if self.loss else {}),
            "federation": {"rounds": 1, "clients": self.samples},
            "arms": {UNDEFENDED: [], **self.defences},
            "attacks": attacks,
            "metrics": {"success": {leading(self.modality).name: criterion.threshold}},
        }
        return dump_yaml(document)

    def _attack(self, method: Method, batch: int, twin: str, iterations: Mapping[str, int]) -> dict[str, Any]:
        searched = {"iterations": iterations[title(method, batch)]} if method.evaluations else {}
        return {
            "name": method.name,
            **method.parameters,
            **searched,
            "observes": "gradient",
            "batch_size": batch,
            "victims": -(-self.samples // batch),
            "knowledge": list(TWINS[twin]),
            "label": f"{title(method, batch)}, {twin}",
        }


def called(pipeline: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of an arm of these defences, with their parameters."""
    parts = []
    for defence in pipeline:
        settings = ", ".join(f"{key} {value}" for key, value in defence.items() if key != "name")
        parts.append(f"{defence['name']} ({settings})" if settings else str(defence["name"]))
    return " + ".join(parts)


def title(method: Method, batch: int) -> str:
    """Return the name of a method on a batch size, which all its twins share."""
    return f"{method.name} batch {batch}"


State = Literal["leaks", "not reconstructed", "nothing to attack", "inconclusive", "not measured"]


@dataclass(frozen=True)
class Finding:
    """What the attacks found in gradients of one batch size in one arm."""

    arm: str
    batch: int
    state: State
    closest: Mapping[str, float]
    """Leading metric of the closest reconstruction, by twin; twins that found nothing finite are left out."""
    leaked: int
    """Samples that leaked to at least one attack."""
    samples: int
    best: float | None
    """Leading metric of the closest reconstruction among those that leaked, otherwise among all; None without any."""
    by: str
    """Attack that made the closest reconstruction; empty if there is none."""
    reasons: tuple[str, ...]
    """Why attacks ended without an answer; if none had one, also why attacks did not apply."""
    unplayed: tuple[str, ...] = ()
    """Attacks for which there was no time."""
    untimed: tuple[str, ...] = ()
    """Searches that answered after `FEWEST` evaluations, outside the budget."""
    failed: tuple[str, ...] = ()
    """Attacks that raised an error on some victim."""
    awaited: tuple[str, ...] = ()
    """Attacks whose answer would tell and is missing: they succeeded without a defence, or had no time there."""
    lacking: str = ""
    """Why answers show less than they seem to: what an attacker lacked, or that nothing else was attacked which would
    show that the attacks work."""
    gain: float | None = None
    """How much nearer `best` is than the best guess; None if there is no guess."""
    most: float | None = None
    """The most that a leak is nearer than the best guess; None without a leak."""
    gains: tuple[float, ...] = ()
    """The most that a reconstruction of each sample is nearer to it than the best guess, of those that have a guess."""
    attackers: int = 0
    """Attackers whose reconstructions these are the best of."""
    alike: int = 0
    """Samples that did not leak although a reconstruction is near: the nearest public sample is as near."""
    above_public: float | None = None
    """How much nearer `best` is than the nearest public sample; None if there is no public sample."""
    labels: Named | None = None
    """Labels found by the best attack that was not given them; None if no attack sought labels."""
    targets: float | None = None
    """Mean absolute error of the numbers found by the best attack that was not given them; None for classes."""
    shown: int | None = None
    """Samples of this batch size that leak without a defence; None for an arm without a defence."""
    guessed: float | None = None
    """Mean absolute error of naming the median for every sample; None if it is not known."""
    caveat: str = ""
    """What was not looked at of the defence, where nothing was reconstructed."""
    part: Part | None = None
    """What an attack finds of the samples by more than chance, be it not near enough for a leak of whole ones."""
    behind: str = ""
    """For an undefended arm without a leak: which attack succeeded behind a defence, and what it did here."""


@dataclass(frozen=True)
class Criterion:
    """Conditions of a leak: a reconstruction is near enough, nearer than any guess, and nearest to its own sample."""

    needs: ClassVar[tuple[str, ...]] = ("above_guessing", "told_apart")
    """Metrics that it needs besides the leading one."""

    modality: Modality
    threshold: float

    @property
    def noun(self) -> str:
        """What a sample is called: image, text or record."""
        return NOUNS[self.modality]

    @property
    def names(self) -> tuple[str, ...]:
        """All metrics that the criterion uses; tables of earlier versions lack `above_public`."""
        return leading(self.modality).name, *self.needs, "above_public"

    @classmethod
    def of(cls, modality: Modality, threshold: float | None) -> Criterion:
        """Return the criterion for a form of samples, with the default threshold unless one is given."""
        usual = leading(modality).threshold
        assert usual is not None
        return cls(modality, usual if threshold is None else threshold)

    def nearness(self, row: Row) -> float | None:
        """Return the leading metric of a row of attacks, up to its ceiling; None if it is not a number."""
        metric = leading(self.modality)
        value = row.get(metric.name)
        return None if value is None or value != value else min(value, metric.ceiling)

    def near(self, row: Row) -> bool:
        """Return whether a row's reconstruction is near enough, and nearer than a guess."""
        value = self.nearness(row)
        return value is not None and value >= self.threshold and (row["above_guessing"] or 0.0) > 0

    def leaks(self, row: Row) -> bool:
        """Return whether a row of attacks is a leak."""
        return self.near(row) and row["told_apart"] == 1 and not self.like_public(row)

    def like_public(self, row: Row) -> bool:
        """Return whether a row's reconstruction is known to be no nearer than the nearest public sample is."""
        above = row.get("above_public")
        return above is not None and above <= 0

    def part(self, rows: Sequence[Row]) -> Part | None:
        """Return what the rows of one arm and batch size give away of samples in part; None where chance may."""
        return beyond_chance(rows)

    def lacking(self, row: Row) -> str:
        """Return why a row of an attack that finished is no answer."""
        return "found nothing finite" if self.nearness(row) is None else f"without {' and '.join(self.needs)}"

    def called(self, row: Row) -> str:
        """Return what a row's result is called: `reconstructed` if it is a leak, otherwise why it is not."""
        value = self.nearness(row)
        if self.leaks(row):
            return "reconstructed"
        if value is None or row["above_guessing"] is None or row["told_apart"] is None:
            return "not compared with a guess"
        if row["above_guessing"] <= 0:
            return "no nearer than a guess"
        if self.like_public(row):
            return f"no nearer than a public {self.noun}"
        if row["told_apart"] != 1:
            return f"no nearer than to another {self.noun}"
        return f"below {self.written(self.threshold)}"

    def written(self, value: float) -> str:
        """Return a value of the leading metric as text."""
        if self.modality != "pixels":
            return f"{value:.0%}"
        return f">{PSNR_CEILING:.0f} dB" if value >= PSNR_CEILING else f"{value:.1f} dB"


def modality_of(attacks: Sequence[Row]) -> Modality:
    """Return the form of the samples of some rows of attacks, by what was measured of them."""
    others = (form for form in NOUNS if form != "pixels")
    return next((form for form in others if any(measured(row.get(leading(form).name)) for row in attacks)), "pixels")


def noun_of(rows: Sequence[Row]) -> str:
    """Return what the samples of some rows of attacks or outcomes are called: `sample` where nothing was measured."""
    form = modality_of(rows)
    return NOUNS[form] if any(measured(row.get(leading(form).name)) for row in rows) else "sample"


def findings(
    attacks: Sequence[Row],
    criterion: Criterion,
    untimed: Collection[str] = (),
    undefended: Collection[str] = (UNDEFENDED,),
    finished: bool = True,
    closed: Collection[str] = CLOSED_FORMS,
    changed: bool = False,
) -> list[Finding]:
    """Return what was found, arm by arm and batch size by batch size, in the order of the rows.

    `untimed` are the titles (`title`) of searches that had `FEWEST` evaluations because their speed was not known;
    `undefended` the arms on which attacks show that they work; `closed` the titles of closed forms. If a run
    has not `finished`, only leaks are reported. With `changed`, a defence may have changed what those arms send, so
    that the samples themselves need not explain it.
    """
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in attacks:
        cells.setdefault((row["arm"], row["batch_size"]), []).append(row)
    leaking: dict[int, set[tuple[Any, ...]]] = {}
    untried: dict[int, set[tuple[Any, ...]]] = {}
    for row in attacks:
        if row["arm"] in undefended and row["status"] == UNPLAYED:
            untried.setdefault(row["batch_size"], set()).add((row["attack"], *_sample(row)))
    for (arm, batch), rows in cells.items():
        if arm in undefended:
            leaking.setdefault(batch, set()).update(_read(rows, criterion))
    arms = list(dict.fromkeys(arm for arm, _ in cells))
    ordered = sorted(cells, key=lambda cell: (arms.index(cell[0]), cell[1]))
    found = []
    for arm, batch in ordered:
        compared = any((one, batch) in cells for one in undefended)
        bare = arm in undefended
        known = leaking.get(batch, set()), set() if bare else untried.get(batch, set())
        one = _finding(cells[arm, batch], criterion, *known, untimed, bare, closed, changed)
        if one.state == "inconclusive" and not compared:
            one = replace(one, lacking=one.lacking or ALONE)
        if one.state != "leaks" and not finished:
            one = replace(one, state="not measured", reasons=("the run did not come to its end", *one.reasons))
        found.append(one)
    leaks = [one for one in found if one.state == "leaks" and one.arm not in undefended]
    nearest = {one.batch: one for one in sorted(leaks, key=lambda one: one.best or 0.0)}
    return [
        replace(one, behind=_behind(nearest[one.batch], cells[one.arm, one.batch], criterion, closed))
        if one.arm in undefended and one.state != "leaks" and one.batch in nearest
        else one
        for one in found
    ]


def _behind(leak: Finding, rows: Sequence[Row], criterion: Criterion, closed: Collection[str]) -> str:
    """Return which attack succeeded behind a defence, and its outcome in these rows of an undefended arm."""
    same = [row for row in rows if played_by(row) == leak.by]
    if not same:
        here = "here it was not played"
    elif any(row["status"] == UNPLAYED for row in same):
        here = "here there was no time for it"
    else:
        here = "here it did not" + " answer" * (not all(_answers(row, criterion, closed) for row in same))
    return (
        f"“{leak.by}” succeeded behind {leak.arm} at batch {leak.batch}, and {here}: "
        f"this does not show that less leaks without a defence"
    )


def _finding(
    rows: Sequence[Row],
    criterion: Criterion,
    leaking: set[tuple[Any, ...]],
    untried: set[tuple[Any, ...]],
    untimed: Collection[str],
    bare: bool,
    closed: Collection[str],
    changed: bool,
) -> Finding:
    """Return what was found in one cell.

    `leaking` are attacks and the samples that leak to them without a defence, `untried` those for which there was no
    time there: as these might leak as well, they have to answer here, too.
    """
    finite = [(value, row) for row in rows if (value := criterion.nearness(row)) is not None]
    leaks = [(value, row) for value, row in finite if criterion.leaks(row)]
    closest: dict[str, float] = {}
    for value, row in finite:
        twin = _twin(row)
        closest[twin] = max(value, closest.get(twin, value))
    messages = (row.get("message") or "" for row in rows)
    lacking = next((said for said in messages if any(one in said for one in (UNREHEARSED, UNUSED, UNSOLVED))), "")
    if not leaks and any(criterion.near(row) for _, row in finite):
        alike = any(criterion.near(row) and row["told_apart"] == 1 for _, row in finite)
        than = "a public sample is" if alike else "to another sample"
        near = f"{NEAR}, though no nearer than {than}"
        lacking = lacking or f"{near}: compare it with the true sample (output.images: all)"
    if not leaks and any(row.get(BAG) is not None and row[BAG] >= criterion.threshold for _, row in finite):
        lacking = lacking or IN_ANOTHER_ORDER
    part = criterion.part([row for _, row in finite])
    shown = leaks or [pair for pair in finite if part and pair[1]["attack"] == part.attack] or finite
    best = max(shown, key=lambda pair: pair[0], default=None)
    silent = [row for row in rows if not _answers(row, criterion, closed)]
    answered = {row["attack"] for row in rows} - {row["attack"] for row in silent}
    told = {(row["attack"], *_sample(row)) for row in rows} - {(row["attack"], *_sample(row)) for row in silent}
    unplayed = [row for row in rows if row["status"] == UNPLAYED]
    broken = any(row["status"] != "not applicable" and (bare or row["status"] != "ok") for row in silent)
    if not leaks and not part and not (bare and changed):
        lacking = lacking or _unexplained([row for _, row in finite], bare)
    if not finite or not answered or not leaking | untried <= told or broken:
        state: State = "not measured"
    else:
        state = "not reconstructed" if bare or leaking else "inconclusive"
    if all(row["status"] == "not applicable" and (row["message"] or "").startswith(CHANNELS) for row in rows):
        return Finding(
            arm=rows[0]["arm"],
            batch=rows[0]["batch_size"],
            state="nothing to attack",
            closest={},
            leaked=0,
            samples=len({_sample(row) for row in rows}),
            best=None,
            by="",
            reasons=tuple(dict.fromkeys(row["message"] for row in rows)),
        )
    return Finding(
        arm=rows[0]["arm"],
        batch=rows[0]["batch_size"],
        state="leaks" if leaks or part else "inconclusive" if lacking and finite and not unplayed else state,
        closest=closest,
        leaked=len({_sample(row) for _, row in leaks}),
        samples=len({_sample(row) for row in rows}),
        best=best[0] if best else None,
        by=played_by(best[1]) if best else "",
        reasons=tuple(
            dict.fromkeys(
                _reason(row, criterion)
                for row in silent
                if row["status"] != UNPLAYED and (not (finite or unplayed) or row["status"] != "not applicable")
            )
        ),
        unplayed=_unplayed(rows, unplayed),
        failed=tuple(dict.fromkeys(short_title(row) for row in silent if row["status"] == "failed")),
        awaited=tuple(
            f"{name} ({why})"
            for group, why in (
                (leaking, "which succeeds without a defence"),
                (untried, "for which there was no time without one"),
            )
            for name in sorted({attack.partition(" batch ")[0] for attack, *_ in group - told})
        ),
        lacking=lacking,
        gain=best[1]["above_guessing"] if best else None,
        most=max((row["above_guessing"] for _, row in leaks if row["above_guessing"] is not None), default=None),
        gains=_gains([row for _, row in finite]),
        attackers=len({row["attack"] for _, row in finite}),
        alike=len(
            {_sample(row) for _, row in finite if criterion.near(row) and criterion.like_public(row)}
            - {_sample(row) for _, row in leaks}
        ),
        above_public=best[1].get("above_public") if best else None,
        labels=foremost(named(rows)),
        targets=_targets_found(rows),
        guessed=_targets_guessed(rows),
        untimed=tuple(sorted({name.partition(" ")[0] for name in answered if name.partition(",")[0] in untimed})),
        shown=None if bare else len({place[1:] for place in leaking}),
        part=part and replace(part, attack=played_by(next(row for row in rows if row["attack"] == part.attack))),
    )


def _gains(rows: Sequence[Row]) -> tuple[float, ...]:
    found: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if (gain := row["above_guessing"]) is not None:
            found[_sample(row)] = max(gain, found.get(_sample(row), gain))
    return tuple(found.values())


def _unexplained(rows: Sequence[Row], bare: bool) -> str:
    """Return why answers do not explain a gradient; empty if each sample has an answer that does.

    The sample itself has this gradient, so an attack whose answer does not have it has not finished its search. Tables
    of earlier versions, and updates of several local steps, have no `fit`. Behind a defence those count who know from
    its code which values it leaves as they are and what noise it adds, and samples where that is known; where it is
    known of none, nothing shows that these attacks could have found anything.
    """
    told = [row for row in rows if bare or code_given(row)]
    if not told:
        return ""
    if explains(told, rows):
        apart = [row for row in told if (row.get("between") or 0.0) > EXPLAINS]
        return "" if explains([row for row in told if row not in apart], rows) else ISOLATED
    compared = any(row.get("fit") is not None for row in told)
    if not bare:
        return UNEXPLAINED_PART if compared else UNCOMPARED
    return UNEXPLAINED if compared else INCOMPARABLE


def explains(told: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Return whether for each sample of some rows an answer among `told` explains what was sent (`fit`)."""
    explained = {_sample(row) for row in told if row.get("fit") is not None and row["fit"] <= EXPLAINS}
    return explained >= {_sample(row) for row in rows}


def unread(
    rows: Sequence[Row], criterion: Criterion, undefended: Collection[str], closed: Collection[str] = CLOSED_FORMS
) -> dict[tuple[str, int], str]:
    """Return the arms and batch sizes that attackers with the code did not read, with the reason (`UNREAD`).

    They have to answer for every attacked sample. One of them has to be an attack that succeeds on a sample without a
    defence, and answered for that sample here.
    """
    cells: dict[tuple[str, int], list[Row]] = {}
    working: dict[int, set[tuple[Any, ...]]] = {}
    for row in rows:
        cells.setdefault((row["arm"], row["batch_size"]), []).append(row)
    for (arm, batch), cell in cells.items():
        if arm in undefended:
            working.setdefault(batch, set()).update(_read(cell, criterion))
    found = {}
    for (arm, batch), cell in cells.items():
        told = [row for row in cell if code_given(row) and _answers(row, criterion, closed)]
        if not {_sample(row) for row in told} >= {_sample(row) for row in cell}:
            found[arm, batch] = NO_CODE
        elif not {(row["attack"], *_sample(row)) for row in told} & working.get(batch, set()):
            found[arm, batch] = NONE_WORKS
    return found


def _read(rows: Sequence[Row], criterion: Criterion) -> set[tuple[Any, ...]]:
    """Return the attacks and samples of which the rows of one arm and batch size are leaks, whole or in part."""
    part = criterion.part(rows)
    read = [row for row in rows if criterion.leaks(row)] + list(part.rows if part else ())
    return {(row["attack"], *_sample(row)) for row in read}


def _unplayed(rows: Sequence[Row], unplayed: Sequence[Row]) -> tuple[str, ...]:
    """Return the attacks for which there was no time, with the twins if others were played."""
    missing: dict[str, dict[str, None]] = {}
    for row in unplayed:
        missing.setdefault(short_title(row), {})[_twin(row)] = None
    told = []
    for name, twins in missing.items():
        played = {_twin(row) for row in rows if short_title(row) == name} - set(twins)
        some, but = (sorted(played), "all but ") if 0 < len(played) < len(twins) else (list(twins), "")
        which = but + " and ".join(f"“{twin}”" for twin in some)
        told.append(f"{name} ({which})" if played else name)
    return tuple(told)


def _answers(row: Row, criterion: Criterion, closed: Collection[str]) -> bool:
    """Return whether an attack finished; a closed form that found that no sample fits has finished."""
    fits_nothing = row["status"] == "diverged" and row["attack"] in closed
    ended = row["status"] == "ok" or fits_nothing
    return ended and criterion.nearness(row) is not None and all(row[name] is not None for name in criterion.needs)


def _targets_found(rows: Sequence[Row]) -> float | None:
    """Return the smallest mean absolute error of numbers that an attack found; None if none was sought."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.get("target_error") is not None and not labels_given(row):
            errors.setdefault(row["attack"], []).append(row["target_error"])
    return min(map(fmean, errors.values()), default=None)


def _targets_guessed(rows: Sequence[Row]) -> float | None:
    errors = {_sample(row): row.get("target_guess_error") for row in rows}
    known = [error for error in errors.values() if error is not None]
    return fmean(known) if known else None


def short_title(row: Row) -> str:
    """Return the name of a row's attack, without the batch size and the twin that the audit's titles have."""
    named: str = row["attack"]
    return named.partition(" batch ")[0]


def _twin(row: Row) -> str:
    names = {",".join(granted): name for name, granted in TWINS.items()}
    granted: str = row["knowledge"] or ""
    return names.get(granted, f"given {granted}")


def played_by(row: Row) -> str:
    """Return the name of a row's attack, with that of the attacker who played it."""
    return f"{short_title(row)}, {_twin(row)}"


def _sample(row: Row) -> tuple[Any, ...]:
    return row.get("round"), row["victim"], row["sample"]


def _reason(row: Row, criterion: Criterion) -> str:
    said = f"{row['status']}: {row['message']}" if row["status"] != "ok" else criterion.lacking(row)
    return f"{short_title(row)} {said}"


def sentence(found: Sequence[Finding], criterion: Criterion, earlier: Sequence[Finding] = ()) -> str:
    """Return one sentence on an arm, from its findings of all batch sizes.

    What the sentences on `earlier` arms report of labels is not repeated.
    """
    clauses = [_clause(state, group, criterion, earlier) for state, group in _grouped(found)]
    return f"{found[0].arm}: " + "; ".join([*clauses, *(finding.behind for finding in found if finding.behind)])


def _grouped(found: Sequence[Finding]) -> list[tuple[State, list[Finding]]]:
    groups = [
        (state, [f for f in found if f.state == state and bool(f.unplayed and state != "leaks") == short])
        for state in get_args(State)
        for short in (False, True)
    ]
    return [(state, group) for state, group in groups if group]


def _clause(state: State, group: Sequence[Finding], criterion: Criterion, earlier: Sequence[Finding]) -> str:
    batches = f"batch {', '.join(str(finding.batch) for finding in group)}"
    reasons = dict.fromkeys(reason for finding in group for reason in finding.reasons)
    if state == "nothing to attack":
        return f"nothing to attack at {batches}: {'; '.join(reasons)}"
    silent = (f" (no answer: {'; '.join(reasons)})" if reasons else "") + _labels(group, earlier)
    short = _no_time(group)
    if state == "leaks":
        noun = criterion.noun
        told = [
            f"batch {f.batch}, {_whole(f, noun)}the closest at {_beside_guess(f, criterion)} ({f.by})"
            + _slight(f, criterion)
            + (f"; {told}" if f.leaked < f.samples and (told := in_part(f, criterion)) else "")
            + (f", {f.alike} more near, though no nearer than a public {noun} is: look at them" if f.alike else "")
            + (f"; {IN_ANOTHER_ORDER}" if f.lacking == IN_ANOTHER_ORDER else "")
            for f in group
        ]
        late = f"not all attackers had time at batch {', '.join(str(f.batch) for f in group if f.unplayed)}"
        return f"LEAKS at {'; '.join(told)}{silent}" + (f"; {late}" if short else "")
    near = "".join(f"; {said}" for said in dict.fromkeys(f.lacking for f in group) if said.startswith(NEAR))
    nearest = max((f for f in group if f.best is not None), key=lambda f: f.best or 0.0, default=None)
    if short:
        beside = f" (the closest here at {_beside_guess(nearest, criterion)})" if nearest else ""
        return f"NOT MEASURED {WANT_OF_TIME}: {short}{beside}{silent}{near}"
    if nearest is None:
        return f"NOT MEASURED at {batches}: no attack answered{silent}"
    closest = _beside_guess(nearest, criterion)
    if state == "not measured":
        awaited = [f"{name} at batch {f.batch}" if len(group) > 1 else name for f in group for name in f.awaited]
        why = f"{', '.join(awaited)} would tell, and did not answer" if awaited else "not all attacks answered"
        return f"NOT MEASURED at {batches}: {why}{silent}, the closest at {closest}{near}"
    if state == "inconclusive":
        lacking = dict.fromkeys(f.lacking or FOUND_NOTHING for f in group)
        return f"NOT MEASURED at {batches}, inconclusive: {'; '.join(lacking)} (the closest here at {closest}){silent}"
    untimed = sorted({name for finding in group for name in finding.untimed})
    budget = f" ({', '.join(untimed)}: at most {FEWEST} evaluations)" if untimed else " within this budget"
    noun = criterion.noun
    few = [f"{f.shown} of {f.samples} {noun}s at batch {f.batch}" for f in group if f.shown not in (None, f.samples)]
    shown = f"; without a defence they find {', '.join(few)}, and say nothing about the others" if few else ""
    caveats = "".join(f"; {caveat}" for caveat in dict.fromkeys(f.caveat for f in group if f.caveat))
    return f"not reconstructed by these attacks{budget} at {batches} (the closest at {closest}{shown}){silent}{caveats}"


def _whole(finding: Finding, noun: str) -> str:
    """Return how many samples leaked whole, before the closest."""
    if finding.leaked:
        return f"{finding.leaked} of {finding.samples} {noun}s, "
    return f"in part and no {noun} whole, "


def in_part(finding: Finding, criterion: Criterion) -> str:
    """Return what share of the samples' parts is found, and which columns; empty where chance may find as much."""
    part = finding.part
    if part is None:
        return ""
    names = [
        f"{name} {share:.0%}" + ("" if guess is None else f" ({guess:.0%})")
        for name, share, guess in part.columns[:COLUMNS]
    ]
    more = f" and {len(part.columns) - COLUMNS} more" if len(part.columns) > COLUMNS else ""
    constant = ", in brackets the best constant" if any(guess is not None for *_, guess in part.columns) else ""
    which = f": {', '.join(names)}{more}{constant}" if names else ""
    by, noun = "" if part.attack == finding.by else f" by {part.attack}", criterion.noun
    found = f"of {part.samples} {noun}{'s' * (part.samples != 1)} {part.found:.0%} of the {PARTS[criterion.modality]}"
    return f"{found} are found{by}, where guesses or chance find {part.guessed:.0%}{which}"


def _no_time(group: Sequence[Finding]) -> str:
    """Return the attacks for which there was no time, with their batch sizes; empty if all were played."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for f in group:
        if f.unplayed:
            alike.setdefault(f.unplayed if f.closest or f.reasons else ("all attacks",), []).append(str(f.batch))
    return "; ".join(f"{', '.join(names)} at batch {', '.join(batches)}" for names, batches in alike.items())


def _beside_guess(finding: Finding, criterion: Criterion) -> str:
    """Return how near the closest reconstruction is, and how near a guess is."""
    best = finding.best or 0.0
    unit = "" if criterion.modality == "pixels" else f" of its {PARTS[criterion.modality]}"
    said = criterion.written(best) + unit
    if finding.gain is None:
        return said
    guess = criterion.written(best - finding.gain if criterion.modality == "pixels" else max(best - finding.gain, 0.0))
    if finding.gain <= 0:
        told = f"{said}, no nearer than a guess: {guess}"
    elif guess == criterion.written(best):
        told = f"{said}, a little nearer than a guess"
    else:
        told = f"{said}, where a guess gets {guess}"
    if finding.above_public is None:
        return told
    return f"{told}, the nearest public {criterion.noun} {criterion.written(best - finding.above_public)}"


def _slight(finding: Finding, criterion: Criterion) -> str:
    """Return how far a leak is above guessing, where all are little, and what that is on average over the samples.

    The average is of the best attacker on each sample, chosen by the truth: of many attackers that guess, the best is
    above a guess by chance alone. Words say so, and the figure is not corrected, for a smaller one would read low. What
    leaks is a leak whatever the average.
    """
    if criterion.modality != "pixels" or finding.most is None or finding.most >= SLIGHT:
        return ""
    told, found = f", at most {finding.most:.1f} dB above guessing", estimate(finding.gains)
    if found is None or found.spread is None:
        return f"{told}: look at it"
    low, high = found.spread
    within = ", which guessing is within" * (low <= 0 <= high)
    interval = f"{found.mean:+.1f} dB on average ({low:+.1f} to {high:+.1f} at 95 %{within})"
    best = f", the best of {finding.attackers} attackers on each, chosen by the truth" if finding.attackers > 1 else ""
    return f"{told}, and over all {found.n} {criterion.noun}s, read or not{best}, {interval}: look at them"


def _labels(group: Sequence[Finding], earlier: Sequence[Finding]) -> str:
    """Return the labels or targets found at each batch size, with what a guess finds; empty if none was found."""
    labels, targets = (_unsaid(group, earlier, told) for told in (_labels_of, _targets_of))
    found = f", labels found: {labels}" if labels else ""
    return found + (f", targets found with a mean error of {targets}, on the model's own scale" if targets else "")


def _unsaid(group: Sequence[Finding], earlier: Sequence[Finding], told: Callable[[Finding], str]) -> str:
    """Return the text of each finding by `told`; the name of an `earlier` arm replaces a text that it has too."""
    said = {told(finding): finding.arm for finding in reversed(earlier)}
    some = [finding for finding in group if told(finding)]
    parts = [told(finding) for finding in some if told(finding) not in said]
    as_on: dict[str, list[str]] = {}
    for finding in some:
        if arm := said.get(told(finding)):
            as_on.setdefault(arm, []).append(str(finding.batch))
    return ", ".join([*parts, *(f"as on arm “{arm}” at batch {', '.join(batches)}" for arm, batches in as_on.items())])


def labels_beyond(found: Sequence[Finding]) -> str:
    """Return the labels or targets that attackers read off better than by guessing, with figures; empty if none.

    Where no true label is known, nothing is known of a guess. Of what may be luck it says so.
    """
    labels = [_labels_of(one) + _by_how_many(one.labels) for one in found if one.labels and _beyond(one.labels)]
    targets = [_targets_of(one) for one in found if _nearer(one)]
    with_error = f"targets with a mean error of {', '.join(targets)}" if targets else ""
    return "; ".join(filter(None, (", ".join(labels), with_error)))


def by_luck(found: Sequence[Finding]) -> bool:
    """Return whether all that `labels_beyond` tells may be luck."""
    labels = [one.labels for one in found if one.labels and _beyond(one.labels)]
    return bool(labels) and all(map(_lucky, labels)) and not any(map(_nearer, found))


def _beyond(labels: Named) -> bool:
    """Return whether more labels were named than the best guess names."""
    return labels.guesses.commonest > 0 and (labels.guesses.best < labels.share or labels.whole > 0)


def _lucky(labels: Named) -> bool:
    return labels.lucky and not labels.whole


def _nearer(finding: Finding) -> bool:
    """Return whether targets were found with a smaller error than a guess has."""
    return finding.targets is not None and finding.guessed is not None and finding.targets < finding.guessed


def _by_how_many(labels: Named) -> str:
    wholly = f", of {labels.whole} of {len(labels.updates)} updates all" if labels.whole else ""
    best = f", by the best of {labels.attempts} attackers" if labels.attempts > 1 else ""
    return wholly + best + ", which may be luck" * _lucky(labels)


def _labels_of(finding: Finding) -> str:
    if finding.labels is None:
        return ""
    return f"{finding.labels.share:.0%} at batch {finding.batch} ({_beside_guess_of_labels(finding.labels)})"


def _targets_of(finding: Finding) -> str:
    if finding.targets is None:
        return ""
    guessed = "" if finding.guessed is None else f" (naming the median each time: {finding.guessed:.2g})"
    return f"{finding.targets:.2g} at batch {finding.batch}{guessed}"


def _beside_guess_of_labels(labels: Named) -> str:
    """Return what the best guess of labels finds; if all labels are alike, that this proves nothing."""
    guesses = labels.guesses
    if guesses.in_proportion > max(guesses.evenly, guesses.commonest):
        return f"naming labels as often as others have them: {guesses.in_proportion:.0%}"
    if guesses.evenly > guesses.commonest:
        return f"naming every label equally often: {guesses.evenly:.0%}"
    told = f"naming the commonest label each time: {guesses.commonest:.0%}"
    return f"{told}; all samples have one label, so this proves nothing" if guesses.commonest == 1 else told


@dataclass(frozen=True)
class WorstCase:
    """Best attack on one sample of one batch size, without a defence, and its result."""

    batch: int
    victim: int
    sample: int
    row: Row
    """Row of the attacks' table."""
    named: bool
    """Whether it is what the verdict names: the closest of its batch size, among leaks if there are any."""


def worst_cases(attacks: Sequence[Row], criterion: Criterion) -> list[WorstCase]:
    """Return the worst case of every sample attacked without a defence, by batch size: leaks first, the closest first.

    Of a sample that leaks it is the closest of the leaks.
    """
    closest: dict[tuple[int, int, int], tuple[bool, float, Row]] = {}
    for row in attacks:
        value = criterion.nearness(row)
        if row["arm"] == UNDEFENDED and value is not None:
            key, leaks = (row["batch_size"], row["victim"], row["sample"]), criterion.leaks(row)
            if key not in closest or (leaks, value) > closest[key][:2]:
                closest[key] = leaks, value, row
    ordered = sorted(closest.items(), key=lambda item: (item[0][0], not item[1][0], -item[1][1]))
    before = [None, *(key[0] for key, _ in ordered)]
    return [WorstCase(*key, row, key[0] != last) for (key, (*_, row)), last in zip(ordered, before, strict=False)]


def distortions(attacks: Sequence[Row]) -> dict[str, float]:
    """Return each arm's mean relative distance of the defended gradient from the true one, the smallest first."""
    arms: dict[str, list[float]] = {}
    for row in attacks:
        if row["distortion"] is not None and isfinite(row["distortion"]):
            arms.setdefault(row["arm"], []).append(row["distortion"])
    means = {arm: sum(values) / len(values) for arm, values in arms.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))
