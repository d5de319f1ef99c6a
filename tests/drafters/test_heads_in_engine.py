"""Heads inside an engine: draft KV after every commit, prefix hits, preemption, off and on."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foretell.llm import LLM
from foretell.models.head import Head
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.drafter import Ask, Rows
from foretell.spec.tree import TokenTree
from tests import heads, tiny
from tests.faults.white_box import Clean, cells, start, steps

PROMPTS = tiny.prompts(7)
CHAIN, TREE = ",k=3", ",depth=3,topk=3,nodes=10"
SCHEMES = [
    *(heads.scheme(kind) + CHAIN for kind in heads.LAYERED),
    *(heads.scheme(kind) + TREE for kind in ("eagle-norms", "eagle3", "mtp-deepseek")),
]
short = pytest.mark.parametrize("scheme", SCHEMES, ids=[s.split("/")[-1] for s in SCHEMES])


def plain(prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return tiny.ids(tiny.llm(max_num_seqs=1, prefix_caching=False).generate(prompts, params))


def known(llm: LLM, texts: list[list[int]], right: float) -> None:
    """Makes the head's logits say what comes next in ``texts``, at that share of the places: the
    passes themselves, and so KV and features, stay as they are."""
    runtime, scheduler = llm.engine.runtime, llm.engine.scheduler
    inner = runtime.forward_head

    def forward_head(head: Head, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
        logits, following = inner(head, rows, features)
        now = {s.slot: s.tokens for s in scheduler.running}
        ids = llm.engine.drafter.vocab.ids
        column = {
            token: i for i, token in enumerate(range(tiny.VOCAB) if ids is None else ids.tolist())
        }
        for o, r in enumerate(rows.outputs):
            have, at = now[rows.slots[r]], rows.positions[r] + 2
            [whole] = [text for text in texts if text[: len(have)] == have][:1]
            if at < len(whole) and whole[at] in column and random.Random(at).random() < right:
                logits[o, column[whole[at]]] = logits[o].max() + 1e4
        return logits, following

    runtime.forward_head = forward_head


def rebuilt(clean: Clean, text: Sequence, budget: int, depth: int) -> tuple[Tensor, list[int]]:
    """Draft KV and proposal after a clean prefill of the same text."""
    copy, engine = clean.prefill(text.tokens[:-1]), clean.llm.engine
    assert copy.tokens == text.tokens
    assert engine.cache.reserve(copy, len(copy.tokens) + budget + 1)
    engine.runtime.set_pages(copy.slot, copy.pages)
    kv = cells(clean.llm, "draft", copy.pages, len(copy.tokens) - 1)
    return kv, engine.drafter.propose(Ask([copy], [budget], depths=[depth])).tokens[0].tolist()


def watch(llm: LLM, clean: Clean) -> list[int]:
    """Compares each proposal and the KV before it with a rebuild: [rounds, differences]."""
    drafter, propose, rounds = llm.engine.drafter, llm.engine.drafter.propose, [0, 0]

    def compare(ask: Ask) -> TokenTree:
        before = [cells(llm, "draft", s.pages, len(s.tokens) - 1) for s in ask.sequences]
        tree = propose(ask)
        for b, (text, budget) in enumerate(zip(ask.sequences, ask.budgets, strict=True)):
            slot = drafter._slots.get(text.slot)
            if slot is None or slot.sequence is not text:  # its first pass, behind a prefix hit
                assert text.num_computed % 4 == 0
                continue
            assert slot.filled == len(text.tokens) - 1
            kv, proposal = rebuilt(clean, text, budget, ask.depths[b])
            rounds[0] += 1
            rounds[1] += not torch.equal(before[b], kv)
            rounds[1] += tree.tokens[b, : int(tree.sizes[b])].tolist() != proposal
        return tree

    drafter.propose = compare
    return rounds


@short
def test_draft_kv_is_that_of_a_clean_rebuild(scheme: str) -> None:
    """Through chunked prompts, prefix hits, preemption and acceptance of every length."""
    params = tiny.greedy(max_tokens=14)
    prompts = [*PROMPTS[:3], [*PROMPTS[2][:8], 9, 9], PROMPTS[2]]
    answers = plain(prompts, params)
    texts = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    llm, clean = tiny.llm(scheme, max_num_seqs=3, max_num_batched_tokens=24), Clean(scheme)
    known(llm, texts, 0.6)
    known(clean.llm, texts, 0.6)
    rounds = watch(llm, clean)
    rng, hits, accepted = random.Random(0), 0, 0
    for _ in range(2):
        sequences = start(llm, prompts, params)
        for _ in steps(llm, sequences):
            running = llm.engine.scheduler.running
            if len(running) > 1 and rng.random() < 0.3:
                llm.engine.scheduler._preempt(running[-1])
        assert [s.output for s in sequences] == answers
        hits += sum(s.stats.num_cached_tokens for s in sequences)
        accepted += sum(s.stats.accepted for s in sequences)
    assert rounds[0] > 20
    assert rounds[1] == 0
    assert hits > 0
    assert accepted > 10
    assert llm.engine.scheduler.num_preemptions > 0
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error


# A head with a reduced vocabulary cannot always be right.
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if not s.startswith("eagle3")])
def test_a_head_that_is_always_right_gives_depth_plus_one(scheme: str) -> None:
    params = tiny.greedy(max_tokens=33)
    answers = plain(PROMPTS, params)
    llm = tiny.llm(scheme)
    known(llm, [[*p, *a] for p, a in zip(PROMPTS, answers, strict=True)], 1.0)
    results = llm.generate(PROMPTS, params)
    assert tiny.ids(results) == answers
    for result in results:  # one token from the prompt's pass, then 3 drafted and 1 more each
        assert result.stats.tau == pytest.approx(33 / 9)


@short
def test_speculation_off_and_on_in_the_middle(scheme: str) -> None:
    """A scheme that was off goes on as if it had never been: it watched."""
    params = tiny.greedy(max_tokens=24)
    answers = plain(PROMPTS[:4], params)
    texts = [[*p, *a] for p, a in zip(PROMPTS, answers, strict=False)]
    llm, clean = tiny.llm(scheme, max_num_seqs=3), Clean(scheme)
    known(llm, texts, 0.6)
    known(clean.llm, texts, 0.6)
    rounds = watch(llm, clean)
    nodes, drafted = llm.engine.k, []
    sequences = start(llm, PROMPTS[:4], params)
    for step in steps(llm, sequences):
        llm.engine.drafting.k = 0 if step // 3 % 2 else nodes
        drafted.append(sum(s.stats.drafted for s in sequences))
    assert [s.output for s in sequences] == answers
    assert rounds[0] > 5
    assert rounds[1] == 0
    pauses = sum(a == b for a, b in pairwise(drafted))
    assert 3 < pauses < len(drafted) - 3


@short
def test_a_page_whose_last_pair_is_another_is_not_shared(scheme: str) -> None:
    """Prompts that differ in the token right behind a page: that page's last pair is another."""
    params = tiny.greedy(max_tokens=6)
    first = [*range(2, 14), 20, 21, 22]  # pages of 4: the third one ends before token 12
    second = [*range(2, 14), 30, 31, 32]
    answers = plain([second], params)
    llm, clean = tiny.llm(scheme), Clean(scheme)
    rounds = watch(llm, clean)
    llm.generate([first], params)
    (result,) = llm.generate([second], params)
    assert [result.token_ids] == answers
    assert result.stats.num_cached_tokens == 8
    assert rounds[0] >= 5
    assert rounds[1] == 0


def test_a_broken_head_costs_drafts_and_no_text() -> None:
    answers = plain(PROMPTS, tiny.sampled())
    llm = tiny.llm(heads.scheme("eagle") + CHAIN)
    runtime, inner, calls = llm.engine.runtime, llm.engine.runtime.forward_head, [0]

    def forward_head(head: Head, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        logits, following = inner(head, rows, features)
        return (
            (logits * torch.nan, following * torch.nan)
            if calls[0] % 3 == 0
            else (logits, following)
        )

    runtime.forward_head = forward_head
    assert tiny.ids(llm.generate(PROMPTS, tiny.sampled())) == answers
    assert not llm.engine.metrics.drafter_errors
