"""Trees over a scripted draft: valid, within budget, the same whoever else is in the batch, and
those of the algorithms as published."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretell.sequence import SamplingParams, Sequence
from foretell.spec.draft_vocab import DraftVocab
from foretell.spec.drafter import Ask
from foretell.spec.grow_tree import Frontier, frontier_rows, grow_tree
from foretell.spec.noise import gumbel
from foretell.spec.seats import Least
from foretell.spec.tree import TokenTree, children, depths, path_to
from foretell.spec.tree_shape import DynamicShape, TreeShape, chain, read_shape

VOCAB = 20
Prefix = tuple[int, ...]
SHAPES: list[TreeShape] = [
    chain(4),
    read_shape("eagle"),
    read_shape("medusa"),
    DynamicShape(5, 4, 24),
    DynamicShape(3, 8, 63),
    DynamicShape(7, 2, 10, trust=3.0),
    DynamicShape(2, 3, 1),
]


@cache
def said(prefix: Prefix, vocab: int = VOCAB, sharp: float = 2.0) -> Tensor:
    """The scripted draft's logits after a root and a path."""
    rng = np.random.default_rng([vocab, *prefix])
    return torch.from_numpy((sharp * rng.normal(size=vocab)).astype(np.float32))


class Draft:
    """Runs the script; follows paths by ``parents`` and again by ``ancestors`` and ``bits``."""

    def __init__(self, roots: list[int], vocab: int = VOCAB, ids: Tensor | None = None):
        self.roots, self.vocab, self.ids = roots, vocab, ids
        self.above: list[Prefix] = [(root,) for root in roots]
        self.run: list[dict[int, int]] = [{} for _ in roots]  # bit: token
        self.frontiers: list[Frontier] = []
        self.broken: set[Prefix] = set()
        self.bad = torch.nan

    def rows(self, prefixes: list[Prefix]) -> Tensor:
        out = torch.stack([said(prefix, self.vocab) for prefix in prefixes])
        for row, prefix in enumerate(prefixes):
            if prefix in self.broken:
                out[row, 3] = self.bad
        return out

    @property
    def first(self) -> Tensor:
        return self.rows([(root,) for root in self.roots])

    def step(self, frontier: Frontier) -> Tensor:
        self.frontiers.append(frontier)
        assert frontier.sequences == sorted(frontier.sequences)
        here: list[Prefix] = []
        for f, b in enumerate(frontier.sequences):
            self.run[b][frontier.bits[f]] = frontier.tokens[f]
            word = frontier.ancestors[f]
            path = tuple(token for bit, token in self.run[b].items() if word >> bit & 1)
            here.append((*self.above[frontier.parents[f]], frontier.tokens[f]))
            assert here[-1] == (self.roots[b], *path)
            assert len(path) == frontier.depth
            assert word < 1 << 63
        self.above = here
        return self.rows(here)


def ask(roots: list[int], params: SamplingParams | list[SamplingParams], sample: bool = False):
    every = params if isinstance(params, list) else [params] * len(roots)
    texts = [
        Sequence(str(root), [*range(root % 5), root], param, seed=root, slot=b)
        for b, (root, param) in enumerate(zip(roots, every, strict=True))
    ]
    return Ask(texts, [63] * len(roots), sample)


def noise(seeds: list[int], positions: list[int]) -> Tensor:
    return gumbel(seeds, positions, VOCAB)


def grow(
    roots: list[int],
    budgets: list[int],
    shape: TreeShape,
    params: SamplingParams | list[SamplingParams],
    sample: bool = False,
    draft: Draft | None = None,
    vocab: DraftVocab | None = None,
) -> TokenTree:
    draft = draft or Draft(roots)
    vocab = vocab or DraftVocab(VOCAB)
    ids = slice(None) if vocab.ids is None else vocab.ids

    def own(seeds: list[int], positions: list[int]) -> Tensor:
        return noise(seeds, positions)[:, ids]

    asked = ask(roots, params, sample)
    return grow_tree(asked, budgets, draft.first, draft.step, shape, own, vocab)


