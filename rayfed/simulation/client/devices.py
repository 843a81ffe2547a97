"""Devices of the clients in virtual time, sampled from the client's number.

Client i uses block i (four numbers) of a counter-based generator (Philox, Salmon et al. 2011). Thus the device of one
client is computed without the others, and those of a million in one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from statistics import NormalDist

import numpy as np

from rayfed.core import seeds
from rayfed.errors import ScenarioError, nearest
from rayfed.scenario import Scenario
from rayfed.scenario.system import DeviceClass, System

_BYTES = 1e6 / 8
"""Bytes per second of one Mbit/s."""
_MEGA = 1e6
_COLUMNS = ("compute", "memory", "down", "up", "latency", "failure")
_HOURS = 24
Stamp = tuple[int, int] | None
_MISSING = "not found; give the local path of a Parquet file of devices"


@dataclass(frozen=True)
class Device:
    """One client's device: speed, memory, bandwidth, latency and probability of failure."""

    speed: float
    """Training speed, in FLOP/s."""
    memory: float
    """Memory for training, in bytes; infinite if not given."""
    down: float
    """Bandwidth from the server, in bytes per second; infinite if not given."""
    up: float
    """Bandwidth to the server, in bytes per second; infinite if not given."""
    latency: float
    """Latency of a message, in seconds."""
    failure: float
    """Probability of dropping out of a round."""


@dataclass(frozen=True)
class _Kinds:
    """Device classes, or rows of a device file, as columns (kinds,)."""

    shares: np.ndarray
    """Cumulative shares of the clients, without the last, which is 1."""
    columns: dict[str, np.ndarray]
    available: np.ndarray
    """Share of the devices that are available, by hour of the day, (kinds, 24)."""
    by_number: bool
    """Whether client i has kind i."""


def devices(scenario: Scenario, clients: Sequence[int]) -> Iterator[Device]:
    """Yield the device of each client in `clients`; the scenario must have `federation.system`."""
    system = _system(scenario)
    kinds = _kinds(system.model_dump_json(), scenario.federation.clients, stamp(system))
    for client in clients:
        kind, fast, near, _ = _numbers(scenario.seed, client, 1)[0].tolist()
        row = client if kinds.by_number else int(np.searchsorted(kinds.shares, kind, side="right"))
        own = {name: float(values[row]) for name, values in kinds.columns.items()}
        speed, bandwidth = _log_normal(fast, system.compute_spread), _log_normal(near, system.network_spread)
        yield Device(
            speed=system.reference * own["compute"] * speed,
            memory=own["memory"] * _MEGA,
            down=own["down"] * _BYTES * bandwidth,
            up=own["up"] * _BYTES * bandwidth,
            latency=own["latency"],
            failure=own["failure"],
        )


def stamp(system: System) -> Stamp:
    """Return the size and modification time of the device file, to detect changes; None without a device file."""
    if system.file is None or not system.file.is_file():
        return None
    found = system.file.stat()
    return found.st_size, found.st_mtime_ns


