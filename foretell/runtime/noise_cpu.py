"""The noise of `foretell.spec.noise`, bit for bit, compiled for the CPU (so without fastmath).

Imported on first use, as numba is slow to import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import float32, int64, types, uint64
from torch import Tensor

from foretell.attention.jit import jit
from foretell.attention.kernels import exp

_CHUNK = 256
"""Tokens whose words are made at once; a multiple of 4."""
_MOST = np.float32(23.0)
"""More than any Gumbel noise: 33 ln 2 = 22.87."""
_LEAST = np.float32(3.2)
"""Gumbel noise is above minus this: log(33 ln 2) = 3.13."""
_LN2 = math.log(2)
_SQRT2 = math.sqrt(2)
_STEP = 2.0**-32


@jit(inline="always")
def _round(x0: Any, x1: Any, x2: Any, x3: Any, k0: Any, k1: Any) -> Any:
    a = np.uint64(x0) * np.uint64(0xD2511F53)
    b = np.uint64(x2) * np.uint64(0xCD9E8D57)
    return (
        np.uint32(np.uint32(b >> np.uint64(32)) ^ x1 ^ k0),
        np.uint32(b),
        np.uint32(np.uint32(a >> np.uint64(32)) ^ x3 ^ k1),
        np.uint32(a),
    )


@jit(inline="always")
def _philox(block: Any, position: Any, key: Any) -> Any:
    """Four words of stream 0."""
    x0, x1 = np.uint32(block), np.uint32(position)
    x2, x3 = np.uint32(position >> np.uint64(32)), np.uint32(0)
    k0, k1 = np.uint32(key), np.uint32(key >> np.uint64(32))
    w0, w1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
    for _ in range(9):  # unrolled by the compiler
        x0, x1, x2, x3 = _round(x0, x1, x2, x3, k0, k1)
        k0, k1 = np.uint32(k0 + w0), np.uint32(k1 + w1)
    return _round(x0, x1, x2, x3, k0, k1)


@jit()
def _words(words: Any, block: int, position: Any, key: Any) -> None:
    """Fills words [4 n] uint32 from ``block`` on."""
    for i in range(words.shape[0] // 4):
        w0, w1, w2, w3 = _philox(block + i, position, key)
        words[4 * i] = w0
        words[4 * i + 1] = w1
        words[4 * i + 2] = w2
        words[4 * i + 3] = w3


@jit()
def _log(x: Any) -> Any:
    """`foretell.spec.noise.log`, the same operations in the same order."""
    bits = np.float64(x).view(np.int64)
    k = (bits >> 52) - 1023
    m = np.int64((bits & ((1 << 52) - 1)) | (1023 << 52)).view(np.float64)
    large = m > _SQRT2
    m = m * 0.5 if large else m
    k = k + 1 if large else k
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = 1 / 15 * z + 1 / 13
    series = series * z + 1 / 11
    series = series * z + 1 / 9
    series = series * z + 1 / 7
    series = series * z + 1 / 5
    series = series * z + 1 / 3
    series = series * z + 1.0
    return np.float64(k) * _LN2 + (s + s) * series


@jit()
def _gumbel_of(word: Any) -> Any:
    rest = (4294967295.5 - np.float64(word)) * _STEP
    return np.float32(-_log(-_log(rest)))


@jit(types.void(float32[:, ::1], uint64[::1], uint64[::1]))
def _gumbel(out: Any, seeds: Any, positions: Any) -> None:
    words = np.empty(_CHUNK, np.uint32)
    vocab = out.shape[1]
    for row in range(out.shape[0]):
        for start in range(0, vocab, _CHUNK):
            _words(words, start // 4, positions[row], seeds[row])
            target = out[row, start : min(vocab, start + _CHUNK)]
            for i in range(target.shape[0]):
                target[i] = _gumbel_of(words[i])


@jit()
def add_gumbel(scores: Any, tokens: Any, seed: Any, position: Any) -> None:
    """Adds one position's noise to scores [Vd] of these tokens [Vd]; [0]: of the first Vd."""
    words, block = np.empty(4, np.uint32), -1
    for i in range(scores.shape[0]):
        token = tokens[i] if tokens.shape[0] else i
        if token // 4 != block:
            block = token // 4
            _words(words, block, np.uint64(position), seed)
        scores[i] += _gumbel_of(words[token % 4])


@jit(types.void(float32[:, ::1], int64[::1], uint64[::1], uint64[::1]))
def _gumbel_of_some(out: Any, tokens: Any, seeds: Any, positions: Any) -> None:
    for row in range(out.shape[0]):
        add_gumbel(out[row], tokens, seeds[row], positions[row])


