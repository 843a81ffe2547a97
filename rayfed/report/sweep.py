"""Report of a sweep: one HTML file, written from the outcomes and the tables of the trials.

It can be written while the sweep runs; it then has the finished trials only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rayfed.analysis.sweep_folder import SweepFolder
from rayfed.errors import noting_errors
from rayfed.evidence.arms import arm_names, is_secure
from rayfed.evidence.criteria import Criterion, noun_of
from rayfed.evidence.knowledge_pairs import failed_attacks, mark_outdone
from rayfed.evidence.label_mix import compute_label_mix
from rayfed.evidence.paired import compare_pairs, group_by_seed
from rayfed.evidence.rows import Row, measured
from rayfed.evidence.settings import Setting, settings
from rayfed.evidence.spread import Spread, measure_spread
from rayfed.evidence.verdicts import closest, criterion_of
from rayfed.metrics.measures import MEASURES
from rayfed.report.explorer import PREFERRED, Explorer, explore
from rayfed.report.page import flat, optional_document, write_page
from rayfed.report.pictures import SHOWN, Pair, key, most_leaked, pictures, strips, within
from rayfed.report.samples import Samples, of_sweep
from rayfed.report.sweep_plots import curves
from rayfed.report.text.batch_sizes import label_grid
from rayfed.report.text.guarantees import short_keys_text
from rayfed.report.text.knowledge_pairs import failed_attack_text
from rayfed.report.text.leakage import LIMITS, leak_text
from rayfed.report.text.paired import paired_grid
from rayfed.report.text.sweeps import sweep_summary, sweep_verdicts, unfinished_trials_text
from rayfed.report.text.verdicts import guess
from rayfed.store import exits
from rayfed.store.folder import SCENARIO

IMAGES = 7_500_000
"""Maximum number of characters of images in a page; with Plotly (4.8 million), pages stay below 15 million."""


_STATES = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class Nearest:
    """Best reconstruction by an attack in one trial of a sweep."""

    title: str
    """Title of the trial's setting."""
    run: str
    row: Row
    """Row of the trial's table `attacks`."""


@dataclass(frozen=True)
class Cost:
    """Costs of one arm over the trials of a sweep."""

    arm: str
    trials: int
    training: Spread | None
    attacking: Spread | None
    up: Spread | None
    down: Spread | None


def write_sweep_report(sweep: SweepFolder, redacted: bool = False) -> str:
    """Write `report.html` of a sweep and return the path or URL of the page."""
    contents = _contents(sweep) | {"redacted": redacted}
    return write_page(sweep.files, "sweep_report.html.j2", contents, plotting=contents["explorer"].x is not None)


def try_sweep_report(sweep: SweepFolder, note: Callable[[str], object]) -> str | None:
    """Write the report of a sweep and return the path; on an error, pass a note to `note` and return None."""
    page = None
    again = f"the results are kept; to try again: `rayfed report {sweep.url}`"
    with noting_errors(lambda why: note(f"the report of the sweep could not be written: {why}; {again}")):
        page = write_sweep_report(sweep)
    return page


