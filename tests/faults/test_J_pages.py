"""J: KV pages, the prefix cache and preemption, looked at byte by byte."""

from __future__ import annotations

import random

import pytest
import torch

from foretell.spec.drafter import Ask
from tests import tiny
from tests.fakes import Mixed, Nodes, Scripted
from tests.faults.white_box import Clean, Witness, cells, start, steps

SELF = "draft-model:weights=target"
SHORT = {"max_model_len": 64, "kv_memory": "128KiB"}


def know(monkeypatch, prompts, params) -> list[list[int]]:
    """Plain answers, which scripted drafters are told too."""
    plain = tiny.plain(prompts, params)
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    monkeypatch.setattr(Scripted, "answers", answers)
    return plain


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "scheme", ["tests.fakes:Hostile,k=12", "tests.fakes:Bushy,k=12", f"{SELF},k=5"]
)
def test_J1_pages_of_drafts_come_back_at_once(scheme, page_size, monkeypatch):
    prompts = tiny.prompts(30)
    plain = know(monkeypatch, prompts, tiny.greedy(max_tokens=30))
    llm = tiny.llm(scheme, page_size=page_size, prefix_caching=False)
    cache, rng = llm.engine.cache, random.Random(0)
    initial = sorted(cache.free)
    k = llm.engine.k
    sequences = []
    for prompt, answer in zip(prompts, plain, strict=True):
        ends = [answer[rng.randrange(30)]] if rng.random() < 0.4 else []
        params = tiny.greedy(max_tokens=rng.randrange(1, 30), stop_token_ids=ends)
        sequences += start(llm, [prompt], params)
    reserve, most = cache.reserve, 0

    def bounded(sequence, num_cells):
        nonlocal most
        most = max(most, num_cells - len(sequence.tokens))
        return reserve(sequence, num_cells)

    cache.reserve = bounded
    for _ in steps(llm, sequences):
        for sequence in llm.engine.scheduler.running:
            assert len(sequence.pages) == cache.pages_for(len(sequence.tokens))
        if rng.random() < 0.2:
            llm.abort(rng.choice(sequences).request_id)
    assert 1 < most <= k + 1, "at most k drafts and the token after them"
    assert {s.finish_reason for s in sequences} == {"stop", "length", "abort"}
    llm._step()
    tiny.check_idle(llm)
    assert sorted(cache.free) == initial


