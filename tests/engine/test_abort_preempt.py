"""Aborts, early exits, preemptions and prefix hits in any mix: no page is lost, no text changes."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.llm import LLM
from foretell.sequence import FinishReason
from tests import heads, tiny
from tests.fakes import Scripted
from tests.faults.white_box import start, steps

SCHEMES = [
    "draft-model:weights=target,k=4",
    "prompt-lookup:k=6,ngram_min=1",
    "tests.fakes:Bushy,k=16",
    "tests.fakes:Mixed,k=5",
    "draft-model:weights=target,depth=4,topk=3,nodes=12",
    f"{heads.scheme('eagle-norms')},k=3",
    f"{heads.scheme('eagle3')},depth=3,topk=2,nodes=7",
    f"{heads.scheme('mtp-mimo')},depth=3,topk=2,nodes=7",
    f"{heads.scheme('medusa')},k=6",
]
SHARED = tiny.prompts(1, seed=8)[0] * 2
PROMPTS = [
    SHARED[: 4 * i] + prompt if i % 2 else prompt
    for i, prompt in enumerate(tiny.prompts(10, longest=24))
]
PARAMS = tiny.sampled(max_tokens=24)


@pytest.fixture(autouse=True, scope="module")
def answers():
    llm = tiny.llm(max_num_seqs=1, prefix_caching=False)
    plain = tiny.ids(llm.generate(PROMPTS, PARAMS))
    former = Scripted.answers
    Scripted.answers = {tuple(p): a for p, a in zip(PROMPTS, plain, strict=True)}
    yield plain
    Scripted.answers = former


def small(scheme: str, num_pages: int = 26, **options) -> LLM:
    layers = {"draft-model": 4, "eagle": 3, "eagle3": 3, "mtp": 3}.get(scheme.split(":")[0], 2)
    memory = f"{num_pages * layers * 512}B"
    options = {"max_num_seqs": 4, "max_model_len": 100, "kv_memory": memory} | options
    llm = tiny.llm(scheme, **options)
    assert llm.engine.cache.num_pages == num_pages
    return llm


def check(llm: LLM, sequences, answers) -> None:
    """Finished texts are plain decoding's, aborted ones its beginnings, and all pages are back."""
    for sequence, answer in zip(sequences, answers, strict=True):
        if sequence.finish_reason == FinishReason.ABORT:
            assert sequence.output == answer[: sequence.num_output]
        else:
            assert sequence.finish_reason == FinishReason.LENGTH
            assert sequence.output == answer
        assert sequence.slot == -1
        assert not sequence.pages
    while llm.engine.has_work:
        llm._step()
    tiny.check_idle(llm)
    llm.engine.cache.clear()
    assert sorted(llm.engine.cache.free) == list(range(llm.engine.cache.num_pages))


@settings(max_examples=25, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    seed=st.integers(0, 10**6),
    abort=st.sampled_from([0.0, 0.1, 0.5]),
    preempt=st.sampled_from([0.0, 0.1, 0.4]),
    rows=st.sampled_from([17, 64, 512]),
    pages=st.sampled_from([26, 40, 200]),
    caching=st.booleans(),
)
def test_any_mix_between_steps(answers, scheme, seed, abort, preempt, rows, pages, caching):
    rng = random.Random(seed)
    llm = small(scheme, pages, max_num_batched_tokens=rows, prefix_caching=caching)
    for _ in range(2):
        sequences = start(llm, PROMPTS, PARAMS)
        for _ in steps(llm, sequences):
            if rng.random() < abort:
                llm.abort(rng.choice(sequences).request_id)
            running = llm.engine.scheduler.running
            if len(running) > 1 and rng.random() < preempt:
                llm.engine.scheduler._preempt(running[-1])
                llm.engine.check()
        check(llm, sequences, answers)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tiny_pool_preempts_and_ends(scheme, answers):
    llm = small(scheme)
    sequences = start(llm, PROMPTS, PARAMS)
    for _ in steps(llm, sequences):
        pass
    assert llm.engine.scheduler.num_preemptions > 0
    assert all(s.finish_reason == FinishReason.LENGTH for s in sequences)
    check(llm, sequences, answers)


@pytest.mark.parametrize("when", ["waiting", "prompt", "answer", "preempted"])
def test_abort_in_every_state(when, answers):
    llm = small(SCHEMES[0], 100, max_num_batched_tokens=16, max_num_seqs=2)
    sequences = start(llm, PROMPTS, PARAMS)
    victim = max(sequences, key=lambda s: s.num_prompt)
    llm.engine._inbox.remove(victim)
    llm.engine._inbox.appendleft(victim)
    if when == "waiting":
        assert victim.slot == -1
    while when != "waiting" and not victim.num_computed:
        llm._step()
    if when == "prompt":
        assert 0 < victim.num_computed < victim.num_prompt
    while when in ("answer", "preempted") and victim.num_output < 3:
        llm._step()
    if when == "preempted":
        llm.engine.scheduler._preempt(victim)
        assert victim.num_computed == 0
    llm.abort(victim.request_id)
    llm.engine.drain()
    assert victim.finish_reason == FinishReason.ABORT
    assert bool(victim.num_output) == (when in ("answer", "preempted"))
    llm.engine.check()
    for _ in steps(llm, sequences):
        pass
    check(llm, sequences, answers)


