"""Drawing of many random subsets at once."""

from __future__ import annotations

import numpy as np


def subsets(rng: np.random.Generator, draws: int, choices: int, size: int) -> np.ndarray:
    """Draw random subsets of range(choices), one in each row of (draws, size) int64, all equally likely.

    Floyd's algorithm (Bentley and Floyd 1987, 'A sample of brilliance'), all draws at once: its memory goes with what
    is drawn, not with the choices. Needs `size <= choices`.
    """
    drawn = np.empty((draws, size), np.int64)
    for place, last in enumerate(range(choices - size, choices)):
        chosen = rng.integers(last + 1, size=draws)
        taken = (drawn[:, :place] == chosen[:, None]).any(axis=1)
        drawn[:, place] = np.where(taken, last, chosen)
    return drawn
