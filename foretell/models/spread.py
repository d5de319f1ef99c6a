"""A rank's part of a decoder: computes up to an exchange with the other ranks, and goes on.

Where that is asked for, a batch in which every sequence has as many rows is two batches of half the
sequences: while one half's exchange is under way the other half computes (DeepSeek-V3, 2412.19437,
section 3.4.1). A row does not know of others, so nothing else changes. Every rank takes the same
turns, or exchanges would meet the wrong ones.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.rows import add_rms_norm, rms_norm
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.layer import Layer
from foretell.models.linear import Embedding, Linear
from foretell.models.mla import LatentLayer
from foretell.models.moe import Experts
from foretell.models.rope import Rope
from foretell.models.sharding import Exchange, Ranks, Steps

_MOST_ROWS = 2
"""Of each sequence: a root and the one token that is drafted."""


class Listener(Protocol):
    """Is told what one half of a pass did; times are seconds of ``time.perf_counter``."""

    def phase(self, name: str, start: float, end: float) -> None: ...

    def step(self, counts: dict[str, int]) -> None: ...


class SpreadDecoder(Decoder):
    """As `Decoder`, with products of which only all ranks' sum is the layer's.

    Args:
        embedding: zeros for tokens of other ranks.
        lm_head: gathers its outputs by itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: SequenceOf[Layer | LatentLayer],
        norm: Tensor,
        lm_head: Linear,
        rope: Rope,
        ranks: Ranks,
    ) -> None:
        super().__init__(config, embedding, layers, norm, lm_head, rope)
        self.whole_pass = None
        self.ranks = ranks
        self.listeners: tuple[Listener, Listener] | None = None
        """Of passes in halves."""

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        attention: Attention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """See `Decoder.forward`."""
        self.rope.cover(layout.positions)
        border = half_of(layout) if self.ranks.halves else 0
        if not border:
            (result,) = _in_turn([self._steps(tokens, attention, layout, kv, taps)])
            return result
        halves: list[Steps[tuple[Tensor, Tensor | None]]] = []
        for rows in (slice(0, border), slice(border, None)):
            part, planned = _rows_of(layout, rows), copy.copy(attention)
            planned.plan(part)
            halves.append(self._steps(tokens[rows], planned, part, kv, taps))
        (first, more), (second, others) = _in_turn(halves, self.listeners)
        features = None if more is None or others is None else torch.cat([more, others])
        return torch.cat([first, second]), features

    def _steps(
        self,
        tokens: Tensor,
        attention: Attention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        taps: tuple[int, ...],
    ) -> Steps[tuple[Tensor, Tensor | None]]:
        config, layers, eps = self.config, self.layers, self.config.rms_norm_eps
        sums = self.ranks.start_sum
        x = yield sums(self.embedding(tokens))  # [R, H]
        assert layers[0].input_norm is not None
        hidden = rms_norm(x, layers[0].input_norm, eps)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(layers):
            seen = yield sums(layer.attend(hidden, config, self.rope, attention, layout, kv[i]))
            hidden = add_rms_norm(seen, x, layer.post_norm, eps)
            if isinstance(layer, LatentLayer) and isinstance(layer.block, Experts):
                out = yield from layer.block.over_ranks(hidden, self.ranks)
            else:
                out = yield sums(layer.feed(hidden))
            following = layers[i + 1].input_norm if i + 1 < len(layers) else self.norm
            assert following is not None
            hidden = add_rms_norm(out, x, following, eps)
            if i in taps:
                tapped[i] = x.clone()
        if not taps:
            return hidden, None
        tapped[-1] = hidden
        return hidden, torch.cat([tapped[tap] for tap in taps], dim=1)


def half_of(layout: Layout) -> int:
    """The row at which a batch is cut into halves, 0 where it stays one: every sequence has as many
    rows, at most two."""
    sequences = layout.row_seq
    changes = (sequences[1:] != sequences[:-1]).nonzero().flatten() + 1
    num, rows = len(changes) + 1, len(sequences)
    each = rows // num if rows else 0
    even = torch.arange(each, rows, each) if each else changes
    if num < 2 or each > _MOST_ROWS or not torch.equal(changes, even):
        return 0
    return num // 2 * each


def _rows_of(layout: Layout, rows: slice) -> Layout:
    shared = ("page_table", "page_size")
    parts = {f.name: getattr(layout, f.name)[rows] for f in fields(layout) if f.name not in shared}
    return replace(layout, **parts)


def _in_turn(passes: list[Steps[Any]], listeners: SequenceOf[Listener] | None = None) -> list[Any]:
    """Runs passes to their ends, each up to its next exchange and then the next one."""
    results: list[Any] = [None] * len(passes)
    exchanges: dict[int, tuple[Exchange, float]] = {}
    for i, each in enumerate(passes):
        begun = time.perf_counter()
        exchange = next(each)
        exchanges[i] = exchange, time.perf_counter()
        if listeners:
            listeners[i].phase("compute", begun, exchanges[i][1])
    while exchanges:
        for i, (exchange, begun) in list(exchanges.items()):
            came = exchange()
            there = time.perf_counter()
            try:
                following = passes[i].send(came)
                exchanges[i] = following, time.perf_counter()
            except StopIteration as end:
                results[i] = end.value
                del exchanges[i]
            if listeners:
                listeners[i].phase("exchange", begun, there)
                listeners[i].phase("compute", there, time.perf_counter())
    for i, listener in enumerate(listeners or ()):
        listener.step({"rows": len(results[i][0])})
    return results
