"""A stream beside the host changes when things happen and nothing else: texts, acceptance, draft
KV and pages stay as they are. Both schedules, on one rank."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.engine.device import Device
from foretell.engine.one_token import OneToken
from foretell.llm import LLM
from foretell.runtime.stream import Work, Worker
from foretell.sequence import FinishReason
from foretell.spec.budget import FixedBudget
from tests import heads, tiny
from tests.engine.test_same_text import PROMPTS, SETTINGS, plain, speculative
from tests.faults.white_box import cells, start, steps

SCHEMES = [
    None,
    "prompt-lookup:k=8,ngram_min=1",
    "draft-model:weights=target,k=4",
    "draft-model:weights=int4,k=3",
    "draft-model:weights=int4,depth=4,topk=3,nodes=14",
    *(f"{heads.scheme(kind)},k=1" for kind in heads.LAYERED),
    f"{heads.scheme('mtp-mimo')},k=3",
    "tests.fakes:Oracle,k=1",
    "tests.fakes:Noise,k=20",
    "tests.fakes:Mixed,k=6",
    "tests.fakes:Bushy,k=24",
    "tests.fakes:Broken,k=4",
]
SINGLE = [f"{heads.scheme(kind)},k=1" for kind in heads.LAYERED]


def named(text: str | None) -> str:
    return re.sub(r"model=.*/", "", str(text))


def beside(llm: LLM) -> LLM:
    """The same engine, its device work on a thread."""
    llm.engine.runtime.stream = Worker("pass")
    return llm


def settled(llm: LLM) -> LLM:
    llm.engine.device.settle()
    return llm


def make(scheme: str | None, name: str = "greedy", **options: Any) -> LLM:
    return speculative(scheme, name, **options) if scheme else tiny.llm(**options)


@pytest.mark.parametrize(
    "name", [n if n == "greedy" else pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS]
)
@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_same_text_and_acceptance(scheme, name):
    alone, llm = make(scheme, name), beside(make(scheme, name))
    params = replace(SETTINGS[name], seed=7)  # scripted drafters go by it
    for _ in range(2):  # the second time with pages of the first
        expected = alone.generate(PROMPTS, params)
        results = llm.generate(PROMPTS, params)
        assert tiny.ids(results) == plain(name)
        for one, other in zip(results, expected, strict=True):
            assert one.stats.accepted_by_position == other.stats.accepted_by_position
            assert one.stats.drafted_by_position == other.stats.drafted_by_position
            assert one.from_draft == other.from_draft
            assert one.stats.num_cached_tokens == other.stats.num_cached_tokens
        tiny.check_idle(settled(llm))
    failed = llm.engine.metrics.drafter_errors, alone.engine.metrics.drafter_errors
    assert failed[0] == failed[1], llm.engine.metrics.last_drafter_error


def ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step of single tokens had."""
    found: list[int] = []
    draft = OneToken.draft
    monkeypatch.setattr(
        OneToken, "draft", lambda self: (found.append(len(self.items)), draft(self))[1]
    )
    return found


@pytest.mark.parametrize("scheme", SINGLE, ids=named)
def test_single_tokens_go_their_own_way(scheme, monkeypatch):
    found, llm = ways(monkeypatch), beside(tiny.llm(scheme))
    for params in (tiny.greedy(), tiny.sampled(temperature=0.7, min_p=0.01, logprobs=2)):
        found.clear()
        llm.generate(PROMPTS, params)
        assert sum(found) > 0.8 * 24 * len(PROMPTS) / 2, "most steps"
        assert max(found) > 4


@pytest.mark.parametrize("scheme", SINGLE, ids=named)
def test_a_prompt_that_was_cached_up_to_its_last_token_is_drafted_for(scheme, monkeypatch):
    """Its first step has one row and goes the way of single tokens at once."""
    found, alone, llm = ways(monkeypatch), tiny.llm(scheme), beside(tiny.llm(scheme))
    prompt = [5, 9, 11, 5, 9, 11, 5, 9, 11]
    assert len(prompt) % alone.config.page_size == 1
    for _ in range(2):
        found.clear()
        [want], [got] = (e.generate([prompt], tiny.greedy(max_tokens=60)) for e in (alone, llm))
        assert got.token_ids == want.token_ids
        assert got.stats.drafted > 20
        assert (got.stats.drafted, got.stats.accepted) == (want.stats.drafted, want.stats.accepted)
        assert len(found) > 0.8 * got.stats.num_passes
    settled(llm)


