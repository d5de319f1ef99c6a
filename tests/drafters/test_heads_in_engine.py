"""Heads inside an engine: draft KV after every commit, prefix hits, preemption, off and on."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

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


def named(text: str) -> str:
    return text.split("/")[-1]


short = pytest.mark.parametrize("scheme", SCHEMES, ids=named)


def plain(
    prompts: list[list[int]], params: SamplingParams, weights: str = "f32"
) -> list[list[int]]:
    alone = tiny.llm(None, weights, max_num_seqs=1, prefix_caching=False)
    return tiny.ids(alone.generate(prompts, params))


def moves(llm: LLM) -> list[tuple[int, int]]:
    """From and to which logical cells accepted nodes are moved."""
    out, move = list[tuple[int, int]](), llm.engine.runtime.move

    def spy(slot: int, source: list[int], target: list[int]) -> None:
        out.extend(zip(source, target, strict=True))
        move(slot, source, target)

    llm.engine.runtime.move = spy
    return out


def known(llm: LLM, texts: list[list[int]], right: float, second: float = 0.0) -> None:
    """Makes the head's logits say what comes next in ``texts``, at that share of the places, and at
    another share that it comes next but one: the passes themselves, and so KV and features, stay
    as they are."""
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
            if at < len(whole) and (place := column.get(whole[at])) is not None:
                luck, best = random.Random(at).random(), logits[o].max()
                if luck < right:
                    logits[o, place] = best + 1e4
                elif luck < right + second:
                    logits[o, place] = best - 1e-3
        return logits, following

    runtime.forward_head = forward_head
    runtime.draft_chains = lambda *_: None  # level by level


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


@pytest.mark.parametrize(
    ("scheme", "weights"),
    [*((s, "f32") for s in SCHEMES), *((s, "int8") for s in SCHEMES[1:])],
    ids=named,
)
def test_draft_kv_is_that_of_a_clean_rebuild(scheme: str, weights: str) -> None:
    """Through chunked prompts, prefix hits, preemption and acceptance of every length, with
    accepted nodes of trees moved across page borders."""
    params = tiny.greedy(max_tokens=14)
    prompts = [*PROMPTS[:3], [*PROMPTS[2][:8], 9, 9], PROMPTS[2]]
    answers = plain(prompts, params, weights)
    texts = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    llm = tiny.llm(scheme, weights, max_num_seqs=3, max_num_batched_tokens=24)
    clean, across = Clean(scheme, weights), moves(llm)
    for engine in (llm, clean.llm):
        known(engine, texts, 0.5, 0.3)
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
    assert any(a // 4 != b // 4 for a, b in across) == scheme.endswith(TREE)
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error


@cache
def whole_vocabulary() -> str:
    """An EAGLE-3 head that may propose every token: others cannot always be right."""
    (path := Path(mkdtemp()) / "whole").mkdir()
    return f"eagle3:model={heads.write(*heads.eagle3(tiny.VOCAB), path)}"


@pytest.mark.parametrize(
    "scheme",
    [
        *(s for s in SCHEMES if not s.startswith("eagle3")),
        whole_vocabulary() + CHAIN,
        whole_vocabulary() + TREE,
    ],
    ids=named,
)
def test_a_head_that_is_always_right_gives_depth_plus_one(scheme: str) -> None:
    params = tiny.greedy(max_tokens=33)
    answers = plain(PROMPTS, params)
    llm = tiny.llm(scheme)
    known(llm, [[*p, *a] for p, a in zip(PROMPTS, answers, strict=True)], 1.0)
    results = llm.generate(PROMPTS, params)
    assert tiny.ids(results) == answers
    for result in results:  # one token from the prompt's pass, then 3 drafted and 1 more each
        assert result.stats.tau == pytest.approx(33 / 9)


def test_medusa_heads_that_are_always_right_give_depth_plus_one() -> None:
    params = tiny.greedy(max_tokens=33)
    answers = plain(PROMPTS, params)
    whole = {tuple(p): [*p, *a] for p, a in zip(PROMPTS, answers, strict=True)}
    llm = tiny.llm(f"{heads.scheme('medusa')},depth=3,topk=2,nodes=9")
    drafter, inner, asked = llm.engine.drafter, llm.engine.drafter.propose, list[Sequence]()

    def propose(ask: Ask) -> TokenTree:
        asked[:] = ask.sequences
        return inner(ask)

    def right(ahead: int) -> Callable[[Tensor], Tensor]:
        def head(features: Tensor) -> Tensor:
            logits = torch.zeros(len(features), tiny.VOCAB)
            for b, text in enumerate(asked):
                rest = whole[tuple(text.tokens[: text.num_prompt])][len(text.tokens) + ahead :]
                logits[b, rest[:1]] = 50.0
            return logits

        return head

    drafter.propose, drafter.heads = propose, [right(i) for i in range(3)]
    results = llm.generate(PROMPTS, params)
    assert tiny.ids(results) == answers
    for result in results:
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


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize("kind", ["eagle-norms", "eagle3"])
def test_past_its_own_context_a_head_rests(
    kind: str, shape: str, chunk: int, tmp_path: Path
) -> None:
    """Drafts up to the limit, none from there on, and no pass either; the text stays the same."""
    tensors, config = heads.MAKERS[kind]()
    limit = 30
    path = heads.write(tensors, config | {"max_position_embeddings": limit}, tmp_path)
    params = tiny.greedy(max_tokens=40)
    prompts = [list(range(2, 12)), list(range(3, 31)), [*range(4, 35), *range(4, 30)]]
    answers = plain(prompts, params)
    scheme = f"{kind.split('-')[0]}:model={path}{shape}"
    llm = tiny.llm(scheme, max_num_seqs=3, max_num_batched_tokens=chunk)
    known(llm, [[*p, *a] for p, a in zip(prompts, answers, strict=True)], 0.6)
    runtime, propose = llm.engine.runtime, llm.engine.drafter.propose
    inner, deepest, longest = runtime.forward_head, 0, 0

    def forward_head(head: Head, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal deepest
        assert len(rows) == len(features) > 0
        deepest = max(deepest, *rows.positions)
        return inner(head, rows, features)

    def ask(asked: Ask) -> TokenTree:
        nonlocal longest
        tree = propose(asked)
        for text, count in zip(asked.sequences, tree.num_drafted, strict=True):
            longest = max(longest, len(text.tokens) if count else 0)
        return tree

    runtime.forward_head, llm.engine.drafter.propose = forward_head, ask
    for _ in range(2):  # cold, and with pages that reach past the limit
        results = llm.generate(prompts, params)
        assert tiny.ids(results) == answers
    assert results[2].stats.num_cached_tokens > limit
    assert deepest == limit - 1
    assert limit - 3 <= longest < limit
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error


def test_a_head_without_a_limit_has_the_targets(tmp_path: Path) -> None:
    tensors, config = heads.eagle()
    path = heads.write(tensors, without_limit(config), tmp_path)
    assert tiny.llm(f"eagle:model={path}").engine.drafter.needs.max_positions == 512


def without_limit(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "max_position_embeddings"}


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
