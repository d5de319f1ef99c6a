"""From a name to a model that runs: finds the files, reads every tensor, quantises as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from foretell.config import Weights, weight_format
from foretell.models.checkpoint import Checkpoint, Safetensors, Source, join, read_json
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder, Layer
from foretell.models.gguf import GGUF
from foretell.models.hub import resolve
from foretell.models.linear import Linear, make_embedding, make_linear
from foretell.models.rope import Rope
from foretell.models.tokenizer import Tokenizer
from foretell.progress import progress_bar


@dataclass(frozen=True)
class LoadedModel:
    """A model with what belongs to it."""

    model: Decoder
    config: ModelConfig
    path: Path
    weights: Weights

    @property
    def kv_dtype(self) -> torch.dtype:
        """Keys and values are kept in bfloat16, but for f32 weights."""
        return torch.float32 if self.weights == "f32" else torch.bfloat16

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read on first use.

        Raises:
            ValueError: the model comes without one.
        """
        return Tokenizer.load(self.path)


def load(
    spec: str,
    weights: str = "int8",
    *,
    max_model_len: int | None = None,
    accept: Callable[[ModelConfig], None] = lambda config: None,
    progress: bool = True,
) -> LoadedModel:
    """Loads a model.

    Args:
        spec: a short name (smollm2), a hub name (org/model), a directory or a .gguf file.
        weights: int8, bf16, f32 or int4: what the tensors are turned into.
        max_model_len: context limit; only models with `dynamic` RoPE scaling depend on it.
        accept: called before any weight is read; refuses by a ValueError.
        progress: show a bar on stderr where it takes over two seconds.

    Raises:
        ValueError: nothing there, an unsupported model, or a tensor that is missing, left over,
            there twice or of another shape.
    """
    path = resolve(spec)
    kind = weight_format(weights)
    source, config = open_source(path)
    for end in config.eos_token_ids:
        if not 0 <= end < config.vocab_size:
            raise ValueError(
                f"{path}: eos_token_id {end} is not in the vocabulary (0 to "
                f"{config.vocab_size - 1}); correct it in the model's config"
            )
    accept(config)
    with progress_bar("loading", config.num_layers + 1, shown=progress) as advance:
        model = build(source, config, kind, max_model_len, advance)
    return LoadedModel(model, config, path, kind)


def open_source(path: Path) -> tuple[Source, ModelConfig]:
    """A directory's or a .gguf file's tensors and config.

    Raises:
        ValueError: as `load`.
    """
    if path.suffix == ".gguf":
        source = GGUF(path)
        return source, replace(source.config, eos_token_ids=source.end_token_ids())
    settings = read_json(path / "config.json")
    try:
        config = ModelConfig.from_hf(settings)
    except KeyError as error:
        raise ValueError(f"{path / 'config.json'} lacks {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None
    generation = path / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
    if not all(type(end) is int for end in (*config.eos_token_ids, *ends)):
        raise ValueError(f"{path}: eos_token_id must be a token id or a list of them")
    ids = tuple(dict.fromkeys([*config.eos_token_ids, *ends]))
    return Safetensors(path), replace(config, eos_token_ids=ids)


def build(
    source: Source,
    config: ModelConfig,
    weights: Weights,
    max_model_len: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Decoder:
    """Makes the decoder from a source's tensors, one layer at a time.

    Raises:
        ValueError: a tensor is missing, left over or of another shape.
    """
    checkpoint = Checkpoint(source)
    _skip_mtp(checkpoint)
    hidden, vocab = config.hidden_size, config.vocab_size
    table = checkpoint.take("model.embed_tokens.weight", vocab, hidden)
    head = _head(checkpoint, config, table)
    embedding, lm_head = make_embedding(weights, table, head)
    del table, head
    advance(1)
    layers: list[Layer] = []
    for i in range(config.num_layers):
        layers.append(_layer(checkpoint, config, weights, i))
        advance(1)
    norm = checkpoint.take("model.norm.weight", hidden).float()
    factors = None
    if "rope_freqs.weight" in checkpoint:
        factors = checkpoint.take("rope_freqs.weight", config.head_dim // 2)
    checkpoint.finish()
    rope = Rope(config, factors, max_model_len)
    return Decoder(config, embedding, layers, norm, lm_head, rope)


def _head(checkpoint: Checkpoint, config: ModelConfig, table: Tensor) -> Tensor | None:
    """The output projection, None where it is the embedding. Some tied checkpoints hold it too."""
    shape = (config.vocab_size, config.hidden_size)
    if not config.tie_embeddings:
        return checkpoint.take("lm_head.weight", *shape)
    if "lm_head.weight" in checkpoint and not torch.equal(
        checkpoint.take("lm_head.weight", *shape), table
    ):
        raise ValueError(
            "lm_head.weight differs from the embedding, though the config ties the two; "
            "set tie_word_embeddings to false in config.json if that is meant"
        )
    return None


def _skip_mtp(checkpoint: Checkpoint) -> None:
    """Leaves multi-token prediction modules out: layers with an ``eh_proj``, and other names."""
    prefixes = ["mtp.", "model.mtp_layers."]
    prefixes += [name.removesuffix("eh_proj.weight") for name in checkpoint if "eh_proj" in name]
    for name in checkpoint:
        if name.startswith(tuple(prefixes)):
            checkpoint.skip(name)


def _layer(checkpoint: Checkpoint, config: ModelConfig, weights: Weights, i: int) -> Layer:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    prefix = f"model.layers.{i}."

    def vector(name: str, size: int) -> Tensor:
        return checkpoint.take(f"{prefix}{name}.weight", size).float()

    def linear(block: str, outputs: dict[str, int], inputs: int, biased: bool) -> Linear:
        names = {f"{prefix}{block}.{name}_proj": size for name, size in outputs.items()}
        weight = [checkpoint.take(f"{n}.weight", size, inputs) for n, size in names.items()]
        bias = [checkpoint.take(f"{n}.bias", size) for n, size in names.items() if biased]
        return make_linear(weights, join(weight), join(bias) if bias else None)

    attention, mlp = "self_attn", "mlp"
    return Layer(
        input_norm=vector("input_layernorm", hidden),
        qkv=linear(attention, {"q": q, "k": kv, "v": kv}, hidden, config.attention_bias),
        o=linear(attention, {"o": hidden}, q, config.o_bias),
        post_norm=vector("post_attention_layernorm", hidden),
        gate_up=linear(mlp, {"gate": inner, "up": inner}, hidden, config.mlp_bias),
        down=linear(mlp, {"down": hidden}, inner, config.mlp_bias),
        q_norm=vector("self_attn.q_norm", dim) if config.qk_norm else None,
        k_norm=vector("self_attn.k_norm", dim) if config.qk_norm else None,
        window=config.window(i),
    )
