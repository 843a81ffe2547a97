"""Images of a report: pairs of original and reconstruction, and the progress of searches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from typing import Any

from rayfed.analysis.summary import Row, leading_metric, measured
from rayfed.report.samples import Samples
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import image_key

SHOWN = 8
"""Number of pairs per arm and attack: those with the highest PSNR, from the first repeat."""
STRIPS = 3
"""Number of strips of progress per arm and attack."""


@dataclass(frozen=True)
class Pair:
    """Pair of an original image and its reconstruction."""

    true: str | None
    """Original as a `data:` URL; None if the page does not show it."""
    reconstructed: str
    row: Row
    """Row of `attacks` with the scores."""
    entry: int | None = None
    """`explorer.Entry.id` of the setting and attack."""
    title: str = ""
    """Title of the setting."""

    @property
    def size(self) -> int:
        """Number of characters of the pair in a page."""
        return len(self.true or "") + len(self.reconstructed)


@dataclass(frozen=True)
class Strip:
    """Images of one search after some iterations."""

    row: Row
    """Key of the image: arm, round, attack, victim, repeat, sample."""
    frames: list[tuple[int, str]]
    """Frames: (iteration, image as a `data:` URL)."""
    true: str | None


def most_leaked(attacks: Iterable[Row], arm: str, attack: str | None, most: int = SHOWN) -> list[Row]:
    """Return the rows of `attacks` with the best reconstructions of one arm and attack, from the first repeat."""
    mine = (row for row in attacks if (row["arm"], row["attack"], row["repeat"]) == (arm, attack, 0))
    rows = list(mine)
    leading = leading_metric(rows)
    return sorted(rows, key=lambda row: row[leading] if measured(row.get(leading)) else -inf, reverse=True)[:most]


def key(row: Row) -> tuple[Any, ...]:
    """Return the key that identifies an image within a run."""
    return tuple(image_key(row).values())


def pictures(folder: RunFolder, rows: Iterable[Row], samples: Samples) -> dict[tuple[Any, ...], Pair]:
    """Return the images of some rows of `attacks`, by `key`; rows without images are left out."""
    wanted = {key(row): row for row in rows} if samples.any else {}
    found = {}
    for image in _rows(folder, "images") if wanted else ():
        row = wanted.get(key(image))
        if row:
            found[key(row)] = Pair(samples.true_image(image["true"]), samples.image(image["reconstructed"]), row)
    return found


def within(settings: Sequence[Sequence[Pair]], budget: int) -> list[Pair]:
    """Return pairs of at most `budget` characters in all: the first of each setting, then the second of each."""
    chosen = []
    for pair in (pair for rank in zip_longest(*settings) for pair in rank if pair):
        budget -= pair.size
        if budget < 0:
            break
        chosen.append(pair)
    return chosen


def strips(folder: RunFolder, samples: Samples, worst: Collection[tuple[Any, ...]] = ()) -> list[Strip]:
    """Return the first searches of each arm and attack that have snapshots.

    `worst` are the keys of those that are shown if `output.images` is `worst`.
    """
    held: dict[tuple[Any, ...], list[Row]] = {}
    for row in folder.read_table("snapshots").to_pylist() if samples.any else ():
        if samples.mode != "worst" or key(row) in worst:
            held.setdefault(key(row), []).append(row)
    chosen: dict[tuple[str, str], list[list[Row]]] = {}
    for rows in held.values():
        mine = chosen.setdefault((rows[0]["arm"], rows[0]["attack"]), [])
        if len(mine) < STRIPS:
            mine.append(sorted(rows, key=lambda row: row["iteration"]))
    shown = [rows for group in chosen.values() for rows in group]
    true = pictures(folder, (rows[0] for rows in shown), samples)
    return [
        Strip(
            rows[0],
            [(row["iteration"], samples.image(row["image"])) for row in rows],
            true[key(rows[0])].true if key(rows[0]) in true else None,
        )
        for rows in shown
    ]


def made(
    folder: RunFolder, wanted: set[tuple[str, str]], samples: Samples
) -> dict[tuple[str, str], list[tuple[str | None, str]]]:
    """Return the first generated images by (arm, attack), each as (closest true image, generated image)."""
    found: dict[tuple[str, str], list[tuple[str | None, str]]] = {}
    for image in _rows(folder, "images") if wanted and samples.mode not in ("none", "worst") else ():
        if (image["arm"], image["attack"]) in wanted:
            pairs = found.setdefault((image["arm"], image["attack"]), [])
            if len(pairs) < SHOWN:
                pairs.append((samples.true_image(image["true"]), samples.image(image["reconstructed"])))
    return found


def _rows(folder: RunFolder, table: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table of images in small batches, to save memory."""
    for batch in folder.read_table(table).to_batches(max_chunksize=64):
        yield from batch.to_pylist()
