"""What DeepSeek's configs say beyond other decoders': latent attention, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1). Sizes are numbers of
    elements. The cache holds kv_rank + rope_dim numbers a token, one head that all queries share.
    """

    kv_rank: int
    """What keys and values are compressed to."""
    q_rank: int | None
    """What queries are compressed to; None where they are not."""
    nope_dim: int
    """Of a query and key, without a rotation."""
    rope_dim: int
    """Of a query and key, rotated; the key's part is the same for all heads."""
    v_dim: int
    interleaved: bool = True
    """In the checkpoint the numbers of a rotated pair are neighbours."""

    def __post_init__(self) -> None:
        _check(self)
        if self.rope_dim % 2:
            raise ValueError(f"model config: qk_rope_head_dim={self.rope_dim} must be even")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MLA:
        """
        Raises:
            ValueError: a size that makes no attention.
        """
        if config.get("attention_bias"):
            raise ValueError("biases on latent attention (attention_bias) are not supported")
        return cls(
            kv_rank=config["kv_lora_rank"],
            q_rank=config["q_lora_rank"],
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            v_dim=config["v_head_dim"],
            interleaved=config.get("rope_interleave") is not False,
        )


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Experts and how a token is sent to some of them (DeepSeekMoE; DeepSeek-V3, 2412.19437,
    section 2.1.2)."""

    num_experts: int
    per_token: int
    intermediate_size: int
    num_shared: int
    """Experts that every token goes through; they are one of so many times the size."""
    first: int
    """Layers before this one are dense."""
    every: int
    """From there on those that are a multiple of it have experts."""
    num_groups: int
    groups_per_token: int
    """Experts come from so many of the groups."""
    sigmoid: bool
    """Scores by sigmoid and chosen with a bias (V3), else by softmax (V2). It also decides what a
    group is worth: the sum of its best two, or its best."""
    normalized: bool
    """A token's weights are divided by their sum."""
    scale: float
    """Multiplies the weights."""
    part: tuple[int, int] = (0, 1)
    """A rank, and how many there are: which experts it has."""

    def __post_init__(self) -> None:
        _check(self, zero=("num_shared", "first"))
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"model config: {self.num_experts} experts do not make {self.num_groups} groups"
            )
        if self.groups_per_token > self.num_groups:
            raise ValueError(f"model config: topk_group={self.groups_per_token}: more than n_group")
        if self.per_token > self.num_experts // self.num_groups * self.groups_per_token:
            raise ValueError(
                f"model config: num_experts_per_tok={self.per_token}: more than there are in "
                f"{self.groups_per_token} of {self.num_groups} groups"
            )

    @property
    def held(self) -> range:
        """The experts of this rank."""
        rank, world = self.part
        return range(rank * self.num_experts // world, (rank + 1) * self.num_experts // world)

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first and layer % self.every == 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], sigmoid: bool) -> MoE | None:
        """None where every layer is dense.

        Args:
            sigmoid: it is a V3 config.

        Raises:
            ValueError: a way to choose experts that is not computed here.
        """
        if not config.get("n_routed_experts"):
            return None
        by = ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy")
        method = config.get("topk_method") or by[0]
        scoring = config.get("scoring_func") or ("sigmoid" if sigmoid else "softmax")
        if method not in by or scoring != ("sigmoid" if sigmoid else "softmax"):
            raise ValueError(f"experts chosen by {scoring} and {method} are not supported here")
        scale = config.get("routed_scaling_factor", 1.0)
        normalized = config["num_experts_per_tok"] > 1 and bool(config.get("norm_topk_prob"))
        if normalized and not sigmoid and scale != 1.0:
            raise ValueError(
                "norm_topk_prob with a routed_scaling_factor: implementations of DeepSeek-V2 "
                "disagree about it, so it is not supported"
            )
        grouped = method != "greedy"
        return cls(
            num_experts=config["n_routed_experts"],
            per_token=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            num_shared=config.get("n_shared_experts") or 0,
            first=config.get("first_k_dense_replace") or 0,
            every=config.get("moe_layer_freq") or 1,
            num_groups=config["n_group"] if grouped else 1,
            groups_per_token=config["topk_group"] if grouped else 1,
            sigmoid=sigmoid,
            normalized=normalized,
            scale=float(scale),
        )


def _check(sizes: MLA | MoE, zero: tuple[str, ...] = ()) -> None:
    """Every size is a whole number, and at least 1 unless it is one of ``zero``."""
    for field in fields(sizes):
        value = getattr(sizes, field.name)
        if field.type not in ("int", "int | None") or (field.type != "int" and value is None):
            continue
        least = int(field.name not in zero)
        if type(value) is not int or value < least:
            raise ValueError(f"model config: {field.name}={value!r}: at least {least}")