ENDS = """
from tests import tiny
from tests.engine.test_overlap import SINGLE, beside
llm = beside(tiny.llm(SINGLE[0]))
llm.generate([[3, 4, 5]], tiny.greedy())
print("over")
"""


def test_a_program_ends_in_peace_with_work_left_behind():
    """Nothing was closed, and a head's pass may be under way."""
    run = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout.strip()) == (0, "over"), run.stderr


@pytest.mark.parametrize(
    ("options", "params"),
    [
        (",k=2", tiny.greedy()),
        (",k=1,verification=rejection", tiny.greedy()),
        (",k=1", tiny.sampled(top_k=5)),
        (",k=1", tiny.sampled(top_p=0.9)),
        (",k=1", tiny.greedy(repetition_penalty=1.2)),
        (",k=1", tiny.greedy(logit_bias={5: 1.0})),
        (",k=1", tiny.greedy(min_tokens=24, stop_token_ids=[3])),
    ],
)
def test_what_needs_the_host_in_between_goes_the_ordinary_way(options, params, monkeypatch):
    found, llm = ways(monkeypatch), beside(tiny.llm(heads.scheme("mtp-mimo") + options))
    alone = tiny.llm(heads.scheme("mtp-mimo") + options)
    assert tiny.ids(llm.generate(PROMPTS, params)) == tiny.ids(alone.generate(PROMPTS, params))
    assert not found
    assert llm.engine.metrics.drafted > 0


def test_on_the_callers_own_thread_nothing_changes(monkeypatch):
    """There the wasted rows of rejected drafts would gain nothing."""
    found, llm = ways(monkeypatch), tiny.llm(SINGLE[0])
    llm.generate(PROMPTS, tiny.greedy())
    assert not found
    assert not llm.engine.ahead.taken


def history(llm: LLM, params) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Draft KV and carried logits behind each step, by sequence and its length."""
    out, drafter = {}, llm.engine.drafter
    sequences = start(llm, PROMPTS, params)
    for _ in steps(llm, sequences):
        settled(llm)
        for i, sequence in enumerate(sequences):
            if sequence.slot >= 0 and drafter._ready(sequence):
                length = len(sequence.tokens)
                kv = cells(llm, "draft", sequence.pages, length - 1)
                out[i, length] = kv, drafter._logits[sequence.slot].clone()
    return out


@pytest.mark.parametrize("weights", ["f32", "int8"])
@pytest.mark.parametrize("scheme", SINGLE, ids=named)
def test_a_head_that_follows_has_the_kv_and_logits_of_one_that_observes(scheme, weights):
    """To the last bit, whatever was rejected in the cells before."""
    for params in (tiny.greedy(max_tokens=16), tiny.sampled(max_tokens=16)):
        options = {"max_num_seqs": 3, "max_num_batched_tokens": 24}
        expected = history(tiny.llm(scheme, weights, **options), params)
        found = history(beside(tiny.llm(scheme, weights, **options)), params)
        both = expected.keys() & found.keys()
        assert len(both) > 0.9 * len(expected) > 60
        for key in both:
            for one, other in zip(expected[key], found[key], strict=True):
                assert torch.equal(one, other), key


def test_a_draft_that_nobody_asked_for_is_not_accepted(monkeypatch):
    """A sequence with one token left has no row for a draft, right as that would have been: the
    row behind its root is another's, or none."""
    found, llm = ways(monkeypatch), beside(tiny.llm(SINGLE[0]))
    first, second = llm.generate(PROMPTS[:2], tiny.greedy())
    ends = [n for n, drafted in enumerate(second.from_draft) if drafted and n > 4][:3]
    assert ends
    for n in ends:
        found.clear()
        both = [tiny.greedy(), tiny.greedy(max_tokens=n + 1)]
        results = llm.generate(PROMPTS[:2], both)
        assert tiny.ids(results) == [first.token_ids, second.token_ids[: n + 1]]
        assert 2 in found
        assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error


def test_a_head_that_has_nothing_to_say_drafts_nothing(monkeypatch):
    """Only the device knows: the host, told of it later, counts no drafts and shows none."""
    found, llm = ways(monkeypatch), beside(tiny.llm(SINGLE[0]))
    nothing = lambda sequences: torch.full((len(sequences),), -1)  # noqa: E731
    monkeypatch.setattr(llm.engine.drafter, "first", nothing)
    results = llm.generate(PROMPTS[:3], tiny.greedy())
    assert tiny.ids(results) == plain("greedy")[:3]
    assert max(found) == 3
    assert not any(result.stats.drafted for result in results)


