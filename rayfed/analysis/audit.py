"""Audit of one gradient of a model: the scenario that the audit runs, and the findings from the results.

Every attack of `METHODS` that takes the data's samples is run against every arm by three attackers: non-adaptive,
adaptive, and adaptive with the labels.
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
"""Default defences by arm: one of each kind, then stronger and weaker ones if there is time."""


@dataclass(frozen=True)
class Method:
    """Attack that the audit runs, with the attack's cost and limits."""

    name: str
    evaluations: int = 0
    """Evaluations of the objective per iteration; 0 for a closed form."""
    largest: int | None = None
    """Maximum batch size: on larger batches the attack takes the most time and reconstructs nothing."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """Weight of a search when time is divided among several."""

    def takes(self, modality: Modality, batch: int) -> bool:
        """Return whether the attack runs on batches of `batch` samples of a modality."""
        from rayfed.samples import taken  # imports PyTorch, which readers of tables do not need

        works = modality in taken("attacks", registry.find("attacks", self.name))
        return works and (self.largest is None or batch <= self.largest)


METHODS = (
    Method("analytic"),
    Method("spear"),
    Method("peel"),
    Method("april"),
    Method("buffers"),  # reads buffers, which no defence of the update changes
    Method("columns"),
    Method("entries"),
    Method("embedding_rows"),
    Method("dager"),
    Method("inverting_gradients", evaluations=1),
    Method("idlg", evaluations=20, largest=4, parameters={"restarts": 1}, share=0.25),  # succeeds early or not at all
    Method("tag", evaluations=1),
)
"""All attacks of the audit, closed forms first."""

CLOSED_FORMS = frozenset(method.name for method in METHODS if not method.evaluations)
"""Attacks that may find that no sample fits the update. Their status is then 'diverged'."""

TWINS: dict[str, tuple[str, ...]] = {
    "non-adaptive": (),
    "adaptive": ("defence", "code"),
    "adaptive, with labels": ("defence", "code", "labels"),
}
"""Knowledge granted to each attacker, by name."""
GIVEN = {
    "non-adaptive": "model and update",
    "adaptive": "model, update, defences and their code",
    "adaptive, with labels": "model, update, defences, their code and the labels",
}
"""Knowledge of each attacker, in words."""
EXPLAINS = 5e-6
"""Maximum `fit` (gradient distance) at which reconstructed samples explain the observed gradient.

`fit` is their distance from the gradient, relative to that of a grey sample. The limit is the rounding error of an
exact result in single precision. Without noise, larger distances can distinguish samples,
for example by a slight pattern on a blurred image.
"""
UNEXPLAINED = "the search did not converge: no reconstruction has the observed gradient"
ISOLATED = (
    "the search converged to another sample with the observed gradient, and samples between it and the original do not "
    "have this gradient: few samples share it, so the original may be identifiable among them"
)
UNEXPLAINED_PART = (
    "the adaptive attacks did not converge: no reconstruction explains the update as well as the original does"
)
UNCOMPARED = "no reconstruction of an adaptive attack could be compared with the update"
NO_CODE = "no adaptive attack (knowledge: [defence, code]) returned a result for every sample"
NONE_WORKS = "no adaptive attack that was run here succeeds without a defence"
UNREAD = NO_CODE, NONE_WORKS
"""Reasons why adaptive attackers do not show that a defence holds."""
INCOMPARABLE = "no reconstruction could be compared with the update, so the search may not have converged"
NEAR = "a reconstruction reaches the threshold"
BAG = "rouge1"
"""Metric of a text's tokens in any order."""
IN_ANOTHER_ORDER = f"{NEAR} in another order: all tokens of the text were recovered"
ALONE = "no arm without a defence was attacked"
FOUND_NOTHING = "the attacks reconstructed nothing without a defence either"
PARTS = {"tokens": "tokens", "records": "columns", "pixels": "pixels"}
"""Names of the parts of samples, by modality."""
COLUMNS = 8
"""Maximum number of columns that a sentence names."""
SLIGHT = 3.0
"""Decibels above the baseline (3 dB halve the squared error) below which a leak is reported with the difference."""
FEWEST, USEFUL, MOST = 40, 100, 24_000
"""Evaluations of a search: the minimum with any budget, the minimum if there is time for them on two arms, and the
maximum."""


