"""G: grammars. The answer obeys, ends with its grammar, and is the same with drafts of any kind."""

from __future__ import annotations

import json

import pytest

from foretell.sequence import FinishReason, SamplingParams
from tests import tiny
from tests.fakes import Scripted
from tests.server import rig

NAME = {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"}
SCHEMAS = [
    {"type": "object", "properties": {"a": {"const": True}}, "required": ["a"],
     "additionalProperties": False},
    {"type": "object", "properties": {"name": NAME, "n": {"enum": [1, 22, 333]}},
     "required": ["name", "n"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["the", "then", "x"]}, "minItems": 1, "maxItems": 4},
    {"enum": ["yes", "no"]},
]  # fmt: skip
OPTIONAL_END = 'start: "ab" /[xyz]{0,9}/'
GRAMMARS = [*map(json.dumps, SCHEMAS), OPTIONAL_END]
NEAR_MISS = 'Answer as {"a": True} or {"name": "th", "n": 4} or {"a": tru}. {"a": fals '
SCHEMES = [
    rig.LOOKUP,
    "draft-model:weights=target,k=1",
    "draft-model:weights=target,k=7",
    "tests.fakes:Noise,k=8",
    "tests.fakes:Hostile,k=8",
    "tests.fakes:Mixed,k=8",
    "tests.fakes:Oracle,k=8",
    "tests.fakes:Bushy,k=12",
]


def params(grammar: str, **changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 3, "max_tokens": 80} | changes),
                          grammar=grammar)  # fmt: skip


def settings() -> list[SamplingParams]:
    sampled = [params(grammar, seed=seed) for grammar in GRAMMARS for seed in (1, 2)]
    return [*sampled, *(params(grammar, temperature=0) for grammar in GRAMMARS)]


@pytest.fixture(scope="module")
def expected():
    engine = rig.llm(max_num_seqs=1, prefix_caching=False)
    return [engine.generate(NEAR_MISS, own)[0] for own in settings()]


def test_plain_answers_obey(expected):
    whole = 0
    for own, result in zip(settings(), expected, strict=True):
        if result.finish_reason == FinishReason.LENGTH:
            continue  # a greedy random model may be fond of spaces
        whole += 1
        assert result.finish_reason == FinishReason.STOP
        if own.grammar == OPTIONAL_END:
            assert result.text[:2] == "ab"
            assert set(result.text[2:]) <= set("xyz")
        else:
            json.loads(result.text)
    assert whole > 10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_G2_same_text_whatever_is_drafted(scheme, expected, monkeypatch):
    ids = rig.model().tokenizer.encode(NEAR_MISS)
    engine = rig.llm(scheme)
    for own, result in zip(settings(), expected, strict=True):
        past = [*result.token_ids, 1, 90, 91, 1]  # drafts that run past the grammar's end
        monkeypatch.setattr(Scripted, "answers", {tuple(ids): past})
        monkeypatch.setattr(Scripted, "eos", (1,))
        (got,) = engine.generate(NEAR_MISS, own)
        assert (got.token_ids, got.text) == (result.token_ids, result.text)
        assert (got.finish_reason, got.error) == (result.finish_reason, None)
    assert engine.engine.metrics.drafter_errors == 0
    assert engine.engine.metrics.drafted > 0
    tiny.check_idle(engine)


@pytest.mark.parametrize("scheme", [None, *SCHEMES[:4]])
def test_G4_each_of_a_batch_ends_alone(scheme, expected):
    engine = rig.llm(scheme, kv_memory="16MiB")
    got = engine.generate([NEAR_MISS] * len(expected), settings())
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]


def test_G1_a_grammar_whose_end_is_certain_needs_no_end_token():
    (result,) = rig.llm().generate("x", params('start: "the cat"'))
    assert result.text == "the cat"
    assert 1 not in result.token_ids
    assert result.finish_reason == FinishReason.STOP


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_other_rules_obey_too(rule):
    engine = rig.llm(f"draft-model:weights=target,k=5,verification={rule}")
    for seed in range(5):
        (result,) = engine.generate("x", params(GRAMMARS[0], seed=seed))
        assert result.finish_reason == FinishReason.LENGTH or json.loads(result.text)


def test_preempted_in_the_middle(expected):
    engine = rig.llm(rig.LOOKUP, kv_memory="170kB", max_model_len=200, prefix_caching=False)
    got = engine.generate([NEAR_MISS] * len(expected), settings())
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert engine.engine.scheduler.num_preemptions > 0


def test_what_cannot_be_read_is_refused():
    engine = rig.llm()
    for bad in ('{"type": "nonsense"}', '{"not": {"type": "string"}}', "start: %%", "{", " "):
        with pytest.raises(ValueError, match="grammar"):
            engine.generate("x", SamplingParams(grammar=bad))
    tiny.check_idle(engine)


def search(index: int) -> dict:
    return {"type": "string", "pattern": f"a.{{{index}}}b"}


