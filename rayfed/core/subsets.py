"""Random subsets, of which many are sampled at once."""

from __future__ import annotations

import numpy as np


def subsets(rng: np.random.Generator, draws: int, choices: int, size: int) -> np.ndarray:
    """Sample uniform random subsets of range(choices), with one subset per row, (draws, size) int64.

    Vectorised over the rows; memory does not depend on `choices`. Requires `size <= choices`.
    Source: Bentley and Floyd 1987, "A sample of brilliance".
    """
    drawn = np.empty((draws, size), np.int64)
    for place, last in enumerate(range(choices - size, choices)):
        chosen = rng.integers(last + 1, size=draws)
        taken = (drawn[:, :place] == chosen[:, None]).any(axis=1)
        drawn[:, place] = np.where(taken, last, chosen)
    return drawn
