"""What several test files share: real data at hand, one Ray for the whole session, small federations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, database=None, deadline=timedelta(seconds=60))  # longer is a hang
settings.register_profile("random", derandomize=False, print_blob=True, deadline=timedelta(seconds=60))
settings.load_profile("ci" if os.environ.get("CI") else "random")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data sets; tests that need one are skipped, with this reason, where it is not there."""
    folder = Path(os.environ.get("RAYFED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}; set RAYFED_DATA to their folder")
    return folder


@pytest.fixture(scope="session", autouse=True)
def compiled_modules(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every actor and command is a new process, and each compiled all of torch again (6 s of a processor in place of 3)
    where Python is told to keep nothing: here one compiles for all."""
    if sys.dont_write_bytecode:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def no_ray_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that tests run in their own process would each start a Ray, also where they only tell of a mistake."""
    monkeypatch.setattr("actors.local_ray.starting", nullcontext)


@pytest.fixture(scope="session")
def ray_session(compiled_modules: None) -> Iterator[None]:
    """One Ray of this machine with four pretended CPUs, so that runs of 1, 2 and 4 actors can be compared."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
