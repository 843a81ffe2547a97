"""The soak's measure and verdict, on what is known to grow and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.soak import ALLOWED, judged, sample
from tests.conftest import REPOSITORY


def samples(growth: float, seed: int, minutes: float = 60.0) -> pa.Table:
    """Noise of 5 around 500, a warm-up that climbs by 100, and a growth of so much an hour."""
    seconds = np.arange(0.0, minutes * 60, 2.0)
    noise = np.random.default_rng(seed).normal(0, 5, len(seconds))
    values = 500 + noise + 100 * np.minimum(seconds / seconds[-1] * 5, 1) + growth * seconds / 3600
    return pa.table({"seconds": seconds} | dict.fromkeys(ALLOWED, values))


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_grows_and_a_warm_up_with_noise_does_not(seed: int) -> None:
    assert {verdict for _, _, verdict in judged(samples(0.0, seed))} == {"flat"}
    leaking = list(judged(samples(40.0, seed)))
    assert {verdict for _, _, verdict in leaking} == {"GROWS"}
    assert {verdict for _, _, verdict in judged(samples(0.0, seed, minutes=2.0))} == {"too short to say"}
    assert all(abs(found.value - 40) < 3 for _, found, _ in leaking)


HOLDING = """
from pathlib import Path
import numpy as np
from benchmarks.soak import sample
before = sample(Path("nowhere"))["memory"]
block = np.ones(8_000_000)
print(sample(Path("nowhere"))["memory"] - before)
"""


@pytest.mark.engine
def test_a_sample_counts_memory() -> None:
    """In a process of its own: what other tests hold in this one may be freed meanwhile."""
    root = REPOSITORY
    ended = subprocess.run([sys.executable, "-c", HOLDING], cwd=root, capture_output=True, text=True, check=True)
    assert float(ended.stdout) > 8_000_000 * 8 / 1e6 * 0.9


def test_a_sample_counts_what_this_process_holds(tmp_path: Path) -> None:
    before, done = sample(tmp_path), Event()
    with ExitStack() as held:
        for _ in range(50):
            held.enter_context((tmp_path / "f").open("wb"))
        thread = Thread(target=done.wait)
        thread.start()
        (tmp_path / "temporary").write_bytes(os.urandom(1_000_000))
        after = sample(tmp_path)
        done.set()
        thread.join()
    assert after["files"] - before["files"] == 50
    assert after["threads"] - before["threads"] == 1
    assert after["temporary"] - before["temporary"] >= 1.0
