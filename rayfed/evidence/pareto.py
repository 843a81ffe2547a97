"""Pareto fronts of defences: the settings that no other setting dominates, and the hypervolume that they cover.

The hypervolume is computed by moocore (extra `search`). Settings are compared by the means over their repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayfed.errors import UserError, nearest, require_extra
from rayfed.evidence.guarantee_compat import list_kinds, mixed_guarantees
from rayfed.evidence.settings import Setting, describes_attacks, group_by_values, select_strongest
from rayfed.metrics.measures import measure_of

_BEYOND = 0.1
"""Distance of the reference point beyond the worst values, in ranges, so that the ends of the front cover some volume.
A tenth is customary (Ishibuchi et al. 2018, "How to Specify a Reference Point in Hypervolume Calculation")."""


@dataclass(frozen=True)
class ParetoFront:
    """Pareto front of settings under several measures."""

    measures: tuple[str, ...]
    """Names in `rayfed.metrics.measures.MEASURES`."""
    settings: list[Setting]
    """All compared settings: each arm and set of values once."""
    best: list[Setting]
    """Settings that no other setting dominates, ordered by the first measure, best first."""
    unknown: list[Setting]
    """Settings without a value of some measure, one for each arm and set of values; they are not compared."""

    def hypervolume(
        self, reference: Mapping[str, float] | None = None, ideal: Mapping[str, float] | None = None
    ) -> float:
        """Return the share (0 to 1) of the box between `reference` and `ideal` that the front dominates.

        Both map measures to values; give both or none. By default the ideal has the best value of each measure, and
        the reference is a tenth of the range beyond the worst; measures with equal values are ignored. To compare
        fronts of several sweeps, pass the same two corners. Values better than the ideal are clipped, values worse than
        the reference do not count. Raises `UserError` if the corners form no box, or if one of them lacks a measure.
        """
        if (reference is None) != (ideal is None):
            raise UserError("hypervolume: give both corners of the box (reference and ideal) or no corner")
        if not self.settings:
            return 0.0
        points = _points(self.settings, self.measures)
        if reference is None or ideal is None:
            best = points.max(0)
            worst = points.min(0) - _BEYOND * (best - points.min(0))
        else:
            worst, best = self._corner(reference, "reference"), self._corner(ideal, "ideal")
            for name, span in zip(self.measures, best - worst, strict=True):
                if span <= 0:
                    raise UserError(f"hypervolume: the ideal {name} must be better than the reference's {name}")
        spread = best > worst
        if not spread.any():
            return 1.0
        shares = np.clip((points - worst)[:, spread] / (best - worst)[spread], 0, 1)
        require_extra("search", "the hypervolume", "moocore")
        import moocore

        return float(moocore.hypervolume(shares, ref=np.zeros(spread.sum()), maximise=True))

    def _corner(self, values: Mapping[str, float], what: str) -> np.ndarray:
        for name in self.measures:
            if name not in values:
                raise UserError(f"hypervolume: the {what} has no '{name}': {nearest(name, values)}")
        corner: np.ndarray = np.array([values[name] for name in self.measures], dtype=float) * _signs(self.measures)
        return corner


def compute_front(
    settings: Sequence[Setting], leakage: str, utility: str, cost: str | None = None, attack: str | None = None
) -> ParetoFront:
    """Return the Pareto front of settings by a measure of leakage, one of utility and, optionally, one of cost.

    Excluded are settings at majority-class accuracy, and settings whose attacks failed or are no evidence. Measures are
    names in `rayfed.metrics.measures.MEASURES`; better means better for the defender. A setting's leakage is that of
    its strongest attack, or of `attack`. Raises `UserError` for an unknown measure or attack, and if proved bounds of
    different guarantees would be compared.
    """
    measures = (leakage, utility) if cost is None else (leakage, utility, cost)
    for name in measures:
        measure_of(name)
    for name in measures:
        if kinds := mixed_guarantees(settings, name):
            raise UserError(
                f"{name}: guarantees of different kinds cannot be compared ({list_kinds(kinds)}): use another measure, "
                "or use one kind of guarantee in all arms"
            )
    useful = [one for one in settings if attack in (None, one.attack) and not one.useless]
    if attack is not None and not useful:
        attacks = {one.attack for one in settings if one.attack}
        raise UserError(f"no attack is called '{attack}': {nearest(attack, attacks)}")
    compared = [one for one in select_strongest(useful, leakage) if _is_compared(one, measures)]
    identities = {one.identity for one in compared}
    unknown = [group[0] for group in group_by_values(settings) if group[0].identity not in identities]
    if not compared:
        return ParetoFront(measures, [], [], unknown)
    points = _points(compared, measures)
    ordered = sorted(_nondominated(points), key=lambda index: tuple(-points[index]))
    return ParetoFront(measures, compared, [compared[index] for index in ordered], unknown)


def _nondominated(points: np.ndarray) -> list[int]:
    """Return the indices of the points (n, k) that no other point dominates; of equal points, all."""
    at_least = (points[:, None] >= points).all(2)
    above = (points[:, None] > points).any(2)
    return np.flatnonzero(~(at_least & above).any(0)).tolist()


def _is_compared(one: Setting, measures: Sequence[str]) -> bool:
    """Return whether all measures of a setting are known, and its attack failed on no update."""
    if describes_attacks(measures[0]) and one.unanswered[0]:
        return False
    return all(one.evidence(name) for name in measures)


def _points(settings: Sequence[Setting], measures: Sequence[str]) -> np.ndarray:
    """Return the values (settings, measures), with signs chosen so that larger is better."""
    means = [[each.measures[name].mean for name in measures] for each in settings]
    points: np.ndarray = np.array(means, dtype=float) * _signs(measures)
    return points


def _signs(measures: Sequence[str]) -> np.ndarray:
    return np.array([1.0 if measure_of(name).higher_is_better else -1.0 for name in measures])
