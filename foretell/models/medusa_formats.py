"""Medusa heads as others publish them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from foretell.config import Weights
from foretell.models.checkpoint import Part, Placed
from foretell.models.head import MedusaHead
from foretell.models.head_reader import Reader, draft_ids, open_tensors, rows_of, shared
from foretell.models.linear import Linear, make_linear
from foretell.models.loader import LoadedModel
from foretell.spec.draft_vocab import DraftVocab

_MERGED = ("medusa_head.", "medusa_heads.")


def load_medusa(
    path: Path, target: LoadedModel, weights: Weights, draft_vocab: str = ""
) -> tuple[list[MedusaHead], DraftVocab]:
    """Medusa heads: the authors' state dicts (``0.0.linear.weight``), the same inside a merged
    checkpoint (``medusa_head.``), and vLLM's (``blocks.0.layers.0.weight``). Heads and layers are
    counted: configs are known to be wrong.

    Raises:
        ValueError: as `load_eagle`.
    """
    source = Placed(open_tensors(path), target.device)
    merged = next((p for p in _MERGED if any(n.startswith(p) for n in source.shapes)), "")
    reader = Reader(Part(source, merged), weights)
    names, take = reader.checkpoint, reader.checkpoint.take
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    vllm = f"{merged}blocks.0.layers.0.weight" in names
    block = f"{merged}blocks.{{}}.layers.{{}}" if vllm else f"{merged}{{}}.{{}}.linear"
    ids = None
    if f"{merged}token_map" in names:
        name = f"{merged}token_map"
        ids = names.take_any(name, *names.shape(name)).long()
    known = vocab if ids is None else len(ids)
    wanted = draft_ids(draft_vocab, path, vocab)
    heads: list[MedusaHead] = []
    while f"{block.format(len(heads), 0)}.weight" in names:
        i, blocks = len(heads), list[Linear]()
        depth = 0
        while f"{(own := block.format(i, depth))}.weight" in names:
            biased = not vllm or f"{own}.bias" in names
            blocks.append(reader.linear({own: hidden}, hidden, bias=biased))
            depth += 1
        out = f"{merged}lm_heads.{i}.weight" if vllm else f"{merged}{i}.{depth}.weight"
        if vllm and out not in names:  # all share the target's
            lm_head = shared(target, _both(ids, wanted))["lm_head"]
        else:
            lm_head = make_linear(weights, rows_of(take(out, known, hidden), ids, wanted, vocab)[0])
        heads.append(MedusaHead(blocks=blocks, lm_head=lm_head))
    if not heads:
        raise ValueError(f"{path}: no Medusa head here, tensor {block.format(0, 0)}.weight")
    names.skip(f"{merged}lm_head.weight")
    names.finish()
    return heads, DraftVocab(vocab, _both(ids, wanted), target.device)


def _both(ids: Tensor | None, wanted: Tensor | None) -> Tensor | None:
    """Those of ``wanted`` that the head speaks about; None is all."""
    if ids is None or wanted is None:
        return ids if wanted is None else wanted
    return wanted[torch.isin(wanted, ids)]
