"""Draft KV with the real model and runtime equals a clean rebuild, bit by bit."""

from __future__ import annotations

import random

import pytest
import torch

from foretell.attention.cpu import CpuAttention
from foretell.config import SpeculationConfig
from foretell.drafters.draft_model import DraftModel
from foretell.models import loader
from foretell.runtime.runner import Runtime
from tests.drafters import tiny

K = 4


@pytest.fixture(scope="module")
def target() -> loader.LoadedModel:
    return loader.load("smollm2", "int8", progress=False)


def cells(runtime: Runtime, count: int) -> list[torch.Tensor]:
    """The first ``count`` positions of each layer's K and V, [count, Hkv, D]."""
    assert runtime.kv is not None
    caches = [cache for layer in runtime.kv.layers["draft"] for cache in layer]
    return [cache.transpose(1, 2).flatten(0, 1)[:count] for cache in caches]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "target"])
def test_draft_kv_equals_a_clean_rebuild(
    weights: str, target: loader.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = loader.load("smollm2", "int4", progress=False) if weights == "int4" else target
    monkeypatch.setattr("foretell.drafters.draft_model.load", lambda *_, **__: draft)

    def build() -> tuple[Runtime, DraftModel]:
        runtime = Runtime(target, CpuAttention(), max_num_seqs=1, max_model_len=128, page_size=16)
        config = SpeculationConfig(method="draft-model", k=K, options={"weights": weights})
        drafter = DraftModel(config, runtime)
        runtime.allocate(9, drafter.needs.kv)
        runtime.set_pages(0, list(range(9)))
        return runtime, drafter

    (runtime, drafter), (clean_runtime, clean) = build(), build()
    rng = random.Random(0)
    text = tiny.sequence([rng.randrange(1000, 20000) for _ in range(14)])
    tiny.commit(drafter, (text, 14))
    for turn in range(8):
        drafts = tiny.chain(drafter.propose(tiny.ask([text], K)))
        clean.forget([0])
        copy = tiny.sequence(text.tokens)
        tiny.commit(clean, (copy, len(copy.tokens)))
        assert drafts == tiny.chain(clean.propose(tiny.ask([copy], K)))
        count = len(text.tokens)
        for mine, theirs in zip(cells(runtime, count), cells(clean_runtime, count), strict=True):
            assert torch.equal(mine, theirs)
        tiny.advance(drafter, [(text, [*drafts[: turn % (K + 1)], rng.randrange(20000)])])
