"""EAGLE and EAGLE-3 heads as others publish them.

Every tensor is accounted for: one that is missing or left over is an error that names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foretell.config import Weights
from foretell.models.checkpoint import Checkpoint, Placed
from foretell.models.head import Fusion, Head
from foretell.models.head_reader import (
    Reader,
    ascending,
    count_layers,
    draft_ids,
    open_tensors,
    own_embedding,
    own_projection,
    root_of,
    rows_of,
    settings_of,
    shared,
    sizes,
)
from foretell.models.loader import LoadedModel
from foretell.models.rope import Rope
from foretell.models.sharding import Ranks
from foretell.spec.draft_vocab import DraftVocab


@dataclass(frozen=True)
class LoadedHead:
    """A head with what its drafter has to ask of the engine."""

    head: Head
    taps: tuple[int, ...]
    """The target's layers whose outputs it reads; -1 is the final norm's output."""
    vocab: DraftVocab
    """Which tokens its logits are about."""
    kv_dtype: torch.dtype


def load_eagle(
    path: Path, target: LoadedModel, weights: Weights, draft_vocab: str = "",
    ranks: Ranks | None = None,
) -> LoadedHead:  # fmt: skip
    """EAGLE and EAGLE-2 (yuhuili/EAGLE-*), HASS, speculators' first format, and our own, whose
    config names its norms: ``norm_embed``, ``norm_hidden``, ``norm_attn``, ``norm_out``, and
    ``norm_output`` where the normed state is the next feature; and, where it reads more than the
    last state, the layers (``foretell_taps``), of which ``fuse_down`` and ``fuse_up`` add a part.

    Args:
        ranks: those that the head is spread over: only this one's part is read.

    Raises:
        ValueError: a tensor is missing, left over or of another shape, or the head was made for
            another target.
    """
    settings = settings_of(path)
    reader = Reader(Placed(open_tensors(path), target.device), weights)
    names = reader.checkpoint
    _check_kind(settings, names, "eagle")
    root = root_of(names)
    first = "transformer." if f"{root}transformer.mlp.down_proj.weight" in names else "layers.0."
    config = sizes(settings, reader.path, target, count_layers(names, root))
    config, hidden = reader.split(config, ranks), config.hidden_size
    if hidden != target.config.hidden_size:
        raise ValueError(
            f"{path}: made for a target of hidden size {hidden}, "
            f"this one has {target.config.hidden_size}"
        )
    restored = bool(settings.get("layernorms"))  # speculators: embedding, attention, lm_head
    para = bool(settings.get("add_para_norm"))  # HASS: embedding, feature

    def flag(name: str, default: bool) -> bool:
        given = settings.get(name)
        if not isinstance(given, bool | None):
            raise ValueError(f"{path}: {name}={given!r}: must be true or false")
        return default if given is None else given

    def norm(wanted: bool, *aliases: str) -> Tensor | None:
        found = next((name for name in aliases if f"{root}{name}.weight" in names), aliases[0])
        return reader.norm(root + found, hidden) if wanted else None

    fc = "fusion_fc" if f"{root}fusion_fc.weight" in names else "fc"
    # A published config without the key means that there is one (Llama 2, Vicuna, Qwen2).
    bias = flag("fusion_bias", False) if fc == "fusion_fc" else flag("bias", True)
    names.skip(f"{root}embed_tokens.weight")
    layers = [reader.layer(root + first, config, norm=flag("norm_attn", restored))]
    for i in range(1, config.num_layers):
        layers.append(reader.layer(f"{root}layers.{i}.", config))
    ids = own_ids(names, settings, draft_vocab, path, target.config.vocab_size)
    taps = _listed(settings.get("foretell_taps") or [-1], "foretell_taps", path)
    if taps == (-1,) and f"{root}fuse_down.weight" in names:
        raise ValueError(f"{path}: foretell_taps must say which layers fuse_down reads")
    if taps[-1] != -1 or not all(0 <= tap < target.config.num_layers for tap in taps[:-1]):
        raise ValueError(
            f"{path}: foretell_taps={[*taps]}: must be layers of the target, which has "
            f"{target.config.num_layers}, and -1 behind them"
        )
    head = Head(
        config=config,
        layers=layers,
        fuse=_fusion(settings, reader, root, hidden, hidden, taps, narrow=True),
        **shared(target, ids, ranks),
        rope=Rope(config, device=target.device),
        mix=reader.linear({root + fc: hidden}, 2 * hidden, bias=bias),
        norm_embed=norm(flag("norm_embed", restored or para), "embedding_layernorm"),
        norm_hidden=norm(flag("norm_hidden", para), "hidden_states_layernorm"),
        norm_out=norm(flag("norm_out", restored), "norm", "pre_lm_head_layernorm"),
        recycle_normed=flag("norm_output", False),
        ranks=ranks,
    )
    names.finish()
    vocab = DraftVocab(target.config.vocab_size, ids, target.device)
    return LoadedHead(head, taps, vocab, target.kv_dtype)


def load_eagle3(
    path: Path, target: LoadedModel, weights: Weights, draft_vocab: str = "",
    ranks: Ranks | None = None,
) -> LoadedHead:  # fmt: skip
    """EAGLE-3 and 3.1: SafeAILab, SpecForge, speculators (``transformer_layer_config``).

    Args:
        ranks: as `load_eagle`.

    Raises:
        ValueError: as `load_eagle`, or a setting that would not be computed faithfully.
    """
    settings = settings_of(path)
    reader = Reader(Placed(open_tensors(path), target.device), weights)
    names, take = reader.checkpoint, reader.checkpoint.take
    _check_kind(settings, names, "eagle3")
    root = root_of(names)
    middle = any(name.startswith(f"{root}midlayer.") for name in names)
    first = f"{root}midlayer." if middle else f"{root}layers.0."
    config = sizes(settings, reader.path, target, count_layers(names, root))
    hidden, vocab = config.hidden_size, target.config.vocab_size
    taps = _taps(settings, target.config.num_layers, path)
    width = target.config.hidden_size
    fuse = _fusion(settings, reader, root, hidden, width, taps)
    table = f"{root}embed_tokens.weight"
    if hidden == width:  # some exporters save a random one
        names.skip(table)
        embedding = shared(target, None, ranks)["embedding"]
    else:
        whole = "int8" if weights == "int4" else weights
        embedding = own_embedding(whole, take(table, vocab, hidden), config, ranks)
    ids = _d2t(names, settings, vocab)
    wanted = draft_ids(draft_vocab, path, vocab)
    if (own := "lm_head.weight") not in names:
        ids = ascending(ids if wanted is None else wanted)
        lm_head = shared(target, ids, ranks)["lm_head"]
    else:
        weight = take(own, vocab if ids is None else len(ids), hidden)
        weight, ids = rows_of(weight, ids, wanted, vocab)
        lm_head = own_projection(weights, weight, ranks)
    config = reader.split(config, ranks)
    layers = [reader.layer(first, config, wide=True, norm=False)]
    for i in range(1, config.num_layers):
        layers.append(reader.layer(f"{root}layers.{i}.", config))
    head = Head(
        config=config,
        embedding=embedding,
        layers=layers,
        lm_head=lm_head,
        rope=Rope(config, device=target.device),
        mix=None,
        fuse=fuse,
        norm_embed=reader.norm(f"{first}input_layernorm", hidden),
        norm_hidden=reader.norm(f"{first}hidden_norm", hidden),
        norm_out=reader.norm(f"{root}norm", hidden),
        # Readers of speculators' directories take an absent key as true, others as false.
        residual_normed=bool(
            settings.get("norm_before_residual", "speculators_model_type" in settings)
        ),
        recycle_normed=bool(settings.get("norm_output")),
        ranks=ranks,
    )
    names.finish()
    return LoadedHead(head, taps, DraftVocab(vocab, ids, target.device), target.kv_dtype)


def own_ids(
    names: Checkpoint,
    settings: dict[str, Any],
    draft_vocab: str,
    path: Path,
    vocab_size: int,
    prefix: str = "",
) -> Tensor | None:
    """Tokens to propose: those that are asked for, else those the head was trained on (d2t)."""
    own = _d2t(names, settings, vocab_size, prefix)
    wanted = draft_ids(draft_vocab, path, vocab_size)
    return ascending(own if wanted is None else wanted)


def _check_kind(settings: dict[str, Any], names: Checkpoint, method: str) -> None:
    """Refuses heads of other schemes, which look alike up to a few tensors."""
    kind = settings.get("speculators_model_type") or settings.get("foretell_method") or method
    if "mask_hidden" in names or settings.get("parallel_drafting"):
        kind = "peagle"
    if kind == "peagle":
        raise ValueError(
            f"{names.path}: a P-EAGLE head (mask_hidden), which drafts all tokens in one pass; "
            "that is not supported: take an EAGLE-3 head"
        )
    if kind != method:
        raise ValueError(f"{names.path}: a head for {kind}, not for {method}")


def _fusion(
    settings: dict[str, Any],
    reader: Reader,
    root: str,
    hidden: int,
    width: int,
    taps: tuple[int, ...],
    *,
    narrow: bool = False,
) -> Fusion | None:
    """What makes the tapped layers [.., taps * width] one feature [.., hidden]; None where the
    head reads the last hidden state as it is.

    Args:
        narrow: by way of a few numbers, as our EAGLE does.
    """
    fc_norm, norm_before_fc = bool(settings.get("fc_norm")), bool(settings.get("norm_before_fc"))
    if fc_norm and norm_before_fc:
        raise ValueError(f"{reader.path}: the config sets both fc_norm and norm_before_fc")
    made_for = settings.get("target_hidden_size") or (hidden if taps == (-1,) else width)
    if made_for != width:
        raise ValueError(
            f"{reader.path}: made for a target of hidden size {made_for}, this one has {width}"
        )
    if taps == (-1,):
        return None
    inputs = len(taps) * width
    norms = [reader.norm(f"{root}fc_norm.{i}", width) for i in range(len(taps)) if fc_norm]
    fc = f"{root}fuse_down" if narrow else f"{root}fc"
    shape = reader.checkpoint.shape(f"{fc}.weight") if narrow else (hidden, inputs)
    if len(shape) != 2 or not shape[0]:
        raise ValueError(f"{reader.path}: tensor {fc}.weight has shape {[*shape]}")
    rank = shape[0]
    return Fusion(
        fc=reader.linear({fc: rank}, inputs),
        up=reader.linear({f"{root}fuse_up": hidden}, rank) if narrow else None,
        part_norms=torch.stack(norms) if norms else None,
        norm=reader.norm(f"{root}input_norm", inputs) if norm_before_fc else None,
    )


def _taps(settings: dict[str, Any], num_layers: int, path: Path) -> tuple[int, ...]:
    """Layers whose outputs the head reads. Files count either the layers' outputs or the inputs
    of those behind them; a list that begins with 1 is of the first kind (as SGLang has it). Without
    them the head reads the last hidden state, as EAGLE does, and has no fc (as vLLM has it)."""
    if settings.get("use_aux_hidden_state") is False:
        return (-1,)
    inputs = [2, num_layers // 2, num_layers - 3]
    given = settings.get("eagle_aux_hidden_state_layer_ids") or inputs
    listed = _listed(given, "eagle_aux_hidden_state_layer_ids", path)
    taps = listed if listed[0] == 1 else tuple(i - 1 for i in listed)
    if not all(0 <= tap < num_layers for tap in taps):
        raise ValueError(f"{path}: layers {given} of a target that has {num_layers}")
    return taps


def _listed(given: Any, name: str, path: Path) -> tuple[int, ...]:
    """
    Raises:
        ValueError: not layer numbers.
    """
    if not isinstance(given, list) or not all(type(i) is int for i in cast(list[Any], given)):
        raise ValueError(f"{path}: {name}={given!r}: must be layer numbers")
    return tuple(cast(list[int], given))


def _d2t(
    names: Checkpoint, settings: dict[str, Any], vocab_size: int, prefix: str = ""
) -> Tensor | None:
    """Target ids of the draft vocabulary; ``d2t`` holds them less their own place.

    Raises:
        ValueError: d2t is missing, or it and t2d disagree.
    """
    size = settings.get("draft_vocab_size") or vocab_size
    if f"{prefix}d2t" not in names and size == vocab_size:
        names.skip(f"{prefix}t2d")
        return None
    offsets = names.take_any(f"{prefix}d2t", size)
    try:
        ids = DraftVocab.from_offsets(offsets, vocab_size).ids
    except ValueError as error:
        raise ValueError(f"d2t is not a table of offsets: {error}") from None
    assert ids is not None
    if f"{prefix}t2d" in names:
        known = names.take_any(f"{prefix}t2d", vocab_size).bool()
        if not torch.equal(known.nonzero()[:, 0], ids.sort().values):
            raise ValueError("d2t and t2d name different tokens: is d2t a table of offsets?")
    return ids