GREEDY, WARM = SamplingParams(temperature=0), SamplingParams(temperature=1.3)
PARAMS = [GREEDY, WARM, SamplingParams(top_k=3, temperature=0.7), SamplingParams(top_p=0.5)]


def same(a: TokenTree, i: int, b: TokenTree, j: int) -> bool:
    if a.lists[i] != b.lists[j]:
        return False
    size = a.sizes[i]
    if a.probs is None or b.probs is None:
        return a.probs is b.probs or size == 1
    return torch.equal(a.probs[i, :size], b.probs[j, :size])


@settings(max_examples=80, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    roots=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4, unique=True),
    data=st.data(),
    sample=st.booleans(),
)
def test_trees_are_valid_within_budget_repeatable_and_independent(
    shape: TreeShape, roots: list[int], data: st.DataObject, sample: bool
):
    budgets = [data.draw(st.integers(0, 63)) for _ in roots]
    params = [data.draw(st.sampled_from(PARAMS)) for _ in roots]
    draft = Draft(roots)
    tree = grow(roots, budgets, shape, params, sample, draft)
    tree.check(VOCAB)
    assert tree.tokens[:, 0].tolist() == roots
    for b, (tokens, parents) in enumerate(tree.lists):
        assert len(tokens) - 1 <= min(budgets[b], shape.num_nodes)
        assert (len(tokens) > 1) == (budgets[b] > 0)
        # Depth first: where the draft is right at once, nothing has to be moved.
        order = [0]
        while order[-1] in parents[1:]:
            order.append(parents.index(order[-1], 1))
        assert order == list(range(len(order)))
        # What was run fits behind the root into the cells that the tree itself has.
        assert sorted(draft.run[b]) == list(range(1, len(draft.run[b]) + 1))
        assert len(draft.run[b]) <= budgets[b]
        alone = grow(roots[b : b + 1], budgets[b : b + 1], shape, params[b], sample)
        assert same(tree, b, alone, 0)
    again = grow(roots, budgets, shape, params, sample)
    assert all(same(tree, b, again, b) for b in range(len(roots)))


def eagle2(root: int, depth: int, topk: int, nodes: int, budget: int, trust: float) -> set[Prefix]:
    """The algorithm without shortcuts: all candidates of every expanded level, then the best."""
    nodes = min(nodes, budget)
    depth = min(depth, nodes)
    beam = max(1, min(topk, nodes // max(1, depth - 1)))
    values: dict[Prefix, float] = {}
    edge: list[Prefix] = [()]
    for _ in range(depth):
        level: dict[Prefix, float] = {}
        for path in edge:
            logps = torch.log_softmax(trust * said((root, *path)).double(), -1)
            best = logps.topk(min(topk, nodes))
            for logp, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[(*path, token)] = values.get(path, 0.0) + logp
        values |= level
        edge = sorted(level, key=lambda path: -level[path])[:beam]
    return set(sorted(values, key=lambda path: -values[path])[:nodes])


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 9, 17, 40, 63])
@pytest.mark.parametrize("trust", [1.0, 4.0])
@pytest.mark.parametrize(("depth", "topk", "nodes"), [(5, 4, 24), (3, 8, 63), (7, 2, 10)])
def test_dynamic_trees_are_those_of_eagle2(
    depth: int, topk: int, nodes: int, trust: float, budget: int
):
    for root in range(6):
        tree = grow([root], [budget], DynamicShape(depth, topk, nodes, trust), GREEDY)
        [(tokens, parents)] = tree.lists
        paths = {tuple(tokens[n] for n in path_to(parents, i)) for i in range(1, len(tokens))}
        assert paths == (eagle2(root, depth, topk, nodes, budget, trust) if budget else set())


