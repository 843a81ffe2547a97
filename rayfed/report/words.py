"""Sentences for the report and the statement: best reconstruction, guarantees, sweeps, subject of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rayfed.evidence.attack_results import attack_input
from rayfed.evidence.criteria import Criterion, Judgement, modality_of
from rayfed.evidence.rows import Row, measured
from rayfed.evidence.settings import Setting, by_values, of_attacks
from rayfed.evidence.training import ArmSummary
from rayfed.evidence.verdicts import Verdict, closest
from rayfed.metrics.measures import MEASURES, extreme_of
from rayfed.privacy.printing import at_most, caution
from rayfed.report.caption import data_of, named
from rayfed.report.provenance import begun_with, initial_weights
from rayfed.report.text.attacks import attack_input_text
from rayfed.report.text.formats import called, decibel, fixed, in_words, near
from rayfed.report.text.outcomes import outcome_reasons
from rayfed.report.text.reasons import judgement_text
from rayfed.store.finding import State

MOST = 8
"""Maximum number of settings that a sentence names."""
_REST = "they hold for these attacks, data and rounds. A stronger attack may reconstruct more."
_OF_IMAGES = " PSNR compares images pixel by pixel, so look at the images as well."


@dataclass(frozen=True)
class Statement:
    """Entry of a summary in the report."""

    heading: str
    lines: list[str]


def of_run(
    arms: Sequence[ArmSummary],
    verdicts: Mapping[str, Verdict],
    criterion: Criterion,
    privacy: Sequence[Row],
    classes: Mapping[int, str] | None,
    secure: bool,
) -> list[Statement]:
    """Return the summary of a run; `verdicts`, by arm, is empty if nothing was attacked.

    `classes` is None if the page does not show the class of a sample.
    """
    found: list[Statement] = []
    if best := closest([v.closest for v in verdicts.values() if v.closest], criterion):
        where = f"under arm {best['arm']}" if len(arms) > 1 else ""
        found = closest_sample(best, criterion, where, classes)
    trained = any(arm.rounds for arm in arms)
    return [*found, guarantees(privacy, secure, criterion.modality == "pixels", trained)]


def of_sweep(
    settings: Sequence[Setting],
    worst: tuple[str, Row] | None,
    criterion: Criterion,
    classes: Mapping[int, str] | None,
    arms: Sequence[str],
) -> list[Statement]:
    """Return the summary of a sweep; `worst` is the setting and the row of `attacks` with the best reconstruction."""
    found = closest_sample(worst[1], criterion, f"under the setting {worst[0]}", classes) if worst else []
    ranges = [_ranges(arm, [one for one in settings if one.arm == arm]) for arm in arms]
    found.append(Statement("Accuracy, leakage and time over the settings", [line for line in ranges if line][:MOST]))
    rows = [row for one in settings if "epsilon" in one.measures for row in one.rows]
    weakest = {row["arm"]: row for row in sorted(rows, key=lambda row: row["epsilon"])}
    lines = [
        f"{arm}, weakest setting: (ε = {at_most(row['epsilon'])}, δ = {at_most(row['delta'])}) per "
        f"{row['epsilon_unit']}{caution(row['epsilon'])}. The table lists the ε of all settings."
        for arm, row in weakest.items()
    ]
    found.append(_held(lines, criterion.modality == "pixels"))
    return [one for one in found if one.lines]


def sweep_verdicts(settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Return pairs (state, sentence): one per kind of verdict on the attacked settings of a sweep.

    The worst verdict over all attacks and repeats counts for a setting. If a verdict is not known, the sentence has
    the reason.
    """
    by_state: dict[str, list[str]] = {}
    why: dict[str, dict[str, None]] = {}
    for group in by_values(settings):
        rows = [row for one in group if one.attack for row in one.rows]
        state = next((state for state in State if any(row.get("verdict") == state for row in rows)), None)
        if state:
            by_state.setdefault(state, []).append(group[0].title + _figures(rows, state) + _in_some(rows, state))
            reasons = outcome_reasons(rows, state)
            if state == State.INCONCLUSIVE and not reasons:
                reasons = ["nothing leaks without a defence"]
            why.setdefault(state, {}).update(dict.fromkeys(reasons))
    total = sum(map(len, by_state.values()))
    return [
        (
            state,
            f"{len(by_state[state])} of {total}: "
            f"{'; '.join(by_state[state][:MOST])}{'; ...' * (len(by_state[state]) > MOST)}"
            + (f" ({'; '.join(list(why[state])[:MOST])})" if why[state] else ""),
        )
        for state in State
        if state in by_state
    ]


