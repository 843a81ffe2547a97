"""Transfer of the progress of searches from attackers to the driver, through Ray's key-value store.

An actor cannot take other calls during a search, so it writes its progress and the driver reads it. Lost reports are
not repeated, because they only inform the user.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict

import ray
from ray.experimental import internal_kv as table

from rayfed.attacks.progress import Standing

_NAMESPACE = b"rayfed_standings"


def post(standing: Standing) -> None:
    """Publish the progress of the search that the actor's present call runs."""
    with suppress(Exception):  # a failed report must not end the search
        key = ray.get_runtime_context().get_task_id()
        table._internal_kv_put(str(key), json.dumps(asdict(standing)), namespace=_NAMESPACE)


def look(call: ray.ObjectRef[object]) -> Standing | None:
    """Return the progress of a call's search, given a reference to the call's result; None if not reported yet."""
    with suppress(Exception):
        if written := table._internal_kv_get(call.task_id().hex(), namespace=_NAMESPACE):
            return Standing(**json.loads(written))
    return None


def forget(call: ray.ObjectRef[object]) -> None:
    """Delete the progress of a call's search from Ray's key-value store."""
    with suppress(Exception):
        table._internal_kv_del(call.task_id().hex(), namespace=_NAMESPACE)
