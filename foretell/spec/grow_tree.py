"""Growing trees, shared by every scheme that drafts token by token.

The scheme supplies ``step``, its options a shape (`foretell.spec.tree_shape`). All sequences grow
level by level, the frontier of all of them in one forward pass; which children a node gets depends
on its own row of logits alone, so a sequence's tree does not depend on the others in the batch.

How children are chosen follows from the request and the verification rule:

- greedy: the likeliest tokens;
- `coupled`: the best by log q + g, with the noise that the target will draw with at that position;
- `rejection`, `block`: drawn from q without replacement, as the K largest of log q + g with noise
  of their own (Gumbel top-k, Kool et al. 1903.06059); q goes along for the verification.

The last is the only one that draws at random, so the shape is fixed before (non-anticipation).
"""

# pyright: reportUnknownMemberType=false
# (torch's tolist is untyped)

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.placed import put
from foretell.sequence import Sequence
from foretell.spec.draft_vocab import DraftVocab
from foretell.spec.drafter import Ask, Rows
from foretell.spec.seats import ANYTHING
from foretell.spec.shape import drawable, filtered, law, likeliest, log_chances
from foretell.spec.tree import TokenTree, from_lists
from foretell.spec.tree_shape import Plan, Sprouts, TreeShape


@dataclass(frozen=True)
class Frontier:
    """Nodes that a draft is run on in one pass: all at one depth, sequence by sequence."""

    sequences: list[int]  # [F] index in the batch
    tokens: list[int]  # [F]
    depth: int  # below the root
    parents: list[int]  # [F] the parent's row in the pass before; at depth 1 the sequence's index
    bits: list[int]  # [F] 1 for the first node run below a root, 2 for the second, ...
    ancestors: list[int]  # [F] 64-bit word over those bits, own included, the root's (bit 0) not


Step = Callable[[Frontier], Tensor]
"""``step(frontier)``: runs the draft on these nodes and returns the logits [F, Vd] that follow. A
scheme that feeds on its own hidden states finds the parents' by ``frontier.parents``."""

Noise = Callable[[SequenceOf[int], SequenceOf[int]], Tensor]
"""[R, Vd] `DraftRuntime.sampler_noise` of the draft's tokens, for seeds and positions."""


def frontier_rows(slots: SequenceOf[int], roots: SequenceOf[int], frontier: Frontier) -> Rows:
    """Rows that run a frontier over the drafter's own KV: the prefix unmasked, the path of each
    node by its ancestors' word, exactly as the target's own tree rows. All rows are outputs.

    Args:
        slots: [B]
        roots: [B] cell and position of each root in the drafter's KV: ``len(tokens) - 1``, and one
            less where an entry pairs a feature with the next token. Node cells come behind it.
    """
    base = [roots[b] for b in frontier.sequences]
    return Rows(
        slots=[slots[b] for b in frontier.sequences],
        tokens=list(frontier.tokens),
        positions=[root + frontier.depth for root in base],
        cells=[root + bit for root, bit in zip(base, frontier.bits, strict=True)],
        prefix=[root + 1 for root in base],
        ancestors=list(frontier.ancestors),
        base=base,
        outputs=list(range(len(base))),
    )


