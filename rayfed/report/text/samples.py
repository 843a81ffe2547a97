"""Warnings about clients' samples on a page and in its folder."""

from __future__ import annotations

_SHOWN = {
    "reconstructed": "reconstructions of clients' samples",
    "blurred": "blurred samples of clients and their reconstructions",
}
"""Samples on a page, by `Samples.mode`."""
IN_FOLDER = "The tables images, texts and snapshots in the same folder always have the full samples."


def samples_warning(mode: str, command: str) -> str:
    """Return a warning about the samples on a page; `command` is that which makes the page."""
    shown = _SHOWN.get(mode, "samples of clients and their reconstructions")
    return (
        f"The page has {shown}, and the data are not known to be public. A successful reconstruction shows the "
        f"client's sample. Before you pass the page on, make one without samples: rayfed {command} RUN --redact."
    )
