"""Text on attacks that did worse than the same attack with less knowledge."""

from __future__ import annotations

from rayfed.evidence.knowledge_pairs import FailedAttack
from rayfed.metrics.measures import MEASURES


def failed_attack_text(failed: FailedAttack) -> str:
    """Return a sentence on the failed attack, with arms and measures."""
    places = []
    for title, measures in failed.measures.items():
        places.append(f"{title} ({', '.join(MEASURES[measure].title for measure in measures)})")
    mask = "; if the defence exposes a mask (`exposed`), check that first" if failed.knows_defence else ""
    return (
        f"{failed.attack} did worse than {failed.weaker} on {'; '.join(places)}, although it has more knowledge, so "
        f"this attack failed{mask}."
    )
