"""Ray actor for the server."""

from __future__ import annotations

from actors.process import Renewable, ResourceShare, set_up
from rayfed.simulation.server import ArmState, Server, ServerRole


class ServerActor(Renewable, Server):
    """Ray actor that runs the methods of `Server`. The server does not train, so the models stay on the CPU."""

    computes = False

    def __init__(self, share: ResourceShare, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        set_up(share)
        super().__init__(roles, saved)
