"""foretell: LLM inference built around speculative decoding. Faster, and the same text."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.answer import Delta, Result
    from foretell.config import EngineConfig, SpeculationConfig
    from foretell.llm import LLM
    from foretell.sequence import FinishReason, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Delta",
    "EngineConfig",
    "FinishReason",
    "Result",
    "SamplingParams",
    "SpeculationConfig",
]

_HOME = {
    "LLM": "llm",
    "Delta": "answer",
    "Result": "answer",
    "EngineConfig": "config",
    "SpeculationConfig": "config",
    "FinishReason": "sequence",
    "SamplingParams": "sequence",
}


def __getattr__(name: str) -> Any:
    # On first use, so that `foretell --help` and `foretell pull` never wait for torch.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
