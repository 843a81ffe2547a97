"""Samples on a page: which original and reconstructed samples a scenario allows, and a warning about the samples.

A page with reconstructions only is still sensitive, because a successful reconstruction shows the client's sample.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

from PIL import Image

from rayfed.data.sets import is_public
from rayfed.report.text.samples import IN_FOLDER, samples_warning
from rayfed.results.sweep_folder import TRIALS, SweepFolder, is_sweep
from rayfed.store.folder import RunFolder

FIELDS = 4
"""Pixels along the longer side of a blurred image."""
HIDDEN = "▪▪▪"
"""Text that replaces a word or column of a blurred sample."""


@dataclass(frozen=True)
class Samples:
    """Filter that decides which samples of `images`, `texts` and `snapshots` a page shows."""

    mode: Literal["none", "blurred", "worst", "all", "reconstructed"]
    """`output.images`; `reconstructed` if it is null and the data are not known to be public."""
    public: bool

    @property
    def any(self) -> bool:
        """Return whether the page shows any samples."""
        return self.mode != "none"

    @property
    def truth(self) -> bool:
        """Return whether the page shows original samples and their classes."""
        return self.mode in ("worst", "all")

    def image(self, png: bytes) -> str:
        """Return an image as a `data:` URL, blurred if the scenario requires blurred samples."""
        shown = _blurred(png) if self.mode == "blurred" else png
        return f"data:image/png;base64,{b64encode(shown).decode()}"

    def true_image(self, png: bytes) -> str | None:
        """Return an original image as a `data:` URL; None if the page does not show originals."""
        return None if self.mode == "reconstructed" else self.image(png)

    def words(self, words: list[str]) -> list[str]:
        """Return the words of a text or record, replaced by placeholders if the scenario requires blurred samples."""
        return [HIDDEN] * len(words) if self.mode == "blurred" else words

    def true_words(self, words: list[str]) -> list[str] | None:
        """Return the words of an original text or record; None if the page does not show originals."""
        return None if self.mode == "reconstructed" else self.words(words)

    @property
    def warning(self) -> str | None:
        """Return a warning about clients' samples on the page; None if no warning is needed."""
        if self.public or not self.any:
            return None
        return samples_warning(self.mode, "report")

    @property
    def warning_of_folder(self) -> str | None:
        """Return a warning about clients' samples on the page and in the folder's tables; None for public samples."""
        return None if self.public else " ".join(filter(None, (self.warning, IN_FOLDER)))


def make_sample_filter(scenarios: Iterable[Mapping[str, Any]]) -> Samples:
    """Return the filter of samples for the page of scenarios with the same `output`: a run, or a sweep's trials."""
    written = list(scenarios)
    public = all(is_public(scenario.get("data") or "digits") for scenario in written)
    mode = (written[0].get("output") or {}).get("images")
    return Samples(mode or ("all" if public else "reconstructed"), public)


def make_sweep_filter(sweep: SweepFolder) -> Samples:
    """Return the filter of samples for a sweep's page; if the data vary, all data sets must be public."""
    varied = any(field.partition(".")[0] == "data" for field in sweep.fields)
    trials = [sweep.trial(f"{TRIALS}/{name}").scenario() for name in sweep.trial_names()] if varied else []
    return make_sample_filter([sweep.scenario, *trials])


def find_warning(folder: RunFolder) -> str | None:
    """Return a warning about samples in the folder of a run or sweep; None without samples, or if all are public."""
    if is_sweep(folder):
        sweep = SweepFolder(folder)
        held = any(_has_samples(sweep.trial(f"{TRIALS}/{name}")) for name in sweep.trial_names())
        samples = make_sweep_filter(sweep)
    else:
        held, samples = _has_samples(folder), make_sample_filter([folder.scenario()])
    return samples.warning_of_folder if held else None


def _has_samples(folder: RunFolder) -> bool:
    return any(folder.parts(table) for table in ("images", "texts", "snapshots"))


def _blurred(png: bytes) -> bytes:
    """Return an image scaled down to `FIELDS` pixels along its longer side."""
    image = Image.open(BytesIO(png))
    share = FIELDS / max(image.size)
    size = [max(1, round(share * length)) for length in image.size]
    buffer = BytesIO()
    image.resize((size[0], size[1]), Image.Resampling.BOX).save(buffer, format="PNG")
    return buffer.getvalue()
