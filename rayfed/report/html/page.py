"""Writer of report pages: self-contained HTML files with style sheet, scripts and data.

The Content-Security-Policy of a page forbids network access, and allows only its own scripts by their hashes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from re import compile
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rayfed.errors import MissingExtraError, require_extra
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.rows import Row, labels_given
from rayfed.metrics.measures import JUDGED, MEASURES
from rayfed.report.html import svg
from rayfed.report.html.explorer import Explorer, format_interval
from rayfed.report.html.passages import PassagePair
from rayfed.report.html.pictures import PicturePair, Strip
from rayfed.report.samples import Samples
from rayfed.report.text.formats import format_decimals, format_measure, format_number, format_psnr, format_similarity
from rayfed.report.text.reasons import judgement_text
from rayfed.report.text.summary import SummaryEntry
from rayfed.report.text.tables import Grid
from rayfed.store.exits import advise_on_state
from rayfed.store.folder import REPORT, RunFolder
from rayfed.version import __version__

_BACKTICKS = compile("`([^`]+)`")


@dataclass(frozen=True)
class Failure:
    """Error of a run or sweep that did not finish."""

    title: str
    error: str
    advice: str
    """Next step."""


@dataclass(frozen=True)
class Summary:
    """Section with the most important facts."""

    warnings: Sequence[str]
    entries: Sequence[SummaryEntry]
    pair: PicturePair | None
    """Images of the best reconstruction."""
    passage: PassagePair | None = None
    """Words of the best reconstruction."""


@dataclass(frozen=True)
class Gallery:
    """Section with samples and their reconstructions."""

    samples: Samples
    note: str
    classes: Mapping[int, str]
    """Names of classes by label."""
    pairs: Sequence[PicturePair]
    strips: Sequence[Strip]
    passages: Sequence[PassagePair] = ()
    empty: str = ""
    """Text instead of a gallery of texts or records on the page of a sweep."""


@dataclass(frozen=True)
class Page:
    """Contents of the page of a run or sweep."""

    name: str
    state: str
    badge: str
    """CSS class of the state."""
    lead: str
    sections: Sequence[tuple[str, str]]
    """Links to sections: (id, title)."""
    failure: Failure | None
    arms: Sequence[str]
    """Names of all arms, in the order of their colours."""
    noun: str
    """Noun for a sample: image, text or record."""
    criterion: Criterion
    summary: Summary
    explorer: Explorer
    paired: Grid | None
    """Differences on the same victims or seeds."""
    gallery: Gallery
    environment: Sequence[tuple[str, str]]
    scenario: str
    secure: bool
    """Whether noise and keys are independent of the seed."""


def write_page(folder: RunFolder, template: str, page: Page, redacted: bool) -> str:
    """Render a template to `report.html` and return the path or URL.

    Plotly is included if the page has a plot. If Plotly is not installed, the page says how to install it. Raises
    `RunError` if the page cannot be written.
    """
    scripts, missing_plot = [_own_script()], ""
    if page.explorer.x is not None:
        try:
            scripts.insert(0, _plotly())
        except MissingExtraError as error:
            missing_plot = str(error)
    contents = {
        "page": page,
        "redacted": redacted,
        "version": __version__,
        "folder": "RUN" if redacted else folder.url,
        "scripts": scripts,
        "has_plot": page.explorer.x is not None and not missing_plot,
        "missing_plot": missing_plot,
        "policy": make_policy(scripts),
        "series": svg.SERIES,
        "dash": svg.dash,
        "labels_given": labels_given,
        "gallery_metrics": [metric for metric in JUDGED if metric.success == "curve"],
        "measure_titles": {name: measure.title for name, measure in MEASURES.items()},
    }
    folder.write_text(REPORT, make_environment().get_template(template).render(contents))
    return f"{folder.url}/{REPORT}"


def make_failure(status: Mapping[str, Any], kind: str | None, url: str, title: str) -> Failure | None:
    """Return the error of a run or sweep at `url`; None if it has none and was not killed."""
    state = status.get("state", "unknown")
    if not status.get("error") and state != "killed":
        return None
    return Failure(title, status.get("error") or "", advise_on_state(state, kind, url))


def make_policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy of a page that allows only the given inline scripts."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"


def optional_document(folder: RunFolder, name: str) -> dict[str, Any]:
    """Return the contents of a JSON file in a folder, or an empty mapping if the file does not exist."""
    return folder.read_mapping(name) if folder.exists(name) else {}


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as pairs of a dotted path and a value as text."""
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@lru_cache
def make_environment() -> Environment:
    """Return the Jinja environment of the reports, with the functions of the templates as filters.

    It is cached, because compiling the templates takes as long as drawing the charts of a report.
    """
    environment = Environment(
        loader=PackageLoader("rayfed.report.html", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (
        code,
        format_psnr,
        format_interval,
        format_decimals,
        format_measure,
        describe_result,
        format_similarity,
        format_number,
        svg.svg,
    ):
        environment.filters[function.__name__] = function
    return environment


def describe_result(row: Row, criterion: Criterion) -> str:
    """Return whether a row of `attacks` is a leak, or why it is not."""
    return judgement_text(criterion, criterion.judge(row))


def code(text: str) -> Markup:
    """Return a text as escaped HTML, with passages between backticks as code."""
    return Markup(_BACKTICKS.sub(r"<code>\1</code>", str(escape(text))))


@lru_cache
def _plotly() -> str:
    require_extra("plots", "The interactive plot", "plotly.offline")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@lru_cache
def _own_script() -> str:
    return files("rayfed.report.html").joinpath("report.js").read_text(encoding="utf-8")