def _contents(sweep: SweepFolder) -> dict[str, Any]:
    """Return the variables of the template."""
    scenario, fields, rows = sweep.scenario, sweep.fields, sweep.outcomes().to_pylist()
    unfinished = [row for row in rows if row["status"] != "finished"]
    found = mark_outdone(settings(rows, fields, scenario=scenario), scenario)
    preferred = [name for name in scenario["sweep"].get("objectives") or PREFERRED if name in MEASURES]
    explorer = explore(found, unfinished, fields, [*preferred, *PREFERRED])
    arms = arm_names(scenario, rows)
    samples = of_sweep(sweep)

    @lru_cache(maxsize=8)  # requests for one trial follow each other
    def attacks(run: str) -> list[Row]:
        return list(sweep.trial(run).read_table("attacks").to_pylist())

    nearest = _nearest(scenario, found, attacks)
    criterion = criterion_of(scenario, [one.row for one in nearest])
    told = _closest(nearest, criterion)
    worst = told and pictures(sweep.trial(told.run), [told.row], samples).get(key(told.row))
    drawn = _nearest(scenario, found, lambda run: [row for row in attacks(run) if not row.get("repeat")])
    of_arms = [_closest([one for one in drawn if one.row["arm"] == arm], criterion) for arm in arms]
    every = _pairs(sweep, explorer, samples, attacks, {(one.run, *key(one.row)) for one in of_arms if one})
    on_the_way = strips(sweep.trial(told.run), samples, {key(told.row)}) if told else []
    first = next((sweep.trial(row["run"]) for row in rows if row["run"]), sweep.files)
    mix = compute_label_mix(first.read_table("partition"))
    machine = optional_document(sweep.files, "environment.json") or optional_document(first, "environment.json")
    classes = mix.classes if mix else {}
    shown = within(every, IMAGES)
    pairs = compare_pairs(group_by_seed(found))
    return {
        "name": str(scenario.get("name", sweep.files.name)),
        "status": exits.status(sweep.files),
        "states": {state: _trials(row for row in rows if row["status"] == state) for state in _STATES},
        "arm_names": arms,
        "verdicts": sweep_verdicts(found),
        "unplayed": unfinished_trials_text(exits.status(sweep.files)),
        "failures": [failed_attack_text(one) for one in failed_attacks(found)],
        "statements": sweep_summary(
            found, (told.title, told.row) if told else None, criterion, classes if samples.truth else None, arms
        ),
        "secure": is_secure(scenario),
        "warnings": short_keys_text(scenario, _key_lengths(rows, fields))
        + ([samples.warning] if samples.warning and (worst or on_the_way or any(every)) else []),
        "samples": samples,
        "criterion": criterion,
        "leak": f"{leak_text(criterion)} {guess(scenario, rows)} {LIMITS}",
        "noun": noun_of(rows),
        "worst": worst,
        "strips": on_the_way,
        "explorer": explorer,
        "paired": paired_grid([one for one in pairs if one.measure in (explorer.x, explorer.y)]),
        "labels": label_grid(found),
        "pairs": shown,
        "hidden": sum(map(len, every)) - len(shown),
        "class_names": classes,
        "fields": fields,
        "trials": rows,
        "columns": [name for name in (explorer.x, explorer.y, "train_seconds") if name],
        "curves": curves(found, [name for name in (explorer.x, explorer.y) if name], arms),
        "costs": [_cost(arm, [row for row in rows if row["arm"] == arm]) for arm in arms],
        "unfinished": unfinished,
        "environment": list(flat(machine)),
        "scenario": sweep.files.read_text(SCENARIO),
    }


def _runs(setting: Setting) -> list[str]:
    """Return the run folders of the trials in which a setting was attacked."""
    return [row["run"] for row in setting.rows if row.get("run")] if setting.attack else []


def _nearest(scenario: Row, found: Sequence[Setting], attacks: Callable[[str], Sequence[Row]]) -> list[Nearest]:
    """Return the best reconstruction of each trial and attack."""
    met = []
    for one in found:
        for run in _runs(one):
            mine = [row for row in attacks(run) if (row["arm"], row["attack"]) == (one.arm, one.attack)]
            if row := closest(mine, criterion_of(scenario, mine)):
                met.append(Nearest(one.title, run, row))
    return met


def _closest(nearest: Sequence[Nearest], criterion: Criterion) -> Nearest | None:
    """Return the best of these reconstructions, among leaks if there are any."""
    row = closest([one.row for one in nearest], criterion)
    return next((one for one in nearest if one.row is row), None)


def _pairs(
    sweep: SweepFolder,
    explorer: Explorer,
    samples: Samples,
    attacks: Callable[[str], Sequence[Row]],
    worst: Collection[tuple[Any, ...]],
) -> list[list[Pair]]:
    """Return the best reconstructions of each setting and attack over all repeats, if the page may show them.

    `worst` are the keys of those that are shown if `output.images` is `worst`.
    """

    def chosen(run: str, one: Setting) -> list[Row]:
        if samples.mode != "worst":
            return most_leaked(attacks(run), one.arm, one.attack)
        mine = [row for row in attacks(run) if (row["arm"], row["attack"]) == (one.arm, one.attack)]
        return [row for row in mine if (run, *key(row)) in worst]

    found = []
    for entry in explorer.entries:
        one: Setting = entry.setting
        pairs = [
            replace(pair, entry=entry.id, title=entry.title)
            for run in _runs(one)
            for pair in pictures(sweep.trial(run), chosen(run, one), samples).values()
        ]
        found.append(sorted(pairs, key=_psnr, reverse=True)[:SHOWN])
    return found


def _psnr(pair: Pair) -> float:
    value = pair.row["psnr"]
    return float(value) if measured(value) else float("-inf")


def _cost(arm: str, rows: Sequence[Row]) -> Cost:
    trials = {(row["trial"], row["repeat"]): row for row in rows}.values()
    return Cost(
        arm,
        len(trials),
        measure_spread(row["train_seconds"] for row in trials),
        measure_spread(row["attack_seconds"] for row in rows),
        measure_spread(row["bytes_up"] for row in trials),
        measure_spread(row["bytes_down"] for row in trials),
    )


def _trials(rows: Iterable[Row]) -> int:
    return len({(row["trial"], row["repeat"]) for row in rows})


def _key_lengths(rows: Sequence[Row], fields: Sequence[str]) -> set[int]:
    paths = [path for path in fields if path.rpartition(".")[2] == "key_bits"]
    return {row[path] for row in rows for path in paths if isinstance(row[path], int)}
