"""Summaries of runs and sweeps in sentences: the worst sample, its attacker, costs of defences, guarantees.

No sentence judges. Each says what was measured and how often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfed.analysis.audit import Criterion, State, modality_of
from rayfed.analysis.formats import called, decibel, duration, fixed, in_words, near, points, share, size
from rayfed.analysis.settings import Setting, by_values, of_attacks
from rayfed.analysis.summary import ArmSummary, Row, measured, setting
from rayfed.analysis.verdicts import WEIGHT, Verdict, closest, labels_alone
from rayfed.metrics.measures import MEASURES, worst_of
from rayfed.privacy.printing import at_most, caution, share_at_most
from rayfed.privacy.tradeoff import PRIORS
from rayfed.report.caption import data_of, named
from rayfed.report.provenance import begun_with, initial_weights

MOST = 8
"""Largest number of arms that get a sentence each."""
ONE_TRAINING = "Each arm was trained once: only repeats can show how much of a difference is chance."
_REST = "measured against these attacks, on this data, in these rounds; a stronger attack may get more."
_OF_IMAGES = " PSNR says how near two images are pixel by pixel: look at the images as well."


@dataclass(frozen=True)
class Statement:
    """One point of a summary."""

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
    """Summarise a run of these arms; `verdicts`, by arm, is empty if nothing was attacked.

    `classes` is None if the page does not say which class a sample has.
    """
    worst, told = closest([v.closest for v in verdicts.values() if v.closest], criterion), []
    if worst:
        where = f"under arm {worst['arm']}" if len(arms) > 1 else ""
        told = closest_sample(worst, criterion, where, classes)
        if unknown := sum(not verdict.answered for verdict in verdicts.values()):
            told[0].lines.append(f"Not measured: {unknown} of {len(verdicts)} arms.")
    if read := labels_alone(list(verdicts.values())):
        told.append(Statement("Labels", read))
    trained = any(arm.rounds for arm in arms)
    if len(arms) > 1:
        costs = effects(arms, verdicts, MOST)
        if trained:
            costs.append(ONE_TRAINING)
        told.append(Statement(effect_heading(arms), costs))
    return [*told, guarantees(privacy, secure, criterion.modality == "pixels", trained)]


def effect_heading(arms: Sequence[ArmSummary]) -> str:
    """Return the heading of `effects`; arms are compared with the first."""
    return f"Effect of each defence compared with {arms[0].name if arms[0].defences else 'no defence'}"


def effects(arms: Sequence[ArmSummary], verdicts: Mapping[str, Verdict], most: int | None = None) -> list[str]:
    """Return what every arm but the first changes in accuracy, time, bytes and leakage, a line each, leaks first.

    Arms with the same text share a line. If there are more than `most` lines, arms without a leak beyond these are
    only counted. `verdicts`, by arm, is empty if nothing was attacked.
    """

    def place(arm: ArmSummary) -> int:
        verdict = verdicts.get(arm.name)
        return WEIGHT.index(verdict.state) if verdict else len(WEIGHT)

    lines: dict[str, list[ArmSummary]] = {}
    for arm in sorted(arms[1:], key=place):
        lines.setdefault(_cost(arm, arms[0], verdicts), []).append(arm)
    leaking = sum(place(group[0]) == 0 for group in lines.values())
    shown = list(lines.items())[: None if most is None else max(most, leaking)]
    said = [f"{', '.join(arm.name for arm in group)}: {line}." for line, group in shown]
    if rest := len(arms) - 1 - sum(len(group) for _, group in shown):
        said.append(f"{rest} other arm{'s are' if rest > 1 else ' is'} in the tables below.")
    return said


def leakage(verdict: Verdict | None) -> str:
    """Return in a few words what attacks got on an arm, or that it was not measured."""
    labels = [f"labels found: {verdict.labels}"] if verdict and verdict.labels else []
    return ", ".join([_of_samples(verdict), *labels])


def _of_samples(verdict: Verdict | None) -> str:
    if verdict is None or not verdict.answered:
        return "not measured"
    if verdict.closest is None:
        return verdict.state
    how = f"{'worst' if verdict.state == 'leaks' else 'closest'} {called(verdict.closest)} {near(verdict.closest)}"
    return f"{verdict.state}, {how}"


def prices(arms: Sequence[ArmSummary], privacy: Sequence[Row], distortions: Mapping[str, float]) -> dict[str, str]:
    """Return the cost and the guarantee of every arm in short; empty if none of it was measured."""
    return {arm.name: "; ".join(_price(arm, privacy, distortions)) for arm in arms}


def _price(arm: ArmSummary, privacy: Sequence[Row], distortions: Mapping[str, float]) -> list[str]:
    parts = []
    if arm.accuracy is not None:
        change = f" ({points(arm.accuracy_change)} points)" if arm.accuracy_change is not None else ""
        parts.append(f"test accuracy {share(arm.accuracy)}{change}")
    elif distortions.get(arm.name):
        parts.append(f"distortion of what was attacked {distortions[arm.name]:.3g} (relative)")
    held = [row for row in privacy if row["arm"] == arm.name and row["epsilon"] is not None]
    parts += [
        f"ε = {at_most(row['epsilon'])} at δ = {at_most(row['delta'])} for every single {row['unit']}"
        + caution(row["epsilon"])
        for row in held
    ]
    return [*parts, "no (ε, δ)"] if arm.rounds and arm.defences and not held else parts


def of_sweep(
    settings: Sequence[Setting],
    worst: tuple[str, Row] | None,
    criterion: Criterion,
    classes: Mapping[int, str] | None,
    arms: Sequence[str],
) -> list[Statement]:
    """Summarise a sweep; `worst` is the setting and the row of `attacks` of the closest reconstruction."""
    told = closest_sample(worst[1], criterion, f"under the setting {worst[0]}", classes) if worst else []
    ranges = [_ranges(arm, [one for one in settings if one.arm == arm]) for arm in arms]
    told.append(Statement("Accuracy, leakage and time over the settings", [line for line in ranges if line][:MOST]))
    rows = [row for one in settings if "epsilon" in one.measures for row in one.rows]
    weakest = {row["arm"]: row for row in sorted(rows, key=lambda row: row["epsilon"])}
    lines = [
        f"{arm}: at its weakest setting ε = {at_most(row['epsilon'])} with δ = {at_most(row['delta'])} for every "
        f"{row['epsilon_unit']}{caution(row['epsilon'])}; the other settings and their ε are in the table."
        for arm, row in weakest.items()
    ]
    told.append(_held(lines, criterion.modality == "pixels"))
    return [one for one in told if one.lines]


def sweep_verdicts(settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Return (state, sentence) for each verdict on settings that were attacked: the worst over their trials.

    The worst verdict over all attacks and repeats counts for a setting. For a verdict without an answer the sentence
    says why.
    """
    met: dict[str, list[str]] = {}
    why: dict[str, dict[str, None]] = {}
    for group in by_values(settings):
        rows = [row for one in group if one.attack for row in one.rows]
        state = next((state for state in WEIGHT if any(row.get("verdict") == state for row in rows)), None)
        if state:
            met.setdefault(state, []).append(group[0].title + _figures(rows, state) + _in_some(rows, state))
            reasons = {
                row["why"]: None for row in rows if state in (row.get("answer"), row.get("verdict")) and row.get("why")
            }
            if state == "inconclusive":
                reasons = reasons or {"nothing is known to leak without a defence": None}
            why.setdefault(state, {}).update(reasons)
    total = sum(map(len, met.values()))
    return [
        (
            state,
            f"{len(met[state])} of {total}: {'; '.join(met[state][:MOST])}{'; ...' * (len(met[state]) > MOST)}"
            + (f" ({'; '.join(list(why[state])[:MOST])})" if why[state] else ""),
        )
        for state in WEIGHT
        if state in met
    ]


