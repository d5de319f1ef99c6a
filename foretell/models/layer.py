"""A decoder layer as Llama, Mistral and Qwen have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.rows import rope_and_write, silu_mul
from foretell.models.config import ModelConfig
from foretell.models.linear import Linear
from foretell.models.rope import Rope


class Over(NamedTuple):
    """What attention runs over in a pass; it is planned for the layout."""

    config: ModelConfig
    rope: Rope
    attention: Attention
    layout: Layout


@dataclass(slots=True)
class Layer:
    """Weights of one layer. ``inputs`` is H, or 2 H in a head that reads embedding and feature."""

    input_norm: Tensor | None  # [H]
    qkv: Linear  # inputs -> (heads + 2 * kv_heads) * D
    o: Linear  # heads * D -> H
    post_norm: Tensor  # [H]
    gate_up: Linear  # H -> 2 * I
    down: Linear  # I -> H
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    window: int | None = None

    def attend(self, hidden: Tensor, over: Over, caches: tuple[Tensor, Tensor]) -> Tensor:
        """Writes keys and values of hidden [R, inputs]; gives what is added to the residual."""
        config, rope, attention, layout = over
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows, (k_cache, v_cache) = len(hidden), caches
        qkv = self.qkv(hidden)  # [R, (heads + 2 * kv_heads) * D]
        rope_and_write(
            qkv, rope.cos, rope.sin, layout.positions, heads=heads, kv_heads=kv_heads,
            q_norm=self.q_norm, k_norm=self.k_norm, eps=config.rms_norm_eps,
            k_cache=k_cache, v_cache=v_cache, cells=layout.cells,
        )  # fmt: skip
        q = qkv.view(rows, -1, dim)[:, :heads]
        seen = attention.run(q, k_cache, v_cache, scale=dim**-0.5, window=self.window)
        return self.o(seen.view(rows, -1))

    def feed(self, hidden: Tensor) -> Tensor:
        """What the block behind attention adds to the residual, [R, H]."""
        return self.down(silu_mul(self.gate_up(hidden)))
