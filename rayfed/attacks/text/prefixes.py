"""Recover a causal model's text token by token: extend each prefix by tokens whose vectors stay in the span.

The vector at a position in later layers depends only on the tokens up to it, so a prefix can be judged before the rest
is known. Without position vectors, a repeated token has the same vector everywhere, and all copies are in the span if
one is. Prefixes whose vectors add directions of the span therefore come first.

Source: Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", section 4, on decoders. Ours:
counting directions, which distinguishes texts with a few repetitions from those that repeat a single token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayfed.attacks.text.descent import INSIDE

Function = Callable[[Tensor], Tensor]
_KEPT = 64
"""Maximum number of prefixes kept at a position."""
_NEW = 1e-5
"""Minimum relative size of a vector's part outside the span of a prefix for a new direction. Below is rounding."""


@torch.no_grad()
def looks_back_only(options: Sequence[Tensor], inputs: Function) -> bool:
    """Return whether the inputs at a position are independent of later tokens. For the arguments see `grown`.

    The test changes the later half of a text, at the positions with several options.
    """
    one, half = torch.stack([tokens[0] for tokens in options]), len(options) // 2
    other = torch.cat([one[:half], torch.stack([tokens[-1] for tokens in options[half:]])])
    entering = inputs(torch.stack([one, other]))[:, :half]
    return torch.allclose(entering[0], entering[1], rtol=1e-4, atol=1e-4 * float(entering.abs().max()))


@torch.no_grad()
def grown(
    options: Sequence[Tensor], seen: int | None, entering: Callable[[Tensor, int], Tensor], distance: Function
) -> Tensor:
    """Return the text (1, L) with the most vectors, and most independent directions of vectors, in the span.

    `options` holds the possible tokens at each position. Gradients contain the first `seen` positions (None: all). The
    others keep their first option. `entering` returns the inputs for texts (n, L) at a position, (n, width), and
    `distance` their relative distances from the span. Among equals, the prefixes with the smallest distances are kept.
    """
    texts = torch.stack([tokens[0] for tokens in options])[None]
    scores, far = torch.zeros(1), torch.zeros(1)
    bases: list[Tensor] = []
    for place, tokens in enumerate(options[:seen]):
        before = torch.arange(len(texts)).repeat_interleave(len(tokens))
        tried = texts[before].clone()
        tried[:, place] = tokens.repeat(len(texts))
        vectors = entering(tried, place).double()
        apart = distance(vectors)
        new = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)
        for basis in bases:
            known = basis[before]
            new = new - (new * known).sum(1, keepdim=True) * known
        size = new.norm(dim=1, keepdim=True)
        inside = apart < INSIDE
        adds = inside & (size[:, 0] > _NEW)
        score, total = scores[before] + inside.cpu().float() + adds.cpu().float(), far[before] + apart.cpu()
        kept = sorted(range(len(tried)), key=lambda row: (-float(score[row]), float(total[row])))[:_KEPT]
        texts, scores, far = tried[kept], score[kept], total[kept]
        bases = [basis[before[kept]] for basis in bases]
        bases.append(torch.where(adds[:, None], new / size.clamp_min(_NEW), 0.0)[kept])
    return texts[:1]
