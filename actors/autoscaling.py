"""Requests to Ray's autoscaler for nodes that a run could use beyond those that are up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray.autoscaler.sdk import request_resources

from actors.cluster import Allotment


@contextmanager
def asking(most: Allotment) -> Iterator[None]:
    """Ask Ray's autoscaler for room for all these actors during the block; no effect on a cluster without autoscaler.

    A cluster has one request, the latest of any driver's, and keeps that of a driver that is killed.
    """
    shares = [most.client] * most.clients + [most.attacker] * most.attackers
    bundles = [{"CPU": share.num_cpus} | ({"GPU": share.num_gpus} if share.num_gpus else {}) for share in shares]
    request_resources(bundles=bundles, bundle_label_selectors=[dict(share.labels) for share in shares])
    try:
        yield
    finally:
        with suppress(Exception):  # there may be no cluster any more, and the block's own error is of more use
            request_resources(bundles=[])
