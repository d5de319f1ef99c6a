"""Every lossless rule, summed exactly over all drafts and coins, emits the target's own law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.spec.tree import TokenTree, chains, from_lists
from foretell.spec.tree_shape import DynamicShape, FixedShape
from foretell.spec.verify import Outcome, invert, rejection_path, verify
from tests.spec.exact import Table, distance, emitted_law, every_coin, every_draft, plain_law

CHAIN = [-1, 0, 1]
PAIRS = [-1, 0, 0, 1, 1, 2, 2]
FOURS = [-1, 0, 0, 0, 0, 1, 1, 2]
FULL_FOURS = [-1] + [0] * 4 + [node for node in range(1, 5) for _ in range(4)]
INTERLEAVED = [-1, 0, 1, 0, 3, 1]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("vocab", "length", "zeros"), [(3, 2, 0.0), (2, 3, 0.0), (4, 2, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_sampled_chain_is_exact(rule: str, vocab: int, length: int, zeros: float, seed: int):
    target = Table(vocab, seed, zeros=zeros)
    draft = Table(vocab, 100 + seed, zeros=zeros)
    parents = list(range(-1, length))
    law, _ = emitted_law(rule, parents, target, draft, sampled=True)
    assert distance(law, plain_law(target, length + 1)) < 1e-12


@pytest.mark.parametrize("parents", [CHAIN, PAIRS, FOURS, INTERLEAVED])
@pytest.mark.parametrize("seed", range(2))
def test_sampled_tree_is_exact(parents: list[int], seed: int):
    vocab = 4 if parents is FOURS else 3
    target = Table(vocab, seed)
    law, _ = emitted_law("rejection", parents, target, Table(vocab, 50 + seed), sampled=True)
    horizon = max(map(len, law))
    assert distance(law, plain_law(target, horizon)) < 1e-12


@pytest.mark.parametrize("parents", [CHAIN, PAIRS, FOURS, FULL_FOURS, INTERLEAVED])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_deterministic_tree_is_exact(parents: list[int], zeros: float, seed: int):
    target = Table(5, seed, zeros=zeros)
    law, _ = emitted_law("rejection", parents, target, Table(5, 9 + seed), sampled=False)
    assert distance(law, plain_law(target, 3)) < 1e-12


@pytest.mark.parametrize("sampled", [False, True])
def test_star_over_the_whole_vocabulary_is_exact_and_always_accepted(sampled: bool):
    target = Table(5, 3)
    law, tokens = emitted_law("rejection", [-1] + [0] * 5, target, Table(5, 4), sampled=sampled)
    assert distance(law, plain_law(target, 2)) < 1e-12
    if not sampled:
        assert tokens == pytest.approx(2.0, abs=1e-12)


def test_a_draft_equal_to_the_target_is_always_accepted():
    target = Table(3, 7)
    for rule in ("rejection", "block"):
        law, tokens = emitted_law(rule, CHAIN, target, target, sampled=True)
        assert tokens == pytest.approx(3.0, abs=1e-12)
        assert distance(law, plain_law(target, 3)) < 1e-12


def test_acceptance_of_one_draft_is_one_minus_total_variation():
    target, draft = Table(5, 1), Table(5, 2)
    _, tokens = emitted_law("rejection", [-1, 0], target, draft, sampled=True)
    assert tokens - 1 == pytest.approx(sum(map(min, target(()), draft(()))), abs=1e-12)


def test_block_never_expects_fewer_tokens_than_rejection():
    gains: list[float] = []
    for seed in range(8):
        target, draft = Table(3, seed), Table(3, 30 + seed)
        _, by_token = emitted_law("rejection", CHAIN, target, draft, sampled=True)
        _, by_block = emitted_law("block", CHAIN, target, draft, sampled=True)
        gains.append(by_block - by_token)
    assert min(gains) >= -1e-12
    assert max(gains) > 1e-3


def test_softmax_as_law_of_an_argmax_draft_is_caught():
    """Not lossless (transformers#32867): shows that these tests would see such a fault."""
    target, draft = Table(8, 0), Table(8, 1)
    law, _ = emitted_law("rejection", [-1, 0], target, draft, sampled=False, claim_law=True)
    assert distance(law, plain_law(target, 2)) > 0.01


def test_dropping_a_sampled_token_for_its_value_is_caught():
    """Non-anticipation: p = (.7, .3), q = (.5, .5), the draft kept only if it is token 0."""
    p = torch.tensor([[0.7, 0.3], [0.7, 0.3]])
    first = 0.0
    for draft in ([0], []):  # q drew token 0, or token 1 and dropped it
        q = torch.full((1, len(draft) + 1, 2), 0.5)
        tree = chains([0], [draft], q)
        for coin in [(i + 0.5) / 1000 for i in range(1000)]:
            out = verify("rejection", tree, p=p[None, : len(draft) + 1], coins=[[coin, coin]])
            token = tree.tokens[0, out[0].path[0]] if out[0].path else out[0].next_token
            first += (token == 0) / 2000
    assert first == pytest.approx(0.85, abs=2e-3)


SHAPES = {
    "bushy": FixedShape([[0], [1], [0, 0], [0, 1], [1, 0]]),
    "star": FixedShape([[0], [1], [2], [0, 0]]),
    "dynamic": DynamicShape(depth=2, topk=2, num_nodes=5).fixed(),
}


def depth_first(shape: FixedShape) -> list[int]:
    """Parents of the nodes as grown trees have them."""
    paths = [(), *sorted(shape.paths)]
    return [-1, *(paths.index(path[:-1]) for path in paths[1:])]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(2))
