"""DeepSeek's layers out of a checkpoint, put into a weight format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from foretell.config import Weights
from foretell.models.checkpoint import Checkpoint, join
from foretell.models.config import ModelConfig
from foretell.models.linear import PackedLinear, packed_tensors, stored_linear
from foretell.models.mla import LatentLayer
from foretell.models.moe import Experts, Mlp
from foretell.models.rope import latent_scale


def convert_layer(
    checkpoint: Checkpoint,
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    at: str,
    *,
    experts: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors for `assemble_layer`.

    Args:
        prefix: of the layer's tensors in the checkpoint.
        at: of their names here.
        experts: the layer has experts, not one MLP.

    Raises:
        ValueError: a tensor is missing, of another shape or not finite.
    """
    hidden = config.hidden_size
    yield from _attention(checkpoint, config, weights, f"{prefix}self_attn.", at)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{name}", checkpoint.take(f"{prefix}{name}.weight", hidden).float()

    def mlp(block: str, name: str, inner: int) -> Iterator[tuple[str, Tensor]]:
        both = [
            checkpoint.take(f"{prefix}{block}.{part}_proj.weight", inner, hidden)
            for part in ("gate", "up")
        ]
        yield from packed_tensors(f"{at}.{name}.gate_up", weights, join(both))
        down = checkpoint.take(f"{prefix}{block}.down_proj.weight", hidden, inner)
        yield from packed_tensors(f"{at}.{name}.down", weights, down)

    if not experts:
        yield from mlp("mlp", "mlp", config.intermediate_size)
        return
    moe = config.moe
    assert moe is not None
    gate = checkpoint.take(f"{prefix}mlp.gate.weight", moe.num_experts, hidden)
    yield from packed_tensors(f"{at}.gate", "f32", gate)  # a wrong choice costs more than bytes
    if moe.sigmoid:
        bias = checkpoint.take(f"{prefix}mlp.gate.e_score_correction_bias", moe.num_experts)
        yield f"{at}.gate_bias", bias.float()
    for i in moe.held:
        yield from mlp(f"mlp.experts.{i}", f"experts.{i}", moe.intermediate_size)
    if moe.num_shared:
        yield from mlp("mlp.shared_experts", "shared", moe.num_shared * moe.intermediate_size)


def _attention(
    checkpoint: Checkpoint, config: ModelConfig, weights: Weights, prefix: str, at: str
) -> Iterator[tuple[str, Tensor]]:
    assert config.mla is not None
    mla, heads, hidden = config.mla, config.num_heads, config.hidden_size
    rank, nope, turned = mla.kv_rank, mla.nope_dim, mla.rope_dim
    order = torch.arange(turned)
    if mla.interleaved:  # here the halves of a head are pairs; scores do not mind
        order = order.view(-1, 2).T.flatten()
    each = torch.cat([nope + order, torch.arange(nope)])  # a query head's rows, rotated ones first
    rows = (torch.arange(heads)[:, None] * (nope + turned) + each).flatten()

    def query(name: str, inputs: int) -> Tensor:
        return checkpoint.take(f"{prefix}{name}.weight", len(rows), inputs)[rows]

    if mla.q_rank is None:
        q = query("q_proj", hidden)
    else:
        q = checkpoint.take(f"{prefix}q_a_proj.weight", mla.q_rank, hidden)
        yield from packed_tensors(f"{at}.expand_q", weights, query("q_b_proj", mla.q_rank))
        norm = checkpoint.take(f"{prefix}q_a_layernorm.weight", mla.q_rank)
        yield f"{at}.q_norm", norm.float()
    kv = checkpoint.take(f"{prefix}kv_a_proj_with_mqa.weight", rank + turned, hidden)
    kv = kv[torch.cat([rank + order, torch.arange(rank)])]
    yield from packed_tensors(f"{at}.compress", weights, join([q, kv]))
    yield f"{at}.k_norm", checkpoint.take(f"{prefix}kv_a_layernorm.weight", rank).float()
    both = checkpoint.take(f"{prefix}kv_b_proj.weight", heads * (nope + mla.v_dim), rank)
    for head, weight in enumerate(both.view(heads, -1, rank)):
        yield from packed_tensors(f"{at}.to_latent.{head}", weights, weight[:nope].T)
        yield from packed_tensors(f"{at}.from_latent.{head}", weights, weight[nope:])
    out = checkpoint.take(f"{prefix}o_proj.weight", hidden, heads * mla.v_dim)
    yield from packed_tensors(f"{at}.o", weights, out)


def assemble_layer(
    config: ModelConfig, weights: Weights, tensors: Mapping[str, Tensor], at: str
) -> LatentLayer:
    """The layer of what `convert_layer` made; it keeps the tensors without a copy."""
    assert config.mla is not None
    mla, heads, hidden = config.mla, config.num_heads, config.hidden_size
    query = heads * (mla.nope_dim + mla.rope_dim)

    def linear(name: str, outputs: int, inputs: int, kind: Weights = weights) -> PackedLinear:
        return stored_linear(tensors, f"{at}.{name}", kind, (outputs, inputs))

    def mlp(name: str, inner: int) -> Mlp:
        return Mlp(
            linear(f"{name}.gate_up", 2 * inner, hidden), linear(f"{name}.down", hidden, inner)
        )

    def experts() -> Experts:
        moe = config.moe
        assert moe is not None
        shared = moe.num_shared * moe.intermediate_size
        return Experts(
            moe,
            linear("gate", moe.num_experts, hidden, "f32"),
            tensors.get(f"{at}.gate_bias"),
            [mlp(f"experts.{i}", moe.intermediate_size) for i in moe.held],
            mlp("shared", shared) if shared else None,
        )

    has_experts = f"{at}.gate.weights" in tensors
    return LatentLayer(
        input_norm=tensors[f"{at}.input_layernorm"],
        compress=linear("compress", (mla.q_rank or query) + config.head_dim, hidden),
        q_norm=tensors.get(f"{at}.q_norm"),
        expand_q=linear("expand_q", query, mla.q_rank) if mla.q_rank else None,
        k_norm=tensors[f"{at}.k_norm"],
        to_latent=[linear(f"to_latent.{h}", mla.kv_rank, mla.nope_dim) for h in range(heads)],
        from_latent=[linear(f"from_latent.{h}", mla.v_dim, mla.kv_rank) for h in range(heads)],
        o=linear("o", hidden, heads * mla.v_dim),
        post_norm=tensors[f"{at}.post_attention_layernorm"],
        block=experts() if has_experts else mlp("mlp", config.intermediate_size),
        scale=latent_scale(config),
    )
