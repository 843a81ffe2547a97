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

from rayfed.errors import UserError, nearest
from rayfed.evidence.figures import SHOWN
from rayfed.evidence.settings import Setting, describes_attacks, describes_samples, estimate_mean
from rayfed.evidence.victims import Victim
from rayfed.metrics.measures import MEASURES

SIGNIFICANCE = 0.05
"""Maximum p value of a significant difference."""
_MEASURES = tuple(
    name for name in SHOWN if MEASURES[name].kind != "cost" and name != "pmm" and not MEASURES[name].proved
)
"""Paired measures: all except costs, proved bounds and PMM, which is already relative to a reference."""


@dataclass(frozen=True)
class PairGroup:
    """Values of one setting under one attack, by unit of pairing (victim or seed)."""

    arm: str
    title: str
    attack: str | None
    unit: str
    """Unit of pairing: 'victim' or 'seed'."""
    values: Mapping[str, Mapping[Hashable, float]]
    """Values by measure and by victim or seed."""
    failed: Collection[Hashable] = ()
    """Victims or seeds for which the attack diverged or failed; their values are excluded."""
    shared: str = ""
    """Values of swept fields that arms share; only settings with equal values are paired."""
    doubted: Collection[str] = ()
    """Measures whose values are no evidence of protection (`Setting.doubted`)."""
    identity: Hashable = None
    """Key of the setting, equal for all attacks on it; titles of settings with close values may be equal."""


@dataclass(frozen=True)
class PairedDifference:
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


def group_by_victim(
    victims: Mapping[tuple[str, str], Mapping[int, Victim]], settings: Sequence[Setting], source: str = ""
) -> list[PairGroup]:
    """Return the groups of a run's settings, by victim; `source` is the run's name if several runs are compared."""
    doubted = {(setting.arm, setting.attack): _doubted_measures(setting) for setting in settings}
    groups = []
    for (arm, attack), by_client in victims.items():
        units: dict[Hashable, Victim] = {(client, victim.samples): victim for client, victim in by_client.items()}
        values = {}
        for name in _MEASURES:
            values[name] = {unit: victim.values[name] for unit, victim in units.items() if name in victim.values}
        groups.append(
            PairGroup(
                arm=arm,
                title=f"{source}, {arm}" if source else arm,
                attack=attack,
                unit="victim",
                values=values,
                failed=frozenset(unit for unit, victim in units.items() if victim.failed),
                doubted=doubted.get((arm, attack), ()),
            )
        )
    return groups


def group_by_seed(settings: Sequence[Setting]) -> list[PairGroup]:
    """Return the groups of a sweep's settings, by seed."""
    groups = []
    for setting in settings:
        shared = {path: value for path, value in setting.fields.items() if not path.startswith("arms.")}
        groups.append(
            PairGroup(
                arm=setting.arm,
                title=setting.title,
                attack=setting.attack,
                unit="seed",
                values={name: _values_by_seed(name, setting) for name in _MEASURES if name in setting.measures},
                failed=frozenset(row["seed"] for row in setting.rows if row.get("without_result")),
                shared=repr(shared),
                doubted=_doubted_measures(setting),
                identity=setting.identity,
            )
        )
    return groups


def _values_by_seed(measure: str, setting: Setting) -> dict[Hashable, float]:
    rows = (row for row in setting.rows if row.get(measure) is not None and row.get("seed") is not None)
    return {row["seed"]: float(row[measure]) for row in rows}


def _doubted_measures(setting: Setting) -> list[str]:
    """Return the measures of a setting whose values are no evidence of protection, in all or some repeats."""
    return [name for name in _MEASURES if setting.doubted(name) or (describes_samples(name) and setting.inconclusive)]


def compare_pairs(groups: Sequence[PairGroup], against: str | None = None) -> list[PairedDifference]:
    """Return the differences of every setting from the arm `against` (default: the first) under the same attack.

    A setting without pairs is included with `pairs` 0. Raises `UserError` for an unknown arm, and for an arm with
    several settings, as the reference is then ambiguous.
    """
    if not groups:
        return []
    names = dict.fromkeys(name for group in groups for name in (group.arm, group.title))
    if against is not None and against not in names:
        raise UserError(f"no arm is called '{against}': {nearest(against, names)}")
    by_attack: dict[tuple[str | None, str], list[PairGroup]] = {}
    for group in [*_without_attack(groups), *map(_with_attack, groups)]:
        by_attack.setdefault((group.attack, group.shared), []).append(group)
    base = next(iter(by_attack.values()))[0].arm if against is None else against
    differences = []
    for alike in by_attack.values():
        references = [group for group in alike if base in (group.title, group.arm)]
        if against is not None and len(references) > 1:
            titles = ", ".join(f"'{group.title}'" for group in references)
            raise UserError(f"'{base}' has several settings, {titles}: choose one of them as the reference")
        if references:
            differences += _compare_with(references[0], alike)
    return differences