def _figures(rows: Sequence[Row], state: State) -> str:
    """Return the best reconstruction of a verdict, with its attack and the baseline; empty if it is not known."""
    own = [row for row in rows if row.get("result") == state] if state == "leaks" else rows
    known = [row for row in own if measured(row.get("max_similarity"))]
    if not known:
        return ""
    row, criterion = max(known, key=lambda row: row["max_similarity"]), Criterion.of(modality_of(rows), None)
    baseline = (
        "" if row["baseline_similarity"] is None else f", baseline {criterion.written(row['baseline_similarity'])}"
    )
    return f" ({criterion.written(row['max_similarity'])} by {row['attack']}{baseline})"


def unplayed(status: Mapping[str, Any]) -> str:
    """Return a sentence on the trials of a sweep that did not finish, with their settings; empty if all did."""
    left = status.get("trials", 0) - status.get("trials_done", 0)
    if left <= 0:
        return ""
    names = status.get("unplayed") or []  # earlier versions and Optuna sweeps do not list them
    more = "; ..." * (len(names) > MOST)
    which = f": {'; '.join(names[:MOST])}{more}" if names else ""
    return f"{left} of {status['trials']} trials {'is' if left == 1 else 'are'} not finished{which}"


def _in_some(rows: Sequence[Row], state: State) -> str:
    """Return the number of repeats with this verdict, and the verdicts of the others; empty if all agree."""
    every = {row.get("repeat") for row in rows}
    by_state = {one: {row.get("repeat") for row in rows if row.get("verdict") == one} for one in State}
    those = by_state[state]
    others = ", ".join(f"{one} in {len(repeats - those)}" for one, repeats in by_state.items() if repeats - those)
    return f" (in {len(those)} of {len(every)} repeats; {others})" if len(those) < len(every) else ""


def guarantees(privacy: Sequence[Row], secure: bool = True, images: bool = True, trained: bool = True) -> Statement:
    """Return sentences on each arm's (epsilon, delta) guarantee, with a warning if the noise is not `secure`.

    Without rows, `trained` selects the reason: no mechanism has an account, or nothing was trained.
    """
    held = _held(
        [
            f"{row['arm']}: (ε = {at_most(row['epsilon'])}, δ = {at_most(row['delta'])}) by {row['defence']}. It "
            f"protects {row['adjacency']} against {row['against']}{caution(row['epsilon'])}."
            + (f" Limit: {row['note']}." if row["note"] else "")
            for row in privacy
            if row["epsilon"] is not None
        ],
        images,
        trained,
    )
    withdrawn = [
        f"{row['arm']}: withdrawn for {row['defence']}: {row['note']}."
        for row in privacy
        if row["epsilon"] is None and row["defence"] is not None
    ]
    seeded = any(row["epsilon"] is not None for row in privacy) and not secure
    noise = (
        "Noise is derived from the seed. Use this run to measure, not to protect data. "
        "For real training set `privacy.secure: true`."
    )
    return Statement(held.heading, [*withdrawn, *held.lines, *([noise] if seeded else [])])


def secure(scenario: Row) -> bool:
    """Return whether every run of a scenario samples fresh noise and keys, independent of the seed."""
    return bool((scenario.get("privacy") or {}).get("secure"))


def subject(scenario: Row, status: Row, attacks: Sequence[Row]) -> str:
    """Return a sentence on a run's model, data and attacked weights; empty if model or data are unknown."""
    model, data = (scenario.get(section) or {} for section in ("model", "data"))
    if not model.get("name") or not data.get("name"):
        return ""
    initial = initial_weights(scenario)
    rounds = {row["round"] for row in attacks}
    if status.get("kind") == "attack":
        of = {None: "", "initial": f" with {initial}", "given": " with the weights that were given"}
        state = of.get(status.get("weights"), f" with weights {status.get('weights')}")
    elif rounds == {0}:
        state = f" in round 1, with {initial}"
    else:
        first = ", including round 1" * (0 in rounds)
        many = f"{len(rounds)} round{'s' * (len(rounds) > 1)}"
        state = f" in {many} of the training{begun_with(scenario)}{first}" if rounds else ""
    attacked = f", attacked{state}" if state else ""
    return f"Model {named(model, 'arch', 'path')} on data {data_of(data)}{attacked}."


