"""Requests to Ray's autoscaler for more nodes that a run could use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray.autoscaler.sdk import request_resources

from actors.cluster import Allotment


@contextmanager
def asking(most: Allotment) -> Iterator[None]:
    """Request room for all actors of an allotment from Ray's autoscaler during the block. No effect without one.

    A cluster keeps only the latest request of all drivers, even after that driver was killed.
    """
    shares = [most.client] * most.clients + [most.attacker] * most.attackers
    request_resources(
        bundles=[share.resources for share in shares], bundle_label_selectors=[dict(share.labels) for share in shares]
    )
    try:
        yield
    finally:
        with suppress(Exception):  # the cluster may be gone; then the error of the block is more useful
            request_resources(bundles=[])
