"""Two gloo ranks: the text of one, whatever drafts; and what each of them holds."""

from __future__ import annotations

import re
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foretell.config import EngineConfig, SpeculationConfig
from foretell.llm import LLM
from foretell.runtime import parallel
from foretell.runtime.batch import FOLLOW, HEAD, HEADER, TARGET
from foretell.runtime.identity import difference, identity
from foretell.runtime.rank import memory, serve
from foretell.runtime.ranks import Group
from foretell.runtime.stream import Work, Worker
from tests import heads, tiny
from tests.runtime.ranks import OPTIONS, let_draft, model, start

SCHEMES = [
    None,
    "prompt-lookup:k=4,ngram_min=1",
    "draft-model:weights=target,k=4",
    "draft-model:weights=int4,tree=medusa",
    "eagle",
    "medusa",
    "mtp-mimo",
]
"""Drafts that are on rank 0 alone; for heads of single tokens see `test_spread_heads`."""
PROMPTS = tiny.prompts(5)
PARAMS = [tiny.greedy(max_tokens=24), tiny.sampled(max_tokens=24)]


def scheme(name: str | None) -> str | None:
    return heads.scheme(name) if name in ("eagle", "medusa", "mtp-mimo") else name


@pytest.fixture(scope="module")
def one():
    llm = LLM(str(model()), **OPTIONS)
    return [tiny.ids(llm.generate(PROMPTS, params)) for params in PARAMS]


@pytest.fixture(scope="module")
def two():
    llm = start()
    yield llm
    llm.close()
    assert [process.returncode for process in llm.engine.runtime.leader.processes] == [0]


@pytest.mark.parametrize("name", SCHEMES)
def test_the_text_of_one_rank(one, two, name, monkeypatch):
    drafter = let_draft(two, scheme(name))
    moved, move = [], two.engine.runtime.move
    monkeypatch.setattr(two.engine.runtime, "move", lambda *all: (moved.append(all), move(*all)))
    for params, expected in zip(PARAMS, one, strict=True):
        assert tiny.ids(two.generate(PROMPTS, params)) == expected
        assert tiny.ids(two.generate(PROMPTS, params, speculate=False)) == expected
        assert tiny.ids(two.generate(PROMPTS[2:3], params)) == expected[2:3]
    metrics = two.engine.metrics
    assert metrics.drafter_errors == 0
    assert (metrics.drafted > 0) == (drafter is not None)
    assert moved or not name or "tree" not in name  # outcomes that travel with the next buffer
    two.engine.device.settle()
    tiny.check_idle(two)


def test_logits_are_the_same_bits_alone_and_in_a_batch(two):
    """Sums over ranks depend neither on the rows around nor on drafts."""
    let_draft(two, "prompt-lookup:k=4,ngram_min=1")
    params = tiny.greedy(logprobs=3, max_tokens=24)
    for at in (1, 3):
        batch = two.generate(PROMPTS, params)[at].logprobs
        (alone,) = two.generate(PROMPTS[at : at + 1], params, speculate=False)
        assert len(batch) == 24
        assert batch == alone.logprobs
    assert two.engine.metrics.drafted > 0


def test_the_draft_is_on_the_leader_alone(two):
    runtime = two.engine.runtime
    drafter = let_draft(two, "draft-model:weights=int8,k=4")
    ours, (theirs,) = memory(runtime, drafter), runtime.leader.memory
    assert theirs["draft weights"] == theirs["draft KV"] == 0
    assert ours["draft weights"] > 10_000
    config = runtime.target.config
    pages = 2 * config.num_layers * runtime.kv.num_pages * runtime.page_size * config.head_dim
    assert ours["draft KV"] == pages * config.num_kv_heads * 2  # whole, in bfloat16
    assert ours["target KV"] == theirs["target KV"] == pages * config.num_kv_heads // 2 * 4
    assert abs(ours["target weights"] - theirs["target weights"]) < 4096  # the file's table
    # Nothing else of any size is alive there: not the draft under another name either.
    known = theirs["target weights"] + theirs["target KV"]
    assert known <= theirs["all tensors"] < known + 200_000


