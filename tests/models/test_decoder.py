"""Our forward pass against transformers', and against itself in other groupings of rows."""

from __future__ import annotations

import pytest
import torch

from foretell.attention.cpu import CpuAttention
from foretell.attention.reference import ReferenceAttention
from foretell.models.loader import load
from tests.models.tiny import KINDS, Cache, make, save

TOKENS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]


def reference(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module", params=KINDS)
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
@pytest.mark.parametrize("kind", ["smollm2", "qwen2-window", "qwen3"])
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
