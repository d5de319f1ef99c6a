"""Kind A of the faults seen in the field: ends that fall inside an accepted block."""

from __future__ import annotations

import pytest

from foretell.sequence import FinishReason, SamplingParams
from tests import tiny
from tests.faults import rigs
from tests.faults.rigs import ALL, COPY, SELF

PROMPTS = [*tiny.prompts(2, seed=4), COPY]
_ANSWERS: dict[float, list[list[int]]] = {}


def baseline(settings: SamplingParams) -> list[list[int]]:
    """Answers that run past every end, also known to the scripted drafters."""
    if settings.temperature not in _ANSWERS:
        long = rigs.params(settings, max_tokens=40, ignore_eos=True)
        _ANSWERS[settings.temperature] = tiny.ids(rigs.plain(PROMPTS, long))
    rigs.script(PROMPTS, _ANSWERS[settings.temperature], (tiny.EOS,))
    return _ANSWERS[settings.temperature]


def cut(answer: list[int], ends: list[int], cap: int) -> tuple[list[int], FinishReason]:
    """The property itself: the first end in token order wins."""
    for place, token in enumerate(answer[:cap]):
        if token in ends:
            return answer[: place + 1], FinishReason.STOP
    return answer[:cap], FinishReason.LENGTH


@pytest.mark.parametrize("scheme", SELF)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_A1_eos_inside_an_accepted_block(scheme, k, temperature):
    """Every token of the baseline is declared an end in turn, so that ends fall on each place."""
    settings = tiny.sampled(temperature=temperature)
    answers = baseline(settings)
    engine = tiny.llm(scheme.format(k=k), max_num_seqs=64, kv_memory="32MiB")
    places = range(2 * (k + 1) + 1)
    prompts, cases, expected = [], [], []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for p in places:
            for ends in ([answer[p]], [answer[p], answer[p + 2], 3]):  # several at once, too
                prompts.append(prompt)
                cases.append(
                    rigs.params(
                        settings, max_tokens=2 * k + 6, ignore_eos=True, stop_token_ids=ends
                    )
                )
                expected.append(cut(answer, ends, 2 * k + 6))
    for result, end in zip(engine.generate(prompts, cases), expected, strict=True):
        assert (result.token_ids, result.finish_reason) == end
        rigs.check_counts(result)
    if temperature:  # greedy text of a tiny model repeats itself: few of its tokens are new
        answer = answers[0]
        new = {p % (k + 1) for p in places if answer[p] not in answer[:p]}
        assert len(new) == k + 1, "not every place in a block was tried"


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("scheme", ALL)
def test_A1_the_models_own_eos_streamed_or_not(scheme, k):
    """The counting model comes to its end of text after as many tokens as one wants."""
    prompts = [[(tiny.EOS - 1 - p) % tiny.VOCAB] for p in range(2 * (k + 1))]
    answers = [rigs.count_from(prompt[0], 60) for prompt in prompts]
    rigs.script(prompts, answers)
    engine = rigs.counting(scheme.format(k=k))
    for p, result in enumerate(engine.generate(prompts, tiny.greedy(ignore_eos=False))):
        assert result.token_ids == answers[p][: p + 1]
        assert result.finish_reason == FinishReason.STOP
        rigs.check_counts(result)
    for p, prompt in enumerate(prompts):
        deltas = list(engine.stream(prompt, tiny.greedy(ignore_eos=False)))
        assert [t for d in deltas for t in d.token_ids] == answers[p][: p + 1]
        assert "".join(d.text for d in deltas) == deltas[-1].result.text
    kept = engine.generate(prompts, tiny.greedy(ignore_eos=True, max_tokens=30))
    assert tiny.ids(kept) == [answer[:30] for answer in answers]


