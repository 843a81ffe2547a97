"""Check whether the order of a pipeline breaks the privacy guarantee of one of its defences."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.defences.base import Defence
from rayfed.privacy.spending import Spending

_STAGES = "wrap_gradient", "wrap_update"


def broken_by(pipeline: Sequence[tuple[str, Defence]], place: int, spent: Spending) -> str | None:
    """Return which defence breaks the guarantee of the defence at index `place`, and how, in words; else None.

    `pipeline` lists each defence with its name, in the order written.
    """
    own = next(stage for stage in _STAGES if pipeline[place][1].overrides(stage))
    for index, (name, other) in enumerate(pipeline):
        # All hooks on the update run after those on the gradient, in any order of the defences.
        outside = [stage for stage in _STAGES if stage > own or (stage == own and index > place)]
        if index != place and not other.post_processes and any(other.overrides(stage) for stage in outside):
            return f"{name} reads the data again and changes the protected values"
        if spent.unit == "sample" and other.private_epochs:
            return (
                f"the private layers of {name} train on the samples without clipping or noise, so one sample changes "
                "the gradients of all others"
            )
        if spent.unit == "sample" and other.overrides("wrap_data"):
            return f"{name} changes the samples before it, so that the clip bound does not apply to single samples"
    return None