def grow_tree(
    ask: Ask,
    budgets: SequenceOf[int],
    first_logits: Tensor,
    step: Step,
    shape: TreeShape,
    noise: Noise,
    vocab: DraftVocab,
) -> TokenTree:
    """One tree a sequence; the root's children come from the carried-over logits.

    Args:
        ask: sequences, and whether drafts are drawn at random.
        budgets: [B] nodes at most, the drafter's own limits included; 0 leaves only the root. The
            draft is never run on more nodes than that.
        first_logits: [B, Vd] what the draft says after each root.
        step: one draft forward over a frontier.
        shape: which children. Sequences that sample get ``shape.fixed()`` under ``ask.sample``.
        noise: the target's own.
        vocab: which tokens the columns of logits mean.

    Returns:
        Trees in depth-first order, likelier siblings first, so that a draft that is right in every
        first guess lies in place already. A row of NaN or infinity has no children. With ``probs``
        under ``ask.sample``.
    """
    drawn = [ask.sample and not sequence.params.greedy for sequence in ask.sequences]
    fixed = shape.fixed() if any(drawn) else shape
    plans = [
        (fixed if random else shape).plan(budget, min(budget, depth))
        for random, budget, depth in zip(drawn, budgets, ask.depths, strict=True)
    ]
    least = [
        ANYTHING.logs if random else own.logs for random, own in zip(drawn, ask.least, strict=True)
    ]
    trees = [Sprouts([root]) for root in ask.roots]
    words = [{0: 0} for _ in trees]  # the nodes that were run, in order, with their ancestors
    laws = [dict[int, Tensor]() for _ in trees]  # rows of q [V] by the node that was drawn from it
    nodes = [(b, 0) for b, budget in enumerate(budgets) if budget > 0]
    logits, depth = first_logits[[b for b, _ in nodes]], 0  # [F, Vd]
    while nodes:
        widths = [plans[b].width(trees[b], node) for b, node in nodes]
        cut = vocab.cut(logits)
        found = _children(ask, nodes, widths, depth, cut, noise, vocab, shape.trust)
        born: dict[int, list[int]] = {b: [] for b, _ in nodes}
        for row, (b, node) in enumerate(nodes):
            logps = found.logps[row]
            enough = least[b][0] - trees[b].values[node]
            if not depth and logps and logps[0] < least[b][2]:
                continue
            new = [
                trees[b].add(node, rank, token, logp)
                for rank, (token, logp) in enumerate(zip(found.tokens[row], logps, strict=True))
                if logp >= enough
            ]
            born[b].extend(new)
            if found.probs is not None and new:
                laws[b][node] = found.probs[row]
        rows = {node: row for row, node in enumerate(nodes)}
        nodes = [
            (b, node)
            for b, new in born.items()
            for node in plans[b].expand(trees[b], new)
            if trees[b].values[node] >= least[b][1]
        ]
        depth += 1
        if nodes:
            logits = step(_frontier(nodes, trees, words, rows, depth))
    return _finish(plans, trees, laws, vocab.size if ask.sample else None)


def first_tokens(
    sequences: SequenceOf[Sequence], logits: Tensor, noise: Noise, vocab: DraftVocab
) -> Tensor:
    """What `grow_tree` chooses for `coupled` with one node a sequence, without the host.

    Args:
        logits: [B, Vd] what the draft says after each root.

    Returns:
        [B] int64 in the target's ids, -1 where a row is NaN or infinite.
    """
    scores = filtered(vocab.cut(logits), [sequence.params for sequence in sequences])
    noisy = [b for b, sequence in enumerate(sequences) if not sequence.params.greedy]
    if noisy:
        some = [sequences[b] for b in noisy]
        g = noise([s.seed for s in some], [len(s.tokens) for s in some])
        scores, at = scores.clone(), put(noisy, scores.device)
        scores[at] += g[:, : scores.shape[1]]
    best = drawable(scores)
    return best if vocab.ids is None else torch.where(best < 0, best, vocab.ids[best])


def _frontier(
    nodes: list[tuple[int, int]],
    trees: list[Sprouts],
    words: list[dict[int, int]],
    rows: dict[tuple[int, int], int],
    depth: int,
) -> Frontier:
    """Gives the nodes to be run their bits and ancestors.

    Args:
        nodes: [F] sequence and node.
        rows: where in the pass before each of its nodes was.
    """
    frontier = Frontier([], [], depth, [], [], [])
    for b, node in nodes:
        parent = trees[b].parents[node]
        bit = len(words[b])
        words[b][node] = words[b][parent] | 1 << bit
        frontier.sequences.append(b)
        frontier.tokens.append(trees[b].tokens[node])
        frontier.parents.append(rows[b, parent] if depth > 1 else b)
        frontier.bits.append(bit)
        frontier.ancestors.append(words[b][node])
    return frontier


class _Children(NamedTuple):
    tokens: list[list[int]]  # [F][C] in the target's ids, likeliest or first drawn first
    logps: list[list[float]]  # [F][C] what the choice went by, as log-probabilities
    probs: Tensor | None  # [F, V] float32, the laws they were drawn from