TOO_MUCH = {
    "patterns": {"allOf": [search(i) for i in range(40)]},
    "patterns inside": {"type": "array", "items": {"allOf": [{"allOf": [search(i)]}
                        for i in range(40)]}},
    "patterns by reference": {"$ref": "#/$defs/0", "$defs": {
        str(i): search(i) | {"$ref": f"#/$defs/{i + 1}"} for i in range(40)} | {"40": search(40)}},
    "no choice": {"const": "ab" * 20_000},
}  # fmt: skip


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_what_is_too_much_work_is_refused_by_name(kind):
    engine = rig.llm()
    match = "no choice" if kind == "no choice" else "4[01] patterns"
    with pytest.raises(ValueError, match=f"grammar: .*{match}"):
        engine.generate("x", SamplingParams(grammar=json.dumps(TOO_MUCH[kind])))
    circle = {"type": "array", "items": {"$ref": "#"}}
    assert engine._grammars.make(json.dumps(circle)).forced(9)
    with pytest.raises(ValueError, match="39 patterns"):
        engine._grammars.make("start: A\nA: " + " & ".join(["/.*a.*/"] * 40))
    text = "start: " + " ".join(['"&"'] * 40)  # those are only text
    assert engine._grammars.make(text).forced(99)


def test_what_proves_too_much_work_half_way_fails_alone():
    engine = rig.llm()
    bad, good = engine.generate(
        ["x", "x"], [params('start: "b"? /a{30000}/'), params('start: "the"')]
    )
    assert bad.finish_reason == FinishReason.ERROR
    assert "leave no choice" in bad.error
    assert good.text == "the"
    tiny.check_idle(engine)


def test_answers_of_one_request_share_what_was_read_and_nothing_else():
    engine = rig.llm()
    both = [params(GRAMMARS[1], n=3), params(OPTIONAL_END, n=2)]
    alone = [engine.generate("x", own) for own in both]
    together = engine.generate(["x", "x"], both)
    assert [r.token_ids for own in alone for r in own] == [r.token_ids for r in together]


def test_a_grammar_and_bans_that_leave_nothing_fail_alone():
    engine = rig.llm()
    bad, good = engine.generate(
        ["x", "x"],
        [params('start: "the"', bad_token_ids=list(range(3, 265))), params('start: "the"')],
    )
    assert bad.finish_reason == FinishReason.ERROR
    assert "grammar" in bad.error
    assert good.text == "the"


def test_schemas_over_http():
    with rig.running() as server:
        schema = {"name": "s", "schema": SCHEMAS[1], "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        body = {"seed": 4, "max_tokens": 100, "response_format": form}
        text = server.chat("hello", **body)["choices"][0]["message"]["content"]
        assert set(json.loads(text)) == {"name", "n"}
        off = server.chat("hello", **body, speculation={"enabled": False})
        assert off["choices"][0]["message"]["content"] == text
        messages = [{"role": "user", "content": "hello"}]
        events = server.stream("/v1/chat/completions", messages=messages, **body)
        parts = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(parts) == text
        assert server.complete(prompt="x", grammar='start: "the"')["choices"][0]["text"] == "the"
        anything = server.chat("hello", response_format={"type": "json_object"}, max_tokens=8)
        assert anything["choices"][0]["message"]["content"].startswith("{")
        for bad in (
            {"type": "json_schema"},
            {"type": "xml"},
            {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}},
        ):
            answer = server.post("/v1/chat/completions", messages=messages, response_format=bad)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "response_format" in error["message"] + error["param"], error


KEYS = {"FULL_NAME_OF_THE_PERSON": {"enum": ["X", "Y"]}, "COUNTRY_OF_BIRTH": {"enum": ["U", "V"]}}
LONG_KEYS = json.dumps({"type": "object", "properties": KEYS, "required": [*KEYS],
                        "additionalProperties": False})  # fmt: skip


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_what_the_grammar_forces_is_drafted_for_free(scheme, monkeypatch):
    ids = rig.model().tokenizer.encode("x")
    plain, engine = rig.llm(), rig.llm(scheme)
    for own in [params(LONG_KEYS, seed=seed, max_tokens=200) for seed in range(4)]:
        (expected,) = plain.generate("x", own, speculate=False)
        assert expected.stats.drafted == 0
        monkeypatch.setattr(Scripted, "answers", {tuple(ids): [*expected.token_ids, 1, 90]})
        monkeypatch.setattr(Scripted, "eos", (1,))
        (got,) = engine.generate("x", own)
        assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
        assert got.stats.tau > 1.5
        if scheme is None:  # no letter of these keys can be spelled in two ways
            assert got.stats.accepted == got.stats.drafted > 20
    tiny.check_idle(engine)


@pytest.mark.parametrize("room", range(1, 12))
def test_forced_tokens_stay_within_the_limits(room):
    own = params('start: "ABCDEFGHIJKL" /[xyz]+/', max_tokens=room, temperature=0)
    (expected,) = rig.llm().generate("x", own, speculate=False)
    engine = rig.llm()
    (got,) = engine.generate("x", own)
    assert (got.text, got.finish_reason) == (expected.text, "length")
    assert engine.engine.metrics.num_rows <= room, "drafts that could never come out"
    near = rig.llm(max_model_len=1 + room).generate("x", params(own.grammar, max_tokens=None))
    assert near[0].text == expected.text
    other = rig.llm(rig.LOOKUP, max_num_batched_tokens=16, max_num_seqs=4)
    assert other.generate(["x"] * 4, own)[3].text == expected.text


def test_forced_tokens_under_rejection_keep_the_text_legal():
    engine = rig.llm("draft-model:weights=target,k=3,verification=rejection")
    for seed in range(5):
        (result,) = engine.generate("x", params(LONG_KEYS, seed=seed, max_tokens=200))
        assert set(json.loads(result.text)) == set(KEYS)
    assert engine.engine.metrics.drafter_errors == 0
