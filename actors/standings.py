"""How far searches in attackers are, on its way to the driver: through Ray's table of keys and values.

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
    """Write where the search of the call stands that this actor is at."""
    with suppress(Exception):  # a search does not end because nobody hears of it
        key = ray.get_runtime_context().get_task_id()
        table._internal_kv_put(str(key), json.dumps(asdict(standing)), namespace=_NAMESPACE)


def look(call: ray.ObjectRef[object]) -> Standing | None:
    """Return where the search of a call stands, by the reference to its result; None where none was told yet."""
    with suppress(Exception):
        if written := table._internal_kv_get(call.task_id().hex(), namespace=_NAMESPACE):
            return Standing(**json.loads(written))
    return None


def forget(call: ray.ObjectRef[object]) -> None:
    """Take what stands of a call out of the table."""
    with suppress(Exception):
        table._internal_kv_del(call.task_id().hex(), namespace=_NAMESPACE)
