"""MTP: the prediction module that a model was trained with drafts for it.

DeepSeek-AI, *DeepSeek-V3 Technical Report* (2412.19437), section 2.2; Gloeckle et al. (2404.19737).
With k above 1 the module runs on its own output again and again, for which it was not trained:
acceptance falls fast behind the first token. It drafts as EAGLE does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretell.config import SpeculationConfig
from foretell.drafters.eagle import Eagle, HeadOptions
from foretell.models.mtp_formats import load_mtp
from foretell.spec.drafter import DraftRuntime
from foretell.spec.training import Rule


class MTP(Eagle):
    """Chains and trees from the first MTP module of the target's own checkpoint, or of another.
    Fine-tuned over several steps (FastMTP, 2509.18362), it may draft more than one token."""

    rule = Rule(steps=3, decay=0.6)
    read = staticmethod(load_mtp)

    @dataclass(frozen=True, kw_only=True)
    class Options(HeadOptions):
        model: str = ""
        """Directory or hub name with the module; empty is the target's own checkpoint."""
        recycle_normed: bool = True
        """Feed the module its output behind its norm, as DeepSeek and Qwen do; false before it."""

        def find(self, method: str, target: Path, sizes: dict[str, int]) -> Path:
            return super().find(method, target, sizes) if self.model else target

    def __init__(self, config: SpeculationConfig, runtime: DraftRuntime) -> None:
        super().__init__(config, runtime)
        assert isinstance(self.options, MTP.Options)
        self.head.recycle_normed = self.options.recycle_normed
