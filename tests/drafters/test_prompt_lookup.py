"""Prompt lookup against a naive search, its bounds in operations, and how it pauses."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.config import SpeculationConfig
from foretell.drafters.prompt_lookup import LONGEST_PAUSE, MAX_HOPS, NgramIndex, PromptLookup
from foretell.sequence import Sequence
from foretell.spec.drafter import Ask
from foretell.spec.seats import Least
from tests.drafters.tiny import MemoryRuntime, advance, ask, chain, commit, paths, sequence


def build(**options: int) -> PromptLookup:
    config = SpeculationConfig(
        method="prompt-lookup", k=8, options={name: str(value) for name, value in options.items()}
    )
    return PromptLookup(config, MemoryRuntime())


def naive(text: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """Last position and length of the longest earlier occurrence of the text's end, most recent
    first; (-1, 0) if there is none."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[-n:]:
                return end, n
    return -1, 0


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], int, int]:
    alphabet = draw(st.integers(1, 5))
    shortest = draw(st.integers(1, 4))
    longest = draw(st.integers(shortest, 12))
    return draw(st.lists(st.integers(0, alphabet - 1), max_size=60)), shortest, longest


@settings(max_examples=300, deadline=None)
@given(texts())
def test_finds_what_a_naive_search_finds(case: tuple[list[int], int, int]) -> None:
    text, shortest, longest = case
    index = NgramIndex(shortest, longest)
    for end in range(1, len(text) + 1):
        index.extend(text[end - 1 : end])
        match, length = naive(text[:end], shortest, longest)
        assert index.match[-1] == match
        assert not length or index.length[-1] == length


@settings(max_examples=100, deadline=None)
@given(texts(), st.integers(0, 12))
def test_drafts_what_followed_the_match(case: tuple[list[int], int, int], budget: int) -> None:
    text, shortest, longest = case
    text = [*text, 0]
    drafter = build(ngram_min=shortest, ngram_max=longest)
    draft = chain(drafter.propose(ask([sequence(text)], budget)))
    match, _ = naive(text, shortest, longest)
    if match < 0:
        assert draft == []
        return
    assert len(draft) == budget, "a match always gives the whole budget"
    known = text + draft
    assert draft == known[match + 1 : match + 1 + budget]


@settings(max_examples=100, deadline=None)
@given(texts(), st.integers(1, 12), st.integers(2, 4))
def test_branches_are_distinct_continuations(
    case: tuple[list[int], int, int], budget: int, branches: int
) -> None:
    text, shortest, longest = case
    text = [*text, 0]
    options = {"ngram_min": shortest, "ngram_max": longest}
    one = chain(build(**options).propose(ask([sequence(text)], budget)))
    tree = build(**options, branches=branches).propose(ask([sequence(text)], budget))
    tree.check(10)
    drafts = paths(tree)
    assert sum(map(len, drafts)) == len(one), "all of the budget is used, or none"
    assert len(drafts) <= branches
    assert not one or any(draft == one[: len(draft)] for draft in drafts)
    assert not one or tree.tokens[0, 1] == one[0], "the best match comes first"
    first = {draft[0] for draft in drafts}
    assert len(first) == len(drafts)
    for token in first:  # each is what followed the end of the text somewhere
        end = text[-shortest:]
        ends = [i for i in range(len(text) - shortest) if text[i : i + shortest] == end]
        assert token in {text[i + shortest] for i in ends}


def test_two_branches_show_both_continuations() -> None:
    tree = build(branches=2).propose(ask([sequence([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])], 4))
    assert paths(tree) == [[4, 8], [3, 9]]


def test_repeating_text_is_continued_in_full() -> None:
    assert chain(build().propose(ask([sequence([5, 5, 5])], 6))) == [5] * 6
    assert chain(build().propose(ask([sequence([5, 6, 5, 6])], 5))) == [5, 6, 5, 6, 5]


@pytest.mark.parametrize("prompt", [[1], [1, 1], [1, 2, 3], [1, 2]])
def test_short_or_distinct_prompts_draft_nothing_or_little(prompt: list[int]) -> None:
    tree = build(ngram_min=1).propose(Ask([sequence(prompt)], [3]))
    tree.check(10)
    assert (tree.num_drafted == [3]) == (prompt == [1, 1])


HARD = {
    "one token": [7] * 20_000,
    "period 300": [i % 300 for i in range(20_000)],
    "two tokens": random.Random(1).choices([0, 1], k=20_000),
    "no match": list(range(20_000)),
    "words": [int(random.Random(i).paretovariate(0.6)) for i in range(20_000)],
    "fibonacci": [],
}
_a, _b = [0], [0, 1]
while len(_b) < 20_000:
    _a, _b = _b, _b + _a