def test_an_abort_concerns_only_what_came_before_it(answers):
    """A late abort of an ended request, or of none, ends no later one of the same name."""
    llm = small(SCHEMES[0], 200)
    llm.abort("mine")
    (first,) = start(llm, PROMPTS[:1], PARAMS, request_id="mine")
    for _ in steps(llm, [first]):
        pass
    assert first.output == answers[0]
    llm.abort("mine")
    last = list(llm.stream(PROMPTS[1], PARAMS, request_id="mine"))[-1]
    assert last.result.finish_reason == FinishReason.LENGTH
    assert last.result.token_ids == answers[1]
    (second,) = start(llm, PROMPTS[2:3], PARAMS, request_id="mine")
    llm.abort("mine")  # before its first step
    llm.engine.drain()
    assert second.finish_reason == FinishReason.ABORT
    check(llm, [first, second], [answers[0], answers[2]])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_leaving_a_stream_early_frees_its_pages(scheme, after, answers):
    llm = small(scheme, 200)
    deltas = llm.stream(PROMPTS[1], PARAMS)
    got: list[int] = []
    for _ in range(after):
        got += next(deltas).token_ids
    deltas.close()
    assert got == answers[1][: len(got)]
    tiny.check_idle(llm)
    assert tiny.ids(llm.generate(PROMPTS, PARAMS)) == answers
    tiny.check_idle(llm)


def test_a_stream_left_while_others_run(answers):
    llm = small(SCHEMES[0], 60)
    others = start(llm, PROMPTS[2:6], PARAMS)
    deltas = llm.stream(PROMPTS[1], tiny.sampled(max_tokens=24, n=3))
    next(deltas)
    deltas.close()
    llm.engine.check()
    assert [s for s in llm.engine.scheduler.running if s not in others] == []
    for _ in steps(llm, others):
        pass
    check(llm, others, answers[2:6])


def test_an_error_in_the_middle_frees_everything(answers, monkeypatch):
    llm = small(SCHEMES[2], 200)
    forward, calls = llm.engine.runtime.forward_target, []

    def failing(rows):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("device lost")
        return forward(rows)

    monkeypatch.setattr(llm.engine.runtime, "forward_target", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(PROMPTS, PARAMS)
    tiny.check_idle(llm)
    assert tiny.ids(llm.generate(PROMPTS, PARAMS)) == answers


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_aborts_from_another_thread(scheme, answers):
    llm = small(scheme, 40)
    rng, done = random.Random(3), threading.Event()
    sequences = start(llm, PROMPTS * 6, PARAMS)

    def aborting() -> None:
        while not done.is_set():
            llm.abort(rng.choice(sequences).request_id)
            done.wait(0.002)

    thread = threading.Thread(target=aborting)
    thread.start()
    try:
        for _ in steps(llm, sequences):
            pass
    finally:
        done.set()
        thread.join()
    check(llm, sequences, answers * 6)


def test_callers_on_many_threads_get_their_own_answers(answers):
    llm = small(SCHEMES[0], 60)

    def ask(i: int) -> list[int]:
        if i % 3:
            return llm.generate(PROMPTS[i % 10], PARAMS)[0].token_ids
        got: list[int] = []
        for delta in llm.stream(PROMPTS[i % 10], PARAMS):
            got += delta.token_ids
            if i % 2 and len(got) > 8:
                break
        return got

    with ThreadPoolExecutor(6) as pool:
        for i, got in enumerate(pool.map(ask, range(30))):
            whole = answers[i % 10]
            assert got == whole[: len(got)]
            assert len(got) > 8 if i % 3 == 0 and i % 2 else len(got) == len(whole)
    while llm.engine.has_work:
        llm._step()
    tiny.check_idle(llm)


def test_close_drops_what_is_in_flight(answers):
    llm = small(SCHEMES[2], 60)
    sequences = start(llm, PROMPTS, PARAMS)
    for _ in range(5):
        llm._step()
    late = start(llm, PROMPTS[:1], PARAMS)
    llm.close()
    assert not llm.engine.has_work
    assert all(s.finish_reason == FinishReason.ABORT for s in [*sequences, *late] if not s.output)
    check(llm, [*sequences, *late], [*answers, answers[0]])