@pytest.mark.parametrize("shape", [read_shape("eagle"), read_shape("medusa")])
def test_fixed_trees_hold_the_likeliest_children(shape: TreeShape):
    [(tokens, parents)] = grow([3], [63], shape, GREEDY).lists
    assert len(tokens) == shape.num_nodes + 1
    for node, kids in enumerate(children(parents)):
        prefix = (3, *(tokens[n] for n in path_to(parents, node)))
        best = said(prefix).argsort(descending=True).tolist()
        assert [tokens[kid] for kid in kids] == best[: len(kids)]
    assert sorted(depths(parents)[1:]) == sorted(len(path) for path in shape.fixed().paths)


def test_one_pass_a_level_and_none_for_the_last():
    for shape, passes in ((chain(5), 4), (DynamicShape(5, 4, 24), 4), (read_shape("medusa"), 3)):
        draft = Draft([1, 2])
        grow([1, 2], [63, 63], shape, GREEDY, draft=draft)
        assert len(draft.frontiers) == passes
        assert [f.depth for f in draft.frontiers] == list(range(1, passes + 1))


def test_a_sure_draft_is_not_run_on_nodes_that_cannot_be_kept():
    """63 children of the root beat whatever comes below them where all are alike."""
    flat = torch.zeros(1, 64)
    asked = ask([1], GREEDY)
    grown = grow_tree(asked, [20], flat, lambda f: 1 / 0, DynamicShape(1, 63, 20), noise,
                      DraftVocab(64))  # fmt: skip
    assert grown.num_drafted == [20]
    calls: list[int] = []

    def step(frontier: Frontier) -> Tensor:
        calls.append(len(frontier.tokens))
        return flat.expand(len(frontier.tokens), -1)

    grow_tree(asked, [20], flat, step, DynamicShape(6, 20, 20), noise, DraftVocab(64))
    assert calls == [4], "equals: the shallow ones stay, so one look below is enough"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_a_broken_row_has_no_children(shape: TreeShape, sample: bool, bad: float):
    sound = grow([1, 2], [30, 30], shape, GREEDY, sample)
    first = int(sound.tokens[0, 1])
    draft = Draft([1, 2])
    draft.bad, draft.broken = bad, {(1, first)}
    tree = grow([1, 2], [30, 30], shape, GREEDY, sample, draft)
    tree.check(VOCAB)
    tokens, parents = tree.lists[0]
    assert first in tokens[1:]
    assert parents.count(tokens.index(first, 1)) == 0
    assert same(tree, 1, sound, 1)
    draft = Draft([1, 2])
    draft.bad, draft.broken = bad, {(1,)}
    assert grow([1, 2], [5, 5], shape, GREEDY, sample, draft).num_drafted[0] == 0


def test_coupled_children_are_the_best_under_the_targets_noise_at_their_place():
    asked: list[tuple[list[int], list[int]]] = []

    def spy(seeds: list[int], positions: list[int]) -> Tensor:
        asked.append((list(seeds), list(positions)))
        return noise(seeds, positions)

    draft, want = Draft([4]), ask([4], WARM)
    tree = grow_tree(want, [25], draft.first, draft.step, read_shape("eagle"), spy,
                     DraftVocab(VOCAB))  # fmt: skip
    [(tokens, parents)] = tree.lists
    length = len(want.sequences[0].tokens)
    assert {(s, p) for seeds, at in asked for s, p in zip(seeds, at, strict=True)} == {
        (4, length + d) for d in range(5)
    }
    for node, kids in enumerate(children(parents)):
        path = [tokens[n] for n in path_to(parents, node)]
        score = said((4, *path)) / 1.3 + noise([4], [length + len(path)])[0]
        assert [tokens[kid] for kid in kids] == score.argsort(descending=True)[: len(kids)].tolist()
    assert tree.probs is None


