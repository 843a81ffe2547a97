"""ServerActor: the global weights of every arm and the fold of what clients send."""

from __future__ import annotations

from typing import Any

from actors.process import Share, set_up
from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.server import GlobalModel, TreeFold
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.scenario import Scenario
from rayfed.training.arm import build_arm
from rayfed.training.host import Sent
from rayfed.update import Named

ArmState = dict[str, Any]
"""`weights`, `buffers` and the optimiser's `state`: what the checkpoint keeps of an arm."""


class ServerActor:
    """Sees updates (or what the aggregation makes of them) and weights; never data, keys or client state."""

    def __init__(
        self,
        scenario: Scenario,
        image_shape: tuple[int, int, int],
        classes: int,
        share: Share,
        saved: dict[str, ArmState],
    ) -> None:
        """`saved` holds the arms of a checkpoint, or nothing for a new run."""
        device = set_up(share)
        self._aggregation: Aggregation = scenario.federation.aggregation.build()
        self._folds: dict[str, TreeFold] = {}
        server = scenario.federation.server
        optimiser = ServerOptimiser(server.optimiser, scenario.server_lr, server.momentum)
        self._models: dict[str, GlobalModel] = {}
        for name, stack in scenario.stacks.items():
            if name in saved:
                model = GlobalModel(optimiser=optimiser, **saved[name])
            else:
                arm = build_arm(scenario.model, stack, image_shape, classes, scenario.seed)
                model = GlobalModel.untrained(arm.model.to(device), optimiser)
            self._models[name] = model

    def begin(self, arm: str, round: int, cohorts: int) -> Sent:
        """Open a round that expects so many partial results; what clients are sent."""
        self._folds[arm] = TreeFold(self._aggregation, cohorts)
        model = self._models[arm]
        return Sent(round, model.weights, model.buffers)

    def add(self, arm: str, index: int, partial: Any) -> None:
        """Take the partial result of cohort `index`, in any order, each once."""
        self._folds[arm].add(index, partial)

    def finish(self, arm: str, round: int) -> Sent:
        """Step on what was added; the weights after the round."""
        step, buffers = self._aggregation.combine(self._folds.pop(arm).total())
        model = self._models[arm]
        model.apply(step, buffers)
        return Sent(round + 1, model.weights, model.buffers)

    def state(self) -> dict[str, dict[str, Named | dict[str, Named]]]:
        """What a checkpoint keeps, arm by arm."""
        return {
            name: {"weights": m.weights, "buffers": m.buffers, "state": m.state} for name, m in self._models.items()
        }
