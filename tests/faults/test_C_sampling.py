"""Kinds C, E and N of the faults seen in the field, on sampling and verification alone.

Each rebuilds the setting of the report: what is drawn, token by token, must be what plain decoding
draws, whatever is drafted.
"""

from __future__ import annotations

import pytest
import torch

from foretell.runtime.sampling import History, Shape, draw, law, reason, shape_logits, tree_rows
from foretell.sequence import SamplingParams
from foretell.spec.tree import chains, from_lists
from foretell.spec.verify import Outcome, verify
from tests.spec.exact import Table, distance, emitted_law, plain_law
from tests.spec.toy import CHAIN, TREE, simulate

NAN, INF = float("nan"), float("inf")
CONTENT, EOS = 1, 0


def decode(
    params: SamplingParams,
    logits_of: list[list[float]],
    drafts: list[int],
    length: int,
    stop: tuple[int, ...] = (),
    rule: str = "coupled",
) -> list[int]:
    """A sequence over the Markov logits ``logits_of[last token]``; ``drafts`` says how many tokens
    of each step's draft are right, the rest being wrong."""
    shape = Shape(params, History([CONTENT]), stop)
    tokens = [CONTENT]
    for step in range(length):
        if len(tokens) > length:
            break
        guess: list[int] = []
        wanted = drafts[step % len(drafts)] if drafts else 0
        while len(guess) < wanted:  # the right guess: what plain decoding would draw
            guess.append(one(shape, logits_of, tokens, guess))
        if drafts:
            guess.append((one(shape, logits_of, tokens, guess) + 1) % len(logits_of))
        tree = chains([tokens[-1]], [guess])
        chain = tree.tokens[0].tolist()
        rows = tree_rows(shape, chain, tree.parents[0].tolist())
        shaped = shape_logits(torch.tensor([logits_of[token] for token in chain]), rows)
        positions = [len(tokens) + i for i in range(len(chain))]
        choices = draw(shaped, [params.greedy] * len(chain), [3] * len(chain), positions)
        p, coins = law(shaped, rows)[None], torch.full((1, len(chain)), 0.5)
        (out,) = verify(rule, tree, choices=choices[None], p=p, coins=coins)  # type: ignore[arg-type]
        gained = [chain[i] for i in out.path] + [out.next_token]
        if drafts and rule == "coupled":
            assert len(out.path) == wanted
        tokens += gained
        shape.history.extend(gained)
    return tokens[1 : length + 1]


def one(shape: Shape, logits_of: list[list[float]], tokens: list[int], guess: list[int]) -> int:
    text = [tokens[-1], *guess]
    row = tree_rows(shape, text, list(range(-1, len(guess))))[-1]
    shaped = shape_logits(torch.tensor([logits_of[text[-1]]]), [row])
    return int(draw(shaped, [shape.params.greedy], [3], [len(tokens) + len(guess)])[0])


def random_logits(vocab: int = 8, seed: int = 0) -> list[list[float]]:
    return (torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))).tolist()


MIXED = [[], [0], [3], [0, 1, 2, 3, 4]]  # no speculation, HOSTILE, SELF-like, MIXED


