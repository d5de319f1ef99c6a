"""Trainable heads and their directories: public ones opened, and ours written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from foretell.models.frozen import FrozenTarget
from foretell.models.head import Head
from foretell.models.head_formats import load_eagle, load_eagle3
from foretell.models.layer import Layer
from foretell.models.linear import PackedLinear
from foretell.models.loader import LoadedModel
from foretell.models.medusa_formats import load_medusa
from foretell.models.mtp_formats import load_mtp
from foretell.models.quant import unpack
from foretell.models.trainable import Block, Parts, TrainableHead
from foretell.models.trainable_medusa import TrainableMedusa

Trainable = TrainableHead | TrainableMedusa
METHODS = ("eagle", "eagle3", "mtp", "medusa")

_LAYER = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Parts of a layer and what checkpoints call them."""


@dataclass(frozen=True)
class _Outer:
    """Stands for the target's own output projection, which loaders share and nobody reads here."""

    def rows(self, ids: Tensor) -> _Outer:
        return self


class _Without(LoadedModel):
    """A target for loaders of heads, without a network."""

    ends = cast(Any, (None, _Outer()))

    @property
    def device(self) -> torch.device:
        """Where what is read of the head lies."""
        return torch.device("cpu")


def open_head(method: str, path: Path, target: FrozenTarget) -> Trainable:
    """A head from its directory, in any layout that the engine reads.

    Raises:
        ValueError: as the loaders of `head_formats`.
    """
    loaded = _Without(cast(Any, None), target.config, target.path, "f32")
    if method == "medusa":
        heads, vocab = load_medusa(path, loaded, "f32")
        shared = all(isinstance(head.lm_head, _Outer) for head in heads)
        if not shared:
            raise ValueError(f"{path}: Medusa heads with projections of their own are not trained")
        out = TrainableMedusa(target, len(heads), len(heads[0].blocks), vocab.ids)
        for blocks, head in zip(out.heads, heads, strict=True):
            for block, linear in zip(cast(nn.ModuleList, blocks), head.blocks, strict=True):
                _fill(linear, cast(nn.Linear, block))
        return out
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not trained: choose one of {', '.join(METHODS)}")
    load = {"eagle": load_eagle, "eagle3": load_eagle3, "mtp": load_mtp}[method]
    found = load(path, loaded, "f32")
    return _trainable(method, found.head, found.taps, found.vocab.ids, target)


def _trainable(
    method: str, head: Head, taps: tuple[int, ...], ids: Tensor | None, target: FrozenTarget
) -> TrainableHead:
    first = head.layers[0]
    if not isinstance(first, Layer):
        raise ValueError("an MTP module with latent attention is not trained: begin a new head")
    fuse = head.fuse
    parts = Parts(
        taps=taps,
        mix=head.mix is not None,
        bias=head.mix is not None and bool(cast(PackedLinear, head.mix).bias.any()),
        norm_embed=head.norm_embed is not None,
        norm_hidden=head.norm_hidden is not None,
        norm_attn=first.input_norm is not None,
        norm_out=head.norm_out is not None,
        attention_bias=bool(cast(PackedLinear, first.qkv).bias.any()),
        qk_norm=first.q_norm is not None,
        fc_norm=fuse is not None and fuse.part_norms is not None,
        norm_before_fc=fuse is not None and fuse.norm is not None,
        fuse_rank=cast(PackedLinear, fuse.fc).out_features if fuse and fuse.up else 0,
        norm_before_residual=head.residual_normed,
        norm_output=head.recycle_normed,
        own_lm_head=not isinstance(head.lm_head, _Outer),
    )
    out = TrainableHead(method, target, head.config, parts, ids)
    with torch.no_grad():
        for norm in ("norm_embed", "norm_hidden", "norm_out"):
            _copy(getattr(head, norm), getattr(out, norm))
        if head.mix is not None:
            _fill(head.mix, out.mix)
        if fuse is not None:
            _fill(fuse.fc, out.fuse)
            if fuse.up is not None:
                _fill(fuse.up, out.fuse_up)
            _copy(fuse.norm, out.fused_norm)
            norms = fuse.part_norms
            for weight, module in zip(() if norms is None else norms, out.part_norms, strict=True):
                _copy(weight, module)
        if out.lm_head is not None:
            _fill(head.lm_head, out.lm_head)
        for layer, block in zip(head.layers, out.layers, strict=True):
            assert isinstance(block, Block)
            assert isinstance(layer, Layer)
            _fill(layer.qkv, block.q, block.k, block.v)
            _fill(layer.o, block.o)
            _fill(layer.gate_up, block.gate, block.up)
            _fill(layer.down, block.down)
            for norm in ("input_norm", "post_norm", "q_norm", "k_norm"):
                _copy(getattr(layer, norm), getattr(block, norm))
    return out