def _figures(rows: Sequence[Row], state: State) -> str:
    """Return how near the closest reconstruction behind a verdict is, beside a guess; empty if that is not known."""
    told = [row for row in rows if row.get("answer") == state] if state == "leaks" else rows
    known = [row for row in told if measured(row.get("closest"))]
    if not known:
        return ""
    row, criterion = max(known, key=lambda row: row["closest"]), Criterion.of(modality_of(rows), None)
    guess = "" if row["closest_guess"] is None else f", a guess {criterion.written(row['closest_guess'])}"
    return f" ({criterion.written(row['closest'])} by {row['attack']}{guess})"


def unplayed(status: Mapping[str, Any]) -> str:
    """Return how many trials of a sweep have no row, and of which settings; empty if there are none."""
    left = status.get("trials", 0) - status.get("trials_done", 0)
    if left <= 0:
        return ""
    names = status.get("unplayed") or []  # status.json of earlier versions, and what Optuna chooses, names none
    more = "; ..." * (len(names) > MOST)
    which = f": {'; '.join(names[:MOST])}{more}" if names else ""
    return f"{left} of {status['trials']} trials {'is' if left == 1 else 'are'} not over{which}"


def _in_some(rows: Sequence[Row], state: State) -> str:
    """Return in how many repeats a setting has this verdict, and which the others have; empty if in all."""
    every = {row.get("repeat") for row in rows}
    by_state = {one: {row.get("repeat") for row in rows if row.get("verdict") == one} for one in WEIGHT}
    those = by_state[state]
    others = ", ".join(f"{one} in {len(met - those)}" for one, met in by_state.items() if met - those)
    return f" (in {len(those)} of {len(every)} repeats; {others})" if len(those) < len(every) else ""