@pytest.mark.parametrize("sharp", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_C1_ratio_uses_the_law_that_was_drawn_from(sampled: bool, sharp: float):
    target, draft = Table(5, 1, sharp), Table(5, 2, sharp)
    law_, _ = emitted_law("rejection", [-1, 0, 1], target, draft, sampled=sampled)
    assert distance(law_, plain_law(target, 3)) < 1e-12


@pytest.mark.parametrize("kind", ["argmax", "sampled"])
@pytest.mark.parametrize("parents", [CHAIN, TREE])
def test_C2_excluded_tokens_never_come_out(kind: str, parents: tuple[int, ...]):
    for params, allowed in (
        (SamplingParams(top_k=2, temperature=2.0), 2),
        (SamplingParams(top_p=0.3, temperature=2.0), 3),
        (SamplingParams(top_k=1), 1),
    ):
        texts = simulate("rejection", kind, parents, params, 150)
        for place in range(3):
            for before in {text[:place] for text in texts}:
                after = {text[place] for text in texts if text[:place] == before}
                assert len(after) <= allowed


def test_C2_settings_of_one_batch_do_not_mix():
    logits = torch.tensor([[3.0, 2.9, 2.8, 2.7]] * 3)
    each = [SamplingParams(top_k=1), SamplingParams(top_k=2), SamplingParams(temperature=0)]
    rows = [tree_rows(Shape(params, History([1])), [1], [-1])[0] for params in each]
    seen = [set[int]() for _ in each]
    for seed in range(60):
        shaped = shape_logits(logits, rows)
        choices = draw(shaped, [p.greedy for p in each], [seed] * 3, [0] * 3).tolist()
        for group, choice in zip(seen, choices, strict=True):
            group.add(choice)
    assert seen == [{0}, {0, 1}, {0}]


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("k", [1, 4])
def test_C3_replacement_comes_from_the_refused_row(rule: str, k: int):
    """A target that counts: after token t only t + 1 is possible."""
    vocab = 40
    rows = torch.full((vocab, vocab), -INF)
    rows[torch.arange(vocab), (torch.arange(vocab) + 1) % vocab] = 0.0
    counting = rows.tolist()
    for right in ([0], [k - 1], list(range(k + 1))):
        out = decode(SamplingParams(), counting, right, 30, rule=rule)
        assert out == list(range(2, 32))


def test_C3_a_rule_that_looks_one_row_late_would_be_seen():
    late = [[0.0 if t == s + 2 else -INF for t in range(9)] for s in range(9)]
    assert decode(SamplingParams(), late, [0], 3) != [2, 3, 4]


@pytest.mark.parametrize("siblings", [1, 2, 4, 5])
@pytest.mark.parametrize("zeros", [0.0, 0.6])
def test_C5_siblings_keep_the_distribution(siblings: int, zeros: float):
    parents = [-1] + [0] * siblings + [n for n in range(1, siblings + 1) for _ in range(siblings)]
    target = Table(5, siblings, zeros=zeros)
    law_, _ = emitted_law("rejection", parents, target, Table(5, 40), sampled=False)
    assert distance(law_, plain_law(target, 3)) < 1e-12


def test_C5_repeated_and_exhausted_siblings_never_reach_a_residual_of_zero_mass():
    tree = from_lists([[0, 1, 1, 2, 0]], [[-1, 0, 0, 0, 0]])
    p = torch.tensor([[[0.0, 0.5, 0.5]] * 5])
    for coin in torch.linspace(0, 1 - 1e-9, 21, dtype=torch.float64).tolist():
        for last in (0.0, 1 - 2**-53):
            (out,) = verify("rejection", tree, p=p, coins=[[last, coin, coin, coin, coin]])
            assert not out.failed
            assert out.path in ([1], [3])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "setting",
    [
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -1.5},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
    ],
)
def test_E1_penalties_count_the_drafts_before_a_row_and_no_rejected_one(
    setting: dict[str, float], temperature: float
):
    params = SamplingParams(temperature=temperature, **setting)  # type: ignore[arg-type]
    texts = [decode(params, random_logits(24, 0), drafts, 64) for drafts in MIXED]
    assert all(text == texts[0] for text in texts)
    without = decode(SamplingParams(temperature=temperature), random_logits(24, 0), [], 64)
    assert texts[0] != without


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_E2_bias_and_min_p_hold_at_every_position(temperature: float):
    logits = random_logits(seed=2)
    plain = decode(SamplingParams(temperature=temperature), logits, [], 60)
    common = max(set(plain), key=plain.count)
    for drafts in MIXED:
        banned = SamplingParams(temperature=temperature, logit_bias={common: -100.0})
        assert common not in decode(banned, logits, drafts, 60)
        forced = SamplingParams(temperature=temperature, logit_bias={5: 100.0})
        assert set(decode(forced, logits, drafts, 60)) == {5}
        likeliest = SamplingParams(temperature=temperature, min_p=0.9)
        assert decode(likeliest, logits, drafts, 60) == decode(likeliest, logits, [], 60)


@pytest.mark.parametrize("drafts", MIXED)
def test_E3_end_is_banned_for_exactly_min_tokens(drafts: list[int]):
    always_end = [[9.0, 5.0, 0.0]] * 3
    for m in range(13):
        params = SamplingParams(temperature=0, min_tokens=m)
        out = decode(params, always_end, drafts, 16, stop=(EOS,))
        assert out.index(EOS) == m


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical", "threshold"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_N1_a_broken_target_row_fails_its_own_sequence(
    bad: float, temperature: float, rule: str, place: int
):
    """Root row, draft row, bonus row of the second of four sequences."""
    vocab, params = 4, SamplingParams(temperature=temperature)
    sure = torch.full((vocab,), -30.0)
    sure[2] = 30.0
    logits = sure.repeat(4, 3, 1)
    logits[1, place] = bad
    q = torch.zeros(4, 3, vocab)
    q[:, :, 2] = 1.0
    tree = chains([1] * 4, [[2, 2]] * 4, q)
    rows = tree_rows(Shape(params, History([1])), [1, 2, 2], [-1, 0, 1]) * 4
    shaped = shape_logits(logits.reshape(12, vocab), rows)
    choices = draw(shaped, [params.greedy] * 12, [1] * 12, [4] * 12).reshape(4, 3)
    p = law(shaped, rows).reshape(4, 3, vocab)
    coins = torch.full((4, 3), 0.5)
    out = verify(rule, tree, choices=choices, p=p, coins=coins)  # type: ignore[arg-type]
    assert out[0] == out[2] == out[3] == Outcome([1, 2], 2)
    assert out[1].failed
    assert out[1].next_token == -1
    assert out[1].path == [1, 2][:place]
    assert reason(shaped.reshape(4, 3, vocab)[1, place])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_N1_a_broken_draft_law_drops_its_drafts_and_never_the_text(bad: float, rule: str):
    p = torch.tensor([[[0.0, 0.0, 1.0]] * 3])
    q = torch.full((1, 3, 3), 1 / 3)
    q[0, 1, 0] = bad
    chain = chains([0], [[2, 2]], q)
    (out,) = verify(rule, chain, p=p, coins=[[0.9, 0.9, 0.9]])  # type: ignore[arg-type]
    assert out == Outcome([1], 2)


def test_N1_tokens_are_always_in_range():
    """Including draft tokens that the target excludes, with coins at both ends."""
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    q = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    for rule in ("rejection", "block"):
        for coin in (0.0, 1 - 2**-53):
            (out,) = verify(rule, chains([0], [[0]], q), p=p, coins=[[coin, coin]])  # type: ignore[arg-type]
            assert out == Outcome([], 1)
