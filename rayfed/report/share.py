"""A copy of a run or sweep to give to others: settings and tables of figures, without anybody's samples or secrets.

What is copied is named here, so a file that is not known stays behind: the checkpoint (clients' private states, and the
server's), the tables with true samples or reconstructions of them, the machine's description and logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rayfed.analysis.loading import Results, Sweep
from rayfed.analysis.sweep_folder import OUTCOMES_FILE, TRIALS, SweepFolder
from rayfed.errors import UserError
from rayfed.store import client_states
from rayfed.store.folder import SCENARIO, RunFolder
from rayfed.store.schemas import TABLES

SAMPLES = ("images", "texts", "snapshots")
"""Tables with the victims' samples, as they are or as they were reconstructed."""


@contextmanager
def sharing(results: Results, out: str) -> Iterator[RunFolder]:
    """Copy what can be shared of a run or sweep to a new folder, a local path or fsspec URL, for more to be added.

    The copy is removed again where that fails, or what is done with it. Raises `UserError` where there is something
    already, `RunError` for what cannot be read or written.
    """
    target = RunFolder.at(out)
    if target.exists(""):
        raise UserError(f"'{out}' exists already: name a new folder with --out")
    try:
        if isinstance(results, Sweep):
            sweep = SweepFolder(results.folder)
            for trial in (f"{TRIALS}/{name}" for name in sweep.trial_names()):
                _copy(sweep.trial(trial), RunFolder(target.fs, f"{target.root}/{trial}"))
        _copy(results.folder, target)
        yield target
    except BaseException:
        with suppress(Exception):  # there may be nothing yet, and what failed is what to tell of
            target.fs.rm(target.root, recursive=True)
        raise


def has_private_states(results: Results) -> bool:
    """Return whether the folder holds what clients of the run, or of a trial, keep to themselves."""
    sweep = SweepFolder(results.folder)
    trials = [sweep.trial(f"{TRIALS}/{name}") for name in sweep.trial_names()] if isinstance(results, Sweep) else []
    return any(client_states.holds_any(folder) for folder in (results.folder, *trials))


def _copy(source: RunFolder, target: RunFolder) -> None:
    tables = [name for table in TABLES if table not in SAMPLES for name in source.parts(table)]
    for name in (*tables, OUTCOMES_FILE, "status.json", SCENARIO):  # the last one makes it a run folder
        if source.exists(name):
            target.write_bytes(name, source.read_bytes(name))
