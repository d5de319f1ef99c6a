"""DeepSeek's models over two gloo ranks: heads and experts are shared out, the text is that of one
rank, and a batch of halves has one half's exchanges beside the other's products."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from foretell.attention.base import Layout
from foretell.config import EngineConfig
from foretell.llm import LLM
from foretell.models import moe
from foretell.models.checkpoint import Safetensors
from foretell.models.loader import load, open_source
from foretell.models.sharding import Shard, Sliced
from foretell.models.spread import half_of
from foretell.runtime.rank import memory
from foretell.terminal import traced
from tests import tiny
from tests.models.tiny import make, save, save_with_mtp
from tests.runtime.ranks import OPTIONS, let_draft, on_threads
from tests.runtime.test_sharding import run

SCHEMES = [
    None,
    "prompt-lookup:k=4,ngram_min=1",
    "mtp:k=3",
    "mtp:depth=3,topk=3,nodes=8",
    "draft-model:weights=int4,k=3",
]
MTP = "mtp:k=1,adaptive=false"
"""Spread over the ranks, as they were started with it: see `test_spread_heads`."""
KINDS = ("step", "compute", "exchange")
PROMPTS = tiny.prompts(6)
PARAMS = [tiny.greedy(max_tokens=24), tiny.sampled(max_tokens=24)]


@cache
def checkpoint() -> Path:
    save_with_mtp(path := Path(mkdtemp()), vocab_size=tiny.VOCAB, initializer_range=0.3)
    return path


@pytest.fixture(scope="module")
def one():
    llm = LLM(str(checkpoint()), **OPTIONS)
    return [tiny.ids(llm.generate(PROMPTS, params)) for params in PARAMS]


@pytest.fixture(scope="module")
def two():
    llm = LLM(str(checkpoint()), **OPTIONS, tensor_parallel=2, halves=True, speculation=MTP)
    yield llm
    llm.close()
    assert [process.returncode for process in llm.engine.runtime.leader.processes] == [0]


class Spans:
    """What one half did."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float, float]] = []
        self.rows: list[int] = []

    def phase(self, name: str, start: float, end: float) -> None:
        self.phases.append((name, start, end))

    def step(self, counts: dict[str, int]) -> None:
        self.rows.append(counts["rows"])


@pytest.mark.parametrize("name", SCHEMES)
def test_the_text_of_one_rank(one, two, name):
    drafter = let_draft(two, name)
    for params, expected in zip(PARAMS, one, strict=True):
        assert tiny.ids(two.generate(PROMPTS, params)) == expected
        assert tiny.ids(two.generate(PROMPTS, params, speculate=False)) == expected
        assert tiny.ids(two.generate(PROMPTS[2:3], params)) == expected[2:3]
    metrics = two.engine.metrics
    assert metrics.drafter_errors == 0, metrics.last_drafter_error
    assert (metrics.drafted > 0) == (drafter is not None)
    tiny.check_idle(two)


def test_logits_are_the_same_bits_alone_and_in_halves(two):
    let_draft(two, MTP)
    params = tiny.greedy(logprobs=3, max_tokens=24)
    model = two.target.model
    model.listeners = listeners = Spans(), Spans()
    batch = two.generate(PROMPTS, params)
    model.listeners = None
    assert max(listeners[0].rows) >= 6  # 2 rows of 3 sequences, and as many of the others
    for at in (1, 3):
        (alone,) = two.generate(PROMPTS[at : at + 1], params, speculate=False)
        assert batch[at].logprobs == alone.logprobs


