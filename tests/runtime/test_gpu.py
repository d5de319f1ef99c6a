"""The way over a GPU, on one that is pretended (tests/pretend): same texts and acceptance as on a
CPU, nothing in the wrong place, and no question of the host's where none may be."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from foretell.attention.blocked import BlockedAttention
from foretell.engine import calibrate
from foretell.engine.one_token import OneToken
from foretell.engine.schedule import Ordinary
from foretell.llm import LLM
from foretell.models.loader import load
from foretell.runtime import gpu
from foretell.runtime.gpu import CudaStream, device_of
from foretell.runtime.stream import Inline, Work
from tests import heads, pretend, tiny

PROMPTS = tiny.prompts(4)
SCHEMES = [
    "prompt-lookup:k=6,ngram_min=1",
    "draft-model:weights=target,k=4",
    "draft-model:weights=int4,depth=3,topk=3,nodes=10",
    *(heads.scheme(kind) for kind in heads.LAYERED),
    heads.scheme("medusa"),
    f"{heads.scheme('eagle')},depth=3,topk=3,nodes=9",
]
SETTINGS = {
    "greedy": tiny.greedy(max_tokens=16),
    "sampled": tiny.sampled(
        max_tokens=16, top_p=0.9, top_k=20, repetition_penalty=1.1, logit_bias={5: 1.0}
    ),
}


@pytest.fixture
def on_gpu(monkeypatch):
    pretend.waits.clear()
    with pretend.gpu(monkeypatch):
        yield


def engine(tmp_path, speculation: str | None, weights: str = "f32", **options) -> LLM:
    options = {"page_size": 4, "kv_memory": "8MiB", "max_model_len": 256, "seed": 0} | options
    path = tiny.write_model(tmp_path, seed=options.pop("seed"))
    llm = LLM(str(path), speculation=tiny.fixed(speculation), weights=weights, device="cuda",
              **options)  # fmt: skip
    assert llm.target.device.type == "cuda"
    return llm


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda text: re.sub(r"model=.*/", "", text))
def test_texts_and_acceptance_are_those_of_a_cpu(scheme, name, tmp_path, on_gpu):
    params, cpu = SETTINGS[name], tiny.llm(scheme)
    want = cpu.generate(PROMPTS, params)
    llm = engine(tmp_path, scheme)
    got = llm.generate(PROMPTS, params)
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    assert tiny.ids(got) == tiny.ids(want)
    accepted = [sum(one.stats.accepted for one in results) for results in (got, want)]
    if "int4" in scheme:  # activations are rounded there, by other sums
        assert accepted[0] == pytest.approx(accepted[1], rel=0.2)
    else:
        for one, other in zip(got, want, strict=True):
            assert one.stats.drafted_by_position == other.stats.drafted_by_position
            assert one.stats.accepted_by_position == other.stats.accepted_by_position
        for name in ("_logits", "_features", "_carry"):  # of the last draft
            ours, theirs = (getattr(e.engine.drafting.drafters[0], name, None) for e in (llm, cpu))
            if theirs is not None:
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-3)
                assert theirs.any()
    assert sum(one.stats.drafted for one in got) > 20
    tiny.check_idle(llm)


@pytest.mark.parametrize("rule", ["rejection", "block", "typical", "threshold"])
def test_other_rules(rule, tmp_path, on_gpu):
    scheme = f"{heads.scheme('mtp-mimo')},k=3,verification={rule}"
    params, cpu = tiny.sampled(), tiny.llm(scheme)
    llm = engine(tmp_path, scheme)
    got = llm.generate(PROMPTS, params)
    assert tiny.ids(got) == tiny.ids(cpu.generate(PROMPTS, params))
    assert not llm.engine.metrics.drafter_errors
    assert sum(one.stats.drafted for one in got) > 20


@pytest.mark.parametrize(
    "weights", ["int8", *(pytest.param(w, marks=pytest.mark.slow) for w in ("bf16", "int4"))]
)
def test_drafts_change_no_text(weights, tmp_path, on_gpu):
    """Whose bits are other ones than a CPU's: they may not depend on the batch either."""
    llm = engine(tmp_path, f"{heads.scheme('eagle')},k=4", weights, max_num_batched_tokens=24)
    for params in SETTINGS.values():
        some = PROMPTS[:3]
        plain = [llm.generate([p], params, speculate=False)[0].token_ids for p in some]
        got = llm.generate(some, params)
        assert tiny.ids(got) == plain
        assert sum(one.stats.drafted for one in got) > 20


def test_costs_are_the_gpus(tmp_path, on_gpu, monkeypatch):
    named, kept = [], calibrate.Kept
    monkeypatch.setattr(
        calibrate, "Kept", lambda kind, *facts: (named.append((kind, facts)), kept(kind, *facts))[1]
    )
    llm = engine(tmp_path, f"{heads.scheme('eagle')},adaptive=true,k=4")
    assert [facts[1][2] for kind, facts in named if kind == "costs"] == ["pretended"]
    assert tiny.ids(llm.generate(PROMPTS, SETTINGS["greedy"])) == tiny.plain(
        PROMPTS, SETTINGS["greedy"]
    )
    assert not llm.engine.metrics.drafter_errors