def first_end(text_after: list[str], stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Tokens used and text left if texts grow token by token and the first complete stop wins."""
    for used, text in enumerate(text_after, 1):
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        if ends:
            return used, text[: min(ends)[1]]
    return None


def texts_after(prompt: list[int], answer: list[int]) -> list[str]:
    """Text known after each token, characters whose bytes are incomplete left out."""
    known = rigs.COUNTING_TEXT.decode(prompt)
    out = []
    for used in range(1, len(answer) + 1):
        text = rigs.COUNTING_TEXT.decode(prompt + answer[:used])
        out.append(text[len(known) :].rstrip("\ufffd"))
    return out


STOPS = [
    *[
        (word,)
        for word in ("e;", "ve", "o ", "é", "é,", "東京", "한국", "\U0001f642", "END", "D f")
    ],
    ("\U0001f469\u200d\U0001f469",),
    (" four END five STOP",),
    ("STOP", "END", "five"),
    ("ND five", "END five STOP", "D"),  # the one that ends first, not the one that starts first
    ("three", "e;"),
    ("never",),
    ("One two",),  # the prompt has the first half of it
]


@pytest.mark.parametrize("scheme", [*SELF, "tests.faults.rigs:Ragged,k={k}"])
@pytest.mark.parametrize("k", [3, 8])
def test_A2_stop_strings_anywhere_in_a_block_and_across_blocks(scheme, k):
    """Starting points shift the blocks, so that each stop falls on every place in them."""
    starts = [2 + start for start in range(k + 1)]
    answers = {start: rigs.count_from(start, 70) for start in starts}
    rigs.script([[start] for start in starts], list(answers.values()))
    engine = rigs.counting(scheme.format(k=k), max_num_seqs=32)
    cases = [(start, stops) for start in starts for stops in STOPS]
    results = engine.generate(
        [[start] for start, _ in cases],
        [tiny.greedy(stop=stops, max_tokens=60) for _, stops in cases],
    )
    tried = {FinishReason.STOP: 0, FinishReason.LENGTH: 0}
    for (start, stops), result in zip(cases, results, strict=True):
        end = first_end(texts_after([start], answers[start][:60]), stops)
        assert result.finish_reason == (FinishReason.STOP if end else FinishReason.LENGTH)
        tried[result.finish_reason] += 1
        if end:
            assert (len(result.token_ids), result.text) == end
        rigs.check_counts(result)
    assert tried[FinishReason.LENGTH] >= 2 * len(starts) - 2  # never, and half in the prompt
    assert tried[FinishReason.STOP] > 12 * len(starts)


@pytest.mark.parametrize("stops", STOPS)
def test_A2_as_without_speculation(stops):
    """The rule of `first_end` is that of plain decoding, too."""
    expected = first_end(texts_after([2], rigs.count_from(2, 60)), stops)
    (result,) = rigs.plain([[2]], tiny.greedy(stop=stops, max_tokens=60), rigs.counting)
    if expected:
        assert (len(result.token_ids), result.text) == expected
    else:
        assert result.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("scheme", [*SELF, rigs.MIXED])
@pytest.mark.parametrize("k", [2, 5, 8])
def test_A3_whichever_end_comes_first_in_token_order_wins(scheme, k):
    """The cap goes past a stop from behind it to before it."""
    prompt = [2]
    answer = rigs.count_from(2, 60)
    rigs.script([prompt], [answer])
    engine = rigs.counting(scheme.format(k=k))
    texts = texts_after(prompt, answer)
    for stop in ("e;", "é, ", "hree; n"):
        used, text = first_end(texts, (stop,))
        cases = [
            tiny.greedy(stop=[stop], max_tokens=cap)
            for cap in range(max(1, used - 2), used + k + 2)
        ]
        results = engine.generate([prompt] * len(cases), cases)
        rigs.check_same(results, rigs.plain([prompt] * len(cases), cases, rigs.counting))
        for case, result in zip(cases, results, strict=True):
            stopped = used <= case.max_tokens
            assert len(result.token_ids) == min(used, case.max_tokens)
            assert result.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
            # a character that the cap cuts is shown as such
            assert result.text.rstrip("\ufffd") == (text if stopped else texts[case.max_tokens - 1])


@pytest.mark.parametrize("scheme", [*SELF, rigs.MIXED])
@pytest.mark.parametrize("k", [2, 5, 8])
def test_A3_stop_tokens_against_the_cap(scheme, k):
    settings = tiny.sampled(temperature=1.5)
    answers = baseline(settings)
    engine = tiny.llm(scheme.format(k=k))
    for prompt, answer in zip(PROMPTS[:2], answers, strict=False):
        for p in range(3, 6):
            cases = [
                rigs.params(settings, stop_token_ids=[answer[p]], max_tokens=cap)
                for cap in range(p - 1, p + k + 3)
            ]
            for case, result in zip(
                cases, engine.generate([prompt] * len(cases), cases), strict=True
            ):
                expected = cut(answer, [answer[p]], case.max_tokens)
                assert (result.token_ids, result.finish_reason) == expected


def test_A4_text_ids_and_logprobs_describe_the_same_prefix():
    """The passage is copied from the prompt, so that lookup drafts run across the stop."""
    prompt = [*range(2, 64), 0, 1, *range(2, 8)]
    engine = rigs.counting(rigs.LOOKUP.format(k=12))
    for stop in ("naïve", "é,", "東京 ", "ve c", "\U0001f642"):
        params = tiny.greedy(stop=[stop], logprobs=2, max_tokens=60)
        (result,) = engine.generate([prompt], params)
        assert result.stats.accepted > 0
        rigs.check_same([result], rigs.plain([prompt], params, rigs.counting))
        known = rigs.COUNTING_TEXT.decode(prompt)
        whole = rigs.COUNTING_TEXT.decode(prompt + result.token_ids)[len(known) :]
        assert stop in whole
        assert whole.startswith(result.text)
        assert result.text == whole[: whole.index(stop)]
        before = rigs.COUNTING_TEXT.decode(prompt + result.token_ids[:-1])[len(known) :]
        assert stop not in before, "tokens were kept behind the stop"


@pytest.mark.parametrize("scheme", ALL)
def test_A4_with_random_text(scheme):
    """Stop strings taken from what a random model says, broken characters and all."""
    settings = tiny.sampled(temperature=1.5, max_tokens=40, logprobs=2)
    whole = rigs.plain(PROMPTS, settings, rigs.spoken)
    rigs.script(PROMPTS, tiny.ids(whole), (tiny.EOS,))
    engine = rigs.spoken(scheme.format(k=8))
    stopped = 0
    for start in range(3, 9):
        cases = [
            rigs.params(settings, stop=[r.text[start : start + 2], r.text[start + 4 : start + 9]])
            for r in whole
        ]
        results = engine.generate(PROMPTS, cases)
        rigs.check_same(results, rigs.plain(PROMPTS, cases, rigs.spoken))
        stopped += sum(r.finish_reason == FinishReason.STOP for r in results)
    assert stopped == 6 * len(PROMPTS)


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("k", [1, 4])
def test_A5_counters_count_what_is_returned(scheme, k):
    """Every cap up to 3 k + 3, with a stop token in the way of the later ones."""
    settings = tiny.sampled(temperature=1.5)
    answers = baseline(settings)
    engine = tiny.llm(scheme.format(k=k))
    for prompt, answer in zip(PROMPTS[:2], answers, strict=False):
        cases = [
            rigs.params(settings, max_tokens=cap, stop_token_ids=[answer[2 * k + 2]])
            for cap in range(1, 3 * k + 4)
        ]
        before = engine.engine.metrics.emitted
        results = engine.generate([prompt] * len(cases), cases)
        for case, result in zip(cases, results, strict=True):
            expected = cut(answer, [answer[2 * k + 2]], case.max_tokens)
            assert (result.token_ids, result.finish_reason) == expected
            rigs.check_counts(result)
        assert engine.engine.metrics.emitted - before == sum(len(r.token_ids) for r in results)
    deltas = list(engine.stream(PROMPTS[0], rigs.params(settings, max_tokens=3 * k)))
    assert sum(len(d.token_ids) for d in deltas) == deltas[-1].result.stats.num_tokens == 3 * k


@pytest.mark.parametrize("scheme", ["EndChain,k=4", "EndEverywhere,k=9"])
@pytest.mark.parametrize("settings", [tiny.greedy(), tiny.sampled()], ids=["greedy", "sampled"])
def test_A6_a_proposed_end_that_the_target_refuses_ends_nothing(scheme, settings):
    settings = rigs.params(settings, ignore_eos=False, bad_token_ids=[tiny.EOS], max_tokens=40)
    answers = tiny.ids(rigs.plain(PROMPTS, settings))
    rigs.script(PROMPTS, answers, (tiny.EOS,))
    engine = tiny.llm("tests.faults.rigs:" + scheme)
    results = engine.generate(PROMPTS, settings)
    assert tiny.ids(results) == answers
    for result in results:
        assert result.finish_reason == FinishReason.LENGTH
        assert result.stats.drafted > result.stats.accepted > 0
    tiny.check_idle(engine)
