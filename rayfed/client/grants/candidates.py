"""Grant of candidates for membership inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    import numpy as np

    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.update import Update

KINDS = ("member", "non-member")
MOST_EACH = 250
"""Most candidates of each kind that an attack is asked about."""


@component
class Candidates(Grant):
    """Shuffled samples, half of them behind the update, half not used by anybody for training.

    Each member has a non-member of its own label, from what the victim itself has held out (`federation.validation`),
    or else from the test split: that members are told by their labels is no leak. As many samples from there, which are
    no candidates and of the same labels, make the update of the attack's control. There are as many candidates as can
    be matched, 500 at most; which is which stays where scores are made. Where clients augment their images, a member is
    the version that was trained on in the round, as of an attacker who tries all crops, and others are augmented too.
    Of a masked language model all have masks that no client drew: an attacker who knew the client's could tell more.
    """

    describe: ClassVar[str] = "candidates for membership"
    fills: ClassVar[tuple[str, ...]] = ("candidates", "control")

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the candidates, inputs (M, *shape) and labels (M,), and M/2 samples of the control's update."""
        import torch

        rows, order = self._drawn(observed, truth)
        split, _ = observed.runtime.untrained(observed.client)
        members, shuffled = torch.from_numpy(rows[0]).to(truth.labels.device), torch.from_numpy(order)
        others, control = (
            observed.as_trained_on(split, some, purpose)  # or a border from a crop would tell members
            for some, purpose in zip(rows[1:], ("non-members", "control"), strict=True)
        )
        own = truth.inputs[members], truth.labels[members]
        if observed.runtime.data.sample.modality == "tokens":  # with masks that tell no member from the others
            own = observed.runtime.shown(observed.visit.arm, "train", truth.indices[rows[0]])
        parts = zip(own, others, strict=True)
        asked = tuple(torch.cat(part)[shuffled.to(members.device)] for part in parts)
        return {"candidates": asked, "control": control}

    def hides(self, observed: ObservedClient, truth: Truth) -> Truth:
        """Return the truth with each candidate's membership."""
        from rayfed.client.visit import Candidate

        rows, order = self._drawn(observed, truth)
        numbers = [*truth.indices[rows[0]], *rows[1]]
        kinds = [kind for kind in KINDS for _ in range(rows.shape[1])]
        return truth.replace(candidates=tuple(Candidate(kinds[i], int(numbers[i])) for i in order))

    def _drawn(self, observed: ObservedClient, truth: Truth) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows (3, n) for members, non-members and control, and an order (2 n,) to shuffle the first two.

        The samples of a column have one label, unless labels are numbers. The draw is the same in every round in which
        the truth is.
        """
        import numpy as np

        from rayfed import seeds

        runtime = observed.runtime
        split, unseen = runtime.untrained(observed.client)
        stored = runtime.data.test_labels if split == "test" else runtime.data.train_labels
        known, of_unseen = truth.labels.cpu().numpy(), stored[unseen]
        if runtime.data.has_numbers or runtime.data.has_places:  # hardly two samples have the same
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
