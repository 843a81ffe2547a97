"""Text on samples: warnings about those of clients, and reconstructions without a score."""

from __future__ import annotations

_SHOWN = {
    "reconstructed": "reconstructions of clients' samples",
    "blurred": "blurred samples of clients and their reconstructions",
}
"""Samples on a page, by `Samples.mode`."""
IN_FOLDER = "The tables images, texts and snapshots in the same folder always have the full samples."

NOT_SCORED = (
    "NOT MEASURED: without the originals no reconstruction has a score. A recognisable image is a leak. An image that "
    "is not recognisable is no evidence of protection. The loss of an attack measures the match with the update, not "
    "the similarity to the original."
)
"""Limits of reconstructions whose originals are not known."""


def samples_warning(mode: str, command: str) -> str:
    """Return a warning about the samples on a page; `command` is that which makes the page."""
    shown = _SHOWN.get(mode, "samples of clients and their reconstructions")
    return (
        f"The page has {shown}, and the data are not known to be public. A successful reconstruction shows the "
        f"client's sample. Before you pass the page on, make one without samples: rayfed {command} RUN --redact."
    )