def _compare_with(reference: PairGroup, groups: Sequence[PairGroup]) -> list[PairedDifference]:
    """Return the differences of the groups from the reference in each measure that the reference has."""
    differences = []
    for measure in _MEASURES:
        known = [
            group for group in groups if group.values.get(measure) or (group.failed and describes_attacks(measure))
        ]
        if reference in known and any(group.values.get(measure) for group in known):
            others = [group for group in known if group is not reference]
            differences += _correct([_difference(group, reference, measure) for group in others])
    return differences


def _without_attack(groups: Sequence[PairGroup]) -> list[PairGroup]:
    """Return a group for each setting with the measures that do not depend on the attack."""
    found: dict[Hashable, PairGroup] = {}
    for group in groups:
        values = {name: by_unit for name, by_unit in group.values.items() if not describes_attacks(name)}
        if values:
            key = group.identity, group.title, group.shared
            found.setdefault(key, replace(group, attack=None, values=values, failed=()))
    return list(found.values())


def _with_attack(group: PairGroup) -> PairGroup:
    """Return a group with the measures that depend on the attack."""
    return replace(group, values={name: by_unit for name, by_unit in group.values.items() if describes_attacks(name)})


def _difference(group: PairGroup, reference: PairGroup, measure: str) -> PairedDifference:
    values, reference_values = group.values.get(measure, {}), reference.values.get(measure, {})
    failed = {*group.failed, *reference.failed} if describes_attacks(measure) else set()
    units = [unit for unit in values if unit in reference_values and unit not in failed]
    differences = np.array([values[unit] - reference_values[unit] for unit in units])
    excluded = [
        unit
        for unit in failed
        if (unit in group.failed or unit in values) and (unit in reference.failed or unit in reference_values)
    ]
    difference = PairedDifference(
        attack=group.attack,
        measure=measure,
        arm=group.title,
        reference=reference.title,
        unit=group.unit,
        pairs=len(differences),
        excluded=len(excluded),
        difference=None,
        low=None,
        high=None,
        unproven=measure in group.doubted or measure in reference.doubted,
    )
    return _test(difference, differences)


def _test(difference: PairedDifference, values: np.ndarray) -> PairedDifference:
    """Return the difference with the mean of the values, its interval and p values, as far as they exist."""
    mean = estimate_mean(values.tolist())
    if mean is None:
        return difference
    from scipy import stats  # slow import (about 1 s)

    difference = replace(difference, difference=mean.mean)
    nonzero = values[values != 0]
    if len(nonzero):
        difference = replace(difference, wilcoxon=float(stats.wilcoxon(nonzero).pvalue))
    if mean.spread is None:
        return difference
    low, high = mean.spread
    return replace(difference, low=low, high=high, t=float(stats.ttest_1samp(values, 0).pvalue))


def _correct(family: Sequence[PairedDifference]) -> list[PairedDifference]:
    """Return the differences with p values that are corrected over all of them."""
    by_t, by_rank = holm([one.t for one in family]), holm([one.wilcoxon for one in family])
    return [replace(one, t_holm=t, wilcoxon_holm=rank) for one, t, rank in zip(family, by_t, by_rank, strict=True)]


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p values after Holm's correction for multiple tests (1979); None values stay None."""
    ranked = sorted((value, index) for index, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    least = 0.0
    for rank, (value, index) in enumerate(ranked):
        least = max(least, min(1.0, (len(ranked) - rank) * value))
        corrected[index] = least
    return corrected


def min_wilcoxon(pairs: int, arms: int) -> float:
    """Return the minimum of Wilcoxon's p value for a number of pairs, corrected over the arms."""
    return min(1.0, arms * 2.0 ** (1 - pairs))


def paired_table(differences: Sequence[PairedDifference]) -> pa.Table:
    """Return the paired differences as an Arrow table, one row per difference."""
    types = {
        "pairs": pa.int64(),
        "excluded": pa.int64(),
        "unproven": pa.bool_(),
        **dict.fromkeys(("attack", "measure", "arm", "reference", "unit"), pa.string()),
    }
    fields = [pa.field(name, types.get(name, pa.float64())) for name in PairedDifference.__dataclass_fields__]
    return pa.Table.from_pylist([asdict(one) for one in differences], schema=pa.schema(fields))
