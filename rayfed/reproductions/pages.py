"""Texts on reproductions: verdicts with their reasons, pages and their index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rayfed.evidence.settings import MeanEstimate
from rayfed.metrics.measures import MEASURES
from rayfed.report.text.formats import NONE
from rayfed.reproductions.findings import Finding, tabulate_curves
from rayfed.reproductions.judging import FigureState, Judgement, PairJudgement, PairState, Verdict, Whole
from rayfed.reproductions.kinds import Attacker, Comparison, Size
from rayfed.reproductions.reading import Group
from rayfed.reproductions.records import Staleness
from rayfed.reproductions.results import Result, SizeResult

INDEX = "README.md"
NAMES = {
    Verdict.REPRODUCED: "reproduced",
    Verdict.BETTER: "better than the paper",
    Verdict.SAME_ORDER: "same order",
    Verdict.UNDECIDED: "undecided",
    Verdict.CONTRADICTED: "contradicted",
    Verdict.NOT_MEASURED: "not measured",
}
MEANING = {
    Verdict.REPRODUCED: "each figure of the paper is within the tolerance of our mean, or within our 95 % interval if "
    "its half width is at most two tolerances. If only an order or differences are compared, all of them are the "
    "paper's",
    Verdict.BETTER: "each figure agrees or is better than the paper's, and no order is reversed",
    Verdict.SAME_ORDER: "some figures differ, and all pairs that differ by more than the tolerance in the paper have "
    "the same order here",
    Verdict.UNDECIDED: "more seeds are needed: the smallest n with t(n - 1) s / sqrt(n) <= h. t is the 97.5 % quantile "
    "of Student's distribution, s our standard deviation over seeds, h the half interval that decides",
    Verdict.CONTRADICTED: "the 95 % interval excludes an order, a difference or a figure of the paper",
    Verdict.NOT_MEASURED: "no figure was measured. The column *cause* says why",
}
_SIZES = {Size.REDUCED: "reduced", Size.PAPER: "paper size", Size.GPU: "GPU size"}
_ATTACKERS = {Attacker.PAPER: "attacker of the paper", Attacker.ADAPTIVE: "adaptive attacker"}
_TERMS = {
    Comparison.ORDER: "The paper gives only an order: its column has ranks, 1 for the lowest.",
    Comparison.DIFFERENCES: "The differences between the rows are compared.",
}
_FIGURES = {
    FigureState.WORSE: "{} is worse than in the paper",
    FigureState.DIFFERS: "{} differs",
    FigureState.BETTER: "{} is better than in the paper",
    FigureState.UNDECIDED: "{} is uncertain",
    FigureState.MISSING: "{} was not measured",
}
_PAIRS = {
    PairState.REVERSED: "{low} is above {high}",
    PairState.ABSENT: "{low} and {high} do not differ by more than the tolerance",
    PairState.DIFFERS: "{low} and {high} differ",
    PairState.UNDECIDED: "the difference between {low} and {high} is uncertain",
    PairState.NO_OVERLAP: "{low} and {high} have no common range",
}


def verdict_text(whole: Whole | Judgement | None) -> str:
    """Return the name of a verdict, with the number of seeds that would decide an undecided one."""
    if whole is None:
        return NONE
    name = NAMES[whole.verdict]
    undecided = whole.verdict is Verdict.UNDECIDED and whole.seeds is not None
    return f"{name}: {whole.seeds} seeds would decide" if undecided else name


def reasons_text(judgement: Judgement) -> str:
    """Return the figures and pairs that decided a verdict; empty if all agree."""
    texts = [_FIGURES[one.state].format(one.label) for one in judgement.figures if one.state is FigureState.MISSING]
    texts += [_pair_text(pair) for pair in judgement.pairs if pair.state in _REASONS.get(judgement.verdict, ())]
    if not judgement.pairs:
        states = _FIGURE_REASONS.get(judgement.verdict, ())
        texts += [_FIGURES[one.state].format(one.label) for one in judgement.figures if one.state in states]
    if len(texts) > _MOST_REASONS:
        texts[_MOST_REASONS:] = [f"{len(texts) - _MOST_REASONS} more pairs or figures are like this"]
    return ". ".join(map(_sentence, texts))


_MOST_REASONS = 4
"""Maximum number of reasons that a text lists."""
_REASONS = {
    Verdict.BETTER: (PairState.ABSENT,),
    Verdict.UNDECIDED: (PairState.UNDECIDED, PairState.NO_OVERLAP),
    Verdict.CONTRADICTED: (PairState.REVERSED, PairState.ABSENT, PairState.DIFFERS),
}
"""Verdict -> states of pairs that explain it."""
_FIGURE_REASONS = {
    Verdict.BETTER: (FigureState.BETTER,),
    Verdict.UNDECIDED: (FigureState.UNDECIDED,),
    Verdict.CONTRADICTED: (FigureState.WORSE, FigureState.DIFFERS),
}
"""Verdict -> states of figures that explain it, if there are no pairs."""


def _pair_text(pair: PairJudgement) -> str:
    text = _PAIRS[pair.state].format(low=pair.low, high=pair.high)
    return text if pair.gap is None else f"{text} ({_number(pair.gap)})"


def stale_text(staleness: Staleness) -> str:
    """Return that a record is stale, with the parts that changed; empty for a current one."""
    if not staleness:
        return ""
    if not staleness.recorded:
        return "stale: computed before fingerprints were recorded"
    return f"stale: {', '.join(staleness.changed)} changed"


def terms_text(group: Group) -> str:
    """Return how the figures of a group are compared."""
    if group.along is not None:
        return f"Compared at equal {_title(group.along)}, linear between the points; tolerance {group.tolerance:g}."
    terms = _TERMS.get(group.compare, "")
    return terms if group.compare is Comparison.ORDER else f"{terms} Tolerance {group.tolerance:g}.".strip()


def group_title(group: Group) -> str:
    """Return the heading of a group."""
    relative = f", relative to {group.relative_to}" if group.relative_to else ""
    attacker = f", {_ATTACKERS[group.attacker]}" if group.attacker else ""
    return f"{group.title}{relative}{attacker}"


def rows(judgement: Judgement) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a group's table at one size."""
    if judgement.group.along is not None:
        return _curve_rows(judgement)
    return ["", "paper", "ours"], [
        [finding.label, _paper(judgement.group, finding), _ours(finding)] for finding in judgement.findings
    ]


