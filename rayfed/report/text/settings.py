"""Text on settings: why their results are no evidence of protection."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.evidence.attack_results import attack_input
from rayfed.evidence.settings import Setting, Weakness
from rayfed.report.text.attacks import attack_input_text
from rayfed.report.text.outcomes import outcome_reasons
from rayfed.store.finding import State

UNFINISHED = "A run did not finish, so attacks may be missing"
NOTHING_LEAKS = "no attack is shown to work without a defence"


def weakness_text(weakness: Weakness, one: Setting, idle_attacks: Sequence[str] = ()) -> str:
    """Return why results of a setting are no evidence of protection, or why its model is useless."""
    if weakness == Weakness.AT_CHANCE:
        return "its accuracy does not beat the majority class"
    if weakness == Weakness.UNFINISHED:
        return "its run did not finish"
    if weakness == Weakness.NO_RESULT:
        return _with_reasons("a decisive attack returned no result", one, State.NOT_MEASURED)
    if weakness == Weakness.INCONCLUSIVE:
        reasons = outcome_reasons(one.rows, State.INCONCLUSIVE) or [NOTHING_LEAKS]
        return f"its verdict is inconclusive: {'; '.join(reasons)}"
    if weakness == Weakness.PARTLY_INCONCLUSIVE:
        return partly_inconclusive_text(one)
    return f"{' or '.join(idle_attacks)} is not shown to exceed chance without a defence"


def partly_inconclusive_text(one: Setting) -> str:
    """Return the number of inconclusive repeats of a setting with reasons; empty if none or all are inconclusive."""
    if not one.inconclusive:
        return ""
    verb = "is" if one.inconclusive == 1 else "are"
    count = f"{one.inconclusive} of {len(one.rows)} repeats {verb} inconclusive"
    return _with_reasons(count, one, State.INCONCLUSIVE)


def _with_reasons(text: str, one: Setting, state: State) -> str:
    reasons = outcome_reasons(one.rows, state)
    return f"{text}: {'; '.join(reasons)}" if reasons else text


def setting_note(one: Setting, status: str, error: str | None) -> str:
    """Return details of a setting: defences, inputs of the attack, trials, weaknesses, and the error of its trial."""
    first, count = one.rows[0], len(one.rows)
    parts = [f"Defences: {first.get('defences') or 'none'}."]
    if one.attack and first.get("observes"):
        parts.append(f"Given to {one.attack}: {attack_input_text(attack_input([first]))}.")
    if first.get("trial") is not None:
        runs = ", ".join(row["run"] for row in one.rows if row.get("run"))
        parts.append(f"Trials: {runs or first['trial']}.")
    parts += [f"Not on the front: {weakness_text(weakness, one)}." for weakness in one.weaknesses]
    if one.collapsed:
        parts.append(f"The accuracy is at chance level in {one.collapsed} of {count} repeats.")
    if one.inconclusive:
        parts.append(f"The verdict is inconclusive in {one.inconclusive} of {count} repeats.")
    if error:
        parts.append(f"{status.capitalize()}: {error}")
    return " ".join(parts)
