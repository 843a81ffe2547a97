"""Report of a sweep: one HTML file, written from the outcomes and the tables of the trials.

It can be written while the sweep runs; it then has the finished trials only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rayfed.errors import noting_errors
from rayfed.evidence.arms import arm_names, is_secure
from rayfed.evidence.criteria import Criterion, infer_noun
from rayfed.evidence.knowledge_pairs import failed_attacks, mark_outdone
from rayfed.evidence.label_mix import compute_label_mix
from rayfed.evidence.paired import compare_pairs, group_by_seed
from rayfed.evidence.rows import Row, is_measured
from rayfed.evidence.settings import Setting, group_settings
from rayfed.evidence.spread import Spread, measure_spread
from rayfed.evidence.verdicts import choose_criterion, find_closest
from rayfed.metrics.measures import MEASURES
from rayfed.report.html.explorer import PREFERRED, Explorer, explore
from rayfed.report.html.page import (
    Gallery,
    Page,
    Summary,
    flatten_settings,
    make_failure,
    optional_document,
    write_page,
)
from rayfed.report.html.pictures import (
    SHOWN,
    PicturePair,
    picture_key,
    read_pictures,
    read_strips,
    select_most_leaked,
    select_within,
)
from rayfed.report.html.sweep_plots import Curve, plot_curves
from rayfed.report.samples import make_sweep_filter
from rayfed.report.text.batch_sizes import label_grid
from rayfed.report.text.cells import PageCell, PageColumn, PageTable
from rayfed.report.text.formats import NONE, format_bytes, format_count, format_duration
from rayfed.report.text.guarantees import short_keys_text
from rayfed.report.text.knowledge_pairs import failed_attack_text
from rayfed.report.text.leakage import LIMITS, leak_text
from rayfed.report.text.paired import paired_grid
from rayfed.report.text.sweeps import sweep_summary, sweep_verdicts, unfinished_trials_text
from rayfed.report.text.tables import Grid
from rayfed.report.text.verdicts import guess
from rayfed.results.sweep_folder import SweepFolder
from rayfed.store import exits
from rayfed.store.finding import State
from rayfed.store.folder import SCENARIO, RunFolder

IMAGES = 7_500_000
"""Maximum number of characters of images in a page; with Plotly (4.8 million), pages stay below 15 million."""


@dataclass(frozen=True)
class Nearest:
    """Best reconstruction by an attack in one trial of a sweep."""

    title: str
    """Title of the trial's setting."""
    run: str
    row: Row
    """Row of the trial's table `attacks`."""


@dataclass(frozen=True)
class TrialSection:
    """Trials of a sweep."""

    unfinished: PageTable | None
    rows: Sequence[Row]
    """Outcomes of the sweep."""
    measures: Sequence[str]
    """Names of the measures in the table."""


@dataclass(frozen=True)
class SweepPage(Page):
    """Contents of the page of a sweep."""

    verdicts: Sequence[tuple[State, str]]
    """Pairs (state, sentence)."""
    unplayed: str
    """Trials that are not finished."""
    notes: Sequence[str]
    """Attacks that failed, and the meaning of the verdicts."""
    labels: Grid | None
    """Labels recovered by batch size."""
    curves: Sequence[Curve]
    trials: TrialSection
    costs: PageTable | None


def write_sweep_report(sweep: SweepFolder, redacted: bool = False) -> str:
    """Write `report.html` of a sweep and return the path or URL of the page."""
    url = "RUN" if redacted else sweep.url
    return write_page(sweep.files, "sweep_report.html.j2", make_sweep_page(sweep, url), redacted)


def try_sweep_report(sweep: SweepFolder, note: Callable[[str], object]) -> str | None:
    """Write the report of a sweep and return the path; on an error, pass a note to `note` and return None."""
    page = None
    again = f"the results are kept; to try again: `rayfed report {sweep.url}`"
    with noting_errors(lambda why: note(f"the report of the sweep could not be written: {why}; {again}")):
        page = write_sweep_report(sweep)
    return page


