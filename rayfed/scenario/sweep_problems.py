"""Problems of the section `sweep`."""

from __future__ import annotations

from collections.abc import Iterator

from rayfed.analysis.outcomes import COLUMNS, MEASURES
from rayfed.errors import nearest
from rayfed.scenario.problems import Problem
from rayfed.scenario.sections import Scenario
from rayfed.scenario.sweep import Range


def sweep_problems(s: Scenario) -> Iterator[Problem]:
    """Yield problems of the section `sweep`, beyond single fields."""
    sweep = s.sweep
    if sweep is None:
        return
    if not sweep.fields and (sweep.repeats == 1 or sweep.search != "grid"):
        message = "nothing varies: name a field and its values, or set `repeats` for several seeds"
        yield Problem(path=("sweep", "fields"), message=message)
    for path, values in sweep.fields.items():
        if path.startswith("arms.") and s.owner_of(path)[0] is None:
            known = path.removeprefix("arms.") in s.arms
            message = f"no arm of that name: {nearest(path.split('.')[1], list(s.arms))}"
            message = "name a field of the arm, such as its `defences`" if known else message
            yield Problem(path=("sweep", "fields", path), message=message)
        if "." not in path and path in (*COLUMNS, "arms", "attacks", "opponents"):
            message = "cannot vary as a whole: name a field in it, or make arms of what shall vary"
            yield Problem(path=("sweep", "fields", path), message=message)
        if path.partition(".")[0] in ("sweep", "seed", "name", "output", "resources"):
            yield Problem(path=("sweep", "fields", path), message="cannot vary; `repeats` varies the seed")
        if not isinstance(values, Range):
            continue
        if values.low >= values.high or (values.scale == "log" and values.low <= 0):
            message = f"expected low < high, and low above 0 on a log scale: found {values.low:g} and {values.high:g}"
            yield Problem(path=("sweep", "fields", path), message=message)
        if values.whole and (values.low % 1 or values.high % 1):
            message = f"expected whole ends: found {values.low:g} and {values.high:g}"
            yield Problem(path=("sweep", "fields", path), message=message)
        if sweep.search == "grid":
            message = "a grid needs the values in a list, or `search` random or optuna"
            yield Problem(path=("sweep", "fields", path), message=message)
    if (sweep.search == "grid") != (sweep.samples is None):
        message = "a grid is tried whole: leave it out" if sweep.search == "grid" else "how many settings to try?"
        yield Problem(path=("sweep", "samples"), message=message)
    for name in sweep.objectives:
        if name not in MEASURES:
            message = f"found '{name}': {nearest(name, list(MEASURES))}"
        elif name in ("pmm", "epsilon"):
            message = f"{name} is not known of every trial by itself: take test_accuracy, or a measure of leakage"
        elif sweep.search == "optuna" and MEASURES[name].kind == "leakage" and not s.attacks:
            message = f"nothing measures {name}: the scenario has no `attacks`"
        else:
            continue
        yield Problem(path=("sweep", "objectives"), message=message)
    if "api_key" in sweep.trackers.get("wandb", {}):
        message = "would stand in every report: set the environment variable WANDB_API_KEY instead"
        yield Problem(path=("sweep", "trackers", "wandb", "api_key"), message=message)
    if sweep.scheduler and s.opponents:
        yield Problem(
            path=("sweep", "scheduler"), message="judges one training a trial; with `opponents` it has several"
        )
    if sweep.search == "optuna" and sweep.scheduler and sweep.repeats > 1:
        message = "optuna judges the mean of all repeats, which a scheduler would cut: leave one of them out"
        yield Problem(path=("sweep", "scheduler"), message=message)
