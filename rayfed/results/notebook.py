"""Notebook view of runs and sweeps: an HTML table of settings and, for a run, the best reconstructions by PSNR."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO

import numpy as np
from PIL import Image

from rayfed.evidence.rows import Row
from rayfed.evidence.settings import Setting
from rayfed.report.text.figures import measure_value_text
from rayfed.report.text.tables import Grid, grid
from rayfed.results.pictures import Picture

MOST = 20
"""Maximum number of settings to show."""
_PIXELS = 84
"""Height and width of an image on the page."""


def make_html(title: str, settings: Sequence[Setting], worst: Sequence[tuple[Picture, Row]] = ()) -> str:
    """Return static HTML with a table of settings and pictures, without scripts or external resources.

    `worst` contains pictures with their rows of `attacks`.
    """
    parts = [f"<p><b>{escape(title)}</b></p>", _table(grid(settings[:MOST]))]
    if len(settings) > MOST:
        parts.append(f"<p>{len(settings) - MOST} more in <code>.settings()</code></p>")
    if worst:
        parts.append("<p>Reconstructions with the highest PSNR (top: original, bottom: reconstruction)</p>")
        parts += [_pair(picture, row["psnr"]) for picture, row in worst]
    return f"<div>{''.join(parts)}</div>"


def _table(settings: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in settings.headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in settings.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(settings.note)}</p>"


def _pair(picture: Picture, psnr: float) -> str:
    score = measure_value_text("psnr", psnr)
    of = f"{picture.arm}, {picture.attack}: image {picture.sample} of client {picture.victim}"
    images = _image(picture.true, f"true, {of}") + _image(picture.reconstructed, f"reconstructed, {of}, {score}")
    caption = f"{escape(picture.arm)}<br>{escape(picture.attack)}<br>{escape(score)}"
    return f'<figure style="display:inline-block;margin:4px">{images}<figcaption>{caption}</figcaption></figure>'


def _image(pixels: np.ndarray, words: str) -> str:
    buffer = BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG")
    data = b64encode(buffer.getvalue()).decode()
    style = f"display:block;margin-bottom:4px;width:{_PIXELS}px;height:{_PIXELS}px;image-rendering:pixelated"
    return f'<img alt="{escape(words)}" style="{style}" src="data:image/png;base64,{data}">'