def _curve_rows(judgement: Judgement) -> tuple[list[str], list[list[str]]]:
    along = str(judgement.group.along)
    grid, columns = tabulate_curves(list(judgement.findings))
    percent = 100 if along in MEASURES and MEASURES[along].share else 1
    lines = []
    for place, x in enumerate(grid):
        cells = [column[place] for column in columns]
        lines.append([f"{percent * x:.4g}", *(NONE if cell is None else _number(cell) for cell in cells)])
    unit = " (%)" if percent == 100 else ""
    return [f"{_title(along)}{unit}", *(finding.label for finding in judgement.findings)], lines


def _title(column: str) -> str:
    return MEASURES[column].title if column in MEASURES else column


def page(result: Result) -> str:
    """Return the Markdown page of a reproduction."""
    return "\n".join(_page(result))


def _page(result: Result) -> Iterator[str]:
    own, sizes = result.own, list(result.sizes.values())
    yield f"# {own.title}\n"
    yield f"{own.paper.name}, {own.paper.place}: {own.claim}\n"
    if not sizes:
        yield f"**{NAMES[Verdict.NOT_MEASURED].capitalize()}.**\n"
        if own.scenario is not None:
            yield f"Run it with `{_command(result.name, Size.REDUCED)} --keep DIR`.\n"
    else:
        yield from _verdicts(sizes)
    for cause in result.causes if sizes else ():
        yield f"Cause: {cause.strip()}\n"
    if own.remarks:
        yield f"{own.remarks.strip()}\n"
    for key in dict.fromkeys(one.group.key for size in sizes for one in size.judgements):
        yield from _group(key, sizes)
    if absent := own.not_compared(result.sizes):
        yield "## Not reproduced\n"
        yield from (f"- {part.what}: {part.why}" for part in absent)
        yield ""
    for one in sizes:
        yield f"## Scenario, {_SIZES[one.size]}\n"
        yield f"Run it with `{_command(result.name, one.size)}`.\n"
        if one.record.changes:
            yield f"Changed with `--set`: {', '.join(f'`{change}`' for change in one.record.changes)}.\n"
        yield f"```yaml\n{one.record.scenario.strip()}\n```\n"


