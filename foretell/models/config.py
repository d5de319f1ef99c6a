"""What a checkpoint says about its network, in one form for every source.

Hugging Face's config.json is read in the old layout (rope_theta, rope_scaling) and the new one
(rope_parameters); a GGUF file's metadata gives the same record.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foretell.models.checkpoint import FP8_BLOCK
from foretell.models.deepseek_config import MLA, MoE
from foretell.spec.drafter import KVGroup

SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")
_BY_MODEL_TYPE = dict(zip(_MODEL_TYPES, SUPPORTED, strict=True))
_GGUF = {"llama": SUPPORTED[0], "qwen2": SUPPORTED[2], "qwen3": SUPPORTED[3]}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are numbers of elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    """rope_type and its parameters, named as in Hugging Face's configs."""
    windows: tuple[int | None, ...] | None = None
    """Sliding window of each layer; None where a layer sees everything."""
    mla: MLA | None = None
    """Latent attention; num_kv_heads and head_dim are then those of its cache."""
    moe: MoE | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"model config: {name}={getattr(self, name)!r}: a whole number")
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name}={getattr(self, name)} must be at least 1")
        if not isinstance(self.rms_norm_eps, int | float) or not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"model config: rms_norm_eps={self.rms_norm_eps!r}: 0 or more")
        if self.rope_theta <= 0:
            raise ValueError(f"model config: rope_theta={self.rope_theta!r}: above 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"model config: head_dim={self.head_dim} must be even")
        kind = self.rope_scaling.get("rope_type")
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"RoPE scaling {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
            )
        if kind != "default" and not self.rope_scaling.get("factor"):
            raise ValueError(f"RoPE scaling {kind!r} has no factor in the model's config")

    @property
    def sizes(self) -> dict[str, int]:
        """What tells a target from others for a head that was made for it."""
        return {name: getattr(self, name) for name in ("hidden_size", "num_layers", "vocab_size")}

    @property
    def dense(self) -> ModelConfig:
        """The same with ordinary attention of as many heads, and no experts: what heads that are
        made for any target have."""
        if self.mla is None:
            return self
        width, heads = self.mla.v_dim, self.num_heads
        return replace(self, num_kv_heads=heads, head_dim=width, mla=None, moe=None)

    @property
    def rope_dim(self) -> int:
        """How many of a head's dimensions are rotated."""
        return self.mla.rope_dim if self.mla else self.head_dim

    def kv_group(self, dtype: torch.dtype) -> KVGroup:
        """The layers in the page space."""
        return KVGroup(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            values=self.mla is None,
        )

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens."""
        return self.windows[layer] if self.windows else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a config.json.

        Raises:
            ValueError: an architecture or a setting that would not be computed faithfully.
        """
        architecture = _architecture(config)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        qwen, llama = architecture.startswith("Qwen"), architecture == SUPPORTED[0]
        if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ValueError(f"hidden_act={act!r} is not supported; only silu is")
        _check_quantization(config)
        # Only Llama and Qwen3 read attention_bias; Qwen2 has biases on q, k, v whatever it says.
        bias = architecture != SUPPORTED[1] and bool(config.get("attention_bias"))
        theta, scaling = _rope(config)
        mla = MLA.from_hf(config) if architecture.startswith("Deepseek") else None
        v3 = architecture == SUPPORTED[5]
        dim = config.get("head_dim") or (128 if architecture == SUPPORTED[3] else hidden // heads)
        return cls(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=1 if mla else config.get("num_key_value_heads") or heads,
            head_dim=mla.kv_rank + mla.rope_dim if mla else dim,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=True if architecture == SUPPORTED[2] else bias,
            o_bias=False if architecture == SUPPORTED[2] else bias,
            mlp_bias=llama and bool(config.get("mlp_bias")),
            qk_norm=architecture == SUPPORTED[3],
            rope_theta=theta,
            rope_scaling=scaling,
            windows=None if mla else _windows(config, qwen, llama),
            mla=mla,
            moe=MoE.from_hf(config, v3) if mla else None,
            eos_token_ids=_ids(config.get("eos_token_id")),
            bos_token_id=next(iter(_ids(config.get("bos_token_id"))), None),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Collection[str]) -> ModelConfig:
        """Reads a GGUF file's metadata.

        Args:
            metadata: key to value, tokenizer lists left out; ``num_tokens`` is the embedding's
                number of rows.
            tensors: names of the file's tensors: GGUF states biases and tying only by presence.

        Raises:
            ValueError: as `from_hf`.
        """
        kind = metadata.get("general.architecture")
        if kind not in _GGUF:
            raise ValueError(
                f"GGUF architecture {kind!r} is not supported; supported are {', '.join(_GGUF)}"
            )

        def get(key: str, default: Any = None) -> Any:
            value = metadata.get(f"{kind}.{key}", default)
            if value is None:
                raise ValueError(f"GGUF metadata lacks {kind}.{key}")
            return value

        heads, hidden, layers = (
            get("attention.head_count"),
            get("embedding_length"),
            get("block_count"),
        )
        kv_heads, context = get("attention.head_count_kv", heads), get("context_length")
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise ValueError("GGUF models whose layers differ in their heads are not supported")
        head_dim = get("attention.key_length", hidden // heads)
        if get("rope.dimension_count", head_dim) != head_dim:
            raise ValueError("partial rotary embeddings are not supported")
        scaling: dict[str, Any] = {"rope_type": get("rope.scaling.type", "none")}
        if scaling["rope_type"] in ("none", "default"):
            scaling = {"rope_type": "default"}
        else:
            scaling["factor"] = get("rope.scaling.factor")
            original = get("rope.scaling.original_context_length", 0)
            scaling["original_max_position_embeddings"] = original or context
        window = int(get("attention.sliding_window", 0))
        eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return cls(
            architecture=_GGUF[kind],
            vocab_size=metadata["num_tokens"],
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in tensors,
            attention_bias=kind == "qwen2" or "blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            qk_norm=kind == "qwen3",
            rope_theta=float(get("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            windows=(window,) * layers if window else None,
            eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [_BY_MODEL_TYPE.get(config.get("model_type", ""), "")]
    if named[0] not in SUPPORTED:
        name = named[0] or config.get("model_type")
        raise ValueError(
            f"architecture {name!r} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    return named[0]


def _check_quantization(config: Mapping[str, Any]) -> None:
    """Of quantised checkpoints those in 8-bit floats with a scale for each block are read."""
    given = config.get("quantization_config")
    if not given:
        return
    if given.get("quant_method") != "fp8" or given.get("weight_block_size") != [FP8_BLOCK] * 2:
        raise ValueError(
            "this checkpoint holds quantised tensors; use the original one or a GGUF file"
        )


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and scaling from either layout; where both are there, they must agree."""
    new = config.get("rope_parameters") or {}
    if new and all(isinstance(value, dict) for value in new.values()):  # one for each layer type
        kinds = list(new.values())
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError("RoPE parameters that differ between layers are not supported")
        new = kinds[0]
    given = new or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope_scaling={given!r}: must be an object")
    scaling = dict(given)
    inner, outer = scaling.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"config.json names two RoPE bases, {inner} and {outer}; remove one")
    theta = inner if inner is not None else outer
    kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
    scaling.pop("type", None)
    partial = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ValueError("partial rotary embeddings are not supported")
    if kind == "default":
        return float(10000.0 if theta is None else theta), {"rope_type": "default"}
    if kind in ("yarn", "llama3"):
        outside = config.get("original_max_position_embeddings")
        limit = outside or config.get("max_position_embeddings")
        scaling["original_max_position_embeddings"] = (
            outside or scaling.get("original_max_position_embeddings") or limit
        )
        if kind == "yarn" and not scaling.get("factor"):
            scaling["factor"] = (
                config["max_position_embeddings"] / scaling["original_max_position_embeddings"]
            )
    return float(10000.0 if theta is None else theta), {"rope_type": kind, **scaling}


def _windows(config: Mapping[str, Any], qwen: bool, llama: bool) -> tuple[int | None, ...] | None:
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if llama or not window or (qwen and not config.get("use_sliding_window")):
        return None
    if not qwen:
        return (window,) * layers
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= config.get("max_window_layers", 28) else "full_attention"
        for i in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types={kinds!r}: one of two attention types for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
