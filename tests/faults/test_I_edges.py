"""I: edges of length and shape. Tiny limits, exact lengths, nothing to draft."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from foretell.config import EngineConfig, SpeculationConfig
from foretell.engine import engine as engine_module
from foretell.llm import LLM
from foretell.models.loader import load
from foretell.sequence import FinishReason
from foretell.spec.tree import depths
from tests import tiny
from tests.fakes import Scripted
from tests.faults.pairs import write_pair


def log_asks(llm: LLM) -> list[tuple[int, int, int]]:
    """(length, answer's length, depth) of every tree that the drafter was asked for."""
    out: list[tuple[int, int, int]] = []
    inner = llm.engine.drafter.propose

    def propose(ask):
        pairs = zip(ask.sequences, ask.depths, strict=True)
        out.extend((len(s.tokens), s.num_output, depth) for s, depth in pairs)
        return inner(ask)

    llm.engine.drafter.propose = propose
    return out


@pytest.mark.parametrize(
    "scheme", ["draft-model:weights=target", "prompt-lookup", "tests.fakes:Hostile"]
)
@pytest.mark.parametrize("k", [1, 4, 8, 63])
def test_I1_drafts_end_at_the_model_length(scheme, k, monkeypatch):
    prompts = [tiny.prompts(1, seed=i, longest=2)[0] * i for i in range(1, 64)][
        :: 1 if k == 8 else 5
    ]
    prompts.append(list(range(1, 64)))  # one place left
    limits = {"max_model_len": 64, "max_num_batched_tokens": 128}
    plain = tiny.ids(tiny.llm(**limits).generate(prompts, tiny.greedy(max_tokens=None)))
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    monkeypatch.setattr(Scripted, "answers", answers)
    llm = tiny.llm(f"{scheme}{',' if ':' in scheme else ':'}k={k}", **limits)
    asks = log_asks(llm)
    results = llm.generate(prompts, tiny.greedy(max_tokens=None))
    assert tiny.ids(results) == plain
    for prompt, result in zip(prompts, results, strict=True):
        assert result.finish_reason == FinishReason.LENGTH
        assert len(prompt) + len(result.token_ids) == 64
    assert all(depth <= max(0, min(k, 64 - length - 1)) for length, _, depth in asks)
    assert any(depth == min(k, 64 - length - 1) > 0 for length, _, depth in asks)
    asks.clear()
    llm.generate(prompts[:4], tiny.greedy(max_tokens=7))
    assert all(depth <= max(0, 7 - answered - 1) for _, answered, depth in asks)
    assert not llm.engine.metrics.drafter_errors
    with pytest.raises(ValueError, match="max_model_len is 64"):
        llm.generate([[5] * 64])


@pytest.mark.parametrize("max_tokens", [None, 9])
@pytest.mark.parametrize("params", [tiny.greedy(), tiny.sampled()], ids=["greedy", "seeded"])
def test_I1_trees_stay_wide_to_the_end(params, max_tokens, monkeypatch):
    """An answer's end limits depth: with two tokens to come a tree of one level may have as many
    nodes as ever."""
    limits = {"max_model_len": 64, "max_num_batched_tokens": 256}
    prompts = [tiny.prompts(1, seed=i)[0] for i in range(9)]
    params = replace(params, max_tokens=max_tokens)
    plain = tiny.ids(tiny.llm(**limits).generate(prompts, params))
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    monkeypatch.setattr(Scripted, "answers", answers)
    llm = tiny.llm("tests.fakes:Bushy,k=40", **limits)
    lay_out, sizes = engine_module.lay_out, []

    def watch(items, tree, wants):
        for item, (tokens, parents) in zip(items, tree.lists, strict=True):
            assert max(depths(parents)) <= item.depth
            if 0 < item.depth <= 7:
                assert item.budget > 20, "nodes are shared by rows alone"
                sizes.append(len(tokens) - 1)
        return lay_out(items, tree, wants)

    monkeypatch.setattr(engine_module, "lay_out", watch)
    assert tiny.ids(llm.generate(prompts, params)) == plain
    tiny.check_idle(llm)
    assert not llm.engine.metrics.drafter_errors
    assert max(sizes) > 14


def test_I1_drafts_take_what_pages_are_left(monkeypatch):
    """Pages for one sequence of the longest length and none for scratch: drafts get shorter."""
    prompt = tiny.prompts(1, seed=3, longest=9)[0]
    (plain,) = tiny.ids(tiny.llm(max_model_len=64).generate(prompt, tiny.greedy(max_tokens=None)))
    monkeypatch.setattr(Scripted, "answers", {tuple(prompt): plain})
    llm = tiny.llm("tests.fakes:Oracle,k=12", max_model_len=64, max_num_seqs=1, kv_memory="17KiB")
    assert llm.engine.cache.num_pages == 17
    asks = log_asks(llm)
    (result,) = llm.generate(prompt, tiny.greedy(max_tokens=None))
    assert result.token_ids == plain
    assert asks[-1][0] + asks[-1][2] == 63, "the last draft reaches the end"


@pytest.mark.parametrize("length", [30, 31, 32, 33, 40])
def test_I2_a_draft_with_a_shorter_position_table(length, tmp_path):
    target, draft = write_pair(tmp_path, draft_positions=32)
    options = {
        "weights": "f32",
        "page_size": 4,
        "kv_memory": "4MiB",
        "threads": 1,
        "max_model_len": 128,
    }
    prompts = [tiny.prompts(1, seed=9, longest=3)[0] * 64, [7, 8, 9]]
    prompts[0] = prompts[0][:length]
    plain = tiny.ids(LLM(str(target), **options).generate(prompts, tiny.greedy()))
    scheme = f"draft-model:model={draft},weights=f32,k=4,adaptive=false"
    llm = LLM(str(target), speculation=scheme, **options)
    positions: list[int] = []
    inner = llm.engine.runtime.forward

    def forward(model, rows):
        positions.extend(rows.positions)
        return inner(model, rows)

    llm.engine.runtime.forward = forward
    results = llm.generate(prompts, tiny.greedy())
    assert tiny.ids(results) == plain
    assert max(positions) < 32
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    assert results[1].stats.drafted > 0, "the short one drafts until position 32"
    assert (results[0].stats.drafted > 0) == (length < 31)
    # The draft has the target's own weights: what it can see it guesses.
    assert results[1].stats.accepted == results[1].stats.drafted


def test_I3_drafts_come_back_after_a_request_too_long_for_the_draft(tmp_path):
    target, draft = write_pair(tmp_path, draft_positions=64)
    options = {
        "weights": "f32",
        "page_size": 4,
        "kv_memory": "4MiB",
        "threads": 1,
        "max_num_seqs": 1,
    }
    long, short = tiny.greedy(max_tokens=300), tiny.greedy(max_tokens=20)
    plain = LLM(str(target), **options)
    scheme = f"draft-model:model={draft},weights=f32,k=4,adaptive=false"
    llm = LLM(str(target), speculation=scheme, **options)
    prompt = list(range(2, 62))
    for _ in range(2):  # cold, then through the prefix cache
        assert tiny.ids(llm.generate([prompt], long)) == tiny.ids(plain.generate([prompt], long))
        (result,) = llm.generate([[5, 6, 7]], short)
        assert [result.token_ids] == tiny.ids(plain.generate([[5, 6, 7]], short))
        assert result.stats.drafted == result.stats.accepted > 0
        assert not llm.engine.metrics.drafter_errors
    llm = LLM(str(target), speculation="prompt-lookup:k=8,ngram_min=1,adaptive=false", **options)
    assert tiny.ids(llm.generate([prompt], long)) == tiny.ids(plain.generate([prompt], long))


@pytest.mark.parametrize("k", [1, 2, 3, 16])
def test_I4_small_limits_in_any_combination(k, monkeypatch):
    prompts = tiny.prompts(3)
    params = tiny.greedy(max_tokens=18)
    plain = tiny.ids(tiny.llm().generate(prompts, params))
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    monkeypatch.setattr(Scripted, "answers", answers)
    for scheme in ("draft-model:weights=target", "tests.fakes:Mixed"):
        for seqs in {1, 2, k, 2 * k + 1}:
            for rows in (k + 1, 2 * k + 1, 512):
                limits = {"max_num_seqs": seqs, "max_num_batched_tokens": rows}
                if rows < seqs:
                    with pytest.raises(ValueError, match="max_num_batched_tokens"):
                        tiny.llm(f"{scheme},k={k}", **limits)
                    continue
                llm = tiny.llm(f"{scheme},k={k}", **limits)
                results = llm.generate(prompts, params)
                assert tiny.ids(results) == plain, (scheme, limits)
                assert sum(result.stats.drafted for result in results) > 0
                tiny.check_idle(llm)


@pytest.mark.parametrize("k", [0, 64, 100])
def test_I4_illegal_lengths_are_refused(k):
    with pytest.raises(ValueError, match="must be from 1 to 63"):
        SpeculationConfig(method="prompt-lookup", k=k)
    with pytest.raises(ValueError, match="lower k"):
        EngineConfig(
            speculation=SpeculationConfig(method="prompt-lookup", k=8),
            max_num_seqs=1,
            max_num_batched_tokens=8,
        )


@pytest.mark.parametrize("end", ["none", "one"])
def test_I5_lookup_without_end_token_and_without_match(end, tmp_path):
    path = tiny.write_model(tmp_path)
    if end == "none":
        config = json.loads((path / "config.json").read_text())
        del config["eos_token_id"]
        (path / "config.json").write_text(json.dumps(config))
    model = load(str(path), "f32", progress=False)
    distinct = list(range(2, 60))
    prompts = [[5], [5, 5], [5] * 40, distinct, distinct * 3, [9, 5], [5, 9, 5]]
    options = {"page_size": 4, "kv_memory": "4MiB", "threads": 1, "weights": "f32"}
    params = tiny.greedy(max_tokens=30, ignore_eos=False)
    plain = tiny.ids(
        LLM(model, max_num_seqs=1, prefix_caching=False, **options).generate(prompts, params)
    )
    for scheme in ("k=8", "k=8,ngram_min=1", "k=3,ngram_min=1,branches=3,patience=0"):
        llm = LLM(model, speculation=f"prompt-lookup:{scheme},adaptive=false", **options)
        assert bool(llm.engine.end_ids) == (end == "one")
        for prompt, answer in zip(prompts, plain, strict=True):  # each alone, then all at once
            assert tiny.ids(llm.generate([prompt], params)) == [answer]
        assert tiny.ids(llm.generate(prompts, params)) == plain
        assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
        assert llm.engine.metrics.drafted > 0