def _verdicts(sizes: Sequence[SizeResult]) -> Iterator[str]:
    yield "| size | verdict | adaptive attacker | seeds | minutes | record |"
    yield "| --- | --- | --- | ---: | ---: | --- |"
    for one in sizes:
        cells = [
            _SIZES[one.size],
            verdict_text(one.paper),
            verdict_text(one.adaptive),
            str(len(one.record.seeds)),
            _minutes(one),
            stale_text(one.staleness) or "current",
        ]
        yield f"| {' | '.join(map(_cell, cells))} |"
    yield ""


def _group(key: str, sizes: Sequence[SizeResult]) -> Iterator[str]:
    """Yield a group's tables: one table with a column for each size, or a table of each size for curves."""
    each = [(one.size, judgement) for one in sizes for judgement in one.judgements if judgement.group.key == key]
    group = each[0][1].group
    yield f"## {group_title(group)}\n"
    if group.along is not None:
        for size, judgement in each:
            headings, lines = _curve_rows(judgement)
            yield from _table([f"{headings[0]}, {_SIZES[size]}", *headings[1:]], lines)
    else:
        labels = dict.fromkeys(finding.label for _, judgement in each for finding in judgement.findings)
        found = [{finding.label: finding for finding in judgement.findings} for _, judgement in each]
        lines = []
        for label in labels:
            known = [column[label] for column in found if label in column]
            ours = [_ours(column[label]) if label in column else NONE for column in found]
            lines.append([label, _paper(group, known[0]), *ours])
        yield from _table(["", "paper", *(f"ours, {_SIZES[size]}" for size, _ in each)], lines)
    if group.compare is Comparison.DIFFERENCES:
        yield from _differences(each)
    yield f"{terms_text(group)}\n"
    for size, judgement in each:
        reasons = reasons_text(judgement)
        text = verdict_text(judgement)
        yield f"- {_SIZES[size].capitalize()}: {text}{f'. {reasons}.' if reasons else ''}"
    yield ""


def _differences(each: Sequence[tuple[Size, Judgement]]) -> Iterator[str]:
    """Yield the table of the compared differences, with a column for each size."""
    columns = [{(pair.low, pair.high): pair for pair in judgement.pairs} for _, judgement in each]
    lines = []
    for low, high in dict.fromkeys(key for column in columns for key in column):
        pairs = [column.get((low, high)) for column in columns]
        paper = next(pair.paper for pair in pairs if pair is not None)
        ours = [NONE if pair is None or pair.gap is None else _number(pair.gap) for pair in pairs]
        lines.append([f"{high} − {low}", f"{paper:.4g}", *ours])
    yield from _table(["difference", "paper", *(f"ours, {_SIZES[size]}" for size, _ in each)], lines)


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(map(_cell, headings))} |"
    yield f"| --- |{' ---: |' * (len(headings) - 1)}"
    yield from (f"| {' | '.join(map(_cell, line))} |" for line in lines)
    yield ""


