"""Writer of report pages: self-contained HTML files with style sheet, scripts and data.

The Content-Security-Policy of a page forbids network access, and allows only its own scripts by their hashes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from re import compile
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from rayfed.evidence.arms import component_text
from rayfed.evidence.attack_results import AttackInput, attack_input
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.rows import Row, labels_given
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.measures import JUDGED, MEASURES
from rayfed.report import svg
from rayfed.report.text.attacks import attack_input_text
from rayfed.report.text.formats import FILTERS
from rayfed.report.text.proved_bounds import measure_text
from rayfed.report.text.reasons import judgement_text
from rayfed.report.text.verdicts import badge_text
from rayfed.store.exits import advice
from rayfed.store.folder import REPORT, RunFolder
from rayfed.version import __version__

_BACKTICKS = compile("`([^`]+)`")
UNFOLDED = 12
"""Maximum number of pairs of arm and attack for which the charts are not folded."""


def write_page(folder: RunFolder, template: str, contents: Mapping[str, Any], plotting: bool) -> str:
    """Render a template to `report.html` and return the path or URL; `plotting` includes Plotly in the page.

    Raises `RunError` if the page cannot be written.
    """
    scripts = [*([_plotly()] if plotting else []), _own_script()]
    shared = {
        "version": __version__,
        "folder": "RUN" if contents["redacted"] else folder.url,
        "scripts": scripts,
        "policy": policy(scripts),
        "series": svg.SERIES,
        "dash": svg.dash,
        "classes": svg.CLASSES,
        "ceiling": PSNR_CEILING,
        "unfolded": UNFOLDED,
        "labels_given": labels_given,
        "advice": advice,
        "gallery_metrics": [metric for metric in JUDGED if metric.success == "curve"],
        "measure_titles": {name: measure.title for name, measure in MEASURES.items()},
    }
    folder.write_text(REPORT, environment().get_template(template).render({**shared, **contents}))
    return f"{folder.url}/{REPORT}"


def policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy of a page that allows only the given inline scripts."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"


def optional_document(folder: RunFolder, name: str) -> dict[str, Any]:
    """Return the contents of a JSON file in a folder, or an empty mapping if the file does not exist."""
    return folder.read_mapping(name) if folder.exists(name) else {}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as pairs of a dotted path and a value as text."""
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@lru_cache
def environment() -> Environment:
    """Return the Jinja environment of the reports, with the functions of `rayfed.report.text.formats` as filters.

    It is cached, because compiling the templates takes as long as drawing the charts of a report.
    """
    environment = Environment(
        loader=PackageLoader("rayfed.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS | {"code": code, "judged": _judged, "input": _input, "component": component_text}
    environment.filters["badge"] = badge_text
    environment.filters["bounded_measure"] = measure_text
    return environment


def _judged(row: Row, criterion: Criterion) -> str:
    """Return whether a row of `attacks` is a leak, or why it is not."""
    return judgement_text(criterion, criterion.judge(row))


def _input(attacked: AttackInput | Row) -> str:
    """Return the input of an attack, or of the attack in a row of `attacks`."""
    return attack_input_text(attacked if isinstance(attacked, AttackInput) else attack_input([attacked]))


def code(text: str) -> Markup:
    """Return a text as escaped HTML, with passages between backticks as code."""
    return Markup(_BACKTICKS.sub(r"<code>\1</code>", str(escape(text))))


@lru_cache
def _plotly() -> str:
    return str(get_plotlyjs())


@lru_cache
def _own_script() -> str:
    return files("rayfed.report").joinpath("report.js").read_text(encoding="utf-8")
