"""Parts of samples that reconstructions find: columns of records, tokens of texts, and pixels of images.

A sample may be given away in part: of a record all columns but one, of a text most of its words, of an image the
quarter that a model looks at. What is found of it is set beside what a guess finds, and beside what the same
reconstruction finds of other samples. Pixels are alike in all images of a class, so that of images the most that is
found of any other one counts, and the colours of a reconstruction without their places.
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

NAMES = ("parts_found", "parts_guessed", "parts_evidence", "columns")
"""Columns of a row on the parts of its sample."""
_NEAR = 1.5 / 255, 8.5 / 255
"""How near the value of a pixel is to the true one where it is found, of exact reconstructions and of noisy ones: to
one and to eight grey levels, whatever is rounded."""
_FILL = 0.05
"""Share of a channel above which its commonest value says nothing: it is what an attack has where it knows nothing."""
_MOST = 2048
"""Most values of an image that are compared with those of other images."""
_FEWEST = 20
"""Fewest other images: fewer show too little of what is found by chance."""


def parts(sample: SampleSpec, others: Others, true: Tensor, guess: Tensor) -> list[dict[str, Any]]:
    """Return for each sample the share of its parts that a reconstruction finds, and what is found without the update.

    It takes samples (N, *shape) twice, the true ones first. `parts_guessed` is the most of two shares: of this sample's
    parts that a guess finds, and of the parts of other samples that these reconstructions find, each matched to another
    one as those of the batch are to the true ones. `parts_evidence` is the evidence against so much by chance (nats;
    `rayfed.metrics.chance`), of as many independent parts as the spread of the latter is that of a share of; 0 where
    guesses find as much. `columns` are those of a record, each with whether it is `found`, and the share of other
    records in which the best constant is (`guess`); None of other samples. Of images see `_of_image`; with few others
    nothing is said of them, in None.
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
    by_chance = (float(in_others.sum()) + 1) / (len(in_others) + 1)  # the sample could have been one of them
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
    """Return the columns for shares of those parts that a reconstruction says something of, a share `of` all."""
    told = evidence(found, guessed, independent) if found > guessed else 0.0
    return {"parts_found": found * of, "parts_guessed": guessed * of, "parts_evidence": told, "columns": None}


def _of_image(others: Tensor, true: Tensor, guess: Tensor, guessed: Sequence[Tensor]) -> dict[str, Any]:
    """Return what a reconstruction (C, H, W) finds of an image's pixels, the values of each channel.

    Counted are the pixels that the reconstruction claims: a value that fills a part of it, such as grey, is none.
    `parts_guessed` is the most of what it finds of any other image (M, C, H, W), what the guesses find of this one, and
    what its own values would find of this one in random places. Of the measures of nearness that counts which says
    more.
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
    off = (known - answer[some]).abs()[~copies]  # of a copy there is nothing to protect
    if len(off) < _FEWEST:
        return dict.fromkeys(NAMES)
    off_guesses = torch.stack([one.flatten()[some] for one in guessed]).sub(own[some]).abs()
    rows = []
    for near in _NEAR:
        shares = (off <= near).float().mean(1)
        mean, spread = float(shares.mean()), float(shares.var(correction=0))
        most = max(
            float(shares.max()),
            1 / (len(shares) + 1),  # the image could have been one of them
            float((off_guesses <= near).float().mean(1).max()),
            _anywhere(own, answer, some, len(own) // len(true), near),
        )
        # as many others show no more than so many independent parts
        independent = min(mean * (1 - mean) / spread if spread else float("inf"), float(len(shares)))
        found = float(((own - answer).abs()[claimed] <= near).float().mean())
        rows.append(_row(found, most, independent, len(claimed) / len(own)))
    return max(rows, key=lambda row: row["parts_evidence"])


def _claimed(guess: Tensor) -> Tensor:
    """Return where a reconstruction (C, H, W) says something: where it does not have a channel's common value."""
    import torch

    there = []
    for channel in guess:
        values, counts = channel.unique(return_counts=True)
        common = counts > _FILL * channel.numel()
        fill = values[counts.argmax()]
        there.append((channel != fill) | ~common.any())
    return torch.stack(there)


def _anywhere(own: Tensor, answer: Tensor, some: Tensor, area: int, near: float) -> float:
    """Return the share of values (k,) found if those of a channel, `area` values each, were in random places."""
    import torch

    hits = 0.0
    for channel in (some // area).unique():
        here = some[some // area == channel]
        ordered, values = answer[here].sort().values, own[here]
        upper = torch.searchsorted(ordered, values + near, right=True)
        hits += float((upper - torch.searchsorted(ordered, values - near)).float().sum()) / len(here)
    return hits / len(some)


def _in_others(sample: Records | Tokens, others: Tensor, guess: Tensor) -> Tensor:
    """Return the shares of other samples' parts (M', *shape) that reconstructions (N, *shape) find, (M',) float64.

    The others are matched in sets as large as the batch. Of one without parts there is no share.
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
