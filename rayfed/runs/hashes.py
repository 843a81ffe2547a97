"""SHA-256 hashes of a run's code, data and initial weights.

The hashes are written to environment.json, so that a statement on the run identifies the inputs even if files change.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.data.base import Images
from rayfed.scenario import dotted_paths
from rayfed.simulation.client import devices
from rayfed.simulation.client.arm import Arm
from rayfed.simulation.inputs import Inputs
from rayfed.store.checkpoint import Checkpoint
from rayfed.update import digest_of

NOT_HASHED = "not hashed: read from files as needed"
"""Written instead of a hash for data that are not in memory."""


def hash_inputs(inputs: Inputs, saved: Checkpoint | None) -> dict[str, dict[str, str]]:
    """Return SHA-256 hashes of `code` by module, `data` by split and `weights` by arm (of a checkpoint, if given).

    A file of devices is included in the data as `devices`. The hash of rayfed's code covers the paths and contents of
    all its Python files, that of a user's module only its file.
    """
    return {
        "code": {"rayfed": _own_code()} | _named_code(dotted_paths(inputs.scenario.dump())),
        "data": hash_data(inputs),
        "weights": {account.name: _of_weights(account.arm, saved) for account in inputs.accounts},
    }


def changed_code(before: Mapping[str, Any], code: Mapping[str, str]) -> str | None:
    """Return a remark on modules whose code differs from the hashes in an environment.json `before`; else None."""
    known = before.get("hashes", {}).get("code", {})
    changed = [name for name, found in code.items() if known.get(name, found) != found]
    if not changed:
        return None
    return (
        f"the code of {', '.join(changed)} has changed since this run stopped: finished rounds used the old code, "
        f"further rounds use the new code; launch a new run to use only one version"
    )


def hash_data(inputs: Inputs) -> dict[str, str]:
    """Return the SHA-256 hashes of a run's data, by split (train, test, public)."""
    data = inputs.data
    splits = {"train": (data.train_images, data.train_labels), "test": (data.test_images, data.test_labels)}
    if data.public_images is not None and data.public_labels is not None:
        splits["public"] = data.public_images, data.public_labels
    found = {name: _of_samples(*split) for name, split in splits.items()}
    if of_devices := devices.digest(inputs.scenario):
        found["devices"] = of_devices
    return found


def changed_data(before: Mapping[str, Any], inputs: Inputs) -> list[str]:
    """Return the data splits whose samples or labels differ from the hashes in an environment.json `before`."""
    known = before.get("hashes", {}).get("data", {})
    return [name for name, found in hash_data(inputs).items() if known.get(name, found) != found] if known else []


@cache
def _own_code() -> str:
    package = Path(__file__).resolve().parents[1]
    digest = sha256()
    for path in sorted([*package.rglob("*.py"), *(package.parent / "actors").rglob("*.py")]):
        digest.update(repr((path.relative_to(package.parent).as_posix(), path.read_bytes())).encode())
    return digest.hexdigest()


def _named_code(names: list[str]) -> dict[str, str]:
    """Return the hashes of the user's modules that the scenario names."""
    modules = dict.fromkeys(name.partition(":")[0] for name in names)
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules}
    own = {name: file for name, file in files.items() if file and name.partition(".")[0] not in ("rayfed", "actors")}
    return {name: sha256(Path(file).read_bytes()).hexdigest() for name, file in own.items()}


def _of_samples(images: Images, labels: np.ndarray) -> str:
    if not isinstance(images, np.ndarray):
        return NOT_HASHED
    digest = sha256()
    for array in (images, labels):
        digest.update(repr((str(array.dtype), array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _of_weights(arm: Arm, saved: Checkpoint | None) -> str:
    begun = saved.server[arm.spec.name] if saved else {"weights": arm.weights, "buffers": arm.buffers}
    return digest_of({**begun["weights"], **begun["buffers"], **arm.frozen}).hex()
