"""One head in the layouts that other engines read, and what each layout cannot say.

Each function turns `HeadFiles` into a directory's config and tensors and refuses, with the reason,
what the layout has no place for. The target is needed only for rows of its lm_head, where a head
shares them and a layout wants its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretell.train.head_files import SPECULATORS, HeadFiles, Tensors

Rows = Callable[[Tensor | None], Tensor]
"""The target's lm_head: rows of these ids [N, H], or all of them."""

_NORMS = {
    "norm_embed": "embedding_layernorm.weight",
    "norm_hidden": "hidden_states_layernorm.weight",
    "norm_attn": "layers.0.input_layernorm.weight",
    "norm_out": "norm.weight",
}
TOKEN_IDS = "token_ids.pt"
_TAPS = "eagle_aux_hidden_state_layer_ids"


def eagle_layout(head: HeadFiles, rows: Rows) -> HeadFiles:
    """EAGLE's and EAGLE-3's own directories (yuhuili/EAGLE-*, SafeAILab).

    Raises:
        ValueError: the layout has no place for something; the message says for what.
    """
    if head.method == "eagle3":
        return _eagle3(head, rows, "EAGLE-3's layout")
    if head.method != "eagle":
        raise ValueError(f"EAGLE's layout has no place for a head of {head.method}")
    norms = _norms(head)
    if norms and norms != {"norm_embed", "norm_hidden"}:
        raise ValueError(
            "EAGLE's layout has no place for " + ", ".join(sorted(norms)) + ": its readers would "
            "leave these norms out. Take --format foretell, or fit with --no-norms"
        )
    _refuse(head, "EAGLE's layout")
    tensors, beside = _whole_vocabulary(head)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **head.sizes,
        "num_hidden_layers": _num_layers(head),
        "bias": "fc.bias" in head.tensors,
    }
    settings |= {"add_para_norm": True} if norms else {}
    return HeadFiles("eagle", settings, tensors, beside)


def speculators_layout(
    head: HeadFiles, rows: Rows, *, verifier: str, architecture: str, tokens: int
) -> HeadFiles:
    """vLLM's ``speculators``: ``eagle3``, and ``eagle`` where its three norms or none are the
    head's.

    Args:
        verifier: the target's name, which vLLM loads by.
        architecture: the target's class, such as LlamaForCausalLM.
        tokens: draft tokens that a server takes by default.

    Raises:
        ValueError: as `eagle_layout`.
    """
    if head.method not in ("eagle", "eagle3"):
        reason = {
            "mtp": "vLLM builds it for the modules of MiMo and Qwen3-Next only",
            "medusa": "it knows no Medusa: export it as medusa",
        }[head.method]
        raise ValueError(f"the speculators layout cannot hold a head of {head.method}: {reason}")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    shared = {
        "speculators_model_type": head.method,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": head.method,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": [architecture]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            **head.sizes,
            "num_hidden_layers": _num_layers(head),
        },
    }
    if head.method == "eagle3":
        # Its readers know EAGLE-3.1's norms, which SafeAILab's do not.
        own = _eagle3(head, rows, "the speculators layout", extended=True)
        kept = {n: own.settings[n] for n in ("draft_vocab_size", _TAPS) if n in own.settings}
        flags = {n: True for n in ("fc_norm", "norm_before_fc", "norm_output") if own.settings[n]}
        settings = {
            "architectures": ["Eagle3Speculator"],
            **shared,
            **kept,
            **flags,
            "norm_before_residual": own.settings["norm_before_residual"],
        }
        if "target_hidden_size" in head.settings:
            settings["target_hidden_size"] = head.settings["target_hidden_size"]
        renamed = {re.sub(r"^midlayer\.", "layers.0.", n): t for n, t in own.tensors.items()}
        return HeadFiles("eagle3", settings, renamed)
    return _speculators_eagle(head, shared)


def _speculators_eagle(head: HeadFiles, shared: dict[str, Any]) -> HeadFiles:
    where, norms = "the eagle form of speculators", _norms(head)
    if norms and norms != (form := {"norm_embed", "norm_attn", "norm_out"}):
        more, less = ", ".join(sorted(norms - form)), ", ".join(sorted(form - norms))
        reason = f"has no place for {more}" if more else f"cannot leave out {less}"
        raise ValueError(f"{where} {reason}; its norms are all of norm_embed, norm_attn, norm_out")
    _refuse(head, where)
    if _num_layers(head) > 1:
        raise ValueError(f"{where} has one layer, this head has {_num_layers(head)}")
    back = {own: theirs for theirs, own in SPECULATORS.items()}
    tensors, beside = _whole_vocabulary(head)
    renamed = {n.replace("layers.0.", "transformer.", 1): t for n, t in tensors.items()}
    settings = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "layernorms": bool(norms),
        "fusion_bias": "fc.bias" in head.tensors,
        **shared,
    }
    return HeadFiles("eagle", settings, {back.get(n, n): t for n, t in renamed.items()}, beside)


