"""L: batches of unlike requests, and models in unlike weight formats."""

from __future__ import annotations

import random

import pytest

from foretell.models.loader import load
from tests import tiny
from tests.fakes import Scripted
from tests.faults.pairs import write_pair
from tests.faults.white_box import start

PROMPTS = [(p * 9)[: 1 + 7 * i] for i, p in enumerate(tiny.prompts(16, seed=21))]


@pytest.mark.parametrize("settings", ["greedy", "sampled"])
@pytest.mark.parametrize(
    "scheme",
    ["tests.fakes:Mixed,k=7", "tests.fakes:Noise,k=20", "draft-model:weights=int4,k=4"],
)
def test_L1_right_alone_and_in_any_batch(scheme, settings, monkeypatch):
    """Staggered arrivals, unlike lengths, some without drafts; Mixed begins each slot elsewhere."""
    params = tiny.greedy() if settings == "greedy" else tiny.sampled()
    plain = tiny.plain(PROMPTS, params)
    answers = {tuple(p): a for p, a in zip(PROMPTS, plain, strict=True)}
    monkeypatch.setattr(Scripted, "answers", answers)
    alone = tiny.llm(scheme, max_num_seqs=1)
    assert tiny.ids(alone.generate(PROMPTS, params)) == plain
    for seed, size in ((0, 16), (1, 5), (2, 2)):
        llm = tiny.llm(scheme, max_num_seqs=size, max_num_batched_tokens=100)
        rng, waiting = random.Random(seed), list(range(16))
        rng.shuffle(waiting)
        sequences = {}
        while waiting or llm.engine.has_work:
            for _ in range(rng.choice([0, 0, 1, 3])):
                if waiting:
                    i = waiting.pop()
                    (sequences[i],) = start(llm, [PROMPTS[i]], params)
                    sequences[i].speculate = i % 5 != 3
            llm._step()
            llm.engine.check()
        assert [sequences[i].output for i in range(16)] == plain
        assert sum(s.stats.drafted for s in sequences.values()) > 100
        assert all(not sequences[i].stats.drafted for i in (3, 8, 13))
        tiny.check_idle(llm)


@pytest.mark.parametrize("draft", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("target", ["f32", "int8"])
def test_L5_every_pair_of_weight_formats(target, draft, tmp_path):
    """Each model has its own format and its own config, and the text is the target's."""
    path, other = write_pair(tmp_path, draft_seed=3)
    options = {"weights": target, "page_size": 4, "kv_memory": "4MiB", "threads": 1}
    model = load(str(path), target, progress=False)
    from foretell.llm import LLM

    plain = tiny.ids(LLM(model, max_num_seqs=1, **options).generate(PROMPTS[:6], tiny.greedy()))
    for spec in (f"weights={draft}", f"model={other},weights={draft}"):
        llm = LLM(model, speculation=f"draft-model:{spec},k=4,adaptive=false", **options)
        results = llm.generate(PROMPTS[:6], tiny.greedy())
        assert tiny.ids(results) == plain
        assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
        own = llm.engine.drafter.draft
        assert (own.weights, llm.target.weights) == (draft, target)
        assert own.kv_dtype == llm.engine.runtime.kv.layers["draft"][0][0].dtype
        assert sum(r.stats.drafted for r in results) > 0
        if "model" not in spec:  # the same weights, coarser at most: it guesses well
            assert sum(r.stats.accepted for r in results) > 0
