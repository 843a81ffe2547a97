"""Run the audit on the planted leaks and controls, and print the share of plants found.

python -m tests.helpers.planted.measure [--only PATTERN ...] [--seed 0] [--minutes 0.4] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatch

from rayfed.report.text.reasons import attack_text
from tests.helpers.planted.plants import CONTROLS, PLANTS, UNSOUND, Result, audit


def main() -> None:
    """Print one line for each plant and control, then the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of names, such as 'control*'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.4, help="time of each audit")
    parser.add_argument("--out", help="folder that keeps the runs")
    arguments = parser.parse_args()
    results = []
    for plant in (*PLANTS, *UNSOUND, *CONTROLS):
        if any(fnmatch(plant.name, pattern) for pattern in arguments.only):
            results.append(audit(plant, arguments.minutes, arguments.seed, arguments.out))
            print(describe(results[-1]), flush=True)
    plants = [one for one in results if one.plant.key]
    controls = [one for one in results if not one.plant.key]
    print(f"leaks found in {count_leaks(plants)} of {len(plants)} plants")
    print(f"leaks found in {count_leaks(controls)} of {len(controls)} controls")


def count_leaks(results: list[Result]) -> int:
    """Return the number of results with a leak."""
    return sum(one.seconds is not None for one in results)


def describe(result: Result) -> str:
    """Return a line on one result."""
    finding = result.finding
    if finding is None:
        return f"{result.plant.name:40} no attack applied"
    reason = f" ({finding.reason})" if finding.reason else ""
    by = f" by {attack_text(finding.by)}" if finding.by else ""
    seconds = "" if result.seconds is None else f", leak after {result.seconds:.1f} s"
    best = "" if finding.best is None else f", best {finding.best:.2f}"
    return f"{result.plant.name:40} {finding.state}{reason}{by}{best}{seconds}"


if __name__ == "__main__":
    main()
