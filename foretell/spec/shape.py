"""From logits to the law that is drawn from: temperature, min-p, top-k, top-p.

The part of sampling that looks at one row only, shared by the target's sampler and by drafters
that sample (penalties and bans need a history and live in `foretell.runtime.sampling`). Each row's
result depends on that row alone, to the last bit: reductions over a row are a maximum or a top-k
(exact in any order) or are done row by row.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from foretell.sequence import SamplingParams

_FIRST_LOOK = 128  # likeliest tokens looked at first for top-p; most nuclei are smaller


def is_plain(params: SamplingParams) -> bool:
    """Does `filtered` leave the logits of such a request as they are?"""
    return params.greedy or (
        params.temperature == 1 and params.min_p == 0 and params.top_k == 0 and params.top_p == 1
    )


def filtered(logits: Tensor, params: SequenceOf[SamplingParams]) -> Tensor:
    """Scales by temperature, then drops tokens by min-p, top-k and top-p, in that order.

    Definitions as in vLLM, except that ties are broken: top-k keeps exactly k tokens and top-p the
    smallest set that reaches p, lower ids first among equals, so ``top_k=1`` is greedy. The
    likeliest token always stays. Greedy rows are returned as they are.

    Args:
        logits: [R, V] float32; -inf marks tokens that are already excluded.
        params: [R] each row's own; rows with NaN or +inf keep them.

    Returns:
        [R, V] float32 whose softmax is the law; excluded tokens are -inf. ``logits`` itself where
        nothing had to be done, never modified.
    """
    rows = [r for r, param in enumerate(params) if not is_plain(param)]
    if not rows:
        return logits
    everything = len(rows) == len(params)
    part = logits if everything else logits[rows]
    some = [params[r] for r in rows]
    column = lambda values: torch.tensor(values, device=part.device)[:, None]  # noqa: E731

    top = part.amax(-1, keepdim=True)
    warm = column([p.temperature != 1 for p in some])
    # shifted by the maximum first, so that no temperature overflows
    shift = torch.where(warm & top.isfinite(), top, 0.0)
    heat = torch.tensor([p.temperature for p in some], dtype=torch.float64, device=part.device)
    part = (part - shift) / heat.to(part.dtype).clamp_min_(1e-30)[:, None]

    if any(p.min_p for p in some):
        floor = torch.tensor([p.min_p for p in some], dtype=part.dtype, device=part.device).log()
        part = part.masked_fill(part < part.amax(-1, keepdim=True) + floor[:, None], -torch.inf)
    narrow = [i for i, p in enumerate(some) if p.top_k or p.top_p < 1]
    if narrow:
        kept = _keep_likeliest(part[narrow], [some[i] for i in narrow])
        part = kept if len(narrow) == len(some) else part.index_copy(0, _index(narrow, part), kept)
    return part if everything else logits.index_copy(0, _index(rows, part), part)


def law(logits: Tensor, params: SequenceOf[SamplingParams]) -> Tensor:
    """Probabilities [R, V] float32 of filtered logits; greedy rows put everything on the argmax.
    A row that holds NaN or +inf, or only -inf, comes out as NaN."""
    greedy = [r for r, param in enumerate(params) if param.greedy]
    if not greedy:
        return torch.softmax(logits, -1)
    if len(greedy) < len(params):
        p = torch.softmax(logits, -1)
        p[greedy] = law(logits[greedy], [params[r] for r in greedy])
        return p
    best = logits.argmax(-1, keepdim=True)
    top = logits.gather(-1, best)
    hot = torch.zeros_like(logits).scatter_(-1, best, 1.0)
    return hot.masked_fill_(~top.isfinite(), torch.nan)


def _keep_likeliest(logits: Tensor, params: SequenceOf[SamplingParams]) -> Tensor:
    """Top-k, then top-p over what is left, for rows [R, V] that want at least one of them."""
    vocab = logits.shape[-1]
    limits = [min(p.top_k or vocab, vocab) for p in params]
    width = min(vocab, max([limit for limit in limits if limit < vocab] + [_FIRST_LOOK]))
    values = logits.topk(width, -1).values  # [R, width] likeliest first
    out = torch.empty_like(logits)
    for r, param in enumerate(params):
        row, limit, best = logits[r], limits[r], values[r]
        if not best[0].isfinite():
            out[r] = row
            continue
        count = limit
        if param.top_p < 1:
            # over all that top-k left; each sum is over one row by itself, in float64
            among = best[:limit] if limit <= width else row
            weights = (among.double() - best[0].double()).exp_()
            reach = param.top_p * float(weights.sum())
            count = _nucleus(best[:limit], reach)
            if count > width and limit > width:
                best = row.sort(descending=True).values
                count = _nucleus(best, reach)
            count = min(count, limit)
        elif limit == vocab:
            out[r] = row
            continue
        last = best[count - 1]
        above = row > last
        ties = (row == last).nonzero().flatten()[: count - int(above.sum())]
        above[ties] = True
        out[r] = row.masked_fill(~above, -torch.inf)
    return out


def _nucleus(likeliest: Tensor, reach: float) -> int:
    """How many of the likeliest tokens it takes to reach that much unnormalised weight (1 for the
    first); one more than there are if they do not reach it."""
    running = (likeliest.double() - likeliest[0].double()).exp_().cumsum_(0)
    return int((running < reach).sum()) + 1


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)
