"""K: what a drafter carries from step to step: KV, features, positions, and nothing of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foretell.llm import LLM
from foretell.sequence import Sequence
from foretell.spec.drafter import Ask, Commit, Needs
from tests import heads, tiny
from tests.fakes import Bushy, Scripted
from tests.faults.white_box import Clean, cells, start, steps

SELF = "draft-model:weights=target"
INT4 = "draft-model:weights=int4"
PROMPTS = tiny.prompts(7)


@pytest.fixture
def answers(monkeypatch) -> list[list[int]]:
    plain = tiny.plain(PROMPTS, tiny.greedy())
    known = {tuple(p): a for p, a in zip(PROMPTS, plain, strict=True)}
    monkeypatch.setattr(Scripted, "answers", known)
    return plain


def disturbed(llm: LLM, sequences: list[Sequence], seed: int = 0) -> Iterator[int]:
    """Steps with a forced preemption now and then."""
    rng = random.Random(seed)
    for step in steps(llm, sequences):
        yield step
        running = llm.engine.scheduler.running
        if len(running) > 1 and rng.random() < 0.3:
            llm.engine.scheduler._preempt(running[-1])


def rebuilt(clean: Clean, sequence: Sequence, budget: int, depth: int) -> tuple[Tensor, list[int]]:
    """Draft KV and proposal after a clean prefill of the same text."""
    copy, engine = clean.prefill(sequence.tokens[:-1]), clean.llm.engine
    assert copy.tokens == sequence.tokens
    assert engine.cache.reserve(copy, len(copy.tokens) + budget + 1)
    engine.runtime.set_pages(copy.slot, copy.pages)
    kv = cells(clean.llm, "draft", copy.pages, len(copy.tokens))
    return kv, engine.drafter.propose(Ask([copy], [budget], depths=[depth])).lists[0][0]


@pytest.mark.parametrize(
    "scheme",
    [f"{weights},k={k}" for weights in (SELF, INT4) for k in (1, 2, 3, 8)]
    + [f"{INT4},depth=4,topk=3,nodes=12", f"{SELF},tree=eagle", f"{INT4},tree=medusa"],
)
def test_K1_K2_draft_state_is_that_of_a_clean_rebuild(scheme, answers):
    """Before each round draft KV covers exactly the committed tokens, the root's included, and
    neither it nor the proposal shows that drafts were made, accepted or refused."""
    llm, clean = tiny.llm(scheme, max_num_seqs=3), Clean(scheme)
    drafter, propose, rounds = llm.engine.drafter, llm.engine.drafter.propose, [0, 0]

    def compare(ask: Ask):
        before = [
            cells(llm, "draft", sequence.pages, len(sequence.tokens)) for sequence in ask.sequences
        ]
        tree = propose(ask)
        asked = zip(ask.sequences, ask.budgets, ask.depths, strict=True)
        for b, (sequence, budget, depth) in enumerate(asked):
            slot = drafter._slots.get(sequence.slot)
            if slot is None:  # its first pass: a prefix hit left one token
                assert sequence.num_computed % 4 == 0
                continue
            assert slot.sequence is sequence
            assert slot.ready
            assert slot.filled == len(sequence.tokens)
            kv, proposal = rebuilt(clean, sequence, budget, depth)
            rounds[0] += 1
            rounds[1] += not torch.equal(before[b], kv)
            rounds[1] += tree.lists[b][0] != proposal
        return tree

    drafter.propose = compare
    sequences = start(llm, PROMPTS[:4], tiny.greedy(max_tokens=16))
    for _ in disturbed(llm, sequences):
        pass
    assert rounds[0] > 5
    assert rounds[1] == 0
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    assert [s.output for s in sequences] == [answer[:16] for answer in answers[:4]]


@pytest.mark.parametrize("k", range(1, 9))
def test_K1_a_target_drafting_for_itself_is_never_refused(k):
    llm = tiny.llm(f"{SELF},k={k}", max_num_seqs=3)
    sequences = start(llm, PROMPTS, tiny.sampled())
    for _ in disturbed(llm, sequences):
        pass
    assert all(s.stats.accepted == s.stats.drafted > 0 for s in sequences)
    assert llm.engine.scheduler.num_preemptions > 0


def test_K3_positions_are_places_in_the_text(answers):
    llm = tiny.llm(f"{INT4},k=4", max_num_seqs=3, max_num_batched_tokens=24)
    runtime, forward, forward_target = (
        llm.engine.runtime,
        llm.engine.runtime.forward,
        llm.engine.runtime.forward_target,
    )
    checked = {"draft": 0, "target": 0}
    last: dict[int, int] = {}  # by slot, where the draft's rows ended

    def check(group: str, rows, k: int) -> None:
        texts = {s.slot: s.tokens for s in llm.engine.scheduler.running}
        at: dict[int, int] = {}
        for slot, token, position, cell in zip(
            rows.slots, rows.tokens, rows.positions, rows.cells, strict=True
        ):
            text = texts[slot]
            if position < len(text):
                assert text[position] == token, f"{group}: another token stands at {position}"
            assert position == cell, "chains: each token has the cell of its place"
            assert position == at.get(slot, position - 1) + 1, "runs and chains have no gaps"
            assert position < len(text) + k
            if group == "draft" and position >= len(text):
                assert position in (len(text), last[slot] + 1), "drafts follow the root at once"
            at[slot] = position
            if group == "draft":
                last[slot] = position
            checked[group] += 1

    def draft(model, rows):
        check("draft", rows, 4)
        return forward(model, rows)

    def target(rows):
        check("target", rows, 4)
        return forward_target(rows)

    runtime.forward, runtime.forward_target = draft, target
    for _ in range(2):  # cold and with prefix hits
        sequences = start(llm, PROMPTS, tiny.greedy())
        for _ in disturbed(llm, sequences):
            pass
        assert [s.output for s in sequences] == answers
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    assert min(checked.values()) > 300
    assert llm.engine.scheduler.num_preemptions > 0


class Watcher(Bushy):
    """Keeps the features of every position it is shown."""

    needs = Needs(features=(0, -1), lookahead=1)

    def observe(self, commit: Commit) -> None:
        seen: dict[str, dict[int, tuple[int, int, Tensor]]] = self.__dict__.setdefault("seen", {})
        at = 0
        for sequence, first, tokens in zip(
            commit.sequences, commit.starts, commit.tokens, strict=True
        ):
            own = seen.setdefault(sequence.request_id, {})
            for i, (token, following) in enumerate(pairwise(tokens)):
                own[first + i] = (token, following, commit.features[at].clone())
                at += 1
        assert at == len(commit.features)


def reference(ids: list[int], seed: int = 0) -> Tensor:
    """[T, 2 * H]: output of layer 0 and of the final norm, by transformers, at one go."""
    from transformers import LlamaForCausalLM

    path = str(tiny.model("f32", seed).path)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        out = model.model(torch.tensor([ids]), output_hidden_states=True)
    return torch.cat([out.hidden_states[1][0], out.last_hidden_state[0]], dim=1)


@pytest.mark.parametrize("rows", [13, 512])
def test_K4_features_are_those_of_a_reference_forward(rows, answers):
    """Through chunked prompts, accepted tree paths, prefix hits, preemptions and endings."""
    llm = tiny.llm(f"{__name__}:Watcher,k=12", max_num_seqs=3, max_num_batched_tokens=rows)
    drafter, hits, accepted = llm.engine.drafter, 0, 0
    for stops in ([], [answers[0][20], answers[1][10]]):
        sequences = start(llm, PROMPTS, tiny.greedy(stop_token_ids=stops))
        for _ in disturbed(llm, sequences):
            pass
        for sequence in sequences:
            seen = drafter.seen[sequence.request_id]
            cached = sequence.stats.num_cached_tokens
            hits += cached
            accepted += sequence.stats.accepted
            # All that is final: everything but the last token, and what is final has a successor.
            assert sorted(seen) == list(range(min(seen), len(sequence.tokens) - 1))
            assert min(seen) <= cached, "each position was shown, or its page came from the cache"
            expected = reference(sequence.tokens)
            for position, (token, following, features) in seen.items():
                assert [token, following] == sequence.tokens[position : position + 2]
                torch.testing.assert_close(features, expected[position], atol=1e-4, rtol=1e-4)
    assert hits > 0
    assert accepted > 50
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error


def test_K4_with_lookahead_a_page_is_shared_if_the_next_token_agrees_too(answers):
    llm = tiny.llm(f"{__name__}:Watcher,k=4")
    prompt = list(range(2, 27))  # 6 pages and one token
    llm.generate([prompt], tiny.greedy())
    results = llm.generate([prompt, [*prompt[:24], 60]], tiny.greedy())
    assert [result.stats.num_cached_tokens for result in results] == [24, 20]


def traffic(llm: LLM, count: int, seed: int) -> None:
    """Varied requests: short and long, sampled and greedy, aborted, preempted, plain."""
    rng = random.Random(seed)
    prompts = tiny.prompts(count, seed=seed)
    for at in range(0, count, 20):
        sequences = []
        for prompt in prompts[at : at + 20]:
            params = tiny.sampled(
                seed=rng.randrange(1000), max_tokens=rng.randrange(1, 30), ignore_eos=False
            )
            sequences += start(llm, [prompt], params)
            sequences[-1].speculate = rng.random() < 0.8
        for _ in disturbed(llm, sequences, seed + at):
            if rng.random() < 0.2:
                llm.abort(rng.choice(sequences).request_id)


def probe(llm: LLM, prompt: list[int]) -> list[tuple[int, int, int]]:
    """(length, drafted, accepted) after each step."""
    (sequence,) = start(llm, [prompt], tiny.greedy(max_tokens=40))
    return [
        (len(sequence.tokens), sequence.stats.drafted, sequence.stats.accepted)
        for _ in steps(llm, [sequence])
    ]


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "scheme",
    [
        f"{INT4},k=4",
        "prompt-lookup:k=6,ngram_min=1",
        f"{heads.scheme('eagle-norms')},depth=3,topk=4,nodes=40",
        f"{heads.scheme('medusa')},k=40",
    ],
)
def test_K5_acceptance_does_not_depend_on_what_came_before(scheme, count):
    llm = tiny.llm(scheme, max_num_seqs=4, kv_memory="256KiB")
    prompt = [*tiny.prompts(1, seed=77)[0], 5, 6, 5]
    before = probe(llm, prompt)
    traffic(llm, count, seed=1)
    llm.engine.cache.clear()
    assert probe(llm, prompt) == before
    warm = probe(llm, prompt)  # with a prefix hit
    traffic(llm, count // 2, seed=2)
    assert probe(llm, prompt)[-1] in (warm[-1], before[-1])
    assert before[-1][2] > 0
    tiny.check_idle(llm)