def make_sweep_page(sweep: SweepFolder, url: str) -> SweepPage:
    """Return the contents of a sweep's page; `url` is the name of the sweep in commands."""
    scenario, status, rows = sweep.scenario, exits.read_status(sweep.files), sweep.outcomes().to_pylist()
    found = mark_outdone(group_settings(rows, sweep.fields, scenario=scenario), scenario)
    unfinished = [row for row in rows if row["status"] != "finished"]
    explorer = explore(found, unfinished, sweep.fields, _preferred(scenario))
    axes = [name for name in (explorer.x, explorer.y) if name]
    arms, noun = arm_names(scenario, rows), infer_noun(rows)
    first = next((sweep.trial(row["run"]) for row in rows if row["run"]), sweep.files)
    reader = _SampleReader(sweep, found, first)
    criterion = choose_criterion(scenario, [one.row for one in reader.nearest])
    gallery, pair, worst = _make_gallery(reader, explorer, arms, criterion, noun)
    classes = gallery.classes if gallery.samples.truth else None
    entries = sweep_summary(found, (worst.title, worst.row) if worst else None, criterion, classes, arms)
    lines = plot_curves(found, axes, arms)
    machine = optional_document(sweep.files, "environment.json") or optional_document(first, "environment.json")
    failed = [failed_attack_text(one) for one in failed_attacks(found)]
    state = status.get("state", "unknown")
    return SweepPage(
        name=str(scenario.get("name", sweep.files.name)),
        state=state,
        badge=state,
        lead=_lead(rows, sweep.fields, arms),
        sections=_sections(noun, bool(lines)),
        failure=make_failure(status, "sweep", url, "The sweep did not finish"),
        arms=arms,
        noun=noun,
        criterion=criterion,
        summary=Summary(_warnings(sweep, rows, gallery, pair), entries, pair),
        explorer=explorer,
        paired=_paired(found, axes),
        gallery=gallery,
        environment=list(flatten_settings(machine)),
        scenario=sweep.files.read_text(SCENARIO),
        secure=is_secure(scenario),
        verdicts=sweep_verdicts(found),
        unplayed=unfinished_trials_text(status),
        notes=[*failed, f"{leak_text(criterion)} {guess(scenario, rows)} {LIMITS}"],
        labels=label_grid(found),
        curves=lines,
        trials=TrialSection(
            unfinished=_unfinished_table(unfinished, sweep.fields) if unfinished else None,
            rows=rows,
            measures=[*axes, "train_seconds"],
        ),
        costs=_cost_table(rows, arms),
    )


def _preferred(scenario: Row) -> list[str]:
    """Return the measures of the first axes: the sweep's objectives, then the default."""
    objectives = [name for name in scenario["sweep"].get("objectives") or () if name in MEASURES]
    return [*objectives, *PREFERRED]


def _warnings(sweep: SweepFolder, rows: Sequence[Row], gallery: Gallery, pair: PicturePair | None) -> list[str]:
    warnings = short_keys_text(sweep.scenario, _key_lengths(rows, sweep.fields))
    if gallery.samples.warning and (pair or gallery.strips or gallery.pairs):
        warnings.append(gallery.samples.warning)
    return warnings


def _paired(found: Sequence[Setting], axes: Sequence[str]) -> Grid | None:
    """Return the differences between arms with the same seeds."""
    differences = compare_pairs(group_by_seed(found))
    return paired_grid([one for one in differences if one.measure in axes])