def there(seed: int, written: str, read: Stamp, round: int, clients: int) -> np.ndarray:
    """Return whether each client is available at the start of a round, (clients,) bool, sampled once per hour.

    `written` is the system as JSON, `read` the stamp of its file.
    """
    hour = int(System.model_validate_json(written).hour(round))
    own = _kinds(written, clients, read).available[:, hour % _HOURS][_rows(seed, written, clients, read)]
    drawn = _stream(seeds.derive_integer(seed, "devices there", hour), 0, -(-clients // 4))
    here: np.ndarray = _uniform(drawn.reshape(-1)[:clients]) < own
    return here


def fails(scenario: Scenario, round: int, client: int, device: Device) -> bool:
    """Return whether a client's device drops out during a round."""
    if not device.failure:
        return False
    drawn = seeds.numpy_generator(scenario.seed, "device fails", round, client).random()
    return bool(drawn < device.failure)


def digest(scenario: Scenario) -> str | None:
    """Return the device file's SHA-256, or None without a file; raises `ScenarioError` if the file is missing."""
    system = scenario.federation.system
    if system is None or system.file is None:
        return None
    if not system.file.is_file():
        raise _refused(system.file, _MISSING)
    return sha256(system.file.read_bytes()).hexdigest()


def check_devices(scenario: Scenario) -> None:
    """Raise `ScenarioError` if the device file is invalid, or needs a field that the scenario does not set."""
    system = scenario.federation.system
    if system is None or system.file is None:
        return
    kinds = _kinds(system.model_dump_json(), scenario.federation.clients, stamp(system))
    if system.every is None and kinds.available.min() < 1:
        raise ScenarioError(
            f"federation.system.every: required, because the availability in {system.file} depends on the hour; give "
            f"a number of seconds"
        )
    drop = bool(kinds.columns["failure"].any()) or not np.isinf(kinds.columns["memory"]).all()
    if system.deadline is None and drop:
        raise ScenarioError(
            f"federation.system.deadline: required, because devices of {system.file} may drop out; give a "
            f"number of seconds"
        )


def _system(scenario: Scenario) -> System:
    assert scenario.federation.system is not None
    return scenario.federation.system


def _stream(key: int, first: int, blocks: int) -> np.ndarray:
    """Return consecutive blocks of a counter-based generator, (blocks, 4) uint64."""
    place, secret = divmod(key, 2**128)
    stream = np.random.Philox(counter=place, key=secret)
    raw: np.ndarray = stream.advance(first).random_raw(4 * blocks)
    return raw.reshape(blocks, 4)


def _uniform(raw: np.ndarray) -> np.ndarray:
    """Return uniform numbers in the open interval (0, 1), as 0 and 1 give infinite normal quantiles."""
    uniform: np.ndarray = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53
    return uniform


def _numbers(seed: int, first: int, clients: int) -> np.ndarray:
    """Return uniform numbers for consecutive clients, (clients, 4): kind, speed, bandwidth and an unused one."""
    return _uniform(_stream(seeds.derive_integer(seed, "devices"), first, clients))


def _log_normal(uniform: float, spread: float) -> float:
    """Return a log-normal factor of median 1. Its last bits depend on the C library's `exp`."""
    return math.exp(spread * NormalDist().inv_cdf(uniform)) if spread else 1.0


@lru_cache(maxsize=2)
def _rows(seed: int, written: str, clients: int, read: Stamp) -> np.ndarray:
    """Return the kind of every client, (clients,)."""
    kinds = _kinds(written, clients, read)
    if kinds.by_number:
        return np.arange(clients)
    drawn = _numbers(seed, 0, clients)[:, 0]
    return np.searchsorted(kinds.shares, drawn, side="right").astype(np.int32)


@lru_cache(maxsize=2)
def _kinds(written: str, clients: int, read: Stamp) -> _Kinds:
    """Return the device classes or rows of a `system` section, given as JSON."""
    system = System.model_validate_json(written)
    if system.file is not None:
        return _of_file(system.file, clients)
    classes = list(system.devices.values())
    columns = {name: np.array([_given(getattr(one, name)) for one in classes]) for name in _COLUMNS}
    return _Kinds(_ends([one.share for one in classes]), columns, np.array([one.by_hour for one in classes]), False)


def _of_file(file: Path, clients: int) -> _Kinds:
    """Return the rows of a device file (Parquet); raises `ScenarioError` if it is invalid."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    refused = partial(_refused, file)
    if not file.is_file():
        raise refused(_MISSING)
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise refused(f"cannot be read as a Parquet file: {error}") from error
    if unknown := sorted(set(table.column_names) - {*_COLUMNS, "available"}):
        raise refused(f"has a column '{unknown[0]}': {nearest(unknown[0], [*_COLUMNS, 'available'])}")
    if not table.num_rows or not table.column_names:
        raise refused("has no devices; add at least one row")
    default, columns = DeviceClass(), {}
    for name in _COLUMNS:
        given = _given(getattr(default, name))
        columns[name] = np.full(table.num_rows, given)
        if name in table.column_names:
            try:
                found = table[name].cast(pa.float64()).to_numpy(zero_copy_only=False)
            except pa.ArrowException as error:
                raise refused(f"has values in the column '{name}' that are not numbers: {error}") from error
            columns[name] = np.where(np.isnan(found), given, found)
        least, most = (
            (0, np.inf) if name == "latency" else (0, 1) if name == "failure" else (np.nextafter(0, 1), np.inf)
        )
        if (wrong := ~((columns[name] >= least) & (columns[name] <= most))).any():
            row = int(wrong.argmax())
            raise refused(f"has {columns[name][row]:g} for '{name}' in row {row}, which is out of range")
    available = np.ones((table.num_rows, _HOURS))
    if "available" in table.column_names:
        try:
            available[:] = np.array(table["available"].to_pylist(), float).reshape(table.num_rows, -1)
        except (TypeError, ValueError) as error:
            raise refused("needs one number or 24 numbers in each row of the column 'available'") from error
        if not ((available >= 0) & (available <= 1)).all():
            raise refused("has values in the column 'available' that are not between 0 and 1")
    return _Kinds(_ends(np.ones(table.num_rows)), columns, available, table.num_rows == clients)


def _refused(file: Path, why: object) -> ScenarioError:
    return ScenarioError(f"federation.system.file: '{file}' {why}")


def _given(value: float | None) -> float:
    """Return a property of a device; infinite if it is not given."""
    return math.inf if value is None else value


def _ends(shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the cumulative shares without the last, so that rounding leaves no sample without a kind."""
    ends: np.ndarray = np.cumsum(shares)[:-1] / np.sum(shares)
    return ends