HARD["fibonacci"] = _b[:20_000]


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("longest", [5, 500])
def test_cost_does_not_grow_with_text_or_range(name: str, longest: int) -> None:
    index = NgramIndex(2, longest)
    halves = []
    for part in (HARD[name][:10_000], HARD[name][10_000:]):
        before = index.operations
        index.extend(part)
        halves.append(index.operations - before)
    bound = (MAX_HOPS + 8) * 10_000
    assert max(halves) <= bound
    assert halves[1] <= 1.5 * halves[0] + 10_000, "a later token costs what an early one did"
    before = index.operations
    for branches in (1, 8):
        for match, _ in index.matches(branches):
            assert len(index.continuation(match, 8)) == 8
    assert index.operations - before <= 4 * 9


def test_long_repeats_keep_exact_lengths_beyond_the_refresh_bound() -> None:
    text = [7] * 300 + [8] + [7] * 200
    index = NgramIndex(2, 500)
    index.extend(text)
    assert index.length[-1] == 200
    assert text[index.match[-1] - 199 : index.match[-1] + 1] == [7] * 200


def rounds(drafter: PromptLookup, accept: int, count: int) -> list[int]:
    """Runs rounds on a text that always has a match; of each draft ``accept`` tokens are taken,
    then comes another. Returns the number of drafted tokens of each round."""
    text = sequence([1, 2, 3, 1, 2])
    commit(drafter, (text, 5))
    drafted: list[int] = []
    for _ in range(count):
        draft = chain(drafter.propose(ask([text], 4)))
        drafted.append(len(draft))
        new = draft[:accept]
        wrong = (draft[len(new)] + 1) % 20 + 100 if len(draft) > len(new) else 50
        advance(drafter, [(text, [*new, wrong, 1, 2])])  # ends in 1, 2: matches again
    return drafted


def test_poor_acceptance_pauses_drafting_and_is_retried() -> None:
    drafted = rounds(build(patience=3), 0, 300)
    tries = [i for i, n in enumerate(drafted) if n]
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[:3] == [1, 1, 1]
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_PAUSE + 1
    assert rounds(build(patience=3), 0, 300) == drafted, "counts steps: a run repeats exactly"


def test_good_acceptance_never_pauses() -> None:
    assert all(rounds(build(patience=3), 1, 100))
    assert all(rounds(build(patience=0), 0, 100)), "patience 0 never pauses"


def test_drafting_recovers() -> None:
    drafter = build(patience=1)
    text = sequence([1, 2, 3, 1, 2])
    commit(drafter, (text, 5))
    for _ in range(40):
        drafter.propose(ask([text], 4))
        advance(drafter, [(text, [99, 1, 2])])
    drafted: list[int] = []
    for _ in range(2 * LONGEST_PAUSE):
        draft = chain(drafter.propose(ask([text], 4)))
        drafted.append(len(draft))
        advance(drafter, [(text, draft or [99, 1, 2])])
    assert all(drafted[-10:])


def test_a_slot_is_never_confused_with_its_former_sequence() -> None:
    drafter = build()
    drafter.propose(ask([sequence([1, 2, 3, 1, 2])], 4))
    assert chain(drafter.propose(ask([sequence([4, 5, 6, 4, 5])], 1))) == [6]  # nobody forgot
    text = sequence([1, 2, 9, 1, 2])
    assert chain(drafter.propose(ask([text], 1))) == [9]
    del text.tokens[4:]  # a text that became shorter starts anew
    assert chain(drafter.propose(ask([text], 1))) == []


def test_a_short_match_is_drafted_where_such_matches_were_right() -> None:
    """Whether it was drafted or not, what followed shows how often a match is right."""
    drafter = build(ngram_max=4, patience=0)
    least = [Least(0.6, 0.6)]

    def drafts(text: Sequence) -> list[int]:
        return chain(drafter.propose(replace(ask([text], 4), least=least)))

    text = sequence([1, 2, 3, 9, 1, 2])
    assert drafts(text) == [], "a match of two is not that good"
    for token in range(100, 140):  # each pair comes twice, with the same token behind it
        text.tokens += [token, token + 50, token + 100, token + 200, token, token + 50]
        drafts(text)
        text.tokens.append(token + 100)
    text.tokens += [7, 300, 301, 302, 8, 300, 301]
    (drafted,) = [drafter.propose(replace(ask([text], 4), least=least))]
    assert chain(drafted)[:1] == [302]
    assert drafted.chances is not None
    assert drafted.chances[0][1] > 0.6