@pytest.mark.parametrize("scheme", ["Mixed,k=6", "Bushy,k=20", "Hostile,k=9"])
def test_J2_rollback_over_a_page_border(scheme, monkeypatch):
    prompts, params = tiny.prompts(8), tiny.greedy(max_tokens=24)
    plain = know(monkeypatch, prompts, params)
    llm, clean = tiny.llm(f"tests.fakes:{scheme}", max_num_seqs=3), Clean(None)
    sequences = start(llm, prompts, params)
    borders = 0
    for _ in steps(llm, sequences):
        for sequence in llm.engine.scheduler.running:
            count = sequence.num_computed
            assert len(sequence.pages) == -(-len(sequence.tokens) // 4)
            assert not set(sequence.pages) & (
                set(llm.engine.cache.free) | set(llm.engine.cache.idle)
            )
            mine = cells(llm, "target", sequence.pages, count)
            assert torch.equal(mine, clean.cells("target", sequence.tokens[:count]))
            borders += count % 4 == 0
    assert borders > 3
    assert [s.output for s in sequences] == plain
    moved = any(s.stats.accepted for s in sequences)
    assert moved == ("Hostile" not in scheme)


class Narrow(Mixed):
    """Right for two tokens and then wrong."""

    def grow(self, nodes: Nodes, sequence, rng) -> None:
        right, node = self.truth(sequence, nodes.budget), 0
        for i, token in enumerate(right[:4]):
            node = nodes.add(node, token if i < 2 else (token + 1) % self.runtime.vocab_size)


class Wide(Narrow):
    """The same tree and more: wrong siblings, and the right way on."""

    def grow(self, nodes: Nodes, sequence, rng) -> None:
        super().grow(nodes, sequence, rng)
        for _ in range(3):
            self.scatter(nodes, rng, tuple(self.truth(sequence, 1)))
        node = min(2, len(self.truth(sequence, nodes.budget)))
        for token in self.truth(sequence, nodes.budget)[2:]:
            node = node and nodes.add(node, token)


def test_J2_a_wider_tree_is_never_worse(monkeypatch):
    prompts, params = tiny.prompts(6), tiny.greedy()
    plain = know(monkeypatch, prompts, params)
    tau = {}
    for name in ("Narrow", "Wide"):
        results = tiny.llm(f"{__name__}:{name},k=16").generate(prompts, params)
        assert tiny.ids(results) == plain
        tau[name] = [result.stats.tau for result in results]
    assert all(wide > narrow for narrow, wide in zip(tau["Narrow"], tau["Wide"], strict=True))


@pytest.mark.parametrize("k", range(3, 10))
def test_J3_no_write_leaves_its_own_pages(k, monkeypatch):
    prompts, params = tiny.prompts(6), tiny.greedy(max_tokens=24)
    plain = know(monkeypatch, prompts, params)
    # The pool is nearly full, so that neighbours are adjacent and scratch is scarce.
    tree = f"draft-model:weights=int4,depth=4,topk=3,nodes={3 * k}"
    for scheme in (SELF, tree, "tests.fakes:Bushy", "tests.fakes:Hostile"):
        own = "" if scheme == tree else f",k={k}"
        llm = tiny.llm(f"{scheme}{own}", max_num_seqs=4, **SHORT)
        witness = Witness(llm)
        results = llm.generate(prompts, params)
        assert tiny.ids(results) == plain
        assert tiny.ids(llm.generate(prompts, params)) == plain  # with shared pages
        assert witness.seen > 0
        if scheme == SELF:
            assert all(r.stats.accepted == r.stats.drafted > 0 for r in results)


def test_J3_cells_nobody_wrote_are_never_read(monkeypatch):
    """Memory that begins as NaN gives the same text: no masked or unwritten cell has weight."""
    prompts, params = tiny.prompts(6), tiny.greedy(max_tokens=24)
    plain = know(monkeypatch, prompts, params)
    for scheme in (f"{SELF},k=5", f"{SELF},tree=eagle", "tests.fakes:Bushy,k=20"):
        clean = tiny.llm(scheme).generate(prompts, params)
        llm = tiny.llm(scheme)
        for group in llm.engine.runtime.kv.layers.values():
            for layer in group:
                for cache in layer:
                    cache.fill_(torch.nan)
        results = llm.generate(prompts, params)
        assert tiny.ids(results) == plain
        # The draft's reads show in what was accepted only; Bushy draws its trees anew.
        assert "Bushy" in scheme or [r.stats.accepted for r in results] == [
            r.stats.accepted for r in clean
        ]


@pytest.mark.parametrize("seed", range(3))
def test_J4_the_order_of_pages_does_not_matter(seed, monkeypatch):
    shared = tiny.prompts(1, seed=4)[0] * 3
    prompts = [shared[: 20 + i] + tail for i, tail in enumerate(tiny.prompts(5, seed=seed))]
    plain = know(monkeypatch, prompts, tiny.greedy())
    for scheme in (f"{SELF},k=5", "tests.fakes:Bushy,k=20"):
        llm = tiny.llm(scheme, max_num_seqs=2)
        random.Random(seed).shuffle(llm.engine.cache.free)
        results = llm.generate(prompts, tiny.greedy())
        assert tiny.ids(results) == plain
        assert any(result.stats.num_cached_tokens for result in results)
        if scheme.startswith(SELF):
            assert all(r.stats.accepted == r.stats.drafted > 0 for r in results)


def test_J5_rejected_drafts_never_enter_the_prefix_cache(monkeypatch):
    prompts, params = tiny.prompts(5), tiny.greedy(max_tokens=21)
    plain = know(monkeypatch, prompts, params)
    llm = tiny.llm("tests.fakes:Hostile,k=12")
    trees: list[tuple[list[int], list[int]]] = []  # text so far, one rejected chain
    inner = llm.engine.drafter.propose

    def propose(ask: Ask):
        tree = inner(ask)
        for b, sequence in enumerate(ask.sequences):
            size, path, node = int(tree.sizes[b]), [], 0
            for i in range(1, size):
                if int(tree.parents[b, i]) == node:
                    path.append(int(tree.tokens[b, i]))
                    node = i
            trees.append((list(sequence.tokens), path))
        return tree

    llm.engine.drafter.propose = propose
    assert tiny.ids(llm.generate(prompts, params)) == plain
    cold = tiny.llm(prefix_caching=False)
    more = tiny.greedy(max_tokens=8)
    for prompt, answer in zip(prompts, plain, strict=True):
        text = [*prompt, *answer]
        (result,) = llm.generate([[*text, 5]], more, speculate=False)
        assert result.stats.num_cached_tokens == (len(text) - 1) // 4 * 4, (
            "its last token has no KV"
        )
        assert tiny.ids([result]) == tiny.ids(cold.generate([[*text, 5]], more))
    rejected = [(text, path) for text, path in trees if len(path) >= 5][:20]
    assert rejected
    llm = tiny.llm("tests.fakes:Hostile,k=12")
    assert tiny.ids(llm.generate(prompts, params)) == plain
    for text, path in rejected:
        llm.engine.drafter.propose = None  # a failing drafter drafts nothing
        before = llm.engine.cache.match(probe := _probe(text + path))
        llm.engine.cache.release(probe)
        assert before <= len(text), "KV of a rejected token was found"
        (result,) = llm.generate([text + path], more)
        assert tiny.ids([result]) == tiny.ids(cold.generate([text + path], more))