@dataclass(frozen=True)
class Plan:
    """Settings of an audit: a model on data under some defences."""

    model: Mapping[str, Any]
    """The scenario's section `model`."""
    data: Mapping[str, Any]
    """The scenario's section `data`."""
    batches: Sequence[int]
    samples: int
    """Samples attacked for each batch size, rounded up to batches."""
    seed: int = 0
    loss: Mapping[str, Any] = field(default_factory=dict)
    """The scenario's section `loss`; if empty, the loss of the model's task, or the default."""
    defences: Defences = field(default_factory=lambda: DEFENCES)
    threshold: float | None = None
    """Minimum of the leading metric at which a reconstruction may be a leak. None: the metric's default."""

    @property
    def modality(self) -> Modality:
        """Return the modality of the samples, such as images. Raises `UserError` for an unknown data set."""
        from rayfed.samples import held

        return held(registry.find("datasets", self.data["name"]))

    @property
    def asked(self) -> bool:
        """Return whether the user named defences, so that each named defence needs a result."""
        return not self.defences.keys() <= DEFENCES.keys()

    @property
    def searches(self) -> list[tuple[Method, int]]:
        """Return the pairs of method and batch size whose number of iterations has to be chosen."""
        every = product(METHODS, self.batches)
        return [(m, batch) for m, batch in every if m.evaluations and m.takes(self.modality, batch)]

    def scenario_text(self, iterations: Mapping[str, int]) -> str:
        """Return the audit as a YAML scenario: one round without training, and its attacks, closed forms first.

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
    """Return the arm name for a pipeline of defences, with the defences' parameters."""
    parts = []
    for defence in pipeline:
        settings = ", ".join(f"{key} {value}" for key, value in defence.items() if key != "name")
        parts.append(f"{defence['name']} ({settings})" if settings else str(defence["name"]))
    return " + ".join(parts)


def title(method: Method, batch: int) -> str:
    """Return the title of a method at a batch size, shared by all attackers that use the method."""
    return f"{method.name} batch {batch}"


State = Literal["leaks", "not reconstructed", "nothing to attack", "inconclusive", "not measured"]


@dataclass(frozen=True)
class Finding:
    """Result of all attacks on gradients of one batch size in one arm."""

    arm: str
    batch: int
    state: State
    closest: Mapping[str, float]
    """Maximum of the leading metric by attacker (`TWINS`); attackers without a finite result are missing."""
    leaked: int
    """Samples that leaked to at least one attack."""
    samples: int
    best: float | None
    """Maximum of the leading metric among leaks, or among all if nothing leaked; None without reconstructions."""
    by: str
    """Attack that made this reconstruction; empty if there is none."""
    reasons: tuple[str, ...]
    """Why attacks returned no result. If none did, also why attacks did not apply."""
    unplayed: tuple[str, ...] = ()
    """Attacks that were not run for lack of time."""
    untimed: tuple[str, ...] = ()
    """Searches that ran `FEWEST` evaluations, because their speed was not known."""
    failed: tuple[str, ...] = ()
    """Attacks that raised an error on some victim."""
    awaited: tuple[str, ...] = ()
    """Attacks whose missing result would decide: they succeed without a defence, or were not run there."""
    lacking: str = ""
    """Why the results do not decide: missing knowledge of an attacker, or no arm that shows that the attacks work."""
    gain: float | None = None
    """Difference of `best` to the baseline; None without a baseline."""
    most: float | None = None
    """Maximum difference of a leak to the baseline; None without a leak."""
    gains: tuple[float, ...] = ()
    """Maximum difference to the baseline for each sample that has a baseline."""
    attackers: int = 0
    """Number of attackers whose best reconstructions the finding contains."""
    alike: int = 0
    """Samples that did not leak, because a public sample is as close as the reconstruction."""
    above_public: float | None = None
    """Difference of `best` to the closest public sample; None without public samples."""
    labels: Named | None = None
    """Labels recovered by the best attack that was not given them; None if no attack recovers labels."""
    targets: float | None = None
    """Mean absolute error of the targets recovered by the best attack that was not given them; None for classes."""
    shown: int | None = None
    """Samples of this batch size that leak without a defence; None for an arm without a defence."""
    guessed: float | None = None
    """Mean absolute error of the median as a guess for every sample; None if it is not known."""
    caveat: str = ""
    """Limit of the analysis of the defence, if nothing was reconstructed."""
    part: Part | None = None
    """Parts of the samples that an attack recovers by more than chance; None if there are none."""
    behind: str = ""
    """For an undefended arm without a leak: an attack that succeeded against a defence, and its result on this arm."""


