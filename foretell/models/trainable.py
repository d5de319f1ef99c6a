"""Draft heads that learn: the networks of `models.head`, differentiable and dense.

A head is unrolled over whole texts as it will draft (training-time test, EAGLE-3, 2503.01840): in
step 0 each position reads the target's feature and the next token; in step j its own output of
step j - 1 and the token j places on, and sees the pairs of step 0 up to its position and its own of
steps 1 to j. Only positions that count are run from step 1 on. Parameters are float32 and called
as in `models.head`; `trainable_files` knows the names that files have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foretell.models.config import ModelConfig
from foretell.models.frozen import FrozenTarget
from foretell.models.rope import Rope
from foretell.models.teacher import Rows, Teacher
from foretell.spec.losses import Judged
from foretell.spec.training import TrainingBatch

_QUERIES = 256
"""Queries whose scores are in memory at once; they are computed again for the gradient."""


class Seen:
    """Keys and values of one layer: of every place in step 0, then of each own later step."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.places: Tensor | None = None  # [M] the queries' from step 1 on
        self.keys: list[Tensor] = []  # [R, Hkv, D], then [M, Hkv, D] each
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [M, heads, D], k and v [M, Hkv, D] of this step -> [M, heads * D]."""
        self.keys.append(k)
        self.values.append(v)
        places = self.places
        if places is None:
            places = torch.arange(len(q), device=q.device)
        out: list[Tensor] = []
        for start in range(0, len(q), _QUERIES):
            part = slice(start, start + _QUERIES)
            at = places[part]
            low, high = int(self.rows.first[at[0]]), int(at[-1]) + 1
            documents = self.rows.documents
            seen = documents[at, None] == documents[None, low:high]
            seen &= torch.arange(low, high, device=q.device) <= at[:, None]
            arguments = (
                q[part], self.keys[0][low:high], self.values[0][low:high], seen,
                [k[part] for k in self.keys[1:]], [v[part] for v in self.values[1:]],
            )  # fmt: skip
            if torch.is_grad_enabled() and len(q) > _QUERIES:
                out.append(
                    checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False)
                )
            else:
                out.append(_attend(*arguments))
        return torch.cat(out).flatten(1) if out else q.flatten(1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, own_k: list[Tensor], own_v: list[Tensor]
) -> Tensor:
    """Attention of q [C, heads, D] over keys k [L, Hkv, D] that ``seen`` [C, L] allows, and over
    one key of each own step, [C, Hkv, D] each: [C, heads, D]."""
    count, heads, dim = q.shape
    groups = k.shape[1]
    q = (q * dim**-0.5).view(count, groups, -1, dim)  # [C, Hkv, G, D]
    scores = torch.einsum("cgqd,lgd->cgql", q, k).float()  # [C, Hkv, G, L]
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    own = [torch.einsum("cgqd,cgd->cgq", q, key)[..., None].float() for key in own_k]
    law = torch.cat([scores, *own], dim=-1).softmax(-1).to(v.dtype)
    length = len(k)
    out = torch.einsum("cgql,lgd->cgqd", law[..., :length], v)
    for i, value in enumerate(own_v):
        out = out + law[..., length + i, None] * value[:, :, None]
    return out.reshape(count, heads, dim)


class Block(nn.Module):
    """A decoder layer. ``inputs`` is H, or 2 H where it reads embedding and feature."""

    def __init__(
        self, config: ModelConfig, inputs: int, *, norm: bool, bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, dim
        self.input_norm = rms_norm(config) if norm else None
        self.q, self.k, self.v = (nn.Linear(inputs, size, bias=bias) for size in (q, kv, kv))
        self.o = nn.Linear(q, hidden, bias=False)
        self.post_norm = rms_norm(config)
        self.gate, self.up = (
            nn.Linear(hidden, config.intermediate_size, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.q_norm = rms_norm(config, dim) if qk_norm else None
        self.k_norm = rms_norm(config, dim) if qk_norm else None

    def forward(
        self,
        hidden: Tensor,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        seen: Seen,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Input of the attention [M, inputs] and the residual x [M, H] -> the new residual, only
        of the rows ``queries`` [Q] where the others are of no use but for their keys."""
        k = self.k(hidden).view(len(x), self.kv_heads, self.dim)
        v = self.v(hidden).view(len(x), self.kv_heads, self.dim)
        if self.k_norm is not None:
            k = self.k_norm(k)
        k = turn(k, cos, sin)
        if queries is not None:
            hidden, x, cos, sin = hidden[queries], x[queries], cos[queries], sin[queries]
        q = self.q(hidden).view(len(x), self.heads, self.dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        x = x + self.o(seen(turn(q, cos, sin), k, v))
        hidden = self.post_norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE by halves: x [M, heads, D], cos and sin [M, D / 2]."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Norm(nn.RMSNorm):
    """In float32, whatever a product under autocast hands over."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def rms_norm(config: ModelConfig, size: int | None = None) -> Norm:
    return Norm(size or config.hidden_size, eps=config.rms_norm_eps)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a head is made of, as its config.json says it where it does; see `models.head`."""

    taps: tuple[int, ...] = (-1,)
    """The target's layers it reads; -1 is the final norm's output."""
    mix: bool = True
    """fc over cat(embedding, feature); else the first attention reads both (EAGLE-3)."""
    bias: bool = False
    """Of that fc."""
    norm_embed: bool = True
    norm_hidden: bool = True
    norm_attn: bool = True
    norm_out: bool = True
    attention_bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = True
    fuse_rank: int = 0
    """Of what the taps add to the last of them (EAGLE); 0: fc makes one feature of them."""
    own_lm_head: bool = False
    """It has an output projection of its own, which learns."""


class TrainableHead(nn.Module):
    """`models.head.Head` with gradients, for EAGLE, EAGLE-3 and MTP.

    Args:
        method: the scheme that serves it.
        config: sizes and RoPE of its own layers; vocab_size is the target's.
        draft_ids: [Vd] the target's tokens it speaks about, ascending; None: all.
    """

    embedding: Tensor  # [V, H]

    def __init__(
        self,
        method: str,
        target: FrozenTarget,
        config: ModelConfig,
        parts: Parts,
        draft_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.method, self.sizes, self.parts, self.taps = method, config, parts, parts.taps
        self.target, self.draft_ids = target.config.sizes, draft_ids
        hidden, width, mix = config.hidden_size, target.config.hidden_size, parts.mix
        all_taps = len(parts.taps) * width

        def norm(wanted: bool, size: int = hidden) -> Norm | None:
            return rms_norm(config, size) if wanted else None

        rank, fused = parts.fuse_rank, parts.taps != (-1,)
        self.fuse = nn.Linear(all_taps, rank or hidden, bias=False) if fused else None
        self.fuse_up = nn.Linear(rank, hidden, bias=False) if rank else None
        self.part_norms = nn.ModuleList(
            rms_norm(config, width) for _ in parts.taps if parts.fc_norm
        )
        self.fused_norm = norm(parts.norm_before_fc, all_taps)
        self.mix = nn.Linear(2 * hidden, hidden, bias=parts.bias) if mix else None
        self.norm_embed, self.norm_hidden = norm(parts.norm_embed), norm(parts.norm_hidden)
        self.layers = nn.ModuleList(
            Block(
                config,
                hidden if mix or i else 2 * hidden,
                norm=(parts.norm_attn and mix) or i > 0,
                bias=parts.attention_bias,
                qk_norm=parts.qk_norm,
            )
            for i in range(config.num_layers)
        )
        self.norm_out = norm(parts.norm_out)
        self.rope = Rope(config)
        known = target.config.vocab_size if draft_ids is None else len(draft_ids)
        self.lm_head = nn.Linear(hidden, known, bias=False) if parts.own_lm_head else None
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.teacher = Teacher(target, draft_ids)

    @property
    def config(self) -> dict[str, Any]:
        from foretell.models.trainable_files import head_config

        return head_config(self)

    def tensors(self) -> dict[str, Tensor]:
        """Float32, by the names that its directory has."""
        from foretell.models.trainable_files import head_tensors

        return head_tensors(self)

    def unroll(self, batch: TrainingBatch, steps: int) -> Iterator[Judged]:
        """Drafts ``steps`` tokens at every position that counts, each time on the text's own
        tokens. Positions [M] whose first guess is a wanted token; later guesses that leave the text
        are not valid."""
        rows = Rows(batch)
        tapped = batch.features.flatten(0, 1).float()  # [R, taps * H]
        own = self._own(tapped)
        places = torch.arange(len(own), device=own.device)
        judged = rows.judged()
        seen = [Seen(rows) for _ in self.layers]
        seen[-1].places = judged
        lesson = self.teacher.lesson(batch, rows, steps)
        for j in range(steps):
            following, _ = rows.ahead(places, 1 + j)
            positions = rows.positions[places] + j
            queries = judged if j == 0 else None  # elsewhere only keys and values are needed
            out, own = self._step(rows.tokens[following], own, positions, seen, queries)
            places = judged
            for layer in seen:
                layer.places = judged
            alike = self.taps == (-1,)  # then its features are guesses of the target's
            before, _ = rows.ahead(judged, 1 + j)
            yield Judged(
                logits=self._logits(out),
                **lesson(j),
                feature=own if alike else None,
                wanted_feature=tapped[before] if alike else None,
            )

    def _own(self, tapped: Tensor) -> Tensor:
        """The target's tapped layers [R, taps * H] as one feature [R, H]."""
        if self.fuse is None:
            return tapped
        if len(self.part_norms):
            parts = tapped.chunk(len(self.taps), dim=1)
            tapped = torch.cat([n(p) for n, p in zip(self.part_norms, parts, strict=True)], dim=1)
        if self.fused_norm is not None:
            tapped = self.fused_norm(tapped)
        if self.fuse_up is None:
            return self.fuse(tapped)
        return self.fuse_up(self.fuse(tapped)) + tapped[:, -self.fuse_up.out_features :]

    def _step(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        seen: list[Seen],
        queries: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Runs pairs [M]: what lm_head reads and the features of the pairs behind, [M, H] each;
        of the pairs ``queries`` only, where they are given."""
        self.rope.cover(positions)
        cos = self.rope.cos.to(tokens.device)[positions]  # [M, D / 2]
        sin = self.rope.sin.to(tokens.device)[positions]
        embedded = F.embedding(tokens, self.embedding).float()
        if self.norm_embed is not None:
            embedded = self.norm_embed(embedded)
        normed = features if self.norm_hidden is None else self.norm_hidden(features)
        hidden = torch.cat([embedded, normed], dim=1)  # [M, 2 H]
        if self.mix is None:
            x = normed if self.parts.norm_before_residual else features
        else:
            hidden = x = self.mix(hidden)
        for layer, cache in zip(self.layers, seen, strict=True):
            assert isinstance(layer, Block)
            start = hidden if layer is self.layers[0] else x
            if layer.input_norm is not None:
                start = layer.input_norm(start)
            x = layer(start, x, cos, sin, cache, queries if layer is self.layers[-1] else None)
        out = x if self.norm_out is None else self.norm_out(x)
        return out, out if self.parts.norm_output else x

    def _logits(self, out: Tensor) -> Tensor:
        """[M, H] -> [M, Vd]."""
        return self.teacher.say(out) if self.lm_head is None else self.lm_head(out)