def test_a_prompt_whose_answer_is_one_token_goes_the_ordinary_way():
    """It needs no draft, and its rows are no root and draft."""
    llm = beside(tiny.llm(SINGLE[0]))
    [first] = start(llm, PROMPTS[:1], tiny.greedy())
    while first.num_output < 8:
        llm._step()
    [late] = start(llm, PROMPTS[1:2], tiny.greedy(max_tokens=1))
    for _ in steps(llm, [first, late]):
        pass
    assert [first.output, late.output] == [plain("greedy")[0], plain("greedy")[1][:1]]
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error


def test_a_sequence_beyond_the_heads_limit_leaves_the_others_their_drafts():
    """Up to its last token, for which nothing is drafted anyway."""
    most = heads.SIZES["max_position_embeddings"]
    prompts = [(PROMPTS[1] * most)[: most - 6], PROMPTS[0]]
    params = [tiny.greedy(max_tokens=20), tiny.greedy(max_tokens=60)]
    llm = beside(tiny.llm(SINGLE[0]))
    assert tiny.ids(llm.generate(prompts, params)) == tiny.ids(tiny.llm().generate(prompts, params))
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    assert llm.engine.metrics.drafted > 20
    tiny.check_idle(settled(llm))


@pytest.mark.parametrize("scheme", [SCHEMES[2], SINGLE[0]], ids=named)
def test_page_tables_are_written_behind_the_catch_up(scheme, monkeypatch):
    """It reads them; a head's pass on the target's rows has its own."""
    llm = beside(tiny.llm(scheme, max_num_seqs=3, max_num_batched_tokens=24))
    engine, caught_up = llm.engine, []
    set_pages, observe = engine.runtime.set_pages, engine.drafter.observe

    def written(slot, pages):
        assert all(work.is_over or work.name == "head" for work in engine.device.pending)
        set_pages(slot, pages)

    def slow(commit):
        time.sleep(0.01)
        observe(commit)
        caught_up.append(commit)

    monkeypatch.setattr(engine.runtime, "set_pages", written)
    monkeypatch.setattr(engine.drafter, "observe", slow)
    assert tiny.ids(llm.generate(PROMPTS, tiny.greedy())) == plain("greedy")
    assert len(caught_up) > 4


def test_what_a_head_has_followed_it_is_not_shown_again(monkeypatch):
    """An adaptive drafter is shown what it missed when drafts are wanted: nothing, here."""
    found, llm = ways(monkeypatch), beside(tiny.llm(f"{SINGLE[0]},adaptive=true"))
    llm.engine.scheduler.budget = FixedBudget()
    sequences = start(llm, PROMPTS[:4], tiny.greedy(max_tokens=16))
    for _ in steps(llm, sequences):
        settled(llm)
        behind = [llm.engine.drafting.watches[0].behind(s) for s in sequences if s.slot >= 0]
        assert not found or not any(behind), len(found)
    assert len(found) > 8
    assert [s.output for s in sequences] == [ids[:16] for ids in plain("greedy")[:4]]


@pytest.mark.parametrize("params", [tiny.greedy(), tiny.sampled(temperature=0.8)])
def test_the_host_is_not_asked_between_pass_and_head(params, monkeypatch):
    """Nothing of what is drawn or accepted is read while device work is made of it, nor does any
    tensor's size depend on it."""
    llm, here = beside(tiny.llm(SINGLE[1])), threading.local()
    run, names, single = Work.run, set(), False
    waits: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            sized = name in ("index", "index_put_") and any(
                each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
            )
            asking = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
            if (sized or name in asking) and here.device:
                waits.append(name)
            return func(*args, **(kwargs or {}))

    def way(items):
        nonlocal single
        found = inner_way(items)
        single = isinstance(found, OneToken)
        return found

    def watched(self):
        here.device = self.name in ("draft", "target", "sample", "head") and single
        names.update({self.name} if here.device else ())
        with Watch() if here.device else nullcontext():
            run(self)
        here.device = False

    def reads(name):
        inner = getattr(torch.Tensor, name)

        def read(self, *args):
            assert not getattr(here, "device", False), f"{name} waits for the device"
            return inner(self, *args)

        return read

    def pass_itself(ready):  # on a CPU its rows are read by the kernels' callers
        here.device = False
        return run_target(ready)

    run_target = llm.engine.runtime.run_target
    monkeypatch.setattr(llm.engine.runtime, "run_target", pass_itself)
    monkeypatch.setattr(Work, "run", watched)
    inner_way = llm.engine._way
    monkeypatch.setattr(llm.engine, "_way", way)
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, reads(name))
    llm.generate(PROMPTS[:4], params)
    assert names == {"draft", "target", "sample", "head"}
    assert not waits
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error