def test_drawn_children_follow_the_law_without_replacement():
    """Pairs of children over many seeds against the exact law; filters included."""
    params = SamplingParams(temperature=1.5, top_k=4)
    logits = said((1,), 6)
    kept = logits.topk(4).indices.tolist()
    q = torch.softmax((logits / 1.5)[kept].double(), -1)
    counts: dict[tuple[int, int], int] = {}
    rounds = 3000
    shape = DynamicShape(1, 2, 2)
    for seed in range(rounds):
        text = Sequence("r", [1], params, seed=seed, slot=0)
        tree = grow_tree(
            Ask([text], [2], True), [2], logits[None], lambda f: 1 / 0, shape,
            lambda s, p: gumbel(s, p, 6), DraftVocab(6),
        )  # fmt: skip
        assert tree.probs is not None
        first, second = tree.tokens[0, 1:].tolist()
        counts[first, second] = counts.get((first, second), 0) + 1
    assert torch.allclose(tree.probs[0, 0, kept].double(), q, atol=1e-6)
    assert float(tree.probs[0, 0].sum()) == pytest.approx(1.0)
    chi = 0.0
    for i, a in enumerate(kept):
        for j, b in enumerate(kept):
            if i != j:
                expected = rounds * float(q[i] * q[j] / (1 - q[i]))
                chi += (counts.pop((a, b), 0) - expected) ** 2 / expected
    assert not counts, "only tokens that the filter left"
    assert chi < 31, "11 degrees of freedom: 0.001"


def test_drawn_trees_have_a_shape_that_no_draw_changes():
    """Non-anticipation: EAGLE-2's re-ranking must not see what was drawn."""
    shape = DynamicShape(4, 3, 12)
    parents = {str(grow([root], [12], shape, WARM, True).lists[0][1]) for root in range(20)}
    assert len(parents) == 1
    greedy = {str(grow([root], [12], shape, GREEDY, True).lists[0][1]) for root in range(20)}
    assert len(greedy) > 1, "likeliest children are a function of the text: any shape is exact"


def test_no_noise_is_used_twice_nor_the_targets():
    seen: list[tuple[int, int]] = []

    def spy(seeds: list[int], positions: list[int]) -> Tensor:
        seen.extend(zip(seeds, positions, strict=True))
        return noise(seeds, positions)

    want, draft = ask([4, 5], WARM, True), Draft([4, 5])
    grow_tree(want, [25, 25], draft.first, draft.step, read_shape("eagle"), spy, DraftVocab(VOCAB))
    want.sequences[0].tokens.append(3)
    draft = Draft([3, 5])
    grow_tree(want, [25, 0], draft.first, draft.step, read_shape("eagle"), spy, DraftVocab(VOCAB))
    assert len({seed for seed, _ in seen}) == len(seen)
    assert not {4, 5} & {seed for seed, _ in seen}


def test_greedy_sequences_beside_sampling_ones_may_be_refused_nothing_right():
    """Their q must let the target's one token pass wherever it stands among the children."""
    tree = grow([1, 2], [25, 25], read_shape("eagle"), [GREEDY, WARM], True)
    assert tree.probs is not None
    for node, kids in enumerate(children(tree.lists[0][1])):
        row = tree.probs[0, node]
        assert row.nonzero().flatten().tolist() == sorted(int(tree.tokens[0, k]) for k in kids)
        if kids:
            assert row[row > 0].tolist() == pytest.approx([1 / len(kids)] * len(kids))


def test_rows_of_a_frontier():
    frontier = Frontier([0, 0, 2], [7, 8, 9], 2, [0, 1, 2], [3, 4, 2], [0b1010, 0b10100, 0b110])
    rows = frontier_rows([5, 6, 1], [10, 20, 30], frontier)
    assert rows.slots == [5, 5, 1]
    assert rows.tokens == [7, 8, 9]
    assert rows.positions == [12, 12, 32]
    assert rows.cells == [13, 14, 32]
    assert rows.prefix == [11, 11, 31]
    assert rows.base == [10, 10, 30]
    assert rows.ancestors == [0b1010, 0b10100, 0b110]
    assert rows.outputs == [0, 1, 2]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("params", [GREEDY, WARM])
