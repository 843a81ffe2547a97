"""Report of a run: one self-contained HTML file, written from the tables of the run's folder.

It reads the tables, `scenario.yaml` and, if present, `environment.json` and `status.json` (`state`, `rounds_done`,
`rounds`, `error`). For a failed or unfinished run it shows the results so far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rayfed.errors import RunError
from rayfed.evidence.attack_results import leading_metric
from rayfed.evidence.criteria import infer_noun
from rayfed.evidence.knowledge_pairs import failed_attacks, mark_outdone
from rayfed.evidence.outcomes import compute_outcomes
from rayfed.evidence.paired import compare_pairs, group_by_victim
from rayfed.evidence.rows import Row
from rayfed.evidence.settings import Setting, group_settings
from rayfed.evidence.verdicts import find_closest, write_verdicts
from rayfed.evidence.victims import victims_by_attack
from rayfed.report.html.explorer import Explorer, explore, select_answered
from rayfed.report.html.page import (
    Failure,
    Gallery,
    Page,
    Summary,
    flatten_settings,
    make_failure,
    optional_document,
    write_page,
)
from rayfed.report.html.passages import read_passages
from rayfed.report.html.pictures import PicturePair, picture_key, read_pictures, read_strips, select_most_leaked
from rayfed.report.html.run_data import RunData
from rayfed.report.html.run_guarantees import GuaranteeSection, make_guarantee_section, make_robustness_table
from rayfed.report.html.run_leakage import LeakageSection, make_leakage_section
from rayfed.report.html.run_overview import Card, VerdictSection, make_cards, make_verdict_section
from rayfed.report.html.run_training import (
    ClientSection,
    CostSection,
    TrainingSection,
    make_client_section,
    make_cost_section,
    make_training_section,
)
from rayfed.report.text.cells import PageTable
from rayfed.report.text.formats import format_count
from rayfed.report.text.guarantees import short_keys_text
from rayfed.report.text.knowledge_pairs import failed_attack_text
from rayfed.report.text.paired import paired_grid
from rayfed.report.text.summary import run_summary, subject_text
from rayfed.report.text.tables import Grid
from rayfed.report.text.training import extent_text
from rayfed.store.exits import advise_on_state
from rayfed.store.folder import RunFolder


@dataclass(frozen=True)
class RunPage(Page):
    """Contents of the page of a run."""

    verdicts: VerdictSection
    cards: Sequence[Card]
    guarantees: GuaranteeSection | None
    robustness: PageTable | None
    leakage: LeakageSection
    tested: bool
    """Whether the accuracy of an arm is known."""
    training: TrainingSection | None
    """None if only updates were attacked."""
    clients: ClientSection | None
    cost: CostSection


def write_report(folder: RunFolder, redacted: bool = False) -> str:
    """Write `report.html` of a run and return the path or URL of the page.

    If `redacted`, the folder is a copy (`rayfed.report.export.redaction`), and the page lists the parts that are left
    out. Raises `RunError` if a table cannot be read or the page cannot be written.
    """
    data = RunData(folder)
    if data.state != "running":  # also for a run of an earlier version, or one that was killed
        with suppress(RunError):  # the page computes verdicts that are not stored
            write_verdicts(folder)
    return write_page(folder, "report.html.j2", make_run_page(data, "RUN" if redacted else folder.url), redacted)


def make_run_page(data: RunData, url: str) -> RunPage:
    """Return the contents of a run's page; `url` is the name of the run in commands."""
    status, planned = data.status, data.status.get("rounds")
    compared = mark_outdone(group_settings(_rows_with_verdicts(data)), data.scenario)
    explorer, noun = explore(select_answered(compared)), infer_noun(data.attacks)
    nearest = [verdict.closest for verdict in data.evidence.verdicts if verdict.closest]
    gallery = _make_gallery(data, explorer, {picture_key(row) for row in nearest})
    found = read_pictures(data.folder, nearest, data.samples)
    pairs = {row["arm"]: found.get(picture_key(row)) for row in nearest}
    guarantees, robustness = make_guarantee_section(data), make_robustness_table(data)
    # Verdicts of audits already combine the attackers.
    failures = [] if data.is_audit else [failed_attack_text(one) for one in failed_attacks(compared)]
    leakage = make_leakage_section(data, noun)
    todo = "" if data.state == "finished" else advise_on_state(data.state, status.get("kind"), url)
    known = data.trained or any(verdict.answered for verdict in data.evidence.verdicts)
    return RunPage(
        name=str(data.scenario.get("name", data.folder.name)),
        state=data.state,
        badge=data.state if known or data.state != "finished" else "",
        lead=f"{extent_text(planned, data.arms, data.mix)} {subject_text(data.scenario, status, data.attacks)}",
        sections=_sections(explorer, noun, guarantees, robustness, planned != 0),
        failure=_failure(data, url),
        arms=data.names,
        noun=noun,
        criterion=data.evidence.criterion,
        summary=_make_summary(data, gallery, leakage, find_closest(nearest, data.evidence.criterion), pairs),
        explorer=explorer,
        paired=_paired(data, compared),
        gallery=gallery,
        environment=list(flatten_settings(optional_document(data.folder, "environment.json"))),
        scenario=data.folder.scenario_text(),
        secure=data.secure,
        verdicts=make_verdict_section(data, todo, failures, url),
        cards=make_cards(data, pairs, bool(gallery.passages)),
        guarantees=guarantees,
        robustness=robustness,
        leakage=leakage,
        tested=data.tested,
        training=None if planned == 0 else make_training_section(data),
        clients=make_client_section(data.mix),
        cost=make_cost_section(data, noun),
    )


