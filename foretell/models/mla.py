"""Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1), over its compressed cache.

A token's keys and values are one vector c, and a rotated key that all heads share. The key of a
head is W_k c: rather than expand every cached token, the query takes W_k to itself, q W_k, and
attention runs over c as the only key head; what it sums up of c, W_v then makes the head's value.
So keys and values are the same numbers, and lie in the cache once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.attention.rows import rms_norm, rope_and_write
from foretell.models.layer import Over
from foretell.models.linear import Linear
from foretell.models.moe import Experts, Mlp

_EPS = 1e-6
"""Of the norms behind the compression, whatever the config says of the others."""


@dataclass(slots=True, kw_only=True)
class LatentLayer:
    """Weights of one layer. Where a head's numbers lie beside each other, rotated ones go first."""

    input_norm: Tensor  # [H]
    compress: Linear  # H -> (q_rank, or heads * (rope + nope)) + rope + kv_rank
    q_norm: Tensor | None  # [q_rank]
    expand_q: Linear | None  # q_rank -> heads * (rope + nope)
    k_norm: Tensor  # [kv_rank], of what keys and values are made of
    to_latent: list[Linear]  # of each head: nope -> kv_rank
    from_latent: list[Linear]  # of each head: kv_rank -> v
    o: Linear  # heads * v -> H
    post_norm: Tensor  # [H]
    block: Mlp | Experts
    scale: float
    """Multiplies the scores."""

    def attend(self, hidden: Tensor, over: Over, caches: tuple[Tensor, Tensor]) -> Tensor:
        """As `Layer.attend`; ``caches`` are twice the same tensor."""
        config, rope, attention, layout = over
        assert config.mla is not None
        rows, heads, turned = len(hidden), config.num_heads, config.mla.rope_dim
        rank, width = config.mla.kv_rank, config.head_dim
        out = self.compress(hidden)
        q, key, latent = out.split([out.shape[1] - width, turned, rank], dim=1)
        if self.expand_q is not None:
            assert self.q_norm is not None
            q = self.expand_q(rms_norm(q, self.q_norm, _EPS))
        q = q.reshape(rows, heads, -1)  # [R, heads, rope + nope]
        x = hidden.new_empty(rows, heads + 1, width)  # queries, and the one key behind them
        x[:, :heads, :turned] = q[:, :, :turned]
        x[:, heads, :turned] = key
        x[:, heads, turned:] = rms_norm(latent, self.k_norm, _EPS)
        for head, product in enumerate(self.to_latent):
            x[:, head, turned:] = product(q[:, head, turned:])
        rope_and_write(
            x.view(rows, -1), rope.cos, rope.sin, layout.positions, heads=heads + 1, kv_heads=0
        )
        key = x[:, heads:]  # [R, 1, rope + kv_rank]
        attention.write(key, key, *caches)
        seen = attention.run(x[:, :heads], *caches, scale=self.scale)[:, :, turned:]
        values = [product(seen[:, head]) for head, product in enumerate(self.from_latent)]
        return self.o(torch.cat(values, dim=1))

    def feed(self, hidden: Tensor) -> Tensor:
        """As `Layer.feed`."""
        return self.block(hidden)
