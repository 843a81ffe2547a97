"""Paired differences between two arms, on the same victims or with the same seeds.

A run is paired by victim: an attacked client with the same rounds, batches and labels in both arms. A sweep is paired
by seed: victims of one seed share weights, so they form one pair. Values without a counterpart are excluded and
reported.

The paired t test (Student 1908) and the signed-rank test (Wilcoxon 1945) are two-sided; their p values are corrected
over the arms of one attack and measure (Holm 1979, "A Simple Sequentially Rejective Multiple Test Procedure").
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa

from rayfed.analysis.formats import NONE
from rayfed.analysis.unanswered import BROKEN
from rayfed.analysis.victims import Victim
from rayfed.errors import UserError, nearest
from rayfed.evidence.figures import SHOWN
from rayfed.evidence.settings import Setting, estimate, of_attacks, of_rebuilt
from rayfed.metrics.measures import MEASURES
from rayfed.report.text.figures import UNPROVEN, heading
from rayfed.report.text.tables import Grid

NO_PAIRS = "not compared as pairs: no attack was run on two common victims or seeds of two arms"
_ROUNDING = 1e-9
"""Maximum difference that counts as rounding error, relative to the larger end of its interval."""
_MEASURES = tuple(
    name for name in SHOWN if MEASURES[name].kind != "cost" and name != "pmm" and not MEASURES[name].proved
)
"""Paired measures: all except costs, proved bounds and PMM, which is already relative to a reference."""


@dataclass(frozen=True)
class Group:
    """Values of one setting under one attack, by unit of pairing (victim or seed)."""

    arm: str
    title: str
    attack: str | None
    unit: str
    """Unit of pairing: 'victim' or 'seed'."""
    values: Mapping[str, Mapping[Hashable, float]]
    """Values by measure and by victim or seed."""
    unanswered: Collection[Hashable] = ()
    """Victims or seeds for which the attack diverged or failed; their values are excluded."""
    shared: str = ""
    """Values of swept fields that arms share; only settings with equal values are paired."""
    doubted: Collection[str] = ()
    """Measures whose values are no evidence of protection (`Setting.doubted`)."""
    identity: Hashable = None
    """Key of the setting, equal for all attacks on it; titles of settings with close values may be equal."""


@dataclass(frozen=True)
class Paired:
    """Mean paired difference of an arm from the reference in one measure."""

    attack: str | None
    measure: str
    arm: str
    """Title of the setting; for a run, its arm."""
    reference: str
    unit: str
    pairs: int
    excluded: int
    """Number of excluded pairs, because the attack diverged or failed in one of the two arms."""
    difference: float | None
    """Mean over the pairs of the arm's value minus the reference's value; None without pairs."""
    low: float | None
    """Lower end of the uncorrected 95 % interval (Student's t); None for a single pair or equal differences."""
    high: float | None
    t: float | None = None
    """The p value of the paired t test; None for a single pair or equal differences."""
    t_holm: float | None = None
    """The p value of the paired t test, corrected over the arms."""
    wilcoxon: float | None = None
    """The p value of Wilcoxon's signed-rank test over pairs that differ; None if no pair differs."""
    wilcoxon_holm: float | None = None
    unproven: bool = False
    """Whether the values of one of the two arms are no evidence of protection, for example because its verdict is
    inconclusive or not measured."""


def of_victims(
    found: Mapping[tuple[str, str], Mapping[int, Victim]], settings: Sequence[Setting], source: str = ""
) -> list[Group]:
    """Return the groups of a run's settings, by victim; `source` is the run's name if several runs are compared."""
    doubted = {(one.arm, one.attack): _doubted(one) for one in settings}

    def values(victims: Mapping[int, Victim]) -> dict[str, dict[Hashable, float]]:
        return {
            name: {(client, v.samples): v.values[name] for client, v in victims.items() if name in v.values}
            for name in _MEASURES
        }

    def unanswered(victims: Mapping[int, Victim]) -> frozenset[Hashable]:
        return frozenset((client, victim.samples) for client, victim in victims.items() if victim.unanswered)

    return [
        Group(
            arm,
            f"{source}, {arm}" if source else arm,
            attack,
            "victim",
            values(victims),
            unanswered(victims),
            doubted=doubted.get((arm, attack), ()),
        )
        for (arm, attack), victims in found.items()
    ]


def of_seeds(settings: Sequence[Setting]) -> list[Group]:
    """Return the groups of a sweep's settings, by seed."""

    def values(one: Setting) -> dict[str, dict[Hashable, float]]:
        return {
            name: {row["seed"]: float(row[name]) for row in one.rows if None not in (row.get(name), row.get("seed"))}
            for name in _MEASURES
            if name in one.measures
        }

    def shared(one: Setting) -> str:
        return repr({path: value for path, value in one.fields.items() if not path.startswith("arms.")})

    def unanswered(one: Setting) -> frozenset[Hashable]:
        return frozenset(row["seed"] for row in one.rows if row.get("without_result"))

    return [
        Group(
            one.arm,
            one.title,
            one.attack,
            "seed",
            values(one),
            unanswered(one),
            shared(one),
            _doubted(one),
            one.identity,
        )
        for one in settings
    ]


def _doubted(one: Setting) -> list[str]:
    """Return the measures of a setting whose values are no evidence of protection, in all or some repeats."""
    return [name for name in _MEASURES if one.doubted(name) or (of_rebuilt(name) and one.inconclusive)]


def paired(groups: Sequence[Group], against: str | None = None) -> list[Paired]:
    """Return the differences of every setting from the arm `against` (default: the first) under the same attack.

    A setting without pairs is included with `pairs` 0. Raises `UserError` for an unknown arm, and for an arm with
    several settings, as the reference is then ambiguous.
    """
    if not groups:
        return []
    arms = dict.fromkeys(name for group in groups for name in (group.arm, group.title))
    if against is not None and against not in arms:
        raise UserError(f"no arm is called '{against}': {nearest(against, arms)}")
    groups = [*_of_training(groups), *map(_of_the_attack, groups)]
    base = groups[0].arm if against is None else against
    references = [group for group in groups if base in (group.title, group.arm)]
    found = []
    for attack, shared in dict.fromkeys((group.attack, group.shared) for group in groups):
        mine = [group for group in groups if (group.attack, group.shared) == (attack, shared)]
        theirs = [group for group in mine if group in references]
        if against is not None and len(theirs) > 1:
            titles = ", ".join(f"'{group.title}'" for group in theirs)
            raise UserError(f"'{base}' has several settings, {titles}: choose one of them as the reference")
        for name in _MEASURES if theirs else ():
            one = theirs[0]
            met = [group for group in mine if group.values.get(name) or (group.unanswered and of_attacks(name))]
            others = [group for group in met if group is not one]
            if one in met and any(group.values.get(name) for group in met):
                found += _corrected([_difference(group, one, name) for group in others])
    return found


def _of_training(groups: Sequence[Group]) -> list[Group]:
    """Return a group for each setting with the measures that do not depend on the attack."""
    found: dict[Hashable, Group] = {}
    for group in groups:
        values = {name: known for name, known in group.values.items() if not of_attacks(name)}
        if values:
            key = group.identity, group.title, group.shared
            found.setdefault(key, replace(group, attack=None, values=values, unanswered=()))
    return list(found.values())


def _of_the_attack(group: Group) -> Group:
    return replace(group, values={name: known for name, known in group.values.items() if of_attacks(name)})


def _difference(group: Group, reference: Group, measure: str) -> Paired:
    own, other = group.values.get(measure, {}), reference.values.get(measure, {})
    both = group, reference
    broken = {*group.unanswered, *reference.unanswered} if of_attacks(measure) else set()
    differences = np.array([own[key] - other[key] for key in own if key in other and key not in broken])
    lost = [key for key in broken if all(key in one.unanswered or key in one.values.get(measure, {}) for one in both)]
    from scipy import stats  # slow import (about 1 s)

    mean = estimate(differences.tolist())
    counts = len(differences), len(lost)
    one = Paired(group.attack, measure, group.title, reference.title, group.unit, *counts, None, None, None)
    one = replace(one, unproven=any(measure in each.doubted for each in both))
    if mean is None:
        return one
    one = replace(one, difference=mean.mean)
    differ = differences[differences != 0]
    if len(differ):
        one = replace(one, wilcoxon=float(stats.wilcoxon(differ).pvalue))
    if mean.spread is None:
        return one
    low, high = mean.spread
    return replace(one, low=low, high=high, t=float(stats.ttest_1samp(differences, 0).pvalue))


def _corrected(family: Sequence[Paired]) -> list[Paired]:
    by_t, by_rank = holm([one.t for one in family]), holm([one.wilcoxon for one in family])
    return [replace(one, t_holm=a, wilcoxon_holm=b) for one, a, b in zip(family, by_t, by_rank, strict=True)]


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p values after Holm's correction for multiple tests (1979); None values stay None."""
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    least = 0.0
    for rank, (value, place) in enumerate(known):
        least = max(least, min(1.0, (len(known) - rank) * value))
        corrected[place] = least
    return corrected


def paired_table(found: Sequence[Paired]) -> pa.Table:
    """Return the paired differences as an Arrow table, one row per difference."""
    kinds = {
        "pairs": pa.int64(),
        "excluded": pa.int64(),
        "unproven": pa.bool_(),
        **dict.fromkeys(("attack", "measure", "arm", "reference", "unit"), pa.string()),
    }
    fields = [pa.field(name, kinds.get(name, pa.float64())) for name in Paired.__dataclass_fields__]
    return pa.Table.from_pylist([asdict(one) for one in found], schema=pa.schema(fields))


def paired_grid(found: Sequence[Paired], measures: Mapping[str, str | None] | None = None) -> Grid | None:
    """Return the paired differences as a text table with notes; None if no difference has two pairs.

    `measures` maps names to headings, None for the default heading. Default: all measures. Raises `UserError` for an
    unknown measure.
    """
    if not any(one.pairs + one.excluded > 1 for one in found):
        return None
    if measures is not None:
        known = list(dict.fromkeys(one.measure for one in found))
        for name in measures:
            if name not in known:
                raise UserError(f"no measure of the pairs is called '{name}': {nearest(name, known)}")
        found = [one for one in found if one.measure in measures]
    headings = ["arm", "attack", "measure", "pairs", "difference", "95 % interval", "p (t)", "p (Wilcoxon)"]
    return Grid(headings, 3, [_told(one, (measures or {}).get(one.measure)) for one in found], " ".join(_notes(found)))


def _told(one: Paired, called: str | None) -> list[str]:
    interval = NONE if one.low is None else f"{one.low:+.3g} to {one.high:+.3g}"
    spread = max(abs(one.low or 0.0), abs(one.high or 0.0))
    none = one.difference is not None and abs(one.difference) <= _ROUNDING * spread
    difference = NONE if one.difference is None else "0" if none else f"{one.difference:+.4g}"
    difference += UNPROVEN * one.unproven
    pairs = f"{one.pairs}{BROKEN} of {one.pairs + one.excluded}" if one.excluded else str(one.pairs)
    words = [one.arm, one.attack or NONE, called or heading(one.measure), pairs, difference, interval]
    return words + [NONE if p is None else f"{p:.2g}" for p in (one.t_holm, one.wilcoxon_holm)]


def out_of_reach(pairs: int, arms: int) -> str | None:
    """Return a sentence if Wilcoxon's p value, corrected over the arms, cannot be below 5 %, otherwise None."""
    if (least := arms * 2 / 2**pairs) < 0.05:
        return None
    return (
        f"Wilcoxon's p value cannot be below 5 % with {pairs} pair{'s' * (pairs != 1)} and {arms} "
        f"arm{'s' * (arms != 1)}: its minimum is {min(1, least):.2g}"
    )


def _notes(found: Sequence[Paired]) -> list[str]:
    """Return the notes on the differences: measure, unit of pairing, and tests that cannot reach significance."""
    references = " or ".join(dict.fromkeys(f"'{one.reference}'" for one in found))
    units = dict.fromkeys(one.unit for one in found)
    notes = [f"Mean over pairs of the arm minus {references}, on the same {' or '.join(f'{unit}s' for unit in units)}."]
    if "victim" in units:
        notes.append(
            "Victims of one run share its weights and seed, so the interval covers other clients of this training run "
            "only."
        )
    if any(one.excluded for one in found):
        notes.append(f"{BROKEN}: pairs are excluded if the attack diverged or failed in one of the two arms.")
    if any(one.unproven for one in found):
        notes.append(
            f"{UNPROVEN}: no evidence of protection, because the verdict on one of the two arms is inconclusive or not "
            "measured in some repeat, or an attacker with more knowledge reconstructed less."
        )
    notes.append(
        "Both p values are two-sided and corrected over the arms of an attack and measure (Holm); the intervals are "
        "not corrected."
    )
    families: dict[tuple[str | None, str], list[int]] = {}
    for one in found:
        if one.wilcoxon is not None:
            families.setdefault((one.attack, one.measure), []).append(one.pairs)
    for pairs, arms in sorted({(max(mine), len(mine)) for mine in families.values()}):
        if said := out_of_reach(pairs, arms):
            notes.append(f"{said}.")
    if apart := list(dict.fromkeys(f"'{one.arm}'" for one in found if not one.pairs and not one.excluded)):
        notes.append(f"Not compared as pairs, because they have no pair with the reference: {', '.join(apart)}.")
    return notes