def index(results: Sequence[Result]) -> str:
    """Return the index page: for each claim the verdict with both attackers, and the cause."""
    counts = Counter(result.verdict for result in results)
    measured = [result.best for result in results if result.best is not None]
    stale = sum(bool(best.staleness) for best in measured)
    lines = [
        "# Reproduced tables and figures of papers",
        "",
        "Every number is generated from a record: the JSON file with the name of the page. The records are written by "
        "`rayfed reproduce` ([how to](../reproducing.md)).",
        "",
        f"A record is stale if the code of its attacks, defences, models or metrics has changed, or its scenario. "
        f"{stale} of {len(measured)} records are stale.",
        "",
        "| verdict | claims | meaning |",
        "| --- | ---: | --- |",
        *(f"| {NAMES[verdict]} | {counts[verdict]} | {MEANING[verdict]} |" for verdict in Verdict),
        "",
        "The verdict is that of the attacker of the paper. The next column has the verdict with the adaptive attacker, "
        "which knows the defence, if it was run.",
        "",
    ]
    lines += [*_times(results), ""]
    for paper in dict.fromkeys(result.own.paper.name for result in results):
        lines += [
            f"## {paper}",
            "",
            f"| {' | '.join(_HEADINGS)} |",
            "| --- | --- | --- | --- | --- | --- | ---: | --- |",
        ]
        lines += [_index_row(result) for result in results if result.own.paper.name == paper]
        lines.append("")
    return "\n".join(lines)


def _times(results: Sequence[Result]) -> Iterator[str]:
    """Yield the recorded minutes of each size, over all records."""
    yield "| size | records | with recorded time | minutes |"
    yield "| --- | ---: | ---: | ---: |"
    for size in Size:
        sizes = [result.sizes[size] for result in results if size in result.sizes]
        times = [one.record.seconds for one in sizes if one.record.seconds is not None]
        yield f"| {_SIZES[size]} | {len(sizes)} | {len(times)} | {sum(times) / 60:.1f} |"


_HEADINGS = ("place", "claim", "verdict", "adaptive attacker", "cause", "size", "minutes", "record")


def _index_row(result: Result) -> str:
    best = result.best
    cells = [
        _link(result.own.paper.place, result.name),
        _cell(result.own.claim.strip()),
        verdict_text(best.paper if best else Whole(Verdict.NOT_MEASURED)),
        verdict_text(best.adaptive if best else None),
        _cell("; ".join(cause.strip() for cause in result.causes)) or (NONE if best else "not run yet"),
        _SIZES[best.size] if best else NONE,
        _minutes(best) if best else NONE,
        ("stale" if best.staleness else "current") if best else NONE,
    ]
    return f"| {' | '.join(cells)} |"


def write_pages(folder: Path, results: Sequence[Result]) -> None:
    """Write the page of each reproduction, and the index."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        (folder / f"{result.name}.md").write_text(page(result), encoding="utf-8")
    (folder / INDEX).write_text(index(results), encoding="utf-8")


def _command(name: str, size: Size) -> str:
    return f"rayfed reproduce {name} --size {size}"


def _paper(group: Group, finding: Finding) -> str:
    if group.along is not None:
        return NONE
    printed = f" (printed {finding.printed:g})" if finding.paper != finding.printed else ""
    return f"{finding.paper:.4g}{printed}"


def _ours(finding: Finding) -> str:
    ours = finding.ours
    if ours is None:
        return NAMES[Verdict.NOT_MEASURED]
    if finding.also is None:
        return _number(ours)
    return f"{_number(ours)} ({finding.also:.4g} in true arithmetic)"


def _number(ours: MeanEstimate) -> str:
    half = "" if ours.high is None else f" ± {ours.high - ours.mean:.2g}"
    return f"{ours.mean:.4g}{half}"


def _minutes(one: SizeResult) -> str:
    return NONE if one.record.seconds is None else f"{one.record.seconds / 60:.1f}"


def _link(text: str, name: str) -> str:
    return f"[{_cell(text)}]({name}.md)"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
