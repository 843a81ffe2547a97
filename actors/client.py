"""Run a client worker in its own process."""

from __future__ import annotations

from actors.process import Renewable, ResourceShare, set_up
from rayfed.data.base import Dataset
from rayfed.data.partitions.base import Parts
from rayfed.engine.worker import ClientWorker
from rayfed.scenario import Scenario


class ClientActor(Renewable, ClientWorker):
    """An actor that runs the methods of `ClientWorker` on its share of a node. Only these actors have data."""

    def __init__(
        self, share: ResourceShare, scenario: Scenario, data: Dataset, parts: Parts, validation: Parts
    ) -> None:
        super().__init__(scenario, data, parts, set_up(share), validation)