def test_drawn_trees_of_any_shape_are_exact(name: str, zeros: float, seed: int):
    parents = depth_first(SHAPES[name])
    # The draft needs as many tokens as a node has children.
    target, draft = Table(3, seed, zeros=zeros), Table(3, 70 + seed)
    law, tokens = emitted_law("rejection", parents, target, draft, sampled=True)
    assert distance(law, plain_law(target, max(map(len, law)))) < 1e-12
    single, fewer = emitted_law("rejection", [-1, 0, 1], target, draft, sampled=True)
    assert single
    assert tokens > fewer, "siblings help"


def test_reranking_drawn_nodes_is_caught():
    """EAGLE-2 keeps the likeliest of all nodes. Done to drawn ones it shifts the law."""
    target, draft = Table(3, 1), Table(3, 71)
    parents = [-1, 0, 0]

    def kept(tokens: list[int]) -> list[int]:
        q = draft(())
        return [max(tokens[1:], key=lambda token: q[token])]

    emitted: dict[int, float] = dict.fromkeys(range(3), 0.0)
    for weight, tokens in every_draft(parents, draft, True, lambda q: []):
        p, q = torch.tensor(target(()))[None], torch.tensor(draft(()))[None]
        reduced = [0, *kept(tokens)]
        p, q = p.repeat(2, 1), q.repeat(2, 1)
        for chance, (path, left) in every_coin(
            lambda coins, t=reduced, p=p, q=q: rejection_path(t, [-1, 0], p, q, coins), 2
        ):
            if path:
                emitted[reduced[1]] += weight * chance
            else:
                for y in range(3):
                    emitted[y] += weight * chance * float(left[y] / left.sum())
    assert max(abs(emitted[y] - target(())[y]) for y in range(3)) > 0.01


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_coupled_is_the_plain_draw(data: st.DataObject):
    """The walk emits, token by token, what draws at each prefix emit."""
    size = data.draw(st.integers(1, 12))
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, size)]
    tokens = [0] + [data.draw(st.integers(0, 2)) for _ in range(1, size)]
    draws = [data.draw(st.integers(0, 2)) for _ in range(size)]
    (out,) = verify("coupled", from_lists([tokens], [parents]), choices=torch.tensor([draws]))
    node = 0
    for accepted in out.path:
        assert parents[accepted] == node
        assert tokens[accepted] == draws[node]
        node = accepted
    assert out.next_token == draws[node]
    assert not any(parents[i] == node and tokens[i] == draws[node] for i in range(1, size))


def test_coupled_keeps_sequences_of_a_batch_apart():
    tree = chains([9, 9, 9], [[1, 2], [], [3]])
    choices = torch.tensor([[1, 5, 6], [4, 0, 0], [3, 2, 0]])
    assert verify("coupled", tree, choices=choices) == [
        Outcome([1], 5),
        Outcome([], 4),
        Outcome([1], 2),
    ]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("coin", [0.0, 0.5, 1 - 2**-53])
def test_a_refused_token_never_replaces_itself(rule: str, coin: float):
    """Also where p = q up to rounding, so that the residual has no mass."""
    q = torch.softmax(torch.tensor([1.0, 2.0, 3.0]), 0).repeat(2, 1)
    for p in (q, q + torch.tensor([1e-8, 0.0, -1e-8]), torch.tensor([[0.0, 0.5, 0.5]] * 2)):
        tree = chains([0], [[0]], q[None])
        (out,) = verify(rule, tree, p=p[None], coins=[[coin, 1 - 2**-53]])  # type: ignore[arg-type]
        assert out.path == [1] or out.next_token != 0
        assert 0 <= out.next_token < 3