def _children(
    ask: Ask,
    nodes: list[tuple[int, int]],
    widths: list[int],
    depth: int,
    logits: Tensor,
    noise: Noise,
    vocab: DraftVocab,
    trust: float,
) -> _Children:
    """Chooses ``widths[f]`` children of each node, fewer where its law has no more tokens.

    Args:
        nodes: [F] sequence and node, all at ``depth``.
        logits: [F, Vd] float32
        trust: see `TreeShape`.
    """
    owners = [ask.sequences[b] for b, _ in nodes]
    params = [sequence.params for sequence in owners]
    scores = shaped = filtered(logits, params)
    noisy = [f for f, param in enumerate(params) if not param.greedy]
    if noisy:
        length = [len(owners[f].tokens) for f in noisy]
        keys = [
            (
                _own_seed(owners[f].seed, at, nodes[f][1]) if ask.sample else owners[f].seed,
                at + depth,
            )
            for f, at in zip(noisy, length, strict=True)
        ]
        unlike = list(dict.fromkeys(keys))  # coupled nodes of one sequence and depth share theirs
        g = noise([seed for seed, _ in unlike], [position for _, position in unlike])
        g = g[:, : logits.shape[1]]  # [.., Vd]
        place = {key: row for row, key in enumerate(unlike)}
        scores = scores.clone()
        scores[noisy] += g[[place[key] for key in keys]]
    best, picked = _largest(scores, max(widths))  # [F, C]
    logps = log_chances(scores, best, trust)
    counts = [
        min(width, sum(logp > -math.inf for logp in row))
        for width, row in zip(widths, logps, strict=True)
    ]
    probs = None
    if ask.sample:
        q = law(shaped, params)  # [F, Vd]
        for f, param in enumerate(params):
            if param.greedy and counts[f]:
                # The target's law is one token. Any q on the children accepts it if it is one.
                q[f] = 0.0
                q[f, picked[f, : counts[f]]] = 1 / counts[f]
        probs = vocab.spread(q)
    return _Children(
        [row[:count] for row, count in zip(vocab.tokens(picked), counts, strict=True)],
        [row[:count] for row, count in zip(logps, counts, strict=True)],
        probs,
    )


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and indices [F, C] of the largest scores of each row, falling; NaN first."""
    if count > 1:
        values, indices = scores.topk(min(count, scores.shape[1]), -1)
        return values, indices
    best = likeliest(scores)[:, None]
    return scores.gather(-1, best), best


def _own_seed(seed: int, length: int, node: int) -> int:
    """For the noise of one node's draw: new for every round and node, and nobody else's."""
    digest = hashlib.blake2b(f"tree {seed} {length} {node}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)


def _finish(
    plans: list[Plan],
    trees: list[Sprouts],
    laws: list[dict[int, Tensor]],
    vocab_size: int | None,
) -> TokenTree:
    """Kept nodes in depth-first order; with probs [B, N, V] if ``vocab_size`` is given."""
    orders = [_depth_first(tree, plan.kept(tree)) for plan, tree in zip(plans, trees, strict=True)]
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    for tree, order in zip(trees, orders, strict=True):
        place = {node: at for at, node in enumerate(order)}
        tokens.append([tree.tokens[node] for node in order])
        parents.append([place.get(tree.parents[node], -1) for node in order])
    chances = [
        [math.exp(tree.values[node]) for node in order]
        for tree, order in zip(trees, orders, strict=True)
    ]
    out = replace(from_lists(tokens, parents), chances=chances)
    rows = [
        (b, at, laws[b][n]) for b, o in enumerate(orders) for at, n in enumerate(o) if n in laws[b]
    ]
    if vocab_size is None or not rows:
        return out
    probs = torch.zeros(len(trees), out.width, vocab_size, device=rows[0][2].device)  # [B, N, V]
    for b, at, row in rows:
        probs[b, at] = row
    return replace(out, probs=probs)


def _depth_first(tree: Sprouts, kept: list[int]) -> list[int]:
    below: dict[int, list[int]] = {}
    for node in kept:  # in order of birth: siblings by rank
        below.setdefault(tree.parents[node], []).append(node)
    order, todo = list[int](), [0]
    while todo:
        order.append(node := todo.pop())
        todo.extend(reversed(below.get(node, [])))
    return order
