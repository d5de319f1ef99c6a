"""Sampling: the only place where a request's sampling parameters act on the target.

Logits come in one row a tree node. Each row is shaped with its own history (prompt, answer, and
the draft path down to that node), so a token is drawn exactly as plain decoding would draw it
there, whatever was drafted. A row's result depends on that row alone, to the last bit.

Order and definitions are vLLM's: allowed tokens, grammar, bad tokens, bias, minimum length,
repetition penalty (over prompt and answer), frequency and presence penalty (over the answer),
temperature, min-p, top-k, top-p. Ties are broken by the lower token id (`foretell.spec.shape`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretell.attention.compiler import have_compiler
from foretell.placed import put
from foretell.sequence import Logprob, SamplingParams
from foretell.spec import shape as spec_shape
from foretell.spec.tree import path_to


class History:
    """Which tokens a sequence holds, and how often its answer does. Grows with every commit."""

    def __init__(self, prompt: SequenceOf[int], output: SequenceOf[int] = ()) -> None:
        self._prompt = set(prompt)
        self._counts = Counter(output)
        self.num_output = len(output)
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    def extend(self, tokens: SequenceOf[int]) -> None:
        """Takes in committed tokens of the answer; draft tokens never come here."""
        self._counts.update(tokens)
        self.num_output += len(tokens)
        self._arrays = None

    def counts(self, path: SequenceOf[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of prompt, answer and draft path: ids [U] int64, each once, and how often answer
        and path hold them, [U] float32."""
        if self._arrays is None:
            ids = sorted(self._prompt | self._counts.keys())
            held = [self._counts.get(token, 0) for token in ids]
            self._arrays = np.array(ids, np.int64), np.array(held, np.float32)
        ids, held = self._arrays
        if not path:
            return ids, held
        held = held.copy()
        fresh: Counter[int] = Counter()
        for token, place in zip(path, np.searchsorted(ids, path), strict=True):
            if place < len(ids) and ids[place] == token:
                held[place] += 1
            else:
                fresh[token] += 1
        if fresh:
            ids = np.concatenate([ids, np.array(list(fresh), np.int64)])
            held = np.concatenate([held, np.array(list(fresh.values()), np.float32)])
        return ids, held


@dataclass(eq=False)
class Shape:
    """One sequence's settings and history, made once when it starts."""

    params: SamplingParams
    history: History
    stop_ids: tuple[int, ...] = ()
    """End-of-text and stop tokens, which ``min_tokens`` bans at first."""
    grammar: Any = None
    """A `foretell.models.grammar.Grammar`, or None."""

    @cached_property
    def has_edits(self) -> bool:
        """Does anything but temperature and filters act on the logits?"""
        p = self.params
        bans = p.bad_token_ids or p.allowed_token_ids is not None or p.min_tokens
        return bool(bans or p.logit_bias or p.has_penalties or self.grammar)


class ShapeRow(NamedTuple):
    """One row of logits: whose it is, and the draft tokens between the root and its node."""

    shape: Shape
    path: tuple[int, ...] = ()
    allowed: np.ndarray | None = None
    """[V] bool, what the grammar lets follow; None for everything."""

    @property
    def num_output(self) -> int:
        """Answer tokens that precede the one drawn from this row."""
        return self.shape.history.num_output + len(self.path)


def tree_rows(shape: Shape, tokens: list[int], parents: list[int]) -> list[ShapeRow]:
    """The rows of one tree, root first; ``shape.history`` holds the root already."""
    if not shape.has_edits:
        return [ShapeRow(shape)] * len(tokens)
    rows = [
        ShapeRow(shape, tuple(tokens[j] for j in path_to(parents, i))) for i in range(len(tokens))
    ]
    if shape.grammar is None:
        return rows
    return [row._replace(allowed=shape.grammar.mask(row.path)) for row in rows]


def shape_logits(logits: Tensor, rows: SequenceOf[ShapeRow]) -> Tensor:
    """Applies every sampling parameter.

    Args:
        logits: [R, V] float32 as the model gave them; not modified.
        rows: [R] whose rows they are.

    Returns:
        [R, V] float32 whose softmax is the final law, -inf where a token is excluded (greedy rows:
        whose argmax is the choice). ``logits`` itself where nothing had to be done. A row that
        held NaN or +inf still does, and one whose tokens are all excluded is all -inf; `draw`
        gives -1 for both and `reason` says which.
    """
    assert logits.shape[0] == len(rows)
    edited = [r for r, row in enumerate(rows) if row.shape.has_edits]
    if edited:
        logits = logits.clone()
        for r in edited:
            _ban_and_bias(logits[r], rows[r])
        _penalise(logits, [(r, rows[r]) for r in edited if rows[r].shape.params.has_penalties])
    return spec_shape.filtered(logits, [row.shape.params for row in rows])


def law(shaped: Tensor, rows: SequenceOf[ShapeRow]) -> Tensor:
    """Probabilities [R, V] float32 of shaped logits, one-hot for greedy rows; NaN where there is
    nothing to draw from. What `rejection`, `block` and the lossy rules compare with."""
    return spec_shape.law(shaped, [row.shape.params for row in rows])


