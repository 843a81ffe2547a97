"""Effect of a pipeline's order on the guarantee of a mechanism in it."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.defences.base import Defence
from rayfed.privacy.spending import Spending

_STAGES = "wrap_gradient", "wrap_update"


def broken_by(pipeline: Sequence[tuple[str, Defence]], place: int, spent: Spending) -> str | None:
    """Return the other defence that breaks the guarantee of the one at a place, and how, in words; or None.

    `pipeline` has each defence with its name, in the order written.
    """
    own = next(stage for stage in _STAGES if pipeline[place][1].overrides(stage))
    for index, (name, other) in enumerate(pipeline):
        # The hooks on the update are all outside those on the gradient, wherever they are written.
        outside = [stage for stage in _STAGES if stage > own or (stage == own and index > place)]
        if index != place and not other.post_processes and any(other.overrides(stage) for stage in outside):
            return f"{name} works on what it sends and looks at the data again"
        if spent.unit == "sample" and other.private_epochs:
            return (
                f"private layers of {name} learn from the samples without clip and noise, so one sample moves "
                "the gradients of all others"
            )
        if spent.unit == "sample" and other.overrides("wrap_data"):
            return f"{name} changes the samples before it, so that the clip bound is not one sample's any more"
    return None
