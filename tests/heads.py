"""Tiny random heads for the tiny target, written as their authors publish them, and what each
architecture computes: plain float64, dense, without a cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import tiny

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 32, 4, 2, 8, 48
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": tiny.VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}
AUX = [2, 1, 2]  # inputs of these layers: the tiny target has two
Tensors = dict[str, Tensor]


def _draw(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g) * 2 * shape[-1] ** -0.5


def _norm(g: torch.Generator, size: int) -> Tensor:
    return 1 + 0.3 * torch.randn(size, generator=g)


def layer(g: torch.Generator, prefix: str, *, wide: bool = False, qk_norm: bool = False) -> Tensors:
    """A decoder layer without its input norm."""
    inputs = 2 * HIDDEN if wide else HIDDEN
    out = {
        f"{prefix}self_attn.q_proj.weight": _draw(g, HEADS * DIM, inputs),
        f"{prefix}self_attn.k_proj.weight": _draw(g, KV_HEADS * DIM, inputs),
        f"{prefix}self_attn.v_proj.weight": _draw(g, KV_HEADS * DIM, inputs),
        f"{prefix}self_attn.o_proj.weight": _draw(g, HIDDEN, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": _draw(g, INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": _draw(g, INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": _draw(g, HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": _norm(g, HIDDEN),
    }
    if qk_norm:
        out |= {f"{prefix}self_attn.{x}_norm.weight": _norm(g, DIM) for x in "qk"}
    return out


def eagle(
    norms: bool = False, seed: int = 0, vocab: int = tiny.VOCAB
) -> tuple[Tensors, dict[str, Any]]:
    """EAGLE as published, or with its norms restored as our own."""
    g = torch.Generator().manual_seed(seed)
    tensors = layer(g, "layers.0.") | {
        "embed_tokens.weight": _draw(g, vocab, HIDDEN),
        "fc.weight": _draw(g, HIDDEN, 2 * HIDDEN),
        "fc.bias": _draw(g, HIDDEN),
    }
    if not norms:
        return tensors, SIZES | {"vocab_size": vocab}
    tensors |= {
        f"{name}.weight": _norm(g, HIDDEN)
        for name in (
            "embedding_layernorm",
            "hidden_states_layernorm",
            "layers.0.input_layernorm",
            "norm",
        )
    }
    flags = ("norm_embed", "norm_hidden", "norm_attn", "norm_out", "norm_output")
    return tensors, SIZES | {"vocab_size": vocab} | dict.fromkeys(flags, True)


def wide_eagle(vocab: int = tiny.VOCAB) -> tuple[Tensors, dict[str, Any]]:
    """Our own that reads two layers besides the last state."""
    tensors, config = eagle(norms=True, vocab=vocab)
    g = torch.Generator().manual_seed(7)
    norms = {f"fc_norm.{i}.weight": _norm(g, HIDDEN) for i in range(3)}
    tensors |= {"fuse_down.weight": _draw(g, 16, 3 * HIDDEN), **norms}
    tensors |= {"fuse_up.weight": _draw(g, HIDDEN, 16)}
    return tensors, config | {"foretell_taps": [1, 0, -1], "fc_norm": True}


def eagle3(
    draft_vocab: int = 0, seed: int = 0, vocab: int = tiny.VOCAB
) -> tuple[Tensors, dict[str, Any]]:
    """EAGLE-3 over a reduced vocabulary: five eighths unless ``draft_vocab`` says how many."""
    draft_vocab = draft_vocab or vocab * 5 // 8
    g = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocab, generator=g)[:draft_vocab].sort().values
    tensors = layer(g, "midlayer.", wide=True) | {
        "fc.weight": _draw(g, HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": _norm(g, HIDDEN),
        "midlayer.input_layernorm.weight": _norm(g, HIDDEN),
        "norm.weight": _norm(g, HIDDEN),
        "lm_head.weight": _draw(g, draft_vocab, HIDDEN),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True),
    }
    return tensors, SIZES | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX, "use_aux_hidden_state": True},
    }


LAYOUTS = {
    "deepseek": ("model.layers.2.", "", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "qwen": (
        "mtp.",
        "layers.0.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    ),
    "mimo": (
        "model.mtp_layers.0.",
        "",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ),
}


def mtp(
    layout: str = "deepseek", seed: int = 0, vocab: int = tiny.VOCAB
) -> tuple[Tensors, dict[str, Any]]:
    """One MTP module over a dense layer."""
    g = torch.Generator().manual_seed(seed)
    prefix, block, (embed, feature, mix, out) = LAYOUTS[layout]
    tensors = layer(g, prefix + block, qk_norm=layout == "qwen") | {
        f"{prefix}{block}input_layernorm.weight": _norm(g, HIDDEN),
        f"{prefix}{embed}.weight": _norm(g, HIDDEN),
        f"{prefix}{feature}.weight": _norm(g, HIDDEN),
        f"{prefix}{out}.weight": _norm(g, HIDDEN),
        f"{prefix}{mix}.weight": _draw(g, HIDDEN, 2 * HIDDEN),
    }
    if layout == "deepseek":
        tensors |= {
            f"{prefix}embed_tokens.weight": _draw(g, vocab, HIDDEN),
            f"{prefix}shared_head.head.weight": _draw(g, vocab, HIDDEN),
        }
    if layout == "qwen":  # norms lie as their weight less one
        tensors = {n: t - 1 if t.dim() == 1 else t for n, t in tensors.items()}
    return tensors, SIZES | {"vocab_size": vocab}


def medusa(
    count: int = 3, layers: int = 1, seed: int = 0, vocab: int = tiny.VOCAB
) -> tuple[Tensors, dict[str, Any]]:
    """The authors' state dict: blocks are called linear, the projection behind them has a number
    only."""
    g = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for i in range(count):
        for at in range(layers):
            tensors[f"{i}.{at}.linear.weight"] = _draw(g, HIDDEN, HIDDEN)
            tensors[f"{i}.{at}.linear.bias"] = _draw(g, HIDDEN)
        tensors[f"{i}.{layers}.weight"] = _draw(g, vocab, HIDDEN)
    return tensors, {"medusa_num_heads": 2, "medusa_num_layers": layers}


MAKERS: dict[str, Callable[..., tuple[Tensors, dict[str, Any]]]] = {
    "eagle": eagle,
    "eagle-norms": partial(eagle, norms=True),
    "eagle-wide": wide_eagle,
    "eagle3": eagle3,
    **{f"mtp-{layout}": partial(mtp, layout) for layout in LAYOUTS},
    "medusa": medusa,
}
"""By kind: tensors and config of a head, for a vocabulary of ``vocab`` tokens."""
KINDS = list(MAKERS)
LAYERED = KINDS[:-1]


def write(tensors: Tensors, config: dict[str, Any] | None, path: Path | None = None) -> Path:
    """Writes a directory with config.json and model.safetensors."""
    path = path or Path(mkdtemp())
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


@cache
def written(kind: str, vocab: int = tiny.VOCAB) -> Path:
    """A directory with a tiny head of that kind, shared by all tests."""
    (path := Path(mkdtemp()) / kind).mkdir()
    return write(*MAKERS[kind](vocab=vocab), path)


@cache
def scheme(kind: str, vocab: int = tiny.VOCAB) -> str:
    """``method:model=PATH`` of a tiny head."""
    return f"{kind.split('-')[0]}:model={written(kind, vocab)}"


# ---- what they compute


class Plain:
    """One architecture in float64. ``run`` takes all pairs of a text at once and keeps nothing."""

    def __init__(
        self, kind: str, tensors: Tensors, config: dict[str, Any], target: Tensors
    ) -> None:
        self.kind, self.config = kind, config
        self.t = {n: t.double() for n, t in tensors.items() if t.is_floating_point()}
        self.embed = target["model.embed_tokens.weight"].double()
        self.d2t = tensors.get("d2t")

    def run(self, features: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Features [T, H] and the tokens after them: logits [T, V] and next features [T, H]."""
        t, e = self.t, self.embed[tokens]
        if self.kind.startswith("eagle3"):
            return self._eagle3(features, e)
        if self.kind == "eagle":
            h = torch.cat([e, features], 1) @ t["fc.weight"].T + t["fc.bias"]
            x = self._block("layers.0.", h, h)
            return x @ self.embed.T, x
        if self.kind in ("eagle-norms", "eagle-wide"):
            e = self._rms(e, "embedding_layernorm")
            f = self._rms(features, "hidden_states_layernorm")
            h = torch.cat([e, f], 1) @ t["fc.weight"].T + t["fc.bias"]
            x = self._block("layers.0.", self._rms(h, "layers.0.input_layernorm"), h)
            x = self._rms(x, "norm")
            return x @ self.embed.T, x
        prefix, block, (embed, feature, mix, out) = LAYOUTS[self.kind.split("-")[1]]
        e, f = self._rms(e, prefix + embed), self._rms(features, prefix + feature)
        pair = [f, e] if self.kind == "mtp-mimo" else [e, f]
        h = torch.cat(pair, 1) @ t[f"{prefix}{mix}.weight"].T
        start = self._rms(h, f"{prefix}{block}input_layernorm")
        x = self._rms(self._block(prefix + block, start, h), prefix + out)
        return x @ self.embed.T, x

    def _eagle3(self, g: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        n = self._rms(g, "midlayer.hidden_norm")
        pair = torch.cat([self._rms(e, "midlayer.input_layernorm"), n], 1)
        residual = n if self.config.get("norm_before_residual") else g
        x = self._block("midlayer.", pair, residual)
        normed = self._rms(x, "norm")
        logits = normed @ self.t["lm_head.weight"].T
        assert self.d2t is not None
        wide = torch.full((len(x), tiny.VOCAB), -torch.inf, dtype=torch.float64)
        wide[:, torch.arange(len(self.d2t)) + self.d2t] = logits
        return wide, normed if self.config.get("norm_output") else x

    def fuse(self, tapped: Tensor) -> Tensor:
        """What EAGLE-3 makes of the target's layers [T, 3 H], and EAGLE where it reads as many;
        others read one as it is."""
        fc = "fc.weight" if self.kind.startswith("eagle3") else "fuse_down.weight"
        if fc not in self.t:
            return tapped
        if self.config.get("fc_norm"):
            parts = [self._rms(p, f"fc_norm.{i}") for i, p in enumerate(tapped.chunk(3, 1))]
            tapped = torch.cat(parts, 1)
        if self.config.get("norm_before_fc"):
            tapped = self._rms(tapped, "input_norm")
        fused = tapped @ self.t[fc].T
        if fc == "fc.weight":
            return fused
        return tapped[:, -HIDDEN:] + fused @ self.t["fuse_up.weight"].T

    def _rms(self, x: Tensor, name: str) -> Tensor:
        weight = self.t[f"{name}.weight"] + (1 if self.kind == "mtp-qwen" else 0)
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def _block(self, prefix: str, start: Tensor, x: Tensor) -> Tensor:
        t, rows = self.t, len(x)
        project = lambda name, v: v @ t[f"{prefix}{name}_proj.weight"].T  # noqa: E731
        q, k, v = (
            project(f"self_attn.{name}", start).view(rows, -1, DIM).transpose(0, 1)
            for name in "qkv"
        )
        if f"{prefix}self_attn.q_norm.weight" in t:
            q = self._rms(q, f"{prefix}self_attn.q_norm")
            k = self._rms(k, f"{prefix}self_attn.k_norm")
        q, k = self._turn(q), self._turn(k)
        k, v = (s.repeat_interleave(HEADS // KV_HEADS, 0) for s in (k, v))
        scores = q @ k.transpose(1, 2) * DIM**-0.5  # [heads, T, T]
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        x = x + project("self_attn.o", seen.transpose(0, 1).reshape(rows, -1))
        h = self._rms(x, f"{prefix}post_attention_layernorm")
        gate = torch.nn.functional.silu(project("mlp.gate", h))
        return x + project("mlp.down", gate * project("mlp.up", h))

    def _turn(self, x: Tensor) -> Tensor:
        """RoPE; a pair stands at the place of its feature."""
        base = self.config.get("rope_theta", 10000.0)
        inverse = base ** (-torch.arange(0, DIM, 2).double() / DIM)
        angle = torch.arange(x.shape[1]).double()[:, None] * inverse
        angle = torch.cat([angle, angle], 1)
        half = torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1)
        return x * angle.cos() + half * angle.sin()