def draw(
    shaped: Tensor,
    greedy: SequenceOf[bool],
    seeds: SequenceOf[int],
    positions: SequenceOf[int],
) -> Tensor:
    """The target's own token for each row: argmax of logits, plus Gumbel noise unless greedy.

    Args:
        shaped: [R, V] float32 from `shape_logits`.
        greedy: [R]
        seeds: [R] the sequences' seeds.
        positions: [R] absolute position of the token to be drawn (the node's own plus one).

    Returns:
        [R] int64, the lowest id among equals; -1 where a row cannot be drawn from. The host does
        not wait for the device.
    """
    choices = spec_shape.drawable(shaped)
    sampled = [r for r, is_greedy in enumerate(greedy) if not is_greedy]
    if sampled:
        at = put(sampled, shaped.device)
        part = shaped if len(sampled) == len(greedy) else shaped[at]
        some = [seeds[r] for r in sampled], [positions[r] for r in sampled]
        if part.device.type == "cpu" and have_compiler():
            from foretell.runtime.noise_cpu import gumbel_argmax  # compiled; slow to import
        else:
            from foretell.spec.noise import gumbel_argmax
        choices[at] = torch.where(choices[at] >= 0, gumbel_argmax(part, *some), -1)
    return choices


def reason(shaped_row: Tensor) -> str:
    """Why nothing can be drawn from that row [V], for the error of the request."""
    if bool((shaped_row == -torch.inf).all()):
        return (
            "no token is left to choose from: allowed_token_ids, bad_token_ids, min_tokens, "
            "logit_bias and grammar together exclude every token"
        )
    return "the model's logits are not finite (NaN or infinity), so no token can be drawn"


def log_probs(logits: Tensor, chosen: SequenceOf[int], tops: SequenceOf[int]) -> list[Logprob]:
    """Log-probabilities of the chosen tokens and of the likeliest others.

    They are those of the model itself, before any sampling parameter acts (OpenAI's and vLLM's
    default), and so do not depend on speculation.

    Args:
        logits: [R, V] float32 as the model gave them.
        chosen: [R] token ids.
        tops: [R] how many likeliest tokens to list; 0 for none.

    Returns:
        One entry a row; ``top`` by falling probability, the lower id first among equals.
    """
    if not chosen:
        return []
    logp = torch.log_softmax(logits.float(), -1)
    at = torch.tensor(list(chosen), dtype=torch.int64, device=logp.device)
    values = logp.gather(-1, at[:, None])[:, 0].tolist()
    found: list[Logprob] = []
    for r, (token, value) in enumerate(zip(chosen, values, strict=True)):
        top: list[tuple[int, float]] = []
        width = min(tops[r], logp.shape[-1])
        if width:
            last = logp[r].topk(width).values[-1]
            ids = (logp[r] >= last).nonzero().flatten()  # ties at the edge are broken by id
            pairs = zip(ids.tolist(), logp[r][ids].tolist(), strict=True)
            top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:width]
        found.append(Logprob(token, value, tuple(top)))
    return found


def _ban_and_bias(row: Tensor, of: ShapeRow) -> None:
    """In place. Adds -inf instead of writing it, so that a NaN stays one."""
    params = of.shape.params
    if params.allowed_token_ids is not None:
        mask = torch.full_like(row, -torch.inf)
        mask[_in_range(params.allowed_token_ids, row)] = 0.0
        row += mask
    if of.allowed is not None:
        mask = np.where(of.allowed, np.float32(0), -np.float32(np.inf))
        row += torch.from_numpy(mask).to(row.device)
    banned = list(params.bad_token_ids)
    if of.num_output < params.min_tokens:
        banned += of.shape.stop_ids
    if banned:
        row[_in_range(banned, row)] += -torch.inf
    if params.logit_bias:
        ids = _in_range(list(params.logit_bias), row)
        bias = [params.logit_bias[token] for token in ids]
        row[ids] += torch.tensor(bias, dtype=row.dtype, device=row.device)


def _in_range(ids: SequenceOf[int], row: Tensor) -> list[int]:
    return [token for token in dict.fromkeys(ids) if 0 <= token < row.shape[-1]]


def _penalise(logits: Tensor, rows: list[tuple[int, ShapeRow]]) -> None:
    """In place, on the few tokens that each row's history holds."""
    if not rows:
        return
    where: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    held: list[np.ndarray] = []
    for r, row in rows:
        tokens, counts = row.shape.history.counts(row.path)
        ids.append(tokens)
        held.append(counts)
        where.append(np.full(len(tokens), r))
    lengths = [len(tokens) for tokens in ids]
    to = lambda array: torch.from_numpy(array).to(logits.device)  # noqa: E731
    spread = lambda values: to(np.repeat(np.array(values, np.float32), lengths))  # noqa: E731
    settings = [row.shape.params for _, row in rows]
    at = to(np.concatenate(where)), to(np.concatenate(ids))
    count = to(np.concatenate(held))
    repetition = spread([p.repetition_penalty for p in settings])
    value = logits[at]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= spread([p.frequency_penalty for p in settings]) * count
    value -= spread([p.presence_penalty for p in settings]) * (count > 0)
    logits[at] = value
