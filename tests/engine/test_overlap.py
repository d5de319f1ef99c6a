"""A stream beside the host changes when things happen and nothing else: texts, acceptance, draft KV,
pages. Both schedules, on one rank."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from foretell.engine import one_token
from foretell.llm import LLM
from foretell.runtime.stream import Worker
from foretell.sequence import FinishReason
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


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_same_text_and_acceptance(scheme, name):
    alone, llm = make(scheme, name), beside(make(scheme, name))
    for _ in range(2):  # the second time with pages of the first
        expected = alone.generate(PROMPTS, SETTINGS[name])
        results = llm.generate(PROMPTS, SETTINGS[name])
        assert tiny.ids(results) == plain(name)
        for one, other in zip(results, expected, strict=True):
            assert one.stats.accepted_by_position == other.stats.accepted_by_position
            assert one.stats.drafted_by_position == other.stats.drafted_by_position
            assert one.from_draft == other.from_draft
            assert one.stats.num_cached_tokens == other.stats.num_cached_tokens
        tiny.check_idle(settled(llm))
    failed = llm.engine.metrics.drafter_errors, alone.engine.metrics.drafter_errors
    assert failed[0] == failed[1], llm.engine.metrics.last_drafter_error
