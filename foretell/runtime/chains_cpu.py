"""A head's chains as one compiled call: pick a token, run it, pick the next.

What `foretell.spec.grow_tree` does level by level, for chains whose tokens are the likeliest or the
best with the target's own noise: the same tokens, at the price of the passes. Imported on first
use, as numba is slow to import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from torch import Tensor

from foretell.attention.jit import jit
from foretell.attention.kernels import PART, exp
from foretell.attention.pool import num_threads, together
from foretell.attention.together import LINE, meet
from foretell.models.compiled import run, sync_bytes
from foretell.models.whole_pass import WholePass
from foretell.runtime.noise_cpu import add_gumbel, maximum, unsigned
from foretell.spec.draft_vocab import DraftVocab
from foretell.spec.drafter import Ask
from foretell.spec.tree import TokenTree


@jit(fastmath={"reassoc", "contract", "nsz"})
def _total(scores: Any, top: Any) -> Any:
    total = np.float32(0.0)
    for i in range(scores.shape[0]):
        total += exp(scores[i] - top)
    return total


@jit()
def _best(scores: Any) -> Any:
    """The first of the largest, -1 where one is NaN or the largest is not finite."""
    top, best = maximum(scores, np.empty(16, np.float32)), 0
    if not abs(top) < np.inf:
        return -1
    while scores[best] != top:
        best += 1
    return best


@jit()
def _pick(logits: Any, heat: Any, seed: Any, position: Any, ids: Any, scores: Any) -> Any:
    """A row's token by draft id, -1 for none, and its log-probability. heat: 0 if greedy."""
    best = _best(logits)
    scores[:] = logits
    if best >= 0 and heat > 0:
        if heat != 1:
            for i in range(scores.shape[0]):
                scores[i] = (logits[i] - logits[best]) / heat
        add_gumbel(scores, ids, seed, position)
        best = _best(scores)
    return best, -np.log(np.float64(_total(scores, scores[best]))) if best >= 0 else 0.0


