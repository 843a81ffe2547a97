"""Text of `rayfed recommend`: the recommended setting, the checked bounds and remarks."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.analysis.figures import CUT, SINGLE, said, said_with_interval
from rayfed.analysis.formats import NONE
from rayfed.analysis.recommend import SIMULATED, BoundCheck, Recommendation
from rayfed.analysis.settings import Estimate, Setting
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.printing import at_most, caution
from rayfed.report.text.marks import count_text

_NAMED = 3
"""Maximum number of settings that a remark lists."""


def answer(found: Recommendation) -> str:
    """Return a sentence: how many settings satisfy the bounds, and by which cost the recommended setting was chosen."""
    bounds = ", ".join(map(str, found.bounds))
    if not found.meeting:
        return f"No setting of {found.candidates} satisfies {bounds}. Smallest excess:"
    costs = ", then ".join(MEASURES[name].title for name in found.costs)
    verb = "satisfies" if found.meeting == 1 else "satisfy"
    return f"{found.meeting} of {_settings(found.candidates)} {verb} {bounds}. Cheapest ({costs}):"


def headings(found: Recommendation) -> tuple[str, str, str, str]:
    """Return the column headings for the rows of `judged`."""
    two = any(check.estimate and check.estimate.pair for check in found.chosen.checks)
    return "bound", f"measured ({'both values' if two else '95 % interval'})", "result", "attack"


def judged(check: BoundCheck) -> list[str]:
    """Return the row of one checked bound: bound, measured value, result, attack."""
    bound, estimate = check.bound, check.estimate
    if check.setting and estimate is None:
        return [str(bound), NONE, "nothing to attack: updates are hidden", NONE]
    if check.setting is None or estimate is None:
        return [str(bound), NONE, "no guarantee" if MEASURES[bound.measure].proved else "not measured", NONE]
    attack = check.setting.attack if bound.on_attacks else None
    return [str(bound), said_with_interval(bound.measure, estimate), _result(check, estimate), attack or NONE]


def _result(check: BoundCheck, estimate: Estimate) -> str:
    """Return whether a measured value satisfies its bound."""
    bound = check.bound
    if check.share:
        excess = said(bound.measure, bound.excess(estimate.mean))
        return f"{'exceeded' if bound.at_most else 'missed'} by {excess} ({100 * check.share:.0f} % of the range)"
    if check.sure is None:
        return "satisfied (single run)"
    return "satisfied (whole interval)" if check.sure else "satisfied (mean only)"


def remarks(found: Recommendation) -> list[str]:
    """Return lines on the cost, the guarantee and the limits of the recommended setting."""
    chosen = found.chosen.settings[0]
    return [
        _costs(chosen, found.costs),
        _guarantee(chosen),
        *_of_evidence(found, chosen),
        *_of_repeats(found, chosen),
        *_of_others(found, chosen),
    ]


def _of_evidence(found: Recommendation, chosen: Setting) -> list[str]:
    """Return why the measured leakage may not be reliable."""
    lines = []
    if any(row.get("verdict") == "leaks" for row in chosen.rows):
        lines.append("LEAKS: an attack reconstructed samples better than the baseline, although the bounds allow it.")
    if chosen.unproven_in_part:
        lines.append(f"{chosen.unproven_in_part}. Low leakage in these repeats is no evidence of protection.")
    if chosen.collapsed:
        lines.append(f"Accuracy is at chance level in {chosen.collapsed} of {len(chosen.rows)} repeats.")
    asked = [one for one in found.chosen.settings if "inferred" in one.measures]
    idle = [str(one.attack) for one in asked if one.idle]
    if 0 < len(idle) < len(asked) and any(bound.measure == "inferred" for bound in found.bounds):  # all: `refused`
        lines.append(f"{' and '.join(idle)}: not shown to exceed chance without a defence.")
    if any(check.bound.on_attacks for check in found.chosen.checks):
        broken = {one.attack: one.unanswered for one in found.chosen.settings if one.unanswered[0]}
        for attack, counts in broken.items():
            lines.append(
                f"{attack}: diverged or failed on {count_text(*counts)} updates. The result may underestimate leakage."
            )
    if any(check.setting and check.estimate is None for check in found.chosen.checks):
        lines.append("Updates are hidden from these attacks. The sum of the updates was not attacked.")
    return lines


def _of_repeats(found: Recommendation, chosen: Setting) -> list[str]:
    """Return how many repeats the measured values rest on, and how to read them."""
    repeats = max(estimate.n for estimate in chosen.measures.values())
    if repeats == 1:
        lines = [SINGLE]
    else:
        wide = ", which is 12.7 standard errors wide to each side for two repeats" * (repeats == 2)
        lines = [f'Values are means over {repeats} repeats. "Whole interval" is the 95 % interval{wide}.']
    measured = [check.estimate for check in found.chosen.checks] + [chosen.measures.get(name) for name in found.costs]
    if any(one and one.cut and one.interval for one in measured):
        lines.append(CUT)
    if SIMULATED[0] in found.costs:
        lines.append("Simulated time is the virtual time of the scenario's devices.")
    return lines


def _of_others(found: Recommendation, chosen: Setting) -> list[str]:
    """Return remarks on the settings that were not chosen."""
    lines = []
    if not found.meeting:
        lines.append("Excesses are compared relative to the range of all settings' values and the bound.")
    if found.unattacked:
        titles = ", ".join([*found.unattacked[:_NAMED], *["..."] * (len(found.unattacked) > _NAMED)])
        lines.append(f"Not attacked, so their leakage is unknown: {_settings(len(found.unattacked))} ({titles}).")
    for why in dict.fromkeys(found.refused.values()):
        titles = "; ".join(title for title, reason in found.refused.items() if reason == why)
        lines.append(f"Not recommended: {titles}. Reason: {why}.")
    if found.tied:
        lines.append(f"Not significantly more expensive: {', '.join(found.tied[:_NAMED])}.")
    elif found.candidates > 1 and any(_timed_once(chosen, name) for name in found.costs[:1]):
        lines.append("Time was measured once, so another setting may be as cheap.")
    return lines


def _timed_once(chosen: Setting, cost: str) -> bool:
    known = chosen.measures.get(cost)
    timed = MEASURES[cost].unit == "s" and cost != "simulated_seconds"
    return known is not None and timed and known.low is None


def _costs(chosen: Setting, costs: Sequence[str]) -> str:
    known = [f"{MEASURES[c].title} {said_with_interval(c, chosen.measures[c])}" for c in costs if c in chosen.measures]
    return f"Cost: {', '.join(known)}" if known else "Cost: not measured"


def _guarantee(chosen: Setting) -> str:
    if "epsilon" not in chosen.measures:
        return "Guarantee: none. The results are empirical, and other attacks may reconstruct more."
    row = max((row for row in chosen.rows if row["epsilon"] is not None), key=lambda row: row["epsilon"])
    return (
        f"Guarantee: epsilon {at_most(row['epsilon'])} at delta {at_most(row['delta'])} per "
        f"{row['epsilon_unit']}{caution(row['epsilon'])}. The guarantee covers the "
        "training of this setting, but not the search over settings."
    )


def _settings(count: int) -> str:
    return f"{count} setting{'s' * (count != 1)}"
