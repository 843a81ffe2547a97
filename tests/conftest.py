"""What several test files share: real data at hand, one Ray for the whole session, the tiers."""

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

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a call to Ray by mistake starts one, in a quick test
torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, database=None, deadline=timedelta(seconds=60))  # longer is a hang
settings.register_profile("random", derandomize=False, print_blob=True, deadline=timedelta(seconds=60))
settings.load_profile("ci" if os.environ.get("CI") else "random")

REPOSITORY = Path(__file__).resolve().parent.parent
WORKERS = 2
"""Processes of a tier: more than two import PyTorch for longer than they test."""


def missing(what: str) -> NoReturn:
    """Skip a test for what this machine lacks; in CI, which has to bring everything, it fails."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} (CI must not skip it)", pytrace=False)
    pytest.skip(what, allow_module_level=True)


def imported(module: str, extra: str) -> Any:
    """A module of an extra, where it is installed."""
    try:
        return import_module(module)
    except ImportError:
        missing(f"{module} is not installed: pip install 'rayfed[{extra}]'")


LONGEST = ("test_tutorials", "test_audit", "test_gate")
"""Files of some tests that take a minute each."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes share whole tiers alone: a few files are through sooner in one."""
    named = config.option.file_or_dir or config.option.keyword
    whole = config.option.markexpr in ("not engine and not slow", "engine and not slow")
    return min(WORKERS, os.cpu_count() or 1) if whole and not named else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, but tutorials, and in one those of all files that share one Ray.

    They are dealt in the order of their list. The scheduler's own begins with the files of most tests: one long test
    comes last, and the other process has nothing left meanwhile.
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
    """Put first the tests that take longest, so that two processes end together."""
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
    """The folder with real data sets; tests that need one are skipped, with this reason, where it is not there."""
    folder = Path(os.environ.get("RAYFED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        missing(f"no data sets at {folder}; set RAYFED_DATA to their folder")
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


@pytest.fixture
def reports() -> None:
    """For quick tests that read the report of a run which they play."""


@pytest.fixture(autouse=True)
def no_report_that_nobody_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small run's report takes longer than the run: of quick ones only those have it that `reports` is asked for.

    Those of the engine's tests, with every scenario and tutorial among them, end as users' do.
    """
    longer = any(map(request.node.get_closest_marker, ("engine", "slow")))
    if not longer and "reports" not in request.fixturenames:
        monkeypatch.setattr("rayfed.engine.recorder.RunRecorder._report", lambda recorder: None)


@pytest.fixture(scope="session")
def ray_session(compiled_modules: None) -> Iterator[None]:
    """One Ray of this machine with four pretended CPUs, so that runs of 1, 2 and 4 actors can be compared; runs leave
    their actors to the next, for each takes seconds to import PyTorch.
    """
    import ray

    from tests.run_fixtures import CPUS, sharing_actors

    ray.init(address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    with sharing_actors():
        yield
    ray.shutdown()
