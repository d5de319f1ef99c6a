"""Calls the compiled pass: a table of where everything lies, made once, and buffers that stay."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.cpu import NO_WINDOW, CpuAttention
from foretell.attention.pool import num_threads, together
from foretell.models.linear import PackedEmbedding, PackedLinear, products
from foretell.models.quant import PANEL

if TYPE_CHECKING:
    from foretell.models.decoder import Decoder, Layer

_BITS = {2: np.empty(0, np.uint16), 4: np.empty(0, np.uint32)}


class WholePass:
    """A decoder's pass, embedding to logits, as one compiled call: see `compiled`.

    Args:
        decoder: whose layers' products are all in one format and of one shape in each layer.
    """

    def __init__(self, decoder: Decoder, embedding: PackedLinear, lm_head: PackedLinear) -> None:
        from foretell.models import compiled

        config, layers = decoder.config, decoder.layers
        self._compiled, self._config, self._rope = compiled, config, decoder.rope
        # All that the addresses below point into; not the decoder, which holds this pass.
        self._kept = (embedding, lm_head, layers, decoder.norm)
        linears = [_four(x) for x in layers]
        first = linears[0]
        table = np.zeros((len(layers) + 1, compiled.LAYER), np.int64)
        for row, layer, four in zip(table, layers, linears, strict=False):
            row[:12] = [address for x in four for address in _addresses(x)]
            row[12], row[13] = layer.input_norm.data_ptr(), layer.post_norm.data_ptr()
            norms = (layer.q_norm, layer.k_norm)
            row[14:16] = [0 if weight is None else weight.data_ptr() for weight in norms]
            row[16] = layer.window or NO_WINDOW
        table[-1, 12] = decoder.norm.data_ptr()
        self._table = table
        self._sizes = [
            *(n for x in first for n in (x.padded, x.packed.weights.shape[1], x.panels)),
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
        ]  # fmt: skip
        weights, scale, _ = _addresses(embedding)
        self._ends = np.array([
            weights, embedding.packed.weights.shape[1], embedding.padded, scale,
            *_addresses(lm_head), lm_head.padded, lm_head.packed.weights.shape[1], lm_head.panels,
        ])  # fmt: skip
        packed = products()
        assert packed is not None
        inside, head = packed.compile_format(first[0].kind), packed.compile_format(lm_head.kind)
        read = packed.compile_format(embedding.kind).read_row
        self._formats = np.array([inside.fit, inside.multiply, read, head.fit, head.multiply])
        self._stride = max(packed.row_bytes(x.kind, x.padded) for x in (*first, lm_head))
        self._width = max(x.panels for x in first) * PANEL
        self._logits = lm_head.panels * PANEL
        self._seen = config.num_heads * config.head_dim
        self._eps = np.float32(config.rms_norm_eps)
        self._scale = np.float32(config.head_dim**-0.5)
        self._room = threading.local()
        self.spent = np.zeros(len(compiled.PHASES), np.int64)
        """Ticks of each of `compiled.PHASES` so far."""

    def __call__(
        self,
        tokens: Tensor,
        attention: CpuAttention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        outputs: Tensor,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [R] int32, outputs [O] int32 -> logits [O, V], hidden states after the final norm
        [R, H] and tapped ones [R, taps * H]; a tap of -1 is left to the caller."""
        rows, width = len(tokens), self._config.hidden_size
        hidden, tapped = torch.empty(rows, width), torch.empty(rows, len(taps) * width)
        logits = torch.empty(len(outputs), self._logits)
        places = np.full(len(self._table) - 1, -1, np.int64)
        for i, tap in enumerate(taps):
            if tap >= 0:
                places[tap] = i
        room, (x, fitted, wide, seen) = self._buffers(rows)
        caches = np.array([[x.data_ptr() for x in pair] for pair in kv])
        num_pages, bits = len(kv[0][0]), _BITS[kv[0][0].element_size()]
        sync = np.zeros(self._compiled.sync_bytes(len(places)), np.uint8)
        rope, config = self._rope, self._config
        parts = np.empty(
            (rows, config.num_heads, attention.num_parts, config.head_dim + 2), np.float32
        )
        done = np.zeros((len(places), len(attention.planned[2]), config.num_kv_heads), np.int64)
        arguments = (
            self._formats, self._ends, bits, tokens.numpy(), outputs.numpy(), logits.numpy(),
            x, hidden.numpy(), tapped.numpy(), places, self._table, caches,
            np.array([*self._sizes, layout.page_size, num_pages]), self._eps, self._scale,
            rope.cos.numpy(), rope.sin.numpy(), layout.positions.numpy(), layout.cells.numpy(),
            *attention.planned, fitted, self._stride, wide, seen, parts, done, sync.ctypes.data,
            self.spent,
        )  # fmt: skip
        together(self._compiled.run, arguments, num_threads(), sync, room, self, kv)
        for i, tap in enumerate(taps):
            if tap >= 0 and (j := int(places[tap])) != i:  # a layer that is tapped twice
                tapped[:, i * width : (i + 1) * width] = tapped[:, j * width : (j + 1) * width]
        return logits[:, : self._config.vocab_size], hidden, tapped

    def _buffers(self, rows: int) -> tuple[Tensor, tuple[np.ndarray, int, int, int]]:
        """This thread's memory for a pass, which must not move meanwhile, and in it the residual
        stream, fitted rows, a product's outputs and attention's."""
        width = self._config.hidden_size
        sizes = (4 * width, self._stride, 4 * self._width, 4 * self._seen)
        starts = np.cumsum([0, *(-(-rows * size // 64) * 64 for size in sizes)]).tolist()
        room: Tensor | None = getattr(self._room, "bytes", None)
        if room is None or len(room) < starts[-1] + 64:
            room = self._room.bytes = torch.empty(starts[-1] + 64, dtype=torch.uint8)
        first = -room.data_ptr() % 64
        x = room.numpy()[first : first + 4 * rows * width].view(np.float32).reshape(rows, width)
        fitted, wide, seen = (room.data_ptr() + first + start for start in starts[1:4])
        return room, (x, fitted, wide, seen)


def _four(layer: Layer) -> list[Any]:
    return [layer.qkv, layer.o, layer.gate_up, layer.down]


def _addresses(x: PackedLinear) -> tuple[int, int, int]:
    return x.packed.weights.data_ptr(), x.packed.scale.data_ptr(), x.bias.data_ptr()


def whole_pass(decoder: Decoder) -> WholePass | None:
    """The compiled form of a decoder, None where there is none."""
    embedding, lm_head = decoder.embedding, decoder.lm_head
    if products() is None or not decoder.layers or not isinstance(embedding, PackedEmbedding):
        return None
    shapes: set[Any] = set()
    for layer in decoder.layers:
        four = _four(layer)
        if not all(isinstance(x, PackedLinear) for x in four):
            return None
        shapes.add(tuple((x.kind, x.in_features, x.out_features) for x in four))
    one_kind = len(shapes) == 1 and len({kind for kind, _, _ in shapes.pop()}) == 1
    if not one_kind or not isinstance(lm_head, PackedLinear) or embedding.table.kind == "int4":
        return None
    return WholePass(decoder, embedding.table, lm_head)


def can_run(attention: Attention, kv: SequenceOf[tuple[Tensor, Tensor]]) -> TypeGuard[CpuAttention]:
    """Whether attention and caches are those that the compiled pass has in it."""
    return isinstance(attention, CpuAttention) and kv[0][0].is_cpu
