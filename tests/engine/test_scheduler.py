"""First come first served, no prompt starves an answer, and pages always come back."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.config import EngineConfig
from foretell.engine.cache import PageCache
from foretell.engine.scheduler import Scheduler
from foretell.sequence import FinishReason, SamplingParams, Sequence
from foretell.spec.seats import Limit, Seat


def make(pages=64, page_size=4, seqs=4, rows=16, limit=0):
    config = EngineConfig(
        max_num_seqs=seqs, max_num_batched_tokens=max(rows, seqs), page_size=page_size
    )
    left: list[int] = []
    cache = PageCache(pages, page_size)
    return (
        Scheduler(
            config,
            cache,
            left.extend,
            lambda s: Seat(s.slot, len(s.tokens), [Limit(limit, limit)], [0]),
        ),
        cache,
        left,
    )


def sequence(name: str, length: int) -> Sequence:
    return Sequence(name, list(range(length)), SamplingParams(), seed=0)


def run(items) -> None:
    """What a target pass would do: compute the rows and add a token at the end."""
    for item in items:
        item.sequence.num_computed += item.num_run
        if item.sequence.num_computed == len(item.sequence.tokens):
            item.sequence.tokens.append(7)
            item.sequence.from_draft.append(False)


def test_prompts_are_chunked_and_running_answers_get_a_row_each_step():
    scheduler, _, _ = make(rows=8)
    short, long = sequence("short", 3), sequence("long", 20)
    scheduler.add(short)
    scheduler.add(long)
    seen = []
    for _ in range(5):
        items = scheduler.schedule()
        seen.append({item.sequence.request_id: item.num_run for item in items})
        assert sum(item.num_run for item in items) <= 8
        run(items)
        scheduler.check()
    assert seen[0] == {"short": 3, "long": 5}
    assert seen[1] == {"short": 1, "long": 7}
    assert seen[2] == {"short": 1, "long": 7}
    assert seen[3] == {"short": 1, "long": 1}


def test_no_trees_while_a_prompt_is_computed():
    scheduler, _, _ = make(rows=8, limit=4)
    scheduler.add(sequence("a", 3))
    run(scheduler.schedule())
    scheduler.add(sequence("b", 9))
    mixed = scheduler.schedule()
    assert [item.budget for item in mixed] == [0, 0]
    run(mixed)
    run(scheduler.schedule())
    assert [item.budget for item in scheduler.schedule()] == [3, 3]  # 8 rows, 2 roots


def test_waiting_is_first_come_first_served():
    scheduler, _, _ = make(pages=8, seqs=2, rows=64)
    for name, length in (("big", 20), ("bigger", 25), ("small", 2)):
        scheduler.add(sequence(name, length))
    assert [item.sequence.request_id for item in scheduler.schedule()] == ["big"]
    # small would fit, but bigger came first
    assert [s.request_id for s in scheduler.waiting] == ["bigger", "small"]


def test_the_youngest_is_preempted_and_comes_first_in_the_queue():
    scheduler, _, left = make(pages=6, seqs=3, rows=64)
    old, young = sequence("old", 9), sequence("young", 8)
    scheduler.add(old)
    scheduler.add(young)
    scheduler.add(sequence("next", 2))
    while not scheduler.num_preemptions:
        run(scheduler.schedule())
        scheduler.check()
    assert (young.slot, young.num_computed, young.pages) == (-1, 0, [])
    assert young.stats.num_preemptions == 1
    assert left == [1]
    assert scheduler.waiting[0] is young
    old.finish_reason = FinishReason.STOP
    scheduler.remove(old)
    items = scheduler.schedule()
    assert young in [item.sequence for item in items]
    scheduler.check()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 6), st.sampled_from([1, 4]))
def test_any_traffic_ends_with_all_pages_free(seed, limit, page_size):
    rng = random.Random(seed)
    pages = 64 // page_size
    scheduler, cache, _ = make(pages=pages, page_size=page_size, seqs=3, rows=9, limit=limit)
    living = []
    for step in range(80):
        if rng.random() < 0.3 and step < 60:
            seq = sequence(f"{step}", rng.randrange(1, 30))
            living.append(seq)
            scheduler.add(seq)
        items = scheduler.schedule()
        assert sum(item.num_run + item.budget for item in items) <= 9
        for item in items:
            cells = len(item.sequence.pages) * page_size
            reach = item.sequence.num_computed + item.num_run + item.budget + 1
            assert cells >= reach, "run, tree and the next token have a place"
        run(items)
        for item in items:
            cache.publish(item.sequence)
            cache.trim(item.sequence, len(item.sequence.tokens))
        for seq in list(living):
            if len(seq.tokens) > 40 or rng.random() < 0.05:
                seq.finish_reason = FinishReason.LENGTH
                scheduler.remove(seq)
                living.remove(seq)
        scheduler.check()
    for seq in living:
        scheduler.remove(seq)
    cache.clear()
    assert sorted(cache.free) == list(range(pages))
