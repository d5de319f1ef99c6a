"""Our forward pass against transformers', and against itself in other groupings of rows."""

from __future__ import annotations

import pytest
import torch

from foretell.attention.cpu import CpuAttention
from foretell.models.loader import load
from tests.models.tiny import DEEPSEEK, KINDS, Cache, every_thread, make, save
from tests.reference import ReferenceAttention

TOKENS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]


def reference(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module", params=[*KINDS, *DEEPSEEK])
def pair(request, tmp_path_factory):
    model = make(request.param)
    path = save(model, tmp_path_factory.mktemp("model"))
    return model, load(str(path), "f32", progress=False)


@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_prefill_chunks_and_decode_equal_transformers(pair, backend):
    model, loaded = pair
    expected = reference(model, TOKENS)
    whole, _ = Cache(loaded, backend()).run(TOKENS, 0)
    assert error(whole, expected) < 1e-4
    cache, parts, start = Cache(loaded, backend()), [], 0
    for size in (17, 1, 9, 1, 1, 11):
        parts.append(cache.run(TOKENS[start : start + size], start)[0])
        start += size
    assert error(torch.cat(parts), expected) < 1e-4


@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_tree_nodes_equal_a_plain_pass_over_their_path(pair, backend):
    model, loaded = pair
    prompt, nodes = TOKENS[:20], TOKENS[20 : 20 + len(PARENTS)]
    cache = Cache(loaded, backend())
    cache.run(prompt, 0)
    logits, _ = cache.run(nodes, len(prompt), PARENTS)
    for node in range(len(PARENTS)):
        path, at = [], node
        while at >= 0:
            path.insert(0, nodes[at])
            at = PARENTS[at]
        assert error(logits[node], reference(model, prompt + path)[-1]) < 1e-4


def test_taps_are_layer_outputs_and_the_final_norm(pair):
    model, loaded = pair
    with torch.no_grad():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    _, features = Cache(loaded, CpuAttention()).run(TOKENS, 0, taps=(1, -1, 0))
    assert features is not None
    # hidden_states holds the embedding first, and the last one after the final norm.
    for part, state in zip(features.chunk(3, 1), (states[2], states[-1], states[1]), strict=True):
        assert error(part, state[0]) < 1e-4


@pytest.mark.parametrize("weights", ["int8", "bf16", "f32", "int4"])
@pytest.mark.parametrize("kind", ["smollm2", "qwen2-window", "qwen3", "v2", "v3"])
def test_bits_do_not_depend_on_grouping(kind, weights, tmp_path):
    loaded = load(str(save(make(kind), tmp_path)), weights, progress=False)
    single, alone = Cache(loaded, CpuAttention()), []
    for position, token in enumerate(TOKENS):
        alone.append(single.run([token], position)[0])
    alone = torch.cat(alone)
    chunked, start = Cache(loaded, CpuAttention()), 0
    for size in (19, 2, 7, 12):
        logits, _ = chunked.run(TOKENS[start : start + size], start)
        assert torch.equal(logits, alone[start : start + size])
        start += size
    tree = Cache(loaded, CpuAttention())
    tree.run(TOKENS[:30], 0)
    # The text's own next tokens on nodes 0, 2, 4, 5; wrong tokens between them.
    nodes = [TOKENS[30], 5, TOKENS[31], 6, TOKENS[32], TOKENS[33], 9]
    logits, _ = tree.run(nodes, 30, [-1, 0, 0, 1, 2, 4, 4])
    for node, position in ((0, 30), (2, 31), (4, 32), (5, 33)):
        assert torch.equal(logits[node], alone[position])


def test_positions_past_the_table_are_computed_not_read_out_of_bounds(tmp_path):
    model = make("llama", max_position_embeddings=16)
    loaded = load(str(save(model, tmp_path)), "f32", progress=False)
    assert len(loaded.model.rope.cos) == 16
    logits, _ = Cache(loaded, CpuAttention()).run(TOKENS, 0)
    assert error(logits, reference(model, TOKENS)) < 1e-4


@pytest.mark.parametrize("weights", ["int8", "bf16", "f32", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_pass_does_what_forward_says(kind, weights, tmp_path, monkeypatch):
    loaded = load(str(save(make(kind), tmp_path)), weights, progress=False)
    assert loaded.model.whole_pass is not None
    compiled = Cache(loaded, CpuAttention())
    found = [compiled.run(TOKENS[:30], 0, taps=(1, -1)), compiled.run(TOKENS[30:38], 30, PARENTS)]
    before = compiled.kv
    monkeypatch.setattr(loaded.model, "whole_pass", None)
    plain = Cache(loaded, CpuAttention())
    expected = [plain.run(TOKENS[:30], 0, taps=(1, -1)), plain.run(TOKENS[30:38], 30, PARENTS)]
    limit = 0.03 if weights in ("int8", "int4", "bf16") else 1e-5  # a level may fall either way
    assert error(found[0][0], expected[0][0]) < limit
    assert error(found[0][1], expected[0][1]) < limit
    assert error(found[1][0], expected[1][0]) < limit
    for ours, theirs in zip(before, plain.kv, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert error(a.float(), b.float()) < limit


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", ["int8", "f32"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("smollm2", {}),
        ("llama-biased", {}),
        ("qwen3", {}),
        # Queries end in the middle of a panel.
        ("smollm2", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ],
)
def test_rows_that_only_fill_the_cache_end_at_the_last_layer(
    kind, changes, weights, threads, tmp_path, monkeypatch
):
    """Where few rows' outputs are wanted the others leave the same keys and values, and theirs are
    the same bits."""
    loaded = load(str(save(make(kind, **changes), tmp_path)), weights, progress=False)
    assert loaded.model.whole_pass is not None
    with every_thread(monkeypatch, threads):
        whole, narrow = Cache(loaded, CpuAttention()), Cache(loaded, CpuAttention())
        for start, parents, picked in ((0, None, [29]), (0, None, []), (30, PARENTS, [0, 3, 4, 7])):
            tokens = TOKENS[:30] if parents is None else TOKENS[30:38]
            logits, features = whole.run(tokens, start, parents, taps=(0, -1))
            few, first = narrow.run(tokens, start, parents, taps=(0,), outputs=picked)
            assert torch.equal(few, logits[picked])
            assert torch.equal(first, features[:, : first.shape[1]])
    for ours, theirs in zip(whole.kv, narrow.kv, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("weights", ["int8", "bf16", "int4"])
def test_threads_change_no_bits_of_a_pass(weights, tmp_path, monkeypatch):
    loaded = load(str(save(make("smollm2"), tmp_path)), weights, progress=False)
    found = []
    for threads in (1, 2, 3, 5):
        with every_thread(monkeypatch, threads) as used:
            cache = Cache(loaded, CpuAttention())
            found.append([cache.run(TOKENS[:30], 0)[0], cache.run(TOKENS[30:38], 30, PARENTS)[0]])
        assert used == [threads, threads]
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert torch.equal(other[1], found[0][1])
