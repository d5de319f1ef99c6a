"""A head's chains in one compiled call: what `grow_tree` makes of them level by level."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.attention import pool
from foretell.runtime.runner import Runtime
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.drafter import Ask, Drafter
from foretell.spec.seats import ANYTHING, Least
from tests import heads, tiny
from tests.drafters.tiny import commit, fresh

LEVELS = 5
LIMIT = 128  # positions of the tiny heads
PARAMS = [
    SamplingParams(temperature=0, top_p=0.5),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7),
]
LEAST = [ANYTHING, Least(node=0.02), Least(parent=0.1), Least(first=0.1), Least(0.001, 0.02, 0.05)]


@cache
def drafters(kind: str) -> tuple[Drafter, Drafter]:
    """One that drafts in one call, where it may, and one that cannot."""
    quick, slow = (fresh(f"{heads.scheme(kind)},k={LEVELS}") for _ in range(2))
    one_call = quick.runtime.draft_chains

    def told(head, ask, *rest):
        drafted = one_call(head, ask, *rest)
        filtered = any(s.params.top_k or s.params.top_p == 0.3 for s in ask.sequences)
        assert (drafted is None) == filtered
        return drafted

    quick.runtime.draft_chains = told
    slow.runtime.draft_chains = lambda *_: None
    return quick, slow


@pytest.fixture(autouse=True, params=[1, 2], ids=lambda threads: f"{threads} threads")
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_num_threads", request.param)


def cells(drafter: Drafter) -> list[torch.Tensor]:
    assert isinstance(drafter.runtime, Runtime)
    assert drafter.runtime.kv is not None
    return [x for layer in drafter.runtime.kv.layers["draft"] for x in layer]


@pytest.mark.parametrize("kind", heads.LAYERED)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_same_trees_and_kv(kind: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    lengths = st.sampled_from([2, 3, 12, 15, 16, 17, 30, 33, LIMIT - LEVELS])
    texts = [
        Sequence(
            f"r{slot}",
            torch.randint(tiny.VOCAB, (data.draw(lengths),)).tolist(),
            data.draw(st.sampled_from(PARAMS)),
            data.draw(st.integers(0, 2**64 - 1)),
            slot=slot,
        )
        for slot in data.draw(st.permutations(range(4)))[:size]
    ]
    number = st.integers(0, LEVELS + 1)
    ask = Ask(
        texts,
        [data.draw(number) for _ in texts],
        depths=[data.draw(number) for _ in texts],
        least=[data.draw(st.sampled_from(LEAST)) for _ in texts],
    )
    pair = drafters(kind)
    trees = []
    for drafter in pair:
        for text in texts:
            text.num_computed = 0
        for layer in cells(drafter):
            layer.zero_()
        commit(drafter, *[(text, len(text.tokens)) for text in texts])
        trees.append(drafter.propose(ask))
    quick, slow = trees
    assert quick.lists == slow.lists
    for mine, theirs in zip(quick.chances or [], slow.chances or [], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    for mine, theirs in zip(*map(cells, pair), strict=True):
        assert torch.equal(mine, theirs)


def test_requests_with_filters_go_level_by_level() -> None:
    quick, slow = drafters("eagle")
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.3, temperature=2), PARAMS[1]]
    texts = [Sequence("r", [1, 2, 3, b], each, 9, slot=b) for b, each in enumerate(params)]
    for drafter in (quick, slow):
        for text in texts:
            text.num_computed = 0
        commit(drafter, *[(text, 4) for text in texts])
    ask = Ask(texts, [LEVELS] * 3)
    assert quick.propose(ask).lists == slow.propose(ask).lists


def test_a_broken_row_ends_its_own_chain_only(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, _ = drafters("eagle")
    texts = [Sequence("r", [1, 2, 3, b], PARAMS[b], 9, slot=b) for b in range(3)]
    run = quick.runtime.forward_head

    def spoiled(*given):
        logits, following = run(*given)
        logits = logits.clone()
        logits[1, 3] = torch.nan
        return logits, following

    monkeypatch.setattr(quick.runtime, "forward_head", spoiled)
    commit(quick, *[(text, 4) for text in texts])
    assert quick.propose(Ask(texts, [LEVELS] * 3)).num_drafted == [LEVELS, 0, LEVELS]
