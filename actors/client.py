"""Ray actor for a client worker."""

from __future__ import annotations

from actors.process import Renewable, ResourceShare, set_up
from rayfed.data.base import Dataset
from rayfed.data.partitions.base import Parts
from rayfed.scenario import Scenario
from rayfed.simulation.executors.worker import ClientWorker


class ClientActor(Renewable, ClientWorker):
    """Ray actor that runs the methods of `ClientWorker` on a share of a node. Only client actors have data."""

    def __init__(
        self, share: ResourceShare, scenario: Scenario, data: Dataset, parts: Parts, validation: Parts
    ) -> None:
        super().__init__(scenario, data, parts, set_up(share), validation)
