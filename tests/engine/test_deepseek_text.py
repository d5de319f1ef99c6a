"""DeepSeek's models in the engine: the text does not depend on the drafts, its own module's or
others', and what the module keeps is that of a clean run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from foretell.models.loader import LoadedModel, load
from tests import tiny
from tests.drafters import test_heads_in_engine as heads_in_engine
from tests.models.tiny import save_with_mtp

CHAIN, TREE = heads_in_engine.CHAIN, heads_in_engine.TREE
SETTINGS = [tiny.greedy(max_tokens=24), tiny.sampled(max_tokens=24)] * 4
"""What each of the prompts is asked with, side by side in one batch."""
PROMPTS = tiny.prompts(len(SETTINGS))


@cache
def checkpoint() -> Path:
    save_with_mtp(path := Path(mkdtemp()), vocab_size=tiny.VOCAB, initializer_range=0.3)
    return path


@cache
def model(weights: str = "f32", seed: int = 0, max_positions: int = 512) -> LoadedModel:
    return load(str(checkpoint()), weights, progress=False)


@pytest.fixture(autouse=True)
def deepseek(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of `tests.tiny` run this target."""
    monkeypatch.setattr(tiny, "model", model)


@cache
def plain(weights: str) -> list[list[int]]:
    engine = tiny.llm(weights=weights, max_num_seqs=1, prefix_caching=False)
    return tiny.ids(engine.generate(PROMPTS, SETTINGS))


@pytest.mark.parametrize(
    ("scheme", "weights"),
    [
        ("prompt-lookup:k=8,ngram_min=1", "f32"),
        (f"mtp:{CHAIN[1:]}", "f32"),
        (f"mtp:{TREE[1:]}", "f32"),
        ("draft-model:weights=int4,k=3", "f32"),
        *((f"mtp:{CHAIN[1:]}", weights) for weights in ("int8", "bf16", "int4")),
        ("tests.fakes:Bushy,k=24", "int8"),
    ],
)
def test_same_text(scheme: str, weights: str) -> None:
    engine = tiny.llm(scheme, weights)
    results = engine.generate(PROMPTS, SETTINGS)
    assert tiny.ids(results) == plain(weights)
    assert sum(result.stats.drafted for result in results) > 0
    assert not engine.engine.metrics.drafter_errors, engine.engine.metrics.last_drafter_error
    tiny.check_idle(engine)
    assert tiny.ids(engine.generate(PROMPTS, SETTINGS)) == plain(weights)  # warm


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_the_modules_cache_is_that_of_a_clean_rebuild(shape: str) -> None:
    scheme = f"mtp:model={checkpoint()}{shape}"
    heads_in_engine.test_draft_kv_is_that_of_a_clean_rebuild(scheme, "f32")


def test_a_module_that_is_always_right_gives_depth_plus_one() -> None:
    heads_in_engine.test_a_head_that_is_always_right_gives_depth_plus_one(f"mtp:{CHAIN[1:]}")


def test_a_target_drafting_for_itself_is_always_accepted() -> None:
    engine = tiny.llm("draft-model:weights=target,k=4", "int8")
    results = engine.generate(PROMPTS, SETTINGS)
    assert tiny.ids(results) == plain("int8")
    for result in results:
        assert result.stats.accepted == result.stats.drafted > 0
