"""The forward pass of every architecture: one decoder, differing in its config and its layers.

Holds no state of any request: keys and values live in the caches that are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.rows import add_rms_norm, rms_norm
from foretell.models.config import ModelConfig
from foretell.models.layer import Layer
from foretell.models.linear import Embedding, Linear
from foretell.models.mla import LatentLayer
from foretell.models.rope import Rope
from foretell.models.whole_pass import can_run, whole_pass


class Decoder:
    """A model without state.

    Args:
        config: sizes and variants.
        layers: one for each of config.num_layers, all of one class.
        norm: [H] float32, the final norm's weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: SequenceOf[Layer | LatentLayer],
        norm: Tensor,
        lm_head: Linear,
        rope: Rope,
    ) -> None:
        assert len(layers) == config.num_layers
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.rope = rope
        self.whole_pass = None if config.mla else whole_pass(self, norm)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,  # [R] int64 or int32
        attention: Attention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Runs rows and writes their keys and values; `attention` is planned for ``layout``.

        Args:
            tokens: [R].
            kv: for each layer the caches [num_pages, Hkv, page_size, D] of keys and values.
            taps: layers whose output is wanted; -1 is the final norm's output.

        Returns:
            Hidden states [R, H] float32 after the final norm, and the tapped ones side by side
            [R, len(taps) * H] float32 or None.
        """
        config, layers, eps = self.config, self.layers, self.config.rms_norm_eps
        self.rope.cover(layout.positions)
        x = self.embedding(tokens)  # [R, H]
        assert layers[0].input_norm is not None
        hidden = rms_norm(x, layers[0].input_norm, eps)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(layers):
            seen = layer.attend(hidden, config, self.rope, attention, layout, kv[i])
            # Each norm also adds to x, in place, what the block before it put out.
            hidden = add_rms_norm(seen, x, layer.post_norm, eps)
            out = layer.feed(hidden)
            following = layers[i + 1].input_norm if i + 1 < len(layers) else self.norm
            assert following is not None
            hidden = add_rms_norm(out, x, following, eps)
            if i in taps:
                tapped[i] = x.clone()
        if not taps:
            return hidden, None
        tapped[-1] = hidden
        return hidden, torch.cat([tapped[tap] for tap in taps], dim=1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [O, V] float32 of hidden states [O, H]."""
        return self.lm_head(hidden)

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
        """`forward` and then the logits of rows ``outputs`` [O] int32, in one compiled call where
        that can be had.

        Returns:
            Logits [O, V] float32, and the tapped hidden states as `forward` gives them.
        """
        if self.whole_pass is None or not len(tokens) or not can_run(attention, kv):
            hidden, features = self.forward(tokens, attention, layout, kv, taps)
            return self.logits(hidden[outputs]), features
        self.rope.cover(layout.positions)
        logits, hidden, features = self.whole_pass(tokens, attention, layout, kv, outputs, taps)
        width = hidden.shape[1]
        for i, tap in enumerate(taps):
            if tap == -1:
                features[:, i * width : (i + 1) * width] = hidden
        return logits, features if taps else None
