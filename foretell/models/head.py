"""One configurable draft head: decoder layers over pairs of a feature and the token after it.

Slot i pairs the target's hidden state of position i, the feature, with the embedding of token
i + 1, and says what token i + 2 may be; its own hidden state is the feature of the next draft
token. EAGLE (2401.15077), EAGLE-3 (2503.01840) and the MTP modules of DeepSeek-V3 (2412.19437)
are this network with other parts left out:

| | embedding and feature | attention reads | logits from | next feature |
|---|---|---|---|---|
| EAGLE | fc(cat) | the sum, no norm | the sum | the sum |
| norm-restored, MTP | fc(cat of both normed) | its norm | its norm | its norm |
| EAGLE-3 | fc(three features) | cat of both normed | its norm | the sum |

Medusa (2401.10774) has no layer at all: each of its heads guesses one place ahead on its own.

Holds no state of any request. Embedding and lm_head are the target's own wherever they can be.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.rows import rms_norm
from foretell.models.config import ModelConfig
from foretell.models.layer import Layer
from foretell.models.linear import Embedding, Linear
from foretell.models.mla import LatentLayer
from foretell.models.rope import Rope
from foretell.models.sharding import Ranks, Steps
from foretell.models.spread import straight, through_layers, total
from foretell.models.whole_pass import WholePass, can_run, whole_pass


@dataclass(slots=True, kw_only=True)
class Fusion:
    """Several of the target's layers into one feature: fc(cat), with norms on the parts or on
    the whole where there are any (EAGLE-3.1). Our EAGLE adds to the last part what all of them say
    in a few numbers, up(fc(cat)): a quarter of the work of a matrix over all."""

    fc: Linear  # taps * H_target -> H, or the few numbers
    up: Linear | None = None  # these -> H
    part_norms: Tensor | None = None  # [taps, H_target]
    norm: Tensor | None = None  # [taps * H_target]

    @torch.inference_mode()
    def __call__(self, features: Tensor, eps: float) -> Tensor:
        """[R, taps * H_target] -> [R, H]."""
        if self.part_norms is not None:
            size = self.part_norms.shape[1]
            normed = rms_norm(features.reshape(-1, size), self.part_norms.new_ones(size), eps)
            features = normed.view_as(features).mul_(self.part_norms.flatten())
        if self.norm is not None:
            features = rms_norm(features, self.norm, eps)
        if self.up is None:
            return self.fc(features)
        beside = self.up(self.fc(features))
        return beside.add_(features[:, -beside.shape[1] :])


@dataclass(slots=True, kw_only=True)
class Head:
    """A head's network.

    Args:
        config: sizes and RoPE of its layers; vocab_size is the target's.
        mix: of cat(embedding, feature), [2 H] -> [H]; None where the first layer's attention
            reads both side by side (EAGLE-3).
        fuse: makes the feature out of the target's tapped layers; None where one is tapped.
        residual_normed: the first residual is the normed feature (``norm_before_residual``).
        recycle_normed: the next feature is what the lm_head reads, not the sum before its norm.
        ranks: those that it is spread over, as `Decoder` has them; ``mix`` and ``fuse`` are whole.
    """

    config: ModelConfig
    embedding: Embedding
    layers: list[Layer] | list[LatentLayer]
    lm_head: Linear
    rope: Rope
    mix: Linear | None
    fuse: Fusion | None = None
    norm_embed: Tensor | None = None  # [H]
    norm_hidden: Tensor | None = None  # [H]
    norm_out: Tensor | None = None  # [H]
    residual_normed: bool = False
    recycle_normed: bool = False
    ranks: Ranks | None = None
    whole_pass: WholePass | None = field(init=False)

    def __post_init__(self) -> None:
        compiled = None if self.config.mla or self.ranks else whole_pass(self, self.norm_out, self)
        self.whole_pass = compiled

    def feature(self, tapped: Tensor) -> Tensor:
        """What `run` takes of the target's tapped layers [R, taps * H_target]: the feature [R, H],
        or the layers where its compiled pass makes the feature of them."""
        compiled = self.whole_pass and tapped.shape[1] > self.config.hidden_size
        return tapped if compiled or self.fuse is None else self._fused(tapped)

    def _fused(self, tapped: Tensor) -> Tensor:
        assert self.fuse is not None
        return self.fuse(tapped, self.config.rms_norm_eps)

    @torch.inference_mode()
    def run(
        self,
        tokens: Tensor,
        features: Tensor,
        outputs: Tensor,
        attention: Attention,
        layout: Layout,
        kv: SequenceOf[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Runs pairs and writes their keys and values, in one compiled call where that can be had;
        ``attention`` is planned for ``layout``.

        Args:
            tokens: [R] the tokens after the features' positions.
            features: [R, H] float32, or what `feature` says.
            outputs: [O] rows whose logits and features are wanted, ascending.
            kv: for each layer the caches [num_pages, Hkv, page_size, D] of keys and values.

        Returns:
            Logits [O, Vd] float32 and the features [O, H] of the pairs that follow.
        """
        self.rope.cover(layout.positions)
        if self.whole_pass and len(tokens) and can_run(attention, kv):
            taps = () if self.recycle_normed else (len(self.layers) - 1,)
            logits, hidden, tapped = self.whole_pass(
                tokens, attention, layout, kv, outputs, taps, features.contiguous(), narrow=True
            )
            following = hidden if self.recycle_normed else tapped
            many = len(following) > len(outputs)
            return logits, following[: len(outputs)] if many else following

        if features.shape[1] > self.config.hidden_size:
            features = self._fused(features)

        def steps() -> Steps[tuple[Tensor, Tensor]]:
            embedded = yield from total(self.embedding(tokens), self.ranks)
            hidden, x = self._start(embedded, features)
            network, norm = self, self.norm_out
            hidden, _ = yield from through_layers(network, norm, hidden, x, attention, layout, kv)
            return hidden, x

        hidden, x = straight(steps())
        rows = outputs.long()
        normed = hidden[rows]  # [O, H]
        return self.lm_head(normed), normed if self.recycle_normed else x[rows]

    def _start(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the first attention [R, H or 2 H] and the residual [R, H], to be added to."""
        eps, first = self.config.rms_norm_eps, self.layers[0].input_norm
        if self.norm_embed is not None:
            embedded = rms_norm(embedded, self.norm_embed, eps)
        normed = features
        if self.norm_hidden is not None:
            normed = rms_norm(features, self.norm_hidden, eps)
        pair = torch.cat([embedded, normed], dim=1)  # [R, 2 H]
        if self.mix is None:
            return pair, (normed if self.residual_normed else features).clone()
        x = self.mix(pair)
        return (x.clone() if first is None else rms_norm(x, first, eps)), x


@dataclass(slots=True, kw_only=True)
class MedusaHead:
    """Guesses one token, some places behind a hidden state: blocks x + silu(Wx + b), then a
    projection of its own."""

    blocks: list[Linear]  # H -> H
    lm_head: Linear  # H -> Vd

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states [R, H] behind the target's final norm -> logits [R, Vd]."""
        for block in self.blocks:
            x = x + torch.nn.functional.silu(block(x))
        return self.lm_head(x)