def _probe(tokens: list[int]):
    from foretell.sequence import SamplingParams, Sequence

    return Sequence("probe", list(tokens), SamplingParams(), seed=0)


@pytest.mark.parametrize(
    "scheme", [f"{SELF},k=5", "tests.fakes:Mixed,k=5", "tests.fakes:Bushy,k=5", "prompt-lookup:k=5"]
)
def test_J6_preempted_with_drafts_in_flight(scheme, monkeypatch):
    prompts, params = tiny.prompts(8, longest=30), tiny.sampled(max_tokens=30)
    plain = know(monkeypatch, prompts, params)
    for seed in range(4):
        llm = tiny.llm(
            scheme,
            max_num_seqs=4,
            max_model_len=64,
            kv_memory="44KiB" if "draft" in scheme else "22KiB",
        )
        assert llm.engine.cache.num_pages == 22, "about 1.3 requests fit"
        forward, vocab = llm.engine.runtime.forward_target, llm.engine.runtime.vocab_size

        def legal(rows, forward=forward, vocab=vocab):
            assert all(0 <= token < vocab for token in rows.tokens)
            return forward(rows)

        llm.engine.runtime.forward_target = legal
        rng = random.Random(seed)
        sequences = start(llm, prompts, params)
        for _ in steps(llm, sequences):
            running = llm.engine.scheduler.running
            if len(running) > 1 and rng.random() < 0.15:
                llm.engine.scheduler._preempt(running[-1])
        assert [s.output for s in sequences] == plain
        assert llm.engine.scheduler.num_preemptions > 3
        assert (
            sum(s.stats.num_preemptions for s in sequences) == llm.engine.scheduler.num_preemptions
        )
        if scheme.startswith(SELF):
            assert all(s.stats.accepted == s.stats.drafted for s in sequences)
        tiny.check_idle(llm)


@pytest.mark.parametrize(
    "scheme",
    [
        f"{SELF},k=4",
        "draft-model:weights=int4,k=4",
        "draft-model:weights=int4,depth=4,topk=3,nodes=12",
        "prompt-lookup:k=4,ngram_min=1",
    ],
)
def test_J7_a_prefix_hit_costs_no_acceptance(scheme):
    shared = tiny.prompts(1, seed=2, longest=40)[0] * 10
    prompts = [shared[:128] + tail for tail in tiny.prompts(10, seed=3, longest=12)]
    alone = {"max_num_seqs": 1}  # nobody else's prompt then keeps drafts away
    cold = tiny.llm(scheme, prefix_caching=False, **alone).generate(prompts, tiny.greedy())
    warm_llm = tiny.llm(scheme, **alone)
    warm_llm.generate([prompts[0]], tiny.greedy())
    warm = warm_llm.generate(prompts, tiny.greedy())
    for one, other in zip(cold, warm, strict=True):
        assert one.token_ids == other.token_ids
        assert other.stats.num_cached_tokens >= 128 > one.stats.num_cached_tokens == 0
        if "draft-model" in scheme:
            for name in ("drafted", "accepted", "num_passes", "accepted_by_position"):
                assert getattr(one.stats, name) == getattr(other.stats, name), name
        # Lookup may even draft in the pass that a hit has reduced to the last prompt token.
        assert other.stats.num_passes <= one.stats.num_passes
    rate = [
        sum(r.stats.accepted for r in part) / sum(r.stats.drafted for r in part)
        for part in (cold, warm)
    ]
    assert rate[1] >= 0.95 * rate[0] > 0


def test_J7_plain_requests_leave_no_pages_that_lack_draft_entries():
    """A page is shared only if the drafter has seen it: ACC after plain traffic stays 1."""
    prompt = tiny.prompts(1, seed=5)[0] * 4
    llm = tiny.llm(f"{SELF},k=4")
    llm.generate([prompt], tiny.greedy(), speculate=False)
    (result,) = llm.generate([prompt], tiny.greedy())
    assert result.stats.accepted == result.stats.drafted > 0