@dataclass(frozen=True)
class Criterion:
    """Conditions of a leak: a reconstruction reaches the threshold, beats the baseline, and identifies the sample."""

    needs: ClassVar[tuple[str, ...]] = ("above_baseline", "identified")
    """Metrics that the criterion needs in addition to the leading one."""

    modality: Modality
    threshold: float

    @property
    def noun(self) -> str:
        """Return the noun for a sample of the modality: image, text or record."""
        return NOUNS[self.modality]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all metrics that the criterion uses; tables of earlier versions lack `above_public`."""
        return leading(self.modality).name, *self.needs, "above_public"

    @classmethod
    def of(cls, modality: Modality, threshold: float | None) -> Criterion:
        """Return the criterion for a modality, with the modality's default threshold unless `threshold` is given."""
        usual = leading(modality).threshold
        assert usual is not None
        return cls(modality, usual if threshold is None else threshold)

    def nearness(self, row: Row) -> float | None:
        """Return the leading metric of a row of `attacks`, clipped at its ceiling; None for a missing value."""
        metric = leading(self.modality)
        value = row.get(metric.name)
        return None if value is None or value != value else min(value, metric.ceiling)

    def near(self, row: Row) -> bool:
        """Return whether the reconstruction in a row of `attacks` reaches the threshold and beats the baseline."""
        value = self.nearness(row)
        return value is not None and value >= self.threshold and (row["above_baseline"] or 0.0) > 0

    def leaks(self, row: Row) -> bool:
        """Return whether the reconstruction in a row of `attacks` is a leak."""
        return self.near(row) and row["identified"] == 1 and not self.like_public(row)

    def like_public(self, row: Row) -> bool:
        """Return whether a public sample is at least as close to the true sample as the row's reconstruction."""
        above = row.get("above_public")
        return above is not None and above <= 0

    def part(self, rows: Sequence[Row]) -> Part | None:
        """Return the parts of samples (columns, tokens, pixels) recovered by more than chance in some rows, or None."""
        return beyond_chance(rows)

    def lacking(self, row: Row) -> str:
        """Return the reason why the row of a finished attack has no usable result."""
        return (
            "returned no finite reconstruction" if self.nearness(row) is None else f"without {' and '.join(self.needs)}"
        )

    def called(self, row: Row) -> str:
        """Return `reconstructed` if a row of `attacks` is a leak, otherwise the reason why the row is no leak."""
        value = self.nearness(row)
        if self.leaks(row):
            return "reconstructed"
        if value is None or row["above_baseline"] is None or row["identified"] is None:
            return "not compared with the baseline"
        if row["above_baseline"] <= 0:
            return "does not beat the baseline"
        if self.like_public(row):
            return f"not closer than a public {self.noun}"
        if row["identified"] != 1:
            return f"closer to another {self.noun}"
        return f"below {self.written(self.threshold)}"

    def written(self, value: float) -> str:
        """Format a value of the leading metric with the metric's unit."""
        if self.modality != "pixels":
            return f"{100 * value:.0f} %"
        return f">{PSNR_CEILING:.0f} dB" if value >= PSNR_CEILING else f"{value:.1f} dB"


def modality_of(attacks: Sequence[Row]) -> Modality:
    """Return the modality of the samples in rows of `attacks`, inferred from the measured metrics."""
    others = (form for form in NOUNS if form != "pixels")
    return next((form for form in others if any(measured(row.get(leading(form).name)) for row in attacks)), "pixels")


