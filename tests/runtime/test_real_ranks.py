"""The default model over three gloo ranks, as it has nine heads, in float32: whatever drafts, the
text is that of one rank. And ranks that torchrun has started, on one node and on two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from foretell.bench.workloads import default_workload
from foretell.config import EngineConfig
from foretell.llm import LLM
from foretell.models.frozen import FrozenTarget
from foretell.models.hub import is_cached
from foretell.models.trainable_files import head_config, head_tensors
from foretell.models.trainable_new import new_head
from foretell.sequence import SamplingParams
from tests import heads, tiny
from tests.runtime import ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
real = pytest.mark.skipif(
    not is_cached(EngineConfig.model), reason="the default model is not here: foretell pull smollm2"
)
OPTIONS: dict[str, Any] = {
    "weights": "f32", "kv_memory": "128MiB", "max_model_len": 512, "max_num_seqs": 4,
    "threads": 3, "rank_timeout": 300.0,
}  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
]
LEADERS = ["prompt-lookup:k=6,ngram_min=1", "draft-model:weights=int4,k=3", "eagle:k=3",
           "eagle3:tree=medusa", "medusa:k=3", "mtp:k=2"]  # fmt: skip
SPREAD = ["eagle:k=1", "eagle3:k=1", "mtp:k=1"]


@cache
def mtp() -> Path:
    """A module that has learnt nothing yet: no checkpoint of this model has one."""
    head = new_head("mtp", FrozenTarget.open(EngineConfig.model))
    return heads.write(head_tensors(head), head_config(head), Path(mkdtemp()))


def scheme(text: str) -> str:
    return tiny.fixed(text.replace("mtp:", f"mtp:model={mtp()},")) or ""


@cache
def prompts(llm: LLM) -> list[list[int]]:
    asked = [conversation.turns[0] for conversation in default_workload()[::12]][:3]
    asked += ["Say ten times: the quick brown fox jumps over the lazy dog."]
    return [llm.chat_prompt([{"role": "user", "content": text}])[-120:] for text in asked]


@cache
def one() -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts, and the answers of one rank without drafts."""
    llm = LLM(**OPTIONS)
    asked = prompts(llm)
    return asked, [tiny.ids(llm.generate(asked, params)) for params in PARAMS]


def same_text(llm: LLM) -> None:
    asked, expected = one()
    for params, answers in zip(PARAMS, expected, strict=True):
        assert tiny.ids(llm.generate(asked, params)) == answers
    metrics = llm.engine.metrics
    assert metrics.drafted > 0
    assert metrics.drafter_errors == 0, metrics.last_drafter_error


@real
def test_the_text_of_one_rank_whatever_the_first_one_drafts():
    asked, expected = one()
    with LLM(**OPTIONS, tensor_parallel=3) as three:
        for params, answers in zip(PARAMS, expected, strict=True):
            assert tiny.ids(three.generate(asked, params)) == answers
        accepted = {}
        for text in LEADERS:
            ranks.let_draft(three, scheme(text))
            same_text(three)
            accepted[text] = three.engine.metrics.accepted
        assert all(accepted[text] > 0 for text in LEADERS if "mtp" not in text), accepted


@real
@pytest.mark.parametrize("text", SPREAD)
def test_the_text_of_one_rank_with_a_head_that_is_spread(text):
    with LLM(**OPTIONS, tensor_parallel=3, speculation=scheme(text)) as three:
        assert three.engine.drafter.head.ranks is not None
        same_text(three)


PROGRAM = """
import json, sys
from foretell.llm import LLM
from tests import tiny
from tests.runtime.ranks import OPTIONS
model, world, scheme = sys.argv[1:]
with LLM(
    model, **OPTIONS, tensor_parallel=int(world), speculation=scheme, rank_timeout=120.0
) as llm:
    print(json.dumps(tiny.ids(llm.generate(tiny.prompts(5), tiny.sampled(max_tokens=24)))))
    assert llm.engine.metrics.drafted > 0
"""


@pytest.mark.parametrize(("nodes", "each"), [(2, 1), (1, 4)])
@pytest.mark.parametrize("kind", ["draft-model", "eagle"])
def test_torchrun_starts_ranks(nodes, each, kind, tmp_path):
    """On several nodes, too: an agent each. The model has two KV heads, so that of four ranks two
    have the same one."""
    text = {
        "draft-model": "draft-model:weights=int4,k=3",
        "eagle": f"{heads.scheme('eagle')},k=1",
    }[kind]
    (program := tmp_path / "program.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
             f"--nproc-per-node={each}", f"--node-rank={node}", "--master-addr=127.0.0.1",
             f"--master-port={port}", str(program), str(ranks.model()), str(nodes * each),
             tiny.fixed(text)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        for node in range(nodes)
    ]  # fmt: skip
    told = [each.communicate() for each in started]
    assert [each.returncode for each in started] == [0] * nodes, told
    alone = LLM(str(ranks.model()), **ranks.OPTIONS)
    expected = tiny.ids(alone.generate(tiny.prompts(5), tiny.sampled(max_tokens=24)))
    assert "".join(out for out, _ in told).strip() == str(expected)