def _lead(rows: Sequence[Row], fields: Sequence[str], arms: Sequence[str]) -> str:
    """Return the extent of a sweep: fields, trials by state, and arms."""
    numbers = {}
    for state in ("finished", "stopped", "failed"):
        numbers[state] = _count_trials(row for row in rows if row["status"] == state)
    parts = [f"{format_count(numbers['finished'], 'trial')} finished"]
    if numbers["stopped"]:
        parts.append(f"{numbers['stopped']} stopped early")
    if numbers["failed"]:
        parts.append(f"{numbers['failed']} failed")
    if len(arms) > 1:
        parts.append(f"in {len(arms)} arms")
    subject = f"A sweep over {', '.join(fields)}" if fields else "Repeats of one scenario"
    return f"{subject}: {', '.join(parts)}."


def _sections(noun: str, has_curves: bool) -> list[tuple[str, str]]:
    sections = [("verdicts", "Verdict"), ("summary", "Summary"), ("trade-off", "Trade-off")]
    sections.append(("samples", f"{noun.capitalize()}s"))
    if has_curves:
        sections.append(("fields", "Fields"))
    last = [("trials", "Trials"), ("cost", "Cost"), ("environment", "Environment"), ("scenario", "Scenario")]
    return [*sections, *last]


class _SampleReader:
    """Reader of the samples of a sweep's trials."""

    def __init__(self, sweep: SweepFolder, found: Sequence[Setting], first: RunFolder) -> None:
        """Create a reader for the settings of a sweep; `first` is the first trial."""
        self.sweep, self.first, self._settings = sweep, first, found
        self.samples = make_sweep_filter(sweep)
        self.attacks = lru_cache(maxsize=8)(self._read_attacks)  # requests for one trial follow each other
        self.nearest = self._find_nearest(first_repeat=False)

    def _read_attacks(self, run: str) -> list[Row]:
        return list(self.sweep.trial(run).read_table("attacks").to_pylist())

    def own_attacks(self, run: str, one: Setting) -> list[Row]:
        """Return the rows of `attacks` of a trial for one setting."""
        return [row for row in self.attacks(run) if (row["arm"], row["attack"]) == (one.arm, one.attack)]

    def _find_nearest(self, first_repeat: bool) -> list[Nearest]:
        """Return the best reconstruction of each trial and attack, of the first repeat of the attack or of all."""
        found = []
        for one in self._settings:
            for run in _runs(one):
                rows = [row for row in self.own_attacks(run, one) if not first_repeat or not row.get("repeat")]
                if row := find_closest(rows, choose_criterion(self.sweep.scenario, rows)):
                    found.append(Nearest(one.title, run, row))
        return found

    def worst_keys(self, arms: Sequence[str], criterion: Criterion) -> set[tuple[Any, ...]]:
        """Return the keys of the best reconstruction of each arm among those that have images."""
        drawn = self._find_nearest(first_repeat=True)
        keys = set()
        for arm in arms:
            if one := _closest([each for each in drawn if each.row["arm"] == arm], criterion):
                keys.add((one.run, *picture_key(one.row)))
        return keys


def _make_gallery(
    reader: _SampleReader, explorer: Explorer, arms: Sequence[str], criterion: Criterion, noun: str
) -> tuple[Gallery, PicturePair | None, Nearest | None]:
    """Return the samples, and the best reconstruction with its images; `noun` names the samples."""
    samples = reader.samples
    worst = _closest(reader.nearest, criterion)
    pair, progress = None, []
    if worst:
        trial = reader.sweep.trial(worst.run)
        pair = read_pictures(trial, [worst.row], samples).get(picture_key(worst.row))
        progress = read_strips(trial, samples, {picture_key(worst.row)})
    every = _pairs(reader, explorer, reader.worst_keys(arms, criterion))
    shown = select_within(every, IMAGES)
    hidden = sum(map(len, every)) - len(shown)
    note = ""
    if shown:
        note = "Reconstructions with the highest PSNR of each setting and attack, over all repeats."
        if hidden:
            note += f" {hidden} more are only in the trials' tables, to keep the page small."
    mix = compute_label_mix(reader.first.read_table("partition"))
    empty = "" if noun == "image" or shown else f"The trials’ tables have the reconstructed {noun}s."
    return Gallery(samples, note, mix.classes if mix else {}, shown, progress, empty=empty), pair, worst


