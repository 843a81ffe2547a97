"""Distribution of samples and classes over the clients of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class LabelMix:
    """Distribution of samples and classes over clients."""

    clients: list[int]
    classes: dict[int, str]
    """Names of classes by label."""
    counts: np.ndarray
    """Number of samples, (classes, clients) int64."""
    samples: tuple[int, float, int]
    """Minimum, median and maximum number of samples per client."""
    classes_held: tuple[int, float, int]
    """Minimum, median and maximum number of classes per client."""


def compute_label_mix(partition: pa.Table) -> LabelMix | None:
    """Return the distribution of samples and classes over clients; None without the table `partition`."""
    if not partition.num_rows:
        return None
    clients, columns = np.unique(partition["client"], return_inverse=True)
    labels, firsts, rows = np.unique(partition["label"], return_index=True, return_inverse=True)
    counts = np.zeros((len(labels), len(clients)), np.int64)
    counts[rows, columns] = partition["count"]
    names = partition["class_name"].take(firsts).to_pylist()
    samples, held = counts.sum(axis=0), (counts > 0).sum(axis=0)
    return LabelMix(
        clients=clients.tolist(),
        classes={label: name or str(label) for label, name in zip(labels.tolist(), names, strict=True)},
        counts=counts,
        samples=(int(samples.min()), float(np.median(samples)), int(samples.max())),
        classes_held=(int(held.min()), float(np.median(held)), int(held.max())),
    )
