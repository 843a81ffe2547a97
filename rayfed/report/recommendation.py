"""Recommendations in words."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.analysis.figures import CUT, SINGLE, said, said_with_interval
from rayfed.analysis.formats import NONE
from rayfed.analysis.recommend import SIMULATED, BoundCheck, Recommendation
from rayfed.analysis.settings import Setting
from rayfed.analysis.unanswered import of_so_many
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.printing import at_most, caution

_NAMED = 3
"""Most settings without an attack that are named."""


def answer(found: Recommendation) -> str:
    """Say how many settings there are to choose from, and what the chosen one is."""
    asked = ", ".join(map(str, found.bounds))
    if not found.meeting:
        return f"None of {_settings(found.candidates)} meets {asked}. What comes nearest:"
    spared = ", then ".join(MEASURES[name].title for name in found.costs)
    verb = "meets" if found.meeting == 1 else "meet"
    return f"{found.meeting} of {_settings(found.candidates)} {verb} {asked}. The cheapest ({spared}):"


def headings(found: Recommendation) -> tuple[str, str, str, str]:
    """Return the headings over what `judged` says."""
    two = any(check.estimate and check.estimate.pair for check in found.chosen.checks)
    return "bound", f"found ({'both values' if two else '95 % interval'})", "by attack", ""


def judged(check: BoundCheck) -> list[str]:
    """Return a bound, what was found, by which attack, and whether the bound is met."""
    bound, estimate = check.bound, check.estimate
    if check.setting and estimate is None:
        return [str(bound), NONE, NONE, "nothing to attack: updates are hidden"]
    if check.setting is None or estimate is None:
        return [str(bound), NONE, NONE, "no guarantee" if MEASURES[bound.measure].proved else "not known"]
    attack = check.setting.attack if bound.on_attacks else None
    if check.share:
        side = "above" if bound.at_most else "below"
        missed = said(bound.measure, bound.excess(estimate.mean))
        said_so = f"{missed} {side} your limit, {check.share:.0%} of the range"
    elif check.sure is None:
        said_so = "met, in a single run"
    else:
        said_so = "met for sure" if check.sure else "met, within its uncertainty"
    return [str(bound), said_with_interval(bound.measure, estimate), attack or NONE, said_so]


def remarks(found: Recommendation) -> list[str]:
    """Say what the figures rest on, and what they do not say."""
    chosen = found.chosen.settings[0]
    repeats = max(estimate.n for estimate in chosen.measures.values())
    lines = [_costs(chosen, found.costs)]
    if SIMULATED[0] in found.costs:
        lines.append("Simulated time is virtual, of the devices that the scenario states; their work is counted.")
    if any(row.get("verdict") == "leaks" for row in chosen.rows):
        lines.append("It leaks: an attack rebuilt samples beyond a guess, whatever the bounds allow; see its verdict.")
    if chosen.unproven_in_part:
        lines.append(f"{chosen.unproven_in_part}. What attacks got in them is no evidence of protection.")
    if chosen.collapsed:
        lines.append(f"Its accuracy is that of guessing in {chosen.collapsed} of {len(chosen.rows)} repeats.")
    asked = [one for one in found.chosen.settings if "inferred" in one.measures]
    idle = [str(one.attack) for one in asked if one.idle]
    if 0 < len(idle) < len(asked) and any(bound.measure == "inferred" for bound in found.bounds):  # all: `refused`
        lines.append(f"Nothing shows that {' or '.join(idle)} infers more than chance without a defence.")
    if any(check.bound.on_attacks for check in found.chosen.checks):
        broken = {one.attack: one.unanswered for one in found.chosen.settings if one.unanswered[0]}
        for attack, counts in broken.items():
            what = f"{attack} diverged or failed on {of_so_many(*counts)} updates of it"
            lines.append(f"{what}: what it got is no measure of the defence.")
    if repeats == 1:
        lines.append(SINGLE)
    else:
        wide = ", which of two is 12.7 standard errors wide to each side" * (repeats == 2)
        lines.append(f"Means over {repeats} repeats; sure is what holds to the end of the 95 % interval{wide}.")
    judged_by = [check.estimate for check in found.chosen.checks]
    priced = [chosen.measures.get(name) for name in found.costs]
    if any(one and one.cut and one.interval for one in [*judged_by, *priced]):
        lines.append(CUT)
    if not found.meeting:
        lines.append(
            "Misses are weighed by the range of all settings' values and the bound; nearest is the least distance."
        )
    if found.unattacked:
        names = ", ".join([*found.unattacked[:_NAMED], *["..."] * (len(found.unattacked) > _NAMED)])
        lines.append(f"No attack has met {_settings(len(found.unattacked))} ({names}): how they leak is not known.")
    for why in dict.fromkeys(found.refused.values()):
        titles = [title for title, reason in found.refused.items() if reason == why]
        lines.append(f"Not {'; '.join(titles)}: {why}.")
    if found.tied:
        lines.append(f"No dearer within the intervals of their costs: {', '.join(found.tied[:_NAMED])}.")
    elif found.candidates > 1 and any(_timed_once(chosen, name) for name in found.costs[:1]):
        lines.append("Its time was measured once, so another may be as cheap.")
    if any(check.setting and check.estimate is None for check in found.chosen.checks):
        lines.append("Updates are hidden from these attacks; what their sum gives away was not attacked.")
    return [*lines, _guarantee(chosen)]


def _timed_once(chosen: Setting, cost: str) -> bool:
    known = chosen.measures.get(cost)
    timed = MEASURES[cost].unit == "s" and cost != "simulated_seconds"
    return known is not None and timed and known.low is None


def _costs(chosen: Setting, costs: Sequence[str]) -> str:
    known = [f"{MEASURES[c].title} {said_with_interval(c, chosen.measures[c])}" for c in costs if c in chosen.measures]
    return f"It costs: {', '.join(known)}." if known else "What it costs was not measured."


def _guarantee(chosen: Setting) -> str:
    if "epsilon" not in chosen.measures:
        return "Empirical: what these attacks got. No (epsilon, delta) guarantee holds, and other attacks may get more."
    row = max((row for row in chosen.rows if row["epsilon"] is not None), key=lambda row: row["epsilon"])
    return (
        f"Guarantee: epsilon {at_most(row['epsilon'])} at delta {at_most(row['delta'])} for every "
        f"{row['epsilon_unit']}{caution(row['epsilon'])}. It is of this setting's training alone: the trainings that "
        "it was chosen from are not counted. Figures of attacks are empirical: other attacks may get more, within the "
        "guarantee."
    )


def _settings(count: int) -> str:
    return f"{count} setting{'s' * (count != 1)}"