def test_the_end_is_told_behind_what_is_under_way():
    """A head's pass sends words of its own; broadcasts of two threads would be mixed up."""
    stream, told, go_on = Worker("pass"), [], threading.Event()
    stream.submit(Work("head", lambda: (go_on.wait(60), told.append("head"))))
    threading.Timer(0.2, go_on.set).start()
    parallel._end([], SimpleNamespace(send=told.append), stream)
    assert told == ["head", None]
    stream.close()


def test_what_ranks_share_lies_where_their_tensors_do():
    """NCCL takes no tensor of the host's."""
    shared: list[torch.Tensor] = []
    head = SimpleNamespace(
        ranks=SimpleNamespace(share=shared.append),
        config=SimpleNamespace(hidden_size=8), feature=lambda features: features,
    )  # fmt: skip
    layout = SimpleNamespace(page_table=[0, 1])
    batch = SimpleNamespace(tokens=[3, 4, 5], layout=layout, moves=torch.zeros(2, 0))
    ready = SimpleNamespace(batch=batch)
    runtime = SimpleNamespace(
        kv=object(), device=torch.device("meta"), plan=lambda words: ready, ran=ready,
        run_target=lambda ready: SimpleNamespace(features=torch.zeros(3, 8)),
        run_head=lambda *given: None, follow_target=lambda *given: None,
    )  # fmt: skip
    words = [np.array([0] * (HEADER - 1) + [what], np.int32) for what in (HEAD, TARGET, FOLLOW)]
    told = iter([*words, None])
    serve(runtime, SimpleNamespace(receive=lambda: next(told)), head)
    assert [(x.device.type, tuple(x.shape)) for x in shared] == [("meta", (3, 8)), ("meta", (5,))]


def test_tensors_on_cuda_are_exchanged_by_nccl_and_words_by_gloo(monkeypatch):
    made = []

    class NCCL:
        Options = SimpleNamespace

        def __init__(self, store, rank, world, options) -> None:
            made.append((rank, world, options._timeout.total_seconds()))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    group = Group(0, 1, "127.0.0.1", 0, 5.0, neighbours=1, device=torch.device("cuda", 0))
    words = group.words()
    assert isinstance(words, dist.ProcessGroupGloo)
    assert not made
    group.connect()
    assert made == [(0, 1, 10.0)]
    group.close()


def test_other_code_model_and_options_differ(tmp_path, monkeypatch):
    config = EngineConfig(model=str(model()), weights="f32", tensor_parallel=2)
    mine = identity(config)
    assert difference(mine, identity(config)) is None
    other = EngineConfig(model=str(tiny.write_model(tmp_path, seed=1)), weights="f32",
                         tensor_parallel=2)  # fmt: skip
    assert "other model files" in (difference(mine, identity(other)) or "")
    assert "other options" in (difference(mine, identity(config.with_(page_size=8))) or "")
    head = shutil.copytree(re.search("model=([^,]+)", heads.scheme("eagle"))[1], tmp_path / "head")
    few = tmp_path / "ids.json"
    few.write_text("[3, 4, 5]")
    one = config.with_(speculation=SpeculationConfig.parse(f"eagle:model={head},k=1"))
    some = one.with_(
        speculation=SpeculationConfig.parse(f"eagle:model={head},k=1,draft_vocab={few}")
    )
    more = config.with_(speculation=SpeculationConfig.parse(f"eagle:model={head},k=2"))
    before = [identity(each) for each in (one, some, more)]
    few.write_text("[3, 4, 6]")
    assert difference(before[0], identity(one)) is None
    assert "files of the draft head" in (difference(before[1], identity(some)) or "")
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "files of the draft head" in (difference(before[0], identity(one)) or "")
    assert difference(before[2], identity(more)) is None  # rank 0 alone reads it
    monkeypatch.setattr("foretell.__version__", "0.0.0")
    assert "other code" in (difference(mine, identity(config)) or "")
    assert "version of torch" in (difference(mine, mine | {"torch": "1.0"}) or "")
