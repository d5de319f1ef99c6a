"""The forward pass of Llama, Mistral, Qwen2 and Qwen3: one decoder, differing in its config.

Holds no state of any request: keys and values live in the caches that are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.rows import add_rms_norm, rms_norm, rope_and_write, silu_mul
from foretell.models.config import ModelConfig
from foretell.models.linear import Embedding, Linear
from foretell.models.rope import Rope
from foretell.models.whole_pass import can_run, whole_pass


@dataclass(slots=True)
class Layer:
    """Weights of one layer."""

    input_norm: Tensor  # [H]
    qkv: Linear  # H -> (heads + 2 * kv_heads) * D
    o: Linear  # heads * D -> H
    post_norm: Tensor  # [H]
    gate_up: Linear  # H -> 2 * I
    down: Linear  # I -> H
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    window: int | None = None


class Decoder:
    """A model without state.

    Args:
        config: sizes and variants.
        layers: one `Layer` each.
        norm: [H] float32, the final norm's weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: list[Layer],
        norm: Tensor,
        lm_head: Linear,
        rope: Rope,
    ) -> None:
        assert len(layers) == config.num_layers
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.rope = rope
        self.whole_pass = whole_pass(self, norm)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,  # [R] int64 or int32
        attention: Attention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Runs rows and writes their keys and values; `attention` is planned for ``layout``.

        Args:
            tokens: [R].
            kv: for each layer the caches [num_pages, Hkv, page_size, D] of keys and values.
            taps: layers whose output is wanted; -1 is the final norm's output.

        Returns:
            Hidden states [R, H] float32 after the final norm, and the tapped ones side by side
            [R, len(taps) * H] float32 or None.
        """
        config, layers = self.config, self.layers
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        eps, scale, rows = config.rms_norm_eps, config.head_dim**-0.5, len(tokens)
        self.rope.cover(layout.positions)
        cos, sin = self.rope.cos, self.rope.sin
        x = self.embedding(tokens)  # [R, H]
        hidden = rms_norm(x, layers[0].input_norm, eps)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(layers):
            qkv = layer.qkv(hidden)  # [R, (heads + 2 * kv_heads) * D]
            k_cache, v_cache = kv[i]
            rope_and_write(
                qkv, cos, sin, layout.positions, heads=heads, kv_heads=kv_heads,
                q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps,
                k_cache=k_cache, v_cache=v_cache, cells=layout.cells,
            )  # fmt: skip
            q = qkv.view(rows, -1, dim)[:, :heads]
            seen = attention.run(q, k_cache, v_cache, scale=scale, window=layer.window)
            # Each norm also adds to x, in place, what the block before it put out.
            hidden = add_rms_norm(layer.o(seen.view(rows, -1)), x, layer.post_norm, eps)
            out = layer.down(silu_mul(layer.gate_up(hidden)))
            following = layers[i + 1].input_norm if i + 1 < len(layers) else self.norm
            hidden = add_rms_norm(out, x, following, eps)
            if i in taps:
                tapped[i] = x.clone()
        if not taps:
            return hidden, None
        tapped[-1] = hidden
        return hidden, torch.cat([tapped[tap] for tap in taps], dim=1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [O, V] float32 of hidden states [O, H]."""
        return self.lm_head(hidden)

    @torch.inference_mode()
    def run(
        self,
        tokens: Tensor,
        attention: Attention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        outputs: Tensor,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` and then the logits of rows ``outputs`` [O] int32, in one compiled call where
        that can be had.

        Returns:
            Logits [O, V] float32, and the tapped hidden states as `forward` gives them.
        """
        if self.whole_pass is None or not len(tokens) or not can_run(attention, kv):
            hidden, features = self.forward(tokens, attention, layout, kv, taps)
            return self.logits(hidden[outputs]), features
        self.rope.cover(layout.positions)
        logits, hidden, features = self.whole_pass(tokens, attention, layout, kv, outputs, taps)
        width = hidden.shape[1]
        for i, tap in enumerate(taps):
            if tap == -1:
                features[:, i * width : (i + 1) * width] = hidden
        return logits, features if taps else None
