"""Sections of a run's page on the verdicts and the arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayfed.evidence.arms import component_text
from rayfed.evidence.attack_results import attack_input
from rayfed.evidence.rows import distortions
from rayfed.evidence.training import ArmSummary
from rayfed.evidence.verdicts import Verdict
from rayfed.report.html.pictures import PicturePair
from rayfed.report.html.run_data import RunData
from rayfed.report.text.attacks import attack_input_text
from rayfed.report.text.formats import format_number, format_share, format_similarity
from rayfed.report.text.next_step import next_step_text
from rayfed.report.text.reasons import judgement_text
from rayfed.report.text.training import quality_note
from rayfed.report.text.verdict_table import VerdictTable, verdict_table
from rayfed.report.text.verdicts import badge_text, headline
from rayfed.store.finding import State


@dataclass(frozen=True)
class VerdictSection:
    """Verdicts of a run, with the next step."""

    headline: Sequence[str]
    next_step: str
    commands: Sequence[str]
    """Commands of the next step."""
    table: VerdictTable
    failures: Sequence[str]
    """Attacks that failed."""


@dataclass(frozen=True)
class CardValue:
    """Value on the card of an arm."""

    title: str
    value: str
    note: str = ""
    is_text: bool = False


@dataclass(frozen=True)
class Card:
    """Summary of one arm."""

    arm: str
    components: str
    figures: Sequence[CardValue]
    pair: PicturePair | None
    """Best reconstruction of an arm that leaks; None if it has no image."""
    source: str
    """Client, round and inputs of the best reconstruction; empty if the arm does not leak."""


def make_verdict_section(data: RunData, advice: str, failures: Sequence[str], url: str) -> VerdictSection:
    """Return the section; `advice` is the next step for a run that did not finish, `url` its folder in commands."""
    evidence = data.evidence
    step = f"Next: {advice}." if advice else ""
    commands: list[str] = []
    if not advice:
        run = None if data.is_audit else url
        step, *commands = next_step_text(evidence, run).splitlines() or [""]
    return VerdictSection(
        headline=headline(data.scenario, evidence.verdicts),
        next_step=step,
        commands=[command.strip() for command in commands],
        table=verdict_table(evidence, data.arms, data.privacy, data.weights),
        failures=failures,
    )


def make_cards(data: RunData, pairs: Mapping[str, PicturePair | None], texts: bool) -> list[Card]:
    """Return the card of each arm, arms that leak first.

    `pairs` are the images of the best reconstructions by arm, `texts` whether samples are texts or records.
    """
    verdicts = {verdict.arm: verdict for verdict in data.evidence.verdicts}
    changes = distortions(data.attacks)
    leaking, others = [], []
    for arm in data.arms:
        verdict = verdicts.get(arm.name)
        figures = [_accuracy(arm, data.arms)] if arm.rounds else []
        if arm.name in changes:
            note = "relative distance of the attacked update to the undefended one"
            figures.append(CardValue("Distortion", format_number(changes[arm.name], 3), note))
        components = " → ".join(map(component_text, arm.components)) or "no defence"
        figures.append(_leakage(data, verdict, texts))
        if verdict and verdict.state == State.LEAKS:
            leaking.append(Card(arm.name, components, figures, pairs.get(arm.name), _source(verdict)))
        else:
            others.append(Card(arm.name, components, figures, None, ""))
    return [*leaking, *others]


def _accuracy(arm: ArmSummary, arms: Sequence[ArmSummary]) -> CardValue:
    return CardValue("Test accuracy", format_share(arm.accuracy), quality_note(arm, arms))


def _leakage(data: RunData, verdict: Verdict | None, texts: bool) -> CardValue:
    """Return the best reconstruction of an arm, its best inference, or its verdict."""
    if verdict is None:
        return CardValue("Leakage", "not measured", is_text=True)
    row = verdict.closest
    if verdict.state == State.LEAKS and row:
        return CardValue("Best reconstruction", format_similarity(row), f"by {row['attack']}", is_text=texts)
    if verdict.only_inferences:
        return CardValue("Inference", badge_text(verdict), is_text=True)
    note = ""
    if row:
        criterion = data.evidence.criterion
        note = f"max {format_similarity(row)}, {judgement_text(criterion, criterion.judge(row))}"
    return CardValue("Leakage", verdict.state, note, is_text=True)


def _source(verdict: Verdict) -> str:
    row = verdict.closest
    assert row is not None
    given = attack_input_text(attack_input([row]))
    return f"Client {row['victim']}, round {row['round'] + 1}. Given to the attack: {given}."