def medusa_layout(head: HeadFiles, rows: Rows) -> HeadFiles:
    """vLLM's Medusa.

    Raises:
        ValueError: as `eagle_layout`.
    """
    if head.method != "medusa":
        raise ValueError(f"vLLM's Medusa layout has no place for a head of {head.method}")
    tensors: Tensors = {}
    depth = len([name for name in head.tensors if re.fullmatch(r"0\.\d+\.linear\.weight", name)])
    count = len([name for name in head.tensors if re.fullmatch(r"\d+\.0\.linear\.weight", name)])
    for name, tensor in head.tensors.items():
        if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
            tensors[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif match := re.fullmatch(rf"(\d+)\.{depth}\.weight", name):
            tensors[f"lm_heads.{match[1]}.weight"] = tensor
        else:
            tensors[name] = tensor
    owned = sum(name.startswith("lm_heads.") for name in tensors)
    if owned not in (0, count):
        raise ValueError("vLLM's Medusa layout wants an lm_head of each head's own, or of none")
    first = tensors["blocks.0.layers.0.weight"]
    ids = tensors.get("token_map")
    if not owned and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = rows(ids).to(first.dtype)
    size = len(tensors["lm_heads.0.weight" if owned else "lm_head.weight"])
    vocab = head.settings.get("vocab_size") or (size if ids is None else len(rows(None)))
    settings = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": first.shape[1],
        "vocab_size": vocab,
        "num_heads": count,
        "num_hidden_layers": depth,
        "medusa_fc_bias": "blocks.0.layers.0.bias" in tensors,
        "original_lm_head": not owned,
        "truncated_vocab_size": vocab if ids is None else len(ids),
    }
    return HeadFiles("medusa", settings, tensors)


def _eagle3(head: HeadFiles, rows: Rows, where: str, *, extended: bool = False) -> HeadFiles:
    """EAGLE-3's own names with an lm_head of its own, which every reader wants."""
    flags = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")
    # Readers of speculators' directories take an absent key as true, others as false.
    absent = {"norm_before_residual": "speculators_model_type" in head.settings}
    values = {flag: bool(head.settings.get(flag, absent.get(flag, False))) for flag in flags}
    if not extended:
        for flag in flags:
            if values[flag]:
                raise ValueError(f"{where} has no place for {flag}: its readers would ignore it")
    _refuse(head, where)
    taps = head.settings.get(_TAPS)
    if taps is not None and len(taps) != 3:
        raise ValueError(f"{where} reads three of the target's layers, this head {len(taps)}")
    tensors = dict(head.tensors)
    vocab = head.settings["vocab_size"]
    ids = None
    if "d2t" in tensors:
        ids = ids_of(tensors["d2t"])
        tensors.setdefault("t2d", torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True))
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = rows(ids).to(tensors["fc.weight"].dtype)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **head.sizes,
        "num_hidden_layers": _num_layers(head),
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        **({_TAPS: list(taps)} if taps is not None else {}),
    }
    if extended:
        return HeadFiles("eagle3", settings | values, tensors)
    if taps is not None:
        del settings[_TAPS]
        settings["eagle_config"] = {_TAPS: list(taps), "use_aux_hidden_state": True}
    if "target_hidden_size" in head.settings:
        settings["target_hidden_size"] = head.settings["target_hidden_size"]
    return HeadFiles("eagle3", settings, tensors)


def _whole_vocabulary(head: HeadFiles) -> tuple[Tensors, dict[str, bytes]]:
    """An EAGLE head without its tables of a reduced vocabulary, which other readers do not know;
    and its token ids as the file that SGLang (``--speculative-token-map``) and our own
    ``draft_vocab`` take."""
    tensors = {name: t for name, t in head.tensors.items() if name not in ("d2t", "t2d")}
    if "d2t" not in head.tensors:
        return tensors, {}
    buffer = io.BytesIO()
    torch.save(ids_of(head.tensors["d2t"]), buffer)
    return tensors, {TOKEN_IDS: buffer.getvalue()}


def ids_of(d2t: Tensor) -> Tensor:
    """[Vd] the target's tokens, of a table of offsets."""
    return torch.arange(len(d2t)) + d2t.long()


def _norms(head: HeadFiles) -> set[str]:
    """Which of the norms that EAGLE left out an EAGLE head has, by our config's names."""
    return {flag for flag, name in _NORMS.items() if name in head.tensors}


def _refuse(head: HeadFiles, where: str) -> None:
    """
    Raises:
        ValueError: the head has what no Llama layer of other engines has.
    """
    if head.method == "eagle" and head.settings.get("norm_output"):
        raise ValueError(f"{where} has no place for norm_output: its readers would ignore it")
    if "fuse_up.weight" in head.tensors:
        raise ValueError(f"{where} has no place for further layers of the target: fit without taps")
    if any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in head.tensors):
        raise ValueError(f"{where} has no place for the norms of queries and keys")


def _num_layers(head: HeadFiles) -> int:
    found = [int(m[1]) for n in head.tensors if (m := re.match(r"layers\.(\d+)\.", n))]
    return max([*found, 0]) + 1
