"""Shares of samples' parts that attacks recover: columns of records, tokens of texts, and pixels of images.

An update may leak part of a sample: all columns of a record but one, most words of a text, or a quarter of an image.
The recovered share is compared with the baseline, and with the share of other samples that the same reconstruction
recovers. Images of a class have similar pixels. For images, the comparison therefore uses the largest share over all
other images, and the reconstruction's values at random positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rayfed.metrics.assignment import distances, matched
from rayfed.metrics.chance import evidence
from rayfed.metrics.guessing import Others, best_constants, guesses
from rayfed.metrics.records import feature_accuracy
from rayfed.metrics.texts import token_accuracy
from rayfed.samples import Records, Tokens

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.samples import SampleSpec

NAMES = ("parts_recovered", "parts_baseline", "parts_evidence", "columns")
"""Columns of a row about the parts of its sample."""
_NEAR = 1.5 / 255, 8.5 / 255
"""Tolerances of a recovered pixel value, for exact and noisy reconstructions: one and eight grey levels and
rounding."""
_FILL = 0.05
"""Share of a channel above which its most common value counts as fill: the value of pixels that an attack lacks."""
_MOST = 2048
"""Maximum number of an image's values that are compared with those of other images."""
_FEWEST = 20
"""Minimum number of other images. Fewer give a poor estimate of the share by chance."""


def parts(sample: SampleSpec, others: Others, true: Tensor, guess: Tensor) -> list[dict[str, Any]]:
    """Return for each sample the share of its parts that a reconstruction recovers, and the baseline's share.

    Takes true samples (N, *shape) and reconstructions. `parts_baseline` is the larger of two shares. One is the share
    of the sample's parts that a baseline recovers. The other is the mean share of other samples' parts that the
    reconstructions recover, matched in the same way. `parts_evidence` is the evidence against chance in nats
    (`rayfed.metrics.chance`), 0 if a baseline recovers as much. Its number of independent parts follows from the spread
    of the shares of other samples. For records, `columns` lists each column with `found` and the share of other records
    that the best constant matches (`guess`). For other samples it is None. For images see `_of_image`. All values are
    None if there are too few other images.
    """
    import torch

    without = guesses(sample, others, true)
    if not isinstance(sample, Records | Tokens):
        known = [others.inputs, *([] if others.public is None else [others.public])]
        all_others = torch.cat([true, *(some.to(true) for some in known)])
        told = zip(true, guess, *without, strict=True)
        return [_of_image(all_others, own, answer, guessed) for own, answer, *guessed in told]
    found = feature_accuracy(sample) if isinstance(sample, Records) else token_accuracy
    own, in_others = found(true, guess), _in_others(sample, others.inputs.to(true), guess)
    by_chance = (float(in_others.sum()) + 1) / (len(in_others) + 1)  # counts the sample as one of the others
    guessed = torch.stack([found(true, one) for one in without]).amax(0).clamp(min=by_chance)
    spread = float(in_others.var(correction=0)) if len(in_others) else 0.0
    independent = by_chance * (1 - by_chance) / spread if spread else float("inf")
    counts = [len(sample.columns)] * len(true) if isinstance(sample, Records) else (true >= 0).sum(1).tolist()
    rows = [
        _row(a, b, min(independent, float(n))) for a, b, n in zip(own.tolist(), guessed.tolist(), counts, strict=True)
    ]
    if isinstance(sample, Records):
        names, (_, shares) = [column.name for column in sample.columns], best_constants(sample, others)
        for row, hits in zip(rows, sample.found(true, guess).tolist(), strict=True):
            told = zip(names, hits, shares, strict=True)
            row["columns"] = [{"name": name, "found": hit, "guess": share} for name, hit, share in told]
    return rows


def _row(found: float, guessed: float, independent: float, of: float = 1.0) -> dict[str, Any]:
    """Return the columns for shares among the claimed parts, which are a share `of` all parts."""
    told = evidence(found, guessed, independent) if found > guessed else 0.0
    return {"parts_recovered": found * of, "parts_baseline": guessed * of, "parts_evidence": told, "columns": None}