class Beside(Inline):
    """As if the host went on."""

    overlaps = True


def test_single_tokens_are_drafted_without_the_host(tmp_path, on_gpu, monkeypatch):
    """Nothing of such a step waits for the device but the host, for what was drawn."""
    scheme = f"{heads.scheme('mtp-mimo')},k=1"
    llm, waited, way = engine(tmp_path, scheme), list[tuple[str, int]](), [""]
    llm.engine.runtime.stream = Beside()
    for each in (OneToken, Ordinary):

        def begin(self, name=each.__name__, draft=each.draft):
            way.insert(0, name)
            return draft(self)

        monkeypatch.setattr(each, "draft", begin)
    run = Work.run

    def counted(work):
        before = pretend.waits.total()
        run(work)
        if way[0] == "OneToken" and work.name != "catch-up":  # of the step before
            waited.append((work.name, pretend.waits.total() - before))

    monkeypatch.setattr(Work, "run", counted)
    cpu = tiny.llm(scheme)
    for params in (tiny.greedy(), tiny.sampled(temperature=0.8)):
        assert tiny.ids(llm.generate(PROMPTS, params)) == tiny.ids(cpu.generate(PROMPTS, params))
    names = {name for name, _ in waited}
    assert names == {"draft", "target", "sample", "head"}
    assert way.count("OneToken") > 30
    assert [each for each in waited if each[1]] == []


def test_a_pass_asks_for_nothing(tmp_path, on_gpu):
    llm = engine(tmp_path, None)
    runtime = llm.engine.runtime
    assert isinstance(runtime.attention, BlockedAttention)
    runtime.set_pages(0, range(8))
    pretend.waits.clear()
    runtime.warm()
    assert not pretend.waits


def test_what_is_no_gpu_is_refused(tmp_path, monkeypatch):
    path = str(tiny.write_model(tmp_path))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no GPU here"):
            LLM(path, device="cuda")
    with pytest.raises(ValueError, match="must be cpu or cuda"):
        LLM(path, device="tpu")
    with pytest.raises(ValueError, match="the model given lies on the CPU"):
        LLM(tiny.model(), device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = SimpleNamespace(device="cuda")
    with pytest.raises(ValueError, match="rank 2 of this node has no GPU, there are 2"):
        device_of(config, 2)


class Event:
    """Of a device that passes marks when the test says so."""

    passed = threading.Event()
    seconds = 0.25

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.stream = Here.current[threading.get_ident()]

    def query(self):
        return self.passed.is_set()

    def elapsed_time(self, end):
        assert self.stream is end.stream
        return 1e3 * self.seconds


class Here:
    """A stream, and which one each thread issues to."""

    current: ClassVar[dict[int, Here]] = {}

    def __init__(self, device):
        pass


@pytest.fixture
def stream(monkeypatch):
    Event.passed.clear()
    fake = {"Event": Event, "Stream": Here}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch.cuda, "set_stream", lambda s: Here.current.__setitem__(threading.get_ident(), s)
    )
    stream = CudaStream("pass", torch.device("cuda", 0))
    yield stream
    Event.passed.set()
    stream.close()


def test_work_is_over_when_the_device_has_done_it(stream):
    """Not when it was issued; its times are the device's."""
    stream.begin()
    work = Work("target", lambda: threading.get_ident())
    stream.submit(work)
    assert not work.wait(0.05)
    assert work.is_over, "issued"
    threading.Timer(0.05, Event.passed.set).start()
    thread = stream.wait(work)
    assert thread != threading.get_ident()
    assert Here.current[thread] is Here.current[threading.get_ident()]
    assert work.end - work.start == pytest.approx(Event.seconds, abs=0.2)
    assert work.fence is None, "it would hold on to itself, and to what came of it"


def test_an_error_comes_with_the_wait(stream):
    def fail():
        raise ValueError("no")

    stream.submit(work := Work("draft", fail))
    Event.passed.set()
    with pytest.raises(ValueError, match="no"):
        stream.wait(work)
    after = Work("target", lambda: 3)
    stream.submit(after)
    assert stream.wait(after) == 3


def test_join_waits_for_the_device(stream):
    stream.submit(Work("head", lambda: None))
    assert not stream.join(0.05)
    Event.passed.set()
    assert stream.join()


def test_memory_and_loading_are_the_gpus(tmp_path, on_gpu):
    llm = engine(tmp_path, heads.scheme("eagle"), kv_memory="0.5")
    pool = llm.engine.runtime.kv
    for layers in pool.layers.values():
        for k, v in layers:
            assert k.device.type == v.device.type == "cuda"
            assert len(k) == pool.num_pages + 1, "and one for rows that keep nothing"
    assert load(str(tmp_path), "int8").device.type == "cpu"
    assert gpu.stream_on(torch.device("cpu")).__class__ is Inline
