"""Heads to be trained: fresh ones, and ones that learn to read more of the target."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from foretell.models.frozen import FrozenTarget
from foretell.models.trainable import Block, Parts, TrainableHead
from foretell.models.trainable_files import METHODS, Trainable
from foretell.models.trainable_medusa import TrainableMedusa

_RANK = 128
"""Of what an EAGLE head's further layers add to the last state. (Measured: of a whole matrix that
was fitted, so many of 576 directions hold 85%, half as many 69% and five sixths of the gain.)"""


def new_head(
    method: str,
    target: FrozenTarget,
    *,
    norms: bool = True,
    draft_ids: Tensor | None = None,
    num_layers: int = 1,
    num_heads: int = 4,
    taps: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Trainable:
    """A head to be trained: fresh layers that add nothing yet, over the target's own feature.

    Args:
        norms: of an EAGLE head: with its norms restored (ours), or as published.
        draft_ids: [Vd] the tokens it may propose, ascending; None: all.
        num_layers: of an EAGLE, EAGLE-3 or MTP head, or of each Medusa head.
        num_heads: of Medusa.
        taps: the target's layers that it reads, by their outputs. EAGLE-3: three, by default 1,
            N/2 - 1 and N - 4, as published. EAGLE: any, and then -1, the final norm's output.

    Raises:
        ValueError: a method that is not trained, or a size that makes no head.
    """
    for name, value in {"layers": num_layers, "heads": num_heads}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    depth = target.config.num_layers
    if taps is not None:
        _check_taps(method, taps, depth, norms)
    if method == "medusa":
        return TrainableMedusa(target, num_heads, num_layers, draft_ids)
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not trained: choose one of {', '.join(METHODS)}")
    config = replace(target.config.dense, num_layers=num_layers, windows=None)
    if method == "mtp" and num_layers > 1:
        raise ValueError("an MTP module has one layer: leave layers out")
    eagle3 = method == "eagle3"
    default = tuple(max(0, layer) for layer in (1, depth // 2 - 1, depth - 4)) if eagle3 else (-1,)
    taps = taps or default
    restored = norms or method != "eagle"
    flags = dict.fromkeys(("norm_embed", "norm_hidden", "norm_attn", "norm_out"), restored)
    parts = Parts(
        taps=taps, mix=not eagle3, **flags,
        attention_bias=config.attention_bias, qk_norm=config.qk_norm,
        norm_output=norms and not eagle3,
    )  # fmt: skip
    if not eagle3 and taps != (-1,):
        parts = _wide(parts, taps, config.hidden_size)
    torch.manual_seed(seed)
    head = TrainableHead(method, target, config, parts, draft_ids)
    _begin(head)
    return head


def widen(
    head: Trainable, target: FrozenTarget, taps: tuple[int, ...], seed: int = 0
) -> TrainableHead:
    """An EAGLE head that reads further layers of the target, and does not heed them yet: what it
    guesses is the same.

    Raises:
        ValueError: another head, one that has further layers already, or no layers of the target.
    """
    if not isinstance(head, TrainableHead) or head.method != "eagle":
        raise ValueError(f"taps={taps}: a head of {head.method} does not learn to read more layers")
    if head.taps != (-1,):
        raise ValueError(f"taps={taps}: this head reads {head.taps} already: leave taps out")
    parts = head.parts
    _check_taps("eagle", taps, target.config.num_layers, parts.norm_hidden)
    parts = _wide(parts, taps, head.sizes.hidden_size)
    torch.manual_seed(seed)
    out = TrainableHead("eagle", target, head.sizes, parts, head.draft_ids)
    out.load_state_dict(head.state_dict(), strict=False)
    assert out.fuse_up is not None
    nn.init.zeros_(out.fuse_up.weight)
    return out


def _wide(parts: Parts, taps: tuple[int, ...], hidden: int) -> Parts:
    return replace(parts, taps=taps, fc_norm=True, fuse_rank=min(_RANK, hidden))


def _check_taps(method: str, taps: tuple[int, ...], depth: int, norms: bool) -> None:
    """
    Raises:
        ValueError: not what such a head reads of a target with so many layers.
    """
    if method == "eagle3" and not all(1 <= tap < depth for tap in taps):
        raise ValueError(f"taps={taps}: EAGLE-3 takes layers of the target, 1 to {depth - 1}")
    if method not in ("eagle", "eagle3") and taps != (-1,):
        raise ValueError(f"taps={taps}: a head of {method} reads -1 alone")
    if method == "eagle" and not (taps[-1] == -1 and all(0 <= tap < depth for tap in taps[:-1])):
        raise ValueError(
            f"taps={taps}: EAGLE takes layers of the target, 0 to {depth - 1}, and -1 behind them"
        )
    if method == "eagle" and len(taps) > 1 and not norms:
        raise ValueError(f"taps={taps}: an EAGLE head without its norms reads -1 alone")


@torch.no_grad()
def _begin(head: TrainableHead) -> None:
    """The feature goes through as it is, and the layers begin by adding nothing. (Measured: copies
    of the target's last layer learn half as fast as fresh ones.)"""
    hidden = head.sizes.hidden_size
    if head.fuse_up is not None:
        nn.init.zeros_(head.fuse_up.weight)
    for linear in (head.mix, None if head.fuse_up else head.fuse):
        if linear is not None and linear.in_features % hidden == 0:
            nn.init.normal_(linear.weight, std=0.02)
            linear.weight[:, -hidden:] += torch.eye(hidden)
    for layer in head.layers:
        assert isinstance(layer, Block)
        nn.init.zeros_(layer.o.weight)
        nn.init.zeros_(layer.down.weight)
