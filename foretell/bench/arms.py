"""Engines that are measured against each other."""

from __future__ import annotations

from collections.abc import Mapping

from foretell.config import EngineConfig, SpeculationConfig
from foretell.drafters import check
from foretell.llm import LLM
from foretell.models.loader import LoadedModel


def open_llms(
    schemes: Mapping[str, SpeculationConfig],
    engine: EngineConfig,
    most: int,
    target: LoadedModel | None = None,
) -> dict[str, LLM]:
    """An engine for each scheme, by its name, all over one target.

    Args:
        engine: its own speculation is not looked at. The prefix cache is always off: whoever
            comes second would find the prompt's pages there and win every prefill.
        most: conversations at once; there is room for so many at least.
        target: the engine's model where it is loaded already.
    """
    slots = max(most, engine.max_num_seqs)
    rows = max(slots, engine.max_num_batched_tokens)
    room = {"prefix_caching": False, "max_num_seqs": slots, "max_num_batched_tokens": rows}
    options = engine.options("model", "speculation") | room
    llms: dict[str, LLM] = {}
    for name, speculation in schemes.items():
        llms[name] = LLM(target or engine.model, speculation=speculation, **options)
        target = llms[name].target
    return llms


def parse_scheme(text: str) -> SpeculationConfig:
    """
    Raises:
        ValueError: not a scheme, or none at all.
    """
    speculation = SpeculationConfig.parse(text)
    if speculation is None:
        raise ValueError(
            f"speculation {text!r}: plain decoding is always measured; name a scheme to compare, "
            "for example prompt-lookup:k=8"
        )
    check(speculation)
    return speculation
