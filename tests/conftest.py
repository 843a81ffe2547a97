"""Define fixtures and settings for all tests: local data sets, one Ray per session, and the distribution of tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import settings

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # otherwise a wrong call to Ray starts it in a quick test
torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, database=None, deadline=timedelta(seconds=60))  # a longer test hangs
settings.register_profile("random", derandomize=False, print_blob=True, deadline=timedelta(seconds=60))
settings.load_profile("ci" if os.environ.get("CI") else "random")

REPOSITORY = Path(__file__).resolve().parent.parent
WORKERS = 2
"""Maximum number of processes. With more, importing PyTorch takes longer than the tests."""


def missing(what: str) -> NoReturn:
    """Skip a test because of a missing requirement. In CI, fail instead."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} (CI must not skip it)", pytrace=False)
    pytest.skip(what, allow_module_level=True)


def imported(module: str, extra: str) -> Any:
    """Import a module of an extra, or skip the test if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        missing(f"{module} is not installed: pip install 'rayfed[{extra}]'")


LONGEST = ("test_tutorials", "test_audit", "test_gate")
"""Files whose tests take up to a minute each."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes: several for all quick or all engine tests, or else one."""
    named = config.option.file_or_dir or config.option.keyword
    whole = config.option.markexpr in ("not engine and not slow", "engine and not slow")
    return min(WORKERS, os.cpu_count() or 1) if whole and not named else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one process, except tutorials, and all tests that share one Ray in one process.

    Tests are distributed in the order of their list. By default, the largest files would come first, and one process
    would wait at the end for a long test of a small file.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ray" if _shares_ray(file) else nodeid if "test_tutorials" in file else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


@cache
def _shares_ray(file: str) -> bool:
    return "ray_session" in (REPOSITORY / file).read_text()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest tests first, so that all processes end at the same time."""
    longer = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(
        key=lambda item: (
            not _shares_ray(item.nodeid.partition("::")[0]),
            item.path.stem not in LONGEST,
            item.path not in longer,
        )
    )


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder with real data sets, or skip the test if there is none."""
    folder = Path(os.environ.get("RAYFED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        missing(f"no data sets at {folder}; set RAYFED_DATA to their folder")
    return folder


@pytest.fixture(scope="session", autouse=True)
def compiled_modules(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cache bytecode for all processes, even if Python is configured not to write it.

    Otherwise every actor and command compiles PyTorch again, which takes 3 s more.
    """
    if sys.dont_write_bytecode:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def no_ray_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands that tests run in this process from starting Ray in the background."""
    monkeypatch.setattr("actors.local_ray.starting", nullcontext)


@pytest.fixture
def reports() -> None:
    """Make runs of a quick test write their report."""


@pytest.fixture(autouse=True)
def no_report_that_nobody_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no reports in quick tests without the fixture `reports`, as a report takes longer than a small run.

    Runs of engine and slow tests always write reports.
    """
    longer = any(map(request.node.get_closest_marker, ("engine", "slow")))
    if not longer and "reports" not in request.fixturenames:
        monkeypatch.setattr("rayfed.runs.recorder.RunRecorder._report", lambda recorder: None)


@pytest.fixture(scope="session")
def ray_session(compiled_modules: None) -> Iterator[None]:
    """Start one Ray for the session, with four pretended CPUs to compare runs of 1, 2 and 4 actors.

    Runs reuse actors, as each takes seconds to import PyTorch.
    """
    import ray

    from tests.helpers.run_fixtures import CPUS, sharing_actors

    ray.init(address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    with sharing_actors():
        yield
    ray.shutdown()
