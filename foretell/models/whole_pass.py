"""Calls the compiled pass: a table of where everything lies, made once, and buffers that stay."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.cpu import NO_WINDOW, CpuAttention
from foretell.attention.pool import in_shares, num_threads
from foretell.models.linear import PackedLinear, products
from foretell.models.quant import PANEL

if TYPE_CHECKING:
    from foretell.models.decoder import Decoder, Layer

_BITS = {2: np.empty(0, np.uint16), 4: np.empty(0, np.uint32)}


class WholePass:
    """A decoder's layers as one compiled call, see `compiled`.

    Args:
        decoder: all of whose products are in one format and of one shape in each layer.
    """

    def __init__(self, decoder: Decoder) -> None:
        from foretell.models import compiled

        config, layers = decoder.config, decoder.layers
        self._compiled = compiled
        linears = [_four(x) for x in layers]
        first = linears[0]
        table = np.zeros((len(layers) + 1, compiled.LAYER), np.int64)
        for row, layer, four in zip(table, layers, linears, strict=False):
            for i, x in enumerate(four):
                row[3 * i : 3 * i + 3] = [
                    t.data_ptr() for t in (x.packed.weights, x.packed.scale, x.bias)
                ]
            row[12], row[13] = layer.input_norm.data_ptr(), layer.post_norm.data_ptr()
            row[14], row[15] = (
                0 if w is None else w.data_ptr() for w in (layer.q_norm, layer.k_norm)
            )
            row[16] = layer.window or NO_WINDOW
        table[-1, 12] = decoder.norm.data_ptr()
        self._table = table
        self._sizes = [
            *(n for x in first for n in (x.padded, x.packed.weights.shape[1], x.panels)),
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
        ]  # fmt: skip
        packed = products()
        assert packed is not None
        kind = first[0].kind
        self._format = packed.compile_format(kind)
        self._stride = max(packed.row_bytes(kind, x.padded) for x in first)
        self._width = max(x.panels for x in first) * PANEL
        self._seen = config.num_heads * config.head_dim
        self._eps = np.float32(config.rms_norm_eps)
        self._scale = np.float32(config.head_dim**-0.5)
        self._room = threading.local()
        self._caches: tuple[Any, np.ndarray, int] | None = None
        self.spent = np.zeros(len(compiled.PHASES), np.int64)
        """Ticks of each of `compiled.PHASES` so far."""

    def __call__(
        self,
        x: Tensor,
        attention: CpuAttention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        cos: Tensor,
        sin: Tensor,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Embeddings x [R, H], which it uses up -> hidden states [R, H] and tapped [R, taps * H];
        a tap of -1 is left to the caller."""
        rows, width = x.shape
        hidden, tapped = torch.empty(rows, width), torch.empty(rows, len(taps) * width)
        places = np.full(len(self._table) - 1, -1, np.int64)
        for i, tap in enumerate(taps):
            if tap >= 0:
                places[tap] = i
        fitted, wide, seen = self._buffers(rows)
        caches, num_pages, bits = self._where(kv)
        layers = len(places)
        sync = np.zeros(self._compiled.sync_bytes(layers), np.uint8)
        arguments = (
            *self._format, bits, x.numpy(), hidden.numpy(), tapped.numpy(), places, self._table,
            caches, np.array([*self._sizes, layout.page_size, num_pages]), self._eps, self._scale,
            cos.numpy(), sin.numpy(), layout.positions.numpy(), layout.cells.numpy(),
            *attention.planned, fitted, self._stride, wide, seen,
            sync.ctypes.data, self.spent,
        )  # fmt: skip
        in_shares(self._compiled.run, arguments, num_threads())
        return hidden, tapped

    def _buffers(self, rows: int) -> tuple[int, int, int]:
        """Addresses of fitted rows, a product's outputs and attention's, this thread's own."""
        sizes = (rows * self._stride, rows * self._width * 4, rows * self._seen * 4)
        starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
        room: Tensor | None = getattr(self._room, "bytes", None)
        if room is None or len(room) < starts[-1] + 64:
            room = self._room.bytes = torch.empty(int(starts[-1]) + 64, dtype=torch.uint8)
        first = -(-room.data_ptr() // 64) * 64
        return first, first + int(starts[1]), first + int(starts[2])

    def _where(self, kv: SequenceOf[tuple[Tensor, Tensor]]) -> tuple[np.ndarray, int, np.ndarray]:
        """Addresses of the caches, pages, and an array of their width."""
        known = self._caches
        if known is None or known[0] is not kv:
            where = np.array([[x.data_ptr() for x in pair] for pair in kv], np.int64)
            known = self._caches = kv, where, kv[0][0].shape[0]
        return known[1], known[2], _BITS[kv[0][0].element_size()]


def _four(layer: Layer) -> list[Any]:
    return [layer.qkv, layer.o, layer.gate_up, layer.down]


def whole_pass(decoder: Decoder) -> WholePass | None:
    """The compiled form of a decoder, None where there is none."""
    if products() is None or not decoder.layers:
        return None
    shapes = set()
    for layer in decoder.layers:
        four = _four(layer)
        if not all(isinstance(x, PackedLinear) for x in four):
            return None
        shapes.add(tuple((x.kind, x.in_features, x.out_features) for x in four))
    one_kind = len(shapes) == 1 and len({kind for kind, _, _ in shapes.pop()}) == 1
    return WholePass(decoder) if one_kind else None


def can_run(attention: Attention, kv: SequenceOf[tuple[Tensor, Tensor]]) -> bool:
    """Whether attention and caches are those that the compiled pass has in it."""
    return isinstance(attention, CpuAttention) and kv[0][0].is_cpu
