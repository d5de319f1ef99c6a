"""MTP: the prediction module that a model was trained with drafts for it.

DeepSeek-AI, *DeepSeek-V3 Technical Report* (2412.19437), section 2.2; Gloeckle et al. (2404.19737).
With k above 1 the module runs on its own output again and again, for which it was not trained:
acceptance falls fast behind the first token. It drafts as EAGLE does.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.config import Weights
from foretell.drafters.eagle import Eagle, HeadOptions
from foretell.models.head_formats import LoadedHead
from foretell.models.mtp_formats import load_mtp
from foretell.spec.training import Rule


class MTP(Eagle):
    """Chains and trees from the first MTP module of the target's own checkpoint, or of another.
    Fine-tuned over several steps (FastMTP, 2509.18362), it may draft more than one token."""

    rule = Rule(steps=3, decay=0.6)

    @dataclass(frozen=True, kw_only=True)
    class Options(HeadOptions):
        model: str = ""
        """Directory or hub name with the module; empty is the target's own checkpoint."""
        recycle_normed: bool = True
        """Feed the module its output behind its norm, as DeepSeek and Qwen do; false before it."""

    def load(self, weights: Weights) -> LoadedHead:
        options, target = self.options, self.runtime.target
        assert isinstance(options, MTP.Options)
        path = options.find("mtp", target) if options.model else target.path
        recycle = options.recycle_normed
        return load_mtp(path, target, weights, options.draft_vocab, recycle_normed=recycle)
