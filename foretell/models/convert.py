"""A checkpoint's tensors put into a weight format, one layer at a time, and a decoder of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from foretell.config import Weights
from foretell.models.checkpoint import Checkpoint, Source, join
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.deepseek import assemble_layer, convert_layer
from foretell.models.layer import Layer
from foretell.models.linear import (
    PackedEmbedding,
    PackedLinear,
    packed_tensors,
    stored_linear,
)
from foretell.models.mla import LatentLayer
from foretell.models.rope import Rope
from foretell.models.sharding import GatheredLinear, PartEmbedding, Ranks, Shard

_OUTPUTS = {
    "qkv": ("self_attn", ("q", "k", "v")),
    "o": ("self_attn", ("o",)),
    "gate_up": ("mlp", ("gate", "up")),
    "down": ("mlp", ("down",)),
}
"""Products of a layer: their block in a checkpoint and the matrices that are one here."""


def convert(
    source: Source,
    config: ModelConfig,
    weights: Weights,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors for `assemble`. Only what is being converted is in memory.

    Raises:
        ValueError: a tensor is missing, left over, of another shape or not finite.
    """
    checkpoint = Checkpoint(source)
    _skip_mtp(checkpoint)
    hidden = config.hidden_size
    for name, tensor in _ends(checkpoint, config):
        yield from packed_tensors(name, _outer(weights), tensor)
        del tensor  # as large as all else
    advance(1)
    for i in range(config.num_layers):
        if config.mla is None:
            yield from _layer(checkpoint, config, weights, i)
        else:
            experts = config.moe is not None and config.moe.has_experts(i)
            at, prefix = f"layers.{i}", f"model.layers.{i}."
            yield from convert_layer(checkpoint, config, weights, prefix, at, experts=experts)
        advance(1)
    yield "norm", checkpoint.take("model.norm.weight", hidden).float()
    if "rope_freqs.weight" in checkpoint:
        yield "rope_factors", checkpoint.take("rope_freqs.weight", config.head_dim // 2).float()
    checkpoint.finish()


def _skip_mtp(checkpoint: Checkpoint) -> None:
    """Leaves multi-token prediction modules out: layers with an ``eh_proj``, and other names."""
    prefixes = ["mtp.", "model.mtp_layers."]
    prefixes += [name.removesuffix("eh_proj.weight") for name in checkpoint if "eh_proj" in name]
    for name in checkpoint:
        if name.startswith(tuple(prefixes)):
            checkpoint.skip(name)


def assemble(
    config: ModelConfig,
    weights: Weights,
    tensors: Mapping[str, Tensor],
    max_model_len: int | None = None,
    parallel: tuple[Shard, Ranks] | None = None,
) -> Decoder:
    """The decoder of what `convert` made; it keeps the tensors without a copy.

    Args:
        parallel: whose part the tensors are and whom to share its products with; ``config`` then
            has the part's sizes.
    """

    def linear(name: str, kind: Weights, outputs: int, inputs: int) -> PackedLinear:
        return stored_linear(tensors, name, kind, (outputs, inputs))

    def layer(i: int) -> Layer | LatentLayer:
        at = f"layers.{i}"
        if config.mla is not None:
            return assemble_layer(config, weights, tensors, at)
        return Layer(
            input_norm=tensors[f"{at}.input_layernorm"],
            **{
                name: linear(f"{at}.{name}", weights, sum(outputs), inputs)
                for name, (outputs, inputs) in _shapes(config).items()
            },
            post_norm=tensors[f"{at}.post_attention_layernorm"],
            q_norm=tensors.get(f"{at}.self_attn.q_norm"),
            k_norm=tensors.get(f"{at}.self_attn.k_norm"),
            window=config.window(i),
        )

    embedding, lm_head = ends(config, weights, tensors)
    layers = [layer(i) for i in range(config.num_layers)]
    norm = tensors["norm"]
    rope = Rope(config, tensors.get("rope_factors"), max_model_len, norm.device)
    if parallel is None:
        return Decoder(config, embedding, layers, norm, lm_head, rope)
    shard, ranks = parallel
    table, projection = PartEmbedding(embedding, shard), GatheredLinear(lm_head, shard.vocab, ranks)
    return Decoder(config, table, layers, norm, projection, rope, ranks)


def convert_ends(
    source: Source, config: ModelConfig, weights: Weights
) -> Iterator[tuple[str, Tensor]]:
    """What `convert` yields for `ends`, and nothing else."""
    for name, tensor in _ends(Checkpoint(source), config):
        yield from packed_tensors(name, _outer(weights), tensor)


def ends(
    config: ModelConfig, weights: Weights, tensors: Mapping[str, Tensor]
) -> tuple[PackedEmbedding, PackedLinear]:
    """Embedding and output projection, which may be one matrix."""
    kind, shape = _outer(weights), (config.vocab_size, config.hidden_size)
    table = stored_linear(tensors, "embedding", kind, shape)
    tied = config.tie_embeddings
    return PackedEmbedding(table), table if tied else stored_linear(tensors, "lm_head", kind, shape)


def _outer(weights: Weights) -> Weights:
    """The format of embedding and output projection: they decide the most, and stay int8."""
    return "int8" if weights == "int4" else weights


def _ends(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Embedding, and output projection where it is another tensor. Some tied checkpoints hold it
    too."""
    shape = (config.vocab_size, config.hidden_size)
    table = checkpoint.take("model.embed_tokens.weight", *shape)
    same = config.tie_embeddings
    if same and "lm_head.weight" in checkpoint:
        same = torch.equal(checkpoint.take("lm_head.weight", *shape), table)
        if not same:
            raise ValueError(
                "lm_head.weight differs from the embedding, though the config ties the two; "
                "set tie_word_embeddings to false in config.json if that is meant"
            )
    yield "embedding", table
    del table
    if not same:
        yield "lm_head", checkpoint.take("lm_head.weight", *shape)


def _shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], int]]:
    """Outputs, matrix by matrix, and inputs of a layer's products."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    return {
        "qkv": ((q, kv, kv), hidden),
        "o": ((hidden,), q),
        "gate_up": ((inner, inner), hidden),
        "down": ((hidden,), inner),
    }


def _layer(
    checkpoint: Checkpoint, config: ModelConfig, weights: Weights, i: int
) -> Iterator[tuple[str, Tensor]]:
    prefix = f"model.layers.{i}."
    biased = {"qkv": config.attention_bias, "o": config.o_bias}
    for product, (outputs, inputs) in _shapes(config).items():
        block, parts = _OUTPUTS[product]
        sizes = {
            f"{prefix}{block}.{part}_proj": size for part, size in zip(parts, outputs, strict=True)
        }
        weight = [checkpoint.take(f"{n}.weight", size, inputs) for n, size in sizes.items()]
        yield from packed_tensors(f"layers.{i}.{product}", weights, join(weight))
        if biased.get(product, config.mlp_bias):
            bias = [checkpoint.take(f"{n}.bias", size) for n, size in sizes.items()]
            yield f"layers.{i}.{product}.bias", join(bias).float()
    norms = {"input_layernorm": config.hidden_size, "post_attention_layernorm": config.hidden_size}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for name, size in norms.items():
        yield f"layers.{i}.{name}", checkpoint.take(f"{prefix}{name}.weight", size).float()