def _rows_with_verdicts(data: RunData) -> list[Row]:
    """Return the outcomes of a run, with the verdict on the arm instead of that of the attack."""
    states = {verdict.arm: verdict.state for verdict in data.evidence.verdicts}
    return [row | {"verdict": states.get(row["arm"], row["verdict"])} for row in compute_outcomes(data.folder)]


def _paired(data: RunData, compared: Sequence[Setting]) -> Grid | None:
    """Return the differences between arms on the same victims."""
    victims = victims_by_attack(data.attacks, data.inferences, data.names, data.closed)
    measures = (leading_metric(data.attacks), "inferred")
    differences = compare_pairs(group_by_victim(victims, compared))
    return paired_grid([one for one in differences if one.measure in measures])


def _sections(
    explorer: Explorer,
    noun: str,
    guarantees: GuaranteeSection | None,
    robustness: PageTable | None,
    trained: bool,
) -> list[tuple[str, str]]:
    sections = [("verdicts", "Verdict"), ("summary", "Summary"), ("overview", "Overview")]
    if guarantees:
        sections.append(("privacy", "Guarantees"))
    if robustness:
        sections.append(("robustness", "Robustness"))
    sections.append(("leakage", "Leakage"))
    if explorer.entries:
        sections.append(("trade-off", "Trade-off" if explorer.x else "Measures"))
    sections.append(("samples", f"{noun.capitalize()}s"))
    if trained:
        sections.append(("training", "Training"))
    last = [("clients", "Clients"), ("cost", "Cost"), ("environment", "Environment"), ("scenario", "Scenario")]
    return [*sections, *last]


def _failure(data: RunData, url: str) -> Failure | None:
    done = data.status.get("rounds_done")
    after = ""
    if data.status.get("rounds") != 0 and done is not None:
        after = f" after {format_count(done, 'complete round')}"
    state = "failed" if data.state == "failed" else f"was {data.state}"
    return make_failure(data.status, data.status.get("kind"), url, f"The run {state}{after}")


def _make_summary(
    data: RunData, gallery: Gallery, leakage: LeakageSection, worst: Row | None, pairs: dict[str, PicturePair | None]
) -> Summary:
    """Return the summary; `worst` is the row of the best reconstruction, `pairs` are images by arm."""
    classes = gallery.classes if data.samples.truth else None
    entries = run_summary(
        data.arms, worst if data.attacks else None, data.evidence.criterion, data.privacy, classes, data.secure
    )
    generated = leakage.inferences.generated if leakage.inferences else []
    embedded = gallery.pairs or gallery.strips or gallery.passages or generated
    warnings = short_keys_text(data.scenario)
    if data.samples.warning and embedded:
        warnings.append(data.samples.warning)
    if worst is None:
        return Summary(warnings, entries, None)
    passage = next((one for one in gallery.passages if picture_key(one.row) == picture_key(worst)), None)
    return Summary(warnings, entries, pairs.get(worst["arm"]), passage)


def _make_gallery(data: RunData, explorer: Explorer, worst: Collection[tuple[Any, ...]]) -> Gallery:
    """Return the samples; `worst` are the keys of those that are shown if `output.images` is `worst`."""
    pairs = _pairs(data, explorer, worst)
    hidden = max(sum(leak.images for leak in data.leaks) - len(pairs), 0)
    note = ""
    if pairs:
        note = "Reconstructions with the highest PSNR of each arm and attack, from the first repeat."
        if hidden:
            note += f" {hidden} more are only in the tables."
    return Gallery(
        samples=data.samples,
        note=note,
        classes=data.mix.classes if data.mix else {},
        pairs=pairs,
        strips=read_strips(data.folder, data.samples, worst),
        passages=read_passages(data.folder, data.attacks, data.samples, worst),
    )


def _pairs(data: RunData, explorer: Explorer, worst: Collection[tuple[Any, ...]]) -> list[PicturePair]:
    """Return the images with the highest scores of every arm and attack; `worst` is as in `_make_gallery`."""
    chosen = []
    for entry in explorer.entries:
        for row in select_most_leaked(data.attacks, entry.setting.arm, entry.setting.attack):
            if data.samples.mode != "worst" or picture_key(row) in worst:
                chosen.append((row, entry))
    found = read_pictures(data.folder, [row for row, _ in chosen], data.samples)
    return [
        replace(found[picture_key(row)], entry=entry.id, title=entry.title)
        for row, entry in chosen
        if picture_key(row) in found
    ]
