"""Kind H of the faults seen in the field: streams that lose text, and characters cut in two."""

from __future__ import annotations

import random

import pytest

from foretell.engine.detokenize import Detokenizer
from foretell.llm import LLM
from foretell.sequence import FinishReason
from tests import tiny
from tests.faults import rigs
from tests.faults.rigs import ALL

PROMPTS = [*tiny.prompts(2, seed=9), rigs.COPY]


def streamed(engine: LLM, prompt: list[int], params) -> tuple[str, list[int], list]:
    """Deltas put together, and their results; every delta is checked against its own result."""
    deltas = list(engine.stream(prompt, params))
    assert deltas[-1].result
    assert not any(delta.result for delta in deltas[:-1])
    assert all(len(delta.from_draft) == len(delta.token_ids) for delta in deltas)
    text = "".join(delta.text for delta in deltas)
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert [f for d in deltas for f in d.from_draft] == deltas[-1].result.from_draft
    return text, tokens, deltas


@pytest.mark.parametrize("settings", [tiny.greedy(), tiny.sampled()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheme", ALL)
def test_H1_deltas_put_together_are_the_answer(scheme, settings):
    answers = tiny.ids(rigs.plain(PROMPTS, settings))
    rigs.script(PROMPTS, answers)
    engine = rigs.spoken(scheme.format(k=8))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = rigs.RANDOM_TEXT.decode([*prompt, *answer])
        stops = (), (whole[-9:-7], whole[-20:-15]), ("th", "zz")
        for stop in stops:
            params = rigs.params(settings, stop=[s for s in stop if s])
            (expected,) = engine.generate(prompt, params)
            text, tokens, deltas = streamed(engine, prompt, params)
            assert (text, tokens) == (expected.text, expected.token_ids)
            assert rigs.view(deltas[-1].result) == rigs.view(expected)
        if "Oracle" in scheme:
            assert max(len(delta.token_ids) for delta in deltas) > 1


def test_H1_any_chunking_gives_the_same_text():
    """One counting answer in 200 random chunkings, a stop string in half of them."""
    prompt, answer = [2], rigs.count_from(2, 70)
    rigs.script([prompt], [answer])
    for seed in range(100):
        engine_of = _ragged()
        engine_of.engine.drafter.options.__dict__["seed"] = seed  # frozen, but this is a test
        for stop in ([], ["seven e"]):
            params = tiny.greedy(max_tokens=60, stop=stop)
            text, tokens, _ = streamed(engine_of, prompt, params)
            expected = _expected(prompt, tuple(stop))
            assert (text, tokens) == (expected.text, expected.token_ids)


_CACHE: dict = {}


def _ragged() -> LLM:
    return _CACHE.setdefault("engine", rigs.counting("tests.faults.rigs:Ragged,k=9"))


def _expected(prompt: list[int], stop: tuple[str, ...]):
    if stop not in _CACHE:
        params = tiny.greedy(max_tokens=60, stop=stop)
        (_CACHE[stop],) = rigs.plain([prompt], params, rigs.counting)
    return _CACHE[stop]


def test_H1_n_answers_in_one_stream_stay_apart():
    params = tiny.sampled(n=3, max_tokens=20)
    expected = rigs.plain([PROMPTS[0]], params, rigs.spoken)
    engine = rigs.spoken("draft-model:weights=target,k=5")
    texts, ids = [""] * 3, [list[int]() for _ in range(3)]
    for delta in engine.stream(PROMPTS[0], params):
        texts[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
    assert texts == [result.text for result in expected]
    assert ids == tiny.ids(expected)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("scheme", [*rigs.SELF, rigs.MIXED, rigs.LOOKUP])
def test_H3_no_delta_holds_half_a_character(scheme, k):
    """Emoji, ZWJ families, Hangul and CJK over token borders; blocks begin everywhere in them."""
    prompts = [[2 + start] for start in range(k + 1)]
    answers = [rigs.count_from(prompt[0], 70) for prompt in prompts]
    rigs.script(prompts, answers)
    engine = rigs.counting(scheme.format(k=k))
    for prompt in prompts:
        end = 63 - prompt[0]  # up to the last piece of the text
        text, _, deltas = streamed(engine, prompt, tiny.greedy(max_tokens=end))
        assert "\ufffd" not in "".join(delta.text for delta in deltas)
        assert text == rigs.TEXT[len(rigs.COUNTING_TEXT.decode([*range(2, prompt[0] + 1)])) :] or (
            rigs.COUNTING_TEXT.decode([*range(2, prompt[0] + 1)]).endswith("\ufffd")
        )


@pytest.mark.parametrize("scheme", [*rigs.SELF, rigs.MIXED])
def test_H3_a_character_cut_by_the_cap_is_flushed_at_the_end_only(scheme):
    """Every cap: the flushed rest is what plain decoding shows."""
    prompt, answer = [2], rigs.count_from(2, 70)
    rigs.script([prompt], [answer])
    engine = rigs.counting(scheme.format(k=8))
    cut = 0
    for cap in range(1, 61):
        params = tiny.greedy(max_tokens=cap)
        text, _, deltas = streamed(engine, prompt, params)
        known = rigs.COUNTING_TEXT.decode(prompt)
        assert text == rigs.COUNTING_TEXT.decode(prompt + answer[:cap])[len(known) :]
        assert all("\ufffd" not in delta.text for delta in deltas[:-1])
        cut += text.endswith("\ufffd")
    assert cut > 10


@pytest.mark.parametrize("scheme", [*rigs.SELF, rigs.MIXED])
@pytest.mark.parametrize("stop", ["é", "京", "한국", "\U0001f642", "\u200d\U0001f469", "y"])
def test_H3_stop_strings_with_such_characters_match(scheme, stop):
    prompt = [2]
    rigs.script([prompt], [rigs.count_from(2, 70)])
    engine = rigs.counting(scheme.format(k=8))
    params = tiny.greedy(max_tokens=60, stop=[stop])
    text, tokens, deltas = streamed(engine, prompt, params)
    assert (deltas[-1].result.finish_reason == FinishReason.STOP) == (stop in rigs.TEXT)
    if stop in rigs.TEXT:
        known = rigs.COUNTING_TEXT.decode(prompt)
        assert text == rigs.TEXT[len(known) : rigs.TEXT.index(stop)]
        without_last = rigs.COUNTING_TEXT.decode(prompt + tokens[:-1])
        assert stop not in without_last


def test_H3_a_stop_behind_which_a_character_begins_is_found_at_once():
    """One token holds the end of the stop and the first byte of what follows."""
    pieces = rigs.Pieces([b"", b"", b"ab", b"c\xe6", b"\x9d\xb1"])
    detokenizer = Detokenizer(pieces, [2], ["abc"])
    assert not detokenizer.push(2)
    assert detokenizer.push(3)
    assert detokenizer.text == ""


def test_H3_random_pieces_of_random_text():
    """Any text in any pieces comes out whole, and never more than is certain."""
    rng = random.Random(5)
    letters = "aé東한\U0001f642\u200d\U0001f469 "
    for _ in range(200):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(1, 30)))
        data, pieces = text.encode(), [b"", b""]
        while data:
            size = rng.randint(1, 5)
            pieces.append(data[:size])
            data = data[size:]
        detokenizer = Detokenizer(rigs.Pieces(pieces), [])
        for token in range(2, len(pieces)):
            detokenizer.push(token)
            shown = detokenizer.text[: detokenizer.certain]
            assert text.startswith(shown)
            whole = b"".join(pieces[: token + 1]).decode(errors="ignore")
            assert shown == whole, "held back more than an incomplete character"
        detokenizer.finish()
        assert detokenizer.text == text