def guarantees(privacy: Sequence[Row], secure: bool = True, images: bool = True, trained: bool = True) -> Statement:
    """Return which (epsilon, delta) holds for whom, which is withdrawn, and whether the noise is `secure`.

    Without rows, `trained` says whether no mechanism has an account, or no training was there to account for.
    """
    held = _held(
        [
            f"{row['arm']}: by {row['defence']}, (ε = {at_most(row['epsilon'])}, δ = {at_most(row['delta'])}) protects "
            f"{row['adjacency']}, against {row['against']}{caution(row['epsilon'])}."
            + (f" But {row['note']}." if row["note"] else "")
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
    noise = ["Noise follows from the seed: for measuring, not for protecting (privacy.secure)."] if seeded else []
    return Statement(held.heading, [*withdrawn, *held.lines, *noise])


def bounds(row: Row) -> list[str]:
    """Return what an account proves of guesses and membership tests; empty for rows of versions without bounds."""
    if row.get("advantage") is None:
        return []
    shares = ", ".join(share_at_most(row[f"rero_{n}"]) for n in PRIORS)
    priors = ", ".join(f"{n:,}" for n in PRIORS)
    question = f"a {row['unit']} took part"
    if "replace-one" in row["adjacency"]:
        question = f"it is a {row['unit']} or another one in its place"
    return [
        f"who guesses a secret of a {row['unit']} right 1 in {priors} times before, does so in at most {shares} after "
        "(ReRo)",
        f"who tells whether {question} has a true positive rate of at most "
        f"{share_at_most(row['rero_1000'])} at a false one of 0.1 %, and at most {share_at_most(row['advantage'])} "
        "above it at any",
    ]


def secure(scenario: Row) -> bool:
    """Return whether a scenario draws fresh noise and keys in every run."""
    return bool((scenario.get("privacy") or {}).get("secure"))


def subject(scenario: Row, status: Row, attacks: Sequence[Row]) -> str:
    """Return the model and data of a run, and the weights that were attacked; empty if either name is unknown."""
    model, data = (scenario.get(section) or {} for section in ("model", "data"))
    if not model.get("name") or not data.get("name"):
        return ""
    initial = initial_weights(scenario)
    rounds = {row["round"] for row in attacks}
    if status.get("kind") == "attack":
        of = {None: "", "initial": f" with {initial}", "given": " with the weights that were given"}
        state = of.get(status.get("weights"), f" with weights {status.get('weights')}")
    elif rounds == {0}:
        state = f" in its first round, with {initial}"
    else:
        first = ", the first among them" * (0 in rounds)
        many = f"{len(rounds)} round{'s' * (len(rounds) > 1)}"
        state = f" in {many} of its training{begun_with(scenario)}{first}" if rounds else ""
    attacked = f", attacked{state}" if state else ""
    return f"Model {named(model, 'arch', 'path')} on data {data_of(data)}{attacked}."


def short_keys(scenario: Row, values: Iterable[Any] = ()) -> list[str]:
    """Return warnings of encryption keys that can be broken; `values` are those of `key_bits` in a sweep."""
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
    from rayfed.crypto.paillier import SECURE_BITS  # with PyTorch

    return [
        f"Keys of {length} bits ({place}) can be broken: anyone who sees a ciphertext can read it. "
        f"Use at least {SECURE_BITS} bits."
        for place, length in sorted(bits)
        if length < SECURE_BITS
    ]


def _held(lines: list[str], images: bool, trained: bool = True) -> Statement:
    """Return what is guaranteed and what is not."""
    limits = _REST + _OF_IMAGES * images
    if not lines:
        why = (
            "the mechanisms here carry no (ε, δ) guarantee"
            if trained
            else "an (ε, δ) is of a training, and nothing was trained here. A run that trains with a defence that has "
            "an account, such as `dp_sgd`, states it"
        )
        return Statement("What is guaranteed", [f"Nothing: {why}. Everything is empirical: {limits}"])
    rest = (
        "This holds against every attack that sees what training sends, for whom and against whom it is stated, "
        "and for no others. Answers that attacks here were given outside training are not counted. Everything "
        f"else is empirical: {limits}"
    )
    return Statement("What is guaranteed", [*lines, rest])


def closest_sample(row: Row, criterion: Criterion, where: str, classes: Mapping[int, str] | None) -> list[Statement]:
    """Return which sample has the closest reconstruction, where, and what its attacker knew; `classes` as in `of_run`.

    Only a leak by the criterion is called reconstructed.
    """
    sample, close = called(row), decibel(row["psnr"])
    article = "an" if sample == "image" else "a"
    how = "exactly" if close == "exact" else f"at a PSNR of {close} dB"
    likeness = f" and an SSIM of {fixed(row['ssim'], 2)}" if measured(row.get("ssim")) and close != "exact" else ""
    if sample != "image":
        how, likeness = f"with {near(row)}", ""
    of_class = ""
    if classes is not None and (label := row.get("true_label")) is not None:
        of_class = f", class {classes.get(label, label)}"
    what = f" (sample {row['sample']}, round {row['round'] + 1}{of_class})"
    place = f" {where}" if where else ""
    whose = f"{article} {sample} of client {row['victim']}{what}{place}"
    told = Statement(f"The worst {sample}", [f"{row['attack']} rebuilt {whose} {how}{likeness}."])
    if (why := criterion.called(row)) != "reconstructed":
        said = f"No {sample} was reconstructed, as a leak is defined above. The closest, which is not a reconstruction"
        of = f"{whose} by {row['attack']}, {how.removeprefix('at ').removeprefix('with ')}{likeness}"
        told = Statement(f"The closest {sample}", [f"{said} ({why}): {of}."])
    return [told, Statement("What its attacker knew", [f"It was given {setting([row])}."])]


def _cost(arm: ArmSummary, reference: ArmSummary, verdicts: Mapping[str, Verdict]) -> str:
    parts = []
    if arm.accuracy_change is not None:
        parts.append(f"test accuracy {share(arm.accuracy)}, {points(arm.accuracy_change)} points")
    if arm.actor_seconds and reference.actor_seconds:
        own, other = (duration(one.actor_seconds.mean) for one in (arm, reference) if one.actor_seconds)
        parts.append(f"{own} of training a round (against {other})")
    if arm.simulated and reference.simulated:
        own, other = (duration(one.simulated.rounds.mean) for one in (arm, reference) if one.simulated)
        parts.append(f"{own} of simulated time a round (against {other})")
    if arm.rounds and reference.rounds and arm.bytes_up and reference.bytes_up:
        own, other = (size(one.bytes_up / one.rounds) for one in (arm, reference))
        parts.append(f"{own} sent by clients a round (against {other})")
    if verdicts:
        both = [verdicts.get(one.name) for one in (arm, reference)]
        own, other = map(_of_samples, both)
        if own == other == "not measured":
            parts.append(f"leakage not measured, nor {_where(reference)}")
        else:
            told = f"leakage {own}" if own == "not measured" else own
            parts.append(f"{told} ({_where(reference)}: {'the same' if own == other else other})")
        own, other = ("" if one is None else one.labels for one in both)
        if own:
            parts.append(f"labels found: {own}" + (f"; {_where(reference)}: {other}" if other and own != other else ""))
        elif other:
            parts.append(f"labels found {_where(reference)}: {other}")
    return "; ".join(parts) or "nothing was measured"


def _where(reference: ArmSummary) -> str:
    """Return where something was found; an arm's name, which may be `none`, is no such place without quotes."""
    return f"on arm “{reference.name}”" if reference.defences else "without a defence"


def _ranges(arm: str, settings: Sequence[Setting]) -> str:
    """Return the range of each measure over one arm's settings, and what the figures are means of."""
    count = len({repr(one.fields) for one in settings})
    said = []
    for name in ("test_accuracy", worst_of("psnr"), "train_seconds"):
        if known := [one for one in settings if name in one.measures]:
            range_ = _from_to(name, [one.measures[name].mean for one in known])
            said.append(f"{MEASURES[name].title} {range_}{_meant(name, known)}")
    return f"{arm}, {count} setting{'s' if count > 1 else ''}: {'; '.join(said)}." if said else ""


def _meant(name: str, settings: Sequence[Setting]) -> str:
    """Return in brackets what a range of figures is of: means over seeds, those of each attack."""
    of = "means over seeds" if any(one.measures[name].n > 1 for one in settings) else ""
    each = "of each attack" if of_attacks(name) and len({one.attack for one in settings}) > 1 else ""
    return f" ({' '.join(filter(None, (of, each)))})" if of or each else ""


def _from_to(name: str, values: Sequence[float]) -> str:
    low, high = in_words(name, min(values)), in_words(name, max(values))
    return low if low == high else f"{low} to {high}"
