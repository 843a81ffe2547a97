"""Text of `rayfed recommend`: the recommended setting, the checked bounds, remarks, and commands that rerun it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rayfed.evidence.arms import arm_and_opponent
from rayfed.evidence.outcomes import yaml_line
from rayfed.evidence.recommend import SIMULATED, ArmCandidate, BoundCheck, MeasureBound, Recommendation
from rayfed.evidence.rows import Row
from rayfed.evidence.settings import MeanEstimate, Setting
from rayfed.metrics.measures import MEASURES
from rayfed.report.text.figures import estimate_interval_text, measure_value_text
from rayfed.report.text.formats import NONE, format_count
from rayfed.report.text.guarantees import setting_guarantee_text
from rayfed.report.text.settings import partly_inconclusive_text, weakness_text
from rayfed.report.text.tables import CUT, SINGLE
from rayfed.store.finding import State
from rayfed.store.folder import SCENARIO

_NAMED = 3
"""Maximum number of settings that a remark lists."""


def recommendation_text(found: Recommendation) -> str:
    """Return a sentence: how many settings satisfy the bounds, and by which cost the recommended setting was chosen."""
    bounds = ", ".join(map(measure_bound_text, found.bounds))
    if not found.meeting:
        return f"No setting of {found.candidates} satisfies {bounds}. Smallest excess:"
    costs = ", then ".join(MEASURES[name].title for name in found.costs)
    verb = "satisfies" if found.meeting == 1 else "satisfy"
    return f"{found.meeting} of {format_count(found.candidates, 'setting')} {verb} {bounds}. Cheapest ({costs}):"


def measure_bound_text(bound: MeasureBound) -> str:
    """Format a bound: `PSNR ≤ 12 dB`."""
    sign = "≤" if bound.at_most else "≥"
    return f"{MEASURES[bound.measure].title} {sign} {measure_value_text(bound.measure, bound.limit)}"


def check_headings(found: Recommendation) -> tuple[str, str, str, str]:
    """Return the column headings for the rows of `check_cells`."""
    two = any(check.estimate and check.estimate.pair for check in found.chosen.checks)
    return "bound", f"measured ({'both values' if two else '95 % interval'})", "result", "attack"


def check_cells(check: BoundCheck) -> list[str]:
    """Return the row of one checked bound: bound, measured value, result, attack."""
    bound, estimate = check.bound, check.estimate
    if check.setting is None:
        result = "no guarantee" if MEASURES[bound.measure].proved else "not measured"
        return [measure_bound_text(bound), NONE, result, NONE]
    if estimate is None:
        return [measure_bound_text(bound), NONE, "nothing to attack: updates are hidden", NONE]
    attack = check.setting.attack if bound.on_attacks else None
    measured = estimate_interval_text(bound.measure, estimate)
    return [measure_bound_text(bound), measured, _result(check, estimate), attack or NONE]


def _result(check: BoundCheck, estimate: MeanEstimate) -> str:
    """Return whether a measured value satisfies its bound."""
    bound = check.bound
    if check.share:
        excess = measure_value_text(bound.measure, bound.excess(estimate.mean))
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
        *_on_evidence(found, chosen),
        *_on_failed_attacks(found),
        *_on_repeats(found, chosen),
        *_on_others(found, chosen),
    ]


def _on_evidence(found: Recommendation, chosen: Setting) -> list[str]:
    """Return why the measured leakage may not be reliable."""
    lines = []
    if any(row.get("verdict") == State.LEAKS for row in chosen.rows):
        lines.append("LEAKS: an attack reconstructed samples better than the baseline, although the bounds allow it.")
    if chosen.inconclusive:
        lines.append(f"{partly_inconclusive_text(chosen)}. Low leakage in these repeats is no evidence of protection.")
    if chosen.collapsed:
        lines.append(f"Accuracy is at chance level in {chosen.collapsed} of {len(chosen.rows)} repeats.")
    inferring = [one for one in found.chosen.settings if "inferred" in one.measures]
    idle = [str(one.attack) for one in inferring if one.idle]
    bounded = any(bound.measure == "inferred" for bound in found.bounds)
    if bounded and 0 < len(idle) < len(inferring):  # if all are idle, the setting is in `refused`
        lines.append(f"{' and '.join(idle)}: not shown to exceed chance without a defence.")
    return lines


def _on_failed_attacks(found: Recommendation) -> list[str]:
    """Return the attacks without a result, and whether updates are hidden."""
    lines = []
    checks = found.chosen.checks
    if any(check.bound.on_attacks for check in checks):
        for one in found.chosen.settings:
            if one.unanswered[0]:
                failed, attacked = one.unanswered
                count = f"{failed} of {attacked} updates"
                lines.append(f"{one.attack}: diverged or failed on {count}. The result may underestimate leakage.")
    if any(check.setting and check.estimate is None for check in checks):
        lines.append("Updates are hidden from these attacks. The sum of the updates was not attacked.")
    return lines


def _on_repeats(found: Recommendation, chosen: Setting) -> list[str]:
    """Return the number of repeats of the measured values, and how to read them."""
    repeats = max(estimate.n for estimate in chosen.measures.values())
    if repeats == 1:
        lines = [SINGLE]
    else:
        wide = ", which is 12.7 standard errors wide to each side for two repeats" if repeats == 2 else ""
        lines = [f'Values are means over {repeats} repeats. "Whole interval" is the 95 % interval{wide}.']
    measured = [check.estimate for check in found.chosen.checks] + [chosen.measures.get(name) for name in found.costs]
    if any(one and one.cut and one.interval for one in measured):
        lines.append(CUT)
    if SIMULATED[0] in found.costs:
        lines.append("Simulated time is the virtual time of the scenario's devices.")
    return lines


def _on_others(found: Recommendation, chosen: Setting) -> list[str]:
    """Return remarks on the settings that were not chosen."""
    lines = []
    if not found.meeting:
        lines.append("Excesses are compared relative to the range of all settings' values and the bound.")
    if found.unattacked:
        titles = [one.title for one in found.unattacked[:_NAMED]]
        if len(found.unattacked) > _NAMED:
            titles.append("...")
        count = format_count(len(found.unattacked), "setting")
        lines.append(f"Not attacked, so their leakage is unknown: {count} ({', '.join(titles)}).")
    lines += _on_refused(found)
    if found.tied:
        titles = [one.title for one in found.tied[:_NAMED]]
        lines.append(f"Not significantly more expensive: {', '.join(titles)}.")
    elif found.candidates > 1 and any(_timed_once(chosen, name) for name in found.costs[:1]):
        lines.append("Time was measured once, so another setting may be as cheap.")
    return lines


def _on_refused(found: Recommendation) -> list[str]:
    """Return the settings that are never recommended, by reason."""
    titles: dict[str, list[str]] = {}
    for setting, weaknesses, idle_attacks in found.refused:
        reason = "; ".join(weakness_text(one, setting, idle_attacks) for one in weaknesses)
        titles.setdefault(reason, []).append(setting.title)
    return [f"Not recommended: {'; '.join(names)}. Reason: {reason}." for reason, names in titles.items()]


def _timed_once(chosen: Setting, cost: str) -> bool:
    known = chosen.measures.get(cost)
    timed = MEASURES[cost].unit == "s" and cost != "simulated_seconds"
    return known is not None and timed and known.low is None


def _costs(chosen: Setting, costs: Sequence[str]) -> str:
    known = [
        f"{MEASURES[c].title} {estimate_interval_text(c, chosen.measures[c])}" for c in costs if c in chosen.measures
    ]
    return f"Cost: {', '.join(known)}" if known else "Cost: not measured"


def _guarantee(chosen: Setting) -> str:
    if "epsilon" not in chosen.measures:
        return "Guarantee: none. The results are empirical, and other attacks may reconstruct more."
    row = max((row for row in chosen.rows if row["epsilon"] is not None), key=lambda row: row["epsilon"])
    return (
        f"Guarantee: {setting_guarantee_text(row)}. The guarantee covers the training of this setting, but not the "
        "search over settings."
    )


def rerun_commands(url: str, scenario: Row, chosen: ArmCandidate) -> dict[str, str]:
    """Return the shell commands that rerun a candidate, by the description of what each runs.

    `url` is the folder of the results.
    """
    row, path = chosen.settings[0].rows[0], f"{url}/{SCENARIO}"
    arms = scenario.get("arms") or {}
    if row.get("run"):
        values = [f"{field}={yaml_line(value)}" for field, value in chosen.settings[0].fields.items()]
        first = _launch(f"{url}/{row['run']}/{SCENARIO}")
        return {
            "this setting, with the seed of its first repeat": first,
            "all arms, with these values": _launch(path, "sweep=null", *values),
        }
    if len(arms) < 2:
        return {"the run": _launch(path)}
    name = row["arm"] if row["arm"] in arms else arm_and_opponent(scenario, row["arm"])[0]
    own = arms[name]
    if isinstance(own, dict):
        own = {key: value for key, value in own.items() if value}
    return {"this arm": _launch(path, f"arms={yaml_line({name: own})}"), "all arms": _launch(path)}


def _launch(path: str, *changes: str) -> str:
    options = []
    for change in changes:
        options += ["--set", change]
    return shlex.join(["rayfed", "launch", path, *options])