def test_one_half_computes_while_the_others_exchange_is_under_way(two):
    let_draft(two, MTP)
    model = two.target.model
    model.listeners = listeners = Spans(), Spans()
    two.generate(PROMPTS, PARAMS[0])
    model.listeners = None
    for ours, theirs in (listeners, listeners[::-1]):
        exchanges = [span for span in ours.phases if span[0] == "exchange"]
        computed = [span for span in theirs.phases if span[0] == "compute"]
        beside = [
            any(start < end and begun < over for _, begun, over in computed)
            for _, start, end in exchanges
        ]
        assert len(exchanges) > 100
        assert all(beside)
        # Of each exchange but the last ones, a whole stretch of the other half's products.
        within = [
            any(start <= begun and over <= end for _, begun, over in computed)
            for _, start, end in exchanges
        ]
        assert sum(within) > len(within) / 2


def test_the_trace_shows_both_halves(two, tmp_path):
    let_draft(two, MTP)
    with traced(two, tmp_path / "trace.json"):
        two.generate(PROMPTS, PARAMS[0])
    two.target.model.listeners = None
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    first, second = (
        {
            name: [e for e in events if (e["tid"], e["name"]) == (names[half], name)]
            for name in KINDS
        }
        for half in ("first half", "second half")
    )
    assert len(first["step"]) == len(second["step"]) > 10
    assert len(first["exchange"]) == len(second["exchange"]) > 100
    exchange, compute = first["exchange"][3], second["compute"]
    end = exchange["ts"] + exchange["dur"]
    assert any(exchange["ts"] < c["ts"] + c["dur"] and c["ts"] < end for c in compute)


def test_halves_are_of_ranks():
    with pytest.raises(ValueError, match="set tensor_parallel too"):
        EngineConfig(halves=True)


def test_a_rank_has_its_experts_and_no_others(two):
    runtime = two.engine.runtime
    let_draft(two, None)
    source, (whole, config) = Safetensors(checkpoint()), open_source(checkpoint())
    assert whole.shapes == source.shapes
    held = [Sliced(source, Shard(config, rank, 2)).shapes for rank in range(2)]
    experts = [{name for name in shapes if ".experts." in name} for shapes in held]
    assert experts[0] & experts[1] == set()
    assert experts[0] | experts[1] == {name for name in source.shapes if ".experts." in name}
    ours, (theirs,) = memory(runtime), runtime.leader.memory
    assert abs(ours["target weights"] - theirs["target weights"]) < 4096
    assert ours["target KV"] == theirs["target KV"]  # what is cached is of all heads


@pytest.mark.slow
def test_four_ranks_send_rows_all_to_all(one):
    llm = LLM(str(checkpoint()), **OPTIONS, tensor_parallel=4)
    let_draft(llm, "mtp:k=3")
    for params, expected in zip(PARAMS, one, strict=True):
        assert sum(map(len, PROMPTS)) > moe.SENT_FROM  # in the first step
        assert tiny.ids(llm.generate(PROMPTS, params)) == expected
    llm.close()


@pytest.mark.parametrize("world", [3, 4])
def test_both_ways_to_experts_give_the_same_bits(world, tmp_path, monkeypatch):
    path = save(make("v3", n_routed_experts=10, n_group=2, num_attention_heads=12), tmp_path)

    def part(ranks):
        return run(load(str(path), "f32", progress=False, ranks=ranks))

    summed = on_threads(world, part)
    monkeypatch.setattr(moe, "SENT_FROM", 0)
    sent = on_threads(world, part)
    for ours, theirs in zip(summed, sent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def layout(*counts: int) -> Layout:
    sequences = [i for i, count in enumerate(counts) for _ in range(count)]
    rows = torch.tensor(sequences, dtype=torch.int32)
    return Layout(rows, rows, rows, rows, rows.long(), rows, rows[:, None], 4)


@pytest.mark.parametrize(
    ("counts", "border"),
    [((2, 2, 2, 2), 4), ((2, 2, 2), 2), ((1, 1), 1), ((1,), 0), ((2,), 0), ((2, 1, 2), 0),
     ((1, 2, 1, 2), 0), ((4, 4), 0), ((), 0)],
)  # fmt: skip
def test_batches_of_equals_are_halved(counts, border):
    assert half_of(layout(*counts)) == border