@torch.no_grad()
def _fill(linear: Any, *modules: nn.Linear | None) -> None:
    """Divides a loaded product's outputs over modules that are one product there."""
    packed = cast(PackedLinear, linear)
    weight = unpack(packed.kind, packed.packed, packed.out_features, packed.in_features)
    at = 0
    for module in modules:
        assert module is not None
        end = at + module.out_features
        module.weight.copy_(weight[at:end])
        if module.bias is not None:
            module.bias.copy_(packed.bias[at:end])
        at = end


def _copy(weight: Tensor | None, module: nn.Module | None) -> None:
    if weight is not None:
        assert isinstance(module, nn.RMSNorm)
        with torch.no_grad():
            module.weight.copy_(weight)


# ---- what is written


def _parts(head: TrainableHead) -> dict[str, str]:
    """Names of the parts and what the layout of its scheme calls them."""
    first = {"eagle": "layers.0.", "eagle3": "midlayer."}.get(head.method)
    if first is None:
        first = f"model.layers.{head.sizes.num_layers}."
    names = {
        "eagle": ("fc", "embedding_layernorm", "hidden_states_layernorm", "norm"),
        "eagle3": ("fc", "midlayer.input_layernorm", "midlayer.hidden_norm", "norm"),
        "mtp": (f"{first}eh_proj", f"{first}enorm", f"{first}hnorm", f"{first}shared_head.norm"),
    }[head.method]
    mix, embed, feature, out = names
    parts = {
        "mix": mix, "fuse": "fuse_down" if head.fuse_up else mix, "fuse_up": "fuse_up",
        "fused_norm": "input_norm",
        "norm_embed": embed, "norm_hidden": feature, "norm_out": out, "lm_head": "lm_head",
    }  # fmt: skip
    parts |= {f"part_norms.{i}": f"fc_norm.{i}" for i in range(len(head.part_norms))}
    for i in range(len(head.layers)):
        prefix = f"layers.{i}." if i else first
        parts |= {f"layers.{i}.{own}": f"{prefix}{name}" for own, name in _LAYER.items()}
    return parts


def head_tensors(head: TrainableHead) -> dict[str, Tensor]:
    """Float32 tensors by the names of the head's layout."""
    parts = _parts(head)
    out = {
        f"{parts[own]}.{kind}": weight.detach().float().clone()
        for own, kind, weight in (
            (*name.rsplit(".", 1), weight) for name, weight in head.named_parameters()
        )
    }
    if (ids := head.draft_ids) is None:
        return out
    # EAGLE-3's tables; here every scheme may have them.
    known = torch.zeros(head.sizes.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    prefix = parts["mix"].removesuffix("eh_proj") if head.method == "mtp" else ""
    return out | {f"{prefix}d2t": ids - torch.arange(len(ids)), f"{prefix}t2d": known}


_SIZES = {
    **{name: name for name in ("hidden_size", "intermediate_size")},
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    **{name: name for name in ("head_dim", "vocab_size", "rms_norm_eps", "rope_theta")},
    "max_position_embeddings": "max_position_embeddings",
}
"""What Llama's config calls a decoder's sizes, and what ours does."""


def head_config(head: TrainableHead) -> dict[str, Any]:
    """config.json of the head's layout."""
    sizes, parts, eagle3 = head.sizes, head.parts, head.method == "eagle3"
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if eagle3 else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "foretell_method": head.method,
        "foretell_target": head.target,
        **{theirs: getattr(sizes, ours) for theirs, ours in _SIZES.items()},
    }
    if len(sizes.rope_scaling) > 1:
        config["rope_scaling"] = sizes.rope_scaling
    if parts.attention_bias:
        config["attention_bias"] = True
    if head.draft_ids is not None:
        config["draft_vocab_size"] = len(head.draft_ids)
    flags = ("bias", "norm_embed", "norm_hidden", "norm_attn", "norm_out", "norm_output")
    if not eagle3 and head.fuse is not None:
        config["foretell_taps"] = list(head.taps)
        flags = (*flags, "fc_norm")
    if eagle3:
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in head.taps],
            "use_aux_hidden_state": head.fuse is not None,
        }
        flags = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    return config | {name: getattr(parts, name) for name in flags}


def medusa_tensors(head: TrainableMedusa) -> dict[str, Tensor]:
    """vLLM's layout: it alone has heads that share the target's output projection."""
    out = {
        f"blocks.{i}.layers.{j}.{kind}": value.detach().float().clone()
        for i, blocks in enumerate(head.heads)
        for j, block in enumerate(cast(nn.ModuleList, blocks))
        for kind, value in block.named_parameters()
    }
    return out if head.draft_ids is None else out | {"token_map": head.draft_ids}


def medusa_config(head: TrainableMedusa) -> dict[str, Any]:
    """config.json of the head's layout."""
    weight = cast(nn.Linear, cast(nn.ModuleList, head.heads[0])[0]).weight
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "foretell_method": "medusa",
        "foretell_target": head.target,
        "hidden_size": weight.shape[0],
        "num_heads": len(head.heads),
        "num_hidden_layers": len(cast(nn.ModuleList, head.heads[0])),
        "medusa_fc_bias": True,
        "original_lm_head": True,
    } | ({} if head.draft_ids is None else {"truncated_vocab_size": len(head.draft_ids)})
