"""Grant of public data, which no client owns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    from rayfed.scenario import AttackSpec, Scenario
    from rayfed.simulation.client.runtime import ClientRuntime


@component
class Public(Grant):
    """Public samples and labels: the share `data.public` of the training samples, which no client owns."""

    describe: ClassVar[str] = "public data"
    fills: ClassVar[tuple[str, ...]] = ("public",)

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[str]:
        """Yield an error message if the scenario has no public data."""
        if not scenario.data.public:
            yield "there are no public data; set `data.public`, such as 0.1, or remove `public` from `knowledge`"

    def known_before(self, runtime: ClientRuntime) -> dict[str, Any]:
        """Return the public data: inputs (M, *shape) and labels (M,)."""
        return {"public": runtime.public}
