"""Samples that a page shows, true and reconstructed: how much of them a scenario allows, and the warning about it.

A reconstruction is a client's sample where the attack worked, so what has no truth on it is no page to hand out.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

from PIL import Image

from rayfed.analysis.sweep_folder import TRIALS, SweepFolder, is_sweep
from rayfed.data.sets import is_public
from rayfed.store.folder import RunFolder

FIELDS = 4
"""Fields along the longer side of a blurred image."""
HIDDEN = "▪▪▪"
"""What stands for a word, or a column, of a blurred sample."""
_KEPT = "Whatever the page shows, the tables images, texts and snapshots beside it hold attacked samples in full."


@dataclass(frozen=True)
class Samples:
    """Samples that a page may show; `images`, `texts` and `snapshots` are shown through it alone."""

    mode: Literal["none", "blurred", "worst", "all", "reconstructed"]
    """`output.images`; `reconstructed` where it is null and the data are not known to be public."""
    public: bool

    @property
    def any(self) -> bool:
        """Whether the page shows any sample."""
        return self.mode != "none"

    @property
    def truth(self) -> bool:
        """Whether the page shows, or names the class of, a true sample."""
        return self.mode in ("worst", "all")

    def image(self, png: bytes) -> str:
        """Return an image as the source of an <img>."""
        shown = _blurred(png) if self.mode == "blurred" else png
        return f"data:image/png;base64,{b64encode(shown).decode()}"

    def true_image(self, png: bytes) -> str | None:
        """Return a true image as a `data:` URL; None if it is not shown."""
        return None if self.mode == "reconstructed" else self.image(png)

    def words(self, words: list[str]) -> list[str]:
        """Return a sample in words."""
        return [HIDDEN] * len(words) if self.mode == "blurred" else words

    def true_words(self, words: list[str]) -> list[str] | None:
        """Return a true sample in words; None if it is not shown."""
        return None if self.mode == "reconstructed" else self.words(words)

    @property
    def warning(self) -> str | None:
        """Warning on a page that shows samples; None if no warning is needed."""
        if self.public or not self.any:
            return None
        shown = {
            "reconstructed": "reconstructions of clients' samples",
            "blurred": "blurred samples of clients, true and reconstructed",
        }.get(self.mode, "clients' samples, true and reconstructed")
        return (
            f"The page has {shown}, and the data are not known to be public. Where an attack worked, a reconstruction "
            "is the client's sample. Before you pass the page on, make one without samples: rayfed report RUN --redact."
        )

    @property
    def warning_of_folder(self) -> str | None:
        """Warning about the page and the tables beside it; None of public samples."""
        return None if self.public else " ".join(filter(None, (self.warning, _KEPT)))


def shown(scenarios: Iterable[Mapping[str, Any]]) -> Samples:
    """Return the samples that the page of a run shows, or that of a sweep of some scenarios with the same `output`."""
    written = list(scenarios)
    public = all(is_public(scenario.get("data") or "digits") for scenario in written)
    mode = (written[0].get("output") or {}).get("images")
    return Samples(mode or ("all" if public else "reconstructed"), public)


def of_sweep(sweep: SweepFolder) -> Samples:
    """Return the samples that the page of a sweep shows; where its data vary, those of no trial may be private."""
    varied = any(field.partition(".")[0] == "data" for field in sweep.fields)
    trials = [sweep.trial(f"{TRIALS}/{name}").scenario() for name in sweep.trial_names()] if varied else []
    return shown([sweep.scenario, *trials])


def warning(folder: RunFolder) -> str | None:
    """Return the warning about the page and the tables of a run or sweep; None if they hold none, or public ones."""
    if is_sweep(folder):
        sweep = SweepFolder(folder)
        held = any(_has_samples(sweep.trial(f"{TRIALS}/{name}")) for name in sweep.trial_names())
        samples = of_sweep(sweep)
    else:
        held, samples = _has_samples(folder), shown([folder.scenario()])
    return samples.warning_of_folder if held else None


def _has_samples(folder: RunFolder) -> bool:
    return any(folder.parts(table) for table in ("images", "texts", "snapshots"))


def _blurred(png: bytes) -> bytes:
    """Return the means over the fields of an image, one pixel each."""
    image = Image.open(BytesIO(png))
    share = FIELDS / max(image.size)
    size = [max(1, round(share * length)) for length in image.size]
    buffer = BytesIO()
    image.resize((size[0], size[1]), Image.Resampling.BOX).save(buffer, format="PNG")
    return buffer.getvalue()
