"""The forward pass of every architecture: one decoder, differing in its config and its layers.

Holds no state of any request: keys and values live in the caches that are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.rows import rms_norm
from foretell.models import spread
from foretell.models.config import ModelConfig
from foretell.models.layer import Layer
from foretell.models.linear import Embedding, Linear
from foretell.models.mla import LatentLayer
from foretell.models.rope import Rope
from foretell.models.sharding import Ranks, Steps
from foretell.models.whole_pass import can_run, whole_pass


class Decoder:
    """A model without state.

    Args:
        config: sizes and variants.
        layers: one for each of config.num_layers, all of one class.
        norm: [H] float32, the final norm's weight.
        ranks: those that it is spread over. Then layers' products are terms of sums, the embedding
            gives zeros for tokens of other ranks, and the lm_head gathers its outputs by itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: SequenceOf[Layer | LatentLayer],
        norm: Tensor,
        lm_head: Linear,
        rope: Rope,
        ranks: Ranks | None = None,
    ) -> None:
        assert len(layers) == config.num_layers
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.rope = rope
        self.ranks = ranks
        self.listeners: tuple[spread.Listener, spread.Listener] | None = None
        """Of passes in halves."""
        self.whole_pass = None if config.mla or ranks else whole_pass(self, norm)

    @torch.inference_mode()
    def run(
        self,
        tokens: Tensor,
        attention: Attention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        outputs: Tensor,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Runs rows and writes their keys and values, in one compiled call where that can be had;
        `attention` is planned for ``layout``.

        Args:
            tokens: [R] int32.
            kv: for each layer the caches [num_pages, Hkv, page_size, D] of keys and values.
            outputs: [O] int32, rows whose logits are wanted.
            taps: layers whose output is wanted; -1 is the final norm's output.

        Returns:
            Logits [O, V] float32, and the tapped hidden states side by side [R, len(taps) * H]
            float32 or None.
        """
        self.rope.cover(layout.positions)
        if self.whole_pass and len(tokens) and can_run(attention, kv):
            logits, hidden, features = self.whole_pass(
                tokens, attention, layout, kv, outputs, taps,
                narrow=-1 not in taps and len(self.layers) - 1 not in taps,
            )  # fmt: skip
            if taps == (-1,):  # that comes out in any case
                return logits, hidden
            width = hidden.shape[1]
            for i, tap in enumerate(taps):
                if tap == -1:
                    features[:, i * width : (i + 1) * width] = hidden
            return logits, features if taps else None

        def steps(
            tokens: Tensor, attention: Attention, layout: Layout
        ) -> Steps[tuple[Tensor, Tensor | None]]:
            x = yield from spread.total(self.embedding(tokens), self.ranks)  # [R, H]
            first = self.layers[0].input_norm
            assert first is not None
            hidden = rms_norm(x, first, self.config.rms_norm_eps)
            hidden, tapped = yield from spread.through_layers(
                self, self.norm, hidden, x, attention, layout, kv, taps
            )
            tapped[-1] = hidden
            return hidden, torch.cat([tapped[tap] for tap in taps], dim=1) if taps else None

        if not self.ranks or not self.ranks.halves or not (border := spread.half_of(layout)):
            hidden, features = spread.straight(steps(tokens, attention, layout))
        else:
            halves = [slice(0, border), slice(border, None)]
            passes = [
                steps(tokens[rows], *spread.planned_for(rows, attention, layout)) for rows in halves
            ]
            hidden, features = spread.in_halves(passes, self.listeners)
        return self.lm_head(hidden[outputs]), features