def test_a_reduced_vocabulary(params: SamplingParams, sample: bool):
    """The same trees as over the whole vocabulary with all other tokens impossible."""
    ids = torch.tensor([2, 3, 7, 11, 19])

    class Wide(Draft):
        def rows(self, prefixes: list[Prefix]) -> Tensor:
            wide = torch.full((len(prefixes), VOCAB), -torch.inf)
            wide[:, ids] = super().rows(prefixes)
            return wide

    for shape in (chain(3), read_shape("eagle"), DynamicShape(4, 3, 12)):
        small = grow([1, 2], [20, 20], shape, params, sample, Draft([1, 2], 5),
                     DraftVocab(VOCAB, ids))  # fmt: skip
        large = grow([1, 2], [20, 20], shape, params, sample, Wide([1, 2], 5))
        small.check(VOCAB)
        assert small.lists == large.lists
        assert set(small.tokens[:, 1:].flatten().tolist()) <= {0, *ids.tolist()}
        if small.probs is not None and large.probs is not None:
            torch.testing.assert_close(small.probs, large.probs)


def test_ids_from_offsets_and_wrong_ids():
    vocab = DraftVocab.from_offsets(torch.tensor([2, 2, 5, 8, 15]), VOCAB)
    assert vocab.tokens(torch.tensor([[0, 4], [2, 1]])) == [[2, 19], [7, 3]]
    with pytest.raises(ValueError, match=r"map to 2 \.\. 20, outside of 0 \.\. 19"):
        DraftVocab(VOCAB, torch.tensor([2, 20]))
    with pytest.raises(ValueError, match="two draft ids map to one token"):
        DraftVocab(VOCAB, torch.tensor([2, 2]))


def test_a_padded_draft_vocabulary_is_cut():
    wide = grow([1], [20], DynamicShape(3, 6, 20), GREEDY, True, Draft([1], VOCAB + 12))
    wide.check(VOCAB)
    assert wide.probs is not None
    assert wide.probs.shape[-1] == VOCAB
    short = grow([1], [20], DynamicShape(3, 6, 20), WARM, True, Draft([1], VOCAB - 12))
    assert short.probs is not None
    assert short.probs.shape[-1] == VOCAB
    assert short.probs[..., VOCAB - 12 :].eq(0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("params", [GREEDY, WARM])
def test_nodes_that_are_not_likely_enough_are_left_out(shape: TreeShape, params: SamplingParams):
    """What stays is the beginning of what there would be without, and says how likely it is."""
    for root in range(8):
        whole, draft = grow([root], [63], shape, params), Draft([root])
        asked = replace(ask([root], params), least=[Least(0.1, 0.2)])
        some = grow_tree(asked, [63], draft.first, draft.step, shape, noise, DraftVocab(VOCAB))
        some.check(VOCAB)
        (chances,), (tokens, parents) = some.chances or [[]], some.lists[0]
        assert len(chances) == len(tokens)
        assert all(chance >= 0.1 for chance in chances)
        for node, parent in enumerate(parents[1:], 1):
            assert chances[node] <= chances[parent]
            assert parent == 0 or chances[parent] >= 0.2, "the draft was run on something unlikely"
        (everything,), (ids, above) = whole.chances or [[]], whole.lists[0]
        paths = [tuple(ids[n] for n in path_to(above, node)) for node in range(len(ids))]
        worth = {
            path
            for path, chance, parent in zip(paths, everything, above, strict=True)
            if chance >= 0.1 and (parent <= 0 or everything[parent] >= 0.2)
        }
        mine = {tuple(tokens[n] for n in path_to(parents, node)) for node in range(len(tokens))}
        assert mine >= worth  # a dynamic shape has room for more where something is left out


def test_what_is_drawn_is_never_left_out_for_what_it_is():
    want = ask([3], WARM, sample=True)
    without, with_least = (
        grow_tree(asked, [8], Draft([3]).first, Draft([3]).step, read_shape("eagle"), noise,
                  DraftVocab(VOCAB))
        for asked in (want, replace(want, least=[Least(0.9, 0.9)]))
    )  # fmt: skip
    assert same(without, 0, with_least, 0)
    assert len(without.lists[0][0]) == 9
