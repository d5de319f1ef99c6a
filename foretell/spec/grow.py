"""Growing a draft: distribution at the frontier, a token from it, one step further.

An autoregressive scheme supplies only ``step``. How a token is picked is the other argument:
`argmax` for deterministic drafts, `coupled` for drafts made with the target's own noise, `sampled`
for drafts whose law is kept for the rejection rules.

A token once drawn is never dropped for what it is: a draft may end only where that was certain
before the draw (budget, a broken row), or the text's distribution would change (non-anticipation,
schemes.md 2.1 and the appendix of DSpark 2607.05147).
"""

# pyright: reportUnknownMemberType=false
# (torch's tolist and from_numpy are untyped)

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, cast

import torch
from torch import Tensor

from foretell.sequence import SamplingParams
from foretell.spec.shape import drawable, filtered, law
from foretell.spec.tree import TokenTree, chains
from foretell.spec.verify import invert


class Picked(NamedTuple):
    """One token for each row."""

    tokens: list[int]  # [A] -1 where the row is not finite
    probs: Tensor | None = None  # [A, V] float32, the laws that the tokens were drawn from


Pick = Callable[[Tensor, list[int], int], Picked]
"""``pick(logits [A, V], sequences [A], depth)``: tokens at that depth (1 is the root's child) of
the sequences that still grow, by their index in the batch."""

Step = Callable[[list[int], list[int], int], Tensor]
"""``step(sequences [A], tokens [A], depth)``: runs the draft over the tokens just picked, which
stand at that depth below the root, and returns the logits [A, V] that follow them."""


def grow_chain(
    roots: list[int],
    first_logits: Tensor,
    budgets: SequenceOf[int],
    step: Step,
    pick: Pick,
    vocab_size: int | None = None,
) -> TokenTree:
    """One chain a sequence, its first token from the carried-over logits: k tokens, k - 1 steps.

    Args:
        roots: [B] the last known tokens.
        first_logits: [B, V] what the draft says after the root.
        budgets: [B] draft tokens at most; 0 leaves only the root.
        step: one draft forward; not called for a sequence once it has all its tokens.
        pick: `argmax`, `coupled` or `sampled`.
        vocab_size: the target's, where the draft's is padded to another: tokens beyond it are
            never proposed, missing ones have probability 0.

    Returns:
        Chains of the wanted length, shorter where a row of logits held NaN or infinity. With
        ``probs`` if ``pick`` gave them.
    """
    vocab = vocab_size or first_logits.shape[-1]
    drafts: list[list[int]] = [[] for _ in roots]
    laws: list[tuple[list[int], Tensor]] = []  # for each depth the sequences and their rows
    active = [b for b, budget in enumerate(budgets) if budget > 0]
    logits = first_logits if len(active) == len(roots) else first_logits[active]
    depth = 1
    while active:
        picked = pick(logits[:, :vocab], active, depth)
        alive = [a for a, token in enumerate(picked.tokens) if token >= 0]
        for a in alive:
            drafts[active[a]].append(picked.tokens[a])
        if picked.probs is not None and alive:
            laws.append(([active[a] for a in alive], picked.probs[alive]))
        onward = [a for a in alive if budgets[active[a]] > depth]
        active, tokens = [active[a] for a in onward], [picked.tokens[a] for a in onward]
        if active:
            logits = step(active, tokens, depth)
        depth += 1
    if not laws:
        return chains(roots, drafts)
    width = max(len(draft) for draft in drafts) + 1
    probs = torch.zeros(len(roots), width, vocab, dtype=torch.float32, device=first_logits.device)
    for i, (sequences, rows) in enumerate(laws):
        probs[sequences, i, : rows.shape[-1]] = rows
    return chains(roots, drafts, probs)


def argmax(logits: Tensor, sequences: list[int], depth: int) -> Picked:
    """The likeliest token, the lowest id among equals. Verified as one-hot."""
    return Picked(drawable(logits).tolist())


def coupled(
    params: SequenceOf[SamplingParams],
    seeds: SequenceOf[int],
    roots: SequenceOf[int],
    noise: Callable[[list[int], list[int]], Tensor],
) -> Pick:
    """Picks argmax(log q + g) with the noise that the target will use for the same token, so that
    both tend to agree; for `coupled` verification only. Greedy sequences take the argmax.

    Args:
        params: [B] temperature and filters, applied to the draft as to the target.
        seeds: [B]
        roots: [B] absolute position of each root; a token at depth d stands at root + d.
        noise: ``noise(seeds [A], positions [A])`` gives [A, V'] Gumbel noise for the tokens at
            those positions (`DraftRuntime.sampler_noise`), V' >= V.
    """

    def pick(logits: Tensor, sequences: list[int], depth: int) -> Picked:
        shaped = filtered(logits, [params[b] for b in sequences])
        noisy = [a for a, b in enumerate(sequences) if not params[b].greedy]
        scores = shaped
        if noisy:
            who = [sequences[a] for a in noisy]
            g = noise([seeds[b] for b in who], [roots[b] + depth for b in who])
            g = g[:, : shaped.shape[-1]]
            if len(noisy) == len(sequences):
                scores = shaped + g
            else:
                scores = shaped.clone()
                scores[noisy] += g
        return Picked(drawable(scores).tolist())

    return pick


def sampled(
    params: SequenceOf[SamplingParams],
    coins: Callable[[list[int], int], SequenceOf[float]],
) -> Pick:
    """Draws from the draft's law and keeps it, for `rejection` and `block`. Greedy: one-hot.

    Args:
        params: [B] temperature and filters, applied to the draft.
        coins: ``coins(sequences [A], depth)`` gives uniforms in [0, 1), none of which verification
            uses too.
    """

    def pick(logits: Tensor, sequences: list[int], depth: int) -> Picked:
        wanted = [params[b] for b in sequences]
        q = law(filtered(logits, wanted), wanted)
        broken = cast(list[bool], q.isnan().any(-1).tolist())
        thrown = coins(sequences, depth)
        tokens = [
            -1 if bad else invert(q[a], coin)
            for a, (coin, bad) in enumerate(zip(thrown, broken, strict=True))
        ]
        return Picked(tokens, q)

    return pick
