"""From logits to the law that is drawn from: temperature, min-p, top-k, top-p.

The part of sampling that looks at one row only, shared by the target's sampler and by drafters
that sample (penalties and bans need a history and live in `foretell.runtime.sampling`). Each row's
result depends on that row alone, to the last bit: reductions over a row are a maximum or a top-k
(exact in any order) or are done row by row.
"""

# pyright: reportUnknownMemberType=false
# (torch's tolist and from_numpy are untyped)

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import cast

import numpy as np
import torch
from torch import Tensor

from foretell.placed import put
from foretell.sequence import SamplingParams

_FIRST_LOOK = 128  # likeliest tokens looked at first for top-p; most nuclei are smaller


def is_plain(params: SamplingParams) -> bool:
    """Does `filtered` leave the logits of such a request as they are?"""
    return params.greedy or (params.temperature == 1 and not has_filters(params))


def has_filters(params: SamplingParams) -> bool:
    """Are tokens dropped, where the request is not greedy?"""
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def likeliest(scores: Tensor) -> Tensor:
    """Argmax of rows [R, V]: [R] int64, the lowest id among equals; a NaN wins. On a CPU numpy's is
    ten times faster than torch's."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(np.asarray(scores.numpy().argmax(-1)))


def drawable(scores: Tensor) -> Tensor:
    """`likeliest`, -1 where that is not finite: the row holds NaN or infinity, or only -inf."""
    best = likeliest(scores)
    if scores.device.type != "cpu":
        return best.masked_fill(~scores.gather(-1, best[:, None])[:, 0].isfinite(), -1)
    tokens = best.numpy()
    tokens[~np.isfinite(scores.numpy()[np.arange(len(tokens)), tokens])] = -1
    return best


def log_chances(scores: Tensor, best: Tensor, trust: float = 1.0) -> list[list[float]]:
    """Logarithms of softmax(trust * scores [R, V]) at each row's largest scores ``best`` [R, C],
    falling; NaN where the first of them is not finite. On a CPU by numpy, as `likeliest`."""
    if scores.device.type != "cpu":
        top = best[:, :1]
        total = ((scores - top) * trust).exp().sum(-1, keepdim=True).log()
        return cast(list[list[float]], ((best - top) * trust - total).tolist())
    found: list[list[float]] = []
    for row, values in zip(scores.numpy(), cast(list[list[float]], best.tolist()), strict=True):
        top = values[0]
        if not math.isfinite(top):
            found.append([math.nan] * len(values))
            continue
        weights = (row - np.float32(top)) * np.float32(trust)
        total = math.log(np.exp(weights, out=weights).sum())
        found.append([(value - top) * trust - total for value in values])
    return found


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
    part = logits if everything else logits[put(rows, logits.device)]
    some = [params[r] for r in rows]

    top = part.amax(-1, keepdim=True)
    warm = put([p.temperature != 1 for p in some], part.device)[:, None]
    # shifted by the maximum first, so that no temperature overflows
    shift = torch.where(warm & top.isfinite(), top, 0.0)
    heat = put([p.temperature for p in some], part.device, torch.float64)
    part = (part - shift) / heat.to(part.dtype).clamp_min_(1e-30)[:, None]

    if any(p.min_p for p in some):
        floor = put([p.min_p for p in some], part.device, part.dtype).log()
        part = part.masked_fill(part < part.amax(-1, keepdim=True) + floor[:, None], -torch.inf)
    narrow = [i for i, p in enumerate(some) if p.top_k or p.top_p < 1]
    if narrow:
        kept = _keep_likeliest(part[narrow], [some[i] for i in narrow])
        part = (
            kept if len(narrow) == len(some) else part.index_copy(0, put(narrow, part.device), kept)
        )
    return part if everything else logits.index_copy(0, put(rows, part.device), part)


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
    best = likeliest(logits)[:, None]
    top = logits.gather(-1, best)
    hot = torch.zeros_like(logits).scatter_(-1, best, 1.0)
    return hot.masked_fill_(~top.isfinite(), torch.nan)


def _keep_likeliest(logits: Tensor, params: SequenceOf[SamplingParams]) -> Tensor:
    """Top-k, then top-p over what is left, for rows [R, V] that want at least one of them."""
    vocab = logits.shape[-1]
    limits = [min(p.top_k or vocab, vocab) for p in params]
    width = min(vocab, max([limit for limit in limits if limit < vocab] + [_FIRST_LOOK]))
    best = logits.topk(width, -1).values  # [R, width] likeliest first
    sound = cast(list[bool], best[:, 0].isfinite().tolist())
    last = torch.full((len(limits), 1), -torch.inf, dtype=logits.dtype, device=logits.device)
    counts = list(limits)  # how many tokens stay
    nuclei = [r for r, p in enumerate(params) if p.top_p < 1 and sound[r]]
    if nuclei:
        top = best[nuclei].double()
        running = (top - top[:, :1]).exp_().cumsum_(-1)  # weights, 1 for the likeliest
        for place, r in enumerate(nuclei):
            over_all = limits[r] > width
            total = _weight(logits[r]) if over_all else float(running[place, limits[r] - 1])
            reach = params[r].top_p * total
            counts[r] = min(limits[r], int((running[place] < reach).sum()) + 1)
            if over_all and counts[r] > width:
                values = _falling(logits[r])
                weights = (values.double() - values[0].double()).exp_().cumsum_(0)
                counts[r] = min(vocab, int((weights < reach).sum()) + 1)
                last[r] = values[counts[r] - 1]
    for r, count in enumerate(counts):
        if sound[r] and count <= width:
            last[r] = best[r, count - 1]
    kept = logits >= last
    wanted = put(counts, kept.device)
    surplus = cast(list[int], (kept.sum(-1) - wanted).tolist())
    out = logits.masked_fill(logits < last, -torch.inf)
    for r, extra in enumerate(surplus):
        if extra > 0 and last[r] > -torch.inf:  # ties at the edge: the lower ids stay
            out[r, (logits[r] == last[r]).nonzero()[-extra:, 0]] = -torch.inf
    return out


def _weight(row: Tensor) -> float:
    """Sum of exp(row - maximum) in float64: on a CPU by numpy, whose order of summation does not
    depend on the number of threads."""
    weights = (row.double() - row.max().double()).exp_()
    return float(weights.numpy().sum() if weights.device.type == "cpu" else weights.sum())


def _falling(row: Tensor) -> Tensor:
    """Sorted, largest first; numpy's sort of floats is many times faster on a CPU."""
    if row.device.type == "cpu":
        return torch.from_numpy(np.sort(row.neg().numpy())).neg_()
    return row.sort(descending=True).values