def _of_image(others: Tensor, true: Tensor, guess: Tensor, guessed: Sequence[Tensor]) -> dict[str, Any]:
    """Return the share of an image's values (C, H, W) that a reconstruction recovers.

    Only values that the reconstruction claims count. A value that fills part of it, such as grey, is not claimed.
    `parts_baseline` is the largest of three shares: of any other image (M, C, H, W) that the reconstruction recovers,
    of this image that a baseline recovers, and of this image that the reconstruction recovers with its values at random
    positions. Of the tolerances in `_NEAR`, the one with more evidence counts.
    """
    import torch

    claimed = _claimed(guess).flatten().nonzero()[:, 0]
    if not len(claimed):
        return _row(0.0, 0.0, 0.0)
    some = claimed[:: -(-len(claimed) // _MOST)]
    own, answer = true.flatten(), guess.flatten()
    known = others.flatten(1)[:, some]
    copies = (known == own[some]).all(1)
    copies[copies.clone()] = (others[copies] == true).flatten(1).all(1)
    off = (known - answer[some]).abs()[~copies]  # copies of the image need no protection
    if len(off) < _FEWEST:
        return dict.fromkeys(NAMES)
    off_guesses = torch.stack([one.flatten()[some] for one in guessed]).sub(own[some]).abs()
    rows = []
    for near in _NEAR:
        shares = (off <= near).float().mean(1)
        mean, spread = float(shares.mean()), float(shares.var(correction=0))
        most = max(
            float(shares.max()),
            1 / (len(shares) + 1),  # counts the image as one of the others
            float((off_guesses <= near).float().mean(1).max()),
            _anywhere(own, answer, some, len(own) // len(true), near),
        )
        # limited by the number of other images, which cannot show more independent parts
        independent = min(mean * (1 - mean) / spread if spread else float("inf"), float(len(shares)))
        found = float(((own - answer).abs()[claimed] <= near).float().mean())
        rows.append(_row(found, most, independent, len(claimed) / len(own)))
    return max(rows, key=lambda row: row["parts_evidence"])


def _claimed(guess: Tensor) -> Tensor:
    """Return a mask of the values that a reconstruction (C, H, W) claims: all except a channel's fill value."""
    import torch

    there = []
    for channel in guess:
        values, counts = channel.unique(return_counts=True)
        common = counts > _FILL * channel.numel()
        fill = values[counts.argmax()]
        there.append((channel != fill) | ~common.any())
    return torch.stack(there)


def _anywhere(own: Tensor, answer: Tensor, some: Tensor, area: int, near: float) -> float:
    """Return the share of values (k,) recovered if each channel's values (`area` each) were at random positions."""
    import torch

    hits = 0.0
    for channel in (some // area).unique():
        here = some[some // area == channel]
        ordered, values = answer[here].sort().values, own[here]
        upper = torch.searchsorted(ordered, values + near, right=True)
        hits += float((upper - torch.searchsorted(ordered, values - near)).float().sum()) / len(here)
    return hits / len(some)


def _in_others(sample: Records | Tokens, others: Tensor, guess: Tensor) -> Tensor:
    """Return the share of other samples' parts (M', *shape) that reconstructions (N, *shape) recover, (M',) float64.

    Other samples are matched in sets of the batch size. Samples without parts are left out.
    """
    import torch

    apart, count = distances(others, guess, sample), len(guess)
    whole = max(len(others) // count, 1) * count
    order = torch.cat([matched(some) for some in apart[:whole].split(count)])
    wrong = apart[:whole].gather(1, order[:, None].to(apart.device))[:, 0].floor()
    if isinstance(sample, Records):
        return 1 - wrong / len(sample.columns)
    there = (others[:whole] >= 0).sum(1)
    hits = ((others[:whole] == guess[order]) & (others[:whole] >= 0)).sum(1)
    return (hits.double() / there)[there > 0]
