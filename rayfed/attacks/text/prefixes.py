"""A text of a causal model put together place after place: a prefix goes on with tokens that keep it in the span.

What enters further on at a place depends on the tokens up to there alone, so a prefix is judged before the rest is
known. Where no position tells places apart, a token that is only repeated has one vector at all of them, which is in
the span wherever the first is. So prefixes whose vectors add directions of the span go first.

Source: Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", section 4, on decoders. Ours:
directions, by which texts with repeated tokens are told from those of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayfed.attacks.text.descent import INSIDE

Function = Callable[[Tensor], Tensor]
_KEPT = 64
"""Most prefixes that are kept at a place."""
_NEW = 1e-5
"""Part of a vector outside what a prefix spans, over its norm, from which it adds a direction; rounding is below."""


@torch.no_grad()
def looks_back_only(options: Sequence[Tensor], inputs: Function) -> bool:
    """Return whether what enters at a place shows no dependence on tokens behind it; arguments as for `grown`.

    The later half is changed where it has several tokens to choose from.
    """
    one, half = torch.stack([tokens[0] for tokens in options]), len(options) // 2
    other = torch.cat([one[:half], torch.stack([tokens[-1] for tokens in options[half:]])])
    entering = inputs(torch.stack([one, other]))[:, :half]
    return torch.allclose(entering[0], entering[1], rtol=1e-4, atol=1e-4 * float(entering.abs().max()))


@torch.no_grad()
def grown(
    options: Sequence[Tensor], seen: int | None, entering: Callable[[Tensor, int], Tensor], distance: Function
) -> Tensor:
    """Return the text (1, L) with the most vectors, and directions of them, in a span, grown place after place.

    Each of `options` is the tokens possible at a place; gradients have the first `seen` places, None for all, and at
    the others the first option stays. `entering` gives what enters for texts (n, L) at a place, (n, width); `distance`
    how far such vectors are from the span, over their own norms. Among equals the nearest prefixes are kept.
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