def noun_of(rows: Sequence[Row]) -> str:
    """Return the noun for the samples in rows of attacks or outcomes; `sample` if no metric was measured."""
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
    """Return the findings on all arms and batch sizes, in the order of the rows of `attacks`.

    `untimed` are the titles (`title`) of searches that ran `FEWEST` evaluations because their speed was not known.
    `undefended` are the arms that show whether an attack works. `closed` are the titles of closed forms. If a run has
    not `finished`, only leaks are reported. With `changed`, a defence may have changed the update of those arms, so the
    original samples need not explain it.
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
            one = replace(one, state="not measured", reasons=("the run is not finished", *one.reasons))
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
    """Return the attack that succeeded against a defence, and its result in these rows of an undefended arm."""
    same = [row for row in rows if played_by(row) == leak.by]
    if not same:
        here = "was not run here"
    elif any(row["status"] == UNPLAYED for row in same):
        here = "was not run here for lack of time"
    else:
        failed = not all(_answers(row, criterion, closed) for row in same)
        here = "returned no result here" if failed else "did not succeed here"
    return f"{leak.by} succeeds against {leak.arm} at batch size {leak.batch} and {here}, so this arm may leak as well"


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
    """Return the finding of one arm and batch size.

    `leaking` are attacks and the samples that leak to them without a defence. `untried` are those that were not run
    there for lack of time: they might leak as well, so they need a result here, too.
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
        alike = any(criterion.near(row) and row["identified"] == 1 for _, row in finite)
        but = "a public sample is as close" if alike else "it is closer to another sample"
        lacking = lacking or f"{NEAR}, but {but}: compare it with the original (output.images: all)"
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
                (leaking, "it succeeds without a defence"),
                (untried, "it was not run without a defence"),
            )
            for name in sorted({attack.partition(" batch ")[0] for attack, *_ in group - told})
        ),
        lacking=lacking,
        gain=best[1]["above_baseline"] if best else None,
        most=max((row["above_baseline"] for _, row in leaks if row["above_baseline"] is not None), default=None),
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
        if (gain := row["above_baseline"]) is not None:
            found[_sample(row)] = max(gain, found.get(_sample(row), gain))
    return tuple(found.values())


def _unexplained(rows: Sequence[Row], bare: bool) -> str:
    """Return why reconstructions do not explain a gradient; empty if each sample has one that does.

    The original has this gradient, so an attack whose reconstruction does not have it has not converged. Tables of
    earlier versions, and updates of several local steps, have no `fit`. With a defence only adaptive attackers count:
    they know which values the defence leaves unchanged and what noise it adds.
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
    """Return whether each sample of `rows` has a row in `told` whose reconstruction explains the update (`fit`)."""
    explained = {_sample(row) for row in told if row.get("fit") is not None and row["fit"] <= EXPLAINS}
    return explained >= {_sample(row) for row in rows}


def unread(
    rows: Sequence[Row], criterion: Criterion, undefended: Collection[str], closed: Collection[str] = CLOSED_FORMS
) -> dict[tuple[str, int], str]:
    """Return the arms and batch sizes without a valid adaptive attack, with the reason (one of `UNREAD`).

    Adaptive attacks need a result for every attacked sample. One of them has to succeed on a sample without a defence
    and to have a result for this sample here.
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
    """Return the attacks and samples of one arm and batch size that leak, whole or in part."""
    part = criterion.part(rows)
    read = [row for row in rows if criterion.leaks(row)] + list(part.rows if part else ())
    return {(row["attack"], *_sample(row)) for row in read}


def _unplayed(rows: Sequence[Row], unplayed: Sequence[Row]) -> tuple[str, ...]:
    """Return the attacks that were not run for lack of time, with the attackers if others were run."""
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
    """Return whether an attack finished; a closed form that finds no fitting sample has finished."""
    fits_nothing = row["status"] == "diverged" and row["attack"] in closed
    ended = row["status"] == "ok" or fits_nothing
    return ended and criterion.nearness(row) is not None and all(row[name] is not None for name in criterion.needs)