def test_any_mix_of_aborts_and_preemptions_between_steps():
    """Catch-up and head passes are then under way."""
    params = tiny.sampled(max_tokens=24)
    answers = tiny.ids(tiny.llm(max_num_seqs=1).generate(PROMPTS, params))
    for scheme in (*SINGLE[:2], *SCHEMES[:4], "draft-model:weights=int4,k=3,adaptive=true"):
        for seed, pages in ((0, 40), (1, 60), (2, 200)):
            rng = random.Random(seed)
            options = {"max_num_seqs": 4, "max_model_len": 100, "kv_memory": f"{pages * 2048}B"}
            llm = beside(tiny.llm(scheme, **options))
            sequences = start(llm, PROMPTS, params)
            for _ in steps(llm, sequences):
                if rng.random() < 0.2:
                    llm.abort(rng.choice(sequences).request_id)
                running = llm.engine.scheduler.running
                if len(running) > 1 and rng.random() < 0.2:
                    llm.engine.scheduler._preempt(running[-1])
                    llm.engine.check()
            while llm.engine.has_work:  # an abort that came late
                llm._step()
            for sequence, answer in zip(sequences, answers, strict=True):
                ended = sequence.finish_reason == FinishReason.LENGTH
                assert sequence.output == (answer if ended else answer[: sequence.num_output])
            tiny.check_idle(settled(llm))
            assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
            assert tiny.ids(llm.generate(PROMPTS, params)) == answers


@pytest.mark.parametrize("scheme", [None, SCHEMES[2], SINGLE[0]], ids=named)
def test_an_interrupt_while_the_device_works(scheme, monkeypatch):
    """What it leaves under way is waited for before the next step."""
    params = tiny.greedy(max_tokens=16)
    answers = tiny.ids(tiny.llm().generate(PROMPTS, params))
    for call in range(1, 12, 2):
        llm = beside(tiny.llm(scheme))
        wait, calls = llm.engine.runtime.wait, [0]

        def interrupted(work, wait=wait, calls=calls, call=call):
            calls[0] += 1
            if calls[0] == call:
                raise KeyboardInterrupt
            return wait(work)

        monkeypatch.setattr(llm.engine.runtime, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params)
        assert tiny.ids(llm.generate(PROMPTS, params)) == answers
        tiny.check_idle(settled(llm))


def test_work_is_left_by_whole_steps_and_dropped_by_broken_ones():
    runtime = tiny.llm().engine.runtime
    device, ran = Device(runtime, lambda work: None), []

    def step(name: str, ends: bool) -> None:
        device.begin()
        device.pending.append(device.submit(name, lambda: ran.append(name)))
        if ends:
            device.end()

    step("whole", True)
    step("broken", False)
    assert [work.name for work in device.pending] == ["whole", "broken"]
    device.begin()
    assert not device.pending
    device.end()
    step("next", True)
    device.settle()
    assert ran == ["next"]
    device.leave(device.submit("left", lambda: ran.append("left")))
    assert ran == ["next", "left"], "nothing is gained by leaving it on this thread"
    runtime.stream = Worker("pass")
    go_on = threading.Event()
    device.leave(device.submit("beside", lambda: ran.append(go_on.wait(60))))
    assert [work.name for work in device.pending] == ["beside"]
    go_on.set()
    device.settle()
    assert ran[-1] is True


