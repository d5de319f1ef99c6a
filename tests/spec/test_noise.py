"""Position-keyed noise: known answers, distribution, and the fast draw against the plain one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foretell.runtime import noise_cpu
from foretell.spec import noise

SEEDS = [0, 1, -1, 2**63, 2**64 - 1, 123456789]


def words(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.int64) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]
) -> None:
    """The vectors published with Random123."""
    got = noise.philox(words(*counter), words(*key))
    assert tuple(int(word) for word in got) == want


def test_log_is_accurate() -> None:
    x = torch.cat(
        [
            torch.logspace(-11, 2, 5000, dtype=torch.float64),
            1 - torch.logspace(-11, -1, 5000).double(),
        ]
    )
    torch.testing.assert_close(noise.log(x), x.log(), rtol=1e-11, atol=0)


def test_the_smallest_exponentials_keep_their_precision() -> None:
    """g is -log(-log1p(-v)) for the very smallest v, where 1 - v in float32 would be 1."""
    rest = torch.tensor([2.0**32 - 0.5, 2.0**32 - 1.5], dtype=torch.float64) * 2.0**-32
    g = -noise.log(-noise.log(rest))
    assert math.isclose(g[0], 33 * math.log(2), rel_tol=1e-9)
    assert math.isclose(g[1], 33 * math.log(2) - math.log(3), rel_tol=1e-9)


def test_a_rows_noise_is_its_own() -> None:
    positions = [0, 7, 2**31, 2**32 + 5, 5, 10**6]
    together = noise.gumbel(SEEDS, positions, 50)
    for row, (seed, position) in enumerate(zip(SEEDS, positions, strict=True)):
        assert torch.equal(noise.gumbel([seed], [position], 50)[0], together[row])
        assert torch.equal(noise.gumbel([seed], [position], 43)[0], together[row, :43])
    # -1 and 2**64 - 1 are the same 64 bits, at other positions here
    assert len({tuple(row.tolist()) for row in together}) == len(SEEDS)
    same = noise.gumbel([-1, 2**64 - 1], [3, 3], 9)
    assert torch.equal(same[0], same[1])
    low, high = noise.gumbel([5, 5], [5, 2**32 + 5], 9)
    assert not torch.equal(low, high)


def test_streams_and_positions_are_independent() -> None:
    a = noise.uniform([3] * 400, list(range(400)), 1, 20).flatten()
    b = noise.uniform([3] * 400, list(range(400)), 2, 20).flatten()
    c = noise.uniform([3] * 400, list(range(1, 401)), 1, 20).flatten()
    d = noise.uniform([4] * 400, list(range(400)), 1, 20).flatten()
    for other in (b, c, d):
        assert abs(float(torch.corrcoef(torch.stack([a, other]))[0, 1])) < 4 / math.sqrt(len(a))


def test_uniform_is_uniform() -> None:
    x = noise.uniform(list(range(500)), [9] * 500, 1, 101)
    assert x.shape == (500, 101)
    assert x.dtype == torch.float64
    assert 0 <= x.min() < x.max() < 1
    assert stats.kstest(x.flatten().numpy(), "uniform").pvalue > 1e-3


def test_gumbel_is_gumbel() -> None:
    x = noise.gumbel([11] * 500, list(range(500)), 100)
    assert stats.kstest(x.flatten().numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("draw", [noise.gumbel_argmax, noise_cpu.gumbel_argmax])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_softmax(draw, temperature: float) -> None:
    torch.manual_seed(0)
    num = 20000
    logits = torch.randn(12) / temperature
    logits[3] = -torch.inf
    rows = logits.expand(num, 12).contiguous()
    counts = torch.bincount(draw(rows, [77] * num, list(range(num))), minlength=12)
    assert counts[3] == 0
    keep = torch.arange(12) != 3
    want = logits.softmax(0)[keep] * num
    assert (
        stats.chisquare(
            counts[keep].numpy(), want.double().numpy() * num / float(want.double().sum())
        ).pvalue
        > 1e-3
    )


@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 5000])
def test_the_compiled_gumbel_has_the_same_bits(vocab: int) -> None:
    positions = [0, 7, 2**31, 2**32 + 5, 5, 10**6]
    want = noise.gumbel(SEEDS, positions, vocab)
    assert torch.equal(noise_cpu.gumbel(SEEDS, positions, vocab), want)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab=st.sampled_from([1, 2, 50, 255, 256, 257, 1000, 3001]),
    spread=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0, 30.0, 1e4, 1e6, 1e30]),
    offset=st.sampled_from([0.0, -20.0, 1e3, -1e6, 1e8, -1e30]),
    steps=st.sampled_from([0.0, 0.5, 4.0]),
    banned=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_the_compiled_draw_is_the_plain_one(
    seed: int, vocab: int, spread: float, offset: float, steps: float, banned: float
) -> None:
    """Ties, rounding at large sizes, bans: the same token, always."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    logp = torch.randn(8, vocab, generator=generator) * spread + offset
    if steps:
        logp = (logp / steps).round() * steps
    logp[torch.rand(8, vocab, generator=generator) < banned] = -torch.inf
    positions = list(range(seed % 1000, seed % 1000 + 8))
    want = noise.gumbel_argmax(logp, [seed] * 8, positions)
    got = noise_cpu.gumbel_argmax(logp, [seed] * 8, positions)
    assert torch.equal(got, want)


def test_equal_scores_go_to_the_first_token() -> None:
    """At 1e30 the noise is below half an ulp: every likeliest token ties."""
    logp = torch.full((1, 600), -1e30)
    logp[0, [300, 17, 599]] = 1e30
    for draw in (noise.gumbel_argmax, noise_cpu.gumbel_argmax):
        assert draw(logp, [1], [2]).tolist() == [17]


def test_ties_made_by_rounding_go_to_the_first_token() -> None:
    """At 2**26 scores are multiples of 8: the likeliest token, looked at first, is often tied."""
    logp = torch.full((200, 600), 2.0**26)
    logp[:, 300] += 8
    seeds, positions = [3] * 200, list(range(200))
    want = noise.gumbel_argmax(logp, seeds, positions)
    assert (want < 256).any()
    assert torch.equal(noise_cpu.gumbel_argmax(logp, seeds, positions), want)


@pytest.mark.parametrize("draw", [noise.gumbel_argmax, noise_cpu.gumbel_argmax])
def test_broken_rows_say_so_and_touch_nobody(draw) -> None:
    torch.manual_seed(1)
    logp = torch.randn(6, 700)
    clean = draw(logp, [5] * 6, list(range(6)))
    logp[1, 699] = torch.nan
    logp[2] = -torch.inf
    logp[3, 400] = torch.inf
    logp[4, 0] = torch.nan
    got = draw(logp, [5] * 6, list(range(6))).tolist()
    assert got == [clean[0], -1, -1, 400, -1, clean[5]]


def test_a_draw_is_the_same_alone_and_in_a_batch() -> None:
    torch.manual_seed(2)
    logp = torch.randn(20, 3000) * 2
    seeds, positions = list(range(20)), list(range(100, 120))
    together = noise_cpu.gumbel_argmax(logp, seeds, positions)
    for row in range(20):
        alone = noise_cpu.gumbel_argmax(
            logp[row : row + 1], seeds[row : row + 1], positions[row : row + 1]
        )
        assert alone[0] == together[row]
