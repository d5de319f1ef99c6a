"""O: figures that add up, and lookup whose work is bounded. Counts only, never times."""

from __future__ import annotations

import random

import pytest

from tests import tiny
from tests.fakes import Scripted
from tests.faults.white_box import start, steps

PROMPTS = tiny.prompts(9, seed=5)
PARAMS = tiny.greedy(max_tokens=37)
COUNTERS = ("num_steps", "num_rows", "drafted", "accepted", "emitted", "num_finished", "num_failed")


@pytest.fixture
def plain(monkeypatch) -> list[list[int]]:
    found = tiny.plain(PROMPTS, PARAMS)
    answers = {tuple(p): a for p, a in zip(PROMPTS, found, strict=True)}
    monkeypatch.setattr(Scripted, "answers", answers)
    return found


SCHEMES = {
    "draft-model:weights=target,k=4": 1.0,
    "tests.fakes:Oracle,k=5": 1.0,
    "tests.fakes:Hostile,k=9": 0.0,
    "tests.fakes:Mixed,k=5": None,
    "tests.fakes:Bushy,k=20": None,
    "prompt-lookup:k=6,ngram_min=1": None,
    None: None,
}


@pytest.mark.parametrize("ends", ["length", "stop", "abort"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_O1_figures_add_up(scheme, ends, plain):
    llm, rng = tiny.llm(scheme, max_num_seqs=4), random.Random(1)
    sequences = []
    for answer in plain:
        stops = [answer[rng.randrange(5, 30)]] if ends == "stop" else []
        prompt = PROMPTS[len(sequences)]
        sequences += start(llm, [prompt], tiny.greedy(max_tokens=37, stop_token_ids=stops))
    emitted = {id(s): 0 for s in sequences}
    before = dict.fromkeys(COUNTERS, 0)
    for _ in steps(llm, sequences):
        now = {name: getattr(llm.engine.metrics, name) for name in COUNTERS}
        assert all(now[name] >= before[name] for name in COUNTERS), "a counter went down"
        before = now
        for sequence in sequences:
            new = sequence.num_output - emitted[id(sequence)]
            emitted[id(sequence)] += new
        if ends == "abort" and rng.random() < 0.15:
            llm.abort(rng.choice(sequences).request_id)
    metrics = llm.engine.metrics
    for sequence in sequences:
        stats = sequence.stats
        assert stats.num_tokens == sequence.num_output == len(stats.token_times)
        assert 0 <= stats.accepted <= stats.drafted
        assert stats.accepted == sum(sequence.from_draft) == sum(stats.accepted_by_position)
        assert stats.num_tokens - stats.num_passes <= stats.accepted <= stats.num_tokens
        assert len(stats.accepted_by_position) <= len(stats.drafted_by_position)
        for counts in (stats.drafted_by_position, stats.accepted_by_position):
            assert counts == sorted(counts, reverse=True), "deeper is never more often"
        by_position = zip(stats.accepted_by_position, stats.drafted_by_position, strict=False)
        assert all(a <= d for a, d in by_position)
        assert stats.tau == (stats.num_tokens / stats.num_passes if stats.num_passes else 0)
        rate = SCHEMES[scheme]
        if rate is not None and stats.drafted:
            assert stats.accepted == rate * stats.drafted
    for name, total in (
        ("drafted", "drafted"),
        ("accepted", "accepted"),
        ("emitted", "num_tokens"),
    ):
        assert getattr(metrics, name) == sum(getattr(s.stats, total) for s in sequences)
    assert metrics.num_finished == len(sequences)
    assert (metrics.drafted > 0) == (scheme is not None)
    assert metrics.num_failed == 0


def test_O1_an_accepted_length_is_what_the_script_says(plain):
    """Oracle with k = 5: six tokens a pass but for the first, from the prompt, and the last."""
    results = tiny.llm("tests.fakes:Oracle,k=5", max_num_seqs=1).generate(PROMPTS, PARAMS)
    for result in results:
        assert result.stats.num_passes == 1 + 36 // 6
        assert result.stats.accepted == result.stats.drafted == 30
        assert result.stats.accepted_by_position == [6] * 5
        assert result.from_draft == [False] + [True, True, True, True, True, False] * 6


@pytest.mark.parametrize("ngram_max", [2, 8, 500])
def test_O3_lookup_work_is_bounded_by_the_text_not_its_square(ngram_max):
    """Loop turns a token stay the same however long the text is and whatever range is asked."""
    scheme = f"prompt-lookup:k=8,ngram_min=1,ngram_max={ngram_max},patience=0"
    rng = random.Random(0)
    distinct = [rng.randrange(2, tiny.VOCAB) for _ in range(400)]
    for text in (distinct, distinct[:7] * 60, [5] * 400):
        turns = {}
        for length in (200, 400):
            llm = tiny.llm(scheme, max_model_len=480, kv_memory="16MiB")
            drafter = llm.engine.drafter
            (sequence,) = start(llm, [text[:length]], tiny.greedy(max_tokens=60))
            for _ in steps(llm, [sequence]):
                if sequence.slot >= 0 and sequence.slot in drafter._slots:
                    index = drafter._slots[sequence.slot].index
            turns[length] = index.operations
            assert index.operations <= 80 * len(sequence.tokens)
        assert ngram_max > 8 or turns[400] <= 3 * turns[200]


def test_O3_lookup_pauses_where_nothing_is_accepted(monkeypatch):
    """Hopeless drafts stop being made; with patience=0 they go on."""
    from foretell.drafters.prompt_lookup import NgramIndex

    def wrong(self, match, count):
        return [(self.tokens[match + 1] + 1) % tiny.VOCAB] * count

    monkeypatch.setattr(NgramIndex, "continuation", wrong)
    params = tiny.greedy(max_tokens=200)
    passes = {}
    for patience in (4, 0):
        llm = tiny.llm(f"prompt-lookup:k=6,ngram_min=1,patience={patience}")
        drafting = 0
        propose = llm.engine.drafter.propose

        def counting(ask, propose=propose):
            nonlocal drafting
            tree = propose(ask)
            drafting += max(tree.sizes) > 1
            return tree

        llm.engine.drafter.propose = counting
        (result,) = llm.generate([[5, 6, 5, 6, 5]], params)
        passes[patience] = drafting / result.stats.num_passes
    assert passes[4] < 0.25
    assert passes[0] > 0.6