def _targets_found(rows: Sequence[Row]) -> float | None:
    """Return the smallest mean absolute error of targets recovered by an attack; None if no attack recovers targets."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.get("target_error") is not None and not labels_given(row):
            errors.setdefault(row["attack"], []).append(row["target_error"])
    return min(map(fmean, errors.values()), default=None)


def _targets_guessed(rows: Sequence[Row]) -> float | None:
    errors = {_sample(row): row.get("target_baseline") for row in rows}
    known = [error for error in errors.values() if error is not None]
    return fmean(known) if known else None


def short_title(row: Row) -> str:
    """Return the name of the attack in a row, without the batch size and the attacker that an audit's title has."""
    named: str = row["attack"]
    return named.partition(" batch ")[0]


def _twin(row: Row) -> str:
    names = {",".join(granted): name for name, granted in TWINS.items()}
    granted: str = row["knowledge"] or ""
    return names.get(granted, f"given {granted}")


def played_by(row: Row) -> str:
    """Return the name of the attack in a row, with the attacker: `dlg, adaptive`."""
    return f"{short_title(row)}, {_twin(row)}"


def _sample(row: Row) -> tuple[Any, ...]:
    return row.get("round"), row["victim"], row["sample"]


def _reason(row: Row, criterion: Criterion) -> str:
    said = f"{row['status']}: {row['message']}" if row["status"] != "ok" else criterion.lacking(row)
    return f"{short_title(row)} {said}"


def sentence(found: Sequence[Finding], criterion: Criterion, earlier: Sequence[Finding] = ()) -> str:
    """Return one sentence on an arm from the findings on all batch sizes of the arm.

    Labels with the same result on an `earlier` arm are not repeated.
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
    sizes = f"batch size {', '.join(str(finding.batch) for finding in group)}"
    reasons = dict.fromkeys(reason for finding in group for reason in finding.reasons)
    if state == "nothing to attack":
        return f"nothing to attack at {sizes}: {'; '.join(reasons)}"
    rest = (f"; no result: {'; '.join(reasons)}" if reasons else "") + _labels(group, earlier)
    if state == "leaks":
        return f"LEAKS: {'; '.join(_leak_clause(finding, criterion) for finding in group)}{rest}"
    best = max((f for f in group if f.best is not None), key=lambda f: f.best or 0.0, default=None)
    figure = f", {_with_baseline(best, criterion)}" if best else ""
    near = "".join(f"; {said}" for said in dict.fromkeys(f.lacking for f in group) if said.startswith(NEAR))
    if short := _no_time(group):
        return f"NOT MEASURED ({WANT_OF_TIME}): {short}{figure}{rest}{near}"
    if best is None:
        return f"NOT MEASURED at {sizes}: no attack returned a result{rest}"
    if state == "not measured":
        awaited = [f"{name} at batch size {f.batch}" if len(group) > 1 else name for f in group for name in f.awaited]
        why = f"no result from {', '.join(awaited)}" if awaited else "not all attacks returned a result"
        return f"NOT MEASURED at {sizes}: {why}{figure}{rest}{near}"
    if state == "inconclusive":
        lacking = dict.fromkeys(f.lacking or FOUND_NOTHING for f in group)
        return f"INCONCLUSIVE at {sizes}: {'; '.join(lacking)}{figure}{rest}"
    return f"not reconstructed by these attacks{_budget(group)} at {sizes}{figure}{_shown(group, criterion)}{rest}"


def _leak_clause(finding: Finding, criterion: Criterion) -> str:
    """Return a sentence part on the leak at one batch size: its size, the attack and its limits."""
    noun = criterion.noun
    parts = [f"{_whole(finding, noun)} at batch size {finding.batch}, {_with_baseline(finding, criterion)}"]
    parts[0] += f", attack: {finding.by}{_slight(finding, criterion)}"
    if finding.leaked < finding.samples and (told := in_part(finding, criterion)):
        parts.append(told)
    if finding.alike:
        parts.append(f"{finding.alike} more reach the threshold, but a public {noun} is as close")
    if finding.lacking == IN_ANOTHER_ORDER:
        parts.append(IN_ANOTHER_ORDER)
    if finding.unplayed:
        parts.append(f"at batch size {finding.batch} not all attacks were run, for lack of time")
    return "; ".join(parts)


def _budget(group: Sequence[Finding]) -> str:
    untimed = sorted({name for finding in group for name in finding.untimed})
    return f" ({', '.join(untimed)}: at most {FEWEST} evaluations)" if untimed else ""


def _shown(group: Sequence[Finding], criterion: Criterion) -> str:
    """Return the number of samples on which the attacks are known to work, if not all, and limits of the analysis."""
    few = [
        f"{f.shown} of {f.samples} {criterion.noun}s at batch size {f.batch}"
        for f in group
        if f.shown not in (None, f.samples)
    ]
    shown = f"; without a defence only {', '.join(few)} leak, so nothing is known about the others" if few else ""
    return shown + "".join(f"; {caveat}" for caveat in dict.fromkeys(f.caveat for f in group if f.caveat))


def _whole(finding: Finding, noun: str) -> str:
    """Return the number of reconstructed samples as text."""
    if finding.leaked:
        return f"{finding.leaked} of {finding.samples} {noun}s reconstructed"
    return f"{noun}s reconstructed in part"


def in_part(finding: Finding, criterion: Criterion) -> str:
    """Return the share of the samples' parts that attacks recover, with the columns; empty if maybe due to chance."""
    part = finding.part
    if part is None:
        return ""
    names = [
        f"{name} {100 * share:.0f} %" + ("" if guess is None else f" ({100 * guess:.0f} %)")
        for name, share, guess in part.columns[:COLUMNS]
    ]
    more = f" and {len(part.columns) - COLUMNS} more" if len(part.columns) > COLUMNS else ""
    constant = ", in brackets the baseline" if any(guess is not None for *_, guess in part.columns) else ""
    which = f": {', '.join(names)}{more}{constant}" if names else ""
    by, noun = "" if part.attack == finding.by else f" by {part.attack}", criterion.noun
    samples = f"{part.samples} {noun}{'s' * (part.samples != 1)}"
    parts = f"{100 * part.found:.0f} % of the {PARTS[criterion.modality]} of {samples}"
    return f"{parts} recovered{by} (baseline {100 * part.guessed:.0f} %){which}"