def test_an_error_on_the_device_is_raised_by_the_step(monkeypatch):
    llm = beside(tiny.llm(SCHEMES[2]))
    forward, calls = llm.engine.runtime.forward_target, [0]

    def failing(rows):
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("device lost")
        return forward(rows)

    monkeypatch.setattr(llm.engine.runtime, "forward_target", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(PROMPTS, tiny.greedy())
    assert tiny.ids(llm.generate(PROMPTS, tiny.greedy())) == plain("greedy")
    tiny.check_idle(settled(llm))


@pytest.mark.parametrize("scheme", [None, SCHEMES[3]], ids=named)
def test_rows_are_laid_out_before_they_are_needed(scheme, monkeypatch):
    """And thrown away where a sequence came or went unexpectedly."""
    llm = beside(tiny.llm(scheme, max_num_seqs=4))
    before = llm.engine.metrics.num_steps
    params = tiny.sampled(ignore_eos=False, stop_token_ids=[9, 11])
    results = llm.generate(PROMPTS, params)
    assert tiny.ids(results) == tiny.ids(tiny.llm().generate(PROMPTS, params))
    assert len({len(r.token_ids) for r in results}) > 2
    assert 0 < llm.engine.ahead.taken < llm.engine.metrics.num_steps - before
    before, taken = llm.engine.metrics.num_steps, llm.engine.ahead.taken
    prepared, prepare = [], llm.engine.runtime.prepare
    monkeypatch.setattr(
        llm.engine.runtime, "prepare", lambda rows: (prepared.append(rows), prepare(rows))
    )
    assert tiny.ids(llm.generate(PROMPTS[:3], tiny.greedy())) == plain("greedy")[:3]
    steps = llm.engine.metrics.num_steps - before
    assert llm.engine.ahead.taken - taken >= steps - 4
    assert len(prepared) <= steps, "behind drafts nothing can be laid out"


@pytest.mark.parametrize("border", [True, False])
def test_rows_that_were_laid_out_for_other_pages_are_made_again(border):
    """A sequence that is preempted at the border of a page finds all but its last token in the
    cache: all is as it was expected but for the page of that. Elsewhere it has more rows to run."""
    llm, others = beside(tiny.llm(max_num_seqs=2)), 0
    pair = start(llm, PROMPTS[:2], tiny.greedy())
    size, last = llm.config.page_size, pair[1]
    for _ in steps(llm, pair):
        if last.slot >= 0 and last.num_output and (last.num_computed % size == 0) == border:
            before, page = last.num_computed, last.pages[-1]
            llm.engine.scheduler._preempt(last)
            free = llm.engine.cache.free
            free.insert(0, free.pop())  # others were given back since
            llm._step()
            assert last.num_computed == before + 1
            others += not last.finished and last.pages[before // size] != page
    assert others > 4
    assert [sequence.output for sequence in pair] == plain("greedy")[:2]
    tiny.check_idle(settled(llm))


@pytest.mark.parametrize("scheme", [SCHEMES[2], "prompt-lookup:k=4,adaptive=true"], ids=named)
def test_rows_are_laid_out_though_a_drafter_is_loaded(scheme):
    """It only has to be silent; where it is not, rows are made again."""
    llm = beside(tiny.llm(scheme))
    before = llm.engine.metrics.num_steps
    results = llm.generate(PROMPTS[:3], tiny.greedy(), speculate=False)
    assert tiny.ids(results) == plain("greedy")[:3]
    steps, taken = llm.engine.metrics.num_steps - before, llm.engine.ahead.taken
    assert taken >= steps - 4
    assert tiny.ids(llm.generate(PROMPTS, tiny.greedy())) == plain("greedy")
    assert llm.engine.metrics.drafted > 0 or scheme != SCHEMES[2], "they are not kept away"
    tiny.check_idle(settled(llm))


def test_the_caller_works_while_the_pass_is_under_way(monkeypatch):
    llm, seen, over = beside(tiny.llm()), [], threading.Event()
    forward = llm.engine.runtime.forward_target

    def slow(rows):
        assert over.wait(60)
        return forward(rows)

    def meanwhile():
        seen.append([len(s.tokens) for s in sequences])
        over.set()

    monkeypatch.setattr(llm.engine.runtime, "forward_target", slow)
    sequences = start(llm, PROMPTS[:2], tiny.greedy(max_tokens=3))
    while llm.engine.has_work:
        over.clear()
        llm.engine.step(meanwhile)
    lengths = [len(p) for p in PROMPTS[:2]]
    assert seen == [[n + i for n in lengths] for i in range(3)], "the tokens of the step before"


def test_a_request_that_comes_during_a_pass_is_admitted_then(monkeypatch):
    llm = beside(tiny.llm(max_num_seqs=4))
    [first] = start(llm, PROMPTS[:1], tiny.greedy())
    for _ in range(3):
        llm._step()
    [late] = llm.sequences(PROMPTS[1], tiny.greedy(), True)
    way = llm.engine._way
    monkeypatch.setattr(llm.engine, "_way", lambda items: (llm.engine.add(late), way(items))[1])
    llm._step()
    monkeypatch.undo()
    assert late.slot >= 0
    assert not late.num_output
    llm.engine.check()
    for _ in steps(llm, [first, late]):
        pass
    assert [first.output, late.output] == plain("greedy")[:2]
    tiny.check_idle(llm)