@jit()
def _draft(
    fixed: Any,  # see `WholePass.fixed`
    pages: Any,  # [slots, P]
    first: Any,  # [slots, at least Vd] logits behind each root
    given: Any,  # [slots, H] features behind each root
    ids: Any,  # [Vd] the target's ids, [0] where they are the draft's own
    chains: Any,  # [B, 3]: slot, position of the first pair to be run, most tokens
    heats: Any,  # [B]
    seeds: Any,  # [B]
    least: Any,  # [B, 3] as `Least`, in logarithms
    tokens: Any,  # [B, L] of -1
    values: Any,  # [B, L] log-probability of the path
    scores: Any,  # [Vd], and all that follows: scratch
    who: Any,  # [N] whose rows they are: at first all that want a token
    rows: Any,  # [4, N]: tokens, outputs, positions, cells
    places: Any,  # [N, 4]
    ancestors: Any,  # [N] zeros
    tiles: Any,  # [N, 3]
    pieces: Any,  # [N * most parts, 3]
    features: Any,  # [N, H]
    logits: Any,  # [N, padded Vd]
    hidden: Any,  # [N, H]
    tapped: Any,  # [N, H], or [N, 0] where the hidden states are the features that follow
    parts: Any,
    done: Any,
    size_of: Any,  # [2]: rows and pieces of a level
    sync: Any,  # [`sync_bytes`] zeros
    share: Any,
    shares: Any,
) -> None:
    (
        formats, ends, start, bits, taps, table, caches, sizes, eps, scale, cos, sin, x, fitted,
        stride, wide, seen, spent,
    ) = fixed  # fmt: skip
    page_size, vocab = sizes[16], scores.shape[0]
    following = tapped if tapped.shape[1] else hidden
    for level in range(tokens.shape[1]):
        if share == 0:  # all others wait
            num = num_pieces = 0
            for row in range(size_of[0]):
                b = who[row]
                slot, position = chains[b, 0], chains[b, 1] + level
                said = logits[row, :vocab] if level else first[slot, :vocab]
                best, logp = _pick(said, heats[b], seeds[b], position + 1, ids, scores)
                value = min(logp, 0.0) + (values[b, level - 1] if level else 0.0)
                if best < 0 or value < least[b, 0] or (level == 0 and logp < least[b, 2]):
                    continue
                tokens[b, level], values[b, level] = ids[best] if ids.shape[0] else best, value
                if level + 1 == chains[b, 2] or value < least[b, 1]:
                    continue
                features[num] = following[row] if level else given[slot]
                rows[0, num], rows[1, num], rows[2, num] = tokens[b, level], num, position
                page = np.int64(pages[slot, position // page_size])
                rows[3, num] = page * page_size + position % page_size
                places[num, 0], places[num, 1] = position + 1, 0
                places[num, 2], places[num, 3] = position + 1, position
                tiles[num, 0], tiles[num, 1], tiles[num, 2] = num, num + 1, slot
                for part in range(position // PART + 1):
                    pieces[num_pieces, 0], pieces[num_pieces, 1] = num, part
                    pieces[num_pieces, 2] = position // PART + 1
                    num_pieces += 1
                who[num] = b
                num += 1
            size_of[0], size_of[1] = num, num_pieces
            sync[2 * LINE :] = 0
            done[:] = 0
        meet(sync.ctypes.data, shares)
        num, num_pieces = size_of[0], size_of[1]
        if num == 0:
            return
        run(
            formats, ends, start, features, bits, rows[0], rows[1, :num], logits,
            x.reshape(-1)[: num * x.shape[1]].reshape(num, x.shape[1]), hidden, tapped, taps, table,
            caches, sizes, eps, scale, cos, sin, rows[2, :num], rows[3, :num], places, ancestors,
            tiles, pieces.reshape(-1)[: 3 * num_pieces].reshape(num_pieces, 3), pages, False,
            places, ancestors, tiles, pieces, fitted, stride, wide, seen, parts, done,
            sync.ctypes.data, spent, share, shares,
        )  # fmt: skip


def draft(
    whole: WholePass,
    kv: SequenceOf[tuple[Tensor, Tensor]],
    page_table: np.ndarray,
    page_size: int,
    ask: Ask,
    lengths: SequenceOf[int],
    logits: Tensor,
    features: Tensor,
    vocab: DraftVocab,
    *,
    normed: bool,
) -> TokenTree:
    """See `DraftRuntime.draft_chains`.

    Args:
        normed: whether the feature that follows is the one behind the final norm.
    """
    sequences, longest = ask.sequences, max(lengths)
    who = np.array([b for b, length in enumerate(lengths) if length])
    starts = [len(sequence.tokens) - 1 for sequence in sequences]
    heats = [0 if s.params.greedy else max(s.params.temperature, 1e-30) for s in sequences]
    num, end = len(who), max(starts) + longest
    num_parts, config = end // PART + 1, whole.config
    taps = () if normed else (len(kv) - 1,)
    fixed, padded = whole.fixed(kv, taps, page_size, num, end)
    tokens, values = np.full((len(starts), longest), -1), np.zeros((len(starts), longest))
    sync = np.zeros(sync_bytes(len(kv)), np.uint8)
    together(
        _draft,
        (
            fixed, page_table, logits.numpy(), features.numpy(),
            np.empty(0, np.int64) if vocab.ids is None else vocab.ids.numpy(),
            np.array([[s.slot, *of] for s, *of in zip(sequences, starts, lengths, strict=True)]),
            np.array(heats, np.float32), unsigned([s.seed for s in sequences]),
            np.array([least.logs for least in ask.least]), tokens, values,
            np.empty(vocab.width(logits), np.float32), who, np.empty((4, num), np.int32),
            np.empty((num, 4), np.int32), np.zeros(num, np.uint64), np.empty((num, 3), np.int32),
            np.empty((num * num_parts, 3), np.int32),
            *(np.empty((num, n), np.float32) for n in (
                config.hidden_size, padded, config.hidden_size, len(taps) * config.hidden_size,
            )),
            np.empty((num, config.num_heads, num_parts, config.head_dim + 2), np.float32),
            np.empty((len(kv), num, config.num_kv_heads), np.int64), np.array([num, 0]), sync,
        ),
        num_threads(), sync, kv,
    )  # fmt: skip
    found: list[tuple[list[int], list[int]]] = []
    chances: list[list[float]] = []
    for root, row, logps in zip(ask.roots, tokens.tolist(), values.tolist(), strict=True):
        count = [*row, -1].index(-1)
        found.append(([root, *row[:count]], list(range(-1, count))))
        chances.append([1.0, *map(math.exp, logps[:count])])
    return TokenTree(found, chances=chances)
