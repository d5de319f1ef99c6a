"""A step that fails: requests beside it go on or end with an error, later ones are served."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress

import pytest

from tests import tiny

SCHEMES = [None, "prompt-lookup:k=4,ngram_min=1", "draft-model:weights=target,k=3"]
PROMPTS = tiny.prompts(6)
PARAMS = tiny.sampled(max_tokens=16)


@pytest.fixture(scope="module")
def answers():
    return tiny.ids(tiny.llm(prefix_caching=False).generate(PROMPTS, PARAMS))


def fail_at(monkeypatch, owner, name, call, error):
    real, calls = getattr(owner, name), [0]

    def failing(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            raise error("scripted")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["_propose", "_commit", "_finish", "_observe", "_retire"])
def test_beside_a_stream(scheme, error, where, answers, monkeypatch):
    for call in (1, 2, 4, 7):
        llm = tiny.llm(scheme)
        stream = llm.stream(PROMPTS[1], PARAMS)
        got = list(next(stream).token_ids)
        with monkeypatch.context() as patch:
            fail_at(patch, llm.engine, where, call, error)
            with suppress(error):
                llm.generate(PROMPTS, PARAMS)
        result = None
        for delta in stream:
            got += delta.token_ids
            result = delta.result
        assert result
        if result.finish_reason == "error":  # the step's own state was half-written
            assert where != "_propose"
            assert "failed" in result.error
            assert got == answers[1][: len(got)]
        else:
            assert got == answers[1]
        tiny.check_idle(llm)
        for _ in range(2):  # the second finds what the first left in the prefix cache
            assert tiny.ids(llm.generate(PROMPTS, PARAMS)) == answers
        tiny.check_idle(llm)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_target_pass_that_fails_loses_nothing(scheme, error, answers, monkeypatch):
    for call in (1, 2, 4):
        llm = tiny.llm(scheme)
        with monkeypatch.context() as patch:
            fail_at(patch, llm.engine.runtime, "forward_target", call, error)
            with pytest.raises(error, match="scripted"):
                llm.generate(PROMPTS, PARAMS)
        tiny.check_idle(llm)
        for _ in range(2):
            assert tiny.ids(llm.generate(PROMPTS, PARAMS)) == answers


def test_a_stream_collected_in_the_middle_of_a_step(answers, monkeypatch):
    llm = tiny.llm(SCHEMES[1])
    forgotten = [llm.stream(PROMPTS[1], PARAMS)]
    next(forgotten[0])
    real = llm.engine.runtime.forward_target

    def collect(rows):
        if forgotten:
            forgotten.append(forgotten)  # only the collector ends a cycle
            forgotten.clear()
            gc.collect()
        return real(rows)

    monkeypatch.setattr(llm.engine.runtime, "forward_target", collect)
    results = []
    thread = threading.Thread(
        target=lambda: results.append(tiny.ids(llm.generate(PROMPTS, PARAMS))), daemon=True
    )
    thread.start()
    thread.join(60)
    assert results == [answers], "the step waits for itself"
    tiny.check_idle(llm)
