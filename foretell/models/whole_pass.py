"""Calls the compiled pass: a table of where everything lies, made once, and buffers that stay."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.cpu import NO_WINDOW, CpuAttention
from foretell.attention.pool import num_threads, together
from foretell.models.linear import PackedEmbedding, PackedLinear, products
from foretell.models.quant import PANEL

if TYPE_CHECKING:
    from foretell.models.decoder import Decoder
    from foretell.models.head import Head

_BITS = {2: np.empty(0, np.uint16), 4: np.empty(0, np.uint32)}
_NONE = np.empty((0, 0), np.float32)


class WholePass:
    """A decoder's or a head's pass, embedding to logits, as one compiled call: see `compiled`.

    Args:
        network: whose layers' products are all in one format and of one shape in each layer.
        norm: [H] the final norm's weight, None where there is none.
        head: the same network where it is a head: what its pairs begin with.
    """

    def __init__(
        self,
        network: Decoder | Head,
        embedding: PackedLinear,
        lm_head: PackedLinear,
        norm: Tensor | None,
        head: Head | None = None,
    ) -> None:
        from foretell.models import compiled

        config, layers = network.config, network.layers
        self._compiled, self.config, self._rope = compiled, config, network.rope
        # All that the addresses below point into; not the network, which holds this pass.
        begin = () if head is None else (head.mix, head.norm_embed, head.norm_hidden, head.fuse)
        self._kept = (embedding, lm_head, layers, norm, begin)
        linears = [_four(x) for x in layers]
        first = linears[0]
        table = np.zeros((len(layers) + 1, compiled.LAYER), np.int64)
        for row, layer, four in zip(table, layers, linears, strict=False):
            row[:12] = [address for x in four for address in _addresses(x)]
            norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
            row[12:16] = [_address(weight) for weight in norms]
            row[16] = getattr(layer, "window", None) or NO_WINDOW
        table[-1, 12] = _address(norm)
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
        inside, outer = packed.compile_format(first[0].kind), packed.compile_format(lm_head.kind)
        read = packed.compile_format(embedding.kind).read_row
        self._formats = np.array([inside.fit, inside.multiply, read, outer.fit, outer.multiply])
        products_before = [] if head is None else _before(head)
        self._start = np.zeros(24, np.int64)  # see `head_begin`
        if head is not None:
            self._start[3] = first[0].padded
            norms = (_address(head.norm_embed), _address(head.norm_hidden))
            self._start[6:10] = (*norms, 1, head.residual_normed)
            if head.fuse is not None:
                norms = head.fuse.part_norms
                self._start[8] = 1 if norms is None else len(norms)
                self._start[22] = _address(head.fuse.norm if norms is None else norms)
        for at, x in products_before:
            panel = x.packed.weights.shape[1]
            self._start[at : at + 6] = (*_addresses(x), x.padded, panel, x.panels)
            if at == 10:
                self._start[23] = x.out_features
        mix = [x for _, x in products_before]
        self._stride = max(packed.row_bytes(x.kind, x.padded) for x in (*first, *mix, lm_head))
        self._width = max(x.panels for x in (*first, *mix)) * PANEL
        self._logits, self._outputs = lm_head.panels * PANEL, lm_head.out_features
        self._seen = config.num_heads * config.head_dim
        self._eps = np.float32(config.rms_norm_eps)
        self._scale = np.float32(config.head_dim**-0.5)
        self._last: tuple[Any, Any, Any] = (None, None, None)
        """Of the pass before: its first cache, what else decides, and what was decided."""
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
        features: Tensor | None = None,
        *,
        narrow: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [R] int32, outputs [O] int32 and `Head.run`'s features -> logits [O, V], hidden
        states after the final norm [R, H] and tapped ones [R, taps * H]; a tap of -1 is left to
        the caller.

        Args:
            narrow: behind the last layer's keys and values only ``outputs``, which are ascending,
                are wanted: hidden states and taps of that layer are theirs, [O, H].
        """
        rows, width = len(tokens), self.config.hidden_size
        narrow = narrow and len(outputs) < rows
        hidden = torch.empty(len(outputs) if narrow else rows, width)
        tapped = torch.empty(rows, len(taps) * width)
        logits = torch.empty(len(outputs), self._logits)
        places, caches, sizes = self._fixed(taps, kv, layout.page_size)
        room, x, fitted, wide, seen = self._buffers(rows)
        bits = _BITS[kv[0][0].element_size()]
        sync = np.zeros(self._compiled.sync_bytes(len(places)), np.uint8)
        rope, config = self._rope, self.config
        parts = np.empty(
            (rows, config.num_heads, attention.num_parts, config.head_dim + 2), np.float32
        )
        done = np.zeros((len(places), len(attention.planned[2]), config.num_kv_heads), np.int64)
        given = _NONE if features is None else features.numpy()
        arguments = (
            self._formats, self._ends, self._start, given, bits, tokens.numpy(), outputs.numpy(),
            logits.numpy(), x, hidden.numpy(), tapped.numpy(), places, self._table, caches,
            sizes, self._eps, self._scale,
            rope.cos.numpy(), rope.sin.numpy(), layout.positions.numpy(), layout.cells.numpy(),
            *attention.planned, narrow,
            *(attention.plan_of(outputs.numpy()) if narrow else attention.planned[:4]),
            fitted, self._stride, wide, seen, parts, done, sync.ctypes.data,
            self.spent,
        )  # fmt: skip
        together(self._compiled.run, arguments, num_threads(), sync, room, self, kv)
        for i, tap in enumerate(taps):
            if tap >= 0 and (j := int(places[tap])) != i:  # a layer that is tapped twice
                tapped[:, i * width : (i + 1) * width] = tapped[:, j * width : (j + 1) * width]
        if self._outputs < self._logits:
            logits = logits[:, : self._outputs]
        return logits, hidden, tapped

    def fixed(
        self,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        taps: tuple[int, ...],
        page_size: int,
        rows: int,
        end: int,
    ) -> tuple[tuple[Any, ...], int]:
        """For passes of at most so many rows, at positions below ``end``: the arguments of
        `compiled.run` that stay the same from one to the next, and how wide logits are."""
        self._rope.reserve(end)
        places, caches, sizes = self._fixed(taps, kv, page_size)
        _, x, fitted, wide, seen = self._buffers(rows)
        return (
            self._formats, self._ends, self._start, _BITS[kv[0][0].element_size()], places,
            self._table, caches, sizes, self._eps, self._scale, self._rope.cos.numpy(),
            self._rope.sin.numpy(), x, fitted, self._stride, wide, seen, self.spent,
        ), self._logits  # fmt: skip

    def _fixed(
        self, taps: tuple[int, ...], kv: SequenceOf[tuple[Tensor, Tensor]], page_size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is the same from pass to pass: where each layer's tap goes, the addresses of all
        caches, sizes."""
        first = self._last[0]
        if first is None or first() is not kv[0][0] or self._last[1] != (taps, page_size):
            places = np.full(len(self._table) - 1, -1, np.int64)
            for i, tap in enumerate(taps):
                if tap >= 0:
                    places[tap] = i
            caches = np.array([[x.data_ptr() for x in pair] for pair in kv])
            sizes = np.array([*self._sizes, page_size, len(kv[0][0])])
            self._last = ref(kv[0][0]), (taps, page_size), (places, caches, sizes)
        return self._last[2]

    def _buffers(self, rows: int) -> tuple[Tensor, np.ndarray, int, int, int]:
        """This thread's memory for a pass, which must not move meanwhile, and in it the residual
        stream, fitted rows, a product's outputs and attention's."""
        views: dict[int, Any] = self._room.__dict__.setdefault("views", {})
        if rows not in views:
            width = self.config.hidden_size
            sizes = (4 * width, self._stride, 4 * self._width, 4 * self._seen)
            starts = np.cumsum([0, *(-(-rows * size // 64) * 64 for size in sizes)]).tolist()
            room: Tensor | None = getattr(self._room, "bytes", None)
            if room is None or len(room) < starts[-1] + 64:
                room = self._room.bytes = torch.empty(starts[-1] + 64, dtype=torch.uint8)
                views.clear()
            first = -room.data_ptr() % 64
            x = room.numpy()[first : first + 4 * rows * width].view(np.float32).reshape(rows, width)
            views[rows] = room, x, *(room.data_ptr() + first + start for start in starts[1:4])
        return views[rows]


def _four(layer: Any) -> list[Any]:
    return [layer.qkv, layer.o, layer.gate_up, layer.down]


def _before(head: Head) -> list[tuple[int, Any]]:
    """A head's products before its first layer, and where `head_begin` has them."""
    fuse = (head.fuse.fc, head.fuse.up) if head.fuse else (None, None)
    return [(at, x) for at, x in zip((0, 10, 16), (head.mix, *fuse), strict=True) if x is not None]


def _address(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.data_ptr()


def _addresses(x: PackedLinear) -> tuple[int, int, int]:
    return x.packed.weights.data_ptr(), x.packed.scale.data_ptr(), x.bias.data_ptr()


def whole_pass(
    network: Decoder | Head, norm: Tensor | None, head: Head | None = None
) -> WholePass | None:
    """The compiled form of a network, None where there is none. Arguments as `WholePass` has."""
    embedding, lm_head = network.embedding, network.lm_head
    if products() is None or not network.layers or not isinstance(embedding, PackedEmbedding):
        return None
    if not embedding.table.bias.is_cpu:
        return None
    mix = [] if head is None else [x for _, x in _before(head)]
    shapes: set[Any] = set()
    for layer in network.layers:
        four = _four(layer)
        if not all(isinstance(x, PackedLinear) for x in (*four, *mix)):
            return None
        shapes.add(tuple((x.kind, x.in_features, x.out_features) for x in four))
    if len(shapes) != 1 or not isinstance(lm_head, PackedLinear):
        return None
    kinds = {kind for kind, _, _ in shapes.pop()} | {x.kind for x in mix}
    if len(kinds) != 1 or embedding.table.kind == "int4":
        return None
    return WholePass(network, embedding.table, lm_head, norm, head)


def can_run(attention: Attention, kv: SequenceOf[tuple[Tensor, Tensor]]) -> TypeGuard[CpuAttention]:
    """Whether attention and caches are those that the compiled pass has in it."""
    return isinstance(attention, CpuAttention) and kv[0][0].is_cpu
