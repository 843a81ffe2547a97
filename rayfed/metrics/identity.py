"""Re-identification of people: the rank of the true person in a face recogniser's output.

Source: Ren 2023 (thesis), section 3.3.4 and table 3.15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.models.pretrained import NetworkUnavailable, load_recogniser

_CHUNK = 64


class Identity:
    """Rank of the true person, by a face recogniser from a file that was trained on the people in the data.

    Raises `NetworkUnavailable` if there is no such file, or if it knows other people. The message shows how to train
    one.
    """

    def __init__(self, recogniser: str | None, people: tuple[str, ...]) -> None:
        if recogniser is None:
            raise NetworkUnavailable(
                "no recogniser is set: run `rayfed train-recogniser SCENARIO --out FILE` and set `metrics.recogniser`"
            )
        load_recogniser(recogniser, people, torch.device("cpu"))
        self.recogniser, self.people = recogniser, people

    def __call__(self, labels: Tensor, guess: Tensor) -> Tensor:
        """Return the rank (N,) of the true person among all people, starting from 1.

        Takes the labels (N,) int64 of the true images, and reconstructions (N, C, H, W) in [0, 1]. In a tie, the true
        person ranks last.
        """
        network = load_recogniser(self.recogniser, self.people, guess.device)
        with torch.no_grad():
            logits = torch.cat([network(images.float()) for images in guess.split(_CHUNK)])
        return (logits >= logits.gather(1, labels[:, None])).sum(1)

    def within(self, k: int, labels: Tensor, guess: Tensor) -> Tensor:
        """Return 1.0 if the true person is among the k most likely people, else 0.0, (N,)."""
        return (self(labels, guess) <= k).double()