def test_a_sibling_that_repeats_a_token_is_never_accepted_the_second_time():
    tree = from_lists([[0, 1, 1]], [[-1, 0, 0]])
    p = torch.tensor([[[0.5, 0.5]] * 3])
    for u in (0.1, 0.3, 0.6, 0.9):
        (out,) = verify("rejection", tree, p=p, coins=[[0.0, u, 0.0]])
        assert out.path == ([1] if u < 0.5 else [])
        if not out.path:
            assert out.next_token == 0


def test_a_child_that_its_law_excludes_is_never_accepted():
    q = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    for rule in ("rejection", "block"):
        (out,) = verify(rule, chains([0], [[1]], q), p=p, coins=[[0.0, 0.0]])  # type: ignore[arg-type]
        assert out == Outcome([], 1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_broken_rows(rule: str, bad: float):
    """A broken draft row takes its children away; a broken target row fails its sequence only."""
    q = torch.full((4, 3, 4), 0.25)
    p = torch.full((4, 3, 4), 0.25)
    q[1, 1] = bad
    p[2, 1] = bad
    p[3, 0] = bad
    tree = chains([0] * 4, [[1, 2]] * 4, q)
    out = verify(rule, tree, p=p, coins=[[0.6, 0.5, 0.5]] * 4)  # type: ignore[arg-type]
    assert out[0] == Outcome([1, 2], 2)
    assert out[1] == Outcome([1], 2)
    assert out[2] == Outcome([1], -1, failed=True)
    assert out[3] == Outcome([], -1, failed=True)


def test_a_broken_choice_fails_only_where_the_walk_ends():
    tree = chains([0, 0, 0], [[1], [1], [2]])
    out = verify("coupled", tree, choices=[[1, -1], [-1, 1], [1, -1]])
    assert out == [Outcome([1], -1, True), Outcome([], -1, True), Outcome([], 1)]


def test_lossy_rules_take_the_longest_accepted_path():
    tree = from_lists([[0, 1, 2, 3]], [[-1, 0, 0, 2]])
    p = torch.tensor([[[0.0, 0.6, 0.4, 0.0], [1.0, 0, 0, 0], [0, 0, 0.2, 0.8], [0.0, 0, 1, 0]]])
    choices = torch.tensor([[1, 0, 3, 2]])
    assert verify("threshold", tree, p=p, choices=choices, threshold=0.3) == [Outcome([2, 3], 2)]
    assert verify("threshold", tree, p=p, choices=choices, threshold=0.5) == [Outcome([1], 0)]
    assert verify("threshold", tree, p=p, choices=choices, threshold=0.7) == [Outcome([], 1)]
    assert verify("typical", tree, p=p, choices=choices, threshold=0.09) == [Outcome([2, 3], 2)]


def test_typical_asks_more_where_the_target_is_sure():
    tree = chains([0], [[1]])
    flat = torch.tensor([[[0.25, 0.25, 0.25, 0.25], [1.0, 0, 0, 0]]])
    sure = torch.tensor([[[0.7, 0.25, 0.05, 0.0], [1.0, 0, 0, 0]]])
    for p, path in ((flat, [1]), (sure, [])):  # exp(-H) is .25 and .48
        (out,) = verify("typical", tree, p=p, choices=torch.tensor([[2, 0]]), threshold=0.3)
        assert out.path == path


@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_lossy_rules_ignore_children_of_a_broken_row(rule: str):
    p = torch.full((1, 2, 2), float("nan"))
    (out,) = verify(rule, chains([0], [[1]]), p=p, choices=torch.tensor([[-1, -1]]))  # type: ignore[arg-type]
    assert out == Outcome([], -1, failed=True)


def test_invert_draws_by_weight_and_never_what_weighs_nothing():
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    coins = [0.0, 0.49999, 0.5, 0.74999, 0.75, 1 - 2**-53]
    assert [invert(weights, coin) for coin in coins] == [1, 1, 3, 3, 4, 4]
    tiny = torch.tensor([1e-300, 1e-310, 0.0], dtype=torch.float64)
    assert {invert(tiny, coin) for coin in coins} <= {0, 1}


def test_laws_may_come_one_tensor_a_sequence():
    tree = chains([0, 0], [[1], []])
    rows = torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    out = verify("rejection", tree, p=rows.split([2, 1]), coins=[[0.7, 0.2], [0.3]])
    assert out == [Outcome([1], 1), Outcome([], 0)]


def test_block_falls_back_on_trees():
    q = torch.full((1, 3, 2), 0.5)
    tree = TokenTree([([0, 1, 1], [-1, 0, 0])], q)
    p = torch.full((1, 3, 2), 0.5)
    u = torch.tensor([[0.7, 0.1, 0.1]], dtype=torch.float64)
    assert verify("block", tree, p=p, coins=u) == verify("rejection", tree, p=p, coins=u)
