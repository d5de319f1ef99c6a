"""Rows through layers, on one rank or as one's part: computes up to an exchange, and goes on.

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
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.rows import add_rms_norm
from foretell.models.config import ModelConfig
from foretell.models.layer import Layer, Over
from foretell.models.mla import LatentLayer
from foretell.models.moe import Experts
from foretell.models.rope import Rope
from foretell.models.sharding import Exchange, Ranks, Steps

T = TypeVar("T")
_MOST_ROWS = 2
"""Of each sequence: a root and the one token that is drafted."""


class Listener(Protocol):
    """Is told what one half of a pass did; times are seconds of ``time.perf_counter``."""

    def phase(self, name: str, start: float, end: float) -> None: ...

    def step(self, counts: dict[str, int]) -> None: ...


class Network(Protocol):
    """A decoder or a head."""

    config: ModelConfig
    rope: Rope
    ranks: Ranks | None
    """Those whose products add up to a layer's; None where it is whole."""

    @property
    def layers(self) -> SequenceOf[Layer | LatentLayer]: ...


def total(part: Tensor, ranks: Ranks | None) -> Steps[Tensor]:
    """A product of which each rank has a term."""
    return part if ranks is None else (yield ranks.start_sum(part))


def through_layers(
    network: Network,
    norm: Tensor | None,
    hidden: Tensor,
    x: Tensor,
    attention: Attention,
    layout: Layout,
    kv: SequenceOf[tuple[Tensor, Tensor]],
    taps: tuple[int, ...] = (),
) -> Steps[tuple[Tensor, dict[int, Tensor]]]:
    """
    Args:
        norm: [H] behind the last layer, None where there is none.
        hidden: [R, H or 2 H] what the first attention reads.
        x: [R, H] the residual; all that layers put out is added to it in place.

    Returns:
        What is behind the norm [R, H], and the outputs [R, H] of layers that are tapped.
    """
    config, layers, ranks = network.config, network.layers, network.ranks
    eps, tapped = config.rms_norm_eps, dict[int, Tensor]()
    over = Over(config, network.rope, attention, layout)
    for i, layer in enumerate(layers):
        seen = layer.attend(hidden, over, kv[i])
        # Each norm also adds to x, in place, what the block before it put out.
        hidden = add_rms_norm((yield from total(seen, ranks)), x, layer.post_norm, eps)
        if ranks and isinstance(layer, LatentLayer) and isinstance(layer.block, Experts):
            out = yield from layer.block.over_ranks(hidden, ranks)
        else:
            out = yield from total(layer.feed(hidden), ranks)
        following = layers[i + 1].input_norm if i + 1 < len(layers) else norm
        hidden = x.add_(out) if following is None else add_rms_norm(out, x, following, eps)
        if i in taps:
            tapped[i] = x.clone()
    return hidden, tapped


def straight(steps: Steps[T]) -> T:
    """Runs a pass to its end; each exchange is waited for at once."""
    came = None
    while True:
        try:
            came = steps.send(came)()
        except StopIteration as end:
            return end.value


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


def planned_for(rows: slice, attention: Attention, layout: Layout) -> tuple[Attention, Layout]:
    """Attention and layout of some rows only."""
    shared = ("page_table", "page_size")
    parts = {f.name: getattr(layout, f.name)[rows] for f in fields(layout) if f.name not in shared}
    part, planned = replace(layout, **parts), copy.copy(attention)
    planned.plan(part)
    return planned, part


def in_halves(
    passes: SequenceOf[Steps[tuple[Tensor, Tensor | None]]],
    listeners: SequenceOf[Listener] | None,
) -> tuple[Tensor, Tensor | None]:
    """Runs two passes, each up to its next exchange and then the other one."""
    results: list[tuple[Tensor, Tensor | None]] = []
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
            except StopIteration as end:  # both have as many exchanges: in order, then
                results.append(end.value)
                del exchanges[i]
            if listeners:
                listeners[i].phase("exchange", begun, there)
                listeners[i].phase("compute", there, time.perf_counter())
    for listener, (hidden, _) in zip(listeners or (), results, strict=False):
        listener.step({"rows": len(hidden)})
    features = [part for _, part in results if part is not None]
    hidden = torch.cat([hidden for hidden, _ in results])
    return hidden, torch.cat(features) if features else None
