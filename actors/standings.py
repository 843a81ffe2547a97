"""Progress of searches on its way from attackers to the driver, by Ray's key-value store.

An attacker is at its search and answers nobody meanwhile, so it writes and the driver looks. What is lost is not made
again: it is of no use to anybody but who waits.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict

import ray
from ray.experimental import internal_kv as table

from rayfed.attacks.telling import Standing

_NAMESPACE = b"rayfed_standings"


def post(standing: Standing) -> None:
    """Write the progress of the search in the call that this actor is running."""
    with suppress(Exception):  # a search does not end because nobody hears of it
        key = ray.get_runtime_context().get_task_id()
        table._internal_kv_put(str(key), json.dumps(asdict(standing)), namespace=_NAMESPACE)


def look(call: ray.ObjectRef[object]) -> Standing | None:
    """Return the progress of a call's search, by the reference to its result; None before the first report."""
    with suppress(Exception):
        if written := table._internal_kv_get(call.task_id().hex(), namespace=_NAMESPACE):
            return Standing(**json.loads(written))
    return None


def forget(call: ray.ObjectRef[object]) -> None:
    """Remove a call's progress from the store."""
    with suppress(Exception):
        table._internal_kv_del(call.task_id().hex(), namespace=_NAMESPACE)
