"""How its maker recommends to sample a model: for requests that say nothing about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.models.hub import PACKAGED
from foretell.sequence import SamplingParams

log = logging.getLogger(__name__)
_OFF = {"top_k": -1}  # as some write it
NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Fields of generation_config.json that count, and what GGUF's ``general.sampling`` calls them."""


def recommended(path: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that a model comes with.

    Args:
        path: of the model; a packaged one's are known.
        said: its generation_config.json, or the metadata of its .gguf file.

    Returns:
        Fields of `SamplingParams`. What these do not take is left out, with a warning.
    """
    found: dict[str, Any] = {}
    for packaged in PACKAGED.values():
        if path.name == packaged.filename:
            found |= packaged.sampling
    for name, short in NAMES.items():
        value = said.get(name, said.get(f"general.sampling.{short}"))
        if value is None or value == _OFF.get(name):
            continue
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            log.warning("%s: the sampling it recommends is left out: %s", path, error)
        else:
            found[name] = value
    return found
