"""Whatever a caller hands in is served or refused by name before anything is queued."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretell.config import EngineConfig, SpeculationConfig
from foretell.models.chat_template import ChatTemplate
from foretell.models.tokenizer import Tokenizer
from foretell.sequence import SamplingParams
from tests import tiny

SCHEME = "prompt-lookup:k=4,ngram_min=1"
SHORT = tiny.greedy(max_tokens=4)
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
WHOLE = ("top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs", "n")


@pytest.fixture(scope="module")
def engine():
    llm = tiny.llm(SCHEME)
    yield llm
    tiny.check_idle(llm)


@pytest.mark.parametrize(
    "prompt",
    [
        (3, 4),
        range(3, 5),
        np.array([3, 4]),
        [np.int64(3), np.int64(4)],
        torch.tensor([3, 4]),
        [torch.tensor(3), torch.tensor(4)],
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_one_prompt_in_any_form(prompt, engine):
    (expected,) = engine.generate([[3, 4]], SHORT)
    (result,) = engine.generate(prompt, SHORT)
    assert result.prompt_token_ids == [3, 4]
    assert result.token_ids == expected.token_ids
    assert [t for delta in engine.stream(prompt, SHORT) for t in delta.token_ids] == (
        expected.token_ids
    )


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_many_prompts_in_any_form(kind, engine):
    rows = [[3, 4], [5, 6]]
    assert tiny.ids(engine.generate(kind(rows), SHORT)) == tiny.ids(engine.generate(rows, SHORT))


@pytest.mark.parametrize(
    "prompts",
    [
        [[2.7, 3]],
        [["2", "3"]],
        [[float("nan")]],
        [[True, False]],
        [[2**70]],
        [[-1]],
        [3, [4, 5]],
        [[4, 5], 3],
        [None],
        None,
        5,
        b"ab",
        {3, 4},
        [{"role": "user", "content": "x"}],
        [[]],
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(prompts, engine):
    with pytest.raises(ValueError, match="prompt"):
        engine.generate(prompts, SHORT)
    assert not engine.engine.has_work


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None], [], "iterator"], ids=repr)
def test_what_is_no_parameters_is_refused(params, engine):
    params = iter([SHORT]) if params == "iterator" else params
    with pytest.raises(ValueError, match="param"):
        engine.generate([[3, 4]], params)


@pytest.mark.parametrize("name", NUMBERS + WHOLE)
@pytest.mark.parametrize("value", ["1", True, [1], float("nan"), 1j])
def test_numbers_of_another_type_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_fractions_are_refused_where_they_mean_nothing(name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: 1.5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2**40),
        ("stop", b"a"),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("bad_token_ids", [5.5]),
        ("allowed_token_ids", ["5"]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: None}),
        ("logit_bias", [(5, 1)]),
        ("ignore_eos", "no"),
    ],
)
def test_other_fields_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_numpy_and_torch_numbers_are_numbers(engine):
    base = {"max_tokens": 6, "temperature": 0.5, "seed": 3, "top_k": 9, "logprobs": 2, "n": 2}
    odd = {
        name: np.float64(value) if isinstance(value, float) else np.int64(value)
        for name, value in base.items()
    }
    tensors = {name: torch.tensor(value) for name, value in base.items()}
    expected = engine.generate([[4, 5]], SamplingParams(**base))
    for given in (odd, tensors):
        assert SamplingParams(**given) == SamplingParams(**base)
        results = engine.generate([[4, 5]], SamplingParams(**given))
        assert tiny.ids(results) == tiny.ids(expected)


def test_two_requests_in_flight_never_share_an_id(engine):
    first = engine.stream([3, 4], SHORT, request_id="mine")
    got = list(next(first).token_ids)
    with pytest.raises(ValueError, match="mine"):
        next(engine.stream([5, 6], SHORT, request_id="mine"))
    for delta in first:
        got += delta.token_ids
    assert got == engine.generate([[3, 4]], SHORT)[0].token_ids
    assert list(engine.stream([5, 6], SHORT, request_id="mine")), "free again"


def test_own_ids_keep_clear_of_the_engines():
    engine = tiny.llm(SCHEME)
    streams = [engine.stream([3, 4], SHORT, request_id=f"request-{i}") for i in range(3)]
    for stream in streams:
        next(stream)
    assert len(engine.generate([[3, 4]] * 3, SHORT)) == 3
    assert all(list(stream)[-1].result.finish_reason == "length" for stream in streams)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 10**6),
        ("threads", "2"),
        ("page_size", True),
        ("page_size", 2.5),
        ("max_num_seqs", "4"),
        ("max_num_seqs", None),
        ("max_model_len", 64.5),
        ("prefix_caching", "no"),
        ("speculation", 5),
    ],
)
def test_engine_options_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("k", "5"), ("k", True), ("threshold", "x")])
def test_speculation_options_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SpeculationConfig(method="prompt-lookup", **{name: value})


@pytest.mark.parametrize("method", ["..:X", ".:X", ":", "no.such:Thing", "json:JSONDecoder"])
def test_methods_that_name_no_drafter_are_refused(method):
    with pytest.raises(ValueError, match="speculation method"):
        tiny.llm(method)


def test_a_scheme_without_a_name_or_an_option_given_twice_is_refused():
    with pytest.raises(ValueError, match="must be a scheme's name"):
        SpeculationConfig(method=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="k is given twice"):
        SpeculationConfig.parse("prompt-lookup:k=5,k=6")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "must be a list such as"),
        (b"hi", "must be a list such as"),
        ({"role": "user", "content": "hi"}, "must be a list such as"),
        (None, "must be a list such as"),
        (3, "must be a list such as"),
        ([], "messages is empty"),
        ([[]], "messages is empty"),
        (["hi"], "must be a dict such as"),
        ([{"role": "user"}], "has no content"),
        ([[{"role": "user"}], [{"role": "user", "content": "x"}]], "has no content"),
        ([{"content": "hi"}], "has no role"),
    ],
    ids=repr,
)
def test_messages_that_are_none(messages, says, engine, monkeypatch):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    monkeypatch.setattr(engine, "tokenizer", Tokenizer(None, "tiny", template))
    with pytest.raises(ValueError, match=says):
        engine.chat(messages)
