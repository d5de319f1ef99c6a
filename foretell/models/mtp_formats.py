"""MTP modules as they lie in checkpoints: DeepSeek-V3's layout, Qwen3-Next's and MiMo's.

In DeepSeek's own the layer has latent attention and, mostly, experts, as the target has.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from foretell.config import Weights
from foretell.models.checkpoint import Checkpoint, Part, Placed, Source
from foretell.models.config import ModelConfig
from foretell.models.deepseek import assemble_layer, convert_layer
from foretell.models.head import Head
from foretell.models.head_formats import LoadedHead, own_ids
from foretell.models.head_reader import Reader, open_tensors, shared
from foretell.models.layer import Layer
from foretell.models.linear import make_linear
from foretell.models.loader import LoadedModel
from foretell.models.mla import LatentLayer
from foretell.models.rope import Rope
from foretell.models.sharding import Ranks
from foretell.spec.draft_vocab import DraftVocab


def load_mtp(
    path: Path, target: LoadedModel, weights: Weights, draft_vocab: str = "",
    ranks: Ranks | None = None,
) -> LoadedHead:  # fmt: skip
    """The first MTP module of a checkpoint, beside whatever else it holds: DeepSeek-V3's layout
    over a layer of the target's kind, Qwen3-Next's (``mtp.``) and MiMo's (``model.mtp_layers.``).

    Args:
        ranks: as `head_formats.load_eagle`.

    Raises:
        ValueError: there is none, a tensor of it is missing, left over or of another shape, or its
            layer is of a kind that is not computed here.
    """
    source = Placed(open_tensors(path), target.device)
    layout, prefix = _mtp_layout(source)
    qwen, mimo = layout == "qwen", layout == "mimo"
    reader = Reader(Part(source, prefix), weights, zero_centred=qwen)
    names, config = reader.checkpoint, replace(target.config, num_layers=1, windows=None)
    block = f"{prefix}layers.0." if qwen else prefix
    _check_layer(names, block, config)
    layers, config = _layers(reader, block, config, ranks)
    hidden, vocab = config.hidden_size, target.config.vocab_size
    embed, feature, mix, out = {
        "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    }[layout]
    weight = names.take(f"{prefix}{mix}.weight", hidden, 2 * hidden)
    if mimo:  # it was trained on cat(feature, embedding)
        weight = torch.cat([weight[:, hidden:], weight[:, :hidden]], dim=1)
    for copied in ("embed_tokens.weight", "shared_head.head.weight"):  # copies of the target's
        names.skip(prefix + copied)
    table = f"{prefix}d2t"  # ours: the others speak about every token
    own = {"draft_vocab_size": names.shape(table)[0]} if table in names else {}
    ids = own_ids(names, own, draft_vocab, path, vocab, prefix)
    head = Head(
        config=config,
        layers=layers,
        **shared(target, ids, ranks),
        rope=Rope(config, device=target.device),
        mix=make_linear(weights, weight),
        norm_embed=reader.norm(prefix + embed, hidden),
        norm_hidden=reader.norm(prefix + feature, hidden),
        norm_out=reader.norm(prefix + out, hidden),
        recycle_normed=True,
        ranks=ranks,
    )
    names.finish()
    return LoadedHead(head, (-1,), DraftVocab(vocab, ids, target.device), target.kv_dtype)


def _layers(
    reader: Reader, block: str, config: ModelConfig, ranks: Ranks | None
) -> tuple[list[Layer] | list[LatentLayer], ModelConfig]:
    """The module's one layer, and the config with its sizes."""
    names = reader.checkpoint
    experts = f"{block}mlp.gate.weight" in names
    if not experts:  # dense layers may differ in it
        inner = names.shape(f"{block}mlp.gate_proj.weight")[0]
        config = replace(config, intermediate_size=inner)
    latent = f"{block}self_attn.kv_a_proj_with_mqa.weight" in names
    if not latent:
        config = replace(config.dense, attention_bias=False, qk_norm=False)
    config = reader.split(config, ranks)
    if not latent:
        return [reader.layer(block, config)], config
    parts = convert_layer(names, config, reader.weights, block, "layer", experts=experts)
    return [assemble_layer(config, reader.weights, dict(parts), "layer")], config


def _check_layer(names: Checkpoint, block: str, config: ModelConfig) -> None:
    """Refuses layers that are not of the target's kind, nor ordinary, by what they are."""
    q = f"{block}self_attn.q_proj.weight"
    kinds: dict[str, str] = {}
    if config.mla is None:
        kinds["multi-head latent attention"] = f"{block}self_attn.kv_a_proj_with_mqa.weight"
    if config.moe is None:
        kinds["a mixture of experts"] = f"{block}mlp.gate.weight"
    found = [f"{kind} ({name})" for kind, name in kinds.items() if name in names]
    if (
        config.mla is None
        and q in names
        and names.shape(q)[0] == 2 * config.num_heads * config.head_dim
    ):
        found.append(f"gated attention ({q} has a gate beside each head)")
    if found:
        raise ValueError(
            f"{names.path}: this MTP module has {' and '.join(found)}; supported is a dense layer "
            "with ordinary attention, or one of the target's own kind"
        )


def _mtp_layout(source: Source) -> tuple[str, str]:
    """Which layout the MTP module has, and the prefix of its tensors."""
    for name in sorted(source.shapes):
        if match := re.fullmatch(r"(model\.layers\.\d+\.)eh_proj\.weight", name):
            return "deepseek", match[1]
    if "mtp.fc.weight" in source.shapes:
        return "qwen", "mtp."
    if "model.mtp_layers.0.input_proj.weight" in source.shapes:
        return "mimo", "model.mtp_layers.0."
    if "mtp.0.e_proj.weight" in source.shapes:
        raise ValueError(
            f"{source.path}: this MTP module (mtp.0.e_proj) is DeepSeek-V4's, with "
            "hyper-connections, which are not supported"
        )
    raise ValueError(
        f"{source.path}: no MTP module here (eh_proj, mtp.fc or mtp_layers.0.input_proj)"
    )
