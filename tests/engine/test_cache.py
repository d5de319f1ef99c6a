"""Pages are never lost, never shared by mistake, and never named before their tokens are final."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.engine.cache import PageCache
from foretell.sequence import SamplingParams, Sequence


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("r", list(tokens), SamplingParams(), seed=0)


def fill(cache: PageCache, tokens: list[int], computed: int) -> Sequence:
    seq = sequence(tokens)
    seq.num_computed = cache.match(seq)
    assert cache.reserve(seq, len(tokens) + 1)
    seq.num_computed = max(seq.num_computed, computed)
    cache.publish(seq)
    return seq


def test_pages_of_committed_tokens_are_shared_and_the_last_token_is_always_computed():
    cache = PageCache(16, 4)
    first = fill(cache, list(range(12)), 11)
    again = sequence(list(range(12)))
    assert cache.match(again) == 8  # two full pages; the third has no final token yet
    assert again.pages == first.pages[:2]
    exact = sequence(list(range(8)))
    assert cache.match(exact) == 4  # all eight are cached, but the last must give logits
    cache.check([first, again, exact])


def test_only_equal_beginnings_match():
    cache = PageCache(16, 4)
    first = fill(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], 8)
    other = sequence([0, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.match(other) == 0  # its second page has the same tokens behind another page
    cache.check([first, other])


def test_uncommitted_tokens_are_never_named():
    cache = PageCache(16, 4)
    seq = fill(cache, list(range(9)), 3)
    probe = sequence(list(range(9)))
    assert cache.match(probe) == 0
    seq.num_computed = 4
    cache.publish(seq)
    assert cache.match(probe) == 4


def test_with_lookahead_a_page_is_shared_if_the_next_token_agrees_too():
    cache = PageCache(32, 4, lookahead=1)
    first = fill(cache, list(range(13)), 12)
    again, other = sequence(list(range(13))), sequence([*range(12), 99])
    assert cache.match(again) == 12
    assert cache.match(other) == 8
    # The other's own third page must not hang below the first's, whose last entry is not its.
    cache.release(other)
    second = fill(cache, [*range(8), 77, *range(20, 30)], 18)
    probe = sequence([*range(8), 77, *range(20, 30)])
    assert cache.match(probe) == 16
    assert probe.pages == second.pages[:4]
    assert probe.pages[1] != first.pages[1]


def test_without_prefix_caching_nothing_is_kept():
    cache = PageCache(16, 4, prefix_caching=False)
    first = fill(cache, list(range(12)), 11)
    assert cache.match(sequence(list(range(12)))) == 0
    cache.release(first)
    assert len(cache.free) == 16


def test_idle_pages_are_taken_again_longest_unused_and_tails_first():
    cache = PageCache(4, 2)
    old = fill(cache, [1, 2, 3, 4, 5], 4)
    cache.release(old)
    assert cache.num_free == 4
    new = sequence([9] * 5)
    assert cache.reserve(new, 6)  # the tail of `old` must go, its head can stay
    probe = sequence([1, 2, 3, 4, 5])
    assert cache.match(probe) == 2
    cache.check([new, probe])


def test_reserve_is_all_or_nothing_and_trim_returns_scratch():
    cache = PageCache(4, 4)
    seq = sequence([1, 2, 3])
    assert cache.reserve(seq, 16)
    assert len(seq.pages) == 4
    other = sequence([1])
    assert not cache.reserve(other, 1)
    assert other.pages == []
    cache.trim(seq, 3)
    assert len(seq.pages) == 1
    assert cache.num_free == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.booleans())
def test_any_mix_of_work_leaves_every_page_accounted_for(seed, page_size, caching):
    rng = random.Random(seed)
    cache = PageCache(24, page_size, prefix_caching=caching)
    rng.shuffle(cache.free)
    living: list[Sequence] = []
    for _ in range(60):
        if rng.random() < 0.4 or not living:
            seq = sequence([rng.randrange(2) for _ in range(rng.randrange(1, 14))])
            seq.num_computed = cache.match(seq)
            if cache.reserve(seq, len(seq.tokens) + 1):
                living.append(seq)
            else:
                cache.release(seq)
        else:
            seq = rng.choice(living)
            if rng.random() < 0.3:
                living.remove(seq)
                cache.release(seq)
            elif cache.reserve(seq, len(seq.tokens) + rng.randrange(1, 9)):
                seq.num_computed = len(seq.tokens) - 1
                cache.publish(seq)
                seq.tokens.append(rng.randrange(2))
                cache.trim(seq, len(seq.tokens))
        cache.check(living)
    for seq in living:
        cache.release(seq)
    cache.check([])
    cache.clear()
    assert sorted(cache.free) == list(range(24))


def test_check_sees_a_leak():
    cache = PageCache(4, 4)
    seq = sequence([1])
    cache.reserve(seq, 4)
    with pytest.raises(AssertionError):
        cache.check([])
