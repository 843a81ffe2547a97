"""Grant of candidates for membership inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    import numpy as np

    from rayfed.simulation.client.visit import ObservedClient, Truth
    from rayfed.update import Update

KINDS = ("member", "non-member")
MOST_EACH = 250
"""Maximum number of candidates of each kind."""


@component
class Candidates(Grant):
    """Candidates for membership inference: shuffled samples, of which the victim trained on half.

    Each member is matched with a non-member of the same label, so that labels do not reveal membership. Non-members are
    the victim's validation samples (`federation.validation`), or else test samples. The control update is computed from
    equally many held-out samples with the same labels, none of them a candidate. There are at most 500 candidates.

    With augmentation, members are the versions of the round, and non-members are augmented, too. For masked language
    models, all candidates have new masks, so an attacker that knows the client's masks may be stronger.
    """

    describe: ClassVar[str] = "candidates for membership"
    fills: ClassVar[tuple[str, ...]] = ("candidates", "control")

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the candidates, inputs (M, *shape) and labels (M,), and the M/2 samples of the control update."""
        import torch

        rows, order = self._drawn(observed, truth)
        split, _ = observed.runtime.untrained(observed.client)
        members, shuffled = torch.from_numpy(rows[0]).to(truth.labels.device), torch.from_numpy(order)
        others, control = (
            observed.as_trained_on(split, some, purpose)  # otherwise the border of a crop would reveal members
            for some, purpose in zip(rows[1:], ("non-members", "control"), strict=True)
        )
        own = truth.inputs[members], truth.labels[members]
        if observed.runtime.data.sample.modality == "tokens":  # with new masks, which do not reveal members
            own = observed.runtime.shown(observed.visit.arm, "train", truth.indices[rows[0]])
        parts = zip(own, others, strict=True)
        asked = tuple(torch.cat(part)[shuffled.to(members.device)] for part in parts)
        return {"candidates": asked, "control": control}

    def hides(self, observed: ObservedClient, truth: Truth) -> Truth:
        """Return the truth, extended by each candidate's membership."""
        from rayfed.simulation.client.visit import Candidate

        rows, order = self._drawn(observed, truth)
        numbers = [*truth.indices[rows[0]], *rows[1]]
        kinds = [kind for kind in KINDS for _ in range(rows.shape[1])]
        return truth.replace(candidates=tuple(Candidate(kinds[i], int(numbers[i])) for i in order))

    def _drawn(self, observed: ObservedClient, truth: Truth) -> tuple[np.ndarray, np.ndarray]:
        """Sample rows (3, n) of members, non-members and control, and an order (2 n,) to shuffle the first two.

        The three samples of a column have the same label, unless labels are numbers. The result depends only on the
        truth, not on the round.
        """
        import numpy as np

        from rayfed.core import seeds

        runtime = observed.runtime
        split, unseen = runtime.untrained(observed.client)
        stored = runtime.data.test_labels if split == "test" else runtime.data.train_labels
        known, of_unseen = truth.labels.cpu().numpy(), stored[unseen]
        if runtime.data.has_numbers or runtime.data.has_places:  # labels are rarely equal
            known, of_unseen = np.zeros(len(known)), np.zeros(len(of_unseen))
        draw = seeds.numpy_generator(runtime.scenario.seed, "candidates", observed.client)
        columns = [np.empty((3, 0), np.int64)]
        for label in np.unique(known):
            members, others = (draw.permutation(np.flatnonzero(of == label)) for of in (known, of_unseen))
            count = min(len(members), len(others) // 2)
            columns.append(np.stack([members[:count], *unseen[others[: 2 * count]].reshape(2, count)]))
        rows = np.concatenate(columns, axis=1)
        rows = rows[:, draw.permutation(rows.shape[1])[:MOST_EACH]]
        return rows, draw.permutation(rows[:2].size)
