"""Draft model over a tiny dense transformer: proposals, KV and positions against a clean rebuild.

Nothing here shows in the text, so it is looked at directly (faults K1, K2, K3, K5, I2, I3, M1, N1).
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from foretell.config import SpeculationConfig
from foretell.drafters.draft_model import DraftModel
from foretell.sequence import Sequence
from foretell.spec.drafter import Ask
from tests.drafters.tiny import (
    VOCAB,
    MemoryRuntime,
    advance,
    ask,
    chain,
    commit,
    loaded,
    sequence,
)

GREEDY, WARM = 0.0, 6.0  # the tiny net is so sure that noise hardly counts at 1


def build(runtime: MemoryRuntime | None = None, **options: str) -> DraftModel:
    config = SpeculationConfig(method="draft-model", k=5, options=options)
    return DraftModel(config, runtime or MemoryRuntime())


def rebuilt(text: Sequence, budget: int, sample: bool = False) -> tuple[list[int], torch.Tensor]:
    """Draft and draft KV of a drafter that sees the text for the first time."""
    drafter = build()
    copy = sequence(text.tokens, 0, text.seed, text.params.temperature)
    commit(drafter, (copy, len(copy.tokens)))
    kv = drafter.runtime.kv[0, :, : len(copy.tokens)].clone()
    return chain(drafter.propose(ask([copy], budget, sample))), kv


def new_tokens(draft: list[int], accept: int, rng: random.Random) -> list[int]:
    """What a target that accepts ``accept`` draft tokens adds: those and one other."""
    taken = draft[:accept]
    other = rng.randrange(VOCAB)
    if len(draft) > len(taken) and other == draft[len(taken)]:
        other = (other + 1) % VOCAB
    return [*taken, other]


@pytest.mark.parametrize(("temperature", "sample"), [(GREEDY, False), (WARM, False), (WARM, True)])
@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_proposals_and_kv_equal_a_clean_rebuild(k: int, temperature: float, sample: bool) -> None:
    rng = random.Random(k)
    drafter = build()
    text = sequence([3, 1, 4, 1, 5], slot=2, seed=7, temperature=temperature)
    commit(drafter, (text, 5))
    for turn in range(14):
        draft = chain(drafter.propose(ask([text], k, sample)))
        assert len(draft) == k
        clean, _ = rebuilt(text, k, sample)
        assert draft == clean
        # every acceptance from none to all; then text that owes nothing to the draft, and a draft
        # cut short by the engine, whose last token happens to be the target's own
        new = new_tokens(draft, turn % (k + 1), rng)
        if turn >= 10:
            new = [rng.randrange(VOCAB) for _ in range(k)] if turn % 2 else draft[: turn // 4]
        advance(drafter, [(text, new)])
        _, kv = rebuilt(text, 0)
        torch.testing.assert_close(drafter.runtime.kv[2, :, : len(text.tokens)], kv, rtol=0, atol=0)


def test_batches_chunks_and_mixed_progress() -> None:
    rng = random.Random(3)
    drafter = build()
    a, b, c = (sequence([rng.randrange(VOCAB) for _ in range(n)], i, i, WARM)
               for i, n in enumerate((5, 13, 2)))  # fmt: skip
    commit(drafter, (a, 5), (b, 5))  # b arrives in chunks of 4 while a decodes
    assert drafter.runtime.log[-1].outputs == [4], "no logits for a chunk with more to come"
    for end in (9, 13):
        assert drafter.propose(ask([a, b], 3)).num_drafted == [3, 0], "b is not ready"
        a.tokens.append(rng.randrange(VOCAB))
        commit(drafter, (a, len(a.tokens)), (b, end))
    commit(drafter, (c, 2))
    for turn in range(8):
        texts = [a, b, c]
        budgets = [turn % 4, 3, (turn + 1) % 3]
        tree = drafter.propose(Ask(texts, budgets))
        assert tree.num_drafted == budgets
        for i, text in enumerate(texts):
            assert chain(tree, i) == rebuilt(text, budgets[i])[0]
        grown = [(t, new_tokens(chain(tree, i), turn % 3, rng)) for i, t in enumerate(texts)]
        advance(drafter, grown)


def test_k_tokens_cost_k_forwards() -> None:
    drafter = build()
    text = sequence([1, 2, 3])
    commit(drafter, (text, 3))
    for accept in (4, 0, 4, 2):
        before = len(drafter.runtime.log)
        draft = chain(drafter.propose(ask([text], 4)))
        advance(drafter, [(text, new_tokens(draft, accept, random.Random(0)))])
        assert len(drafter.runtime.log) - before == 4
        # what was run as a draft is not run again: the last of a full draft never was
        assert len(drafter.runtime.log[-1]) == (2 if accept == 4 else 1)


def test_positions_and_cells_are_places_in_the_text() -> None:
    drafter = build()
    text = sequence([5, 6, 7], slot=1)
    commit(drafter, (text, 3))
    for accept in (2, 0, 3):
        drafter.runtime.log.clear()
        root = len(text.tokens) - 1
        draft = chain(drafter.propose(ask([text], 3)))
        advance(drafter, [(text, new_tokens(draft, accept, random.Random(accept)))])
        proposed, observed = drafter.runtime.log[:2], drafter.runtime.log[2]
        assert [rows.positions for rows in proposed] == [[root + 1], [root + 2]]
        assert [rows.tokens for rows in proposed] == [[draft[0]], [draft[1]]]
        assert observed.tokens == [text.tokens[p] for p in observed.positions]
        assert observed.positions[-1] == len(text.tokens) - 1
        for rows in drafter.runtime.log:
            assert rows.cells == rows.positions
            path = [ancestors.bit_count() for ancestors in rows.ancestors]
            seen = [sum(pair) for pair in zip(rows.prefix, path, strict=True)]
            assert seen == [p + 1 for p in rows.positions]
            assert set(rows.slots) == {1}


def test_prefix_hit_preemption_and_restart() -> None:
    drafter = build()
    tokens = [random.Random(9).randrange(VOCAB) for _ in range(20)]
    first = sequence(tokens, 0)
    commit(drafter, (first, 20))
    drafter.runtime.kv[3, :, :16] = drafter.runtime.kv[0, :, :16]  # shared pages
    second = sequence([*tokens[:16], 1, 2], 3)
    second.num_computed = 16
    commit(drafter, (second, 18))
    assert chain(drafter.propose(ask([second], 4))) == rebuilt(second, 4)[0]
    # preempted: forgotten, then run from its start in another slot
    drafter.forget([3])
    assert drafter.propose(ask([second], 4)).num_drafted == [0]
    second.slot, second.num_computed = 1, 0
    commit(drafter, (second, 18))
    assert chain(drafter.propose(ask([second], 4))) == rebuilt(second, 4)[0]
    # the same without a word about it, in the same slot
    second.num_computed = 0
    drafter.runtime.kv[1] = torch.nan
    commit(drafter, (second, 18))
    assert chain(drafter.propose(ask([second], 4))) == rebuilt(second, 4)[0]


def test_coupled_drafts_use_the_targets_noise_at_the_tokens_place() -> None:
    runtime = MemoryRuntime()
    drafter = build(runtime, weights="target")
    text = sequence([1, 2, 3], seed=11, temperature=WARM)
    commit(drafter, (text, 3))
    draft = chain(drafter.propose(ask([text], 5)))
    for i, token in enumerate(draft):  # the target drafting for itself is always right
        clean = build(weights="target")
        copy = sequence(text.tokens + draft[:i], temperature=WARM)
        commit(clean, (copy, 3 + i))
        noise = runtime.sampler_noise([11], [3 + i])[0]
        assert token == int((clean._carry[0] / WARM + noise).argmax())


def test_sampled_drafts_follow_their_probabilities() -> None:
    drafter = build()
    counts = torch.zeros(VOCAB)
    probs = torch.zeros(VOCAB)
    for seed in range(2000):
        text = sequence([1, 2, 3], seed=seed, temperature=1.5)
        commit(drafter, (text, 3))
        tree = drafter.propose(ask([text], 1, sample=True))
        assert tree.probs is not None
        probs = tree.probs[0, 0]
        counts[int(tree.tokens[0, 1])] += 1
    torch.testing.assert_close(probs, torch.softmax(drafter._carry[0] / 1.5, -1))
    common = probs > 0.002
    chi = ((counts - 2000 * probs) ** 2 / (2000 * probs))[common].sum()
    assert chi < 2 * VOCAB, "fixed seeds: no flakes"


def test_coins_are_new_in_every_round() -> None:
    drafter = build()
    text = sequence([1, 2, 3], seed=1, temperature=50.0)  # nearly uniform: coins decide
    commit(drafter, (text, 3))
    before = chain(drafter.propose(ask([text], 8, sample=True)))
    advance(drafter, [(text, [0])])
    after = chain(drafter.propose(ask([text], 8, sample=True)))
    assert sum(a == b for a, b in zip(before[1:], after, strict=False)) <= 3


def test_draft_context_limit(tiny_loader: dict[str, SimpleNamespace]) -> None:
    tiny_loader["short"] = loaded(seed=3, positions=12)
    drafter = build(model="short")
    assert drafter.needs.max_positions == 12
    long, other = sequence([1] * 8, 0), sequence([1, 2], 1)
    commit(drafter, (long, 8), (other, 2))
    sizes: list[int] = []
    for _ in range(9):
        drafted = drafter.propose(ask([long, other], 4)).num_drafted
        sizes.append(drafted[0])
        advance(drafter, [(long, [2]), (other, [3] if len(other.tokens) < 6 else [])])
    assert sizes == [4, 3, 2, 1, 0, 0, 0, 0, 0]
    assert all(max(rows.positions) < 12 for rows in drafter.runtime.log)
    drafter.forget([0])
    beyond = sequence([1] * 30, 0)  # a prompt longer than the draft can read
    commit(drafter, (beyond, 10))
    commit(drafter, (beyond, 20))
    commit(drafter, (beyond, 30))
    assert drafter.propose(ask([beyond, other], 4)).num_drafted == [0, 4]
    drafter.forget([0])
    after = sequence([4, 5, 6], 0)
    commit(drafter, (after, 3))
    assert drafter.propose(ask([after], 4)).num_drafted == [4]


@pytest.mark.parametrize("draft_vocab", [VOCAB - 6, VOCAB + 40])
@pytest.mark.parametrize("temperature", [GREEDY, WARM])
@pytest.mark.parametrize("sample", [False, True])
def test_padded_vocabularies(
    tiny_loader: dict[str, SimpleNamespace], draft_vocab: int, temperature: float, sample: bool
) -> None:
    tiny_loader["padded"] = loaded(seed=3, vocab_size=draft_vocab)
    drafter = build(model="padded")
    text = sequence([VOCAB - 1, 1, VOCAB - 2], temperature=temperature)  # ids the draft may lack
    commit(drafter, (text, 3))
    rng = random.Random(0)
    for _ in range(10):
        tree = drafter.propose(ask([text], 4, sample))
        assert tree.num_drafted == [4]
        assert all(0 <= token < min(draft_vocab, VOCAB) for token in chain(tree))
        assert tree.probs is None or tree.probs.shape[-1] == VOCAB
        advance(drafter, [(text, new_tokens(chain(tree), 2, rng))])


def test_another_vocabulary_is_refused(tiny_loader: dict[str, SimpleNamespace]) -> None:
    tiny_loader["foreign"] = loaded(names="other words")
    with pytest.raises(ValueError, match="vocabularies differ"):
        build(model="foreign")


@pytest.mark.parametrize("sample", [False, True])
def test_nan_drops_the_draft_and_it_comes_back(sample: bool) -> None:
    runtime = MemoryRuntime()
    drafter = build(runtime)
    text = sequence([1, 2, 3], temperature=WARM)
    runtime.spoil = {1}
    commit(drafter, (text, 3))
    assert drafter.propose(ask([text], 4, sample)).num_drafted == [0]
    advance(drafter, [(text, [4])])
    assert drafter.propose(ask([text], 4, sample)).num_drafted == [4]
    runtime.spoil = {len(runtime.log) + 2}
    advance(drafter, [(text, [5])])
    assert drafter.propose(ask([text], 4, sample)).num_drafted == [1]
    advance(drafter, [(text, [6])])
    assert chain(drafter.propose(ask([text], 4, sample))) == rebuilt(text, 4, sample)[0]


def test_probe_does_not_depend_on_traffic() -> None:
    def probe(drafter: DraftModel) -> list[list[int]]:
        text = sequence([9, 8, 7], 1)
        commit(drafter, (text, 3))
        out: list[list[int]] = []
        for turn in range(6):
            out.append(chain(drafter.propose(ask([text], 4))))
            advance(drafter, [(text, new_tokens(out[-1], turn % 5, random.Random(turn)))])
        drafter.forget([1])
        return out

    drafter, rng = build(), random.Random(5)
    first = probe(drafter)
    for i in range(60):
        slot = rng.randrange(4)
        text = sequence([rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))], slot, i)
        commit(drafter, (text, len(text.tokens)))
        if rng.random() < 0.8:
            tree = drafter.propose(ask([text], rng.randint(0, 5)))
            if rng.random() < 0.5:
                advance(drafter, [(text, new_tokens(chain(tree), rng.randint(0, 4), rng))])
        drafter.forget([slot])
    assert probe(drafter) == first
