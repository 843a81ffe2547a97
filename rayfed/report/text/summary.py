"""Summary of a run: its subject, its best reconstruction and its guarantees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from rayfed.evidence.attack_results import attack_input
from rayfed.evidence.criteria import Criterion, CriterionResult
from rayfed.evidence.rows import Row, is_measured
from rayfed.evidence.training import ArmSummary
from rayfed.report.text.attacks import attack_input_text
from rayfed.report.text.captions import model_and_data_text
from rayfed.report.text.formats import format_decimals, format_psnr, format_similarity, noun_of_sample
from rayfed.report.text.guarantees import guarantee_sentences
from rayfed.report.text.reasons import judgement_text
from rayfed.report.text.weights import attacked_weights


@dataclass(frozen=True)
class SummaryEntry:
    """Entry of the summary on a page."""

    heading: str
    lines: list[str]


def subject_text(scenario: Row, status: Row, attacks: Sequence[Row]) -> str:
    """Return a sentence on a run's model, data and attacked weights; empty if model or data are unknown."""
    subject = model_and_data_text(scenario)
    if not subject:
        return ""
    known = status.get("weights") if status.get("kind") == "attack" else attacks
    return f"{subject}, attacked with {attacked_weights(scenario, status, attacks)}." if known else f"{subject}."


def run_summary(
    arms: Sequence[ArmSummary],
    worst: Row | None,
    criterion: Criterion,
    privacy: Sequence[Row],
    classes: Mapping[int, str] | None,
    secure: bool,
) -> list[SummaryEntry]:
    """Return the summary of a run; `worst` is the row of its best reconstruction, `classes` as in that function."""
    entries = []
    if worst:
        where = f"under arm {worst['arm']}" if len(arms) > 1 else ""
        entries = best_reconstruction(worst, criterion, where, classes)
    trained = any(arm.rounds for arm in arms)
    guarantees = guarantee_sentences(privacy, secure, criterion.modality == "pixels", trained)
    return [*entries, SummaryEntry("Guarantees", guarantees)]


def best_reconstruction(
    row: Row, criterion: Criterion, where: str, classes: Mapping[int, str] | None
) -> list[SummaryEntry]:
    """Return entries on the best reconstruction: the sample, the attack, the score and the attack's inputs.

    `classes` is None if the page does not show the class of a sample. Only a leak is called reconstructed.
    """
    noun = noun_of_sample(row)
    preposition, score = _score(row, noun)
    of_class = ""
    if classes is not None and (label := row.get("true_label")) is not None:
        of_class = f", class {classes.get(label, label)}"
    article = "an" if noun == "image" else "a"
    sample = f"{article} {noun} of client {row['victim']} (sample {row['sample']}, round {row['round'] + 1}{of_class})"
    if where:
        sample = f"{sample} {where}"
    judgement = criterion.judge(row)
    if judgement == CriterionResult.LEAK:
        best = SummaryEntry("Best reconstruction", [f"{row['attack']} reconstructed {sample} {preposition}{score}."])
    else:
        result = f"by {row['attack']}, {score} ({judgement_text(criterion, judgement)})"
        best = SummaryEntry("Best result", [f"No {noun} was reconstructed. The best result is for {sample}, {result}."])
    given = attack_input_text(attack_input([row]))
    return [best, SummaryEntry("Given to this attack", [f"{given[:1].upper()}{given[1:]}."])]


def _score(row: Row, noun: str) -> tuple[str, str]:
    """Return the preposition of a reconstruction's score, with a space, and the score with its unit."""
    if noun != "image":
        return "with ", format_similarity(row)
    if row["psnr"] == inf:
        return "", "exactly"
    likeness = f" and an SSIM of {format_decimals(row['ssim'], 2)}" if is_measured(row.get("ssim")) else ""
    return "at ", f"a PSNR of {format_psnr(row['psnr'])} dB{likeness}"
