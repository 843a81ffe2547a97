"""Audit of how much one gradient of a model gives away: the scenario, and the answer in a few figures.

For whoever has a model and images and no scenario yet. The attacks are those that need nothing but a gradient; the
defences are the registry's noise, pruning and quantisation in a few strengths each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayfed.analysis.summary import Row, measured, worst

UNDEFENDED = "none"
DEFENCES: dict[str, list[dict[str, Any]]] = {
    UNDEFENDED: [],
    **{f"gaussian {s:g}": [{"name": "gaussian", "sigma": s}] for s in (1e-3, 1e-2, 1e-1)},
    **{f"prune {r:g}": [{"name": "prune", "ratio": r}] for r in (0.5, 0.9, 0.99)},
    **{f"quantise {b}-bit": [{"name": "quantise", "bits": b}] for b in (8, 4, 1)},
}
"""Defences by arm, from weak to strong within each kind."""

LARGEST_IDLG = 4
"""Largest batch on which iDLG is tried: its L-BFGS fails above, at the highest cost of all attacks."""


@dataclass(frozen=True)
class WorstCase:
    """Best attack on one image of one batch size, without a defence, and its result."""

    batch: int
    victim: int
    sample: int
    row: Row
    """Row of the attacks' table."""


@dataclass(frozen=True)
class DefenceEffect:
    """Effect of one defence on a gradient and on the worst reconstruction."""

    arm: str
    distortion: float
    """Mean relative distance of the defended gradient from the true one."""
    psnr: dict[int, float]
    """PSNR of the closest reconstruction (dB), by batch size."""

    def holds(self, threshold: float) -> bool:
        """Return whether no image came as close as `threshold` dB."""
        return all(value < threshold for value in self.psnr.values())


def scenario_text(
    model: str, data: dict[str, Any], batches: Sequence[int], images: int, iterations: int, seed: int
) -> str:
    """Return the audit as a scenario in YAML: one round, never played, and every attack on every batch size.

    `data` is what `data_section` returns.
    """
    return yaml.safe_dump(
        {
            "name": "audit",
            "seed": seed,
            "data": data,
            "model": {"name": model},
            "federation": {"rounds": 1, "clients": images},
            "arms": DEFENCES,
            "attacks": [attack for batch in batches for attack in _attacks(batch, images, iterations)],
        },
        sort_keys=False,
    )


def data_section(data: str, size: int | None) -> dict[str, Any]:
    """Return a scenario's `data` of a Parquet file, a folder of images by class, or the name of a data set.

    `size` is the height and width to which images are resized; None: what they have.
    """
    path, resized = Path(data).expanduser(), {} if size is None else {"size": size}
    if path.suffix == ".parquet" or any(path.glob("*.parquet")):
        return {"name": "parquet", "train": data} | resized
    return ({"name": "image_folder", "root": data} if path.is_dir() else {"name": data}) | resized


def _attacks(batch: int, images: int, iterations: int) -> list[dict[str, Any]]:
    observed = {"observes": "gradient", "batch_size": batch, "victims": -(-images // batch)}
    methods: list[dict[str, Any]] = [{"name": "analytic"}, {"name": "inverting_gradients", "iterations": iterations}]
    if batch <= LARGEST_IDLG:
        methods.append({"name": "idlg", "iterations": -(-iterations // 20), "restarts": 1})  # of 20 steps each
    return [method | observed | {"label": f"{method['name']} batch {batch}"} for method in methods]


def worst_cases(attacks: Sequence[Row]) -> list[WorstCase]:
    """Return every attacked image in its worst case, by batch size, the closest reconstruction first."""
    images: dict[tuple[int, int, int], list[Row]] = {}
    for row in attacks:
        if row["arm"] == UNDEFENDED:
            images.setdefault((row["batch_size"], row["victim"], row["sample"]), []).append(row)
    found = [WorstCase(*key, closest) for key, rows in images.items() if (closest := worst(rows)) is not None]
    return sorted(found, key=lambda case: (case.batch, -case.row["psnr"]))


def defence_effects(attacks: Sequence[Row]) -> list[DefenceEffect]:
    """Return the effect of every defence, the one that distorts least first."""
    arms: dict[str, list[Row]] = {}
    for row in attacks:
        if measured(row["psnr"]):
            arms.setdefault(row["arm"], []).append(row)
    found = [DefenceEffect(arm, _mean(rows, "distortion"), _closest(rows)) for arm, rows in arms.items()]
    return sorted(found, key=lambda effect: effect.distortion)


def _mean(rows: Sequence[Row], column: str) -> float:
    mean: float = sum(row[column] for row in rows) / len(rows)
    return mean


def _closest(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {
        batch: max(row["psnr"] for row in rows if row["batch_size"] == batch)
        for batch in sorted({row["batch_size"] for row in rows})
    }
