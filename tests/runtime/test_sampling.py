"""Shaping against definitions written plainly, row by row; and that rows never see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.runtime.sampling import (
    History,
    Shape,
    ShapeRow,
    draw,
    law,
    log_probs,
    reason,
    shape_logits,
    tree_rows,
)
from foretell.sequence import SamplingParams

INF = float("inf")


def shape_of(
    params: SamplingParams,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
) -> Shape:
    return Shape(params, History(prompt, output), stop)


def shaped(logits: list[float], path: tuple[int, ...] = (), **settings: object) -> list[float]:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    row = ShapeRow(shape_of(params, (1,), (2, 2), (0,)), path)
    return shape_logits(torch.tensor([logits]), [row])[0].tolist()


def test_plain_rows_are_not_even_copied():
    logits = torch.randn(3, 8)
    rows = [ShapeRow(shape_of(SamplingParams(temperature=t))) for t in (0.0, 1.0, 0.0)]
    assert shape_logits(logits, rows) is logits


def test_input_is_never_modified():
    logits = torch.randn(2, 8)
    before = logits.clone()
    params = SamplingParams(
        temperature=0.5, top_k=3, repetition_penalty=2.0, bad_token_ids=(1,), logit_bias={2: 1.0}
    )
    shape_logits(logits, [ShapeRow(shape_of(params))] * 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.5}, [-2.0, -4.0, 0.0, -8.0]),  # shifted by the maximum
        ({"top_k": 2}, [2.0, -INF, 3.0, -INF]),
        ({"top_p": 0.5}, [-INF, -INF, 3.0, -INF]),  # p = .657 .242 .089 .012
        ({"top_p": 0.7}, [2.0, -INF, 3.0, -INF]),
        ({"min_p": 0.3}, [2.0, -INF, 3.0, -INF]),
        ({"top_k": 2, "top_p": 0.74}, [2.0, -INF, 3.0, -INF]),  # p = .731 .269 after top-k
        ({"top_k": 2, "top_p": 0.73}, [-INF, -INF, 3.0, -INF]),
        ({"allowed_token_ids": (1, 3)}, [-INF, 1.0, -INF, -1.0]),
        ({"bad_token_ids": (2, 99)}, [2.0, 1.0, -INF, -1.0]),
        ({"logit_bias": {3: 5.0, 0: -1.0}}, [1.0, 1.0, 3.0, 4.0]),
        ({"min_tokens": 3}, [-INF, 1.0, 3.0, -1.0]),
        ({"min_tokens": 2}, [2.0, 1.0, 3.0, -1.0]),
        ({"presence_penalty": 0.5}, [2.0, 1.0, 2.5, -1.0]),
        ({"frequency_penalty": 0.5}, [2.0, 1.0, 2.0, -1.0]),
        ({"repetition_penalty": 2.0}, [2.0, 0.5, 1.5, -1.0]),  # prompt (1) too
        ({"temperature": 0.0, "top_k": 1}, [2.0, 1.0, 3.0, -1.0]),
    ],
)
def test_each_parameter(settings: dict[str, object], expected: list[float]):
    """Prompt (1), answer (2, 2), end of text 0."""
    assert shaped([2.0, 1.0, 3.0, -1.0], **settings) == pytest.approx(expected)


def test_the_draft_path_counts_like_the_answer():
    logits = [2.0, 1.0, 3.0, -1.0]
    assert shaped(logits, (3, 3), frequency_penalty=1.0) == [2.0, 1.0, 1.0, -3.0]
    assert shaped(logits, (3, 3), presence_penalty=1.0) == [2.0, 1.0, 2.0, -2.0]
    assert shaped(logits, (3,), repetition_penalty=2.0) == [2.0, 0.5, 1.5, -2.0]
    assert shaped(logits, (2,), frequency_penalty=1.0) == [2.0, 1.0, 0.0, -1.0]
    assert shaped(logits, (3,), min_tokens=3) == logits


@pytest.mark.parametrize("prompt", [(), (1, 4)])
def test_penalties_do_not_care_where_the_draft_began(prompt: tuple[int, ...]):
    text = (3, 0, 3, 7, 1)
    params = SamplingParams(presence_penalty=0.3, frequency_penalty=0.7, repetition_penalty=1.7)
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(0))
    results = [
        shape_logits(logits, [ShapeRow(shape_of(params, prompt, text[:cut]), text[cut:])])
        for cut in range(len(text) + 1)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_history_grows_by_commits_only():
    history = History([1, 1], [2])
    history.counts((5, 5))
    history.extend([3, 2])
    ids, held = history.counts(())
    assert dict(zip(ids.tolist(), held.tolist(), strict=True)) == {1: 0, 2: 2, 3: 1}
    ids, held = history.counts((1, 9, 9))
    assert dict(zip(ids.tolist(), held.tolist(), strict=True)) == {1: 1, 2: 2, 3: 1, 9: 2}
    assert history.num_output == 3


def test_rows_of_a_tree_carry_their_own_paths():
    shape = shape_of(SamplingParams(presence_penalty=1.0))
    rows = tree_rows(shape, [9, 4, 5, 6], [-1, 0, 0, 2])
    assert [row.path for row in rows] == [(), (4,), (5,), (5, 6)]
    assert [row.num_output for row in rows] == [0, 1, 1, 2]


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 1.7, 1e-9]),
    top_k=st.sampled_from([0, 1, 3, 150, 10_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6, 0.999999]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    bad_token_ids=st.sampled_from([(), (3, 5)]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(some_params, min_size=2, max_size=6), st.sampled_from([7, 300, 3001]), st.data())
def test_a_row_does_not_depend_on_the_others(
    params: list[SamplingParams], vocab: int, data: st.DataObject
):
    seed = data.draw(st.integers(0, 2**31))
    coarse = data.draw(st.booleans())  # many equal logits
    logits = 3 * torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if coarse else logits
    rows = [ShapeRow(shape_of(p, (1, 2), (4,)), (6,)) for p in params]
    together = shape_logits(logits, rows)
    greedy = [p.greedy for p in params]
    seeds, places = list(range(len(params))), [5] * len(params)
    drawn = draw(together, greedy, seeds, places)
    for r in range(len(params)):
        alone = shape_logits(logits[r : r + 1], rows[r : r + 1])
        assert torch.equal(alone[0], together[r])
        assert draw(alone, greedy[r : r + 1], seeds[r : r + 1], [5])[0] == drawn[r]
        assert alone[0, drawn[r]] > -INF


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0, 1, 5, 200]), st.sampled_from([0.1, 0.8, 1.0]))
def test_filters_keep_the_smallest_set_and_lower_ids_first(seed: int, top_k: int, top_p: float):
    """Against a stable sort in float64, with many ties."""
    vocab = 400
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)).mul(2).round()
    params = SamplingParams(top_k=top_k, top_p=top_p)
    out = shape_logits(logits[None], [ShapeRow(shape_of(params))])[0]
    order = np.argsort(-logits.numpy().astype(np.float64), kind="stable")[: top_k or vocab]
    weights = np.exp(logits.numpy().astype(np.float64)[order])
    before = np.cumsum(weights) - weights
    kept = order[before < top_p * weights.sum() * (1 - 1e-12)]
    assert sorted(kept.tolist()) == (out > -INF).nonzero().flatten().tolist()


def test_top_k_one_is_greedy_also_among_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    rows = [ShapeRow(shape_of(SamplingParams(top_k=1)))]
    for seed in range(20):
        assert draw(shape_logits(logits, rows), [False], [seed], [0]).tolist() == [1]
    assert draw(logits, [True], [0], [0]).tolist() == [1]


def test_a_wide_nucleus_is_found_beyond_the_first_look():
    logits = torch.zeros(1, 1000)
    logits[0, 7] = 1.0
    out = shape_logits(logits, [ShapeRow(shape_of(SamplingParams(top_p=0.5)))])
    total = np.e + 999
    assert int((out > -INF).sum()) == int(np.ceil(0.5 * total - np.e)) + 1


def test_a_tiny_temperature_is_greedy_and_finite():
    logits = torch.tensor([[1000.0, 999.0, -1000.0]])
    for temperature in (1e-3, 1e-30, 1e-300):
        rows = [ShapeRow(shape_of(SamplingParams(temperature=temperature)))]
        out = shape_logits(logits, rows)
        assert not out.isnan().any()
        assert law(out, rows)[0].tolist() == [1.0, 0.0, 0.0]


def test_law_is_one_hot_for_greedy_and_softmax_else():
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0], [float("nan"), 0.0], [-INF, -INF]])
    rows = [ShapeRow(shape_of(SamplingParams(temperature=t))) for t in (0, 1, 0, 0)]
    p = law(logits, rows)
    assert p[0].tolist() == [0.0, 1.0]
    assert p[1].tolist() == pytest.approx([1 / (1 + np.e), np.e / (1 + np.e)])
    assert p[2:].isnan().all()


EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=2,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.2,
    allowed_token_ids=(0, 1, 2),
    bad_token_ids=(3,),
    logit_bias={1: 1.0},
)


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("token", [0, 3])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5), EVERYTHING],
)
def test_a_row_that_is_not_finite_gives_no_token(bad: float, token: int, params: SamplingParams):
    """Also where the broken logit belongs to a token that is banned anyway."""
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    logits[1, token] = bad
    rows = [ShapeRow(shape_of(params))] * 3
    out = shape_logits(logits, rows)
    choices = draw(out, [params.greedy] * 3, [1, 2, 3], [0, 0, 0]).tolist()
    assert choices[1] == -1
    assert all(0 <= choice < 4 for choice in choices[::2])
    assert "not finite" in reason(out[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_is_an_error_with_a_remedy(temperature: float):
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=(1, 2), bad_token_ids=(1, 2), top_k=1, min_p=0.1
    )
    out = shape_logits(torch.randn(1, 4), [ShapeRow(shape_of(params))])
    assert draw(out, [params.greedy], [0], [0]).tolist() == [-1]
    assert "allowed_token_ids" in reason(out[0])


def test_draw_depends_on_seed_and_position_alone():
    logits = torch.zeros(6, 50)
    first = draw(logits, [False] * 6, [1, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2])
    again = draw(logits[:2], [False] * 2, [2, 1], [1, 2])
    assert again.tolist() == [first[4], first[2]]
    assert len(set(first.tolist())) > 3


def test_greedy_and_sampled_rows_mix():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    mixed = draw(logits, [True, False, True, False], [7] * 4, [1, 2, 3, 4])
    assert mixed[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    assert mixed[[1, 3]].tolist() == draw(logits[[1, 3]], [False] * 2, [7, 7], [2, 4]).tolist()


def test_log_probs_are_the_raw_ones_in_order():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    expected = torch.log_softmax(logits, -1)
    first, second = log_probs(logits, [3, 3], [3, 0])
    assert first.token_id == 3
    assert first.logprob == pytest.approx(float(expected[0, 3]))
    assert [token for token, _ in first.top] == [1, 2, 0]
    assert [value for _, value in first.top] == pytest.approx(expected[0, [1, 2, 0]].tolist())
    assert second.top == ()
    assert log_probs(logits[1:], [0], [2])[0].top[1][0] == 0  # of three equals the lowest id
    assert len(log_probs(logits[:1], [0], [99])[0].top) == 4
    assert log_probs(logits[:0], [], []) == []
