"""The heads that come with the package: small, readable, found without being named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import foretell
from foretell.config import EngineConfig
from foretell.llm import LLM
from foretell.models.frozen import FrozenTarget
from foretell.models.hub import is_cached, packaged_head
from foretell.models.trainable_files import METHODS, open_head
from foretell.sequence import SamplingParams

HEADS = sorted((Path(foretell.__file__).parent / "heads").glob("*/config.json"))
SMOLLM2 = {"hidden_size": 576, "num_layers": 30, "vocab_size": 49152}


def test_there_is_one() -> None:
    assert packaged_head("eagle", SMOLLM2) is not None
    assert packaged_head("eagle", SMOLLM2 | {"num_layers": 31}) is None


@pytest.mark.parametrize("config", HEADS, ids=lambda path: path.parent.name)
def test_each_is_small_and_says_what_it_is(config: Path) -> None:
    settings = json.loads(config.read_text())
    assert settings["foretell_method"] in METHODS
    assert packaged_head(settings["foretell_method"], settings["foretell_target"]) == config.parent
    assert (config.parent / "model.safetensors").stat().st_size <= 12_000_000


@pytest.mark.parametrize("config", HEADS, ids=lambda path: path.parent.name)
def test_each_drafts_for_the_default_model(config: Path) -> None:
    if not is_cached(EngineConfig().model):
        pytest.skip("the default model is not on this machine: foretell pull smollm2")
    method = json.loads(config.read_text())["foretell_method"]
    llm = LLM(speculation=f"{method}:adaptive=false", threads=1, max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=48)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    (mine,), (plain,) = llm.chat(messages, params), llm.chat(messages, params, speculate=False)
    assert mine.token_ids == plain.token_ids
    assert mine.stats.accepted > 5
    head = open_head(method, config.parent, FrozenTarget.open(EngineConfig().model))
    assert head.config["foretell_method"] == method