def short_keys(scenario: Row, values: Iterable[Any] = ()) -> list[str]:
    """Return warnings about insecure encryption key lengths; `values` are the `key_bits` of a sweep."""
    specs = {"federation": (scenario.get("federation") or {}).get("protection")}
    specs |= {
        f"arm {name}": arm.get("protection")
        for name, arm in (scenario.get("arms") or {}).items()
        if isinstance(arm, Mapping)
    }
    bits = {
        (place, spec["key_bits"]) for place, spec in specs.items() if isinstance(spec, Mapping) and spec.get("key_bits")
    }
    bits |= {("swept", value) for value in values}
    if not bits:
        return []
    from rayfed.crypto.paillier import SECURE_BITS  # imports PyTorch

    return [
        f"Keys of {length} bits ({place}) are insecure: anyone who sees a ciphertext can decrypt it. "
        f"Use at least {SECURE_BITS} bits."
        for place, length in sorted(bits)
        if length < SECURE_BITS
    ]


def _held(lines: list[str], images: bool, trained: bool = True) -> Statement:
    """Return the guarantees with their limits, or why there are none."""
    limits = f"are empirical: {_REST}" + _OF_IMAGES * images
    if not lines:
        why = (
            "no defence of this run has an (ε, δ)"
            if trained
            else "an (ε, δ) covers a training, and nothing was trained. To obtain one, train with a defence such as "
            "`dp_sgd`"
        )
        return Statement("Guarantees", [f"None: {why}. All results {limits}"])
    rest = (
        "A guarantee covers every attack on the updates of the training, for the unit and the adversary that it names. "
        "It does not cover updates that attacks observe outside the training. All other results "
    )
    return Statement("Guarantees", [*lines, rest + limits])


def closest_sample(row: Row, criterion: Criterion, where: str, classes: Mapping[int, str] | None) -> list[Statement]:
    """Return statements on the best reconstruction: the sample, the attack, the score and the attack's inputs.

    `classes` is as in `of_run`. Only a leak is called reconstructed.
    """
    sample = called(row)
    preposition, score = _score(row, sample)
    of_class = ""
    if classes is not None and (label := row.get("true_label")) is not None:
        of_class = f", class {classes.get(label, label)}"
    what = f" (sample {row['sample']}, round {row['round'] + 1}{of_class})"
    place = f" {where}" if where else ""
    whose = f"{'an' if sample == 'image' else 'a'} {sample} of client {row['victim']}{what}{place}"
    best = Statement("Best reconstruction", [f"{row['attack']} reconstructed {whose} {preposition}{score}."])
    if (judgement := criterion.judge(row)) != Judgement.LEAK:
        result = f"by {row['attack']}, {score} ({judgement_text(criterion, judgement)})"
        best = Statement("Best result", [f"No {sample} was reconstructed. The best result is for {whose}, {result}."])
    return [best, Statement("Given to this attack", [f"{_capital(attack_input_text(attack_input([row])))}."])]


def _score(row: Row, sample: str) -> tuple[str, str]:
    """Return the preposition of a reconstruction's score, with a space, and the score with its unit."""
    if sample != "image":
        return "with ", near(row)
    if row["psnr"] == inf:
        return "", "exactly"
    likeness = f" and an SSIM of {fixed(row['ssim'], 2)}" if measured(row.get("ssim")) else ""
    return "at ", f"a PSNR of {decibel(row['psnr'])} dB{likeness}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ranges(arm: str, settings: Sequence[Setting]) -> str:
    """Return the range of each measure over the settings of one arm."""
    count = len({repr(one.fields) for one in settings})
    parts = []
    for name in ("test_accuracy", extreme_of("psnr"), "train_seconds"):
        if known := [one for one in settings if name in one.measures]:
            range_ = _from_to(name, [one.measures[name].mean for one in known])
            parts.append(f"{MEASURES[name].title} {range_}{_meant(name, known)}")
    return f"{arm}, {count} setting{'s' if count > 1 else ''}: {', '.join(parts)}." if parts else ""


def _meant(name: str, settings: Sequence[Setting]) -> str:
    """Return in brackets whether a range is over means of seeds, and over attacks."""
    of = "means over seeds" if any(one.measures[name].n > 1 for one in settings) else ""
    each = "of each attack" if of_attacks(name) and len({one.attack for one in settings}) > 1 else ""
    return f" ({' '.join(filter(None, (of, each)))})" if of or each else ""


def _from_to(name: str, values: Sequence[float]) -> str:
    low, high = in_words(name, min(values)), in_words(name, max(values))
    return low if low == high else f"{low} to {high}"