def _no_time(group: Sequence[Finding]) -> str:
    """Return the attacks that were not run for lack of time, with their batch sizes; empty if all were run."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for f in group:
        if f.unplayed:
            alike.setdefault(f.unplayed if f.closest or f.reasons else ("all attacks",), []).append(str(f.batch))
    return "; ".join(f"{', '.join(names)} at batch size {', '.join(batches)}" for names, batches in alike.items())


def _with_baseline(finding: Finding, criterion: Criterion) -> str:
    """Return the maximum of the leading metric, with the baseline."""
    best = finding.best or 0.0
    images = criterion.modality == "pixels"
    of = "" if images else f" of its {PARTS[criterion.modality]}"
    value = f"max {'PSNR ' * images}{criterion.written(best)}{of}"
    if finding.gain is None:
        return value
    baseline = criterion.written(best - finding.gain if images else max(best - finding.gain, 0.0))
    below = ", not beaten" if finding.gain <= 0 else ", slightly beaten" if baseline == criterion.written(best) else ""
    public = ""
    if finding.above_public is not None:
        public = f", closest public {criterion.noun} {criterion.written(best - finding.above_public)}"
    return f"{value} (baseline {baseline}{below}{public})"


def _slight(finding: Finding, criterion: Criterion) -> str:
    """Return the difference of leaks to the baseline if all differences are small, and their mean over the samples.

    The mean is over the best attacker on each sample, chosen with knowledge of the original, so it exceeds 0 by chance.
    The mean is not corrected for this, and does not change the verdict.
    """
    if criterion.modality != "pixels" or finding.most is None or finding.most >= SLIGHT:
        return ""
    slight, found = f", at most {finding.most:.1f} dB above the baseline", estimate(finding.gains)
    if found is None or found.spread is None:
        return slight
    low, high = found.spread
    chance = ", chance included" * (low <= 0 <= high)
    interval = f"{found.mean:+.1f} dB, 95 % interval {low:+.1f} to {high:+.1f}{chance}"
    best = f" for the best of {finding.attackers} attackers" if finding.attackers > 1 else ""
    return f"{slight} (mean of {found.n} {criterion.noun}s{best} {interval})"


def _labels(group: Sequence[Finding], earlier: Sequence[Finding]) -> str:
    """Return the labels or targets recovered at each batch size, with the baseline; empty if there are none."""
    labels, targets = (_unsaid(group, earlier, told) for told in (_labels_of, _targets_of))
    recovered = f"; labels recovered: {labels}" if labels else ""
    return recovered + (f"; targets recovered with a mean error of {targets} (scale of the model)" if targets else "")


def _unsaid(group: Sequence[Finding], earlier: Sequence[Finding], told: Callable[[Finding], str]) -> str:
    """Return the text of each finding, or the name of an `earlier` arm with the same text."""
    said = {told(finding): finding.arm for finding in reversed(earlier)}
    some = [finding for finding in group if told(finding)]
    parts = [told(finding) for finding in some if told(finding) not in said]
    as_on: dict[str, list[str]] = {}
    for finding in some:
        if arm := said.get(told(finding)):
            as_on.setdefault(arm, []).append(str(finding.batch))
    return ", ".join(
        [*parts, *(f"as on arm {arm} at batch size {', '.join(batches)}" for arm, batches in as_on.items())]
    )


def labels_beyond(found: Sequence[Finding]) -> str:
    """Return the labels or targets recovered beyond the baseline, with values; empty if there are none.

    A result that may be due to chance says so.
    """
    labels = [_labels_of(one) + _by_how_many(one.labels) for one in found if one.labels and _beyond(one.labels)]
    targets = [_targets_of(one) for one in found if _nearer(one)]
    with_error = f"targets with a mean error of {', '.join(targets)}" if targets else ""
    return "; ".join(filter(None, (", ".join(labels), with_error)))


def by_luck(found: Sequence[Finding]) -> bool:
    """Return whether all labels or targets in `labels_beyond` may have been recovered by chance."""
    labels = [one.labels for one in found if one.labels and _beyond(one.labels)]
    return bool(labels) and all(map(_lucky, labels)) and not any(map(_nearer, found))


def _beyond(labels: Named) -> bool:
    """Return whether more labels were recovered than by the best guess."""
    return labels.guesses.commonest > 0 and (labels.guesses.best < labels.share or labels.whole > 0)


def _lucky(labels: Named) -> bool:
    return labels.lucky and not labels.whole


def _nearer(finding: Finding) -> bool:
    """Return whether targets were recovered with a smaller error than by guessing the median."""
    return finding.targets is not None and finding.guessed is not None and finding.targets < finding.guessed


def _by_how_many(labels: Named) -> str:
    whole = f", all labels of {labels.whole} of {len(labels.updates)} updates" if labels.whole else ""
    best = f", by the best of {labels.attempts} attackers" if labels.attempts > 1 else ""
    return whole + best + ", may be due to chance" * _lucky(labels)


def _labels_of(finding: Finding) -> str:
    if finding.labels is None:
        return ""
    return f"{100 * finding.labels.share:.0f} % at batch size {finding.batch} ({_baseline_of_labels(finding.labels)})"


def _targets_of(finding: Finding) -> str:
    if finding.targets is None:
        return ""
    guessed = "" if finding.guessed is None else f" (median: {finding.guessed:.2g})"
    return f"{finding.targets:.2g} at batch size {finding.batch}{guessed}"


def _baseline_of_labels(labels: Named) -> str:
    """Return the baseline of labels as text: the best guess with its share."""
    guesses = labels.guesses
    if guesses.in_proportion > max(guesses.evenly, guesses.commonest):
        return f"labels in the proportions of other clients: {100 * guesses.in_proportion:.0f} %"
    if guesses.evenly > guesses.commonest:
        return f"all labels equally often: {100 * guesses.evenly:.0f} %"
    only = ", the only class" if guesses.commonest == 1 else ""
    return f"majority class{only}: {100 * guesses.commonest:.0f} %"


def distortions(attacks: Sequence[Row]) -> dict[str, float]:
    """Return each arm's mean relative distance between defended and true gradient, smallest distance first."""
    arms: dict[str, list[float]] = {}
    for row in attacks:
        if row["distortion"] is not None and isfinite(row["distortion"]):
            arms.setdefault(row["arm"], []).append(row["distortion"])
    means = {arm: sum(values) / len(values) for arm, values in arms.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))