@jit()
def maximum(x: Any, lanes: Any) -> Any:
    """Largest of x that is a number, or NaN if any is not one. In lanes, as that vectorises."""
    num_nan, whole = 0, x.shape[0] // 16 * 16
    for j in range(16):
        lanes[j] = -np.inf
    for i in range(0, whole, 16):
        part = x[i : i + 16]
        for j in range(16):
            num_nan += part[j] != part[j]
            lanes[j] = part[j] if part[j] > lanes[j] else lanes[j]
    for i in range(whole, x.shape[0]):
        num_nan += x[i] != x[i]
        lanes[0] = x[i] if x[i] > lanes[0] else lanes[0]
    top = lanes[0]
    for j in range(1, 16):
        top = lanes[j] if lanes[j] > top else top
    return np.float32(np.nan) if num_nan > 0 else top


@jit(types.void(float32[:, ::1], uint64[::1], uint64[::1], int64[::1]))
def _gumbel_argmax(logp: Any, seeds: Any, positions: Any, out: Any) -> None:
    words, hopes = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.uint8)
    lanes = np.empty(16, np.float32)
    vocab = logp.shape[1]
    tops = np.empty((vocab + _CHUNK - 1) // _CHUNK, np.float32)
    for row in range(logp.shape[0]):
        scores = logp[row]
        for chunk in range(tops.shape[0]):
            tops[chunk] = maximum(scores[chunk * _CHUNK : (chunk + 1) * _CHUNK], lanes)
        top = maximum(tops, lanes)
        out[row] = -1
        if not top > -np.inf:
            continue
        first = 0
        while tops[first // _CHUNK] != top:
            first += _CHUNK
        while scores[first] != top:
            first += 1
        out[row] = first
        if top == np.inf:
            continue
        # From the likeliest token's chunk around, so that a good `best` is known early; until then
        # it is the least that this token can reach.
        offset = first // _CHUNK
        best = top - _LEAST
        for step in range(tops.shape[0]):
            start = (step + offset) % tops.shape[0] * _CHUNK
            part = scores[start : min(vocab, start + _CHUNK)]
            # No logarithm for the hopeless. -log1p(-v) >= v, so g <= -log v, and a token can only
            # reach `best` if v <= exp(score - best), up to rounding: the slack is 8 ulp of `best`
            # and 0.001 for this line's own arithmetic.
            slack = np.float32(1e-3) + np.float32(1e-6) * abs(best)
            if (tops[start // _CHUNK] - best) + slack < -_MOST:
                continue
            _words(words, start // 4, positions[row], seeds[row])
            num_hopes = 0
            for i in range(part.shape[0]):
                room = (part[i] - best) + slack
                room = room if room < np.float32(1.0) else np.float32(1.0)
                hope = np.float32(words[i]) * np.float32(_STEP) <= exp(room)
                hopes[i] = hope
                num_hopes += hope
            if num_hopes == 0:
                continue
            for i in range(part.shape[0]):
                if hopes[i] and part[i] > -np.inf:
                    score = part[i] + _gumbel_of(words[i])
                    if score > best or (score == best and start + i < out[row]):
                        best = score
                        out[row] = start + i


def unsigned(values: Sequence[int]) -> Any:
    return np.array([value & (2**64 - 1) for value in values], np.uint64)


def gumbel(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, tokens: Tensor | None = None
) -> Tensor:
    """`foretell.spec.noise.gumbel` on the CPU: [R, vocab_size] float32, or its columns ``tokens``
    [Vd] int64."""
    keys = unsigned(seeds), unsigned(positions)
    if tokens is None:
        out = torch.empty(len(seeds), vocab_size)
        _gumbel(out.numpy(), *keys)
    else:
        out = torch.zeros(len(seeds), len(tokens))
        _gumbel_of_some(out.numpy(), tokens.numpy(), *keys)
    return out


def gumbel_argmax(logp: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """`foretell.spec.noise.gumbel_argmax` on the CPU, the same token for the same bits of logp.

    Args:
        logp: [R, V] float32 log-probabilities or logits; -inf is never drawn.

    Returns:
        [R] int64; the first of equals. -1 for a row that holds NaN or nothing above -inf.
    """
    out = torch.empty(logp.shape[0], dtype=torch.int64)
    scores = logp.detach().contiguous().numpy()
    _gumbel_argmax(scores, unsigned(seeds), unsigned(positions), out.numpy())
    return out
