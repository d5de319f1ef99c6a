"""Noise that depends on (request seed, position) alone: what makes speculation change no text.

Counter-based Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
key = seed, counter = (block of four words, position low, position high, stream). Whoever asks for
the noise of a position gets the same, whatever was drawn before, on any device: the logarithm is
written out in IEEE operations, so that every device rounds alike.

Stream 0 is the Gumbel noise of the token draw, argmax(log p + g); streams from 1 on are uniforms
for rules that accept and resample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.placed import put

TOKEN_STREAM = 0
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10. Words are int64 tensors holding 32 bits each, broadcast together.

    Args:
        counter: four words.
        key: two words.

    Returns:
        Four words.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(x0, _MULTIPLIERS[0])
        high1, low1 = _multiply(x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product; in halves, as int64 would overflow."""
    low = (x & 0xFFFF) * factor  # below 2**48
    high = (x >> 16) * factor + (low >> 16)  # below 2**49
    return high >> 16, ((high << 16) & _MASK) | (low & 0xFFFF)


def _words(
    seeds: Sequence[int], positions: Sequence[int], stream: int, count: int, device: torch.device
) -> Tensor:
    """[R, count] int64, 32 random bits each; word i is word i % 4 of block i // 4."""

    def column(values: list[int]) -> Tensor:
        return put(values, device, torch.int64).reshape(-1, 1)

    assert len(seeds) == len(positions)
    block = torch.arange(-(-count // 4), dtype=torch.int64, device=device)[None]
    place = column(list(positions))
    streams = torch.full_like(place, stream)
    key = column([s & _MASK for s in seeds]), column([(s >> 32) & _MASK for s in seeds])
    words = philox((block, place & _MASK, place >> 32, streams), key)
    return torch.stack(words, dim=-1).reshape(len(seeds), -1)[:, :count]


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float64, to about 1e-11 relative, near 1 too.

    Not torch.log: its last bits differ between devices and libraries. x = 2**k m with m around 1,
    log m = 2 atanh(s), s = (m - 1) / (m + 1), by its series.
    """
    bits = x.view(torch.int64)
    k = (bits >> 52) - 1023
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    large = m > math.sqrt(2)
    m = torch.where(large, m * 0.5, m)
    k = (k + large).double()
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = torch.full_like(z, 1 / 15)
    for n in (13, 11, 9, 7, 5, 3, 1):
        series = series * z + 1 / n
    return k * math.log(2) + (s + s) * series


def gumbel(
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard Gumbel noise of the token draw at (seed, position), from -3.14 to 22.88.

    -log(-log1p(-v)) with v = (word + 0.5) / 2**32, so that the largest values, which decide draws
    of unlikely tokens, have the finest steps.

    Args:
        seeds: R 64-bit integers.
        positions: R absolute positions of the tokens to draw.

    Returns:
        [R, vocab_size] float32. A token's noise does not depend on vocab_size.
    """
    words = _words(seeds, positions, TOKEN_STREAM, vocab_size, torch.device(device))
    rest = ((1 << 32) - 0.5 - words.double()) * 2.0**-32  # 1 - v, exact
    return (-log(-log(rest))).float()


def uniform(
    seeds: Sequence[int],
    positions: Sequence[int],
    stream: int,
    count: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Uniforms for (seed, position, stream), 53 bits each.

    Args:
        stream: 1 or more; 0 belongs to the token draw.

    Returns:
        [R, count] float64 in [0, 1).
    """
    assert 0 < stream <= _MASK
    words = _words(seeds, positions, stream, 2 * count, torch.device(device))
    high, low = words[:, 0::2] >> 5, words[:, 1::2] >> 6
    return (high * (1 << 26) + low).double() * 2.0**-53


def gumbel_argmax(logp: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The coupled draw: argmax(log p + gumbel), distributed as p (Gumbel 1954).

    Args:
        logp: [R, V] float32 log-probabilities or logits; -inf is never drawn.

    Returns:
        [R] int64; the first of equals. -1 for a row that holds NaN or nothing above -inf.
    """
    scores = logp + gumbel(seeds, positions, logp.shape[1], logp.device)
    broken = logp.isnan().any(1) | (logp == -torch.inf).all(1)
    return torch.where(broken, -1, scores.argmax(1))