def _runs(setting: Setting) -> list[str]:
    """Return the run folders of the trials in which a setting was attacked."""
    return [row["run"] for row in setting.rows if row.get("run")] if setting.attack else []


def _closest(nearest: Sequence[Nearest], criterion: Criterion) -> Nearest | None:
    """Return the best of these reconstructions, among leaks if there are any."""
    row = find_closest([one.row for one in nearest], criterion)
    return next((one for one in nearest if one.row is row), None)


def _pairs(reader: _SampleReader, explorer: Explorer, worst: Collection[tuple[Any, ...]]) -> list[list[PicturePair]]:
    """Return the best reconstructions of each setting and attack over all repeats, if the page may show them.

    `worst` are the keys of those that are shown if `output.images` is `worst`.
    """
    found = []
    for entry in explorer.entries:
        one = entry.setting
        pairs: list[PicturePair] = []
        for run in _runs(one):
            if reader.samples.mode == "worst":
                rows = [row for row in reader.own_attacks(run, one) if (run, *picture_key(row)) in worst]
            else:
                rows = select_most_leaked(reader.attacks(run), one.arm, one.attack)
            pairs += read_pictures(reader.sweep.trial(run), rows, reader.samples).values()
        named = [replace(pair, entry=entry.id, title=entry.title) for pair in pairs]
        found.append(sorted(named, key=_psnr, reverse=True)[:SHOWN])
    return found


def _psnr(pair: PicturePair) -> float:
    value = pair.row["psnr"]
    return float(value) if is_measured(value) else float("-inf")


def _unfinished_table(rows: Sequence[Row], fields: Sequence[str]) -> PageTable:
    columns = [PageColumn(title, is_text=True) for title in ("Trial", "Values", "Status", "Reason")]
    cells = []
    for row in rows:
        values = ", ".join(f"{field} = {row[field]}" for field in fields if row[field] is not None)
        reason = row["error"] or "no reason given"
        trial = PageCell(str(row["trial"]), f"seed {row['seed']}")
        cells.append((row["arm"], [trial, PageCell(values), PageCell(row["status"]), PageCell(reason)]))
    return PageTable(columns, cells)


def _cost_table(rows: Sequence[Row], arms: Sequence[str]) -> PageTable | None:
    """Return the costs of each arm over the trials; None without trials."""
    if not arms:
        return None
    titles = ("Trials", "Training", "Attack", "Clients → server", "Server → clients")
    cells = []
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        trials = list({(row["trial"], row["repeat"]): row for row in own}.values())
        costs = [
            _cost_cell(measure_spread(row["train_seconds"] for row in trials), format_duration),
            _cost_cell(measure_spread(row["attack_seconds"] for row in own), format_duration),
            _cost_cell(measure_spread(row["bytes_up"] for row in trials), format_bytes),
            _cost_cell(measure_spread(row["bytes_down"] for row in trials), format_bytes),
        ]
        cells.append((arm, [PageCell(str(len(trials))), *costs]))
    return PageTable([PageColumn(title) for title in titles], cells)


def _cost_cell(value: Spread | None, form: Callable[[float], str]) -> PageCell:
    """Return a mean, with the range of several values."""
    if value is None:
        return PageCell(NONE)
    return PageCell(form(value.mean), f"{form(value.low)} to {form(value.high)}" if value.n > 1 else "")


def _count_trials(rows: Iterable[Row]) -> int:
    return len({(row["trial"], row["repeat"]) for row in rows})


def _key_lengths(rows: Sequence[Row], fields: Sequence[str]) -> set[int]:
    paths = [path for path in fields if path.rpartition(".")[2] == "key_bits"]
    return {row[path] for row in rows for path in paths if isinstance(row[path], int)}
