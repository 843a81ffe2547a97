"""Where every random number comes from: a generator for each purpose, keyed by (seed, purpose, round, client, ...).

Keys, not a shared stream: what one client draws cannot depend on who ran before it, on which actor, or whether a call
was repeated after a crash.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def _sequence(key: tuple[int | str, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([zlib.crc32(k.encode()) if isinstance(k, str) else k for k in key])


def torch_generator(*key: int | str) -> torch.Generator:
    """A CPU generator for one purpose; the same key gives the same stream on every machine."""
    return torch.Generator().manual_seed(int(_sequence(key).generate_state(1, np.uint64)[0] >> 1))


def numpy_generator(*key: int | str) -> np.random.Generator:
    """The numpy counterpart of `torch_generator`."""
    return np.random.default_rng(_sequence(key))


def again(repeat: int) -> tuple[int, ...]:
    """The end of a key for what is repeated: nothing the first time, which is as if there were no repeats."""
    return (repeat,) if repeat else ()
